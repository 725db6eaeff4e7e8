"""The spec of every named tensor at rest and in use, from a sharding scheme: data, not code for each case."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.layout import BATCH_AXES, TP_AXES, ShardingScheme, get_cp_variant
from shardwise.layout.sharding_scheme import CP_AXES
from shardwise.model import Program, Role, Tensor
from shardwise.model.carried_tensors import TABLE_ROWS
from shardwise.model.decoder_block import RECEIVED, RETURNED
from shardwise.model.operations import Scan
from shardwise.sharding import Axes, Mesh, Spec
from shardwise.values import ceil_div

# Axes that split a weight's dims where it is used. D is left to ZeRO: every matrix has it, so that ZeRO's axes and those of
# tensor parallelism never compete for a dim.
WEIGHT_USE: Mapping[str, Axes] = {
    "F": TP_AXES,
    "M": TP_AXES,
    "S": TP_AXES,
    "K": ("tp_kv",),
    "G": ("tp_rep",),
    "L": TP_AXES,
    "V": TP_AXES,
    TABLE_ROWS: TP_AXES,
}


def pad_vocabulary(dims: Mapping[str, int], mesh: Mesh) -> dict[str, int]:
    """Return the sizes of the dims as the devices of a mesh hold them, with the vocabulary padded to equal shards.

    A vocabulary that the devices do not divide gets rows at its end that are no words; prices count `ceil(V / n)` as well.
    Every legal layout divides the other dims.

    >>> pad_vocabulary({"D": 12, "V": 10}, Mesh.of({"tp_kv": 4, "tp_rep": 1}))
    {'D': 12, 'V': 12}
    """
    parts = mesh.size(axis for axis in WEIGHT_USE["V"] if axis in mesh.names)
    return {dim: ceil_div(size, parts) * parts if dim in ("V", TABLE_ROWS) else size for dim, size in dims.items()}


def zero_sharded_dim(dims: tuple[str, ...]) -> str:
    """Return the dim over which ZeRO shards a weight: D, or the last dim of a vector without it (a bias, a norm over heads)."""
    return "D" if "D" in dims else dims[-1]


def hidden_spec(scheme: ShardingScheme) -> Spec:
    """Return the resting spec of the residual stream [B, T, D]."""
    return token_spec(scheme, ("B", "T", "D"))


def token_spec(scheme: ShardingScheme, dims: tuple[str, ...]) -> Spec:
    """Return the resting spec of a tensor of tokens, which may have other dims than B and T."""
    sequence = ("cp", *TP_AXES) if scheme.sequence_parallel else ("cp",)
    return Spec.of(dims, {dim: axes for dim, axes in (("B", scheme.batch_axes), ("T", sequence)) if dim in dims})


def expert_spec(scheme: ShardingScheme, dims: tuple[str, ...]) -> Spec:
    """Return the resting spec of routed tokens with their experts: split by expert instead of over the inner part of the batch
    and, where each expert is whole, of the sequence."""
    spec = token_spec(scheme, dims).with_axes("B", BATCH_AXES)
    return (spec.with_axes("T", CP_AXES) if scheme.whole_experts else spec).with_axes("E", scheme.expert_axes)


def weight_use_spec(scheme: ShardingScheme, dims: tuple[str, ...]) -> Spec:
    """Return the spec in which operations take a weight. One whose first dim is E belongs to experts and is split by expert;
    the router, whose columns (or only dim) are the experts, is not split."""
    split = {dim: WEIGHT_USE[dim] for dim in dims if dim in WEIGHT_USE}
    if dims[0] == "E" and len(dims) > 1:
        split |= {"E": scheme.expert_axes, "M": () if scheme.whole_experts else TP_AXES}
    return Spec.of(dims, {dim: axes for dim, axes in split.items() if dim in dims})


def zero_sharded_spec(scheme: ShardingScheme, dims: tuple[str, ...]) -> Spec:
    """Return a weight's use spec with those of ZeRO's axes that do not split it already appended to D."""
    return _add_zero_axes(scheme, weight_use_spec(scheme, dims))


def _add_zero_axes(scheme: ShardingScheme, use: Spec) -> Spec:
    dim = zero_sharded_dim(use.dims)
    return use.with_axes(dim, use.axes_of(dim) + _unused_zero_axes(scheme, use))


def _unused_zero_axes(scheme: ShardingScheme, use: Spec) -> Axes:
    return tuple(axis for axis in scheme.zero_axes if axis not in use.sharded_axes)


def zero_axes_of_weight(scheme: ShardingScheme, dims: tuple[str, ...]) -> Axes:
    """Return the axes over which ZeRO cuts a weight further than its use spec does, as a flat array."""
    return _unused_zero_axes(scheme, weight_use_spec(scheme, dims))


def weight_resting_spec(scheme: ShardingScheme, dims: tuple[str, ...]) -> Spec:
    """Return a weight's resting spec: sharded over ZeRO's axes under ZeRO-3, else its use spec."""
    return zero_sharded_spec(scheme, dims) if scheme.zero_stage == 3 else weight_use_spec(scheme, dims)


def optimizer_resting_spec(scheme: ShardingScheme, dims: tuple[str, ...]) -> Spec:
    """Return the resting spec of optimizer state of a weight's shape: sharded from ZeRO-1 on."""
    return zero_sharded_spec(scheme, dims) if scheme.zero_stage >= 1 else weight_use_spec(scheme, dims)


def state_resting_spec(scheme: ShardingScheme, weight: tuple[str, ...], dims: tuple[str, ...]) -> Spec:
    """Return the resting spec of a tensor of a weight's optimizer state. One that has some of the weight's dims only is small,
    and stays unsharded over ZeRO's axes."""
    use = weight_use_spec(scheme, weight)
    return (
        optimizer_resting_spec(scheme, weight)
        if dims == weight
        else Spec.of(dims, {dim: use.axes_of(dim) for dim in dims})
    )


def gradient_resting_spec(scheme: ShardingScheme, output_spec: Spec) -> Spec:
    """Return the spec of a weight's gradient between micro-batches, given the spec that the backward pass leaves it in.

    It stays a partial sum over the axes that are reduced once per step. From ZeRO-2 on it is reduced and scattered over ZeRO's
    axes in every micro-batch.
    """
    if scheme.zero_stage < 2:
        return output_spec
    partial_axes = tuple(axis for axis in output_spec.partial if axis not in scheme.zero_axes)
    return _add_zero_axes(scheme, output_spec.with_partial(partial_axes))


def handed_spec(scheme: ShardingScheme, tensor: Tensor) -> Spec:
    """Return the resting spec of a tensor that one unit hands to another: keys and values stay split by head."""
    has_heads = tensor.role is Role.CARRIED and "K" in tensor.dims
    return head_spec(scheme, tensor.dims, CP_AXES) if has_heads else token_spec(scheme, tensor.dims)


def input_specs(scheme: ShardingScheme, program: Program) -> dict[str, Spec]:
    """Return the resting specs of a forward program's inputs: weights, the hidden state, and constants such as token ids."""
    specs: dict[str, Spec] = {}
    for name in program.inputs:
        tensor = program.tensors[name]
        if tensor.role is Role.WEIGHT:
            specs[name] = weight_resting_spec(scheme, tensor.dims)
        else:
            specs[name] = handed_spec(scheme, tensor)
    return specs


def immediate_specs(scheme: ShardingScheme, program: Program) -> dict[str, Spec]:
    """Return the specs that results take as soon as they are computed: residual stream, experts' results, Ulysses attention."""
    hidden = [name for name in program.names_with_role(Role.RESIDUAL) if name not in program.inputs]
    routed = program.names_with_role(Role.ROUTED)
    hidden += [name for name in routed if name.endswith(RETURNED)]
    received = {name: expert_spec(scheme, program.dims(name)) for name in routed if name.endswith(RECEIVED)}
    attended = {
        scan.outputs[0]: head_spec(scheme, program.dims(scan.outputs[0]), CP_AXES)
        for scan in _ulysses_attentions(scheme, program)
    }
    hidden += [name for name in program.names_with_role(Role.CARRIED) if name not in program.inputs]
    handed = {name: handed_spec(scheme, program.tensors[name]) for name in hidden}
    return handed | received | attended


def use_specs(scheme: ShardingScheme, program: Program) -> dict[str, Spec]:
    """Return the specs in which operations take a program's weights, and the queries of Ulysses attention."""
    weights = {name: weight_use_spec(scheme, program.dims(name)) for name in program.weights}
    queries = {scan.inputs[0] for scan in _ulysses_attentions(scheme, program)}
    return weights | {name: spec for name, spec in ulysses_specs(scheme, program).items() if name in queries}


def ulysses_specs(scheme: ShardingScheme, program: Program) -> dict[str, Spec]:
    """Return the specs of queries, keys and values in Ulysses attention: heads over `cp`, the sequence unsharded. They are
    saved so: they are no larger than before the exchange, and only attention reads them."""
    names = (name for scan in _ulysses_attentions(scheme, program) for name in scan.inputs[:3])
    return {name: head_spec(scheme, program.dims(name), ()) for name in names}


def head_spec(scheme: ShardingScheme, dims: tuple[str, ...], sequence: Axes) -> Spec:
    """Return the spec of heads around attention: the sequence over `sequence`, or, where that is empty, the heads over `cp` as
    well."""
    heads = ("tp_kv",) if sequence else ("tp_kv", *CP_AXES)
    split = {"B": scheme.batch_axes, "T": sequence, "K": heads, "G": ("tp_rep",)}
    return Spec.of(dims, {dim: axes for dim, axes in split.items() if dim in dims})


def _ulysses_attentions(scheme: ShardingScheme, program: Program) -> list[Scan]:
    """Return the attentions that exchange heads for the sequence (Jacobs et al. 2023, DeepSpeed-Ulysses)."""
    scans = [operation for operation in program.operations if isinstance(operation, Scan)]
    return scans if get_cp_variant(scheme.cp_variant).exchanges_heads else []
