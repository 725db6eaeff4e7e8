"""Kernels of inference on the arrays of one device: attention over a cache, rows that join it, choices of slots and tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.model.operations import (
    AddVectorOnce,
    AppendToCache,
    CachedAttention,
    CachedConvolution,
    LatentAttention,
    Operation,
    OperationSharding,
    PickTokens,
    SelectSlots,
)
from shardwise.model.operations.cached_tokens import NUM_MASK_INPUTS
from shardwise.run.numpy.kernels import MASKED, add_sinks, expand_blocks, softmax_of_visible
from shardwise.sharding import Mesh

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class CachedTokensKernel:
    """One operation on cached tokens; `sizes` are those of dims."""

    operation: Operation
    placed: OperationSharding
    sizes: Mapping[str, int]

    def __call__(self, arrays: list[Array], token_part: int, mesh: Mesh) -> tuple[Array, ...]:
        """Return the results on the device that has the part `token_part` of the tokens."""
        match self.operation:
            case AppendToCache(num_caches=count):
                pairs = zip(arrays[:count], arrays[count:-1], strict=True)
                return tuple(append_rows(cache, rows, arrays[-1]) for cache, rows in pairs)
            case LatentAttention() | CachedAttention():
                return self._attention(self.operation, arrays)
            case SelectSlots() as operation:
                return (self._select(operation, arrays),)
            case CachedConvolution():
                return convolve_new_rows(*arrays)
            case PickTokens():
                x, tokens = arrays
                return (pick_tokens(x, tokens, token_part * x.shape[1]),)
            case AddVectorOnce():
                x, vector = arrays
                return (self._add_vector(x, vector, mesh),)
        raise TypeError(f"no kernel for {self.operation}")

    def _attention(self, operation: CachedAttention, arrays: list[Array]) -> tuple[Array, ...]:
        """Return attended values [B,T,K,G,U] and log-sum-exp [B,T,K,G]."""
        count = operation.num_queries + operation.num_cached
        operands, mask, extras = arrays[:count], arrays[count:][:NUM_MASK_INPUTS], arrays[count + NUM_MASK_INPUTS :]
        if isinstance(operation, LatentAttention):
            latent_q, rotary_q, latents, rotary_keys = operands
            scores = np.einsum("btkgc,bzc->bkgtz", latent_q, latents)
            scores = scores + np.einsum("btkgr,bzr->bkgtz", rotary_q, rotary_keys)
            scores = scores / math.sqrt(self.sizes[operation.scale_dim])
        else:
            q, keys, values = operands
            scores = np.einsum("btkgh,bzkh->bkgtz", q, keys) / math.sqrt(q.shape[-1])
        visible = visible_slots(*mask)[:, None, None]
        if operation.is_sparse:
            visible = visible & self._is_selected(operation, extras.pop(), scores.shape[-1])
        shares, lse = softmax_of_visible(np.where(visible, scores, MASKED))
        if isinstance(operation, LatentAttention):
            attended = np.einsum("bkgtz,bzc->btkgc", shares, latents)
        else:
            attended = np.einsum("bkgtz,bzku->btkgu", shares, values)
        part = attended, np.einsum("bkgt->btkg", lse)
        return add_sinks(part, *extras) if extras else part

    def _is_selected(self, operation: CachedAttention, selected: Array, num_slots: int) -> Array:
        """Return whether each slot is among the selected ones, [B,K or 1,1,T,Z]."""
        if operation.selected_block:
            selected = expand_blocks(selected, self.sizes[operation.selected_block])
        is_selected = (selected[..., None, :] == np.arange(num_slots)[:, None]).any(axis=-1)
        by_head = is_selected[:, None] if is_selected.ndim == 3 else np.einsum("btkz->bktz", is_selected)
        return np.array(by_head[:, :, None])

    def _select(self, operation: SelectSlots, arrays: list[Array]) -> Array:
        """Return the slots [B,T,s] with the largest scores, or the numbers of blocks [B,T,K,s]; -1 where there are fewer."""
        q, keys, *weights = arrays[:-NUM_MASK_INPUTS]
        visible, count = visible_slots(*arrays[-NUM_MASK_INPUTS:]), self.sizes[operation.num_selected]
        if not operation.block:
            scores = np.einsum("bta,btaz->btz", *weights, np.maximum(np.einsum("btay,bzy->btaz", q, keys), 0.0))
            return largest_indices(np.where(visible, scores, -np.inf), count)
        scores = np.where(visible[:, :, None], np.einsum("btky,bzy->btkz", q, keys), -np.inf)
        size = self.sizes[operation.block]
        padded = np.pad(scores, [*((0, 0),) * 3, (0, -scores.shape[-1] % size)], constant_values=-np.inf)
        by_block = padded.reshape(*padded.shape[:3], -1, size).max(axis=-1)
        last = (
            visible.shape[-1] - 1 - np.argmax(visible[..., ::-1], axis=-1)
        )  # a query's own slot is the last that it sees
        query_block = np.broadcast_to((last // size)[:, :, None, None], (*by_block.shape[:3], 1))
        np.put_along_axis(by_block, query_block, np.inf, axis=-1)
        return largest_indices(by_block, count)

    def _add_vector(self, x: Array, vector: Array, mesh: Mesh) -> Array:
        x_spec, vector_spec = self.placed.inputs
        missing = [i for i, dim in enumerate(x_spec.dims) if dim not in vector_spec.dims]
        return np.array(x + np.expand_dims(vector, missing) / mesh.size(x_spec.partial))


def visible_slots(
    positions: Array, sequences: Array, slot_positions: Array, slot_sequences: Array, window: Array, chunk: Array
) -> Array:
    """Return which slots each token sees [B,T,Z]: those of its sequence up to its own position, at most a window back, and in its
    own chunk of the sequence.

    >>> positions, sequence = np.arange(4)[None], np.zeros((1, 4))
    >>> visible_slots(positions, sequence, positions, sequence, np.array(2), np.array(3))[0].astype(int).tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1]]
    """
    distance = positions[..., None] - slot_positions[:, None]
    same_chunk = (positions // chunk)[..., None] == (slot_positions // chunk)[:, None]
    is_near = (distance >= 0) & (distance < window) & same_chunk
    return np.array((sequences[..., None] == slot_sequences[:, None]) & is_near)


def append_rows(cache: Array, rows: Array, slots: Array) -> Array:
    """Return a cache [B,Z,...] with new rows [B,T,...] in their slots [B,T]; rows with a slot below zero are dropped."""
    result = np.array(cache)
    sequence, token = np.nonzero(slots >= 0)
    result[sequence, slots[sequence, token]] = rows[sequence, token]
    return result


def largest_indices(scores: Array, count: int) -> Array:
    """Return the indices of the largest scores of the last dim, -1 in place of scores of minus infinity."""
    best = np.argsort(-scores, axis=-1, kind="stable")[..., :count]
    chosen = np.where(np.take_along_axis(scores, best, axis=-1) > -np.inf, best, -1)
    return np.pad(chosen, [*((0, 0),) * (scores.ndim - 1), (0, count - chosen.shape[-1])], constant_values=-1)


def convolve_new_rows(x: Array, weight: Array, rows: Array) -> tuple[Array, Array]:
    """Return the convolution of new rows [B,T,...] with the rows before them [B,w,...], and the last w rows of both."""
    joined = np.concatenate([rows, x], axis=1)
    result = sum(tap * joined[:, i : i + x.shape[1]] for i, tap in enumerate(weight))
    return np.array(result), joined[:, joined.shape[1] - rows.shape[1] :]


def pick_tokens(x: Array, tokens: Array, first: int) -> Array:
    """Return the rows [...] of `x` [B,T,...] of some tokens [B,j], zero for tokens of other devices; `first` is the number of
    this device's first."""
    local = (tokens - first).reshape(*tokens.shape, *(1,) * (x.ndim - 2))
    is_local = (local >= 0) & (local < x.shape[1])
    picked = np.take_along_axis(x, np.where(is_local, local, 0), axis=1)
    return np.array(picked * is_local)
