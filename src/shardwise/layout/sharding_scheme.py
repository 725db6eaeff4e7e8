"""The degrees of a layout's mesh axes, and the scheme by which tensors are sharded over them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from shardwise.layout.context_parallel import cp_variant_names, get_cp_variant
from shardwise.layout.layout import Layout
from shardwise.model import DEFAULT_OPTIMIZER, Architecture, Job
from shardwise.sharding import Axes
from shardwise.values import Value, ceil_div
from shardwise.values.symbolic import gcd

BATCH_AXES: Axes = ("dp", "fsdp")  # sequences
ZERO_AXES: Axes = ("fsdp", "cp")  # what ZeRO shards over
TP_AXES: Axes = ("tp_kv", "tp_rep")
CP_AXES: Axes = ("cp",)
# With experts, `fsdp` is the ordered group (fsdp, ep): expert parallelism borrows its inner part. Sequences and all other
# weights are split over both; the experts' weights over `ep` by expert, and whole experts over `tp` as well.
EXPERT_AXES: Axes = ("ep",)


@dataclass(frozen=True, slots=True)
class ShardingScheme:
    """The choices of a layout without its degrees, and the job's optimizer: what the derivation depends on.

    `cp_variant` is the derived one ("ring" for zigzag too). `experts`: the model has experts. `whole_experts`: each expert is
    on one device, and `ep` splits over `tp` as well. `shares_amax`: the precision recipe takes scales from the largest values
    of any rank.
    """

    zero_stage: int
    sequence_parallel: bool
    recompute: str
    experts: bool = False
    cp_variant: str = "all_gather"
    async_tp: bool = False
    whole_experts: bool = False
    optimizer: str = DEFAULT_OPTIMIZER
    shares_amax: bool = False

    @property
    def expert_axes(self) -> Axes:
        """Axes that split experts from each other; `ep` is the minor one: tokens cross it while they are split over `tp`."""
        return TP_AXES + EXPERT_AXES if self.whole_experts else EXPERT_AXES

    @property
    def is_ring(self) -> bool:
        """True if keys and values are passed around a ring instead of being gathered."""
        return get_cp_variant(self.cp_variant).is_ring

    @property
    def batch_axes(self) -> Axes:
        """Axes that split sequences."""
        return BATCH_AXES + EXPERT_AXES if self.experts else BATCH_AXES

    @property
    def replica_axes(self) -> Axes:
        """Axes that split sequences and no weight where it is used: every gradient is a sum over them. Experts take the tokens
        of a whole `ep` group, so no rank has their gradient for its own sequences alone."""
        return tuple(axis for axis in self.batch_axes if axis not in self.expert_axes)

    @property
    def zero_axes(self) -> Axes:
        """Axes that ZeRO shards over."""
        return ("fsdp", *EXPERT_AXES, "cp") if self.experts else ZERO_AXES


def make_sharding_scheme(layout: Layout) -> ShardingScheme:
    """Return the scheme of a layout. `experts` (the model's), `optimizer` and `shares_amax` (the job's) have their defaults."""
    mode = ParallelMode(layout.cp_variant, layout.async_tp, layout.expert_tp != layout.tp)
    return make_scheme_of_mode(layout.zero_stage, layout.sequence_parallel, layout.recompute, mode)


class ParallelMode(NamedTuple):
    """Choices that the same degrees leave open."""

    cp_variant: str
    async_tp: bool
    whole_experts: bool


def make_scheme_of_mode(zero_stage: int, sequence_parallel: bool, recompute: str, mode: ParallelMode) -> ShardingScheme:
    """Return the scheme of a mode. Both rings have one: which positions a rank holds makes no difference to the derivation."""
    return ShardingScheme(
        zero_stage, sequence_parallel, recompute, cp_variant=get_cp_variant(mode.cp_variant).structure, async_tp=mode.async_tp,
        whole_experts=mode.whole_experts,
    )  # fmt: skip


Degrees = Mapping[str, Value]


def seqs_per_replica(job: Job, degrees: Degrees) -> Value:
    """Return sequences of the fullest replica in one step."""
    return ceil_div(job.num_seqs, degrees["dp"] * degrees["fsdp"])


def num_micro_batches(job: Job, degrees: Degrees) -> Value:
    """Return micro-batches of the fullest replica in one step."""
    return ceil_div(seqs_per_replica(job, degrees), degrees["micro_batch_seqs"])


def layout_degrees(layout: Layout) -> dict[str, Any]:
    """Return the numbers of a layout that rules and costs read. `cp_variant` is an index, flags are 0 or 1."""
    names = ("dp", "fsdp", "tp", "cp", "pp", "ep", "num_virtual_stages", "zero_stage", "micro_batch_seqs")
    flags = {"sequence_parallel": int(layout.sequence_parallel), "async_tp": int(layout.async_tp)}
    flags |= {"cp_variant": cp_variant_names().index(layout.cp_variant), "etp": layout.expert_tp}
    return {**{name: getattr(layout, name) for name in names}, **flags, "schedule": layout.schedule}


def atomic_degrees(architecture: Architecture, degrees: Mapping[str, Value]) -> dict[str, Value]:
    """Return the degrees (numbers or arrays) with each compound axis as its two atomic parts.

    `tp` is key-value heads times query heads of a group: tp_kv = gcd(tp, K), tp_rep the rest. Expert parallelism borrows `ep`
    from `fsdp`, which keeps the quotient. With whole experts (etp = 1) it is taken from `tp` first, and from `fsdp` only what
    exceeds it.
    """
    tp = degrees["tp"]
    tp_kv = gcd(tp, architecture.num_kv_heads)
    ep = degrees["ep"] * degrees.get("etp", tp) // tp
    parts = {"tp_kv": tp_kv, "tp_rep": tp // tp_kv, "ep": ep, "fsdp": degrees["fsdp"] // ep}
    return {**degrees, **parts}
