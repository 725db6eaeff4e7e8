"""The degrees of a layout's mesh axes, and the scheme by which tensors are sharded over them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from shardwise.layout.layout import Layout, cp_variant_names, get_cp_variant
from shardwise.model import DEFAULT_OPTIMIZER, Architecture, Job, ModelStructure, is_layer
from shardwise.model.decoder import routes_tokens
from shardwise.model.recompute_policies import policy_for_layer
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


class ParallelMode(NamedTuple):
    """Choices that the same degrees leave open."""

    cp_variant: str
    async_tp: bool
    whole_experts: bool


@dataclass(frozen=True, slots=True)
class ShardingScheme:
    """All that a derivation reads: the structure of the model, facts of the job, and a layout's choices without its degrees.

    `shares_amax`: the precision recipe takes scales from the largest values of any rank. `cp_variant` is the derived one
    ("ring" for zigzag too: which positions a rank holds makes no difference to a derivation). `whole_experts`: each expert is
    on one device, and `ep` splits over `tp` as well. Made by `make_sharding_scheme`.
    """

    structure: ModelStructure
    optimizer: str
    shares_amax: bool
    zero_stage: int = 0
    sequence_parallel: bool = False
    recompute: str = "none"
    cp_variant: str = "all_gather"
    async_tp: bool = False
    whole_experts: bool = False

    @classmethod
    def unsharded(cls, structure: ModelStructure) -> ShardingScheme:
        """Return the scheme of one device that recomputes nothing: for what is the same under every scheme, such as a unit's
        program."""
        return cls(structure, DEFAULT_OPTIMIZER, shares_amax=False)

    def with_mode(self, mode: ParallelMode) -> ShardingScheme:
        """Return the scheme in another mode."""
        cp_variant = get_cp_variant(mode.cp_variant).structure
        return replace(self, cp_variant=cp_variant, async_tp=mode.async_tp, whole_experts=mode.whole_experts)

    def with_recompute(self, policy: str) -> ShardingScheme:
        """Return the scheme under another recompute policy."""
        return replace(self, recompute=policy)

    def for_unit(self, name: str) -> ShardingScheme:
        """Return the scheme without what the derivation of this unit does not depend on.

        Recomputation and context parallelism concern layers alone, whole experts only units that send tokens to experts, and
        shared scales no unit: their AllReduce is a control collective of the step.
        """
        # Schemes that differ only in what is dropped here share a cache entry. A field that is kept needlessly costs
        # derivations: a search has hundreds of schemes, and derives each unit again for every distinct result of this method.
        # One that is dropped although the unit depends on it is worse: the unit silently gets another layout's collectives.
        has_policy = is_layer(name)
        return replace(  # once, since every price of a unit asks
            self, shares_amax=False,
            recompute=policy_for_layer(self.recompute, name) if has_policy else "none",
            cp_variant=self.cp_variant if has_policy else "all_gather",
            whole_experts=self.whole_experts and routes_tokens(self.structure, name),
        )  # fmt: skip

    def for_update(self) -> ShardingScheme:
        """Return the scheme without what the update of weights does not depend on, once the specs of their gradients are known:
        how the passes run."""
        return replace(
            self, shares_amax=False, sequence_parallel=False, recompute="none", cp_variant="all_gather", async_tp=False
        )

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
        return BATCH_AXES + EXPERT_AXES if self.structure.experts else BATCH_AXES

    @property
    def replica_axes(self) -> Axes:
        """Axes that split sequences and no weight where it is used: every gradient is a sum over them. Experts take the tokens
        of a whole `ep` group, so no rank has their gradient for its own sequences alone."""
        return tuple(axis for axis in self.batch_axes if axis not in self.expert_axes)

    @property
    def zero_axes(self) -> Axes:
        """Axes that ZeRO shards over."""
        return ("fsdp", *EXPERT_AXES, "cp") if self.structure.experts else ZERO_AXES


def make_sharding_scheme(
    layout: Layout, structure: ModelStructure, *, optimizer: str, shares_amax: bool
) -> ShardingScheme:
    """Return the scheme of a layout of a model; `shares_amax` is that of the job's precision recipe."""
    scheme = ShardingScheme(
        structure, optimizer, shares_amax, layout.zero_stage, layout.sequence_parallel, layout.recompute
    )
    return scheme.with_mode(ParallelMode(layout.cp_variant, layout.async_tp, layout.expert_tp != layout.tp))


Degrees = Mapping[str, Value]


def seqs_per_replica(job: Job, degrees: Degrees) -> Value:
    """Return sequences of the fullest replica in one step."""
    return ceil_div(job.num_seqs, degrees["dp"] * degrees["fsdp"])


def num_micro_batches(job: Job, degrees: Degrees) -> Value:
    """Return micro-batches of the fullest replica in one step."""
    return ceil_div(seqs_per_replica(job, degrees), degrees["micro_batch_seqs"])


def missing_share(job: Job, degrees: Degrees) -> Value:
    """Return the share of the fullest replica's last micro-batch that has no sequences, 0 where all micro-batches are full.

    >>> from shardwise.model import Job
    >>> job = Job(global_batch_tokens=64 * 128, seq_len=128)
    >>> missing_share(job, {"dp": 2, "fsdp": 1, "micro_batch_seqs": 24})
    0.6666666666666667
    """
    return num_micro_batches(job, degrees) - seqs_per_replica(job, degrees) / degrees["micro_batch_seqs"]


def layout_degrees(layout: Layout) -> dict[str, Any]:
    """Return the numbers of a layout that rules and costs read. `cp_variant` is an index, flags are 0 or 1."""
    names = ("dp", "fsdp", "tp", "cp", "pp", "ep", "num_virtual_stages", "zero_stage", "micro_batch_seqs")
    flags = {"sequence_parallel": int(layout.sequence_parallel), "async_tp": int(layout.async_tp)}
    flags |= {"cp_variant": cp_variant_names().index(layout.cp_variant), "etp": layout.expert_tp}
    return {**{name: getattr(layout, name) for name in names}, **flags, "schedule": layout.schedule}


def shared_kv_heads(architecture: Architecture) -> int:
    """Return the greatest number that divides the key-value heads of all layers with attention."""
    if not architecture.layer_pattern:
        return architecture.num_kv_heads
    heads = [layer.num_kv_heads for layer in architecture.layer_architectures.values() if layer.mixer == "attention"]
    return math.gcd(*heads) if heads else architecture.num_kv_heads


def atomic_degrees(architecture: Architecture, degrees: Mapping[str, Value]) -> dict[str, Value]:
    """Return the degrees (numbers or arrays) with each compound axis as its two atomic parts.

    `tp` is key-value heads times query heads of a group: tp_kv = gcd(tp, K), tp_rep the rest. Expert parallelism borrows `ep`
    from `fsdp`, which keeps the quotient. With whole experts (etp = 1) it is taken from `tp` first, and from `fsdp` only what
    exceeds it. Kinds of layers may differ in key-value heads: tp_kv divides those of all of them, and where a kind has more,
    a device has several of its heads and shares them.
    """
    tp = degrees["tp"]
    tp_kv = gcd(tp, shared_kv_heads(architecture))
    ep = degrees["ep"] * degrees.get("etp", tp) // tp
    parts = {"tp_kv": tp_kv, "tp_rep": tp // tp_kv, "ep": ep, "fsdp": degrees["fsdp"] // ep}
    return {**degrees, **parts}
