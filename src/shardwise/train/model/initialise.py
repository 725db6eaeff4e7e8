"""Initial values: each parameter's own, whatever else is made, in what order, and where."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from shardwise.train.model.decoder import Decoder
from shardwise.train.model.weights import Weight, parameter_weights

STD = 0.02  # of every matrix: Radford et al. 2018 (GPT), section 4.1; kept by GPT-2, GPT-3, OPT and Megatron-LM
# Products that are added to the residual stream; their values shrink with the number of such sums (Radford et al. 2019,
# section 2.3): two a layer.
RESIDUAL = ("wo", "w_down", "experts_down", "shared_down")


@torch.no_grad()
def initialise(model: Decoder, seed: int, device: torch.device | str = "cpu") -> None:
    """Give every parameter its initial value on `device`; a model on the meta device gets memory first.

    Matrices and sinks are normal, norms one, biases and what leaves an adapter zero. The same seed gives the same values in any
    dtype, but for rounding.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        model.to_empty(device=device)
    weights = parameter_weights(model)
    for name, parameter in model.named_parameters():
        parameter.copy_(initial_value(model, name, weights[name], tuple(parameter.shape), seed))
    for buffer in model.buffers():
        buffer.zero_()


def initial_value(model: Decoder, name: str, weight: Weight, shape: tuple[int, ...], seed: int) -> Tensor:
    """A parameter's initial value, whole, in float32 on the CPU."""
    if weight.name.endswith((".bias", ".lora_b")):  # an adapter begins as nothing: Hu et al. 2021, section 4.1
        return torch.zeros(shape)
    if weight.name.endswith("norm.weight"):
        return torch.ones(shape) - model.numerics.norm_offset
    generator = torch.Generator().manual_seed(parameter_seed(seed, name))
    std = STD / math.sqrt(2 * model.architecture.num_layers) if weight.name in RESIDUAL else STD
    return torch.empty(shape).normal_(0.0, std, generator=generator)


def parameter_seed(seed: int, name: str) -> int:
    """A parameter's own seed, 63 bits."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
