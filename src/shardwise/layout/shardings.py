"""From the structure of a layout to where every named tensor rests: data, not code for each case.

Atomic axes: `dp`, `fsdp`, `cp`, `tp_kv`, `tp_rep`, `pp`. `tp` is the ordered group (tp_kv, tp_rep): `tp_kv` splits the
key-value heads, and when `tp` is larger than their number `tp_rep` splits the query heads of each group further.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.model.architecture import Architecture
from shardwise.model.program import Program, Role
from shardwise.sharding.spec import Axes, Spec
from shardwise.symbolic import Value, gcd

BATCH: Axes = ("dp", "fsdp")  # sequences
ZERO: Axes = ("fsdp", "cp")  # what ZeRO shards over
TP: Axes = ("tp_kv", "tp_rep")

# Which axes split a weight's dims where it is used. D, which every matrix has, is left for ZeRO.
WEIGHT_USE: Mapping[str, Axes] = {"F": TP, "K": ("tp_kv",), "G": ("tp_rep",), "V": TP}


def zero_dim(dims: tuple[str, ...]) -> str:
    """The dim over which ZeRO shards a weight: D, or the last one of a vector without it (a bias, a norm over heads)."""
    return "D" if "D" in dims else dims[-1]


@dataclass(frozen=True, slots=True)
class Family:
    """The structure of a layout, without its degrees: what the derivation depends on."""

    zero_stage: int
    sequence_parallel: bool
    recompute: str


def hidden_spec(family: Family) -> Spec:
    """Where the residual stream rests: [B, T, D]."""
    sequence = ("cp", *TP) if family.sequence_parallel else ("cp",)
    return Spec.of(("B", "T", "D"), {"B": BATCH, "T": sequence})


def weight_use(dims: tuple[str, ...]) -> Spec:
    """A weight's sharding where it is used."""
    return Spec.of(dims, {dim: WEIGHT_USE[dim] for dim in dims if dim in WEIGHT_USE})


def weight_shard(dims: tuple[str, ...]) -> Spec:
    """A weight's sharding with ZeRO's axes appended to D."""
    use, dim = weight_use(dims), zero_dim(dims)
    return use.with_axes(dim, use.axes_of(dim) + ZERO)


def weight_rest(family: Family, dims: tuple[str, ...]) -> Spec:
    """Where a weight rests between uses: sharded by ZeRO-3 only."""
    return weight_shard(dims) if family.zero_stage == 3 else weight_use(dims)


def optimizer_rest(family: Family, dims: tuple[str, ...]) -> Spec:
    """Where the optimizer's state rests: sharded from ZeRO-1 on."""
    return weight_shard(dims) if family.zero_stage >= 1 else weight_use(dims)


def gradient_rest(family: Family, natural: Spec) -> Spec:
    """Where a weight's gradient rests between micro-batches, given the spec that the backward pass leaves it in.

    It stays a partial sum over the axes that are reduced once per step. From ZeRO-2 on it is reduced and scattered over
    ZeRO's axes in every micro-batch.
    """
    if family.zero_stage < 2:
        return natural
    kept = tuple(axis for axis in natural.partial if axis not in ZERO)
    dim = zero_dim(natural.dims)
    return natural.with_partial(kept).with_axes(dim, natural.axes_of(dim) + ZERO)


def resting(family: Family, program: Program) -> dict[str, Spec]:
    """Resting specs of a forward program's inputs: weights, the hidden state, and what every device can make."""
    specs: dict[str, Spec] = {}
    for name in program.inputs:
        tensor = program.tensors[name]
        if tensor.role is Role.WEIGHT:
            specs[name] = weight_rest(family, tensor.dims)
        elif tensor.role is Role.RESIDUAL:
            specs[name] = hidden_spec(family)
        else:
            hidden = hidden_spec(family)
            specs[name] = Spec.of(tensor.dims, {d: hidden.axes_of(d) for d in tensor.dims if d in hidden.dims})
    return specs


def staying(family: Family, program: Program) -> dict[str, Spec]:
    """Where a program's own hidden states rest as soon as they are made."""
    return {name: hidden_spec(family) for name in program.named(Role.RESIDUAL) if name not in program.inputs}


def using(program: Program) -> dict[str, Spec]:
    """Use specs of a program's weights."""
    return {name: weight_use(program.dims(name)) for name in program.weights}


def atomic_degrees(architecture: Architecture, tp: Value) -> dict[str, Value]:
    """`tp` (a number or an array) as key-value heads times query heads of a group: tp_kv = gcd(tp, K), tp_rep the rest."""
    tp_kv = gcd(tp, architecture.num_kv_heads)
    return {"tp_kv": tp_kv, "tp_rep": tp // tp_kv}
