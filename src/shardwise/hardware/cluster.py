"""A cluster: chips of one kind on a network. Shorthand: `tpu-v5p:16x20x28`, `tpu-v5e:16x16*4`, `h100:512`, `local:4`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import NamedTuple

from shardwise.hardware.calibration_constants import Calibration, scale_rates
from shardwise.hardware.chips import Chip
from shardwise.hardware.network.switches import Switched
from shardwise.hardware.network.topology import Topology
from shardwise.hardware.toml_tables import MAX_DEVICES
from shardwise.values import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Chips, their network, and the measured constants that apply to them (None: nothing was measured).

    `topology` has the nominal rates of the catalogue or of the cluster's file in bytes/s, whatever was measured.
    `load_cluster` makes one.

    >>> from shardwise.hardware.cluster_loading import load_cluster
    >>> cluster = load_cluster("tpu-v5p:4x4x4")
    >>> cluster.num_devices, cluster.topology.levels
    (64, (4, 4, 4))
    """

    name: str
    chip: Chip
    topology: Topology
    calibration: Calibration | None = None

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
        raise InputError(
            f"cluster: found {text!r}; CHIP:COUNT for switched chips (h100:512) or CHIP:SHAPE for a torus "
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
