"""Work of one pass: what it computes, reads and sends on the busiest device of an instance, as numbers or columns of a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.values import Value

Column = Value  # a number, or a column of a table


@dataclass(frozen=True, slots=True)
class Routing:
    """Choice of experts by tokens: `skew`, the share of tokens whose experts count as chosen independently, and `imbalance`, the
    busiest device's tokens over the mean where experts are split by expert."""

    skew: float = 1.0
    imbalance: float = 1.0


UNIFORM_ROUTING = Routing()


@dataclass(frozen=True, slots=True)
class Products:
    """Products with one group of weights: `elements` of them are read, and `flops` computed."""

    elements: Column
    flops: Column

    def __add__(self, products: Products) -> Products:
        return Products(self.elements + products.elements, self.flops + products.flops)

    def scaled(self, reads: Column, rows: Column) -> Products:
        """Return the products of `rows` times as many tokens, which read `reads` of the weights."""
        return Products(self.elements * reads, self.flops * rows)


NO_PRODUCTS = Products(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class PassCollective:
    """Collectives of one kind in a pass: `count` of them over `degree` devices, of which each sends `elements` in all.

    `kind` is "all_reduce" or "exchange": all that moves tokens or logits between devices without adding them up on each.
    """

    kind: str
    degree: Column
    count: Column
    elements: Column


@dataclass(frozen=True, slots=True, kw_only=True)
class PassWork:
    """Work of one pass on the busiest device.

    `products` by group of weights: "attention", "mlp", "experts", "router", "vocabulary", "recurrence", "streams".
    `cache_elements` are read by decoding sequences, whose attention takes `decode_flops`; that of a chunk takes `prompt_flops`.
    `state_elements` of recurrences are read and written; `activation_elements` by kernels without weights. `kernels` counts
    launches by class.
    """

    products: Mapping[str, Products]
    cache_elements: Column
    decode_flops: Column
    prompt_flops: Column
    state_elements: Column
    activation_elements: Column
    kernels: Mapping[str, Column]
    collectives: tuple[PassCollective, ...]
