"""Reports of switched networks: levels, groups of a layout, and bytes through switches."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.hardware.network.switch_levels import LevelInventory
from shardwise.hardware.network.switch_traffic import SwitchTraffic
from shardwise.layout import ClusterNetwork
from shardwise.layout.network_groups import WHOLE_CLUSTER, AxisGroup
from shardwise.present.rendering.numbers import count, num_bytes, quantity
from shardwise.present.rendering.report import Cell, Number, Report, Row, Section, Table
from shardwise.values import format_bytes

RATES = ("link", "across", "out", "bisection", "collective")
RATE_NOTES = (
    "Rates of one direction. into: one unit below into the level; across: all units below at once; out: a unit to the level",
    "above; bisection: between two halves, both directions together; collective: an array over the time in which all devices",
    "of a unit gather it; over: bytes that enter a unit below from its own units, over what may leave it.",
)
TRAFFIC_NOTES = (
    "Bytes into and out of the switches of one unit of the level, of a collective of the group: passed on in rings, and where",
    "switches sum and multicast.",
)


def network_report(network: ClusterNetwork) -> Report:
    """Report the levels of a cluster from the inside out, the groups of a layout, and what their collectives send."""
    switches = [level.num_switches for level in network.levels if level.num_switches is not None]
    about = f"{network.cluster}: {network.num_devices:,} devices" + (
        f", {sum(switches):,} switches" if switches else ""
    )
    sections = [Section([_levels_table(network)], title=about), Section([_rates_table(network)]), Section(RATE_NOTES)]
    if network.layout_text is not None:
        sections.append(Section([_groups_table(network)], title=f"groups of {network.layout_text}"))
    title = f"bytes through the switches of a unit, for an array of {format_bytes(network.bytes)}"
    sections.append(
        Section([_traffic_table(network), *TRAFFIC_NOTES], title=title, detail=network.layout_text is not None)
    )
    return sections


def _levels_table(network: ClusterNetwork) -> Table:
    rows: list[Row] = [("level", "joins", "units", "devices", "switches", "of ports", "used in a unit")]
    rows += [tuple(_level_row(network, number, level)) for number, level in enumerate(network.levels)]
    return Table(rows=tuple(rows), right=range(2, 7), indent=2)


def _level_row(network: ClusterNetwork, number: int, level: LevelInventory) -> Iterator[Cell]:
    below = network.levels[number - 1].name if number else "device"
    path = f"levels.{number}"
    yield level.name
    yield f"{level.size:,} x {below}"
    yield count(level.num_units, f"{path}.num_units")
    yield count(level.num_devices, f"{path}.num_devices")
    if level.switches_per_unit is None or level.radix is None or level.used_ports is None:
        yield from ("-", "-", "-")
        return
    units = "" if level.num_units == 1 else f" x {level.num_units:,}"
    yield Number(f"{level.switches_per_unit:,}{units}", level.switches_per_unit, "", f"{path}.switches_per_unit")
    yield count(level.radix, f"{path}.radix")
    yield Number(f"{level.used_ports:,} of {level.ports:,}", level.used_ports, "", f"{path}.used_ports")


def _rates_table(network: ClusterNetwork) -> Table:
    rows: list[Row] = [("level", "into", "across", "out", "bisection", "collective", "over")]
    for number, level in enumerate(network.levels):
        path = f"levels.{number}"
        ratio: Cell = "-"
        if level.oversubscription is not None:
            ratio = Number(f"{level.oversubscription:.3g}", level.oversubscription, "", f"{path}.oversubscription")
        rates = (_rate(getattr(level, f"{name}_bytes_per_s"), f"{path}.{name}_bytes_per_s") for name in RATES)
        rows.append((level.name + (" (reduces)" if level.reduces else ""), *rates, ratio))
    return Table(rows=tuple(rows), right=range(1, 7), indent=2)


def _rate(bytes_per_s: float | None, path: str) -> Cell:
    return "-" if bytes_per_s is None else quantity(bytes_per_s, "B/s", path)


def _groups_table(network: ClusterNetwork) -> Table:
    rows: list[Row] = [("group", "devices", *(level.name for level in network.levels), "crosses")]
    for number, group in enumerate(network.groups):
        spans = (_span(group, number, level) for level in range(len(network.levels)))
        rows.append((
            group.axis, count(group.degree, f"groups.{number}.degree"), *spans, ", ".join(group.crossed) or "nothing",
        ))  # fmt: skip
    return Table(rows=tuple(rows), right=range(1, 2 + len(network.levels)), indent=2)


def _span(group: AxisGroup, number: int, level: int) -> Cell:
    size = group.sizes[level]
    return "-" if size == 1 else count(size, f"groups.{number}.sizes.{level}")


def _traffic_table(network: ClusterNetwork) -> Table:
    rows: list[Row] = [("level", "group", "collective", "in, rings", "out, rings", "in, summed", "out, summed")]
    for number, traffic in enumerate(network.traffic):
        cells = [
            cell
            for name in ("rings", "in_network")
            for cell in _sums(getattr(traffic, name), f"traffic.{number}.{name}")
        ]
        group = "whole cluster" if traffic.axis == WHOLE_CLUSTER else traffic.axis
        rows.append((traffic.level, group, traffic.operation.replace("_", "-"), *cells))
    return Table(rows=tuple(rows), right=range(3, 7), indent=2)


def _sums(traffic: SwitchTraffic, path: str) -> tuple[Cell, Cell]:
    return num_bytes(traffic.bytes_in, f"{path}.bytes_in"), num_bytes(traffic.bytes_out, f"{path}.bytes_out")
