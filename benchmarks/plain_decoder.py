"""A Llama as one writes it in PyTorch: SDPA, RMSNorm, rotary embedding, SwiGLU. `gpu_check.py` trains it beside the engine."""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from shardwise.model import Architecture

ROTARY_BASE = 500_000.0  # of Llama 3; it changes no time


class Block(nn.Module):
    """Attention and a gated MLP, each behind a norm and added to the residual stream."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        d_model, d_ff, epsilon = architecture.d_model, architecture.d_ff, architecture.numerics.norm_epsilon
        self.head_dim = architecture.head_dim
        self.widths = [heads * self.head_dim for heads in (architecture.num_heads, *[architecture.num_kv_heads] * 2)]
        self.attention_norm, self.mlp_norm = (nn.RMSNorm(d_model, eps=epsilon) for _ in range(2))
        self.qkv = nn.Linear(d_model, sum(self.widths), bias=False)
        self.out = nn.Linear(self.widths[0], d_model, bias=False)
        self.gate_up = nn.Linear(d_model, 2 * d_ff, bias=False)
        self.down = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        flat = self.qkv(self.attention_norm(x)).split(self.widths, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in flat)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        down: Tensor = self.down(functional.silu(gate) * up)
        return x + down


class Decoder(nn.Module):
    """From token ids [B, T] to logits [B, T, V]."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.embedding = nn.Embedding(architecture.vocab_size, architecture.d_model)
        self.blocks = nn.ModuleList(Block(architecture) for _ in range(architecture.num_layers))
        self.norm = nn.RMSNorm(architecture.d_model, eps=architecture.numerics.norm_epsilon)
        self.head = nn.Linear(architecture.d_model, architecture.vocab_size, bias=False)
        if architecture.tied_embeddings:
            self.head.weight = self.embedding.weight
        for matrix in self.parameters():
            if matrix.dim() > 1:
                nn.init.normal_(matrix, std=0.02)

    def forward(self, ids: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits: Tensor = self.head(self.norm(x))
        return logits


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first half of each head [B, K, T, H] against the second."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def rotary_tables(seq_len: int, head_dim: int, device: str) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [T, H/2] in bf16."""
    half = head_dim // 2
    frequency = ROTARY_BASE ** (-torch.arange(half, device=device) / half)
    angles = torch.arange(seq_len, device=device)[:, None] * frequency
    return angles.cos().to(torch.bfloat16), angles.sin().to(torch.bfloat16)


def sum_of_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of the cross-entropies of targets [B, T], in float32."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
