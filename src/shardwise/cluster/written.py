"""A cluster as a TOML file that `load_cluster` reads (docs/extending.md), with its measurements."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from typing import Any

from shardwise.cluster.calibration import Calibration
from shardwise.cluster.chip import Chip
from shardwise.cluster.chips import load_chip
from shardwise.cluster.cluster import Cluster
from shardwise.cluster.own_calibration import calibration_entries
from shardwise.network.topology import Pods, Switched, Topology, Torus

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def cluster_toml(nominal: Cluster, calibration: Calibration, remarks: Mapping[str, str] | None = None) -> str:
    """The file of a cluster with its nominal rates and a calibration.

    Of a chip that starts from one of the catalogue only what differs is written. `remarks`: comments by the name of a
    constant. Read again it is the cluster that `calibrated` makes, to the last digit.
    """
    lines = [f"name = {toml(nominal.name)}", *_chip_alone(nominal.chip), *_torus(nominal.topology)]
    lines += [*_chip_table(nominal.chip), *_tiers(nominal.topology), "", "[calibration]"]
    for name, value in calibration_entries(calibration):
        if name != "constants":
            lines.append(f"{name} = {toml(value)}")
    lines += ["", "[calibration.constants]"]
    for name, value in calibration.constants.items():
        remark = (remarks or {}).get(name, "")
        lines.append(f"{name} = {toml(value)}" + (f"  # {remark}" if remark else ""))
    return "\n".join(lines) + "\n"


def toml(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(key)} = {toml(one)}" for key, one in value.items()) + " }"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(toml, value)) + "]"
    return repr(value)


def _key(text: str) -> str:
    return text if _BARE.fullmatch(text) else toml(text)


def _is_of_catalogue(chip: Chip) -> bool:
    return chip.base is not None and chip == load_chip(chip.base)


def _chip_alone(chip: Chip) -> Iterator[str]:
    if _is_of_catalogue(chip):
        yield f"chip = {toml(chip.base)}"


def _chip_table(chip: Chip) -> Iterator[str]:
    """Values that differ from the catalogue's chip, or from a chip's defaults."""
    if _is_of_catalogue(chip):
        return
    base = chip.base
    usual = load_chip(base) if base is not None else None
    yield from ("", "[chip]", *([f"base = {toml(base)}"] if base is not None else []), f"name = {toml(chip.name)}")
    for one in fields(Chip):
        value = getattr(chip, one.name)
        if one.name not in ("name", "base", "sources") and value != (
            getattr(usual, one.name) if usual else _default(one)
        ):
            yield f"{one.name} = {toml(value)}"
    known = usual.sources if usual else {}
    yield f"sources = {toml({key: text for key, text in chip.sources.items() if known.get(key) != text})}"


def _default(one: Any) -> Any:
    return None if one.default is MISSING else one.default


def _torus(topology: Topology) -> Iterator[str]:
    torus = topology.torus if isinstance(topology, Pods) else topology
    if isinstance(topology, Pods):
        yield f"pods = {topology.num_pods}"
    if isinstance(torus, Torus):
        yield f"torus = {toml({one.name: getattr(torus, one.name) for one in fields(torus)})}"


def _tiers(topology: Topology) -> Iterator[str]:
    for tier in topology.tiers if isinstance(topology, Switched) else ():
        values = {one.name: getattr(tier, one.name) for one in fields(tier) if one.name != "links" or tier.links}
        yield from ("", "[[tiers]]", *(f"{name} = {toml(value)}" for name, value in values.items()))
