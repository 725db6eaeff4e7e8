"""The part of a layout that the derivation depends on: its choices without its degrees, and its axes.

Atomic axes: `dp`, `fsdp`, `ep`, `cp`, `tp_kv`, `tp_rep`, `pp`. `tp` is the ordered group (tp_kv, tp_rep): `tp_kv` splits the
key-value heads, and when `tp` is larger than their number `tp_rep` splits the query heads of each group further.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from shardwise.layout.context_parallel import get_cp_variant
from shardwise.layout.layout import Layout
from shardwise.model import DEFAULT_OPTIMIZER
from shardwise.sharding import Axes

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
