"""The nearest launch that an engine can run: of the layouts of as many devices, and of limits and formats close by."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import product
from typing import cast

from shardwise.derive.inference_unit import Dispatch
from shardwise.interop.serving.engine import Engine
from shardwise.interop.serving.serving_launch import ServingLaunch
from shardwise.serve import BatchLimits, ServingFormats, ServingLayout
from shardwise.serve.serving_layout import FORMS

MAX_CANDIDATES = 50_000
DEGREES = ("tp", "attention_dp", "pp", "cp")
# Weights to try where an engine does not load some: of the same width first.
SIMILAR_WEIGHTS = {
    "int8": ("fp8", "fp8_block"), "int4_g32": ("int4", "mxfp4"), "mxfp4": ("nvfp4", "int4"), "nvfp4": ("mxfp4", "int4"),
    "int4": ("nvfp4",), "fp8_block": ("fp8",), "fp8": ("fp8_block",),
}  # fmt: skip


def nearest_launch(
    engine: Engine,
    launch: ServingLaunch,
    further_problems: Callable[[ServingLaunch], Iterable[str]] = lambda launch: (),
) -> ServingLaunch | None:
    """Return the launch that an engine runs with the fewest changes; None if it runs none of those that were tried.

    `further_problems` says what else a launch may not be, as one of two pools.

    A change of limits or formats counts more than any of the layout; layouts have the same devices and replicas, and are compared
    by the powers of two between their degrees.
    """
    best, best_distance = None, math.inf
    variants = list(product(_formats(launch), _limits(launch)))
    layouts = list(same_size_layouts(launch))[: MAX_CANDIDATES // len(variants)]
    for (formats, limits), (distance, layout) in product(variants, layouts):
        distance += 100.0 * ((formats != launch.formats) + (limits != launch.batch_limits))
        if distance >= best_distance:
            continue
        candidate = replace(launch, layout=layout, formats=formats, batch_limits=limits)
        if not engine.violations(candidate) and not any(further_problems(candidate)):
            best, best_distance = candidate, distance
    return best


def same_size_layouts(launch: ServingLaunch) -> Iterator[tuple[float, ServingLayout]]:
    """Yield the layouts of as many devices, each with its distance; those of models without experts copy the whole model."""
    planned = launch.layout
    devices = planned.num_devices
    for tp, pp, cp in product(_divisors(devices), repeat=3):
        if devices % (tp * pp * cp):
            continue
        for copies in _divisors(devices // (tp * pp * cp)):
            replicas = devices // (tp * pp * cp * copies)
            if launch.has_experts and replicas != planned.replicas:
                continue
            for ep in _divisors(tp * copies) if launch.has_experts else (1,):
                layout = ServingLayout(tp=tp, attention_dp=copies, pp=pp, cp=cp, ep=ep, replicas=replicas)
                for formed in _forms(planned, layout) if ep > 1 else (layout,):
                    yield _distance(planned, formed), formed


def _forms(planned: ServingLayout, layout: ServingLayout) -> Iterator[ServingLayout]:
    """Yield a layout with experts that are split in each form that the planned one may be changed to."""
    for dispatch, redundant in product(FORMS["dispatch"], {0, planned.redundant_experts}):
        yield replace(layout, dispatch=cast(Dispatch, dispatch), redundant_experts=redundant)


def _distance(left: ServingLayout, right: ServingLayout) -> float:
    names = (*DEGREES, "ep", "replicas")
    forms: int = sum(
        getattr(left, name) != getattr(right, name) for name in ("dispatch", "redundant_experts", "cache_split", "ws")
    )
    degrees: float = sum(abs(math.log2(getattr(left, name) / getattr(right, name))) for name in names)
    return forms + degrees


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _formats(launch: ServingLaunch) -> Iterator[ServingFormats]:
    """Yield the formats, and those with other weights of like width."""
    yield launch.formats
    for weights in SIMILAR_WEIGHTS.get(launch.formats.weights, ()):
        yield ServingFormats(weights=weights, cache=launch.formats.cache)


def _limits(launch: ServingLaunch) -> Iterator[BatchLimits]:
    """Yield the limits, and those with one or two changed: no drafted tokens, chunks, or as many tokens as requests need."""
    limits = launch.batch_limits
    drafts = (limits, replace(limits, mtp_tokens=0, acceptance=0.0)) if limits.mtp_tokens else (limits,)
    for draft in drafts:
        yield draft
        if not draft.chunked_prefill:
            yield replace(draft, chunked_prefill=True)
        if draft.max_batched_tokens is not None and draft.max_num_seqs is not None:
            yield replace(draft, max_batched_tokens=max(draft.max_batched_tokens, draft.max_num_seqs))
            yield replace(
                draft, max_batched_tokens=max(draft.max_batched_tokens, draft.max_num_seqs), chunked_prefill=True
            )
