"""The symbols of a unit's expressions in numbers, or in arrays: dims, lengths, degrees, and sequences on one device."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.layout.context import variant_of
from shardwise.layout.family import BATCH, EXPERT
from shardwise.lowering.amaxes import layer_counts
from shardwise.lowering.control import NUM_ROUTERS
from shardwise.model.architecture import Architecture
from shardwise.symbolic import Local, Value, Values


def unit_values(
    architecture: Architecture, seq_len: int, degrees: Mapping[str, Value], cp_variant: str = "all_gather",
    attended_tokens: int | None = None,
) -> Values:  # fmt: skip
    """The symbols' values: dims of the model, the job's lengths, atomic degrees, sequences on one device.

    In a plain ring the rank with the last piece of the sequence has the most scores, and the others wait for it.
    """
    last = degrees["cp"] if variant_of(cp_variant).waits_for_last else 1
    span = architecture.average_span(seq_len, last_of=last)
    if attended_tokens is not None and attended_tokens < seq_len:  # a block of scores for each document
        span = architecture.average_span(attended_tokens) * attended_tokens / seq_len
    counts = {NUM_ROUTERS: architecture.num_routers, **layer_counts(architecture)}
    values = Values({**architecture.dims, "T": seq_len, "span": span, **counts, **degrees})
    values["B"] = values[Local("B", BATCH)] = values[Local("B", BATCH + EXPERT)] = degrees["micro_batch_seqs"]
    if architecture.num_experts:  # what one device's experts take in: the sequences of its whole ep group
        values[Local("B", BATCH)] = degrees["micro_batch_seqs"] * degrees["ep"]
    return values
