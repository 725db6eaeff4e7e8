"""The targets by name."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.errors import chosen
from shardwise.export import megatron
from shardwise.export.target import Target

TARGETS: Mapping[str, Target] = {target.name: target for target in (megatron.TARGET,)}


def target_named(name: str) -> Target:
    """A target. Raises `InputError` that lists the names."""
    return chosen(TARGETS, name, "target")
