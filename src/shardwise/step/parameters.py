"""All parameters of a model by name, how each is synchronised, and the flat arrays that they fill, in numbers.

The flat arrays are units of FSDP, and buckets of gradients, in the order in which gradients are ready.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from shardwise.derive.sharded_unit import derived_unit
from shardwise.derive.tensor_specs import pad_vocabulary, weight_use_spec
from shardwise.layout.sharding_scheme import ShardingScheme
from shardwise.model.architecture import Architecture
from shardwise.model.decoder import BORROWED_WEIGHTS, LAYER_UNITS, MTP_BLOCK_PREFIX, MTP_UNITS, unit_counts
from shardwise.model.optimizer_program import WeightMatrix, weight_matrices
from shardwise.model.optimizers.registry import get_optimizer
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.spec import Spec
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

TIED_HEAD = "head"  # the head's own weight, which a tied model has not: it uses the embedding's
EMBEDDING = "embedding"  # the unit, its path and its matrix


class PlacedUnit(NamedTuple):
    """A unit of a model: where it is in it, and its kind."""

    path: str
    kind: str


@dataclass(frozen=True, slots=True)
class Parameter:
    """A weight of one layer (or of the embedding or the head): its unit's path in the model and kind, how it lies where it is
    used, whether it is trained, what keeps it in step, and the matrix that the optimizer takes it for (None: for none)."""

    path: str
    unit: str
    weight: str
    use: Spec
    trained: bool
    sync: WeightSync
    matrix: WeightMatrix | None = None

    @property
    def name(self) -> str:
        """Its full name; parameters of a module have no dots in their own names."""
        return f"{self.path}.{attribute_name(self.weight)}"

    @property
    def name_in_block(self) -> str:
        """The weight's name in its block, whether that is a layer's or one of multi-token prediction."""
        return self.weight.removeprefix(MTP_BLOCK_PREFIX)

    @property
    def is_matrix(self) -> bool:
        """Whether it is a matrix, however many dims it is split into, and no bias, norm, sink or gate's vector."""
        return (
            len(self.use.dims) > 1
            and not self.weight.endswith((".bias", "norm.weight"))
            and self.name_in_block != "sinks"
        )


def attribute_name(weight: str) -> str:
    """The name of the parameter that a weight is: a module's parameters have no dots in their names."""
    return weight.replace(".", "_")


def list_parameters(
    architecture: Architecture, family: ShardingScheme, units: Iterable[tuple[str, str]] | None = None
) -> tuple[Parameter, ...]:
    """Every parameter that some units of a model (None: all) hold, in the order in which the forward pass uses it, in a layout of
    this family: their own, and a copy of what a unit that is not among them lends them."""
    found: dict[tuple[str, str], Parameter] = {}
    for path, name in unit_paths(architecture) if units is None else units:
        lent = _borrowed_weights(architecture, name)
        for owner, weights in (*lent.items(), (PlacedUnit(path, name), None)):
            for one in _unit_parameters(architecture, family, owner):
                if weights is None or one.weight in weights:
                    found.setdefault((one.path, one.weight), one)
    return tuple(found.values())


def _unit_parameters(architecture: Architecture, family: ShardingScheme, placed: PlacedUnit) -> Iterator[Parameter]:
    """The parameters of a unit; those of a tied head without the matrix."""
    unit = derived_unit(architecture.structure, family, placed.kind)
    tables = get_optimizer(family.optimizer).covers_vocabulary
    moves, found = find_weight_moves(unit), weight_matrices(unit.forward.program, tables=tables)
    for weight, dims in unit.weights.items():
        if not (architecture.tied_embeddings and weight == TIED_HEAD):
            yield Parameter(
                placed.path, placed.kind, weight, use=weight_use_spec(unit.family, dims), trained=weight in unit.gradients,
                sync=classify_moves(move for name, move in moves if name == weight), matrix=found.get(weight),
            )  # fmt: skip


def _borrowed_weights(architecture: Architecture, kind: str) -> dict[PlacedUnit, list[str]]:
    """The weights that the embedding lends to a unit of a kind; the head's are always beside those that it lends them to."""
    names = [EMBEDDING] if architecture.tied_embeddings and kind == "head" else []
    names += [name for name in BORROWED_WEIGHTS.get(kind, ()) if name != TIED_HEAD]
    return {PlacedUnit(EMBEDDING, EMBEDDING): names} if names else {}


def parameters_by_unit(
    architecture: Architecture, found: Iterable[Parameter], units: Iterable[tuple[str, str]] | None = None
) -> dict[str, dict[str, Parameter]]:
    """By the path of each of some units (None: all of a model) the parameters that it uses, by their names in its program: its
    own, and those that another unit lends it.

    A tied head is the embedding's weight.
    """
    owned: dict[str, dict[str, Parameter]] = {}
    for one in found:
        owned.setdefault(one.path, {})[one.weight] = one
    embedding, head = owned.get(EMBEDDING, {}), owned.get("head", {})
    if architecture.tied_embeddings and EMBEDDING in embedding:
        head = {**head, TIED_HEAD: embedding[EMBEDDING]}
    lent = {**embedding, **head}
    used = {}
    for path, unit in unit_paths(architecture) if units is None else units:
        own = head if path == "head" else owned.get(path, {})
        used[path] = own | {weight: lent[weight] for weight in BORROWED_WEIGHTS.get(unit, ()) if weight in lent}
    return used


def unit_paths(architecture: Architecture) -> Iterator[PlacedUnit]:
    """Where each unit of a model is in it, and its kind: embedding, layers.0, layers.1, ..., predict.0, ..., head."""
    counts = unit_counts(architecture)
    yield PlacedUnit(EMBEDDING, EMBEDDING)
    for room, units in (("layers", LAYER_UNITS), ("predict", MTP_UNITS)):
        kinds = [kind for kind in units for _ in range(counts.get(kind, 0))]
        yield from (PlacedUnit(f"{room}.{number}", kind) for number, kind in enumerate(kinds))
    yield PlacedUnit("head", "head")


@dataclass(frozen=True, slots=True)
class GroupMember:
    """A parameter in a group: its shape in the model, its local shape where it is used, with what pads it, and where it starts in
    the flat array."""

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
    """Parameters of a unit that are gathered and reduced as one flat array, split over `num_shards` devices; `sync` names axes of
    more than one device. `mirrored`: the opposite rank of the pipeline has a copy, and their gradients are added up. Members and
    parts begin at a multiple of `alignment` elements (`flat_arrays.shard_alignment`)."""

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
        """The unit whose weights these are."""
        return self.members[0].parameter.path

    @property
    def names(self) -> frozenset[str]:
        """The full names of its parameters."""
        return frozenset(member.parameter.name for member in self.members)

    @property
    def shard_size(self) -> int:
        """Elements of each device's part, padding included."""
        return int(shard_elements(self.members[-1].stop, self.num_shards, self.alignment))

    @property
    def padded_size(self) -> int:
        return self.shard_size * self.num_shards


def group_parameters(
    parameters: Sequence[Parameter], architecture: Architecture, mesh: Mesh, most_elements: Callable[[WeightSync], float | None],
    shared: frozenset[str] = frozenset(), alignment: int = ALIGNMENT,
) -> tuple[ParameterGroup, ...]:  # fmt: skip
    """The groups in the order in which their gradients are ready: that of the last use comes first. Each holds at most as many
    elements as `most_elements` says, or one parameter; None: all of a unit that move alike. `mirrored` are parameters of which
    another stage has a copy."""
    alike: dict[tuple[Hashable, WeightSync], list[Parameter]] = {}
    base: dict[Hashable, WeightSync] = {}
    for one in reversed(parameters):
        key = one.path, one.trained, array_key(one.weight), one.name in shared
        first = base.setdefault(key, one.sync)
        sync = first if can_share_arrays(one.sync, first, mesh.size) else one.sync
        alike.setdefault((key, sync), []).append(one)
    found = [
        replace(group, mirrored=group.names <= shared)
        for (_, sync), together in alike.items()
        for group in _fill_groups(together, architecture, mesh, most_elements(sync), alignment)
    ]
    ready = {one: place for place, one in enumerate(_gradient_order(parameters))}
    return tuple(sorted(found, key=lambda group: ready[group.members[-1].parameter]))


def _gradient_order(parameters: Sequence[Parameter]) -> Sequence[Parameter]:
    """In the reverse order of their first uses: modules of multi-token prediction use the head's matrix before it does."""
    order = [*reversed(parameters)]
    first = next((place for place, one in enumerate(order) if one.path == "predict.0"), 0)
    lent = [one for one in order[:first] if one.path == "head" and one.weight in BORROWED_WEIGHTS["predict"]]
    return [*(one for one in order[:first] if one not in lent), *lent, *order[first:]]


def _fill_groups(
    parameters: Sequence[Parameter], architecture: Architecture, mesh: Mesh, most_elements: float | None,
    alignment: int,
) -> Iterator[ParameterGroup]:  # fmt: skip
    """Parameters that move alike, in as many groups as they need."""
    dims = pad_vocabulary(architecture.dims, mesh)
    shapes = [one.use.local_shape(mesh, dims) for one in parameters]
    members: list[GroupMember] = []
    for one, shape, begins in zip(parameters, shapes, starts_array(map(math.prod, shapes), most_elements), strict=True):
        if begins and members:
            yield _make_group(members, mesh, alignment)
            members = []
        whole = tuple(architecture.dims[dim] for dim in one.use.dims)
        members.append(GroupMember(one, whole, shape, int(align_up(members[-1].stop, alignment)) if members else 0))
    yield _make_group(members, mesh, alignment)


def _make_group(members: Iterable[GroupMember], mesh: Mesh, alignment: int) -> ParameterGroup:
    found = tuple(members)
    sync = WeightSync(*(tuple(axis for axis in axes if mesh.size(axis) > 1) for axes in found[0].parameter.sync))
    return ParameterGroup(found, sync, mesh.size(sync.shard), alignment=alignment)
