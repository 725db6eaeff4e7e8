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
from shardwise.engine.torch.rank import Rank
from shardwise.engine.torch.unit import TorchUnit
from shardwise.lowering.instance import Instance
from shardwise.lowering.parameters import unit_paths
from shardwise.lowering.stages import SPLIT
from shardwise.model.architecture import Architecture
from shardwise.model.decoder import LAYERS, PREDICTS


class Ends(NamedTuple):
    """Of the unit at a path: its weights by their names in the program, and where their gradients go."""

    weights: Mapping[str, Tensor]
    gradients: Gradients | None = None


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
    numbers = _numbers(architecture)
    for path, kind in instance.units:
        key, number = (kind, instance.recompute(path, kind)), numbers.get(path)
        if key not in units:
            sizes = architecture.dense() if kind == "dense_block" else architecture
            units[key] = TorchUnit(
                instance.template(path, kind), sizes, rank, dtype, compiled=compiled and number is not None,
                split=instance.splits and kind in SPLIT,
            )  # fmt: skip
        layers.append(
            Layer(path, units[key], *ends_of(path), number=number, balance_bias=_bias(architecture, kind, device))
        )
    ends = itertools.accumulate(map(len, instance.stages.values()), initial=0)
    return TorchModel(
        architecture, layers, dtype, rank, movement=movement, recomputing=recomputing, prediction_weight=prediction_weight,
        stages={stage: range(*two) for stage, two in zip(instance.stages, itertools.pairwise(ends), strict=True)},
    )  # fmt: skip


def _numbers(architecture: Architecture) -> dict[str, int]:
    """The number of each unit with a block, by its path: those of multi-token prediction follow the layers."""
    blocks = (path for path, kind in unit_paths(architecture) if kind in LAYERS + PREDICTS)
    return {path: number for number, path in enumerate(blocks)}


def _bias(architecture: Architecture, kind: str, device: torch.device) -> Tensor | None:
    """Of a router's choice, zero at first; in fp32 at least, for its steps would vanish in bf16."""
    if kind not in ("block", *PREDICTS) or not architecture.num_experts:
        return None
    return torch.zeros(architecture.num_experts, dtype=torch.float32, device=device)
