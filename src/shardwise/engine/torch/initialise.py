"""Initial values: each parameter's own, whatever else is made, in what order, and where."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from shardwise.engine.torch.weights import Weights, shape_of
from shardwise.layout.family import Family
from shardwise.lowering.parameters import Parameter, parameters
from shardwise.model.architecture import Architecture

STD = 0.02  # of every matrix: Radford et al. 2018 (GPT), section 4.1; kept by GPT-2, GPT-3, OPT and Megatron-LM
# Products that are added to the residual stream; their values shrink with the number of such sums (Radford et al. 2019,
# section 2.3): two a layer.
RESIDUAL = ("wo", "w_down", "experts_down", "shared_down")


def initial_weights(
    architecture: Architecture, seed: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Weights:
    """The weights that a model begins with, on one device.

    Matrices and sinks are normal, norms one, biases and what leaves an adapter zero. The same seed gives the same values in any
    dtype, but for rounding.
    """
    found = parameters(architecture, Family(0, False, "none"))
    values = {one.name: initial_value(architecture, one, seed).to(device=device, dtype=dtype) for one in found}
    return Weights(architecture, values)


def initial_value(architecture: Architecture, parameter: Parameter, seed: int) -> Tensor:
    """A parameter's initial value, whole, in float32 on the CPU."""
    shape, weight = shape_of(parameter, architecture), parameter.weight
    if weight.endswith((".bias", ".lora_b")):  # an adapter begins as nothing: Hu et al. 2021, section 4.1
        return torch.zeros(shape)
    if weight.endswith("norm.weight"):
        return torch.ones(shape) - architecture.numerics.norm_offset
    generator = torch.Generator().manual_seed(parameter_seed(seed, parameter.name))
    std = STD / math.sqrt(2 * architecture.num_layers) if parameter.in_block in RESIDUAL else STD
    return torch.empty(shape).normal_(0.0, std, generator=generator)


def parameter_seed(seed: int, name: str) -> int:
    """A parameter's own seed, 63 bits."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
