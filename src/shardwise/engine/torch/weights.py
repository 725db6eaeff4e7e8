"""The weights of a model by name, whole, and what it makes of token ids. Letters: B sequences, T positions, V words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from shardwise.engine.torch.build import Ends, balance_biases, torch_model
from shardwise.engine.torch.model import TorchModel
from shardwise.layout.layout import Layout
from shardwise.lowering.instance import Instance
from shardwise.lowering.parameters import Parameter
from shardwise.model.architecture import Architecture
from shardwise.precision import precision_named


def on_one_device(architecture: Architecture) -> Instance:
    """A model whole on one device."""
    return Instance(architecture=architecture, layout=Layout(), precision=precision_named("fp32"))


def parameter_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter by its full name.

    >>> tiny = Architecture(name="tiny", num_layers=1, d_model=4, d_ff=6, num_heads=2, num_kv_heads=1, head_dim=2, vocab_size=7)
    >>> parameter_shapes(tiny)["layers.0.wq"]
    (1, 2, 2, 4)
    """
    instance = on_one_device(architecture)
    return {one.name: shape_of(one, architecture) for one in instance.parameters}


def shape_of(parameter: Parameter, architecture: Architecture) -> tuple[int, ...]:
    """The shape of a whole parameter."""
    return tuple(architecture.dims[dim] for dim in parameter.use.dims)


@dataclass(frozen=True)
class Weights:
    """Tensors in one format by the full names of parameters, and the biases of routers' choices [E] by theirs
    (`build.balance_biases`), zero where there is none."""

    architecture: Architecture
    tensors: Mapping[str, Tensor]
    biases: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.tensors.values())).dtype

    @cached_property
    def model(self) -> TorchModel:
        """The model on one device, which uses these tensors as they are."""
        instance = on_one_device(self.architecture)
        device, names = next(iter(self.tensors.values())).device, balance_biases(self.architecture)

        def ends(path: str) -> Ends:
            bias = self.biases.get(names.get(path, ""))
            return Ends({weight: self.tensors[one.name] for weight, one in instance.used[path].items()}, None, bias)

        return torch_model(instance, self.dtype, ends, device)

    def logits(self, ids_BT: Tensor, documents_BT: Tensor | None = None) -> Tensor:
        """[B, T, V], in float32 at least.

        With `documents_BT` a token sees its own document only, and positions start from 0 in each. Raises `InputError` where the
        sequence is longer than a learned table of positions.
        """
        return self.model.logits(ids_BT, documents_BT)
