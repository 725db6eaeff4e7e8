"""Memory by term on several ranks whose parameters and gradients are views of flat buffers."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from harness import run_ranks
from torch import Tensor

from shardwise.model.architecture import Architecture
from shardwise.train import memory
from shardwise.train.memory import Memory, MemoryTracker
from shardwise.train.model import Decoder, build, initialise
from shardwise.train.recompute import recompute

ARCHITECTURE = Architecture(
    name="small", num_layers=2, d_model=32, d_ff=48, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=64
)


def flattened(model: Decoder) -> tuple[Tensor, Tensor]:
    """Weights and gradients moved into a flat buffer each, with room for what a shard pads."""
    sizes = [parameter.numel() for parameter in model.parameters()]
    weights, gradients = torch.zeros(sum(sizes) + 7), torch.zeros(sum(sizes) + 7)
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    for parameter, start, size in zip(model.parameters(), starts, sizes, strict=True):
        weights[start : start + size] = parameter.detach().flatten()
        parameter.data = weights[start : start + size].view_as(parameter)
        parameter.grad = gradients[start : start + size].view_as(parameter)
    return weights, gradients


def step_of(policy: str, flat: bool) -> tuple[Memory, list[Any]]:
    model = build(ARCHITECTURE)
    initialise(model, 0)
    recompute(model, policy)
    buffers = flattened(model) if flat else None
    ids = torch.arange(32).view(2, 16)
    with MemoryTracker(ARCHITECTURE.vocab_size) as tracker:
        tracker.name(memory.PARAMETERS, model.parameters())
        loss = model(ids, ids, 2 * ids.numel()).loss
        tracker.forward_ended()
        loss.backward()
        if buffers is not None:
            dist.all_reduce(buffers[1])
        tracker.name(memory.GRADIENTS, (p.grad for p in model.parameters() if p.grad is not None))
    return tracker.memory(), [p.grad.tolist() for p in model.parameters() if p.grad is not None]


def test_flat_buffers_count_whole_and_once() -> None:
    for policy in ("none", "selective"):
        (alone, gradients), *ranks = step_of(policy, flat=False), *run_ranks(step_of, 2, policy, True)
        for found, reduced in ranks:
            for term in ("parameters", "gradients"):
                assert found.largest[term] == alone.largest[term] + 7 * 4
            for term in ("activations", "logits"):
                assert found.largest[term] == alone.largest[term]
            for one, other in zip(reduced, gradients, strict=True):
                torch.testing.assert_close(torch.tensor(one), 2 * torch.tensor(other))
