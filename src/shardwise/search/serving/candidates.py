"""Candidates of a serving search: every legal layout of one instance, at a ladder of concurrencies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from shardwise.hardware import Cluster
from shardwise.model import Architecture
from shardwise.serve import ConfigurationTable, ServingFormats, ServingLayout, serving_layout_problems
from shardwise.serve.engines import ServingEngine
from shardwise.serve.serving_layout import FORMS

CONCURRENCY_STEP = 2**0.25  # of the ladder: neighbours differ by a fifth, less than a prediction's interval


def list_serving_layouts(
    architecture: Architecture, cluster: Cluster, formats: ServingFormats, engine: ServingEngine
) -> list[ServingLayout]:  # fmt: skip
    """Return the layouts of one instance that the model, the cluster and the engine allow, the smallest first.

    Degrees are powers of two (and the whole scale-up domain). Attention is split within a scale-up domain; what an instance
    has beyond it are stages, or copies of attention that share the experts. Forms are those that the engine has an option for.
    """
    limit, domain = cluster.num_devices, cluster.scale_up_size
    layouts = [
        layout
        for tp in _degrees(min(limit, domain), domain)
        for pp in _degrees(min(limit // tp, architecture.num_layers))
        for split in _expert_layouts(architecture, ServingLayout(tp=tp, pp=pp), limit, domain)
        for layout in _forms(split, engine, limit)
        if not serving_layout_problems(architecture, layout, formats)
        and not engine.layout_problems(architecture, layout)
    ]
    return sorted(layouts, key=lambda layout: (layout.devices_per_replica, complexity(layout), layout.pp))


def _expert_layouts(
    architecture: Architecture, stage: ServingLayout, limit: int, domain: int
) -> Iterator[ServingLayout]:
    """Yield the ways in which experts and copies of attention share the devices of a stage. Experts that cannot be split evenly
    have as many redundant ones as are missing."""
    num_experts = max(layer.num_experts for layer in architecture.layer_architectures.values())
    if not num_experts:
        yield stage
        return
    for attention_dp in _degrees(limit // (stage.tp * stage.pp), domain // stage.tp):
        width = stage.tp * attention_dp
        for ep in _degrees(width, width):
            if width % ep == 0:
                missing = -num_experts % ep if ep <= num_experts else 0
                yield replace(
                    stage, attention_dp=attention_dp, ep=ep, expert_tp=width // ep, redundant_experts=missing
                )  # fmt: skip


def _forms(layout: ServingLayout, engine: ServingEngine, limit: int) -> Iterator[ServingLayout]:
    """Yield a layout in each form that an engine has an option for."""
    choices = [FORMS[name] if name in engine.degrees else FORMS[name][:1] for name in FORMS]
    widths = _degrees(limit // layout.devices_per_replica) if "ws" in engine.degrees else [1]
    for ws, forms in product(widths, product(*choices)):
        values: dict[str, Any] = dict(zip(FORMS, forms, strict=True))
        yield replace(layout, ws=ws, **values)


def _degrees(limit: int, *extra_degrees: int) -> list[int]:
    """Return powers of two up to a limit, and the extra degrees within it."""
    powers = {2**exponent for exponent in range(max(limit, 1).bit_length()) if 2**exponent <= limit}
    return sorted(powers | {degree for degree in extra_degrees if degree <= limit})


def complexity(layout: ServingLayout) -> int:
    """Return how many axes a layout uses: of those that predictions cannot tell apart, the simplest is taken."""
    degrees = (layout.tp, layout.attention_dp, layout.pp, layout.ep, layout.expert_tp_degree)
    return sum(degree > 1 for degree in degrees) + len(layout.forms) + (layout.redundant_experts > 0)


def concurrency_ladder(largest: int) -> list[float]:
    """Return concurrencies from 1 up to `largest`, in steps of `CONCURRENCY_STEP`, whole numbers.

    >>> concurrency_ladder(8)
    [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    """
    num_steps = int(np.ceil(np.log(max(largest, 1)) / np.log(CONCURRENCY_STEP)))
    ladder = {min(round(CONCURRENCY_STEP**step), largest) for step in range(num_steps + 1)}
    return [float(value) for value in sorted(ladder)]


def build_table(layouts: list[ServingLayout], max_num_seqs: int, max_batched_tokens: int) -> ConfigurationTable:
    """Return each layout at the ladder of concurrencies of one instance, whose copies of attention run `max_num_seqs` each."""
    rows = [
        (layout, concurrency * layout.attention_dp)
        for layout in layouts
        for concurrency in concurrency_ladder(max_num_seqs)
    ]
    return ConfigurationTable.of(
        [layout for layout, _ in rows], [concurrency for _, concurrency in rows], [max_batched_tokens] * len(rows)
    )
