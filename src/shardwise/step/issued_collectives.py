"""Every collective and message that a rank issues in a step, with its dtype, bytes and count.

Collectives on activations are listed in order, those on weights and control by their counts. The gradient noise scale adds
some of its own: each replica's gradient of each micro-batch, before replicas are added up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from shardwise.model.decoder import BORROWED, PREDICTS
from shardwise.model.program import Role
from shardwise.pipeline.actions import BACKWARD, FORWARD, INPUT, WEIGHT
from shardwise.pipeline.messages import Step
from shardwise.sharding.collectives import ROWS, Issued, Kind
from shardwise.sharding.spec import Axes
from shardwise.step.collectives import NUM_ROUTERS, control_traffic
from shardwise.step.flat_arrays import FlatArrays
from shardwise.step.instructions import OPPOSITE, PIPELINE, Traffic
from shardwise.step.parameters import EMBEDDING, TIED, Group, PlacedUnit, unit_paths
from shardwise.values.dtypes import bytes_per_element
from shardwise.values.symbolic import Values

if TYPE_CHECKING:
    from shardwise.step.rank_program import Instance


Passes = Counter[tuple[str, int]]  # how often a rank runs a pass of a kind through a stage
Counted = Iterator[tuple[Issued, int]]
HERE = PlacedUnit(EMBEDDING, EMBEDDING)


def issued_step(instance: Instance, num_micro_batches: int) -> Counter[Issued]:
    """Each with its count; over axes of one device there is none."""
    found: Counter[Issued] = Counter()
    steps = instance.steps(num_micro_batches)
    passes = Counter((action.kind, action.stage) for step in steps for action in step.slot)
    activations = ((one, times) for of_pass, times in passes.items() for one in issued_pass(instance, *of_pass))
    messages = ((one, 1) for step in steps for ends in _messages(instance, step) for one in ends)
    ends = between_ends(instance, num_micro_batches)
    for one, times in (*_weights(instance, passes), *ends, *_control(instance, passes), *activations, *messages):
        if one.axes:
            found[one] += times
    return found


def in_order(instance: Instance, num_micro_batches: int) -> Iterator[Issued]:
    """What moves activations; of what runs beside computations block by block, in a ring."""
    for step in instance.steps(num_micro_batches):
        receives, sends = _messages(instance, step)
        yield from receives
        for action in step.slot:
            yield from issued_pass(instance, action.kind, action.stage)
        yield from sends


def issued_pass(instance: Instance, kind: str, stage: int) -> Iterator[Issued]:
    """What moves activations in a pass of a micro-batch through a stage (`pipeline.actions`), in order."""
    for path, unit in instance.in_order(kind, stage):
        for one in instance.moving(path, unit, kind):
            yield from _of_activations(instance, one)


def _of_activations(instance: Instance, one: Traffic) -> Iterator[Issued]:
    dtype = instance.control_dtype if one.role is Role.STATISTIC else instance.precision.activations
    num_bytes, axes = _bytes(one.elements.evaluate(instance.sizes), dtype), instance.several(one.axes)
    if one.beside:  # each block but the rank's own
        ranks = instance.mesh.size(axes)
        yield from [Issued(Kind.PERMUTE, axes, dtype, num_bytes // ranks, "activations")] * (ranks - 1)
    else:
        yield Issued(one.kind, axes, dtype, num_bytes, ROWS if one.role is Role.ROUTED else "activations")


def _messages(instance: Instance, step: Step) -> tuple[list[Issued], list[Issued]]:
    """What comes in front of a slot, and what leaves behind it: a hidden state each, or the gradient of one."""
    if not (step.receives or step.sends):
        return [], []
    dtype = instance.precision.activations
    num_bytes = _bytes(instance.hidden.local_elements().evaluate(instance.sizes), dtype)
    received, sent = (Issued(kind, PIPELINE, dtype, num_bytes, "activations") for kind in (Kind.RECEIVE, Kind.SEND))
    return [received] * len(step.receives), [sent] * len(step.sends)


def _weights(instance: Instance, passes: Passes) -> Counted:
    for stage, units in instance.stages.items():
        for one in (*(one for unit in units for one in instance.traffic(unit.kind)), *_lent(instance, units)):
            if one.carries_weights and not _is_served(instance, one, units):
                times = passes[FORWARD, stage] if one.scope == "micro_batch" else 1
                again = one.phase == "forward" and instance.gathers_again(one.unit)
                yield from ((array, times * (2 if again else 1)) for array in _arrays(instance, one))
    dtype = instance.reduced
    for group in instance.groups:
        if group.shared:
            yield Issued(Kind.ALL_REDUCE, OPPOSITE, dtype, _bytes(group.shard_size, dtype), "gradients"), 1


def _lent(instance: Instance, units: Sequence[PlacedUnit]) -> Iterator[Traffic]:
    """What moves gradients, and new weights, of what the embedding lends to other units of a stage than its own; a tied head's
    are its own traffic."""
    kinds = {unit.kind for unit in units}
    names = {name for kind in kinds for name in BORROWED.get(kind, ())}
    names -= {EMBEDDING} if instance.architecture.tied_embeddings else set()
    if names and EMBEDDING not in kinds:
        for one in instance.traffic(EMBEDDING):
            if one.carries_weights and not _gathers(one) and names.issuperset(one.tensors):
                yield one


def _gathers(one: Traffic) -> bool:
    return one.role is Role.WEIGHT and one.scope == "micro_batch"


def _is_served(instance: Instance, one: Traffic, units: Sequence[PlacedUnit]) -> bool:
    """Whether what another unit issues serves: of weights that the embedding has, in this stage or in another of the rank.

    A tied head gathers its weight, where the unit has not gathered it for the embedding, but has neither gradient nor state of
    its own.
    """
    tied = instance.architecture.tied_embeddings and one.tensors == (TIED,)
    if _gathers(one):
        return tied and one.unit in PREDICTS and one.phase == "forward"
    lent = tied or (one.unit == EMBEDDING and HERE not in units)
    return lent and HERE in (units if one.scope == "micro_batch" else instance.units)


def _arrays(instance: Instance, one: Traffic) -> Iterator[Issued]:
    """A collective on each of its flat arrays, on a matrix, or on means."""
    what, dtype = {
        Role.WEIGHT: ("weights", instance.precision.weights), Role.WEIGHT_GRADIENT: ("gradients", instance.reduced),
        Role.DIRECTION: ("directions", instance.precision.activations), Role.MEAN: ("means", instance.control_dtype),
    }[one.role]  # fmt: skip
    payload, values, most = one.payload, instance.values, instance.most_elements
    sizes = payload.arrays(values, most) if isinstance(payload, FlatArrays) else [payload.evaluate(values)]
    for elements in sizes:
        yield Issued(one.kind, instance.several(one.axes), dtype, _bytes(elements, dtype), what)


def _control(instance: Instance, passes: Passes) -> Counted:
    every = [one for _, unit in unit_paths(instance.architecture) for one in instance.traffic(unit) if one.is_control]
    yield from ((_of_control(instance, one, (*PIPELINE, *one.axes), instance.values), 1) for one in every)
    for one in control_traffic(instance.architecture.structure, instance.family, instance.policy):
        if one.scope == "step":
            yield _of_control(instance, one, one.axes, instance.values), 1
            continue
        for stage, units in instance.stages.items():
            num_routers = instance.num_routers(units)
            if num_routers:
                values = Values({**instance.values, NUM_ROUTERS: num_routers})
                yield _of_control(instance, one, one.axes, values), passes[FORWARD, stage]


def _of_control(instance: Instance, one: Traffic, axes: Axes, values: Values) -> Issued:
    dtype = instance.control_dtype
    return Issued(one.kind, instance.several(axes), dtype, _bytes(one.elements.evaluate(values), dtype), one.tensors[0])


def _bytes(elements: float, dtype: str) -> int:
    return round(elements * bytes_per_element(dtype))


def divided(instance: Instance) -> frozenset[str]:
    """The names of parameters of whose gradient several passes of one micro-batch give a part each: what the ends of a pipeline
    share, and what modules of multi-token prediction borrow. All others' gradients are whole behind one pass."""
    kinds = (INPUT, WEIGHT) if instance.splits else (BACKWARD,)
    passes: dict[str, set[tuple[int, str]]] = {}
    for rank in range(instance.layout.pp):
        one = instance.at(rank)
        for stage, kind in ((stage, kind) for stage in one.stages for kind in kinds):
            for path in one.giving(kind, stage):
                for parameter in one.used[path].values():
                    passes.setdefault(parameter.name, set()).add((stage, kind))
    return frozenset(name for name, given in passes.items() if len(given) > 1)


def divided_groups(instance: Instance) -> tuple[Group, ...]:
    """The groups of the rank that have such parameters."""
    names = divided(instance)
    return tuple(group for group in instance.groups if group.trained and not names.isdisjoint(group.names))


def between_ends(instance: Instance, num_micro_batches: int) -> Iterator[tuple[Issued, int]]:
    """The sums over both ends of a pipeline of what each has of a micro-batch's gradient."""
    for group in divided_groups(instance) if instance.policy.noise_scale else ():
        if group.shared:
            num_bytes = round(group.padded_size * bytes_per_element(instance.reduced))
            yield Issued(Kind.ALL_REDUCE, OPPOSITE, instance.reduced, num_bytes, "gradients"), num_micro_batches
