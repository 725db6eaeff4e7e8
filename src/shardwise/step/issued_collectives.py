"""Every collective and message that a rank issues in a step, with its dtype, bytes and count.

Collectives on activations are listed in order, those on weights and control by their counts. The gradient noise scale adds
some of its own: each replica's gradient of each micro-batch, before replicas are added up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from shardwise.model.decoder import BORROWED_WEIGHTS, MTP_UNITS
from shardwise.model.program import Role
from shardwise.pipeline.actions import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, FULL_BACKWARD
from shardwise.pipeline.messages import RankSlot
from shardwise.sharding.collectives import ROWS, CollectiveKind, IssuedCollective
from shardwise.sharding.spec import Axes
from shardwise.step.collectives import NUM_ROUTERS, control_collectives
from shardwise.step.flat_arrays import FlatArrays
from shardwise.step.instructions import MIRROR_RANKS, PIPELINE, UnitCollective
from shardwise.step.parameters import EMBEDDING, TIED_HEAD, ParameterGroup, PlacedUnit, unit_paths
from shardwise.values.dtypes import bytes_per_element
from shardwise.values.symbolic import SymbolValues

if TYPE_CHECKING:
    from shardwise.step.rank_program import RankProgram


PassCounts = Counter[tuple[str, int]]  # how often a rank runs a pass of a kind through a stage
CountedCollectives = Iterator[tuple[IssuedCollective, int]]
EMBEDDING_UNIT = PlacedUnit(EMBEDDING, EMBEDDING)


def count_collectives(instance: RankProgram, num_micro_batches: int) -> Counter[IssuedCollective]:
    """Each with its count; over axes of one device there is none."""
    found: Counter[IssuedCollective] = Counter()
    steps = instance.steps(num_micro_batches)
    passes = Counter((action.kind, action.stage) for step in steps for action in step.slot)
    activations = ((one, times) for of_pass, times in passes.items() for one in pass_collectives(instance, *of_pass))
    messages = ((one, 1) for step in steps for ends in _stage_messages(instance, step) for one in ends)
    ends = mirror_reductions(instance, num_micro_batches)
    for one, times in (
        *_weight_collectives(instance, passes),
        *ends,
        *_control_collectives(instance, passes),
        *activations,
        *messages,
    ):
        if one.axes:
            found[one] += times
    return found


def ordered_activation_collectives(instance: RankProgram, num_micro_batches: int) -> Iterator[IssuedCollective]:
    """What moves activations; of what runs beside computations block by block, in a ring."""
    for step in instance.steps(num_micro_batches):
        receives, sends = _stage_messages(instance, step)
        yield from receives
        for action in step.slot:
            yield from pass_collectives(instance, action.kind, action.stage)
        yield from sends


def pass_collectives(instance: RankProgram, kind: str, stage: int) -> Iterator[IssuedCollective]:
    """What moves activations in a pass of a micro-batch through a stage (`pipeline.actions`), in order."""
    for path, unit in instance.ordered_units(kind, stage):
        for one in instance.activation_collectives(path, unit, kind):
            yield from _issue_activation_collective(instance, one)


def _issue_activation_collective(instance: RankProgram, one: UnitCollective) -> Iterator[IssuedCollective]:
    dtype = instance.control_dtype if one.role is Role.STATISTIC else instance.precision.activations
    num_bytes, axes = (
        _num_bytes(one.elements.evaluate(instance.micro_batch_values), dtype),
        instance.drop_single_device_axes(one.axes),
    )
    if one.chunked_with:  # each block but the rank's own
        ranks = instance.mesh.size(axes)
        yield from [IssuedCollective(CollectiveKind.PERMUTE, axes, dtype, num_bytes // ranks, "activations")] * (
            ranks - 1
        )
    else:
        yield IssuedCollective(one.kind, axes, dtype, num_bytes, ROWS if one.role is Role.ROUTED else "activations")


def _stage_messages(instance: RankProgram, step: RankSlot) -> tuple[list[IssuedCollective], list[IssuedCollective]]:
    """What comes in front of a slot, and what leaves behind it: a hidden state each, or the gradient of one."""
    if not (step.receives or step.sends):
        return [], []
    dtype = instance.precision.activations
    num_bytes = _num_bytes(instance.hidden_state_spec.local_elements().evaluate(instance.micro_batch_values), dtype)
    received, sent = (
        IssuedCollective(kind, PIPELINE, dtype, num_bytes, "activations")
        for kind in (CollectiveKind.RECEIVE, CollectiveKind.SEND)
    )
    return [received] * len(step.receives), [sent] * len(step.sends)


def _weight_collectives(instance: RankProgram, passes: PassCounts) -> CountedCollectives:
    for stage, units in instance.stages.items():
        for one in (
            *(one for unit in units for one in instance.traffic(unit.kind)),
            *_borrowed_collectives(instance, units),
        ):
            if one.moves_weights and not _issued_by_other_unit(instance, one, units):
                times = passes[FORWARD, stage] if one.scope == "micro_batch" else 1
                again = one.phase == "forward" and instance.gathers_again(one.unit)
                yield from ((array, times * (2 if again else 1)) for array in _issue_arrays(instance, one))
    dtype = instance.gradient_dtype
    for group in instance.groups:
        if group.mirrored:
            yield (
                IssuedCollective(
                    CollectiveKind.ALL_REDUCE, MIRROR_RANKS, dtype, _num_bytes(group.shard_size, dtype), "gradients"
                ),
                1,
            )


def _borrowed_collectives(instance: RankProgram, units: Sequence[PlacedUnit]) -> Iterator[UnitCollective]:
    """What moves gradients, and new weights, of what the embedding lends to other units of a stage than its own; a tied head's
    are its own traffic."""
    kinds = {unit.kind for unit in units}
    names = {name for kind in kinds for name in BORROWED_WEIGHTS.get(kind, ())}
    names -= {EMBEDDING} if instance.architecture.tied_embeddings else set()
    if names and EMBEDDING not in kinds:
        for one in instance.traffic(EMBEDDING):
            if one.moves_weights and not _is_weight_gather(one) and names.issuperset(one.tensors):
                yield one


def _is_weight_gather(one: UnitCollective) -> bool:
    return one.role is Role.WEIGHT and one.scope == "micro_batch"


def _issued_by_other_unit(instance: RankProgram, one: UnitCollective, units: Sequence[PlacedUnit]) -> bool:
    """Whether what another unit issues serves: of weights that the embedding has, in this stage or in another of the rank.

    A tied head gathers its weight, where the unit has not gathered it for the embedding, but has neither gradient nor state of
    its own.
    """
    tied = instance.architecture.tied_embeddings and one.tensors == (TIED_HEAD,)
    if _is_weight_gather(one):
        return tied and one.unit in MTP_UNITS and one.phase == "forward"
    lent = tied or (one.unit == EMBEDDING and EMBEDDING_UNIT not in units)
    return lent and EMBEDDING_UNIT in (units if one.scope == "micro_batch" else instance.units)


def _issue_arrays(instance: RankProgram, one: UnitCollective) -> Iterator[IssuedCollective]:
    """A collective on each of its flat arrays, on a matrix, or on means."""
    what, dtype = {
        Role.WEIGHT: ("weights", instance.precision.weights), Role.WEIGHT_GRADIENT: ("gradients", instance.gradient_dtype),
        Role.DIRECTION: ("directions", instance.precision.activations), Role.MEAN: ("means", instance.control_dtype),
    }[one.role]  # fmt: skip
    payload, values, most = one.payload, instance.values, instance.max_bucket_elements
    sizes = payload.array_sizes(values, most) if isinstance(payload, FlatArrays) else [payload.evaluate(values)]
    for elements in sizes:
        yield IssuedCollective(
            one.kind, instance.drop_single_device_axes(one.axes), dtype, _num_bytes(elements, dtype), what
        )


def _control_collectives(instance: RankProgram, passes: PassCounts) -> CountedCollectives:
    every = [one for _, unit in unit_paths(instance.architecture) for one in instance.traffic(unit) if one.is_control]
    yield from ((_issue_control(instance, one, (*PIPELINE, *one.axes), instance.values), 1) for one in every)
    for one in control_collectives(instance.architecture.structure, instance.family, instance.policy):
        if one.scope == "step":
            yield _issue_control(instance, one, one.axes, instance.values), 1
            continue
        for stage, units in instance.stages.items():
            num_routers = instance.num_routers(units)
            if num_routers:
                values = SymbolValues({**instance.values, NUM_ROUTERS: num_routers})
                yield _issue_control(instance, one, one.axes, values), passes[FORWARD, stage]


def _issue_control(instance: RankProgram, one: UnitCollective, axes: Axes, values: SymbolValues) -> IssuedCollective:
    dtype = instance.control_dtype
    return IssuedCollective(
        one.kind,
        instance.drop_single_device_axes(axes),
        dtype,
        _num_bytes(one.elements.evaluate(values), dtype),
        one.tensors[0],
    )


def _num_bytes(elements: float, dtype: str) -> int:
    return round(elements * bytes_per_element(dtype))


def partial_gradient_names(instance: RankProgram) -> frozenset[str]:
    """The names of parameters of whose gradient several passes of one micro-batch give a part each: what the ends of a pipeline
    share, and what modules of multi-token prediction borrow. All others' gradients are whole behind one pass."""
    kinds = (BACKWARD_INPUT, BACKWARD_WEIGHT) if instance.splits_backward else (FULL_BACKWARD,)
    passes: dict[str, set[tuple[int, str]]] = {}
    for rank in range(instance.layout.pp):
        one = instance.for_pp_rank(rank)
        for stage, kind in ((stage, kind) for stage in one.stages for kind in kinds):
            for path in one.units_with_weight_grads(kind, stage):
                for parameter in one.parameters_by_unit[path].values():
                    passes.setdefault(parameter.name, set()).add((stage, kind))
    return frozenset(name for name, given in passes.items() if len(given) > 1)


def partial_gradient_groups(instance: RankProgram) -> tuple[ParameterGroup, ...]:
    """The groups of the rank that have such parameters."""
    names = partial_gradient_names(instance)
    return tuple(group for group in instance.groups if group.trained and not names.isdisjoint(group.names))


def mirror_reductions(instance: RankProgram, num_micro_batches: int) -> Iterator[tuple[IssuedCollective, int]]:
    """The sums over both ends of a pipeline of what each has of a micro-batch's gradient."""
    for group in partial_gradient_groups(instance) if instance.policy.noise_scale else ():
        if group.mirrored:
            num_bytes = round(group.padded_size * bytes_per_element(instance.gradient_dtype))
            yield (
                IssuedCollective(
                    CollectiveKind.ALL_REDUCE, MIRROR_RANKS, instance.gradient_dtype, num_bytes, "gradients"
                ),
                num_micro_batches,
            )
