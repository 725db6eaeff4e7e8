"""Work of one pass of an instance: what it computes, reads and sends, as numbers or as columns of a table of configurations.

A pass has `decode_sequences` that each add `tokens_per_sequence` tokens (one, and those drafted), and `prompt_tokens` of a
chunk of inputs, all for one copy of attention. Elements and FLOPs are those of the device with most of them, over all layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

Column = NDArray[Any] | float


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTokens:
    """Tokens of one pass of one copy of attention; columns, or numbers that all rows share.

    `decode_context` is how many cached tokens a decoding sequence has, and `prompt_context` how many keys a token of the chunk
    attends to on average.
    """

    decode_sequences: Column = 0.0
    tokens_per_sequence: Column = 1.0
    decode_context: Column = 0.0
    prompt_tokens: Column = 0.0
    prompt_context: Column = 0.0

    @property
    def new_tokens(self) -> Column:
        """Tokens that go through the layers."""
        return self.decode_sequences * self.tokens_per_sequence + self.prompt_tokens


@dataclass(frozen=True, slots=True)
class Routing:
    """How tokens choose experts: `skew`, the share of tokens whose experts count as chosen independently, and `imbalance`, the
    busiest device's tokens over the mean where experts are split by expert."""

    skew: float = 1.0
    imbalance: float = 1.0


UNIFORM_ROUTING = Routing()


@dataclass(frozen=True, slots=True)
class Products:
    """Products with one group of weights: `elements` of them are read, and `flops` computed."""

    elements: Column
    flops: Column


@dataclass(frozen=True, slots=True)
class PassCollective:
    """A collective that a pass makes `count` times over `degree` devices; each sends `elements` of 16 bits in all of a pass,
    ring's factor included. `kind` is "all_reduce" or "exchange" (tokens between copies of attention and experts)."""

    kind: str
    degree: Column
    count: Column
    elements: Column


@dataclass(frozen=True, slots=True, kw_only=True)
class PassWork:
    """Work of one pass on the busiest device.

    `products` by group of weights: "attention", "mlp", "experts", "router", "vocabulary", "recurrence". `cache_elements` are read
    by decoding sequences, whose attention takes `decode_flops`; the chunk's takes `prompt_flops`. `state_elements` of recurrences
    are read and written. `kernels` counts launches by class of kernel.
    """

    products: Mapping[str, Products]
    cache_elements: Column
    decode_flops: Column
    prompt_flops: Column
    state_elements: Column
    kernels: Mapping[str, Column]
    collectives: tuple[PassCollective, ...] = field(default=())
