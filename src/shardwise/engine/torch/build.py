"""A model from an instance: which units it has, each compiled once for all of its layers that are alike."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.engine.torch.giving import Gradients
from shardwise.engine.torch.model import Clock, Layer, Movement, TorchModel
from shardwise.engine.torch.narrow import Scales, narrow_of
from shardwise.engine.torch.rank import Rank
from shardwise.engine.torch.unit import TorchUnit
from shardwise.lowering.instance import Instance
from shardwise.lowering.parameters import unit_paths
from shardwise.lowering.stages import SPLIT
from shardwise.model.architecture import Architecture
from shardwise.model.decoder import LAYERS, PREDICTS


class Ends(NamedTuple):
    """Of the unit at a path: its weights by their names in the program, where their gradients go, of a router the bias of its
    choice [E] (None: zero), and the scales of what its products take, where they follow from earlier steps."""

    weights: Mapping[str, Tensor]
    gradients: Gradients | None = None
    balance_bias: Tensor | None = None
    scales: Scales | None = None


def torch_model(
    instance: Instance, dtype: torch.dtype, ends_of: Callable[[str], Ends], device: torch.device, *,
    rank: Rank | None = None, movement: Movement | None = None, recomputing: Clock = nullcontext, compiled: bool = False,
    prediction_weight: float = 1.0,
) -> TorchModel:  # fmt: skip
    """A model whose units run in `dtype` on a rank as an instance says (None: on the only one).

    `compiled`: torch.compile joins what stands between collectives. `prediction_weight` is that of the loss of multi-token
    prediction.
    """
    architecture = instance.architecture
    units: dict[tuple[str, str], TorchUnit] = {}
    rank = rank or Rank(instance.mesh)
    layers = []
    numbers, biases = _numbers(architecture), balance_biases(architecture)
    for path, kind in instance.units:
        key, number = (kind, instance.recompute(path, kind)), numbers.get(path)
        if key not in units:
            sizes = architecture.dense() if kind == "dense_block" else architecture
            units[key] = TorchUnit(
                instance.template(path, kind), sizes, rank, dtype, compiled=compiled and number is not None,
                split=instance.splits and kind in SPLIT, narrow=narrow_of(instance.precision),
            )  # fmt: skip
        weights, gradients, bias, scales = ends_of(path)
        if bias is None and path in biases:  # in fp32 at least, for its steps would vanish in bf16
            bias = torch.zeros(architecture.num_experts, dtype=torch.float32, device=device)
        layers.append(Layer(path, units[key], weights, gradients, number, bias, scales))
    ends = itertools.accumulate(map(len, instance.stages.values()), initial=0)
    return TorchModel(
        architecture, layers, dtype, rank, movement=movement, recomputing=recomputing, prediction_weight=prediction_weight,
        stages={stage: range(*two) for stage, two in zip(instance.stages, itertools.pairwise(ends), strict=True)},
    )  # fmt: skip


def _numbers(architecture: Architecture) -> dict[str, int]:
    """The number of each unit with a block, by its path: those of multi-token prediction follow the layers."""
    blocks = (path for path, kind in unit_paths(architecture) if kind in LAYERS + PREDICTS)
    return {path: number for number, path in enumerate(blocks)}


def balance_biases(architecture: Architecture) -> dict[str, str]:
    """The name of the bias of each router's choice, by the path of its unit."""
    routed = ("block", *PREDICTS) if architecture.num_experts else ()
    return {path: f"{path}.balance_bias" for path, kind in unit_paths(architecture) if kind in routed}
