"""From which of earlier steps' largest sizes (amax) scales follow, as fields of a run's recipe: `floats.delayed` has the rule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

AmaxAlgorithm = Literal["max", "most_recent"]
AMAX_ALGORITHMS: tuple[AmaxAlgorithm, ...] = get_args(AmaxAlgorithm)
MOST_HISTORY, MOST_MARGIN = 65_536, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Delayed:
    """How scales follow from earlier steps: from the largest size in the last `history` of them, or with `most_recent` in the
    last one; what has that size is brought to the format's largest number over 2^`margin`.

    Source: NVIDIA, Transformer Engine, common/recipe: DelayedScaling, for the fields and their default values.
    """

    history: int = 1024
    algorithm: AmaxAlgorithm = "max"
    margin: int = 0

    def problems(self) -> Iterator[str]:
        """What is wrong with a value, each with what is required, in the words of a run's recipe."""
        if not 1 <= self.history <= MOST_HISTORY:
            yield f"amax_history is {self.history}; a number of steps from 1 to {MOST_HISTORY:,}"
        if self.algorithm not in AMAX_ALGORITHMS:
            yield f"amax_algorithm is {self.algorithm!r}; one of {', '.join(AMAX_ALGORITHMS)}"
        if not 0 <= self.margin <= MOST_MARGIN:
            yield f"amax_margin is {self.margin}; a power of two from 0 to {MOST_MARGIN}"
