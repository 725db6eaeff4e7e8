"""A decoder as its units' instructions, run forward and backward over micro-batches. No autograd, no hooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwise.data.batches import IGNORED
from shardwise.engine.torch.batch import MicroBatch, Sights
from shardwise.engine.torch.calls import BALANCE_BIAS, GRADIENTS, PENALTY, ROUTED, TRAINS
from shardwise.engine.torch.giving import Gradients
from shardwise.engine.torch.loss import capped
from shardwise.engine.torch.rank import Rank
from shardwise.engine.torch.unit import Held, TorchUnit, run
from shardwise.model.architecture import Architecture

Clock = Callable[[], AbstractContextManager[None]]


class Movement(Protocol):
    """What is done around the units of a model, known by their places in its forward pass: weights come and go."""

    def before_forward(self, place: int) -> None: ...
    def after_forward(self, place: int) -> None: ...
    def before_backward(self, place: int) -> None: ...


class Resting:
    """Weights are where they are used, always."""

    def before_forward(self, place: int) -> None:
        """Nothing has to come."""

    after_forward = before_backward = before_forward


@dataclass
class Layer:
    """A unit at its `path` in the model, the `number`th layer where it is one: its weights by their names in the program, where
    their gradients go, and of a router the bias of its choice."""

    path: str
    unit: TorchUnit
    weights: Mapping[str, Tensor]
    gradients: Gradients | None = None
    number: int | None = None
    balance_bias: Tensor | None = None

    def put(self, held: Held, values: Mapping[str, Any]) -> None:
        """Put values in their places, where the unit has any for them."""
        place = self.unit.place
        for name, value in values.items():
            if name in place:
                held[place[name]] = value


@dataclass
class Pass:
    """A micro-batch on its way: its loss, what each unit holds, and by the places of routers what these did, [2, E]."""

    loss: Tensor
    held: list[Held] = field(default_factory=list)
    routed: dict[int, Tensor] = field(default_factory=dict)


class TorchModel:
    """The units of a model in the order of its forward pass. `recomputing` is entered around what is made again."""

    def __init__(
        self, architecture: Architecture, layers: Sequence[Layer], dtype: torch.dtype, rank: Rank, *,
        movement: Movement | None = None, recomputing: Clock = nullcontext,
    ) -> None:  # fmt: skip
        self.architecture, self.layers, self.dtype, self.rank = architecture, layers, dtype, rank
        self.movement: Movement = movement or Resting()
        self.recomputing = recomputing

    @property
    def balance_biases(self) -> dict[int, Tensor]:
        """Those of the routers' choice, by the routers' places."""
        found = ((place, layer.balance_bias) for place, layer in enumerate(self.layers))
        return {place: bias for place, bias in found if bias is not None}

    @torch.no_grad()
    def forward(self, batch: MicroBatch, num_targets: int | Tensor, *, trains: bool) -> Pass:
        """The loss of a micro-batch, divided by the targets of the whole step; to train, each unit holds what it saved.

        Raises `InputError` where sequences are longer than a learned table of positions.
        """
        sights = Sights(self.architecture, batch, self.dtype, self.rank)
        shared = {"loss_scale": 1.0 / num_targets, TRAINS: trains}
        on_way, x = Pass(torch.zeros(())), None
        for place, layer in enumerate(self.layers):
            self.movement.before_forward(place)
            held = self._begin(layer, sights, shared, x)
            run(layer.unit.forward, held)
            x = held[layer.unit.place[layer.unit.output]]
            if ROUTED in layer.unit.place:
                on_way.routed[place] = held[layer.unit.place[ROUTED]]
            self.movement.after_forward(place)
            if trains:
                held[layer.unit.place[layer.unit.output]] = None  # the next unit's now
                on_way.held.append(held)
        assert x is not None
        on_way.loss = x
        return on_way

    def _begin(self, layer: Layer, sights: Sights, shared: Mapping[str, Any], x: Tensor | None) -> Held:
        """What a unit holds when its forward pass begins."""
        held = layer.unit.held()
        layer.put(held, layer.weights)
        layer.put(held, shared)
        layer.put(held, {GRADIENTS: layer.gradients, BALANCE_BIAS: layer.balance_bias})
        for key, (name, axes) in layer.unit.cuts.items():
            held[layer.unit.place[key]] = sights.given(name, axes, layer.number)
        if layer.unit.input is not None:
            layer.put(held, {layer.unit.input: x})
        return held

    @torch.no_grad()
    def backward(self, on_way: Pass, penalties: Mapping[int, Tensor] | None = None) -> None:
        """Hand the gradient of every weight to where it goes. `penalties` [E]: the gradient of each token's scores by a loss that
        evens the shares of a router's experts out, by its place."""
        dx: Tensor | None = None
        for place in reversed(range(len(self.layers))):
            layer, held = self.layers[place], on_way.held.pop()
            self.movement.before_backward(place)
            layer.put(held, {PENALTY: (penalties or {}).get(place), f"d.{layer.unit.output}": dx})
            dx = None
            if layer.unit.recompute:
                with self.recomputing():
                    run(layer.unit.recompute, held)
            run(layer.unit.backward, held)
            if layer.unit.gradient_of_input is not None:
                dx = held[layer.unit.place[layer.unit.gradient_of_input]]

    @torch.no_grad()
    def logits(self, ids_BT: Tensor, documents_BT: Tensor | None = None) -> Tensor:
        """[B, T, V], in float32 at least."""
        batch, x, shared = MicroBatch(ids_BT, torch.full_like(ids_BT, IGNORED), documents_BT), None, dict[str, Any]()
        sights = Sights(self.architecture, batch, self.dtype, self.rank)
        for place, layer in enumerate(self.layers):
            self.movement.before_forward(place)
            held = self._begin(layer, sights, shared, x)
            is_last = place + 1 == len(self.layers)
            run(layer.unit.until("logits") if is_last else layer.unit.forward, held)
            x = held[layer.unit.place["logits" if is_last else layer.unit.output]]
            self.movement.after_forward(place)
        assert x is not None
        return capped(x, self.architecture.numerics.logit_cap)
