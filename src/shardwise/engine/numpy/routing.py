"""What a router makes of its logits, in NumPy: the experts of each token, their gates, and the way back.

Arrays are dense over the experts, [B, T, E], with zero for those that were not chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.model.numerics import DEFAULT, SOFTMAX, Gating, Numerics

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Router:
    """How experts are scored and chosen (`gating`), and whether the gates of a token are divided by their sum."""

    gating: Gating = DEFAULT.gating
    normalised: bool = DEFAULT.normalised_gates

    @classmethod
    def of(cls, numerics: Numerics) -> Router:
        """A model's."""
        return cls(numerics.gating, numerics.normalised_gates)

    def route(self, logits: Array, num_chosen: int) -> tuple[Array, Array]:
        """Gates [B, T, E], zero for experts that a token does not take, and the scores of all, which the way back reads.

        >>> gates, scores = Router(Gating(groups=2, chosen_groups=1)).route(np.log([[[4.0, 1.0, 3.0, 2.0]]]), 2)
        >>> gates.round(6).tolist(), scores.round(6).tolist()
        ([[[0.8, 0.2, 0.0, 0.0]]], [[[0.4, 0.1, 0.3, 0.2]]])
        """
        scores = _softmax(logits) if self.gating.scores == SOFTMAX else 1.0 / (1.0 + np.exp(-logits))
        chosen = _largest(np.where(self._allowed(scores), scores, -np.inf), num_chosen)
        gates = np.where(chosen, scores, 0.0)
        return self.gating.scale * (gates / gates.sum(axis=-1, keepdims=True) if self.normalised else gates), scores

    def _allowed(self, scores: Array) -> Array:
        """Which experts are of a group that a token may take from."""
        gating = self.gating
        grouped = scores.reshape(*scores.shape[:-1], gating.groups, -1)
        best = np.sort(grouped, axis=-1)[..., -gating.votes :].sum(axis=-1)
        allowed: Array = np.repeat(_largest(best, gating.chosen_groups), grouped.shape[-1], axis=-1)
        return allowed

    def gradient(self, dgates: Array, gates: Array, scores: Array) -> Array:
        """The gradient of the logits; experts that were not chosen get a part of it through a softmax alone."""
        dchosen = dgates * self.gating.scale
        if self.normalised:
            mean = (dgates * gates).sum(axis=-1, keepdims=True)
            dchosen = (dchosen - mean) / np.where(gates > 0, scores, 0.0).sum(axis=-1, keepdims=True)
        dscores = np.where(gates > 0, dchosen, 0.0)
        if self.gating.scores == SOFTMAX:
            return np.array(scores * (dscores - (dscores * scores).sum(axis=-1, keepdims=True)))
        return np.array(scores * (1.0 - scores) * dscores)


ROUTER = Router()  # of a model that says nothing else


def _softmax(logits: Array) -> Array:
    grown = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.array(grown / grown.sum(axis=-1, keepdims=True))


def _largest(values: Array, count: int) -> Array:
    """Which of the last dim are the largest, as many as asked for."""
    found = np.zeros(values.shape, dtype=bool)
    np.put_along_axis(found, np.argsort(-values, axis=-1, kind="stable")[..., :count], True, axis=-1)
    return found
