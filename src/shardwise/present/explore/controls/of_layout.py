"""The degrees of a layout, and what goes with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardwise.layout import OFFLOADS, cp_variant_names, layout_degrees, seqs_per_replica
from shardwise.model import policy_names
from shardwise.pipeline.registry import pipeline_schedule_names
from shardwise.present.explore.asked import Asked
from shardwise.present.explore.controls.control import Control, Option, checkbox, select, shown, slider
from shardwise.present.explore.controls.moved import with_fields
from shardwise.present.explore.controls.sizes import MOST_SLIDER, divisors
from shardwise.present.explore.state import layout_text
from shardwise.search import smallest_full_job
from shardwise.values import ShardwiseError, format_binary

GROUP = "layout"
AXES = {"tp": "tensor (tp)", "pp": "pipeline (pp)", "cp": "context (cp)", "ep": "expert (ep)"}
SWITCHES = {"sequence_parallel": "sequence parallelism", "async_tp": "asynchronous tensor parallelism"}
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
VIRTUAL_STAGES = (1, 2, 3, 4, 6, 8)
MOST_MICRO_BATCH = 64  # of a slider


def layout_controls(asked: Asked, *, free: bool) -> Iterator[Control]:
    """The choices of a layout; `free`: the cluster follows it."""
    layout, options = asked.layout, _Options(asked, free=free)
    most = MOST_SLIDER if free else asked.cluster.num_devices
    for axis, label in AXES.items():
        if axis != "ep" or asked.model.num_experts:
            limit = asked.model.num_experts if axis == "ep" else MOST_SLIDER
            yield slider(
                axis,
                label,
                GROUP,
                getattr(layout, axis),
                options.of(axis, divisors(most, getattr(layout, axis), limit)),
            )
    if free:
        yield slider("data", "data (dp, fsdp)", GROUP, layout.num_replicas, options.replicas())
    elif layout.zero_stage:
        replicas = divisors(layout.num_replicas, layout.dp, MOST_SLIDER)
        yield slider("dp", "replicas of ZeRO (dp)", GROUP, layout.dp, options.of("dp", replicas))
    yield slider("micro_batch_seqs", "micro-batch, sequences", GROUP, layout.micro_batch_seqs, options.micro_batches())
    yield slider("zero_stage", "ZeRO stage", GROUP, layout.zero_stage, options.of("zero_stage", range(4)))
    if layout.pp > 1:
        virtual = sorted({*VIRTUAL_STAGES, layout.num_virtual_stages})
        yield slider(
            "num_virtual_stages",
            "virtual stages",
            GROUP,
            layout.num_virtual_stages,
            options.of("num_virtual_stages", virtual),
        )
    names: dict[str, tuple[str, Sequence[Any]]] = {
        "recompute": ("recompute", tuple(dict.fromkeys((*policy_names(), layout.recompute))))
    }
    names |= {"schedule": ("schedule", pipeline_schedule_names())} if layout.pp > 1 else {}
    names |= {"cp_variant": ("context variant", cp_variant_names())} if layout.cp > 1 else {}
    names |= {"offload": ("offload", OFFLOADS)}
    for name, (label, values) in names.items():
        yield select(name, label, GROUP, getattr(layout, name), options.of(name, values))
    for name, label in SWITCHES.items():
        yield checkbox(name, label, GROUP, getattr(layout, name), options.of(name, (False, True)))


class _Options:
    """Options that change the layout of a state."""

    def __init__(self, asked: Asked, *, free: bool) -> None:
        self.asked, self.layout, self.free = asked, asked.layout, free

    def of(self, name: str, values: Sequence[Any]) -> Iterator[Option]:
        """Those of one field."""
        for value in values:
            yield self.option(value, {name: value})

    def micro_batches(self) -> Iterator[Option]:
        """Sizes of a micro-batch up to all sequences of a replica."""
        most = int(seqs_per_replica(self.asked.job, layout_degrees(self.layout)))
        sizes = {*MICRO_BATCHES, self.layout.micro_batch_seqs, *((most,) if most <= MOST_MICRO_BATCH else ())}
        return self.of("micro_batch_seqs", sorted(size for size in sizes if size))

    def replicas(self) -> Iterator[Option]:
        """Degrees of data parallelism, over which ZeRO shards where the layout has it."""
        name, other = ("fsdp", "dp") if self.layout.zero_stage else ("dp", "fsdp")
        for value in divisors(MOST_SLIDER, self.layout.num_replicas, MOST_SLIDER):
            yield self.option(value, {name: value, other: 1})

    def option(self, value: Any, fields: Mapping[str, Any]) -> Option:
        """The layout with some fields of other values; why no layout has them, or why this one cannot run."""
        try:
            layout = with_fields(self.layout, fields, None if self.free else self.asked.cluster.num_devices)
            edit = {"layout": layout_text(layout)}
            asked = self.asked
            if self.free:
                edit |= {"cluster": f"{asked.cluster.chip.name}:{layout.num_devices}"}
                job = smallest_full_job(asked.job, layout)
                edit |= {"batch_tokens": format_binary(job.global_batch_tokens)}
                cluster = asked.known.cluster(replace(asked.state, cluster=edit["cluster"]))
                asked = replace(asked, job=job, cluster=cluster)
        except ShardwiseError as error:
            return Option(value=shown(value), edit={}, problem=error.problems[0])
        return Option(value=shown(value), edit=edit, problem=next(iter(asked.problems_of(layout)), ""))
