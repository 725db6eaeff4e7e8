"""A cluster: chips of one kind on a network. Shorthand: `tpu-v5p:16x20x28`, `tpu-v5e:16x16*4`, `h100:512`, `local:4`.

The network of a catalogue chip follows from the device count: a torus, pods of it, or tiers of switches, split into hosts.
Examples are shorthands of what the chips are sold as: a host or node, a large pod, a twisted slice, several pods.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from shardwise.hardware.calibration_constants import Calibration, scale_rates
from shardwise.hardware.chips import Chip, chip_names, get_catalog_entry
from shardwise.hardware.nearest_shorthand import nearest_shorthand
from shardwise.hardware.network.pods import Pods
from shardwise.hardware.network.switch_levels import SwitchLevel
from shardwise.hardware.network.switches import Switched, Tier
from shardwise.hardware.network.topology import Topology
from shardwise.hardware.network.torus import TWISTABLE_SHAPES, Torus, is_twistable
from shardwise.hardware.toml_tables import MAX_DEVICES, TomlTable
from shardwise.values import InputError, MissingValueError, parse_quantity


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Chips, their network, and the measured constants that apply to them (None: nothing was measured).

    `topology` has the nominal rates of the catalogue or of the cluster's file in bytes/s, whatever was measured. `levels` are the
    switches that a file states, from the inside out, of which the topology is made; empty where none does. `load_cluster` makes
    one.

    >>> from shardwise.hardware.cluster_loading import load_cluster
    >>> cluster = load_cluster("tpu-v5p:4x4x4")
    >>> cluster.num_devices, cluster.topology.levels
    (64, (4, 4, 4))
    """

    name: str
    chip: Chip
    topology: Topology
    calibration: Calibration | None = None
    levels: tuple[SwitchLevel, ...] = ()

    @property
    def num_devices(self) -> int:
        """Devices of the whole cluster."""
        return math.prod(self.topology.levels)

    @property
    def scale_up_size(self) -> int:
        """Number of devices that reach one another's memory: a node or an NVLink domain; on a torus all.

        >>> from shardwise.hardware.cluster_loading import load_cluster
        >>> load_cluster("h100:64").scale_up_size, load_cluster("tpu-v5p:4x4x4").scale_up_size
        (8, 64)
        """
        return self.topology.levels[0] if isinstance(self.topology, Switched) else self.num_devices

    @property
    def sustained_topology(self) -> Topology:
        """Network at the measured rates of collectives; at nominal rates without a calibration."""
        if self.calibration is None:
            return self.topology
        return scale_rates(self.topology, self.calibration["link_fraction"], self.calibration["network_fraction"])


_SHORTHAND = re.compile(
    r"^(?P<chip>[a-z0-9][a-z0-9.\-]*):(?P<shape>[0-9]+(?:x[0-9]+)*)"
    r"(?P<twisted>_twisted)?(?:\*(?P<pods>[0-9]+))?$"
)


class Shorthand(NamedTuple):
    """Parts of a shorthand: the chip, the shape of a slice (or a count), whether it is twisted, and the number of slices."""

    chip: str
    shape: tuple[int, ...]
    twisted: bool
    num_pods: int | None


def parse_shorthand(text: str) -> Shorthand:
    """Parse a shorthand. Raises `InputError` with the required form."""
    match = _SHORTHAND.match(text.strip().lower())
    if match is None:
        nearest = nearest_shorthand(text)
        suggestion = f" (did you mean {nearest!r}?)" if nearest else ""
        raise InputError(
            f"cluster: found {text[:80]!r}{suggestion}; CHIP:COUNT for switched chips (h100:512) or CHIP:SHAPE for a torus "
            "(tpu-v5p:16x20x28; *N for N pods of it) is required, or the path of a .toml file"
        )
    parts = [*match["shape"].split("x"), *([match["pods"]] if match["pods"] else [])]
    longest = max(len(part.lstrip("0")) for part in parts)
    sizes = tuple(int(part) for part in parts) if longest <= len(str(MAX_DEVICES)) else ()
    if not sizes or math.prod(sizes) > MAX_DEVICES:
        raise InputError(f"cluster: found {text[:60]!r}; at most {MAX_DEVICES:,} devices are planned for")
    if min(sizes) < 1:
        raise InputError(f"cluster: found {text!r}; every size must be at least 1")
    shape, num_pods = (sizes[:-1], sizes[-1]) if match["pods"] else (sizes, None)
    return Shorthand(match["chip"], shape, bool(match["twisted"]), num_pods)


def expand_sizes(text: str) -> list[str]:
    """Return one shorthand per size of a text with several, in its order; any other text alone.

    >>> expand_sizes("h100:64,128,256"), expand_sizes("tpu-v5p:4x4x4,4x4x8"), expand_sizes("mine.toml")
    (['h100:64', 'h100:128', 'h100:256'], ['tpu-v5p:4x4x4', 'tpu-v5p:4x4x8'], ['mine.toml'])
    """
    chip, colon, sizes = text.strip().partition(":")
    if not colon or "," not in sizes or text.strip().lower().endswith(".toml"):
        return [text]
    return [size.strip() if ":" in size else f"{chip}:{size.strip()}" for size in sizes.split(",")]


def build_bare_chip_topology(name: str, shape: tuple[int, ...]) -> Topology:
    """Return the network of a bare chip's devices: a torus of this shape, or switches over as many devices.

    The torus may have any shape, whether or not the vendor sells it. Raises `InputError` for an unknown chip.
    """
    entry = get_catalog_entry(name)
    if "torus" in entry:
        return build_torus(entry["torus"], shape)
    return build_catalog_switches(name, entry, (math.prod(shape),))


def build_shorthand_topology(shorthand: Shorthand, chip: Chip) -> Topology:
    """Return the network of a shorthand. Raises `InputError` if the vendor has no such slice or number of devices."""
    entry = get_catalog_entry(shorthand.chip)
    if "torus" in entry:
        torus = build_catalog_torus(shorthand.chip, entry, shorthand.shape, twisted=shorthand.twisted)
        return torus if shorthand.num_pods in (None, 1) else build_pods(torus, shorthand.num_pods or 1, chip)
    if shorthand.twisted or shorthand.num_pods:
        raise InputError(
            f"cluster: {shorthand.chip} is connected by switches, which have no twisted slices and no pods; a count such as "
            f"{shorthand.chip}:512 is required"
        )
    return build_catalog_switches(shorthand.chip, entry, shorthand.shape)


def build_pods(torus: Torus, num_pods: int, chip: Chip) -> Pods:
    """Return pods of a torus, in which each chip has an equal part of its host's egress to the data-centre network.

    Raises `MissingValueError` that names the value of the chip without a source.
    """
    try:
        host_bytes_per_s, host_shape = chip.require_value("dcn_bytes_per_s_per_host"), chip.require_value("host_shape")
    except MissingValueError as error:
        fix = "one pod, or the value in the [chip] table of a .toml file, is required"
        raise MissingValueError(f"cluster: {num_pods} pods: {error}; {fix}") from None
    assert isinstance(host_bytes_per_s, (int, float))
    assert isinstance(host_shape, tuple)
    return Pods(torus=torus, num_pods=num_pods, bytes_per_s=host_bytes_per_s / math.prod(host_shape))


def replace_chip(cluster: Cluster, chip: Chip) -> Cluster:
    """Return the cluster with another chip, whose hosts also set the rate between pods."""
    topology = cluster.topology
    if isinstance(topology, Pods):
        topology = build_pods(topology.torus, topology.num_pods, chip)
    return replace(cluster, chip=chip, topology=topology)


def resize_tiers(network: Switched, chip: Chip, count: int) -> Switched | None:
    """Return the same tiers over another number of devices, or None if it does not divide evenly."""
    groups = [tier.size for tier in network.tiers[:-1]]
    sizes = split_into_tiers(count, groups, chip.devices_per_host or network.tiers[0].size)
    if sizes is None:
        return None
    return Switched(tiers=tuple(replace(tier, size=size) for tier, size in zip(network.tiers, sizes, strict=True)))


def build_catalog_torus(name: str, entry: TomlTable, shape: tuple[int, ...], *, twisted: bool = False) -> Torus:
    torus = entry["torus"]
    pod = sorted(torus.get("pod", ()))
    max_chips = torus.get("pod_chips", math.prod(pod))
    if len(shape) != torus["num_axes"]:
        example = "x".join(map(str, torus.get("pod", (4,) * torus["num_axes"])))
        nearest = nearest_shorthand(f"{name}:{math.prod(shape)}")
        suggestion = f" (did you mean {nearest!r}?)" if nearest else ""
        raise InputError(
            f"cluster: {name} is a torus of {torus['num_axes']} axes{suggestion}; a shape such as {name}:{example} is required"
        )
    if math.prod(shape) > max_chips or any(size > limit for size, limit in zip(sorted(shape), pod, strict=False)):
        pod_text = f", {'x'.join(map(str, torus['pod']))} ({max_chips} chips)" if pod else f" of {max_chips} chips"
        raise InputError(f"cluster: {name}:{'x'.join(map(str, shape))} is larger than a pod{pod_text}")
    if twisted:
        _check_twist(name, entry, shape)
    return build_torus(torus, shape, twisted=twisted)


def _check_twist(name: str, entry: TomlTable, shape: tuple[int, ...]) -> None:
    """Raise `InputError` for a twisted slice that the vendor does not offer."""
    shape_text = "x".join(map(str, shape))
    if not entry["torus"].get("twists"):
        twistable = ", ".join(chip for chip in chip_names() if get_catalog_entry(chip).get("torus", {}).get("twists"))
        raise InputError(
            f"cluster: found {name}:{shape_text}_twisted; no twisted slices of {name} are known, but of {twistable}"
        )
    if not is_twistable(shape):
        raise InputError(f"cluster: found {name}:{shape_text}_twisted; {TWISTABLE_SHAPES} is required")


def build_torus(torus: TomlTable, shape: tuple[int, ...], *, twisted: bool = False) -> Torus:
    """Return the torus of a shape. `whole_pod`: the whole pod wraps, a smaller slice does not."""
    rule = torus["wrap_rule"]
    if rule == "whole_pod":
        rule = "always" if sorted(shape) == sorted(torus["pod"]) else "never"
    return Torus(
        shape=shape, bytes_per_s=parse_quantity(torus["bytes_per_s"]), hop_latency_s=torus["hop_latency_s"], wrap_rule=rule,
        twisted=twisted,
    )  # fmt: skip


def build_catalog_switches(name: str, entry: TomlTable, shape: tuple[int, ...]) -> Topology:
    if len(shape) != 1:
        raise InputError(
            f"cluster: {name} is connected by switches; a count such as {name}:512 is required, found {shape}"
        )
    count, tiers = shape[0], entry["tiers"]
    groups = [tier["size"] for tier in tiers if "size" in tier]
    if len(groups) == len(tiers):
        if count > math.prod(groups):
            raise MissingValueError(
                f"cluster: {name} has no sourced network between nodes of {math.prod(groups)}; "
                f"{name}:{math.prod(groups)} is the largest, or describe the network in a .toml file"
            )
        groups = groups[:-1]
    host = math.prod(entry.get("host_shape", groups[:1]))
    sizes = split_into_tiers(count, groups, host)
    if sizes is None:
        low, high = find_nearest_counts(count, groups, host)
        parts = "" if host == groups[0] else f" or equal parts of them, in hosts of {host}"
        raise InputError(
            f"cluster: {name} comes in nodes of {groups[0]}{parts}; {count} is not a multiple of it, "
            f"the nearest counts are {low} and {high}"
        )
    return Switched(tiers=tuple(_build_tier(tier, size) for tier, size in zip(tiers, sizes, strict=True)))


def _build_tier(entry: TomlTable, size: int) -> Tier:
    """Return a tier; without a measurement its fraction is 1 and its latencies are 0, and times over it are a bound."""
    return Tier(
        name=entry["name"], size=size, bytes_per_s=parse_quantity(entry["bytes_per_s"]),
        fraction=entry.get("fraction", 1.0), hop_latency_s=entry.get("hop_latency_s", 0.0),
        base_latency_s=entry.get("base_latency_s", 0.0), links=entry.get("links", 0),
    )  # fmt: skip


def split_into_tiers(count: int, groups: Sequence[int], host: int) -> tuple[int, ...] | None:
    """Return the sizes of the tiers that `count` devices fill, from the inside out, or None if they do not divide evenly.

    `groups`: most devices of a group of each tier but the outermost; `host`: devices of one host. Up to the limit
    of a group, one group; beyond it, full groups, or an equal part of each that is whole hosts and at least half of the
    limit: 256 GB200 are 4 x 64, in racks of 72.
    """
    sizes = []
    for limit in groups:
        tier_size = count
        if count > limit:
            candidates = (size for size in range(limit, (limit + 1) // 2 - 1, -1) if size == limit or size % host == 0)
            tier_size = next((size for size in candidates if count % size == 0), 0)
        if not tier_size:
            return None
        sizes.append(tier_size)
        count //= tier_size
    return (*sizes, count)


def find_nearest_counts(count: int, groups: Sequence[int], host: int) -> tuple[int, int]:
    """Return the nearest counts below and above that divide evenly."""
    below = next(low for low in range(count, 0, -1) if split_into_tiers(low, groups, host))
    return below, next(
        high for high in range(count, 2 * count + 2 * max(groups)) if split_into_tiers(high, groups, host)
    )


def cluster_examples() -> tuple[str, ...]:
    """Return shorthands of each chip: of one host or node, and of the largest that has one shape.

    >>> [name for name in cluster_examples() if name.startswith("tpu-v5e")]
    ['tpu-v5e:4x2', 'tpu-v5e:16x16', 'tpu-v5e:16x16*2']
    """
    return (*(cluster for name in chip_names() for cluster in _clusters_of_chip(name)), "local:4")


def _clusters_of_chip(name: str) -> Iterator[str]:
    entry = get_catalog_entry(name)
    if "torus" in entry:
        pod = [entry["torus"]["pod"]] if "pod" in entry["torus"] else []
        yield from _shorthands(name, [entry["host_shape"], *pod])
        yield from _special_slices(name, entry)
    else:
        sizes = [tier["size"] for tier in entry["tiers"] if "size" in tier]
        shapes = [sizes] if sizes else [[1]]
        shapes += [[8 * shapes[0][0]]] if len(entry["tiers"]) > len(sizes) else []
        yield from _shorthands(name, shapes)


def _shorthands(name: str, shapes: Sequence[Sequence[int]]) -> tuple[str, ...]:
    return tuple(f"{name}:{'x'.join(map(str, shape))}" for shape in shapes)


def _special_slices(name: str, entry: Mapping[str, Any]) -> Iterator[str]:
    """Yield the smallest twisted slice, and two whole pods, where the chip has them."""
    torus = entry["torus"]
    if torus.get("twists"):
        yield f"{name}:4x4x8_twisted"
    if "pod" in torus and "dcn_bytes_per_s_per_host" in entry:
        yield f"{_shorthands(name, [torus['pod']])[0]}*2"
