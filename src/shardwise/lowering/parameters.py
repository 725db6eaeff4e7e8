"""All parameters of a model by name, and how each is synchronised: read off the derived specs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from shardwise.derive.derivation import Unit, derived_unit
from shardwise.derive.shardings import optimizer_rest, weight_use
from shardwise.layout.family import Family
from shardwise.model.architecture import Architecture
from shardwise.model.decoder import LAYERS, unit_counts
from shardwise.sharding.spec import Axes, Spec

TIED = "head"  # the head's own weight, which a tied model has not: it uses the embedding's


class Sync(NamedTuple):
    """What keeps a weight and its gradient in step, by the axes that it goes over.

    `gather`: an AllGather from where the weight rests to where it is used, at each use (ZeRO-3). `scatter`: a ReduceScatter of
    its gradient in each micro-batch (ZeRO-2, -3); `step_scatter`: in each step (ZeRO-1). `reduce`: an AllReduce in each step.
    `step_gather`: an AllGather of the updated weight in each step (ZeRO-1, -2). A frozen weight has no more than a `gather`.
    """

    gather: Axes = ()
    scatter: Axes = ()
    step_scatter: Axes = ()
    reduce: Axes = ()
    step_gather: Axes = ()

    @property
    def shard(self) -> Axes:
        """The axes over which the optimizer's state, or a frozen weight, is split."""
        return self.scatter or self.step_scatter or self.gather


@dataclass(frozen=True, slots=True)
class Parameter:
    """A weight of one layer (or of the embedding or the head): its unit's path in the model and kind, and its derived specs.

    `use` is how it lies where it is used, `rest` between uses; `gradient` where its gradient rests after a backward pass,
    and `state` where the optimizer's state does: None of a weight that is frozen.
    """

    path: str
    unit: str
    weight: str
    use: Spec
    rest: Spec
    gradient: Spec | None
    state: Spec | None

    @property
    def name(self) -> str:
        """Its full name; parameters of a module have no dots in their own names."""
        return f"{self.path}.{attribute(self.weight)}"

    @property
    def is_matrix(self) -> bool:
        """Whether it is a matrix, however many dims it is split into, and no bias, norm, sink or gate's vector."""
        return len(self.use.dims) > 1 and not self.weight.endswith((".bias", "norm.weight")) and self.weight != "sinks"

    @property
    def trained(self) -> bool:
        return self.gradient is not None

    @property
    def sync(self) -> Sync:
        """What the differences between the specs ask for."""
        gather = _more(self.rest, self.use)
        if self.gradient is None or self.state is None:
            return Sync(gather=gather)
        step_scatter = _more(self.state, self.gradient)
        return Sync(
            gather=gather,
            scatter=_more(self.gradient, self.use),
            step_scatter=step_scatter,
            reduce=tuple(axis for axis in self.gradient.partial if axis not in step_scatter),
            step_gather=_more(self.state, self.rest),
        )


def attribute(weight: str) -> str:
    """The name of the parameter that a weight is: a module's parameters have no dots in their names."""
    return weight.replace(".", "_")


def parameters(architecture: Architecture, family: Family) -> tuple[Parameter, ...]:
    """Every parameter of a model in the order in which the forward pass uses it, in a layout of this family."""
    found: list[Parameter] = []
    for path, name in unit_paths(architecture):
        unit = derived_unit(architecture.structure, family, name)
        own = (weight for weight in unit.weights if not (architecture.tied_embeddings and weight == TIED))
        found += [_parameter(path, unit, weight) for weight in own]
    return tuple(found)


def unit_paths(architecture: Architecture) -> Iterator[tuple[str, str]]:
    """Where each unit of a model is in it, and its kind: embedding, layers.0, layers.1, ..., head."""
    counts = unit_counts(architecture)
    yield "embedding", "embedding"
    kinds = [kind for kind in LAYERS for _ in range(counts.get(kind, 0))]
    yield from ((f"layers.{layer}", kind) for layer, kind in enumerate(kinds))
    yield "head", "head"


def _parameter(path: str, unit: Unit, weight: str) -> Parameter:
    dims = unit.weights[weight]
    trained = weight in unit.gradients
    return Parameter(
        path, unit.name, weight,
        use=weight_use(unit.family, dims),
        rest=unit.forward.specs[weight],
        gradient=unit.backward.specs[unit.gradients[weight]] if trained else None,
        state=optimizer_rest(unit.family, dims) if trained else None,
    )  # fmt: skip


def _more(finer: Spec, coarser: Spec) -> Axes:
    """The axes that split a tensor in one spec and not in the other, the major one first."""
    return tuple(axis for group in finer.axes for axis in group if axis not in coarser.sharded_axes)
