"""Scales from the largest sizes (amax) of earlier steps, in NumPy: the reference for what the engine does on its tensors.

Letters: N tensors with a scale each, S steps of their history, the newest first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
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


def after_step(sizes: Array, history: Array, factors: Array, largest: Array, delayed: Delayed) -> tuple[Array, Array]:
    """The history [N, S] and the factors [N] of the next step, from those of a step and the `sizes` [N] that were seen in it;
    `largest` [N] are the largest numbers of the formats.

    A factor stays where nothing but zeros has been seen, and is at most the largest float32. A size that is not finite enters as
    0. Source: Transformer Engine, common/recipe/delayed_scaling.cu. Differs: there it enters, and keeps the factor as it is until
    it has left the history.

    >>> given = (np.array(one, np.float32) for one in ([7.0], [[14.0, 28.0]], [1.0], [448.0]))
    >>> history, factors = after_step(*given, Delayed(history=2))
    >>> history.tolist(), factors.tolist()
    ([[7.0, 14.0]], [32.0])
    """
    seen = np.where(np.isfinite(sizes), sizes, np.float32(0))
    history = np.concatenate([seen[:, None], history[:, :-1]], axis=1)
    amax = history.max(axis=1) if delayed.algorithm == "max" else seen
    with np.errstate(divide="ignore", over="ignore"):
        fresh = np.minimum(largest * np.float32(2.0**-delayed.margin) / amax, np.finfo(np.float32).max)
    return history, np.where(amax > 0, fresh, factors).astype(np.float32)
