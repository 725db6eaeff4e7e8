"""Users' own clusters, from TOML files (docs/extending.md)."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from shardwise.cluster.calibration import Calibration
from shardwise.cluster.chip import Chip
from shardwise.cluster.chips import catalogue_entry, load_chip, read_chip
from shardwise.cluster.cluster import MOST_DEVICES, Cluster
from shardwise.cluster.networks import links_of, pods_of
from shardwise.cluster.own_calibration import read_calibration
from shardwise.cluster.reader import Entry, TableReader, shown
from shardwise.errors import InputError, MissingValueError, require
from shardwise.network.topology import Pods, Switched, Tier, Topology, Torus
from shardwise.network.torus import WRAPS
from shardwise.network.twist import LEGAL, is_twistable

_TIER_KEYS = ("name", "size", "bytes_per_s", "fraction", "hop_latency_s", "base_latency_s", "links")
_TORUS_KEYS = ("shape", "bytes_per_s", "hop_latency_s", "wrap_rule", "twisted")


class Own(NamedTuple):
    """Contents of a file: the cluster at nominal rates, and its measurements."""

    nominal: Cluster
    calibration: Calibration | None


def read_cluster(path: str) -> Own:
    """A user's own cluster from a TOML file: a chip, either a torus or tiers, and a calibration if there is one.

    Raises `InputError` with all problems.
    """
    file = Path(path)
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"cluster: cannot read {path}: {error.strerror}; the path of a .toml file is required"
        ) from None
    except (ValueError, RecursionError) as error:  # not UTF-8, not TOML, a null byte in the path, nested too deeply
        raise InputError(f"cluster: {path} is not TOML: {error}") from None
    where = file.name
    reader = TableReader(where, table, ("name", "chip", "torus", "pods", "tiers", "calibration"))
    chip, base_name = _chip_of(reader)
    base = catalogue_entry(base_name) if base_name is not None else {}
    has = [key for key in ("torus", "tiers") if key in table]
    if len(has) != 1:
        found = "both" if has else "neither"
        reader.problems.append(f"{where}: found {found} of torus and tiers; one of them is required")
    topology: Topology | None = None
    if has == ["torus"]:
        topology = _own_pods(reader, _own_torus(reader, base), chip)
    elif has == ["tiers"]:
        topology = _own_tiers(reader)
        if "pods" in table:
            reader.wrong(
                "pods", "a torus beside it: tiers take the place of pods, with one more tier of so many groups,"
            )
    calibration = read_calibration(reader, chip) if "calibration" in table else None
    name = reader.text("name", file.stem)
    require(reader.problems)
    assert chip is not None
    assert topology is not None
    if math.prod(topology.levels) > MOST_DEVICES:
        raise InputError(f"{where}: {math.prod(topology.levels):,} devices; at most {MOST_DEVICES:,} are planned for")
    return Own(Cluster(name=name, chip=chip, topology=topology), calibration)


def _chip_of(reader: TableReader) -> tuple[Chip | None, str | None]:
    """The chip of a file and the catalogue's it starts from, if any: `chip = "h100"`, or a table of values."""
    given = reader.table.get("chip")
    if isinstance(given, Mapping):
        given = dict(given)
        name = given.pop("name", f"{given.get('base', 'chip')} of {reader.where}")
        base_name = given.pop("base", None)
    else:
        name, base_name, given = given, given, {}
    try:
        if base_name is not None and not isinstance(base_name, str):
            raise InputError(f"chip: found {shown(base_name)}; the name of a chip or a [chip] table is required")
        if base_name is None and not given:
            raise InputError('chip: nothing found; chip = "NAME" or a [chip] table is required')
        where = f"{reader.where}: chip"
        start = load_chip(base_name) if base_name is not None else None
        return read_chip(name, given, where, start), base_name
    except InputError as error:
        prefix = "" if error.problems[0].startswith(reader.where) else f"{reader.where}: "
        reader.problems += [prefix + problem for problem in error.problems]
        return None, None


def _own_torus(reader: TableReader, base: Entry) -> Torus | None:
    """The torus of a file; bandwidth, latency and wrap rule are the catalogue chip's where they are left out."""
    given = reader.table["torus"]
    if not isinstance(given, Mapping):
        reader.wrong("torus", "a table with shape, bytes_per_s, hop_latency_s and wrap_rule")
        return None
    where, before = f"{reader.where}: torus", len(reader.problems)
    torus = TableReader(where, {**_own_links(base), **given}, _TORUS_KEYS, reader.problems)
    shape = torus.sizes("shape")
    values = (torus.quantity("bytes_per_s"), torus.latency("hop_latency_s", optional=False))
    rule = torus.table.get("wrap_rule")
    if rule not in (*WRAPS, "whole_pod") or (rule == "whole_pod" and "wrap_rule" in given):
        torus.wrong("wrap_rule", f"one of {', '.join(WRAPS)}")
    if len(shape) > 3:
        torus.wrong("shape", "a list of at most 3 sizes")
    twisted = torus.flag("twisted")
    if twisted and not (is_twistable(shape) and rule in ("multiple_of_4", "always")):
        torus.wrong("twisted", f"false, or a torus that wraps of shape {LEGAL}")
    if len(reader.problems) > before:
        return None
    links = {"bytes_per_s": values[0], "hop_latency_s": values[1], "wrap_rule": rule}
    entry = {**links, "pod": base["torus"]["pod"]} if rule == "whole_pod" else links
    return links_of(entry, shape, twisted=twisted)


def _own_pods(reader: TableReader, torus: Torus | None, chip: Chip | None) -> Torus | Pods | None:
    """The torus, or a number of pods of it."""
    num_pods = reader.size("pods") if "pods" in reader.table else 1
    if num_pods == 1 or torus is None or chip is None:
        return torus
    try:
        return pods_of(torus, num_pods, chip)
    except MissingValueError as error:
        reader.problems.append(f"{reader.where}: {error}")
        return None


def _own_links(base: Entry) -> Entry:
    return {key: value for key, value in base.get("torus", {}).items() if key in _TORUS_KEYS}


def _own_tiers(reader: TableReader) -> Switched | None:
    """The tiers of a file, from the inside out."""
    given = reader.table["tiers"]
    if not isinstance(given, list) or not given or not all(isinstance(tier, Mapping) for tier in given):
        reader.wrong("tiers", 'a list of tables such as { name = "nvlink", size = 8, bytes_per_s = "450 GB/s" }')
        return None
    before, tiers = len(reader.problems), []
    for number, table in enumerate(given):
        tier = TableReader(f"{reader.where}: tiers[{number}]", table, _TIER_KEYS, reader.problems)
        tiers.append(
            Tier(
                name=tier.text("name"), size=tier.size("size"), bytes_per_s=tier.quantity("bytes_per_s"),
                fraction=tier.fraction("fraction"), hop_latency_s=tier.latency("hop_latency_s"),
                base_latency_s=tier.latency("base_latency_s"), links=tier.size("links") if "links" in table else 0,
            )
        )  # fmt: skip
        if table.get("links") == tiers[-1].links < tiers[-1].size - 1:
            tier.wrong("links", f"a link to each of the {tiers[-1].size - 1} others")
    return None if len(reader.problems) > before else Switched(tiers=tuple(tiers))
