"""Values of the symbols of units: sizes of dims, lengths, counts and degrees. Numbers for one layout, arrays for a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shardwise.layout import BATCH_AXES, EXPERT_AXES, get_cp_variant
from shardwise.model import BASE_LAYER, Architecture
from shardwise.price.stage_contents import NO_RECOMPUTE
from shardwise.step.collectives import NUM_ROUTERS, layer_counts
from shardwise.values import LocalDim, SymbolValues, Value


def unit_values(
    architecture: Architecture, seq_len: int, degrees: Mapping[str, Value], cp_variant: str = "all_gather",
    attended_tokens: int | None = None, *, unit: str = BASE_LAYER,
) -> SymbolValues:  # fmt: skip
    """Return the values of the symbols of a unit: dims of its kind of layer, the job's lengths, atomic degrees, sequences on one
    device.

    In a plain ring the rank with the last part of the sequence has the most scores, and the others wait for it.
    """
    layer = architecture.unit_architecture(unit)
    last = degrees["cp"] if get_cp_variant(cp_variant).waits_for_last else 1
    shares = layer.scan_shares(seq_len, last_of=last)
    if attended_tokens is not None and attended_tokens < seq_len:  # a block of scores for each document
        shares = {name: share * attended_tokens / seq_len for name, share in layer.scan_shares(attended_tokens).items()}
    counts = {NUM_ROUTERS: architecture.num_routers, **layer_counts(architecture)}
    values = SymbolValues({**layer.dims, "T": seq_len, **shares, **counts, **degrees})
    seqs = degrees["micro_batch_seqs"]
    values["B"] = values[LocalDim("B", BATCH_AXES)] = values[LocalDim("B", BATCH_AXES + EXPERT_AXES)] = seqs
    if architecture.num_experts:  # what one device's experts take in: the sequences of its whole ep group
        values[LocalDim("B", BATCH_AXES)] = seqs * degrees["ep"]
    return values


class UnitValues:
    """The values of the symbols of each unit of a model. Units with the base layer's sizes share one object, by whose identity
    prices are cached; each other kind of layer has an object of its own."""

    def __init__(self, architecture: Architecture, make: Callable[[str], SymbolValues]) -> None:
        """`make` returns the values of a unit."""
        self.base = make(BASE_LAYER)
        self._by_kind = {kind: make(kind) for kind in architecture.layer_kinds}

    def of(self, unit: str) -> SymbolValues:
        """Return the values of a unit, be it with recomputation or without."""
        return self._by_kind.get(unit.removeprefix(NO_RECOMPUTE), self.base) if self._by_kind else self.base
