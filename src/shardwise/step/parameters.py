"""Parameters of a model by name, how each is synchronised, and the flat arrays that they fill, in numbers.

The flat arrays are units of FSDP, and buckets of gradients, in the order in which gradients are ready.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from shardwise.derive import derived_unit, pad_vocabulary, weight_use_spec
from shardwise.layout import ShardingScheme
from shardwise.model import MTP_UNITS, Architecture, get_optimizer, weight_matrices
from shardwise.model.decoder import MTP_BLOCK_PREFIX, borrowed_weights, mtp_unit_counts
from shardwise.model.layer_pattern import EMBEDDING, HEAD
from shardwise.model.optimizer_program import WeightMatrix
from shardwise.sharding import Mesh, Spec
from shardwise.step.flat_arrays import (
    ALIGNMENT,
    WeightSync,
    align_up,
    array_key,
    can_share_arrays,
    classify_moves,
    find_weight_moves,
    shard_elements,
    starts_array,
)


class PlacedUnit(NamedTuple):
    """A unit of a model (embedding, block or head): its path in the model, such as `layers.3`, and its kind."""

    path: str
    kind: str


@dataclass(frozen=True, slots=True)
class Parameter:
    """A weight of one unit of the model.

    `path` and `unit` are the path and the kind of its unit, `use` its sharding where it is used, `sync` the collectives
    that keep it in step, `matrix` the matrix that the optimizer treats it as, None if it is no matrix to it.
    """

    path: str
    unit: str
    weight: str
    use: Spec
    trained: bool
    sync: WeightSync
    matrix: WeightMatrix | None = None

    @property
    def name(self) -> str:
        """Full name; parameters of a module have no dots in their own names."""
        return f"{self.path}.{attribute_name(self.weight)}"

    @property
    def name_in_block(self) -> str:
        """Name of the weight in its block, be it a layer's or one of multi-token prediction."""
        return self.weight.removeprefix(MTP_BLOCK_PREFIX)

    @property
    def is_matrix(self) -> bool:
        """True for matrices, however many dims they are split into; False for biases, norms, sinks and vectors of gates."""
        return (
            len(self.use.dims) > 1
            and not self.weight.endswith((".bias", "norm.weight"))
            and self.name_in_block != "sinks"
        )


def attribute_name(weight: str) -> str:
    """Return the attribute name of a weight: names of a module's parameters have no dots."""
    return weight.replace(".", "_")


def list_parameters(
    architecture: Architecture, scheme: ShardingScheme, units: Iterable[tuple[str, str]] | None = None
) -> tuple[Parameter, ...]:
    """Return the parameters that some units of a model (None: all) hold, in the order of their first use in the forward pass.

    A unit's own parameters are followed by none of other units, but what a unit outside `units` lends is held as a copy.
    """
    parameters: dict[tuple[str, str], Parameter] = {}
    placed = tuple(unit_paths(architecture))
    for path, name in placed if units is None else units:
        lent = _lent_before(architecture, PlacedUnit(path, name), placed)
        for owner, weights in (*lent.items(), (PlacedUnit(path, name), None)):
            for parameter in _unit_parameters(architecture, scheme, owner):
                if weights is None or parameter.weight in weights:
                    parameters.setdefault((parameter.path, parameter.weight), parameter)
    return tuple(parameters.values())


def _unit_parameters(architecture: Architecture, scheme: ShardingScheme, placed: PlacedUnit) -> Iterator[Parameter]:
    """Yield the parameters that a unit owns."""
    unit = derived_unit(scheme, placed.kind)
    tables = get_optimizer(scheme.optimizer).covers_vocabulary
    moves, matrices = find_weight_moves(unit), weight_matrices(unit.forward.program, tables=tables)
    borrowed = borrowed_weights(architecture, placed.kind)
    for weight, dims in unit.weights.items():
        if weight not in borrowed:
            yield Parameter(
                placed.path, placed.kind, weight, use=weight_use_spec(unit.scheme, dims), trained=weight in unit.gradients,
                sync=classify_moves(move for name, move in moves if name == weight), matrix=matrices.get(weight),
            )  # fmt: skip


def _lent_before(
    architecture: Architecture, borrower: PlacedUnit, placed: Sequence[PlacedUnit]
) -> dict[PlacedUnit, list[str]]:
    """Return the weights that units before a unit lend to it; those of the head, behind modules of multi-token prediction, are
    always on their stage."""
    lent: dict[PlacedUnit, list[str]] = {}
    for owner in borrowed_weights(architecture, borrower.kind).values():
        unit = _first_of_kind(placed, owner.unit)
        if placed.index(unit) < placed.index(borrower):
            lent.setdefault(unit, []).append(owner.weight)
    return lent


def _first_of_kind(placed: Iterable[PlacedUnit], kind: str) -> PlacedUnit:
    """Return the unit that owns what the model's other units use of a kind."""
    return next(unit for unit in placed if unit.kind == kind)


def parameters_by_unit(
    architecture: Architecture, parameters: Iterable[Parameter], units: Iterable[tuple[str, str]] | None = None
) -> dict[str, dict[str, Parameter]]:
    """Map the path of each unit (None: all of the model) to the parameters that it uses, by their names in its program.

    They are its own and those that another unit lends it; a tied head is the embedding's weight.
    """
    owned: dict[str, dict[str, Parameter]] = {}
    for parameter in parameters:
        owned.setdefault(parameter.path, {})[parameter.weight] = parameter
    placed, used = tuple(unit_paths(architecture)), {}
    for path, kind in placed if units is None else units:
        used[path] = dict(owned.get(path, {}))
        for weight, owner in borrowed_weights(architecture, kind).items():
            lent = owned.get(_first_of_kind(placed, owner.unit).path, {})
            used[path] |= {weight: lent[owner.weight]} if owner.weight in lent else {}
    return used


def unit_paths(architecture: Architecture) -> Iterator[PlacedUnit]:
    """Yield the path and the kind of each unit of a model: embedding, layers.0, layers.1, ..., predict.0, ..., head."""
    modules = mtp_unit_counts(architecture.num_predict_layers)
    yield PlacedUnit(EMBEDDING, EMBEDDING)
    yield from (PlacedUnit(f"layers.{number}", kind) for number, kind in enumerate(architecture.layer_units))
    kinds = [kind for kind in MTP_UNITS for _ in range(modules[kind])]
    yield from (PlacedUnit(f"predict.{number}", kind) for number, kind in enumerate(kinds))
    yield PlacedUnit("head", "head")


@dataclass(frozen=True, slots=True)
class GroupMember:
    """A parameter in a flat array.

    `global_shape` is its shape in the model, `shape` the local one where it is used, padded, and `start` its offset in
    elements.
    """

    parameter: Parameter
    global_shape: tuple[int, ...]
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        return self.start + self.size


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Parameters of a unit that are gathered and reduced as one flat array, split over `num_shards` devices.

    `sync` names axes of more than one device. `mirrored`: the rank mirrored in the pipeline (p - 1 - rank) has a copy,
    and the gradients of both are summed. Members and shards begin at multiples of `alignment` elements
    (`flat_arrays.shard_alignment`).
    """

    members: tuple[GroupMember, ...]
    sync: WeightSync
    num_shards: int
    mirrored: bool = False
    alignment: int = ALIGNMENT

    @property
    def trained(self) -> bool:
        return self.members[0].parameter.trained

    @property
    def path(self) -> str:
        """Path of the unit whose weights these are."""
        return self.members[0].parameter.path

    @property
    def names(self) -> frozenset[str]:
        """Full names of the parameters."""
        return frozenset(member.parameter.name for member in self.members)

    @property
    def shard_size(self) -> int:
        """Elements of each device's part, padding included."""
        return int(shard_elements(self.members[-1].stop, self.num_shards, self.alignment))

    @property
    def padded_size(self) -> int:
        return self.shard_size * self.num_shards


def group_parameters(
    parameters: Sequence[Parameter], architecture: Architecture, mesh: Mesh, max_elements: Callable[[WeightSync], float | None],
    mirrored_names: frozenset[str] = frozenset(), alignment: int = ALIGNMENT,
) -> tuple[ParameterGroup, ...]:  # fmt: skip
    """Return the groups in the order in which their gradients are ready: weights of the last use come first.

    `max_elements` gives the size limit of the arrays of a sync; None: one array for all parameters of a unit that move
    alike. A parameter larger than the limit has an array of its own. `mirrored_names` are parameters of which another
    stage has a copy.
    """
    parameters_by_key: dict[tuple[Hashable, WeightSync], list[Parameter]] = {}
    base: dict[Hashable, WeightSync] = {}
    for parameter in reversed(parameters):  # as `flat_arrays.weight_groups`: both must fill arrays in the same order
        key = parameter.path, parameter.trained, array_key(parameter.weight), parameter.name in mirrored_names
        first = base.setdefault(key, parameter.sync)
        sync = first if can_share_arrays(parameter.sync, first, mesh.size) else parameter.sync
        parameters_by_key.setdefault((key, sync), []).append(parameter)
    groups = [
        replace(group, mirrored=group.names <= mirrored_names)
        for (_, sync), members in parameters_by_key.items()
        for group in _fill_groups(members, architecture, mesh, max_elements(sync), alignment)
    ]
    gradient_position = {parameter: i for i, parameter in enumerate(_gradient_order(architecture, parameters))}
    return tuple(sorted(groups, key=lambda group: gradient_position[group.members[-1].parameter]))


def _gradient_order(architecture: Architecture, parameters: Sequence[Parameter]) -> Sequence[Parameter]:
    """Return the parameters in reverse order of first use: multi-token prediction uses the head's matrix before the
    head does."""
    order = [*reversed(parameters)]
    first = next((i for i, parameter in enumerate(order) if parameter.path == "predict.0"), None)
    if first is None:
        return order
    after, owners = order[:first], {*borrowed_weights(architecture, MTP_UNITS[-1]).values()}
    lent = [parameter for parameter in after if parameter.path == HEAD and (HEAD, parameter.weight) in owners]
    return [*(parameter for parameter in after if parameter not in lent), *lent, *order[first:]]


def _fill_groups(
    parameters: Sequence[Parameter], architecture: Architecture, mesh: Mesh, max_elements: float | None,
    alignment: int,
) -> Iterator[ParameterGroup]:  # fmt: skip
    """Yield the groups that parameters with equal collectives fill."""
    sizes = architecture.unit_architecture(parameters[0].unit).dims  # they are of one unit
    dims = pad_vocabulary(sizes, mesh)
    shapes = [parameter.use.local_shape(mesh, dims) for parameter in parameters]
    members: list[GroupMember] = []
    begins_array = starts_array(map(math.prod, shapes), max_elements)
    for parameter, shape, begins in zip(parameters, shapes, begins_array, strict=True):
        if begins and members:
            yield _make_group(members, mesh, alignment)
            members = []
        global_shape = tuple(sizes[dim] for dim in parameter.use.dims)
        start = int(align_up(members[-1].stop, alignment)) if members else 0
        members.append(GroupMember(parameter, global_shape, shape, start))
    yield _make_group(members, mesh, alignment)


def _make_group(members: Iterable[GroupMember], mesh: Mesh, alignment: int) -> ParameterGroup:
    ordered = tuple(members)
    sync = WeightSync(*(tuple(axis for axis in axes if mesh.size(axis) > 1) for axes in ordered[0].parameter.sync))
    return ParameterGroup(ordered, sync, mesh.size(sync.shard), alignment=alignment)
