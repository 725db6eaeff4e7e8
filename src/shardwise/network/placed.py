"""The links that groups of a layout's axes get from a network: their cuts of its levels, joined."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwise.network.topology import Cut, Link, Topology
from shardwise.symbolic import Made, Value, maximum


@dataclass(slots=True)
class Links:
    """The link of every group of axes under one placement (or arrays of placements), worked out when first asked for.

    `sizes`: where several placements have the same sizes, for each placement the row of the arrays of sizes that it has.
    """

    topology: Topology
    cuts: Mapping[str, tuple[Cut, ...]]
    known: dict[tuple[str, ...], Link] = field(default_factory=dict)
    spans: dict[tuple[str, ...], list[Cut]] = field(default_factory=dict)
    sizes: Value | None = None
    seconds: Made = field(default_factory=Made, init=False, compare=False, repr=False)  # of what moves over them

    def along(self, value: Value) -> Value:
        """What depends on sizes alone, for each placement."""
        if self.sizes is None or not getattr(value, "ndim", 0):
            return value
        return value.take(self.sizes)

    def group(self, axes: tuple[str, ...]) -> Link:
        """Link of the group of devices that vary along `axes`."""
        if axes not in self.known:
            self.known[axes] = self.topology.link(self.joined(axes))
        return self.known[axes]

    def joined(self, axes: tuple[str, ...]) -> list[Cut]:
        """What the group of devices along `axes` spans of each level."""
        if axes not in self.spans:
            levels = range(len(self.topology.levels))
            self.spans[axes] = [_join([self.cuts[axis][i] for axis in axes]) for i in levels]
        return self.spans[axes]

    def hop(self, axes: tuple[str, ...]) -> Link:
        """Link between neighbours along `axes`, for a send and a receive."""
        key = ("hop", *axes)
        if key not in self.known:
            self.known[key] = self.topology.hop(self.joined(axes))
        return self.known[key]

    def permute(self, axes: tuple[str, ...]) -> Link:
        """Link of a permute within the group along `axes`: each device sends to one, wherever it is."""
        key = ("permute", *axes)
        if key not in self.known:
            self.known[key] = self.topology.permute(self.joined(axes))
        return self.known[key]


def _join(cuts: list[Cut]) -> Cut:
    """The cut of a group: sizes multiply; gaps left between its parts count as stride."""
    size: Value = 1
    span: Value = 1
    for cut in cuts:
        size = size * cut.size
        span = maximum(span, cut.size * cut.stride * (cut.size > 1))
    return Cut(size, maximum(span // size, 1))
