"""Collectives of a unit as an engine issues them, and the control collectives of a step.

A unit's collectives are the derived ones, with weights and gradients as flat arrays. Bytes per kind, axes, pass and
scope are conserved, except for the padding of flat arrays and for group members that only one pass reads. A scalar (the
loss) is reduced once per step, not per micro-batch. A collective beside computations is issued in as many chunks as its
group has devices.

Control collectives carry no tensor of the model: the norm of the gradients, the gradient noise scale, the largest
magnitudes (amax) from which FP8 scales follow, and the routers' statistics.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import lru_cache
from itertools import chain, groupby

from shardwise.derive import CollectiveStep, Ring, ShardedUnit, derived_unit, weight_use_spec
from shardwise.derive.low_precision_products import block_products, feeds_only_products
from shardwise.derive.sharded_unit import is_mean_reduction
from shardwise.derive.tensor_specs import optimizer_resting_spec
from shardwise.layout import BATCH_AXES, EXPERT_AXES, TP_AXES, ShardingScheme
from shardwise.model import (
    BASE_LAYER,
    MTP_UNITS,
    Architecture,
    ModelStructure,
    Role,
    Route,
    density,
    is_layer,
    owning_weight,
)
from shardwise.model.decoder import mtp_unit_counts, units_of_structure
from shardwise.sharding import Axes, CollectiveKind
from shardwise.step.flat_arrays import WeightGroup, WeightMove, array_key, is_flat_move, weight_groups
from shardwise.step.instructions import PIPELINE, UnitCollective
from shardwise.step.parameters import unit_paths
from shardwise.values import IssuePolicy, LocalDim, Polynomial, constant, multiply_symbols, sum_polynomials


def list_unit_collectives(
    unit: ShardedUnit, policy: IssuePolicy, single_device_axes: Set[str] = frozenset()
) -> tuple[UnitCollective, ...]:
    """Return all collectives of a unit; slices move nothing and are left out.

    `single_device_axes`: axes known to have one device (see `weight_groups`).
    """
    groups = weight_groups(unit, single_device_axes)
    weights = chain.from_iterable(_weight_collectives(unit, group, policy) for group in groups)
    return (*_with_row_counts(merge_all_to_alls(_activation_collectives(unit))), *_mean_collectives(unit), *weights)


def _activation_collectives(unit: ShardedUnit) -> Iterator[UnitCollective]:
    """Yield the collectives on activations and scalars, and on single matrices, in derivation order."""
    phases, tensors = unit.phases(), unit.tensors
    for phase, steps in phases.items():
        rings = [node for node in unit.phase_nodes()[phase] if isinstance(node, Ring)]
        chunked_with = {id(step): ring.first_results for ring in rings for step in ring.collectives}
        for position, step in enumerate(steps):
            if (
                not isinstance(step, CollectiveStep)
                or step.collective.kind is CollectiveKind.SLICE
                or is_flat_move(step, unit.scheme)
                or is_mean_reduction(step)
            ):
                continue
            collective, role = step.collective, step.tensor.role
            yield UnitCollective(
                unit.name, phase if step.tensor.dims else "update",  # the loss is a sum, so it is reduced once per step
                collective.kind, collective.axes, role, collective.payload_elements * density(role), (step.tensor.name,),
                chunked_with.get(id(step), ()), feeds_only_products(phases, tensors, phase, position), step.reason,
                position if step.tensor.dims else -1, (step,),
            )  # fmt: skip


def _mean_collectives(unit: ShardedUnit) -> Iterator[UnitCollective]:
    """Yield the reductions of the means that an update reads: neighbours over the same axes move as one array."""
    steps = unit.update.steps
    for is_moved, run in groupby(enumerate(steps), key=lambda pair: is_mean_reduction(pair[1])):
        if not is_moved:
            continue
        reductions_by_array: dict[tuple[str, Axes], list[CollectiveStep]] = {}
        members = list(run)
        for _, step in members:
            assert isinstance(step, CollectiveStep)
            key = array_key(owning_weight(step.tensor.name)), step.collective.axes
            reductions_by_array.setdefault(key, []).append(step)
        for (_, axes), reductions in reductions_by_array.items():
            payload = sum_polynomials(reduction.collective.payload_elements for reduction in reductions)
            weights = tuple(dict.fromkeys(owning_weight(reduction.tensor.name) for reduction in reductions))
            yield UnitCollective(
                unit.name, "update", CollectiveKind.ALL_REDUCE, axes, Role.MEAN, payload, weights,
                reason="means over weights that are split", position=members[0][0], derived=tuple(reductions),
            )  # fmt: skip


def merge_all_to_alls(collectives: Iterable[UnitCollective]) -> Iterator[UnitCollective]:
    """Merge successive AllToAlls of one tensor over two axes into one over both.

    A dispatcher sends each row once, and gets it back in the same group.
    """
    pending: UnitCollective | None = None
    for collective in collectives:
        if (
            pending
            and pending.kind is collective.kind is CollectiveKind.ALL_TO_ALL
            and pending.tensors == collective.tensors
        ):
            derived = (*pending.derived, *collective.derived)
            parts = (collective.axes, pending.axes) if _is_combine(derived) else (pending.axes, collective.axes)
            pending = replace(collective, axes=parts[0] + parts[1], derived=derived)
            continue
        if pending:
            yield pending
        pending = collective
    if pending:
        yield pending


def _is_combine(derived: Sequence[CollectiveStep]) -> bool:
    """Return True if rows leave their experts: they are split over fewer axes afterwards."""
    before, after = derived[0].collective.before, derived[-1].collective.after
    return len(after.axes_of("E")) < len(before.axes_of("E"))


def _with_row_counts(collectives: Iterable[UnitCollective]) -> Iterator[UnitCollective]:
    """Put before each dispatch the exchange of row counts: one number per expert, from every sender."""
    for collective in collectives:
        if (
            collective.role is Role.ROUTED
            and collective.phase == "forward"
            and collective.kind in (CollectiveKind.ALL_TO_ALL, CollectiveKind.ALL_GATHER)
        ):
            experts = multiply_symbols([LocalDim("E", collective.derived[0].collective.before.axes_of("E"))])
            if collective.kind is CollectiveKind.ALL_GATHER:
                experts = experts * multiply_symbols(collective.axes)
            if not _is_combine(collective.derived):
                yield replace(
                    collective, role=Role.STATISTIC, payload=experts, chunked_with=(), for_products=False, derived=(),
                    counts_rows_of=collective, reason="each rank tells how many rows it sends for each expert",
                )  # fmt: skip
        yield collective


def _weight_collectives(unit: ShardedUnit, group: WeightGroup, policy: IssuePolicy) -> Iterator[UnitCollective]:
    """Yield the collectives on a group's flat arrays. A gradient that was scattered is reduced over its replicas in shards."""
    within = group.sync.within(unit.scheme.replica_axes)
    if policy.noise_scale and group.trained and within:
        yield UnitCollective(
            unit.name, "backward", CollectiveKind.ALL_REDUCE, within, Role.WEIGHT_GRADIENT, group.arrays, group.weights,
            reason="the norm of a micro-batch's gradient is of the whole sum over its sequences",
        )  # fmt: skip
    for move in group.moves:
        role = Role.WEIGHT if move.kind is CollectiveKind.ALL_GATHER else Role.WEIGHT_GRADIENT
        role = Role.DIRECTION if move.of_direction else role
        in_parts = move.kind is CollectiveKind.ALL_REDUCE and bool(group.sync.scatter or group.sync.step_scatter)
        yield UnitCollective(
            unit.name, _collective_phase(move, group, policy), move.kind, move.axes, role,
            replace(group.arrays, moves_shards=in_parts), group.weights, reason=_collective_reason(move),
            derived=group.derived_as(move),
        )  # fmt: skip


def _collective_phase(move: WeightMove, group: WeightGroup, policy: IssuePolicy) -> str:
    """Return the pass of a collective: gradients that rest whole may be reduced in every micro-batch."""
    early = policy.reduce_each_micro_batch and move.kind is not CollectiveKind.ALL_GATHER and not group.sync.scatter
    return "backward" if early else move.phase


def _collective_reason(move: WeightMove) -> str:
    match move.kind:
        case CollectiveKind.ALL_GATHER if move.of_direction:
            return "the update is a function of whole matrices"
        case CollectiveKind.ALL_GATHER if move.phase == "update":
            return "weights that the update changed in parts are used whole"
        case CollectiveKind.ALL_GATHER:
            return "weights rest in parts and are used whole"
        case CollectiveKind.REDUCE_SCATTER:
            return "gradients are partial sums, and rest in parts"
        case _:
            return "gradients are partial sums, and are updated whole"


NORM, NOISE, AMAX, ROUTING, AUXILIARY = "norm", "noise scale", "amax", "routing", "auxiliary loss"
NUM_ROUTERS = "num_routers"  # the symbol for how many blocks have a router
CONTROL_UNIT = "head"  # with whose traffic it is priced: every model has one
AXIS_ORDER: Axes = ("pp", *BATCH_AXES, *EXPERT_AXES, "cp", *TP_AXES)


@lru_cache(maxsize=1024)
def control_collectives(scheme: ShardingScheme, policy: IssuePolicy) -> tuple[UnitCollective, ...]:
    """Return the control collectives of a step.

    They are the AllReduce of the gradients' norm, that of the noise scale if it is measured, that of the amax values if
    scales are delayed, that of the routers' statistics of all layers, as often as the policy says, and the sum of the
    auxiliary loss over the stages if statistics make one.
    """
    structure, scalar = scheme.structure, constant(1.0)
    reason = "each rank has squared its own part of the gradients"
    collectives = [_control_reduction(NORM, norm_axes(scheme), scalar, reason)]
    if policy.noise_scale:
        reason = "each rank has squared its own part of each micro-batch's gradient"
        collectives.append(_control_reduction(NOISE, noise_axes(scheme), scalar, reason))
    if scheme.shares_amax:
        reason = "each rank has the largest size of its own part of what products take"
        collectives.append(_control_reduction(AMAX, AXIS_ORDER, count_operands(structure), reason))
    per_micro_batch = policy.statistics == "micro_batch"
    if structure.experts and per_micro_batch:
        reason = "each stage has the loss of its own routers"
        collectives.append(_control_reduction(AUXILIARY, PIPELINE, scalar, reason))
    if structure.experts and policy.numbers_per_expert:
        numbers = multiply_symbols([NUM_ROUTERS, "E"], coefficient=policy.numbers_per_expert)
        reason, phase = "each rank has counted the rows of its own tokens", "backward" if per_micro_batch else "update"
        collectives.append(_control_reduction(ROUTING, routing_axes(scheme), numbers, reason, phase))
    return tuple(collectives)


def _control_reduction(
    name: str, axes: Axes, payload: Polynomial, reason: str, phase: str = "update"
) -> UnitCollective:
    kind, role = CollectiveKind.ALL_REDUCE, Role.STATISTIC
    return UnitCollective(CONTROL_UNIT, phase, kind, axes, role, payload, (name,), reason=reason)


def routing_axes(scheme: ShardingScheme) -> Axes:
    """Return the axes that split tokens where their experts are chosen."""
    forward = derived_unit(scheme, BASE_LAYER).forward
    gates = next(operation.outputs[0] for operation in forward.program.operations if isinstance(operation, Route))
    return tuple(axis for axis in AXIS_ORDER if axis in forward.specs[gates].sharded_axes)


def norm_axes(scheme: ShardingScheme) -> Axes:
    """Return the axes that split any part of the optimizer's state, and `pp`, whose stages hold different layers.

    One AllReduce runs over all of them, so a rank counts only its share of what it has in common with others of that group.
    """
    split = {"pp", *(axis for spec_axes in _state_axes(scheme) for axis in spec_axes)}
    return tuple(axis for axis in AXIS_ORDER if axis in split)


def noise_axes(scheme: ShardingScheme) -> Axes:
    """Return the axes over which squares of each micro-batch's gradient are summed.

    They split micro-batches among replicas, or a trained weight where it is used; and `pp`.
    """
    split = {"pp", *scheme.replica_axes}
    for name in units_of_structure(scheme.structure):
        unit = derived_unit(scheme, name)
        split.update(*(weight_use_spec(unit.scheme, dims).sharded_axes for dims in unit.trained.values()))
    return tuple(axis for axis in AXIS_ORDER if axis in split)


def _state_axes(scheme: ShardingScheme) -> Iterator[frozenset[str]]:
    for name in units_of_structure(scheme.structure):
        unit = derived_unit(scheme, name)
        for dims in unit.trained.values():
            yield optimizer_resting_spec(unit.scheme, dims).sharded_axes


COUNT_PREFIX = "num_"  # of the symbol for how many layers a model has of a kind, or modules of multi-token prediction


def layer_count_symbol(unit: str) -> str:
    """Return the symbol for how many layers are this unit, or modules of multi-token prediction."""
    return f"{COUNT_PREFIX}{unit}"


@lru_cache(maxsize=1024)
def unit_operands(structure: ModelStructure, name: str) -> tuple[str, ...]:
    """Return the tensors of a unit that products with its weights read, forward operands before backward ones."""
    unit = derived_unit(ShardingScheme.unsharded(structure), name)  # products are the same under every scheme
    steps = (*unit.forward.steps, *unit.backward_steps)
    products = block_products(steps, unit.tensors)
    return tuple(dict.fromkeys(name for product in products for name in product.operation.inputs))


def operands_by_path(architecture: Architecture) -> dict[str, tuple[str, ...]]:
    """Return the operands of every unit that has any, by its path, in the model's order."""
    operands = {path: unit_operands(architecture.structure, unit) for path, unit in unit_paths(architecture)}
    return {path: names for path, names in operands.items() if names}


def count_operands(structure: ModelStructure) -> Polynomial:
    """Return the number of operands in a model, in terms of the numbers of its layers (`layer_counts`)."""
    names = [name for name in units_of_structure(structure) if is_layer(name) or name in MTP_UNITS]
    return sum_polynomials(
        multiply_symbols([layer_count_symbol(name)], coefficient=len(unit_operands(structure, name))) for name in names
    )


def layer_counts(architecture: Architecture) -> Mapping[str, int]:
    """Return the number of layers of each kind and of modules of multi-token prediction, by symbol."""
    counts = {**architecture.layer_counts, **mtp_unit_counts(architecture.num_predict_layers)}
    return {layer_count_symbol(name): count for name, count in counts.items()}
