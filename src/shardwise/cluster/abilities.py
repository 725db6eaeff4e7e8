"""What a software stack supports, from `measured/stacks.toml`; the rules of `planning.abilities` apply it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """Layouts and jobs that a stack can run.

    `axes`: of tp, cp, pp and ep those that it has; `zero`: stages of ZeRO that it has beside plain replicas, `zero_with_pp` those
    that it has in a pipeline too. `zero_with_cp` and `zero_with_ep`: those with such an axis, over which some shard weights too;
    plain replicas (0) where they are among them. `schedules` of pipelines, `cp_variants`, policies of `recompute`, kinds of loss
    (`losses`), formats of `products` beside those of 16 and 32 bits, and what it can `offload`, are names of their tables.
    `uneven_stages`: a pipeline's stages may have numbers of layers of their own; `whole_experts`: experts may be whole where tp
    splits layers (`etp=1`). `source` says where that is written.
    """

    axes: tuple[str, ...]
    zero: tuple[int, ...]
    zero_with_pp: tuple[int, ...]
    zero_with_cp: tuple[int, ...]
    zero_with_ep: tuple[int, ...]
    schedules: tuple[str, ...]
    cp_variants: tuple[str, ...]
    recompute: tuple[str, ...]
    losses: tuple[str, ...]
    products: tuple[str, ...]
    offload: tuple[str, ...]
    sequence_parallel: bool
    async_tp: bool
    uneven_stages: bool
    whole_experts: bool
    source: str

    def items(self) -> list[tuple[str, Any]]:
        """Each ability by name, without the source."""
        return [(one.name, getattr(self, one.name)) for one in fields(self) if one.name != "source"]


def abilities_of(table: Mapping[str, Mapping[str, Any]], name: str) -> Abilities:
    """The abilities of a stack of the table: its own lines, and those of the stack that it is `as` for the rest.

    A table that does not say so has all its stages of ZeRO with any axis, and whole experts.
    """
    found: Any = {}
    at: str | None = name
    while at is not None:
        found = {**table[at].get("runs", {}), **found}
        at = table[at].get("as")
    every = sorted({0, *found["zero"]})
    found = {"zero_with_cp": every, "zero_with_ep": every, "whole_experts": True, **found}
    values: Any = {key: tuple(value) if isinstance(value, list) else value for key, value in found.items()}
    return Abilities(**values)


def any_of(several: Iterable[Abilities], source: str) -> Abilities:
    """What at least one of several stacks supports."""
    every = list(several)
    found: dict[str, Any] = {}
    for name, first in every[0].items():
        values = [getattr(one, name) for one in every]
        found[name] = any(values) if isinstance(first, bool) else tuple(dict.fromkeys(v for own in values for v in own))
    return Abilities(**found, source=source)
