"""Variants of context parallelism: how attention reads the parts of a sequence that other ranks along `cp` hold.

One table; derivation, legality, costs and searches read it.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.values import lookup


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextParallelVariant:
    """A variant of context parallelism.

    `structure`: the variant that the derivation knows. Which positions a rank holds makes no difference there, so both rings
    are one. `sequence_pieces`: pieces of the sequence that a rank takes: two, one from either end, so that causal work is
    even, or one. `is_ring`: keys and values are passed around instead of being gathered. `exchanges_heads`: attention swaps
    its sharding of the sequence for one of heads. `waits_for_last`: the rank with the last piece has the most scores, and the
    others wait for it.
    """

    structure: str
    sequence_pieces: int = 2
    is_ring: bool = False
    exchanges_heads: bool = False
    waits_for_last: bool = False


# The first is the default of a layout.
CP_VARIANTS: dict[str, ContextParallelVariant] = {
    "all_gather": ContextParallelVariant(structure="all_gather"),
    "zigzag": ContextParallelVariant(structure="ring", is_ring=True),
    "ulysses": ContextParallelVariant(structure="ulysses", exchanges_heads=True),
    "ring": ContextParallelVariant(structure="ring", is_ring=True, sequence_pieces=1, waits_for_last=True),
}


def cp_variant_names() -> tuple[str, ...]:
    """Return the names that a layout may use."""
    return tuple(CP_VARIANTS)


def get_cp_variant(name: str) -> ContextParallelVariant:
    """Return a variant by name. Raises `InputError` that lists the names."""
    return lookup(CP_VARIANTS, name, "cp_variant")
