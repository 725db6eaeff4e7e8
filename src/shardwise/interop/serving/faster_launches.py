"""Changes of a launch on the same devices with which its requests are answered sooner: of the layout, of limits, of formats."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardwise.hardware import Chip
from shardwise.interop.serving.checkpoints import is_folder_name, name_checkpoint
from shardwise.interop.serving.nearest_launch import same_size_layouts
from shardwise.interop.serving.read_serving import ReadServing
from shardwise.interop.serving.serving_launch import ServingLaunch
from shardwise.serve import (
    BatchLimits,
    PooledEstimate,
    Prediction,
    ServingEstimate,
    ServingFormats,
    ServingLayout,
    estimate_serving,
    get_serving_engine,
)
from shardwise.values import InputError

MAX_CANDIDATES = 100  # layouts that are priced, the nearest first
MAX_LISTED: Mapping[str, int] = {"layout": 3, "limits": 1, "formats": 2, "all of these": 1}  # by what changes
LEAST_GAIN = 0.02  # share of the time of a request below which a launch is no faster, as two predictions tell
PASS_SIZES = (0.25, 0.5, 2.0, 4.0)  # factors on the tokens of a pass
NARROW_WEIGHTS = ("fp8", "fp8_block", "nvfp4")  # multiplied in their own format where a chip has it


@dataclass(frozen=True, slots=True, kw_only=True)
class FasterServingLaunch:
    """A change of a launch: what `changes`, the options with their new values (None: left out), the checkpoint where it is
    another one, and what it gives."""

    changes: str
    layout: ServingLayout
    batch_limits: BatchLimits
    formats: ServingFormats
    checkpoint: str | None
    options: Mapping[str, Any]
    ttft_s: Prediction
    tpot_s: Prediction
    request_s: float


def list_faster_launches(reading: ReadServing, estimate: ServingEstimate) -> Sequence[FasterServingLaunch]:
    """Return changes that answer a request sooner under the same load on as many devices, by what changes, the soonest first:
    layouts, one limit, formats of published checkpoints and of the cache, and the best of each together.

    Only launches that the engine runs and that fit are listed; where the launch itself does not fit, all that do. Nothing is
    listed where an option changes the memory without being priced.
    """
    if not reading.memory_is_known:
        return ()
    launch = reading.launch
    variants = {
        "layout": other_layouts(launch), "limits": other_limits(launch, estimate.concurrency),
        "formats": [*other_formats(launch, estimate.problem.cluster.chip)],
    }  # fmt: skip
    listed: list[FasterServingLaunch] = []
    best = launch
    for kind, candidates in variants.items():
        faster = _price(reading, estimate, kind, candidates)
        listed += faster
        if faster:
            best = _combine(best, faster[0], kind)
    if len({item.changes for item in listed}) > 1:
        combined = _price(reading, estimate, "all of these", [best])
        listed += [item for item in combined if item.request_s < min(single.request_s for single in listed)]
    return listed


def _price(
    reading: ReadServing, estimate: ServingEstimate, kind: str, candidates: Sequence[ServingLaunch]
) -> list[FasterServingLaunch]:
    """Return the candidates that are sooner, as many as are listed of a kind of change."""
    engine, launch = reading.engine, reading.launch
    before, faster = engine.to_options(launch), []
    for candidate in candidates:
        if candidate == launch or engine.violations(candidate):
            continue
        problem = replace(
            estimate.problem,
            formats=candidate.formats,
            batch_limits=engine.limits_with_fraction(candidate.batch_limits),
        )
        try:
            priced = estimate_serving(problem, candidate.layout)
        except InputError:
            continue  # the cluster, or the engine that is priced, does not have it
        if priced.verdict == "fits" and priced.request_s < longest_request_s(estimate):
            faster.append((priced, candidate))
    faster.sort(key=lambda pair: pair[0].request_s)
    return [
        FasterServingLaunch(
            changes=kind, layout=candidate.layout, batch_limits=candidate.batch_limits, formats=candidate.formats,
            checkpoint=None if candidate.checkpoint == launch.checkpoint else candidate.checkpoint,
            options=option_changes(before, engine.to_options(candidate)), ttft_s=priced.ttft_s, tpot_s=priced.tpot_s,
            request_s=priced.request_s,
        )
        for priced, candidate in faster[: MAX_LISTED[kind]]
    ]  # fmt: skip


def longest_request_s(estimate: ServingEstimate | PooledEstimate) -> float:
    """Return the seconds of a request below which a change is listed: where a launch does not fit, any that does is."""
    return math.inf if estimate.verdict == "does not fit" else (1 - LEAST_GAIN) * estimate.request_s


def _combine(launch: ServingLaunch, faster: FasterServingLaunch, kind: str) -> ServingLaunch:
    """Return a launch with the change of one kind."""
    if kind == "layout":
        return replace(launch, layout=faster.layout)
    if kind == "limits":
        return replace(launch, batch_limits=faster.batch_limits)
    return replace(launch, formats=faster.formats, checkpoint=faster.checkpoint or launch.checkpoint)


def other_layouts(launch: ServingLaunch) -> list[ServingLaunch]:
    """Return launches with the other layouts of as many devices, the nearest first."""
    candidates = sorted(same_size_layouts(launch), key=lambda candidate: candidate[0])[:MAX_CANDIDATES]
    return [replace(launch, layout=layout) for _, layout in candidates]


def other_limits(launch: ServingLaunch, num_requests: float) -> list[ServingLaunch]:
    """Return launches with one limit changed: room for all requests, other sizes of a pass, chunks, another share of memory."""
    limits = get_serving_engine(launch.engine).batch_limits(launch.batch_limits)
    present = math.ceil(num_requests / launch.layout.attention_copies)
    changes: list[dict[str, Any]] = []
    if limits.max_num_seqs is not None and present > limits.max_num_seqs:
        changes.append({"max_num_seqs": 2 ** math.ceil(math.log2(present))})
    if limits.max_batched_tokens is not None:
        changes += [{"max_batched_tokens": round(limits.max_batched_tokens * factor)} for factor in PASS_SIZES]
    if not limits.chunked_prefill:
        changes.append({"chunked_prefill": True})
    if (limits.memory_fraction or 1.0) < 0.95:
        changes.append({"memory_fraction": 0.95})
    return [replace(launch, batch_limits=replace(launch.batch_limits, **change)) for change in changes]


def other_formats(launch: ServingLaunch, chip: Chip) -> Iterator[ServingLaunch]:
    """Yield launches with weights of fewer bytes that a published checkpoint has, and with a cache in fp8, on chips that multiply
    in these formats."""
    peaks = chip.peak_flops_per_s
    if launch.formats.cache == "bf16" and "fp8" in peaks:
        yield replace(launch, formats=replace(launch.formats, cache="fp8"))
    stored = launch.formats.weight_format.bytes_per_element
    for weights in NARROW_WEIGHTS:
        formats = ServingFormats(weights=weights, cache=launch.formats.cache)
        if formats.weight_format.product not in peaks or formats.weight_format.bytes_per_element >= stored:
            continue
        assert launch.architecture is not None
        name = name_checkpoint(launch.architecture, formats)
        if not is_folder_name(name):
            yield replace(launch, formats=formats, checkpoint=name)


def option_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the options that differ, with their new values; None for one that is left out."""
    return {name: after.get(name) for name in {**before, **after} if before.get(name) != after.get(name)}
