"""All parameters of a model by name, and how each is synchronised."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from shardwise.derive.derivation import derived_unit
from shardwise.derive.shardings import weight_use
from shardwise.layout.family import Family
from shardwise.lowering.weights import Sync, derived_moves, sync_of
from shardwise.model.architecture import Architecture
from shardwise.model.decoder import BORROWED, LAYERS, PREDICT_BLOCK, PREDICTS, unit_counts
from shardwise.model.matrices import Matrix, matrices
from shardwise.optimizer.table import optimizer_named
from shardwise.sharding.spec import Spec

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
