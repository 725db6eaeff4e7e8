"""Every collective and message that a rank issues in a step, with its dtype, bytes and count.

Collectives on activations are listed in order, those on weights and control by their counts. The gradient noise scale
adds the reductions of each replica's gradient of each micro-batch, before replicas are summed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain

from shardwise.model import BASE_LAYER, MTP_UNITS, Role
from shardwise.model.decoder import borrowed_weights
from shardwise.model.layer_pattern import EMBEDDING, HEAD
from shardwise.pipeline import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, FULL_BACKWARD, RankSlot
from shardwise.sharding import ROWS, Axes, CollectiveKind, IssuedCollective
from shardwise.step.collectives import NUM_ROUTERS, control_collectives
from shardwise.step.flat_arrays import FlatArrays
from shardwise.step.instructions import MIRROR_RANKS, PIPELINE, UnitCollective
from shardwise.step.parameters import ParameterGroup, PlacedUnit, unit_paths
from shardwise.step.rank_program import RankProgram
from shardwise.values import SymbolValues, bytes_per_element

PassCounts = Counter[tuple[str, int]]  # how often a rank runs a pass of a kind through a stage
CountedCollectives = Iterator[tuple[IssuedCollective, int]]
EMBEDDING_UNIT = PlacedUnit(EMBEDDING, EMBEDDING)


def count_collectives(program: RankProgram, num_micro_batches: int) -> Counter[IssuedCollective]:
    """Count every collective and message of a step; over axes of one device there is none."""
    counts: Counter[IssuedCollective] = Counter()
    slots = program.steps(num_micro_batches)
    passes = Counter((action.kind, action.stage) for slot in slots for action in slot.slot)
    activations = ((moved, times) for key, times in passes.items() for moved in pass_collectives(program, *key))
    messages = ((message, 1) for slot in slots for ends in _stage_messages(program, slot) for message in ends)
    mirrored = mirror_reductions(program, num_micro_batches)
    weights, control = _weight_collectives(program, passes), _control_collectives(program, passes)
    for collective, times in (*weights, *mirrored, *control, *activations, *messages):
        if collective.axes:
            counts[collective] += times
    return counts


def ordered_activation_collectives(program: RankProgram, num_micro_batches: int) -> Iterator[IssuedCollective]:
    """Yield the activation collectives and messages of a step in issue order; chunked ones appear as permutes."""
    for slot in program.steps(num_micro_batches):
        receives, sends = _stage_messages(program, slot)
        yield from receives
        for action in slot.slot:
            yield from pass_collectives(program, action.kind, action.stage)
        yield from sends


def pass_collectives(program: RankProgram, kind: str, stage: int) -> Iterator[IssuedCollective]:
    """Yield the activation collectives of a micro-batch's pass through a stage (`pipeline.actions`), in order."""
    for path, unit in program.ordered_units(kind, stage):
        for collective in program.activation_collectives(path, unit, kind):
            yield from _issue_activation_collective(program, collective)


def _issue_activation_collective(program: RankProgram, collective: UnitCollective) -> Iterator[IssuedCollective]:
    dtype = program.control_dtype if collective.role is Role.STATISTIC else program.precision.activations
    num_bytes = _num_bytes(collective.elements.evaluate(program.micro_batch_values(collective.unit)), dtype)
    axes = program.drop_single_device_axes(collective.axes)
    if collective.chunked_with:  # each block but the rank's own
        ranks = program.mesh.size(axes)
        block = IssuedCollective(CollectiveKind.PERMUTE, axes, dtype, num_bytes // ranks, "activations")
        yield from [block] * (ranks - 1)
    else:
        content = ROWS if collective.role is Role.ROUTED else "activations"
        yield IssuedCollective(collective.kind, axes, dtype, num_bytes, content)


def _stage_messages(program: RankProgram, slot: RankSlot) -> tuple[list[IssuedCollective], list[IssuedCollective]]:
    """Return the messages received before a slot and sent after it: a hidden state each, or its gradient."""
    if not (slot.receives or slot.sends):
        return [], []
    dtype = program.precision.activations
    elements = program.hidden_state_spec.local_elements().evaluate(program.micro_batch_values(BASE_LAYER))
    num_bytes = _num_bytes(elements, dtype)
    received = IssuedCollective(CollectiveKind.RECEIVE, PIPELINE, dtype, num_bytes, "activations")
    sent = received._replace(kind=CollectiveKind.SEND)
    return [received] * len(slot.receives), [sent] * len(slot.sends)


def _weight_collectives(program: RankProgram, passes: PassCounts) -> CountedCollectives:
    for stage, units in program.stages.items():
        of_units = (collective for unit in units for collective in program.traffic(unit.kind))
        for collective in (*of_units, *_borrowed_collectives(program, units)):
            if collective.moves_weights and not _issued_by_other_unit(program, collective, units):
                times = passes[FORWARD, stage] if collective.scope == "micro_batch" else 1
                if collective.phase == "forward" and program.gathers_again(collective.unit):
                    times = times * 2
                yield from ((array, times) for array in _issue_arrays(program, collective))
    yield from ((_mirror_sum(program, group.shard_size), 1) for group in program.groups if group.mirrored)


def _mirror_sum(program: RankProgram, elements: int) -> IssuedCollective:
    dtype = program.gradient_dtype
    return IssuedCollective(CollectiveKind.ALL_REDUCE, MIRROR_RANKS, dtype, _num_bytes(elements, dtype), "gradients")


def _borrowed_collectives(program: RankProgram, units: Sequence[PlacedUnit]) -> Iterator[UnitCollective]:
    """Yield the collectives on gradients and updated weights of units that lend them to a stage without these units.

    A tied head issues its own.
    """
    kinds = {unit.kind for unit in units}
    lent: dict[str, set[str]] = {}
    for owner in (owner for kind in kinds for owner in borrowed_weights(program.architecture, kind).values()):
        is_tied = program.architecture.tied_embeddings and owner.weight == EMBEDDING
        if owner.unit not in kinds and not is_tied:
            lent.setdefault(owner.unit, set()).add(owner.weight)
    for unit, names in lent.items():
        for collective in program.traffic(unit):
            if collective.moves_weights and not _is_weight_gather(collective) and names.issuperset(collective.tensors):
                yield collective


def _is_weight_gather(collective: UnitCollective) -> bool:
    return collective.role is Role.WEIGHT and collective.scope == "micro_batch"


def _issued_by_other_unit(program: RankProgram, collective: UnitCollective, units: Sequence[PlacedUnit]) -> bool:
    """Return True if another unit of this rank issues the collective (tied or borrowed weights).

    A tied head gathers its weight, unless the unit has gathered it for the embedding, but has neither gradient nor
    state of its own.
    """
    tied = program.architecture.tied_embeddings and collective.tensors == (HEAD,)
    if _is_weight_gather(collective):
        return tied and collective.unit in MTP_UNITS and collective.phase == "forward"
    lent = tied or (collective.unit == EMBEDDING and EMBEDDING_UNIT not in units)
    return lent and EMBEDDING_UNIT in (units if collective.scope == "micro_batch" else program.units)


def _issue_arrays(program: RankProgram, collective: UnitCollective) -> Iterator[IssuedCollective]:
    """Yield a collective for each of its flat arrays, for a matrix, or for means."""
    content, dtype = {
        Role.WEIGHT: ("weights", program.precision.weights), Role.WEIGHT_GRADIENT: ("gradients", program.gradient_dtype),
        Role.DIRECTION: ("directions", program.precision.activations), Role.MEAN: ("means", program.control_dtype),
    }[collective.role]  # fmt: skip
    payload, values = collective.payload, program.unit_values(collective.unit)
    max_elements = program.max_bucket_elements
    sizes = payload.array_sizes(values, max_elements) if isinstance(payload, FlatArrays) else [payload.evaluate(values)]
    axes = program.drop_single_device_axes(collective.axes)
    for elements in sizes:
        yield IssuedCollective(collective.kind, axes, dtype, _num_bytes(elements, dtype), content)


def _control_collectives(program: RankProgram, passes: PassCounts) -> CountedCollectives:
    of_units = chain.from_iterable(program.traffic(unit) for _, unit in unit_paths(program.architecture))
    for collective in of_units:
        if collective.is_control:  # the loss, which the last stage has
            yield _issue_control(program, collective, (*PIPELINE, *collective.axes), program.values), 1
    for collective in control_collectives(program.scheme, program.policy):
        if collective.scope == "step":
            yield _issue_control(program, collective, collective.axes, program.values), 1
            continue
        for stage, units in program.stages.items():
            num_routers = program.num_routers(units)
            if num_routers:
                values = SymbolValues({**program.values, NUM_ROUTERS: num_routers})
                yield _issue_control(program, collective, collective.axes, values), passes[FORWARD, stage]


def _issue_control(
    program: RankProgram, collective: UnitCollective, axes: Axes, values: SymbolValues
) -> IssuedCollective:
    axes, dtype = program.drop_single_device_axes(axes), program.control_dtype
    num_bytes = _num_bytes(collective.elements.evaluate(values), dtype)
    return IssuedCollective(collective.kind, axes, dtype, num_bytes, collective.tensors[0])


def _num_bytes(elements: float, dtype: str) -> int:
    return round(elements * bytes_per_element(dtype))


def partial_gradient_names(program: RankProgram) -> frozenset[str]:
    """Return the names of parameters whose gradient is made by more than one pass of a micro-batch, in parts.

    They are the weights that both ends of a pipeline share, and those that multi-token prediction borrows.
    """
    kinds = (BACKWARD_INPUT, BACKWARD_WEIGHT) if program.splits_backward else (FULL_BACKWARD,)
    passes: dict[str, set[tuple[int, str]]] = {}
    for rank in range(program.layout.pp):
        rank_program = program.for_pp_rank(rank)
        for stage, kind in ((stage, kind) for stage in rank_program.stages for kind in kinds):
            for path in rank_program.units_with_weight_grads(kind, stage):
                for parameter in rank_program.parameters_by_unit[path].values():
                    passes.setdefault(parameter.name, set()).add((stage, kind))
    return frozenset(name for name, passes_with_gradient in passes.items() if len(passes_with_gradient) > 1)


def partial_gradient_groups(program: RankProgram) -> tuple[ParameterGroup, ...]:
    """Return the groups of the rank that have parameters with partial gradients."""
    names = partial_gradient_names(program)
    return tuple(group for group in program.groups if group.trained and not names.isdisjoint(group.names))


def mirror_reductions(program: RankProgram, num_micro_batches: int) -> Iterator[tuple[IssuedCollective, int]]:
    """Yield the sums over mirrored ranks of each micro-batch's gradient, which the noise scale needs, with their count."""
    for group in partial_gradient_groups(program) if program.policy.noise_scale else ():
        if group.mirrored:
            yield _mirror_sum(program, group.padded_size), num_micro_batches
