"""A cluster: so many of one chip on a network. Shorthand: `tpu-v5p:16x20x28`, `h100:512`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from shardwise.cluster.chip import Chip
from shardwise.cluster.topology import Topology
from shardwise.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Chips and their network."""

    name: str
    chip: Chip
    topology: Topology

    @property
    def num_devices(self) -> int:
        return math.prod(self.topology.levels)


_SHORTHAND = re.compile(r"^(?P<chip>[a-z0-9][a-z0-9.\-]*):(?P<shape>\d+(?:x\d+)*)$")


def parse_shorthand(text: str) -> tuple[str, tuple[int, ...]]:
    """Chip name and shape (or count) of a shorthand. Raises `InputError` with the form that is required."""
    match = _SHORTHAND.match(text.strip().lower())
    if match is None:
        raise InputError(
            f"cluster: found {text!r}; CHIP:COUNT for switched chips (h100:512) or CHIP:SHAPE for a torus "
            "(tpu-v5p:16x20x28) is required"
        )
    shape = tuple(int(part) for part in match["shape"].split("x"))
    if min(shape) < 1:
        raise InputError(f"cluster: found {text!r}; every size must be at least 1")
    return match["chip"], shape
