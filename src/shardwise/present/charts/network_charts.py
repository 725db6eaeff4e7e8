"""Chart of a switched network: which group of a layout crosses which level."""

from __future__ import annotations

from shardwise.hardware.network.switch_levels import LevelInventory
from shardwise.layout import ClusterNetwork
from shardwise.layout.network_groups import WHOLE_CLUSTER, AxisGroup
from shardwise.present.charts.chart import Axis, Category, Cell, Cells, Chart, Panel
from shardwise.present.charts.palette import TERM_COLOURS
from shardwise.values import format_quantity

CELL_SIZE = (104.0, 44.0)


def network_chart(network: ClusterNetwork) -> Chart:
    """Return a table of levels, the outermost on top, and groups: a filled cell where a group crosses a level.

    >>> import shardwise as sw
    >>> chart = network_chart(sw.network("h100:64", layout="tp=8 dp=8"))
    >>> [cell.lines[0] for cell in chart.panels[0].marks[0].cells]
    ['–', '8 of 8', '8 of 8', '–']
    """
    levels = [*reversed(network.levels)]
    cells = tuple(
        _cell(network, group, row, column) for column, group in enumerate(network.groups) for row in range(len(levels))
    )
    panel = Panel(
        x=Axis(categories=tuple(map(_group_category, network.groups)), side="top"),
        y=Axis(categories=tuple(_level_category(network, level) for level in levels)),
        marks=(Cells(cells=cells),), size=CELL_SIZE,
    )  # fmt: skip
    return Chart(
        title=f"Which group crosses which level of {network.cluster}",
        subtitle=f"{network.num_devices:,} devices: of all units that a level joins, those with parts of one group",
        panels=(panel,),
        note="–  every group of that axis lies within one unit below the level, and its traffic does not leave it",
    )  # fmt: skip


def _cell(network: ClusterNetwork, group: AxisGroup, row: int, column: int) -> Cell:
    level = len(network.levels) - 1 - row
    size, total = group.sizes[level], network.levels[level].size
    if size == 1:
        return Cell(row=row, column=column, colour="empty", lines=("–",))
    colour = f"term:{group.axis}" if group.axis in TERM_COLOURS else "series:0"
    below = network.levels[level - 1].name if level else "device"
    hover = f"{group.axis}: a group of {group.degree:,} is on {size:,} of {total:,} x {below} of a {network.levels[level].name}"
    return Cell(row=row, column=column, colour=colour, lines=(f"{size:,} of {total:,}",), hover=hover)


def _group_category(group: AxisGroup) -> Category:
    name = "whole cluster" if group.axis == WHOLE_CLUSTER else group.axis
    return Category(label=f"{name} = {group.degree:,}")


def _level_category(network: ClusterNetwork, level: LevelInventory) -> Category:
    number = list(network.levels).index(level)
    below = network.levels[number - 1].name if number else "device"
    units = f"{level.num_units:,} x {level.size:,} {below}"
    switches = "" if level.num_switches is None else f", {level.num_switches:,} switches"
    rate = f"{format_quantity(level.link_bytes_per_s, 'B/s')} for each {below}"
    return Category(label=level.name, lines=(f"{units}{switches}, {rate}",))
