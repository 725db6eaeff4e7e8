"""Data on its way from where it rests to the unit that multiplies it: stages that overlap, or follow one another."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage: bytes (or FLOPs) over `num_links` links (or units) of a rate each."""

    name: str
    amount: float
    rate: float
    num_links: float = 1

    @property
    def seconds(self) -> float:
        return self.amount / (self.rate * self.num_links)


@dataclass(frozen=True, slots=True, kw_only=True)
class Staging:
    """Stages in order. Source: the book, "TPUs", question 6: a pipeline takes as long as its slowest piece."""

    stages: tuple[Stage, ...]

    @property
    def overlapped_s(self) -> float:
        """All stages at once, on chunks of the data."""
        return self.binding.seconds

    @property
    def sequential_s(self) -> float:
        """Each stage on all of the data before the next."""
        return sum(stage.seconds for stage in self.stages)

    @property
    def binding(self) -> Stage:
        """The slowest stage, the first of equal ones."""
        return max(self.stages, key=lambda stage: stage.seconds)
