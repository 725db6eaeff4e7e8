"""A model that runs the calls of its units forward and backward over micro-batches. No autograd, no hooks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwise.model import MTP_UNITS, Architecture
from shardwise.model.backward import gradient_name
from shardwise.pipeline import BACKWARD_WEIGHT, FULL_BACKWARD
from shardwise.run.data.batches import IGNORE_INDEX
from shardwise.run.engine.calls import BALANCE_BIAS, GRADIENTS, PENALTY, ROUTER_STATISTICS, TRAINS, GradientSink
from shardwise.run.engine.micro_batch import MicroBatch, MicroBatchInputs
from shardwise.run.engine.rank_coordinates import Rank
from shardwise.run.engine.unit_passes import SlotCall, Slots, TorchUnit, run_calls
from shardwise.run.kernels.cross_entropy import cap_logits
from shardwise.run.kernels.device_dispatch import at_least_fp32
from shardwise.run.kernels.matmul import SCALES_INPUT, OperandScales
from shardwise.run.kernels.quantized_weights import CastWeight
from shardwise.sharding import Spec

Timer = Callable[[], AbstractContextManager[None]]


class WeightMovement(Protocol):
    """Movement of weights around each unit's pass: they are gathered and freed.

    Units are known by their index in the forward pass. `next_unit` runs next, `previous_unit` has run before; None: no
    such unit.
    """

    def before_forward(self, unit_index: int, next_unit: int | None) -> None: ...
    def after_forward(self, unit_index: int) -> None: ...
    def before_backward(self, unit_index: int, previous_unit: int | None, next_unit: int | None) -> None: ...


class KernelRecorder(Protocol):
    """Times the calls of units as they run."""

    def timed_calls(self, path: str, unit: str, steps: Sequence[SlotCall]) -> Sequence[SlotCall]:
        """Return the calls of the unit at a path in the model, about to run, with kernels that are timed."""


class ResidentWeights:
    """Weights that are always where they are used: nothing moves."""

    def before_forward(self, unit_index: int, next_unit: int | None) -> None:
        """Do nothing."""

    def after_forward(self, unit_index: int) -> None:
        """Do nothing."""

    def before_backward(self, unit_index: int, previous_unit: int | None, next_unit: int | None) -> None:
        """Do nothing."""


@dataclass
class ModelUnit:
    """A unit at its `path` in the model, block number `number` where it is a block.

    `weights` are by name in the program, `gradients` their destination; `balance_bias` is added to a router's choice,
    `scales` are those of quantized products' operands. `casts` are the weights that are cast once for all passes of a step,
    of which `current_casts` are those of the weights as they are.
    """

    path: str
    unit: TorchUnit
    weights: Mapping[str, Tensor]
    gradients: GradientSink | None = None
    number: int | None = None
    balance_bias: Tensor | None = None
    scales: OperandScales | None = None
    casts: Mapping[str, CastWeight] = field(default_factory=dict)
    current_casts: set[str] = field(default_factory=set)

    @property
    def predicts(self) -> bool:
        """True for a module of multi-token prediction (MTP)."""
        return self.unit.unit.name in MTP_UNITS

    def put_weights(self, slots: Slots, dtype: torch.dtype) -> None:
        """Put the weights in their slots: in the dtype of activations, or as casts for products."""
        self.put(slots, {name: self._as_operand(name, weight, dtype) for name, weight in self.weights.items()})

    def _as_operand(self, name: str, weight: Tensor, dtype: torch.dtype) -> Tensor | CastWeight:
        """Return a weight as the calls of the unit take it; its first use in a step casts it."""
        cast = self.casts.get(name)
        if cast is None:
            return weight.to(dtype)
        if name not in self.current_casts:
            values = weight.to(dtype)
            cast.store(values, None if self.scales is None else self.scales.factor(name, values))
            self.current_casts.add(name)
        return cast

    def free_casts(self, slots: Slots, dtype: torch.dtype) -> None:
        """Free weights whose dtype differs from that in which they are stored."""
        self.put(slots, {name: None for name, weight in self.weights.items() if weight.dtype != dtype})

    def put(self, slots: Slots, values: Mapping[str, Any]) -> None:
        """Put tensors in their slots, where the unit has any for them."""
        slot_of = self.unit.slot_of
        for name, value in values.items():
            if name in slot_of:
                slots[slot_of[name]] = value


@dataclass
class InFlightPass:
    """A micro-batch between the forward and the backward pass of a stage.

    `places` are the indices of the stage's units; `mtp_losses` the weighted losses of multi-token prediction; `slots` the
    slots of each unit, and `routed` the statistics [2, E] of each router, by unit index; `output` the hidden state for
    the next stage.
    """

    places: Sequence[int]
    loss: Tensor
    mtp_losses: list[Tensor] = field(default_factory=list)
    slots: dict[int, Slots] = field(default_factory=dict)
    routed: dict[int, Tensor] = field(default_factory=dict)
    output: Tensor | None = None

    def take(self, unit_index: int, layer: ModelUnit, slots: Slots) -> Tensor | None:
        """Collect the losses and router statistics of a unit's forward pass; return its hidden state."""
        unit = layer.unit
        if ROUTER_STATISTICS in unit.slot_of:
            self.routed[unit_index] = slots[unit.slot_of[ROUTER_STATISTICS]]
        if layer.predicts:
            self.mtp_losses.append(slots[unit.slot_of[unit.loss or ""]])
        elif unit.loss is not None:
            self.loss = slots[unit.slot_of[unit.loss]]
        if unit.output is None:
            return None
        output: Tensor = slots[unit.slot_of[unit.output]]
        if unit.output not in unit.unit.saved:
            slots[unit.slot_of[unit.output]] = None
        return output


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Options of what happens around a model's units.

    `movement` gathers and frees weights; `recomputing` is entered around recomputation. `prediction_weight` multiplies
    the mean loss of the modules of multi-token prediction, which run in training only.
    """

    movement: WeightMovement = field(default_factory=ResidentWeights)
    recomputing: Timer = nullcontext
    prediction_weight: float = 1.0


class TorchModel:
    """The units of a model, or of some of its stages, in the order of the forward pass.

    `stages` maps each stage to the indices of its units; an unsplit model has one stage.
    """

    def __init__(
        self, architecture: Architecture, layers: Sequence[ModelUnit], dtype: torch.dtype, rank: Rank,
        stages: Mapping[int, range], options: ModelOptions,
    ) -> None:  # fmt: skip
        self.stages, self.options = stages, options
        self.device = next(weight.device for layer in layers for weight in layer.weights.values())
        self.architecture, self.layers, self.dtype, self.rank = architecture, layers, dtype, rank
        self.recorder: KernelRecorder | None = None
        self.on_input: Callable[[Any], None] | None = None  # called with each part of the batch that a unit reads

    def begin_passes(self) -> None:
        """Forget what was cast of the weights, which may have changed: each is cast again on its first use."""
        for layer in self.layers:
            layer.current_casts.clear()

    @property
    def balance_biases(self) -> dict[int, Tensor]:
        """Biases of the routers' choice, by unit index."""
        biases = ((unit_index, layer.balance_bias) for unit_index, layer in enumerate(self.layers))
        return {unit_index: bias for unit_index, bias in biases if bias is not None}

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
        """Run a stage on a micro-batch; the loss is divided by the number of targets of the whole step. With `trains`,
        the slots of each unit are kept for the backward pass.

        `x` is the hidden state from the stage before; None in the first.

        Raises `InputError` where sequences are longer than a learned table of positions.
        """
        unit_indices = [
            unit_index for unit_index in self._places(stage) if trains or not self.layers[unit_index].predicts
        ]
        zero = torch.zeros((), dtype=at_least_fp32(self.dtype), device=batch.ids_BT.device)
        in_flight, mtp_hidden = InFlightPass(unit_indices, zero), None
        for unit_index, next_unit, inputs, shared in self._iterate_units(
            unit_indices, batch, 1.0 / num_targets, trains=trains
        ):
            layer = self.layers[unit_index]
            self.options.movement.before_forward(unit_index, next_unit)
            slots = self._begin(layer, inputs, shared, x if mtp_hidden is None or not layer.predicts else mtp_hidden)
            self._run(layer, layer.unit.forward, slots)
            layer.free_casts(slots, self.dtype)
            hidden = in_flight.take(unit_index, layer, slots)
            x, mtp_hidden = (x, hidden) if layer.predicts else (hidden, None)
            self.options.movement.after_forward(unit_index)
            if trains:
                in_flight.slots[unit_index] = slots
        in_flight.output = x
        return in_flight

    def empty_hidden_state(self, spec: Spec, shape: Sequence[int]) -> Tensor:
        """Return an empty tensor for this rank's part of the hidden state of a micro-batch of `shape` [B, T]."""
        sizes = dict(zip(("B", "T", "D"), (*shape, self.architecture.d_model), strict=True))
        parts = {
            dim: self.rank.mesh.size(axes) for dim, axes in zip(spec.dims, self.rank.sharding(spec).axes, strict=True)
        }
        local = [shape[0], *(sizes[dim] // parts[dim] for dim in ("T", "D"))]
        return torch.empty(local, dtype=self.dtype, device=self.device)

    def _run(self, layer: ModelUnit, steps: Sequence[SlotCall], slots: Slots) -> None:
        """Run the calls of a unit, timed where a recorder is set."""
        run_calls(
            steps if self.recorder is None else self.recorder.timed_calls(layer.path, layer.unit.unit.name, steps),
            slots,
        )

    def _places(self, stage: int | None) -> range:
        """Return the indices of a stage's units; None: of an unsplit model."""
        if stage is None:
            (only,) = self.stages.values()
            return only
        return self.stages[stage]

    def _iterate_units(
        self, unit_indices: Sequence[int], batch: MicroBatch, scale: float | Tensor, *, trains: bool
    ) -> Iterator[tuple[int, int | None, MicroBatchInputs, dict[str, Any]]]:
        """Yield the index of each unit that runs, that of the next one, and what the unit reads of the batch.

        Each module of multi-token prediction is one token further than the one before.
        """
        mtp_batch, stage_inputs = batch, MicroBatchInputs(self.architecture, batch, self.dtype, self.rank)
        for unit_index, next_unit in itertools.zip_longest(unit_indices, unit_indices[1:]):
            predicts = self.layers[unit_index].predicts
            unit_inputs = stage_inputs
            if predicts:
                mtp_batch = mtp_batch.shift_to_next_token()
                unit_inputs = MicroBatchInputs(self.architecture, mtp_batch, self.dtype, self.rank)
            factor = self.options.prediction_weight / self.architecture.num_predict_layers if predicts else 1.0
            yield unit_index, next_unit, unit_inputs, {"loss_scale": factor * scale, TRAINS: trains}

    def _begin(self, layer: ModelUnit, inputs: MicroBatchInputs, shared: Mapping[str, Any], x: Tensor | None) -> Slots:
        """Return a unit's slots as its forward pass starts."""
        slots = layer.unit.empty_slots()
        layer.put_weights(slots, self.dtype)
        layer.put(slots, shared)
        layer.put(slots, {GRADIENTS: layer.gradients, BALANCE_BIAS: layer.balance_bias, SCALES_INPUT: layer.scales})
        for key, (name, axes) in layer.unit.batch_parts.items():
            part = inputs.unit_input(name, axes, layer.number)
            slots[layer.unit.slot_of[key]] = part
            if self.on_input is not None:
                self.on_input(part)
        if layer.unit.input is not None:
            layer.put(slots, {layer.unit.input: x})
        return slots

    @torch.no_grad()
    def backward(
        self,
        in_flight: InFlightPass,
        penalties: Mapping[int, Tensor] | None = None,
        *,
        kind: str = FULL_BACKWARD,
        dx: Tensor | None = None,
    ) -> Tensor | None:
        """Run a stage backward, delivering the gradient of every weight.

        `penalties` [E], by unit index, are gradients of a router's scores from a loss that balances experts. `dx` is
        the gradient of the stage's output; None in the last. Returns the gradient of the stage's input. A backward pass
        of `kind` I leaves the gradients of layers' weights to `weights`.
        """
        mtp_gradient: Tensor | None = None
        order = in_flight.places[::-1]
        for previous_unit, unit_index, next_unit in zip((None, *order[:-1]), order, (*order[1:], None), strict=True):
            layer, slots = self.layers[unit_index], in_flight.slots[unit_index]
            backward = layer.unit.backward.get(kind) or layer.unit.backward[FULL_BACKWARD]
            if kind == FULL_BACKWARD or BACKWARD_WEIGHT not in layer.unit.backward:  # nothing of it waits
                del in_flight.slots[unit_index]
            self.options.movement.before_backward(unit_index, previous_unit, next_unit)
            layer.put_weights(slots, self.dtype)
            output_gradient = gradient_name(layer.unit.output or "")
            layer.put(
                slots,
                {PENALTY: (penalties or {}).get(unit_index), output_gradient: mtp_gradient if layer.predicts else dx},
            )
            dx, mtp_gradient = (dx if layer.predicts else None), None
            if backward.recompute:
                with self.options.recomputing():
                    self._run(layer, backward.recompute, slots)
            self._run(layer, backward.steps, slots)
            layer.free_casts(slots, self.dtype)
            dx, mtp_gradient = self._gradients(unit_index, slots, dx)
        return dx

    @torch.no_grad()
    def weights(self, in_flight: InFlightPass) -> None:
        """Deliver the gradients of layers' weights that a backward pass of kind I has left."""
        for unit_index in sorted(in_flight.slots, reverse=True):
            layer = self.layers[unit_index]
            self._run(layer, layer.unit.backward[BACKWARD_WEIGHT].steps, in_flight.slots.pop(unit_index))

    def _gradients(self, unit_index: int, slots: Slots, dx: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradient of the layers' hidden state (with `dx` added) and of the MTP module's before this unit."""
        layer = self.layers[unit_index]
        if layer.unit.gradient_of_input is None:
            return None, None
        gradient = slots[layer.unit.slot_of[layer.unit.gradient_of_input]]
        if layer.predicts and self.layers[unit_index - 1].predicts:
            return dx, gradient
        return (gradient if dx is None else gradient.add_(dx)), None

    @torch.no_grad()
    def logits(self, ids_BT: Tensor, documents_BT: Tensor | None = None) -> Tensor:
        """Return logits [B, T, V], in float32 or wider."""
        self.begin_passes()
        x, batch = None, MicroBatch(ids_BT, torch.full_like(ids_BT, IGNORE_INDEX), documents_BT)
        unit_indices = [unit_index for unit_index in self._places(None) if not self.layers[unit_index].predicts]
        for unit_index, next_unit, inputs, shared in self._iterate_units(unit_indices, batch, 1.0, trains=False):
            layer = self.layers[unit_index]
            self.options.movement.before_forward(unit_index, next_unit)
            slots = self._begin(layer, inputs, shared, x)
            is_last = next_unit is None
            run_calls(layer.unit.forward_until("logits") if is_last else layer.unit.forward, slots)
            x = slots[layer.unit.slot_of["logits" if is_last else layer.unit.output or ""]]
            self.options.movement.after_forward(unit_index)
        assert x is not None
        return cap_logits(x, self.architecture.numerics.logit_cap)
