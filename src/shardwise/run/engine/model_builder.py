"""A model from a plan's instance, its full weights by name, and their initial values.

Each kind of unit is built once for all layers that are equal. The initial value of a parameter depends on its name and
the seed only. Letters: B sequences, T positions, V words.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.layout import ShardingScheme
from shardwise.model import MTP_UNITS, Architecture, is_layer
from shardwise.run.engine.calls import CallBuilder, GradientSink
from shardwise.run.engine.model import ModelOptions, ModelUnit, TorchModel
from shardwise.run.engine.rank_coordinates import Rank
from shardwise.run.engine.unit_passes import TorchUnit
from shardwise.run.kernels.matmul import OperandScales, ProductFormats, product_formats
from shardwise.run.kernels.quantized_weights import CastWeight
from shardwise.step import RankProgram, balance_biases, unit_paths
from shardwise.step.parameters import Parameter, list_parameters
from shardwise.step.pipeline_stages import splits_backward_pass
from shardwise.step.rank_program import shape_of, single_device_instance


class UnitTensors(NamedTuple):
    """Tensors of the unit at a path.

    `weights` are by name in the program, `gradients` their destination; `balance_bias` [E] is added to a router's
    choice (None: zero); `scales` are those of quantized products' operands, where they follow from earlier steps.
    `kept_casts` are the weights whose casts are kept from pass to pass of a step.
    """

    weights: Mapping[str, Tensor]
    gradients: GradientSink | None = None
    balance_bias: Tensor | None = None
    scales: OperandScales | None = None
    kept_casts: Set[str] = frozenset()


def build_torch_model(
    instance: RankProgram, dtype: torch.dtype, ends_of: Callable[[str], UnitTensors], device: torch.device, *,
    rank: Rank | None = None, options: ModelOptions | None = None,
) -> TorchModel:  # fmt: skip
    """Return a model whose units run in `dtype` on a rank as an instance says (None: on the only one).

    `ends_of` gives the tensors of the unit at a path.
    """
    options = options or ModelOptions()
    architecture = instance.architecture
    units: dict[tuple[str, str], TorchUnit] = {}
    rank = rank or Rank(instance.mesh)
    layers = []
    numbers, biases = _block_numbers(architecture), balance_biases(architecture)
    for path, kind in instance.units:
        key, number = (kind, instance.recompute(path, kind)), numbers.get(path)
        if key not in units:
            sizes = architecture.unit_architecture(kind)
            template = instance.unit_instructions(path, kind)
            formats = product_formats(instance.precision, instance.policy.casts)
            builder = CallBuilder(template.unit, sizes, rank, dtype, formats)
            split = instance.splits_backward and splits_backward_pass(kind)
            units[key] = TorchUnit(template, builder, split=split)
        weights, gradients, bias, scales, kept_casts = ends_of(path)
        if bias is None and path in biases:  # in fp32 at least, for its steps would vanish in bf16
            bias = torch.zeros(architecture.unit_architecture(kind).num_experts, dtype=torch.float32, device=device)
        casts = dict(_allocate_casts(units[key], weights, kept_casts, product_formats(instance.precision)))
        layers.append(ModelUnit(path, units[key], weights, gradients, number, bias, scales, casts))
    ends = itertools.accumulate(map(len, instance.stages.values()), initial=0)
    stages = {stage: range(*bounds) for stage, bounds in zip(instance.stages, itertools.pairwise(ends), strict=True)}
    return TorchModel(architecture, layers, dtype, rank, stages, options)


def _allocate_casts(
    unit: TorchUnit, weights: Mapping[str, Tensor], kept_casts: Set[str], formats: ProductFormats | None
) -> Iterator[tuple[str, CastWeight]]:
    """Yield memory for the casts of a unit's weights that are kept."""
    for name, split in unit.castable.items():
        weight = weights[name]
        weight_format = formats.of_weight(weight.shape, *split) if formats is not None and name in kept_casts else None
        if weight_format is not None:
            yield name, CastWeight.empty(weight.shape, *split, weight_format, weight.device)


def _block_numbers(architecture: Architecture) -> dict[str, int]:
    """Return the number of each unit with a block, by path: those of multi-token prediction follow the layers."""
    blocks = (path for path, kind in unit_paths(architecture) if is_layer(kind) or kind in MTP_UNITS)
    return {path: number for number, path in enumerate(blocks)}


@dataclass(frozen=True)
class ModelWeights:
    """Full tensors in one dtype by parameter name, and the balance biases of routers [E] by name
    (`step.rank_program.balance_biases`), zero where absent."""

    architecture: Architecture
    tensors: Mapping[str, Tensor]
    biases: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.tensors.values())).dtype

    @cached_property
    def model(self) -> TorchModel:
        """Model on one device, which uses these tensors without a copy."""
        instance = single_device_instance(self.architecture)
        device, names = next(iter(self.tensors.values())).device, balance_biases(self.architecture)

        def ends(path: str) -> UnitTensors:
            bias = self.biases.get(names.get(path, ""))
            return UnitTensors(
                {
                    weight: self.tensors[parameter.name]
                    for weight, parameter in instance.parameters_by_unit[path].items()
                },
                None,
                bias,
            )

        return build_torch_model(instance, self.dtype, ends, device)

    def logits(self, ids_BT: Tensor, documents_BT: Tensor | None = None) -> Tensor:
        """Return logits [B, T, V], in float32 or wider.

        With `documents_BT` a token attends to its own document only, and positions start from 0 in each. Raises
        `InputError` where the sequence is longer than a learned table of positions.
        """
        return self.model.logits(ids_BT, documents_BT)


INITIAL_STD = 0.02  # of every matrix: Radford et al. 2018 (GPT), section 4.1; kept by GPT-2, GPT-3, OPT and Megatron-LM
# Products that are added to the residual stream; their values shrink with the number of such sums (Radford et al. 2019,
# section 2.3): two a layer.
RESIDUAL_WEIGHTS = ("wo", "w_down", "experts_down", "shared_down")


def initial_weights(
    architecture: Architecture, seed: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> ModelWeights:
    """Return the weights with which a model starts, on one device.

    Matrices and sinks are normal, norms one, biases and output matrices of adapters zero. The same seed gives the same
    values in any dtype, but for rounding.
    """
    parameters = list_parameters(architecture, ShardingScheme.unsharded(architecture.structure))
    values = {
        parameter.name: initial_value(architecture, parameter, seed).to(device=device, dtype=dtype)
        for parameter in parameters
    }
    return ModelWeights(architecture, values)


def initial_value(architecture: Architecture, parameter: Parameter, seed: int) -> Tensor:
    """Return a parameter's full initial value, in float32 on the CPU."""
    shape, weight = shape_of(parameter, architecture), parameter.weight
    if weight.endswith((".bias", ".lora_b")):  # an adapter begins as nothing: Hu et al. 2021, section 4.1
        return torch.zeros(shape)
    if weight.endswith("norm.weight"):
        return torch.ones(shape) - architecture.numerics.norm_offset
    generator = torch.Generator().manual_seed(parameter_seed(seed, parameter.name))
    std = (
        INITIAL_STD / math.sqrt(2 * architecture.num_layers)
        if parameter.name_in_block in RESIDUAL_WEIGHTS
        else INITIAL_STD
    )
    return torch.empty(shape).normal_(0.0, std, generator=generator)


def parameter_seed(seed: int, name: str) -> int:
    """Return the seed of a parameter, 63 bits."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
