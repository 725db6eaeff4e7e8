"""What a search finds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.layout.layout import Layout


class Found:
    """A layout that the search kept, with its time and its memory; `made` is the layout, or makes it on first use."""

    __slots__ = ("_made", "memory_bytes", "step_time_s")

    def __init__(self, made: Layout | Callable[[], Layout], step_time_s: float, memory_bytes: float) -> None:
        self._made, self.step_time_s, self.memory_bytes = made, step_time_s, memory_bytes

    @property
    def layout(self) -> Layout:
        """The layout."""
        if not isinstance(self._made, Layout):
            self._made = self._made()
        return self._made

    def _key(self) -> tuple[Layout, float, float]:
        return self.layout, self.step_time_s, self.memory_bytes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Found) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        return f"Found({self.layout!r}, {self.step_time_s!r}, {self.memory_bytes!r})"


@dataclass(frozen=True, slots=True)
class SearchResult:
    """`best`: fitting layouts by step time; `pareto`: by memory; `leanest`: the least memory of all, fitting
    or not; `by_factorisation`: the fastest fitting layout of each way to factor the devices over the axes, `even` the same of
    those that share the batch out evenly."""

    best: tuple[Found, ...]
    pareto: tuple[Found, ...]
    leanest: Found
    by_factorisation: tuple[Found, ...]
    even: tuple[Found, ...]
    sampled: tuple[Found, ...]
    space: Mapping[str, list[Any]]
    num_candidates: int
    num_layouts: int
    num_fitting: int
    num_illegal_by_rule: Mapping[str, int]
    cpu_seconds: float
