"""The collectives of a unit as an engine issues them: what was derived, with weights and gradients as flat arrays.

Bytes per kind, axes, pass and scope are conserved, but for flat arrays' padding, and for what of a group only one pass reads.
A scalar (the loss) is reduced once per step, not per micro-batch. A collective that runs beside computations is issued in as
many pieces as its group has devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import groupby

from shardwise.derive.derivation import Unit
from shardwise.derive.means import moves_mean
from shardwise.derive.overlapped import overlapped
from shardwise.derive.products import taken_by_products
from shardwise.derive.walk import Communicate, Compute, Step
from shardwise.issuing import IssuePolicy
from shardwise.lowering.flat import Extent, FlatArrays
from shardwise.lowering.weights import WEIGHT_ROLES, Move, WeightGroup, kind_of, moves_flat, weight_groups
from shardwise.model.program import Role, density
from shardwise.model.update import weight_of
from shardwise.sharding.collective import Kind
from shardwise.sharding.spec import Axes
from shardwise.symbolic import Local, Polynomial, Values, product, total

# The pair of ranks along `pp` that are as far from either end: first and last, second and last but one.
OPPOSITE: Axes = ("pp_opposite",)
PIPELINE: Axes = ("pp",)  # over which messages between stages go


@dataclass(frozen=True, slots=True)
class Traffic:
    """A collective of one unit, or one for each of its flat arrays.

    `payload` are elements (see `Collective.payload_elements`; of routed tokens those that are there), `tensors` what it carries,
    `beside` the results of the computations that it runs beside, in pieces. `for_products`: nothing but products with a block's
    weights take what it brings. `reason` is the derivation's, `derived` its collectives that this one stands for;
    `tells`: of how many rows are sent, the collective that sends them.
    """

    unit: str
    phase: str
    kind: Kind
    axes: Axes
    role: Role
    payload: Polynomial | FlatArrays
    tensors: tuple[str, ...]
    beside: tuple[str, ...] = ()
    for_products: bool = False
    reason: str = ""
    place: int = field(default=-1, compare=False)  # among the derived steps of its pass; of flat arrays none
    derived: tuple[Communicate, ...] = field(default=(), compare=False, repr=False)
    tells: Traffic | None = field(default=None, compare=False, repr=False)

    @property
    def name(self) -> str:
        """What it goes by where steps are drawn and traced: its kind, and the first tensor that it carries."""
        return f"{self.kind} {self.tensors[0]}"

    @property
    def scope(self) -> str:
        """How often it runs: once per optimizer step, or per micro-batch."""
        return "step" if self.phase == "update" else "micro_batch"

    @property
    def carries_weights(self) -> bool:
        """Whether it carries weights, their gradients, or what an optimizer makes of these."""
        return self.role in (*WEIGHT_ROLES, Role.DIRECTION, Role.MEAN)

    @property
    def is_control(self) -> bool:
        """Whether it carries the loss, the norm, or what routers did: numbers that no operation of the pass waits for."""
        return self.role is Role.STATISTIC and self.place < 0

    @property
    def group(self) -> str:
        """The parallel axis that it is charged to; what runs once per step is control traffic, unless it carries weights."""
        return axis_group(self.axes) if self.carries_weights or self.scope != "step" else "control"

    @property
    def elements(self) -> Polynomial:
        """The payload's elements without padding."""
        return self.payload.elements if isinstance(self.payload, FlatArrays) else self.payload

    def extent(self, values: Values, most_elements: float) -> Extent:
        """How many collectives there are and their elements together, where buckets hold at most so many."""
        if isinstance(self.payload, FlatArrays):
            return self.payload.evaluate(values, most_elements)
        return Extent(1, self.payload.evaluate(values))


def axis_group(axes: Axes) -> str:
    """The parallel axis that traffic over these atomic axes belongs to."""
    if axes == OPPOSITE:
        return "pp"
    for name in ("dp", "fsdp", "cp", "pp", "ep"):
        if name in axes:
            return name
    return "tp"


def unit_traffic(unit: Unit, policy: IssuePolicy, single: Set[str] = frozenset()) -> tuple[Traffic, ...]:
    """All collectives of one unit; slices are none. `single`: axes that are known to have one device (see `weight_groups`)."""
    weights = (traffic for group in weight_groups(unit, single) for traffic in _of_group(unit, group, policy))
    return (*_counted(_joined(_of_activations(unit))), *_of_means(unit), *weights)


def _of_activations(unit: Unit) -> Iterator[Traffic]:
    """What moves activations, scalars, and matrices one by one."""
    phases, tensors = unit.phases(), unit.tensors
    for phase, steps in phases.items():
        beside = {piece.step: _results(steps, piece.beside) for piece in overlapped(steps, unit.family)}
        for position, step in enumerate(steps):
            if not isinstance(step, Communicate) or step.collective.kind is Kind.SLICE or moves_flat(step, unit.family):
                continue
            if moves_mean(step):
                continue
            collective, role = step.collective, step.tensor.role
            yield Traffic(
                unit.name, phase if step.tensor.dims else "update",  # the loss is a sum, so it is reduced once per step
                collective.kind, collective.axes, role, collective.payload_elements * density(role), (step.tensor.name,),
                beside.get(position, ()), taken_by_products(phases, tensors, phase, position), step.reason,
                position if step.tensor.dims else -1, (step,),
            )  # fmt: skip


def _of_means(unit: Unit) -> Iterator[Traffic]:
    """Partial sums of the means that an update takes: those that stand together and move over the same axes as one array."""
    steps = unit.update.steps
    for is_moved, run in groupby(enumerate(steps), key=lambda pair: moves_mean(pair[1])):
        if not is_moved:
            continue
        together: dict[tuple[str, Axes], list[Communicate]] = {}
        members = list(run)
        for _, step in members:
            assert isinstance(step, Communicate)
            together.setdefault((kind_of(weight_of(step.tensor.name)), step.collective.axes), []).append(step)
        for (_, axes), moved in together.items():
            payload = total(one.collective.payload_elements for one in moved)
            weights = tuple(dict.fromkeys(weight_of(one.tensor.name) for one in moved))
            yield Traffic(
                unit.name, "update", Kind.ALL_REDUCE, axes, Role.MEAN, payload, weights,
                reason="means over weights that are split", place=members[0][0], derived=tuple(moved),
            )  # fmt: skip


def _results(steps: tuple[Step, ...], positions: tuple[int, ...]) -> tuple[str, ...]:
    """The first result of each of some computations: their names among the kernels."""
    return tuple(step.operation.outputs[0] for p in positions if isinstance(step := steps[p], Compute))


def _joined(collectives: Iterable[Traffic]) -> Iterator[Traffic]:
    """AllToAlls of one tensor over one axis after the other as one over both: a dispatcher sends each row once, and gets it back
    in the same group."""
    waiting: Traffic | None = None
    for one in collectives:
        if waiting and waiting.kind is one.kind is Kind.ALL_TO_ALL and waiting.tensors == one.tensors:
            derived = (*waiting.derived, *one.derived)
            parts = (one.axes, waiting.axes) if _goes_back(derived) else (waiting.axes, one.axes)
            waiting = replace(one, axes=parts[0] + parts[1], derived=derived)
            continue
        if waiting:
            yield waiting
        waiting = one
    if waiting:
        yield waiting


def _goes_back(derived: Sequence[Communicate]) -> bool:
    """Whether rows leave their experts: these are split over fewer axes behind it."""
    before, after = derived[0].collective.before, derived[-1].collective.after
    return len(after.axes_of("E")) < len(before.axes_of("E"))


def _counted(collectives: Iterable[Traffic]) -> Iterator[Traffic]:
    """Before rows go to their experts each rank tells how many it sends for each: numbers for each expert, of all who gather."""
    for one in collectives:
        if one.role is Role.ROUTED and one.phase == "forward" and one.kind in (Kind.ALL_TO_ALL, Kind.ALL_GATHER):
            experts = product([Local("E", one.derived[0].collective.before.axes_of("E"))])
            if one.kind is Kind.ALL_GATHER:
                experts = experts * product(one.axes)
            if not _goes_back(one.derived):
                yield replace(
                    one, role=Role.STATISTIC, payload=experts, beside=(), for_products=False, derived=(), tells=one,
                    reason="each rank tells how many rows it sends for each expert",
                )  # fmt: skip
        yield one


def _of_group(unit: Unit, group: WeightGroup, policy: IssuePolicy) -> Iterator[Traffic]:
    """The collectives on a group's flat arrays. What was scattered is reduced, over the axes that replicate it, in parts."""
    within = group.sync.within(unit.family.replica_axes)
    if policy.noise_scale and group.trained and within:
        yield Traffic(
            unit.name, "backward", Kind.ALL_REDUCE, within, Role.WEIGHT_GRADIENT, group.arrays, group.weights,
            reason="the norm of a micro-batch's gradient is of the whole sum over its sequences",
        )  # fmt: skip
    for move in group.moves:
        role = Role.WEIGHT if move.kind is Kind.ALL_GATHER else Role.WEIGHT_GRADIENT
        role = Role.DIRECTION if move.of_direction else role
        in_parts = move.kind is Kind.ALL_REDUCE and bool(group.sync.scatter or group.sync.step_scatter)
        yield Traffic(
            unit.name, _phase(move, group, policy), move.kind, move.axes, role, replace(group.arrays, in_parts=in_parts),
            group.weights, reason=_reason(move), derived=group.derived_as(move),
        )  # fmt: skip


def _phase(move: Move, group: WeightGroup, policy: IssuePolicy) -> str:
    """The pass that a collective runs in: gradients that rest whole may be reduced in every micro-batch."""
    early = policy.reduce_each_micro_batch and move.kind is not Kind.ALL_GATHER and not group.sync.scatter
    return "backward" if early else move.phase


def _reason(move: Move) -> str:
    match move.kind:
        case Kind.ALL_GATHER if move.of_direction:
            return "the update is a function of whole matrices"
        case Kind.ALL_GATHER if move.phase == "update":
            return "weights that the update changed in parts are used whole"
        case Kind.ALL_GATHER:
            return "weights rest in parts and are used whole"
        case Kind.REDUCE_SCATTER:
            return "gradients are partial sums, and rest in parts"
        case _:
            return "gradients are partial sums, and are updated whole"
