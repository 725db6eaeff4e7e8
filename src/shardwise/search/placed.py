"""The placements worth pricing for each factorisation: those that no other placement beats on every link."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwise.layout.family import EXPERT, TP, ZERO
from shardwise.layout.placement import Placement, cut_levels, placements
from shardwise.network.placed import Links
from shardwise.network.topology import Cut, Topology
from shardwise.symbolic import Value

Ints = NDArray[np.int64]
# Groups whose links decide between placements: those that a derivation's collectives run over.
GROUPS = (TP, ("cp",), ZERO, ("dp",))
EXPERT_GROUPS = (EXPERT, TP + EXPERT, ("fsdp", *EXPERT, "cp"))


@dataclass(frozen=True, slots=True)
class Placed:
    """One row for each factorisation and placement worth pricing: which they are, and the cuts of every axis."""

    placements: tuple[Placement, ...]
    factorisation: Ints
    placement: Ints
    cuts: Mapping[str, tuple[Cut, ...]]
    first: Ints  # for each factorisation, its first row here
    count: Ints  # and how many rows it has

    def links(self, topology: Topology, rows: Ints) -> Links:
        """Links of some of the rows, as arrays."""
        cuts = {
            a: tuple(Cut(_at(c.size, rows), _at(c.stride, rows)) for c in levels) for a, levels in self.cuts.items()
        }
        return Links(topology, cuts)


def _at(value: Value, rows: Ints) -> Value:
    return value[rows] if isinstance(value, np.ndarray) and value.ndim else value


def place_all(topology: Topology, degrees: Mapping[str, Ints]) -> Placed:
    """Cut every factorisation by every placement and keep the best, one of each kind."""
    options = placements(topology)
    count = len(degrees["pp"])
    cuts = [cut_levels(topology, option, degrees) for option in options]
    prices = np.stack([_prices(topology, cut, count) for cut in cuts])
    keep = _undominated(prices)
    factorisation, placement = np.nonzero(keep.T)
    num_rows = np.bincount(factorisation, minlength=count)
    first = np.concatenate([[0], np.cumsum(num_rows)[:-1]])
    chosen = {
        axis: tuple(
            _choose([cut[axis][i] for cut in cuts], placement, factorisation, count)
            for i in range(len(topology.levels))
        )
        for axis in cuts[0]
    }
    return Placed(options, factorisation, placement, chosen, first, num_rows)


def _choose(cuts: list[Cut], placement: Ints, factorisation: Ints, count: int) -> Cut:
    sizes = np.stack([np.broadcast_to(cut.size, count) for cut in cuts])
    strides = np.stack([np.broadcast_to(cut.stride, count) for cut in cuts])
    return Cut(sizes[placement, factorisation], strides[placement, factorisation])


def _prices(topology: Topology, cuts: Mapping[str, tuple[Cut, ...]], count: int) -> NDArray[np.float64]:
    """The quantities that decide: seconds per byte and latency of each group, and of a hop along pp. Shape [count, 2 (groups +
    1)]."""
    links = Links(topology, cuts)
    borrowed = any(np.any(np.asarray(cut.size) > 1) for cut in cuts["ep"])
    found = [links.group(group) for group in (*GROUPS, *(EXPERT_GROUPS if borrowed else ()))] + [links.hop(("pp",))]
    columns = [np.broadcast_to(v, count) for link in found for v in (link.seconds_per_byte, link.latency_s)]
    return np.stack(columns, axis=1)


def _undominated(prices: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which options [option, row] no other option equals or beats on all prices; of equals the first stays."""
    num_options = len(prices)
    keep = np.ones(prices.shape[:2], dtype=bool)
    for worse in range(num_options):
        for better in range(num_options):
            if better == worse:
                continue
            beaten = np.all(prices[better] <= prices[worse], axis=1)
            if better > worse:
                beaten &= np.any(prices[better] < prices[worse], axis=1)
            keep[worse] &= ~(beaten & keep[better])
    return keep
