"""All parameters of a model by name, how each is synchronised, and the flat arrays that they fill, in numbers.

The flat arrays are units of FSDP, and buckets of gradients, in the order in which gradients are ready.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from shardwise.derive.sharded_unit import derived_unit
from shardwise.derive.tensor_specs import padded, weight_use
from shardwise.layout.sharding_scheme import Family
from shardwise.model.architecture import Architecture
from shardwise.model.decoder import BORROWED, LAYERS, PREDICT_BLOCK, PREDICTS, unit_counts
from shardwise.model.optimizer_program import Matrix, matrices
from shardwise.model.optimizers.registry import optimizer_named
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.spec import Spec
from shardwise.step.flat_arrays import (
    ALIGNED,
    Sync,
    aligned,
    derived_moves,
    joins,
    kind_of,
    openings,
    shard_elements,
    sync_of,
)

TIED = "head"  # the head's own weight, which a tied model has not: it uses the embedding's
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
    sync: Sync
    matrix: Matrix | None = None

    @property
    def name(self) -> str:
        """Its full name; parameters of a module have no dots in their own names."""
        return f"{self.path}.{attribute(self.weight)}"

    @property
    def in_block(self) -> str:
        """The weight's name in its block, whether that is a layer's or one of multi-token prediction."""
        return self.weight.removeprefix(PREDICT_BLOCK)

    @property
    def is_matrix(self) -> bool:
        """Whether it is a matrix, however many dims it is split into, and no bias, norm, sink or gate's vector."""
        return (
            len(self.use.dims) > 1 and not self.weight.endswith((".bias", "norm.weight")) and self.in_block != "sinks"
        )


def attribute(weight: str) -> str:
    """The name of the parameter that a weight is: a module's parameters have no dots in their names."""
    return weight.replace(".", "_")


def parameters(
    architecture: Architecture, family: Family, units: Iterable[tuple[str, str]] | None = None
) -> tuple[Parameter, ...]:
    """Every parameter that some units of a model (None: all) hold, in the order in which the forward pass uses it, in a layout of
    this family: their own, and a copy of what a unit that is not among them lends them."""
    found: dict[tuple[str, str], Parameter] = {}
    for path, name in unit_paths(architecture) if units is None else units:
        lent = _lent(architecture, name)
        for owner, weights in (*lent.items(), (PlacedUnit(path, name), None)):
            for one in _own(architecture, family, owner):
                if weights is None or one.weight in weights:
                    found.setdefault((one.path, one.weight), one)
    return tuple(found.values())


def _own(architecture: Architecture, family: Family, placed: PlacedUnit) -> Iterator[Parameter]:
    """The parameters of a unit; those of a tied head without the matrix."""
    unit = derived_unit(architecture.structure, family, placed.kind)
    tables = optimizer_named(family.optimizer).tables
    moves, found = derived_moves(unit), matrices(unit.forward.program, tables=tables)
    for weight, dims in unit.weights.items():
        if not (architecture.tied_embeddings and weight == TIED):
            yield Parameter(
                placed.path, placed.kind, weight, use=weight_use(unit.family, dims), trained=weight in unit.gradients,
                sync=sync_of(move for name, move in moves if name == weight), matrix=found.get(weight),
            )  # fmt: skip


def _lent(architecture: Architecture, kind: str) -> dict[PlacedUnit, list[str]]:
    """The weights that the embedding lends to a unit of a kind; the head's are always beside those that it lends them to."""
    names = [EMBEDDING] if architecture.tied_embeddings and kind == "head" else []
    names += [name for name in BORROWED.get(kind, ()) if name != TIED]
    return {PlacedUnit(EMBEDDING, EMBEDDING): names} if names else {}


def used_parameters(
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
        head = {**head, TIED: embedding[EMBEDDING]}
    lent = {**embedding, **head}
    used = {}
    for path, unit in unit_paths(architecture) if units is None else units:
        own = head if path == "head" else owned.get(path, {})
        used[path] = own | {weight: lent[weight] for weight in BORROWED.get(unit, ()) if weight in lent}
    return used


def unit_paths(architecture: Architecture) -> Iterator[PlacedUnit]:
    """Where each unit of a model is in it, and its kind: embedding, layers.0, layers.1, ..., predict.0, ..., head."""
    counts = unit_counts(architecture)
    yield PlacedUnit(EMBEDDING, EMBEDDING)
    for room, units in (("layers", LAYERS), ("predict", PREDICTS)):
        kinds = [kind for kind in units for _ in range(counts.get(kind, 0))]
        yield from (PlacedUnit(f"{room}.{number}", kind) for number, kind in enumerate(kinds))
    yield PlacedUnit("head", "head")


@dataclass(frozen=True, slots=True)
class Member:
    """A parameter in a group: its shape in the model, its local shape where it is used, with what pads it, and where it starts in
    the flat array."""

    parameter: Parameter
    whole: tuple[int, ...]
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        return self.start + self.size


@dataclass(frozen=True, slots=True)
class Group:
    """Parameters of a unit that are gathered and reduced as one flat array, split over `num_shards` devices; `sync` names axes of
    more than one device. `shared`: the opposite rank of the pipeline has a copy, and their gradients are added up. Members and
    parts begin at a multiple of `alignment` elements (`flat_arrays.alignment_of`)."""

    members: tuple[Member, ...]
    sync: Sync
    num_shards: int
    shared: bool = False
    alignment: int = ALIGNED

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


def groups_of(
    parameters: Sequence[Parameter], architecture: Architecture, mesh: Mesh, most_elements: Callable[[Sync], float | None],
    shared: frozenset[str] = frozenset(), alignment: int = ALIGNED,
) -> tuple[Group, ...]:  # fmt: skip
    """The groups in the order in which their gradients are ready: that of the last use comes first. Each holds at most as many
    elements as `most_elements` says, or one parameter; None: all of a unit that move alike. `shared` are parameters of which
    another stage has a copy."""
    alike: dict[tuple[Hashable, Sync], list[Parameter]] = {}
    base: dict[Hashable, Sync] = {}
    for one in reversed(parameters):
        key = one.path, one.trained, kind_of(one.weight), one.name in shared
        first = base.setdefault(key, one.sync)
        sync = first if joins(one.sync, first, mesh.size) else one.sync
        alike.setdefault((key, sync), []).append(one)
    found = [
        replace(group, shared=group.names <= shared)
        for (_, sync), together in alike.items()
        for group in _filled(together, architecture, mesh, most_elements(sync), alignment)
    ]
    ready = {one: place for place, one in enumerate(_as_ready(parameters))}
    return tuple(sorted(found, key=lambda group: ready[group.members[-1].parameter]))


def _as_ready(parameters: Sequence[Parameter]) -> Sequence[Parameter]:
    """In the reverse order of their first uses: modules of multi-token prediction use the head's matrix before it does."""
    order = [*reversed(parameters)]
    first = next((place for place, one in enumerate(order) if one.path == "predict.0"), 0)
    lent = [one for one in order[:first] if one.path == "head" and one.weight in BORROWED["predict"]]
    return [*(one for one in order[:first] if one not in lent), *lent, *order[first:]]


def _filled(
    parameters: Sequence[Parameter], architecture: Architecture, mesh: Mesh, most_elements: float | None,
    alignment: int,
) -> Iterator[Group]:  # fmt: skip
    """Parameters that move alike, in as many groups as they need."""
    dims = padded(architecture.dims, mesh)
    shapes = [one.use.local_shape(mesh, dims) for one in parameters]
    members: list[Member] = []
    for one, shape, begins in zip(parameters, shapes, openings(map(math.prod, shapes), most_elements), strict=True):
        if begins and members:
            yield _group(members, mesh, alignment)
            members = []
        whole = tuple(architecture.dims[dim] for dim in one.use.dims)
        members.append(Member(one, whole, shape, int(aligned(members[-1].stop, alignment)) if members else 0))
    yield _group(members, mesh, alignment)


def _group(members: Iterable[Member], mesh: Mesh, alignment: int) -> Group:
    found = tuple(members)
    sync = Sync(*(tuple(axis for axis in axes if mesh.size(axis) > 1) for axes in found[0].parameter.sync))
    return Group(found, sync, mesh.size(sync.shard), alignment=alignment)
