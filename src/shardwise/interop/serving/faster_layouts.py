"""Layouts of a launch's devices on which its requests are answered sooner, with the options that change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardwise.interop.serving.nearest_launch import same_size_layouts
from shardwise.interop.serving.read_serving import ReadServing
from shardwise.serve import Prediction, ServingEstimate, ServingLayout, estimate_serving
from shardwise.values import InputError

MAX_CANDIDATES = 100  # layouts that are priced, the nearest first
MAX_LISTED = 3
LEAST_GAIN = 0.02  # share of the time of a request below which a layout is no faster, as two predictions tell


@dataclass(frozen=True, slots=True, kw_only=True)
class FasterServingLayout:
    """A layout of the same devices: options that change with their new values (None: left out), and what it gives."""

    layout: ServingLayout
    options: Mapping[str, Any]
    ttft_s: Prediction
    tpot_s: Prediction
    request_s: float


def list_faster_layouts(reading: ReadServing, estimate: ServingEstimate) -> Sequence[FasterServingLayout]:
    """Return the layouts of as many devices that answer a request sooner under the same load, the soonest first.

    Only layouts that the engine runs and that fit are listed; limits and formats stay. Nothing is listed where an option changes
    the memory without being priced.
    """
    engine, launch = reading.engine, reading.launch
    if not reading.memory_is_known:
        return ()
    candidates = sorted(same_size_layouts(launch), key=lambda candidate: candidate[0])[:MAX_CANDIDATES]
    faster = []
    for _, layout in candidates:
        candidate = replace(launch, layout=layout)
        if layout == launch.layout or engine.violations(candidate):
            continue
        try:
            priced = estimate_serving(estimate.problem, layout)
        except InputError:
            continue  # the cluster, or the engine that is priced, does not have it
        if priced.memory.verdict == "fits" and priced.request_s < (1 - LEAST_GAIN) * estimate.request_s:
            faster.append(priced)
    before = engine.to_options(launch)
    listed = sorted(faster, key=lambda priced: priced.request_s)[:MAX_LISTED]
    return [
        FasterServingLayout(
            layout=priced.layout, options=_changes(before, engine.to_options(replace(launch, layout=priced.layout))),
            ttft_s=priced.ttft_s, tpot_s=priced.tpot_s, request_s=priced.request_s,
        )
        for priced in listed
    ]  # fmt: skip


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the options that differ, with their new values; None for one that is left out."""
    return {name: after.get(name) for name in {**before, **after} if before.get(name) != after.get(name)}
