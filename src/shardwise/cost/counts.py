"""Contents of a pipeline stage, and sums over them. Numbers or arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, NamedTuple

from shardwise.cost.unit_costs import ActivationCost, StateCost
from shardwise.layout.stages import recomputed_layers
from shardwise.model.architecture import Architecture
from shardwise.model.decoder import has_untied, predict_counts
from shardwise.symbolic import Value

KEPT = "kept_"  # prefix of the kind of layers without recomputation, in a stage where others recompute


class Counts(NamedTuple):
    """Contents of a stage: layers by kind, and whether it has the embedding and the head (1 or 0); virtual stages that it
    sends from.

    `kept` are the layers by kind that do not recompute though the others do; empty where all layers do the same. `predict` are
    modules of multi-token prediction, on the last stage. `copies` counts those of the embedding's weights: 0 where the head's
    serves (tied, and one stage holds both), with `untied` for weights that only the embedding has; `exchanges` is 1 where the
    gradients of two copies are exchanged (first and last stage of a pipeline). `tied` is 1 where the head's weight is the
    embedding's.
    """

    layers: Annotated[Mapping[str, Value], "layers of the stage"]
    embedding: Annotated[int, "embeddings of the stage"]
    head: Annotated[int, "heads of the stage"]
    predict: Annotated[int, "modules of multi-token prediction of the stage"]
    carries: Annotated[Value, "virtual stages that it hands over from"]
    copies: Annotated[int, "copies of the embedding's weight on the stage"]
    exchanges: Annotated[int, "whether gradients of that weight are exchanged"]
    kept: Annotated[Mapping[str, Value], "layers of the stage that recompute nothing"]
    untied: Annotated[int, "embeddings of which the stage holds what no head has"]
    tied: Annotated[int, "heads of the stage whose weight is the embedding's"]

    @property
    def units(self) -> dict[str, Value]:
        """How often each unit computes on the stage."""
        return {**self.running, "embedding": self.embedding, "head": self.head, **self.predicting}

    @property
    def running(self) -> dict[str, Value]:
        """The layers by kind; those that do not recompute are kinds of their own."""
        recomputed = {kind: count - self.kept.get(kind, 0) for kind, count in self.layers.items()}
        return {**recomputed, **{KEPT + kind: count for kind, count in self.kept.items()}}

    @property
    def held(self) -> dict[str, Value]:
        """How often the stage holds each unit's weights."""
        return {**self.layers, "embedding": self.copies, "untied": self.untied, "head": self.head, **self.predicting}

    @property
    def predicting(self) -> dict[str, int]:
        """The modules of multi-token prediction by kind."""
        return predict_counts(self.predict)


class Model(NamedTuple):
    """The properties of a model that its stages depend on."""

    tied: bool
    untied: bool  # whether a tied embedding has weights that the head lacks
    num_predict_layers: int

    @classmethod
    def of(cls, architecture: Architecture) -> Model:
        """The properties of an architecture."""
        return cls(architecture.tied_embeddings, has_untied(architecture), architecture.num_predict_layers)

    @property
    def held_apart(self) -> tuple[str, ...]:
        """Units that no micro-batch passes through, whose weights a stage may hold."""
        return ("untied",) if self.untied else ()


def stage_counts(
    layers: Mapping[str, Value], model: Model, *, first: bool, last: bool, carries: Value, recompute_layers: Value | None = None
) -> Counts:  # fmt: skip
    """The counts of a device that has the first stage of the model, the last, both or neither.

    Both are on one device without a pipeline, with a stage and its mirror image (`layers` of both) for micro-batches from both
    ends, and with virtual stages down the ranks and up again. A tied embedding is one tensor with two uses, and so is one that
    multi-token prediction borrows. `carries`: each virtual stage of the device hands over to another device or takes from one.
    """
    recomputed = recomputed_layers(layers, recompute_layers)
    alone = first and last
    borrowed = last and model.num_predict_layers > 0
    return Counts(
        layers,
        embedding=int(first),
        head=int(last),
        predict=model.num_predict_layers if last else 0,
        carries=carries,
        copies=int((first and not (model.tied and alone)) or (borrowed and not alone and not model.tied)),
        exchanges=int((model.tied or model.num_predict_layers > 0) and first != last),
        kept={} if recompute_layers is None else {kind: count - recomputed[kind] for kind, count in layers.items()},
        untied=int(alone and model.untied),
        tied=int(last and model.tied),
    )


def add_up(
    costs: Mapping[str, ActivationCost | StateCost], times: Mapping[str, Value], field: str, axis: str = ""
) -> Value:
    """The sum of a field over all units, each as often as the stage has it; units that it never has are not evaluated. `axis`:
    for a field by parallel axis, that of one axis."""
    total: Value = None
    for unit, count in times.items():
        if never(count):
            continue
        value = getattr(costs[unit], field)
        value = value[axis] if axis else value
        if not (isinstance(value, float) and value == 0.0):
            value = times_each(count, value)
            total = value if total is None else total + value
    return 0.0 if total is None else total


def times_each(count: Value, value: Value) -> Value:
    return value if isinstance(count, int) and count == 1 else value * count


def never(count: Value) -> bool:
    return isinstance(count, int) and count == 0
