"""Groups of a layout on the levels of a switched network: which group crosses which level, and what its switches carry."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwise.hardware import COLLECTIVE_NAMES, Cluster, Cut, Switched
from shardwise.hardware.network.switch_levels import LevelInventory, level_inventories
from shardwise.hardware.network.switch_traffic import SwitchTraffic, switch_traffic
from shardwise.layout.layout import Layout
from shardwise.layout.placement import ATOMIC_AXES, cuts_by_axis, default_placement
from shardwise.values import InputError, Payload, printed

WHOLE_CLUSTER = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisGroup(Payload):
    """Groups along one axis of a layout: `degree` devices, of which `sizes[i]` units of level i below each hold some."""

    axis: str
    degree: int
    sizes: Sequence[int]
    levels: Sequence[str]

    @property
    @printed
    def crossed(self) -> Sequence[str]:
        """Levels that the groups cross, from the inside out."""
        return [level for level, size in zip(self.levels, self.sizes, strict=True) if size > 1]

    @property
    def cuts(self) -> Sequence[Cut]:
        return [Cut(size, 1) for size in self.sizes]


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelTraffic(Payload):
    """Bytes of a collective of one group at one unit of a level: in rings, and with switches that sum and multicast."""

    operation: str
    axis: str
    level: str
    rings: SwitchTraffic
    in_network: SwitchTraffic


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterNetwork(Payload):
    """Levels of a switched cluster, the groups of a layout on them, and what each collective of `bytes` carries over them.

    Without a layout the one group is the whole cluster.

    >>> import shardwise as sw
    >>> network = sw.network("h100:64")
    >>> network.levels[0].across_bytes_per_s, network.levels[1].link_bytes_per_s
    (3600000000000.0, 400000000000.0)
    """

    SCHEMA = "shardwise.network/1"
    cluster: str
    num_devices: int
    layout_text: str | None
    bytes: float
    levels: Sequence[LevelInventory]
    groups: Sequence[AxisGroup]
    traffic: Sequence[LevelTraffic]


def describe_network(cluster: Cluster, layout: Layout | None = None, num_bytes: float = 1e9) -> ClusterNetwork:
    """Return the levels of a cluster behind switches, the groups of a layout and the bytes at each level's switches.

    `num_bytes` is the whole array of each collective. Raises `InputError` for a torus, and for a layout of another number of
    devices.

    >>> from shardwise.hardware import load_cluster
    >>> network = describe_network(load_cluster("h100:64"), Layout.parse("tp=8 dp=8"))
    >>> [(group.axis, group.crossed) for group in network.groups]
    [('tp', ['nvlink']), ('dp', ['network'])]
    """
    topology = cluster.topology
    if not isinstance(topology, Switched):
        raise InputError(
            f"cluster: found {cluster.name}, a torus, which has no switches; a cluster behind switches is required, such as "
            f"h100:64 (show clusters {cluster.name} has the links of the torus)"
        )
    levels = tuple(level_inventories(topology, cluster.levels))
    names = [level.name for level in levels]
    if layout is None:
        groups = [AxisGroup(axis=WHOLE_CLUSTER, degree=cluster.num_devices, sizes=topology.levels, levels=names)]
    else:
        groups = _axis_groups(cluster, topology, layout, names)
    return ClusterNetwork(
        cluster=cluster.name, num_devices=cluster.num_devices, layout_text=None if layout is None else str(layout),
        bytes=num_bytes, levels=levels, groups=groups,
        traffic=[traffic for group in groups for traffic in _group_traffic(group, num_bytes)],
    )  # fmt: skip


def _axis_groups(cluster: Cluster, topology: Switched, layout: Layout, names: Sequence[str]) -> list[AxisGroup]:
    if layout.num_devices != cluster.num_devices:
        raise InputError(
            f"layout: found {layout.num_devices} devices ({layout}) on {cluster.name}, which has {cluster.num_devices}; degrees "
            "whose product is the number of devices are required"
        )
    ep = max(1, layout.ep * layout.expert_tp // layout.tp)  # with whole experts the rest is of tp's devices
    degrees: Mapping[str, int] = {
        "tp_kv": layout.tp, "tp_rep": 1, "cp": layout.cp, "ep": ep, "fsdp": layout.fsdp // ep, "dp": layout.dp, "pp": layout.pp,
    }  # fmt: skip
    placement = layout.placement or default_placement(topology)
    cuts = cuts_by_axis(topology, placement, degrees)
    groups = []
    for axis in placement.axes:
        parts = ATOMIC_AXES.get(axis, (axis,))
        sizes = [math.prod(int(cuts[part][level].size) for part in parts) for level in range(len(names))]
        groups.append(AxisGroup(axis=axis, degree=math.prod(sizes), sizes=sizes, levels=names))
        if axis == "fsdp" and ep > 1:
            groups.append(AxisGroup(axis="ep", degree=ep, sizes=[int(cut.size) for cut in cuts["ep"]], levels=names))
    return [group for group in groups if group.degree > 1]


def _group_traffic(group: AxisGroup, num_bytes: float) -> list[LevelTraffic]:
    """Return the bytes of every collective of a group at one unit of each level that it crosses."""
    return [
        LevelTraffic(
            operation=operation, axis=group.axis, level=name,
            rings=switch_traffic(operation, num_bytes, group.cuts, level),
            in_network=switch_traffic(operation, num_bytes, group.cuts, level, in_network=True),
        )
        for level, name in enumerate(group.levels)
        if group.sizes[level] > 1
        for operation in COLLECTIVE_NAMES
    ]  # fmt: skip
