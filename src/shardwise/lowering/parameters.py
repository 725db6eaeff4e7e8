"""All parameters of a model by name, and how each is synchronised."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from shardwise.derive.derivation import derived_unit
from shardwise.derive.shardings import weight_use
from shardwise.layout.family import Family
from shardwise.lowering.weights import Sync, derived_moves, sync_of
from shardwise.model.architecture import Architecture
from shardwise.model.decoder import BORROWED, LAYERS, PREDICT_BLOCK, PREDICTS, unit_counts
from shardwise.sharding.spec import Spec

TIED = "head"  # the head's own weight, which a tied model has not: it uses the embedding's


@dataclass(frozen=True, slots=True)
class Parameter:
    """A weight of one layer (or of the embedding or the head): its unit's path in the model and kind, how it lies where it is
    used, whether it is trained, and what keeps it in step."""

    path: str
    unit: str
    weight: str
    use: Spec
    trained: bool
    sync: Sync

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


def parameters(architecture: Architecture, family: Family) -> tuple[Parameter, ...]:
    """Every parameter of a model in the order in which the forward pass uses it, in a layout of this family."""
    found: list[Parameter] = []
    for path, name in unit_paths(architecture):
        unit = derived_unit(architecture.structure, family, name)
        moves = derived_moves(unit)
        own = (weight for weight in unit.weights if not (architecture.tied_embeddings and weight == TIED))
        found += [
            Parameter(
                path, name, weight, use=weight_use(unit.family, unit.weights[weight]), trained=weight in unit.gradients,
                sync=sync_of(move for name_of_moved, move in moves if name_of_moved == weight),
            )
            for weight in own
        ]  # fmt: skip
    return tuple(found)


def used_parameters(architecture: Architecture, found: Iterable[Parameter]) -> dict[str, dict[str, Parameter]]:
    """By unit's path the parameters that it uses, by their names in its program: its own, and those that another unit lends it.

    A tied head is the embedding's weight.
    """
    used: dict[str, dict[str, Parameter]] = {}
    for one in found:
        used.setdefault(one.path, {})[one.weight] = one
    if architecture.tied_embeddings:
        used["head"][TIED] = used["embedding"]["embedding"]
    owned = {**used["embedding"], **used["head"]}
    for path, unit in unit_paths(architecture):
        used[path] |= {weight: owned[weight] for weight in BORROWED.get(unit, ()) if weight in owned}
    return used


def unit_paths(architecture: Architecture) -> Iterator[tuple[str, str]]:
    """Where each unit of a model is in it, and its kind: embedding, layers.0, layers.1, ..., predict.0, ..., head."""
    counts = unit_counts(architecture)
    yield "embedding", "embedding"
    for room, units in (("layers", LAYERS), ("predict", PREDICTS)):
        kinds = [kind for kind in units for _ in range(counts.get(kind, 0))]
        yield from ((f"{room}.{number}", kind) for number, kind in enumerate(kinds))
    yield "head", "head"
