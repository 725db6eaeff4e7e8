"""Bytes of a collective into and out of the switches of a level, with and without switches that reduce and multicast.

Of an array of V bytes over all devices of a group, seen at one unit of the level: n units below that hold parts of the group, M
such units of the level. Without reduction devices pass shards on in rings, inside a unit and between units, as plans are priced.
Switches that multicast take a shard once and give it to all; those that reduce take all summands and give one sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shardwise.hardware.network.links import COLLECTIVE_NAMES, CollectiveName, Cut
from shardwise.values import Payload, lookup, printed


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchTraffic(Payload):
    """Bytes of one collective at one unit of a level: from and to the units below, and to and from the level above."""

    from_below: float
    to_below: float
    to_above: float
    from_above: float

    @property
    @printed
    def bytes_in(self) -> float:
        """Bytes into the unit's switches."""
        return self.from_below + self.from_above

    @property
    @printed
    def bytes_out(self) -> float:
        """Bytes out of the unit's switches."""
        return self.to_below + self.to_above

    def reversed(self) -> SwitchTraffic:
        """Return the traffic of the opposite collective: what an AllGather sends up, its ReduceScatter sends down."""
        return SwitchTraffic(
            from_below=self.to_below, to_below=self.from_below, to_above=self.from_above, from_above=self.to_above
        )

    def __add__(self, added: SwitchTraffic) -> SwitchTraffic:
        return SwitchTraffic(
            from_below=self.from_below + added.from_below, to_below=self.to_below + added.to_below,
            to_above=self.to_above + added.to_above, from_above=self.from_above + added.from_above,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Unit:
    """Unit of a level as a group sees it: `size` units below of `inside` devices each, in one of `num_units` units."""

    num_bytes: float
    size: int
    inside: int
    num_units: int

    @property
    def is_alone(self) -> bool:
        return self.num_units == 1

    def all_gather(self, *, in_network: bool) -> SwitchTraffic:
        """Every unit below lacks all but its own V/(M·n), and the unit all but V/M.

        In rings as much is passed on as arrives. Switches that multicast take each shard once.
        """
        share = self.num_bytes / self.num_units
        to_below, from_above = self.size * self.num_bytes - share, self.num_bytes - share
        to_above = (0.0 if self.is_alone else share) if in_network else from_above
        from_below = share if in_network else to_below
        return SwitchTraffic(from_below=from_below, to_below=to_below, to_above=to_above, from_above=from_above)

    def reduce_scatter(self, *, in_network: bool) -> SwitchTraffic:
        return self.all_gather(in_network=in_network).reversed()

    def all_reduce(self, *, in_network: bool) -> SwitchTraffic:
        return self.reduce_scatter(in_network=in_network) + self.all_gather(in_network=in_network)

    def all_to_all(self, *, in_network: bool) -> SwitchTraffic:
        """Each pair of devices exchanges V/N²; nothing can be summed or multicast."""
        devices = self.size * self.inside * self.num_units
        pair = self.num_bytes / devices**2
        below = self.size * self.inside * (devices - self.inside) * pair
        above = self.size * self.inside * (devices - self.size * self.inside) * pair
        return SwitchTraffic(from_below=below, to_below=below, to_above=above, from_above=above)

    def broadcast(self, *, in_network: bool) -> SwitchTraffic:
        """The unit of the root: down a chain of units, or once into a switch that multicasts."""
        above = 0.0 if self.is_alone else self.num_bytes
        copies = self.num_bytes * (self.size - 1)
        from_below = self.num_bytes if in_network else copies + above
        return SwitchTraffic(from_below=from_below, to_below=copies, to_above=above, from_above=0.0)

    def send_recv(self, *, in_network: bool) -> SwitchTraffic:
        """The unit of the sender, whose receiver is as far away as the group is wide."""
        above = 0.0 if self.is_alone else self.num_bytes
        return SwitchTraffic(from_below=self.num_bytes, to_below=self.num_bytes - above, to_above=above, from_above=0.0)


def switch_traffic(
    operation: CollectiveName, num_bytes: float, cuts: Sequence[Cut], level: int, *, in_network: bool = False
) -> SwitchTraffic:
    """Return the bytes of a collective at one unit of a level, for the group of devices that spans `cuts[i]` of level i.

    `in_network`: the switches of the level and those above it sum and multicast. Raises `InputError` for an unknown collective.
    Source: Austin et al., How to Scale Your Model, chapter 12, quiz 4.

    >>> node = switch_traffic("all_reduce", 1e9, [Cut(8, 1)], 0, in_network=True)
    >>> node.bytes_in, node.bytes_out  # N·V
    (8000000000.0, 8000000000.0)
    """
    sizes = [int(cut.size) for cut in cuts]
    unit = _Unit(num_bytes, sizes[level], math.prod(sizes[:level]), math.prod(sizes[level + 1 :]))
    methods: Mapping[str, Callable[..., SwitchTraffic]] = {name: getattr(unit, name) for name in COLLECTIVE_NAMES}
    return lookup(methods, operation, "collective")(in_network=in_network)
