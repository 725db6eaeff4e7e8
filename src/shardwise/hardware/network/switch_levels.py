"""Levels of a switched network (node, leaf, spine, core): switches, ports and cables, and the bandwidth that follows from them.

A unit of a level joins `size` units of the level below by its switches; the units below the innermost level are devices. A level
becomes a `Tier` of `Switched`, the rate of which is what the cables of a unit below carry for each of its devices. All rates are
in one direction, and cables are full-duplex.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardwise.hardware.network.switches import Switched, Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchLevel:
    """One level as a file states it: `num_switches` in each of its units, `radix` ports of a switch at `port_bytes_per_s` each.

    The cables that join a unit below to this level are `links_per_device` of each of its devices (NVLinks, network cards),
    or `links_per_unit` between its switches and this level's, or as many as give `oversubscription`: bytes per second that
    enter a unit below from its own units over those that may leave it. One of the three is set. `reduces`: switches sum and
    multicast (NVLink SHARP, SHARP on InfiniBand).
    """

    name: str
    size: int
    num_switches: int
    radix: int
    port_bytes_per_s: float
    links_per_device: int | None = None
    links_per_unit: int | None = None
    oversubscription: float | None = None
    reduces: bool = False
    fraction: float = 1.0
    hop_latency_s: float = 0.0
    base_latency_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelInventory:
    """Contents and traffic of one level; rates are of one direction unless said otherwise.

    `num_units` of the level in the cluster, each with `num_devices` and `switches_per_unit` of `radix` ports, `used_ports` of its
    `ports` in use; None where no file states switches. `link_bytes_per_s`: from one unit below into this level, and back.
    `across_bytes_per_s`: all units below send at once. `out_bytes_per_s`: from a unit to the level above, None at the top.
    `bisection_bytes_per_s`: between two halves of the units below, both directions together. `collective_bytes_per_s`: an array
    over the time in which all devices of a unit gather it, D/(D - 1) of a link for D units below, None for one.
    `oversubscription`: bytes that enter a unit below from its own units over what leaves it; None for devices.
    """

    name: str
    size: int
    num_units: int
    num_devices: int
    switches_per_unit: int | None
    radix: int | None
    ports: int | None
    used_ports: int | None
    link_bytes_per_s: float
    across_bytes_per_s: float
    out_bytes_per_s: float | None
    bisection_bytes_per_s: float
    collective_bytes_per_s: float | None
    oversubscription: float | None
    reduces: bool

    @property
    def num_switches(self) -> int | None:
        """Switches of all units of the level."""
        return None if self.switches_per_unit is None else self.num_units * self.switches_per_unit


def link_rates(levels: Sequence[SwitchLevel]) -> list[float]:
    """Return the bytes/s from one unit below into each level, from the inside out.

    Cables between switches carry at most what enters the unit below from its own units; those of devices do not pass its
    switches.
    """
    rates: list[float] = []
    devices_below = 1
    for number, level in enumerate(levels):
        if level.links_per_device is not None:
            rates.append(level.links_per_device * devices_below * level.port_bytes_per_s)
        else:
            entering = levels[number - 1].size * rates[-1]
            if level.oversubscription is not None:
                rates.append(entering / level.oversubscription)
            else:
                assert level.links_per_unit is not None
                rates.append(min(level.links_per_unit * level.port_bytes_per_s, entering))
        devices_below *= level.size
    return rates


def switched_by_levels(levels: Sequence[SwitchLevel]) -> Switched:
    """Return the network that levels make: a tier for each, whose rate is that of a unit's cables for each of its devices.

    >>> node = SwitchLevel(name="node", size=8, num_switches=4, radix=64, port_bytes_per_s=25e9, links_per_device=18)
    >>> leaf = SwitchLevel(name="leaf", size=32, num_switches=8, radix=64, port_bytes_per_s=50e9, links_per_device=1)
    >>> [tier.bytes_per_s / 1e9 for tier in switched_by_levels([node, leaf]).tiers]
    [450.0, 50.0]
    """
    devices_below, tiers = 1, []
    for level, rate in zip(levels, link_rates(levels), strict=True):
        tiers.append(
            Tier(
                name=level.name, size=level.size, bytes_per_s=rate / devices_below, fraction=level.fraction,
                hop_latency_s=level.hop_latency_s, base_latency_s=level.base_latency_s, reduces=level.reduces,
            )
        )  # fmt: skip
        devices_below *= level.size
    return Switched(tiers=tuple(tiers))


def count_cables(levels: Sequence[SwitchLevel], number: int) -> int:
    """Return the cables of one unit below that end at level `number`: as many as its rate needs where a ratio is stated."""
    level = levels[number]
    if level.links_per_device is not None:
        return level.links_per_device * math.prod(below.size for below in levels[:number])
    if level.links_per_unit is not None:
        return level.links_per_unit
    return math.ceil(link_rates(levels)[number] / level.port_bytes_per_s - 1e-9)


def count_used_ports(levels: Sequence[SwitchLevel], number: int) -> int:
    """Return the ports that a unit of level `number` uses: cables of the units below, and of its switches to the level above."""
    down = levels[number].size * count_cables(levels, number)
    above = number + 1
    if above == len(levels) or levels[above].links_per_device is not None:
        return down
    return down + count_cables(levels, above)


def level_inventories(network: Switched, levels: Sequence[SwitchLevel] = ()) -> Iterator[LevelInventory]:
    """Yield what each tier of a network has and carries at nominal rates, from the inside out, with the switches of `levels`.

    Source: Austin et al., How to Scale Your Model, chapter 12 (bisection in both directions; D·W/(D - 1) of collectives).
    """
    sizes = network.levels
    below = [math.prod(sizes[:number]) for number in range(len(sizes))]  # devices of a unit below
    rates = [tier.bytes_per_s * devices for tier, devices in zip(network.tiers, below, strict=True)]
    for number, (tier, rate) in enumerate(zip(network.tiers, rates, strict=True)):
        level = levels[number] if levels else None
        num_devices = below[number] * tier.size
        entering_bytes_per_s = sizes[number - 1] * rates[number - 1] if number else None
        yield LevelInventory(
            name=tier.name, size=tier.size, num_units=math.prod(sizes) // num_devices, num_devices=num_devices,
            switches_per_unit=level.num_switches if level else None, radix=level.radix if level else None,
            ports=level.num_switches * level.radix if level else None,
            used_ports=count_used_ports(levels, number) if levels else None, link_bytes_per_s=rate,
            across_bytes_per_s=tier.size * rate, out_bytes_per_s=rates[number + 1] if number + 1 < len(rates) else None,
            bisection_bytes_per_s=2 * (tier.size // 2) * rate,
            collective_bytes_per_s=tier.size * rate / (tier.size - 1) if tier.size > 1 else None,
            oversubscription=None if entering_bytes_per_s is None else entering_bytes_per_s / rate, reduces=tier.reduces,
        )  # fmt: skip


def level_problems(levels: Sequence[SwitchLevel]) -> Iterator[str]:
    """Yield what is impossible: no cables, several statements of them, a ratio below 1, more cables than ports."""
    is_stated = True
    for number, level in enumerate(levels):
        stated = [
            name
            for name in ("links_per_device", "links_per_unit", "oversubscription")
            if getattr(level, name) is not None
        ]
        allowed = ["links_per_device"] if number == 0 else ["links_per_device", "links_per_unit", "oversubscription"]
        if len(stated) != 1 or stated[0] not in allowed:
            yield f"levels[{number}]: found {' and '.join(stated) or 'no cables'}; {' or '.join(allowed)} is required"
            is_stated = False
        if level.oversubscription is not None and level.oversubscription < 1:
            yield (
                f"levels[{number}]: oversubscription: found {level.oversubscription:g}; at least 1, bytes that enter a unit over "
                "those that may leave it, is required"
            )
            is_stated = False
    for number, level in enumerate(levels) if is_stated else ():
        ports, used = level.num_switches * level.radix, count_used_ports(levels, number)
        if used > ports:
            yield (
                f"levels[{number}]: found {used:,} cables at a unit of {level.name!r}; at most {ports:,}, the ports of "
                f"{level.num_switches:,} switches of {level.radix:,}, are required"
            )
