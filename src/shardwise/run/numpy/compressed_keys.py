"""Compressed keys, and attention of all heads to one head of keys, in NumPy with gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwise.model.operations import (
    CompressKeys,
    CompressKeysGradient,
    FirstOfWindow,
    LastWindow,
    LastWindowGradient,
    Operation,
    SharedKeyScan,
    SharedKeyScanGradient,
)
from shardwise.run.numpy.kernels import MASKED, add_sinks

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class CompressionKernel:
    """An operation of compressed keys on one device: `window` tokens are one key, `segment` is the number of the device's segment
    of the sequence (None: it is in one part)."""

    operation: Operation
    window: int
    segment: int | None

    def __call__(self, arrays: Sequence[Array]) -> tuple[Array, ...]:
        """Return the results."""
        match self.operation:
            case FirstOfWindow():
                (positions,) = arrays
                return (np.array(self.whole_windows(positions[None])[0, :, 0]),)
            case LastWindow():
                last = np.stack([array[:, array.shape[1] - self.window :] for array in arrays], axis=1)
                return (np.array(last[:, None][:, : 0 if self.segment is None else 1]),)
            case CompressKeys():
                slots = self.slots(arrays)
                return ((slots.weights() * slots.tokens).sum(axis=2),)
            case LastWindowGradient():
                return (self.gradient_of_window_before(arrays),)
            case CompressKeysGradient():
                return self.gradients(arrays)
            case SharedKeyScan() as scan:
                return self.attend(scan, arrays)
            case SharedKeyScanGradient() as gradient:
                return self.attention_gradients(gradient, arrays)
        raise TypeError(f"no kernel for {self.operation}")

    def whole_windows(self, array: Array) -> Array:
        """Return rows [B, T, ...] as windows [B, T/m, m, ...], without those that fill none."""
        count = array.shape[1] // self.window
        return array[:, : count * self.window].reshape(len(array), count, self.window, *array.shape[2:])

    def rows(self, windows: Array, like: Array) -> Array:
        """Return windows as rows [B, T, ...], with zeros for rows that fill none."""
        rows = windows.reshape(len(windows), -1, *windows.shape[3:])
        return np.pad(rows, [(0, 0), (0, like.shape[1] - rows.shape[1]), *((0, 0),) * (like.ndim - 2)])

    def slots(self, arrays: Sequence[Array]) -> WindowSlots:
        """Return tokens and logits that each compressed key is made of [B, T/m, slots, H], those of the window before first."""
        tokens, logits, bias, *before = arrays[:7]
        current = WindowSlots(self.whole_windows(tokens), self.whole_windows(logits) + bias)
        if len(before) < 4:
            return current
        earlier_tokens, earlier_logits, earlier_bias, edge = before
        first = np.zeros((len(tokens), 2, 1, self.window, tokens.shape[-1]))
        first[:, 1] = -np.inf
        if self.segment:
            first = edge[:, self.segment - 1][:, :, None]
        shifted = [
            np.concatenate([first[:, i], self.whole_windows(array)[:, :-1]], axis=1)
            for i, array in enumerate((earlier_tokens, earlier_logits))
        ]
        earlier = shifted[0], shifted[1] + earlier_bias
        return WindowSlots(*(np.concatenate(pair, axis=2) for pair in zip(earlier, current, strict=True)))

    def gradient_of_window_before(self, arrays: Sequence[Array]) -> Array:
        """Return the gradient of the last window of all segments [B, segments, 2, m, H], zero but for the segment before."""
        *inputs, dy = arrays
        gradient = np.zeros_like(inputs[6])
        if self.segment:
            parts = self.slots(inputs).gradients(dy)
            gradient[:, self.segment - 1] = np.stack([part[:, 0, : self.window] for part in parts], axis=1)
        return gradient

    def gradients(self, arrays: Sequence[Array]) -> tuple[Array, ...]:
        """Return the gradients of tokens, logits and bias of the windows, and of those before where windows overlap."""
        *inputs, dy = arrays
        dtokens, dlogits = self.slots(inputs).gradients(dy)
        current = [part[:, :, part.shape[2] - self.window :] for part in (dtokens, dlogits)]
        results = [*(self.rows(part, inputs[0]) for part in current), current[1].sum(axis=(0, 1))]
        if len(inputs) == 3:
            return tuple(results)
        edge_gradient = inputs[7]
        earlier = [part[:, :, : self.window] for part in (dtokens, dlogits)]
        last = [
            edge_gradient[:, :, i] if edge_gradient.shape[1] else np.zeros_like(earlier[0][:, :1]) for i in range(2)
        ]
        shifted = [np.concatenate([part[:, 1:], end], axis=1) for part, end in zip(earlier, last, strict=True)]
        return (*results, *(self.rows(part, inputs[0]) for part in shifted), earlier[1].sum(axis=(0, 1)))

    def attend(self, scan: SharedKeyScan, arrays: Sequence[Array]) -> tuple[Array, ...]:
        operands = self.operands(arrays, scan.compressed, is_sparse=scan.is_sparse)
        scores = operands.scores()
        largest = scores.max(axis=-1, keepdims=True)
        weights = np.where(scores > MASKED, np.exp(scores - largest), 0.0)
        total = weights.sum(axis=-1)
        out = np.einsum("bkgts,bsh->btkgh", weights / total[..., None], operands.keys)
        part = out, np.einsum("bkgt->btkg", largest[..., 0] + np.log(total))
        return add_sinks(part, arrays[2 + 2 * scan.num_keys]) if scan.has_sinks else part

    def attention_gradients(self, gradient: SharedKeyScanGradient, arrays: Sequence[Array]) -> tuple[Array, ...]:
        operands = self.operands(arrays, gradient.compressed, is_sparse=gradient.is_sparse)
        first = 4 + 2 * gradient.compressed
        out, lse, dy = arrays[first : first + 3]
        weights = np.exp(operands.scores() - np.einsum("btkg->bkgt", lse)[..., None])
        dweights = np.einsum("btkgh,bsh->bkgts", dy, operands.keys)
        inner = np.einsum("btkgh,btkgh->bkgt", dy, out)[..., None]
        dscores = weights * (dweights - inner) / math.sqrt(operands.q.shape[-1])
        dkeys = np.einsum("bkgts,btkgh->bsh", dscores, operands.q) + np.einsum("bkgts,btkgh->bsh", weights, dy)
        dq = np.einsum("bkgts,bsh->btkgh", dscores, operands.keys)
        parts = np.split(dkeys, [arrays[1].shape[1]], axis=1)
        return (dq, *parts[: 1 + gradient.compressed])

    def operands(self, arrays: Sequence[Array], compressed: bool, *, is_sparse: bool) -> SharedKeyOperands:
        """Return queries, all keys, and which of them each query sees [B or 1, T, S]."""
        if not compressed:
            q, keys, queries, positions = arrays[:4]
            return SharedKeyOperands(q, keys, (queries[:, None] >= positions)[None])
        q, keys, entries, queries, positions, first = arrays[:6]
        sees_entry = (queries[:, None] >= first + self.window - 1)[None]
        if is_sparse:
            sees_entry = sees_entry & (arrays[-1][..., None, :] == first[:, None]).any(axis=-1)
        sees_token = np.broadcast_to(queries[:, None] >= positions, (len(sees_entry), len(queries), len(positions)))
        return SharedKeyOperands(
            q, np.concatenate([keys, entries], axis=1), np.concatenate([sees_token, sees_entry], axis=-1)
        )


class WindowSlots(NamedTuple):
    """Tokens and logits that compressed keys are made of [B, T/m, slots, H]."""

    tokens: Array
    logits: Array

    def weights(self) -> Array:
        """Return the softmax of the logits over the slots."""
        exponentials = np.exp(self.logits - self.logits.max(axis=2, keepdims=True))
        return np.array(exponentials / exponentials.sum(axis=2, keepdims=True))

    def gradients(self, dy: Array) -> tuple[Array, Array]:
        """Return the gradients of tokens and logits from that of the keys [B, T/m, H]."""
        weights = self.weights()
        dweights = self.tokens * dy[:, :, None]
        mean = (weights * dweights).sum(axis=2, keepdims=True)
        return weights * dy[:, :, None], weights * (dweights - mean)


class SharedKeyOperands(NamedTuple):
    """Queries [B,T,K,G,H], keys [B,S,H] of tokens and windows, and which keys each query sees [B or 1, T, S]."""

    q: Array
    keys: Array
    visible: Array

    def scores(self) -> Array:
        """Return scores [B,K,G,T,S]."""
        scores = np.einsum("btkgh,bsh->bkgts", self.q, self.keys) / math.sqrt(self.q.shape[-1])
        return np.where(self.visible[:, None, None], scores, MASKED)
