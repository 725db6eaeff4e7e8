"""Several pods: slices of one torus each, joined by the data-centre network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.network.links import Cut, Link
from shardwise.network.torus import Torus
from shardwise.symbolic import Value, maximum, where


@dataclass(frozen=True, slots=True, kw_only=True)
class Pods:
    """`num_pods` slices of the same torus, the outermost level, joined host to host by the data-centre network (DCN).

    `bytes_per_s` is the egress of one chip to other pods: an equal part of its host's, in one direction, full-duplex.
    The latency of this network has no source: only bandwidth is priced between pods, a bound for small messages.
    Source: S0, sections 2 (DCN is host to host) and 4 (scaling between pods).
    """

    torus: Torus
    num_pods: int
    bytes_per_s: float

    @property
    def levels(self) -> tuple[int, ...]:
        return (*self.torus.levels, self.num_pods)

    def link(self, cuts: Sequence[Cut], *, one_way: bool = False) -> Link:
        """What a group gets that spans `cuts[i]` of axis i of the torus and `cuts[-1].size` pods.

        One level after the other: between pods every chip of the group gathers its own share (1/inside of the array) over
        its part of its host's egress, then the group inside each pod gathers the whole. What comes in over a host passes
        its memory before the torus has it, hence the sum and no pipeline (S0: over PCIe to the host, then over the DCN).
        """
        inner = self.torus.link(cuts[:-1], one_way=one_way)
        return Link(inner.seconds_per_byte + self.between(cuts), inner.latency_s, additive=False)

    def between(self, cuts: Sequence[Cut]) -> Value:
        """Seconds between pods per byte of an array that the group gathers: (p-1)/p of it, `inside` chips at once."""
        pods = cuts[-1].size
        return (pods - 1) / (pods * num_inside(cuts) * self.bytes_per_s)

    def hop(self, cuts: Sequence[Cut]) -> Link:
        """What a send to the next device of a group gets: the slower of a hop inside and one to the same chip of a pod."""
        return self._sent(self.torus.hop(cuts[:-1]), cuts)

    def permute(self, cuts: Sequence[Cut]) -> Link:
        """What a permute gets: each device sends over its own part of its host's egress, or over the torus."""
        return self._sent(self.torus.permute(cuts[:-1]), cuts)

    def _sent(self, inner: Link, cuts: Sequence[Cut]) -> Link:
        across = where(cuts[-1].size > 1, 1.0 / self.bytes_per_s, 0.0)
        return Link(maximum(inner.seconds_per_byte, across), inner.latency_s, additive=False)

    def axis_bytes_per_s(self) -> float:
        """Bandwidth of one wrapped axis inside a pod, both directions: the books' W."""
        return self.torus.axis_bytes_per_s()

    def neighbour_bytes_per_s(self) -> float:
        """The same: every neighbour inside a pod is one link away."""
        return self.torus.neighbour_bytes_per_s()


def num_inside(cuts: Sequence[Cut]) -> Value:
    """Devices of a group inside one pod."""
    inside: Value = 1
    for cut in cuts[:-1]:
        inside = inside * cut.size
    return inside
