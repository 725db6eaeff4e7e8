"""The engine's initial values in the plain decoder: what is judged begins with the same weights."""

from __future__ import annotations

import torch

from plain.decoder import Decoder
from shardwise.run.engine.model_builder import initial_weights


@torch.no_grad()
def initialise(model: Decoder, seed: int, device: torch.device | str = "cpu") -> None:
    """Give every parameter its initial value on `device`; a model on the meta device gets memory first."""
    if any(parameter.is_meta for parameter in model.parameters()):
        model.to_empty(device=device)
    values = initial_weights(model.architecture, seed).tensors
    for name, parameter in model.named_parameters():
        parameter.copy_(values[name])
    for buffer in model.buffers():
        buffer.zero_()
