"""Variants of context parallelism: how attention sees the parts of a sequence that other ranks along `cp` have.

One table; derivation, legality, costs and searches read it.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.values.errors import chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A variant of context parallelism.

    `structure`: the variant that the derivation knows; the positions of a rank make no difference to it, so both rings are
    one. `pieces` of the sequence that a rank takes: one from either end, so that causal work is even, or one. `ring`: keys and
    values are passed around instead of being gathered. `exchanges_heads` for the sequence at attention. `waits_for_last`: the
    rank with the last piece has the most scores, and the others wait for it.
    """

    structure: str
    pieces: int = 2
    ring: bool = False
    exchanges_heads: bool = False
    waits_for_last: bool = False


# The first is the default of a layout.
VARIANTS: dict[str, Variant] = {
    "all_gather": Variant(structure="all_gather"),
    "zigzag": Variant(structure="ring", ring=True),
    "ulysses": Variant(structure="ulysses", exchanges_heads=True),
    "ring": Variant(structure="ring", ring=True, pieces=1, waits_for_last=True),
}


def variant_names() -> tuple[str, ...]:
    """The names that a layout may use."""
    return tuple(VARIANTS)


def variant_of(name: str) -> Variant:
    """A variant by name. Raises `InputError` that lists the names."""
    return chosen(VARIANTS, name, "cp_variant")
