"""Scales from the largest sizes (amax) of earlier steps, in NumPy: the reference for what the engine does on its tensors.

Letters: N tensors with a scale each, S steps of their history, the newest first.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardwise.floats.amax import Delayed

Array = NDArray[np.float32]


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
