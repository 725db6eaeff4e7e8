"""Shares of the square of scores that attention computes: half for causal attention, less with a window or selected keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shardwise.model.operations import COMPRESSED_SPAN
from shardwise.values import Value, maximum, minimum

Architecture = Any  # `model.architecture` imports this module


def mean_attended_share(model: Architecture, seq_len: int, last_of: Value) -> Value:
    """Return the share of the square of scores that is computed, averaged over layers: 0.5 for causal attention.

    With `last_of` = n only the last n-th of the queries counts: 1 - 1/2n of their rows for causal attention. Of a model with a
    pattern it is the mean over the kinds' layers, each of which is priced by its own (`unit_architecture`).
    """
    shares = attended_shares(model, seq_len, last_of)
    return sum((share * layers for share, layers in shares), start=0.0) / model.num_layers


def scan_shares(model: Architecture, seq_len: int, last_of: Value) -> dict[str, Value]:
    """Return the shares of (query, key) pairs with a score by the symbols of attention's FLOPs: for keys of tokens and for
    compressed keys, of which a query sees those before it, or as many as are selected."""
    shares = {"span": mean_attended_share(model, seq_len, last_of)}
    if model.compress_window:
        limit = model.index_topk * model.compress_window / seq_len if model.index_topk else 1.0
        shares[COMPRESSED_SPAN] = _attended_share(min(limit, 1.0), last_of)
    return shares


def attended_shares(model: Architecture, seq_len: int, last_of: Value) -> tuple[tuple[Value, int], ...]:
    """Return (share, layers) pairs: the keys that a query sees on average, over the sequence's length, and how many layers have
    it. Causal attention sees half of the square; a window of w, or w selected keys, are w T - w^2/2 of T^2, and chunks of w are
    w T / 2."""
    full = _attended_share(1.0, last_of)
    if model.layer_pattern:
        layers = model.layer_architectures
        return tuple(
            (layers[unit].mean_attended_share(seq_len, last_of=last_of), count)
            for unit, count in model.layer_counts.items()
        )
    selects_tokens = model.index_topk and not model.shared_keys
    most_keys = (_num_selected_keys(model) if selects_tokens else 0) or model.sliding_window
    if most_keys is None or most_keys >= seq_len:
        return ((full, model.num_layers),)
    limited = model.num_layers if selects_tokens else model.num_windowed_layers
    share = SHARES_BY_WINDOW["sliding" if selects_tokens else model.window_kind]
    return ((full, model.num_layers - limited), (share(most_keys / seq_len, last_of), limited))


def _num_selected_keys(model: Architecture) -> float:
    """Return the keys that a query sees of those that an indexer selects; 0 without one. Of the blocks that it selects, the
    query's own is half behind it on average."""
    return (model.index_topk - 0.5) * model.index_block if model.index_block else float(model.index_topk)


def _attended_share(window: float, last_of: Value) -> Value:
    """Return the mean over the last n-th of the rows of min(row, window), all as parts of the sequence."""
    start = 1.0 - 1.0 / last_of
    bend = maximum(start, window)
    return last_of * ((bend**2 - start**2) / 2 + (1.0 - bend) * window)


def _chunk_share(chunk: float, last_of: Value) -> Value:
    """Return the mean over the last n-th of the rows of those since the row's chunk began, all as parts of the sequence. Both are
    multiples of one another."""
    return chunk - minimum(chunk, 1.0 / last_of) / 2


SHARES_BY_WINDOW: Mapping[str, Callable[[float, Value], Value]] = {"sliding": _attended_share, "chunked": _chunk_share}
