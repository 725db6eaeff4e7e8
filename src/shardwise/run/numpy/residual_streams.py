"""Weights of several residual streams in NumPy, with gradients: sigmoids, and matrices with rows and columns that sum to one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.model.operations import Operation, StreamWeightsGradient

Array = NDArray[Any]

# hc_eps and hc_sinkhorn_iters in the config.json of DeepSeek-V4
EPSILON, ITERATIONS = 1e-6, 20


def stream_weights_kernel(operation: Operation, arrays: Sequence[Array], num_streams: int) -> tuple[Array, ...]:
    """Return weights [B,T,f], [B,T,g] and [B,T,f,g] of logits [B,T,l], bias [l] and scales, or the gradients of these three."""
    if isinstance(operation, StreamWeightsGradient):
        return _gradients(arrays, num_streams)
    logits, bias, scale = arrays
    read, *rest = _scaled_parts(logits, bias, scale, num_streams)
    weights = [_sigmoid(read) + EPSILON]
    if rest:
        write, *mix = rest
        weights.append(2.0 * _sigmoid(write))
        weights += [_sinkhorn(_as_matrix(logits, num_streams))[-1] for logits in mix]
    return tuple(weights)


def _sigmoid(x: Array) -> Array:
    return np.array(1.0 / (1.0 + np.exp(-x)))


def _as_matrix(x: Array, size: int) -> Array:
    return x.reshape(*x.shape[:-1], size, size)


def _split(x: Array, num_streams: int) -> list[Array]:
    """Return the parts of logits: of reading, writing and mixing, or of the first of these alone."""
    ends = [end for end in (num_streams, 2 * num_streams) if end < x.shape[-1]]
    return np.split(x, ends, axis=-1)


def _scaled_parts(logits: Array, bias: Array, scale: Array, num_streams: int) -> list[Array]:
    parts = zip(_split(logits, num_streams), _split(bias, num_streams), scale, strict=True)
    return [part * factor + offset for part, offset, factor in parts]


def _sinkhorn(logits: Array) -> list[Array]:
    """Return the softmax of matrices, and these after each division by the sums of columns and of rows in turn."""
    exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
    steps = [exponentials / exponentials.sum(axis=-1, keepdims=True) + EPSILON]
    for axis in _axes():
        steps.append(steps[-1] / (steps[-1].sum(axis=axis, keepdims=True) + EPSILON))
    return steps


def _axes() -> list[int]:
    """Return the axes that are summed, one after the other: columns first and last."""
    return [-2, *(axis for _ in range(ITERATIONS - 1) for axis in (-1, -2))]


def _sinkhorn_gradient(steps: Sequence[Array], dmix: Array) -> Array:
    for before, axis in zip(reversed(steps[:-1]), reversed(_axes()), strict=True):
        total = before.sum(axis=axis, keepdims=True) + EPSILON
        dmix = dmix / total - (dmix * before).sum(axis=axis, keepdims=True) / total**2
    shares = steps[0] - EPSILON
    return np.array(shares * (dmix - (dmix * shares).sum(axis=-1, keepdims=True)))


def _gradients(arrays: Sequence[Array], num_streams: int) -> tuple[Array, ...]:
    logits, bias, scale, dread, *rest = arrays
    read, *rest_logits = _scaled_parts(logits, bias, scale, num_streams)
    parts = [dread * _sigmoid(read) * _sigmoid(-read)]
    if rest_logits:
        (write, *mix), (dwrite, *dmix) = rest_logits, rest
        parts.append(2.0 * dwrite * _sigmoid(write) * _sigmoid(-write))
        for logits_of_mix, dmatrix in zip(mix, dmix, strict=True):
            gradient = _sinkhorn_gradient(_sinkhorn(_as_matrix(logits_of_mix, num_streams)), dmatrix)
            parts.append(gradient.reshape(logits_of_mix.shape))
    dlogits = np.concatenate([part * factor for part, factor in zip(parts, scale, strict=True)], axis=-1)
    tokens = tuple(range(logits.ndim - 1))
    dscale = [np.sum(part * logit) for part, logit in zip(parts, _split(logits, num_streams), strict=True)]
    return dlogits, np.concatenate(parts, axis=-1).sum(axis=tokens), np.array(dscale)
