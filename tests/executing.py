"""The executor on one device, its gradients in a tensor of each parameter; and the plain decoder with the same weights."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from plain import Decoder, build
from torch import Tensor

from shardwise.layout.layout import Layout
from shardwise.model.architecture import Architecture
from shardwise.run.engine.micro_batch import MicroBatch
from shardwise.run.engine.model import ModelOptions, Timer
from shardwise.run.engine.model_builder import ModelWeights, UnitTensors, build_torch_model
from shardwise.step.rank_program import parameter_shapes, single_device_instance

CPU = torch.device("cpu")


@dataclass
class Resting:
    """Where gradients rest, by the parameters' full names. `begun` are those that have got something, to which the next is added.

    With `takes_products` products may write there, as in most layouts; otherwise all gradients are handed over.
    """

    tensors: Mapping[str, Tensor]
    takes_products: bool = True
    begun: set[str] = field(default_factory=set)

    @property
    def computed(self) -> dict[str, Tensor]:
        """The gradients that there are."""
        return {name: tensor for name, tensor in self.tensors.items() if name in self.begun}


@dataclass
class UnitSink:
    """Where one unit's gradients go (`engine.torch.calls.Gradients`); `names` are its weights' full ones."""

    resting: Resting
    names: Mapping[str, str]

    def target(self, weight: str) -> tuple[Tensor | None, bool]:
        name, resting = self.names[weight], self.resting
        return (resting.tensors[name] if resting.takes_products else None), name in resting.begun

    def deliver(self, weight: str, gradient: Tensor | None) -> None:
        name, resting = self.names[weight], self.resting
        tensor = resting.tensors[name]
        if gradient is not None:
            assert (gradient.shape, gradient.dtype) == (tensor.shape, tensor.dtype), name
            tensor.add_(gradient) if name in resting.begun else tensor.copy_(gradient)
        resting.begun.add(name)


class Executor:
    """A model on one device that uses these weights as they are; `recompute` is a policy, for the first `num_layers` layers.

    Gradients are NaN until they are written.
    """

    def __init__(
        self, weights: ModelWeights, recompute: str = "none", *, num_layers: int | None = None, recomputing: Timer = nullcontext,
        takes_products: bool = True, prediction_weight: float = 1.0,
    ) -> None:  # fmt: skip
        layout = Layout(recompute=recompute, recompute_layers=num_layers)
        instance = replace(single_device_instance(weights.architecture), layout=layout)
        self.weights, self.used = weights, instance.parameters_by_unit
        names = [parameter.name for parameter in instance.parameters if parameter.trained]
        self.gradients = Resting({n: torch.full_like(weights.tensors[n], torch.nan) for n in names}, takes_products)
        self.model = build_torch_model(
            instance,
            weights.dtype,
            self._ends,
            CPU,
            options=ModelOptions(recomputing=recomputing, prediction_weight=prediction_weight),
        )

    def _ends(self, path: str) -> UnitTensors:
        used = self.used[path]
        sink = UnitSink(self.gradients, {weight: parameter.name for weight, parameter in used.items()})
        return UnitTensors({weight: self.weights.tensors[parameter.name] for weight, parameter in used.items()}, sink)

    def loss(self, ids: Any, targets: Any, num_targets: int, documents: Tensor | None = None) -> Tensor:
        """Of a micro-batch, without a backward pass."""
        return self.model.forward(batch_of(ids, targets, documents), num_targets, trains=False).loss

    def train(self, ids: Any, targets: Any, num_targets: int, documents: Tensor | None = None) -> Tensor:
        """The loss of a micro-batch, whose gradients are added to those that there are."""
        on_way = self.model.forward(batch_of(ids, targets, documents), num_targets, trains=True)
        self.model.backward(on_way)
        return on_way.loss


def batch_of(ids: Any, targets: Any, documents: Tensor | None = None) -> MicroBatch:
    """A micro-batch of arrays or tensors."""
    return MicroBatch(torch.as_tensor(ids), torch.as_tensor(targets), documents)


def random_weights(architecture: Architecture, seed: int = 0, dtype: torch.dtype = torch.float64) -> ModelWeights:
    """Weights that are all random and none small."""
    generator = torch.Generator().manual_seed(seed)

    def value(shape: tuple[int, ...]) -> Tensor:
        values = torch.empty(shape, dtype=torch.float64)
        return values.normal_(1.0 if len(shape) == 1 else 0.0, 0.5, generator=generator).to(dtype)

    return ModelWeights(architecture, {name: value(shape) for name, shape in parameter_shapes(architecture).items()})


@torch.no_grad()
def decoder_of(weights: ModelWeights) -> Decoder:
    """The plain decoder with copies of these weights."""
    model = build(weights.architecture, dtype=weights.dtype).to_empty(device="cpu")
    parameters = dict(model.named_parameters())
    assert set(parameters) == set(weights.tensors)
    for name, parameter in parameters.items():
        parameter.copy_(weights.tensors[name])
    for buffer in model.buffers():
        buffer.zero_()
    return model


def errors(actual: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, float]:
    """Each gradient's ‖actual - expected‖ / ‖expected‖; of one that is rounding alone, over a millionth of the whole norm."""
    assert set(actual) == set(expected)
    exact = {name: torch.as_tensor(gradient) for name, gradient in expected.items()}
    smallest = 1e-6 * torch.stack([gradient.norm() for gradient in exact.values()]).norm()
    differences = {name: (torch.as_tensor(actual[name]) - gradient).norm() for name, gradient in exact.items()}
    return {
        name: float(difference / exact[name].norm().clamp(min=smallest)) for name, difference in differences.items()
    }
