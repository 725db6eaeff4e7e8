"""A decoder as its units' instructions, run forward and backward over micro-batches. No autograd, no hooks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwise.model.architecture import Architecture
from shardwise.model.backward import gradient_name
from shardwise.model.decoder import MTP_UNITS
from shardwise.pipeline.actions import BACKWARD_WEIGHT, FULL_BACKWARD
from shardwise.run.data.batches import IGNORE_INDEX
from shardwise.run.engine.call_builder import BALANCE_BIAS, GRADIENTS, PENALTY, ROUTER_STATISTICS, TRAINS
from shardwise.run.engine.call_rewrites import GradientSink
from shardwise.run.engine.micro_batch import MicroBatch, MicroBatchInputs
from shardwise.run.engine.rank_coordinates import Rank
from shardwise.run.engine.unit_passes import SlotCall, Slots, TorchUnit, run_calls
from shardwise.run.kernels.cross_entropy import cap_logits
from shardwise.run.kernels.device_dispatch import at_least_fp32
from shardwise.run.kernels.matmul import SCALES_INPUT, OperandScales
from shardwise.sharding.spec import Spec

Timer = Callable[[], AbstractContextManager[None]]


class WeightMovement(Protocol):
    """What is done around the units of a model, known by their places in its forward pass: weights come and go.

    `following` is the place of the unit that runs next, if any does, `done` that of the one that has run before.
    """

    def before_forward(self, place: int, following: int | None) -> None: ...
    def after_forward(self, place: int) -> None: ...
    def before_backward(self, place: int, done: int | None, following: int | None) -> None: ...


class KernelRecorder(Protocol):
    """What watches the steps of units as they run."""

    def timed_calls(self, path: str, unit: str, steps: Sequence[SlotCall]) -> Sequence[SlotCall]:
        """The steps of a unit at a path in the model, about to run, with kernels that are timed."""


class ResidentWeights:
    """Weights are where they are used, always."""

    def before_forward(self, place: int, following: int | None) -> None:
        """Nothing has to come."""

    def after_forward(self, place: int) -> None:
        """Nothing has to go."""

    def before_backward(self, place: int, done: int | None, following: int | None) -> None:
        """Nothing has to come or go."""


@dataclass
class ModelUnit:
    """A unit at its `path` in the model, the `number`th block where it has one: its weights by their names in the program, where
    their gradients go, of a router the bias of its choice, and the scales of what its products take."""

    path: str
    unit: TorchUnit
    weights: Mapping[str, Tensor]
    gradients: GradientSink | None = None
    number: int | None = None
    balance_bias: Tensor | None = None
    scales: OperandScales | None = None

    @property
    def predicts(self) -> bool:
        """Whether it is a module of multi-token prediction."""
        return self.unit.unit.name in MTP_UNITS

    def put_weights(self, held: Slots, dtype: torch.dtype) -> None:
        """Put the weights in their places, in the format of activations."""
        self.put(held, {name: weight.to(dtype) for name, weight in self.weights.items()})

    def free_casts(self, held: Slots, dtype: torch.dtype) -> None:
        """Release weights that are there in another format than they rest in."""
        self.put(held, {name: None for name, weight in self.weights.items() if weight.dtype != dtype})

    def put(self, held: Slots, values: Mapping[str, Any]) -> None:
        """Put values in their places, where the unit has any for them."""
        place = self.unit.place
        for name, value in values.items():
            if name in place:
                held[place[name]] = value


@dataclass
class InFlightPass:
    """A micro-batch on its way through a stage: the `places` of its units, its loss, those of multi-token prediction with their
    weight, what each unit holds by its place, by the places of routers what these did, [2, E], and the hidden state that the next
    stage takes."""

    places: Sequence[int]
    loss: Tensor
    further: list[Tensor] = field(default_factory=list)
    held: dict[int, Slots] = field(default_factory=dict)
    routed: dict[int, Tensor] = field(default_factory=dict)
    output: Tensor | None = None

    def take(self, place: int, layer: ModelUnit, held: Slots) -> Tensor | None:
        """Take what a unit's forward pass has made: the hidden state, which is the next unit's then, its loss, and its router's
        sums."""
        unit = layer.unit
        if ROUTER_STATISTICS in unit.place:
            self.routed[place] = held[unit.place[ROUTER_STATISTICS]]
        if layer.predicts:
            self.further.append(held[unit.place[unit.loss or ""]])
        elif unit.loss is not None:
            self.loss = held[unit.place[unit.loss]]
        if unit.output is None:
            return None
        made: Tensor = held[unit.place[unit.output]]
        if unit.output not in unit.unit.saved:
            held[unit.place[unit.output]] = None
        return made


class TorchModel:
    """The units of a model, or of some stages of it, in the order of its forward pass. `recomputing` is entered around what is
    made again.

    `stages` are the places of each stage's units; of a model in one piece there is one stage. `prediction_weight` multiplies the
    mean loss of the modules of multi-token prediction, which run in training alone.
    """

    def __init__(
        self, architecture: Architecture, layers: Sequence[ModelUnit], dtype: torch.dtype, rank: Rank, *,
        movement: WeightMovement | None = None, recomputing: Timer = nullcontext, prediction_weight: float = 1.0,
        stages: Mapping[int, range] | None = None,
    ) -> None:  # fmt: skip
        self.stages = stages or {0: range(len(layers))}
        self.device = next(weight.device for layer in layers for weight in layer.weights.values())
        self.architecture, self.layers, self.dtype, self.rank = architecture, layers, dtype, rank
        self.movement: WeightMovement = movement or ResidentWeights()
        self.recomputing, self.prediction_weight = recomputing, prediction_weight
        self.recorder: KernelRecorder | None = None

    @property
    def balance_biases(self) -> dict[int, Tensor]:
        """Those of the routers' choice, by the routers' places."""
        found = ((place, layer.balance_bias) for place, layer in enumerate(self.layers))
        return {place: bias for place, bias in found if bias is not None}

    @torch.no_grad()
    def forward(
        self,
        batch: MicroBatch,
        num_targets: float | Tensor,
        *,
        trains: bool,
        stage: int | None = None,
        x: Tensor | None = None,
    ) -> InFlightPass:
        """The loss of a micro-batch, divided by the targets of the whole step; to train, each unit holds what it saved.

        Of a stage of several, `x` is the hidden state that the one before gives.

        Raises `InputError` where sequences are longer than a learned table of positions.
        """
        places = [place for place in self._places(stage) if trains or not self.layers[place].predicts]
        zero = torch.zeros((), dtype=at_least_fp32(self.dtype), device=batch.ids_BT.device)
        on_way, chain = InFlightPass(places, zero), None
        for place, following, sights, shared in self._iterate_units(places, batch, 1.0 / num_targets, trains=trains):
            layer = self.layers[place]
            self.movement.before_forward(place, following)
            held = self._begin(layer, sights, shared, x if chain is None or not layer.predicts else chain)
            self._run(layer, layer.unit.forward, held)
            layer.free_casts(held, self.dtype)
            made = on_way.take(place, layer, held)
            x, chain = (x, made) if layer.predicts else (made, None)
            self.movement.after_forward(place)
            if trains:
                on_way.held[place] = held
        on_way.output = x
        return on_way

    def empty_hidden_state(self, spec: Spec, shape: Sequence[int]) -> Tensor:
        """Room for this rank's part of a hidden state of a micro-batch [B, T]."""
        sizes = dict(zip(("B", "T", "D"), (*shape, self.architecture.d_model), strict=True))
        parts = {
            dim: self.rank.mesh.size(axes) for dim, axes in zip(spec.dims, self.rank.sharding(spec).axes, strict=True)
        }
        local = [shape[0], *(sizes[dim] // parts[dim] for dim in ("T", "D"))]
        return torch.empty(local, dtype=self.dtype, device=self.device)

    def _run(self, layer: ModelUnit, steps: Sequence[SlotCall], held: Slots) -> None:
        """Run steps of a unit, those that a recorder watches where there is one."""
        run_calls(
            steps if self.recorder is None else self.recorder.timed_calls(layer.path, layer.unit.unit.name, steps), held
        )

    def _places(self, stage: int | None) -> range:
        """Of the units of a stage; of a model in one piece of all."""
        if stage is None:
            (only,) = self.stages.values()
            return only
        return self.stages[stage]

    def _iterate_units(
        self, places: Sequence[int], batch: MicroBatch, scale: float | Tensor, *, trains: bool
    ) -> Iterator[tuple[int, int | None, MicroBatchInputs, dict[str, Any]]]:
        """The place of each unit that runs, that of the next one, and what the unit reads of the batch.

        Each module of multi-token prediction is one token further than the one before.
        """
        further, whole = batch, MicroBatchInputs(self.architecture, batch, self.dtype, self.rank)
        for place, following in itertools.zip_longest(places, places[1:]):
            predicts = self.layers[place].predicts
            own = whole
            if predicts:
                further = further.shift_by_one_token()
                own = MicroBatchInputs(self.architecture, further, self.dtype, self.rank)
            factor = self.prediction_weight / self.architecture.num_predict_layers if predicts else 1.0
            yield place, following, own, {"loss_scale": factor * scale, TRAINS: trains}

    def _begin(self, layer: ModelUnit, sights: MicroBatchInputs, shared: Mapping[str, Any], x: Tensor | None) -> Slots:
        """What a unit holds when its forward pass begins."""
        held = layer.unit.empty_slots()
        layer.put_weights(held, self.dtype)
        layer.put(held, shared)
        layer.put(held, {GRADIENTS: layer.gradients, BALANCE_BIAS: layer.balance_bias, SCALES_INPUT: layer.scales})
        for key, (name, axes) in layer.unit.batch_parts.items():
            held[layer.unit.place[key]] = sights.unit_input(name, axes, layer.number)
        if layer.unit.input is not None:
            layer.put(held, {layer.unit.input: x})
        return held

    @torch.no_grad()
    def backward(
        self,
        on_way: InFlightPass,
        penalties: Mapping[int, Tensor] | None = None,
        *,
        kind: str = FULL_BACKWARD,
        dx: Tensor | None = None,
    ) -> Tensor | None:
        """Hand the gradient of every weight to where it goes. `penalties` [E]: the gradient of each token's scores by a loss that
        evens the shares of a router's experts out, by its place.

        Of a stage of several, `dx` is the gradient of the hidden state that it gave; that of the one that it took is returned.
        A backward pass of the `kind` I leaves the gradients of layers' weights to `weights`.
        """
        dchain: Tensor | None = None
        order = on_way.places[::-1]
        for done, place, following in zip((None, *order[:-1]), order, (*order[1:], None), strict=True):
            layer, held = self.layers[place], on_way.held[place]
            backward = layer.unit.backward.get(kind) or layer.unit.backward[FULL_BACKWARD]
            if kind == FULL_BACKWARD or BACKWARD_WEIGHT not in layer.unit.backward:  # nothing of it waits
                del on_way.held[place]
            self.movement.before_backward(place, done, following)
            layer.put_weights(held, self.dtype)
            given = gradient_name(layer.unit.output or "")
            layer.put(held, {PENALTY: (penalties or {}).get(place), given: dchain if layer.predicts else dx})
            dx, dchain = (dx if layer.predicts else None), None
            if backward.recompute:
                with self.recomputing():
                    self._run(layer, backward.recompute, held)
            self._run(layer, backward.steps, held)
            layer.free_casts(held, self.dtype)
            dx, dchain = self._gradients(place, held, dx)
        return dx

    @torch.no_grad()
    def weights(self, on_way: InFlightPass) -> None:
        """Hand the gradients of layers' weights to where they go, behind a backward pass that has left them."""
        for place in sorted(on_way.held, reverse=True):
            layer = self.layers[place]
            self._run(layer, layer.unit.backward[BACKWARD_WEIGHT].steps, on_way.held.pop(place))

    def _gradients(self, place: int, held: Slots, dx: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of the hidden state of the layers, `dx` of which the head gave, and of that of the module of multi-token
        prediction before this unit, which has run backward."""
        layer = self.layers[place]
        if layer.unit.gradient_of_input is None:
            return None, None
        found = held[layer.unit.place[layer.unit.gradient_of_input]]
        if layer.predicts and self.layers[place - 1].predicts:
            return dx, found
        return (found if dx is None else found.add_(dx)), None

    @torch.no_grad()
    def logits(self, ids_BT: Tensor, documents_BT: Tensor | None = None) -> Tensor:
        """[B, T, V], in float32 at least."""
        x, batch = None, MicroBatch(ids_BT, torch.full_like(ids_BT, IGNORE_INDEX), documents_BT)
        places = [place for place in self._places(None) if not self.layers[place].predicts]
        for place, following, sights, shared in self._iterate_units(places, batch, 1.0, trains=False):
            layer = self.layers[place]
            self.movement.before_forward(place, following)
            held = self._begin(layer, sights, shared, x)
            is_last = following is None
            run_calls(layer.unit.forward_until("logits") if is_last else layer.unit.forward, held)
            x = held[layer.unit.place["logits" if is_last else layer.unit.output or ""]]
            self.movement.after_forward(place)
        assert x is not None
        return cap_logits(x, self.architecture.numerics.logit_cap)
