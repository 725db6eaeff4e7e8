"""A torus: a grid of chips with a direct link to each neighbour."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from shardwise.errors import chosen
from shardwise.network.links import Cut, Link
from shardwise.network.twist import Distances, closed_groups, distances, shifted_by
from shardwise.symbolic import Value, maximum, where

WrapRule = Literal["multiple_of_4", "only_16", "always", "never"]
# Whether an axis of a size wraps on a slice of a shape.
WRAPS: Mapping[str, Callable[[tuple[int, ...], int], bool]] = {
    "multiple_of_4": lambda shape, size: all(other % 4 == 0 for other in shape),
    "only_16": lambda shape, size: size == 16,
    "always": lambda shape, size: True,
    "never": lambda shape, size: False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Torus:
    """A grid of chips with a link to each neighbour, per axis and per direction.

    `bytes_per_s` is one link in one direction. An axis wraps by the vendor's rule: v4 and v5p slices wrap on all axes
    when every axis is a multiple of 4; v5e and v6e axes wrap only at 16. Source: S0, section 2. "always" and "never" are
    for asking what wraparound is worth. `twisted` (`network/twist.py`): going around a short axis also shifts the long
    ones, so that an AllToAll over the whole slice loads all links alike; the short axes have no rings of their own.
    """

    shape: tuple[int, ...]
    bytes_per_s: float
    hop_latency_s: float
    wrap_rule: WrapRule
    twisted: bool = False

    @property
    def levels(self) -> tuple[int, ...]:
        return self.shape

    @property
    def wraps(self) -> tuple[bool, ...]:
        """Which axes are rings."""
        wraps = chosen(WRAPS, self.wrap_rule, "wrap_rule")
        return tuple(wraps(self.shape, size) for size in self.shape)

    def rings(self, cuts: Sequence[Cut]) -> tuple[Value, ...]:
        """On which axes a group goes all around: it spans the whole of an axis that wraps.

        Around a short axis of a twisted torus only together with the whole of the axes that it shifts.
        """
        found: list[Value] = []
        for axis, (size, wraps, cut) in enumerate(zip(self.shape, self.wraps, cuts, strict=True)):
            ring = (cut.size * cut.stride == size) & wraps
            for other in shifted_by(self.shape, axis) if self.twisted else ():
                ring = ring & (cuts[other].size == self.shape[other])
            found.append(ring)
        return tuple(found)

    def twists(self, cuts: Sequence[Cut]) -> Iterator[tuple[Value, Distances]]:
        """Whether a group is one of the twisted tori in this one, and the distances on it, for each of them."""
        for group in closed_groups(self.shape) if self.twisted else ():
            whole: Value = True
            for axis, (size, cut) in enumerate(zip(self.shape, cuts, strict=True)):
                whole = whole & (cut.size == (size if axis in group else 1))
            yield whole, distances(tuple(self.shape[axis] for axis in group))

    def link(self, cuts: Sequence[Cut], *, one_way: bool = False) -> Link:
        """What a group gets that spans `cuts[i]` of axis i.

        A group all around a wrapped axis is a ring: both directions, half the hops, unless it goes `one_way`. Neighbours on
        a part of an axis are a line: one way, N-1 hops. Devices `stride` apart share their links with the groups between
        them. Several axes gather at once, each its share of the array, so rates add (S0: "M axes give M times the
        bandwidth"), as far as the links of the device with the fewest (the corner, where axes are lines) take in the
        (N-1)/N of the array that it lacks.
        """
        rate: Value = 0.0
        intake: Value = 0.0
        hops: Value = 0
        num_devices: Value = 1
        for ring, cut in zip(self.rings(cuts), cuts, strict=True):
            steps = where(ring, cut.size - 1 if one_way else cut.size // 2, cut.size - 1)
            seconds = steps * cut.stride / (cut.size * self.bytes_per_s)
            rate = rate + where(cut.size > 1, 1.0 / maximum(seconds, 1e-30), 0.0)
            num_links = where(ring & (cut.size > 2), 1 if one_way else 2, 1)
            intake = intake + where(cut.size > 1, num_links * self.bytes_per_s / cut.stride, 0.0)
            hops = hops + steps * cut.stride
            num_devices = num_devices * cut.size
        for whole, found in () if one_way else self.twists(cuts):
            hops = where(whole, found.diameter, hops)
        gathered = where(rate > 0, 1.0 / maximum(rate, 1e-30), 0.0)
        taken_in = (1.0 - 1.0 / num_devices) / maximum(intake, 1e-30)
        return Link(maximum(gathered, taken_in), hops * self.hop_latency_s, additive=False)

    def hop(self, cuts: Sequence[Cut]) -> Link:
        """What a send to the next device of a group gets: one link, shared by the groups between them."""
        far: Value = 0
        for cut in cuts:
            far = maximum(far, where(cut.size > 1, cut.stride, 0))
        return Link(far / self.bytes_per_s, far * self.hop_latency_s, additive=False)

    def permute(self, cuts: Sequence[Cut]) -> Link:
        """What a permute gets in which each device sends to one device anywhere in the group.

        On an axis of n the busiest link carries, of an even mix of distances, n/8 devices' bytes on a ring and n/4 on a line,
        and at least one device's; on a twisted torus half of the average hops along an axis.
        """
        pace: Value = 0.0
        hops: Value = 0
        for ring, cut in zip(self.rings(cuts), cuts, strict=True):
            busiest = maximum(1.0, cut.size / where(ring, 8.0, 4.0)) * cut.stride
            pace = maximum(pace, where(cut.size > 1, busiest, 0.0))
            hops = hops + where(ring, cut.size // 2, cut.size - 1) * cut.stride
        for whole, found in self.twists(cuts):
            pace = where(whole, max(1.0, max(found.mean_hops) / 2), pace)
            hops = where(whole, found.diameter, hops)
        return Link(pace / self.bytes_per_s, hops * self.hop_latency_s, additive=False)

    def axis_bytes_per_s(self) -> float:
        """Bandwidth of one wrapped axis, both directions: the books' W."""
        return 2 * self.bytes_per_s

    def neighbour_bytes_per_s(self) -> float:
        """The same: every neighbour is one link away."""
        return self.axis_bytes_per_s()
