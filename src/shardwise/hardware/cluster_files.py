"""Users' own clusters as TOML files (docs/extending.md), with measurements in a `[calibration]` table (docs/calibrating.md).

A cluster that is written and read again is the same, to the last digit.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, NamedTuple

from shardwise.hardware.calibration_constants import (
    BENCH_ONLY_CONSTANTS,
    CONSTANTS,
    HIGHEST_CLOCK,
    LOWEST_CLOCK,
    MODEL_KINDS,
    Calibration,
)
from shardwise.hardware.chips import Chip, get_catalog_entry, load_chip, read_chip, relative_clock
from shardwise.hardware.cluster import Cluster, build_pods, build_torus
from shardwise.hardware.level_files import level_entries, read_levels
from shardwise.hardware.network.pods import Pods
from shardwise.hardware.network.switch_levels import SwitchLevel, switched_by_levels
from shardwise.hardware.network.switches import Switched, Tier
from shardwise.hardware.network.topology import Topology
from shardwise.hardware.network.torus import TWISTABLE_SHAPES, WRAP_RULES, Torus, is_twistable
from shardwise.hardware.published_constants import published_calibration
from shardwise.hardware.stacks import get_stack, stack_names
from shardwise.hardware.toml_tables import MAX_DEVICES, TableReader, TomlTable
from shardwise.values import (
    LOSS_KERNELS,
    FileMessages,
    InputError,
    MissingValueError,
    parse_toml,
    raise_problems,
    read_text,
    short_repr,
)

_TIER_KEYS = ("name", "size", "bytes_per_s", "fraction", "hop_latency_s", "base_latency_s", "links")
_TORUS_KEYS = ("shape", "bytes_per_s", "hop_latency_s", "wrap_rule", "twisted")


class MeasuredCluster(NamedTuple):
    """Contents of a file: the cluster at nominal rates, and its measurements."""

    nominal: Cluster
    calibration: Calibration | None


def read_cluster_file(path: str) -> MeasuredCluster:
    """Read a user's own cluster from a TOML file: a chip; a torus, tiers or levels of switches; a calibration if there is one.

    Raises `InputError` with all problems.
    """
    file = Path(path)
    messages = FileMessages("cluster: ", "the path of a .toml file is required")
    table = parse_toml(read_text(file, messages), path, messages)
    where = file.name
    reader = TableReader(where, table, ("name", "chip", "torus", "pods", "tiers", "levels", "calibration"))
    chip, base_name = _read_chip_table(reader)
    base = get_catalog_entry(base_name) if base_name is not None else {}
    network_keys = [key for key in ("torus", "tiers", "levels") if key in table]
    if len(network_keys) != 1:
        which = " and ".join(network_keys) or "no network"
        reader.problems.append(f"{where}: found {which}; one of torus, tiers and levels is required")
    topology: Topology | None = None
    levels: tuple[SwitchLevel, ...] = ()
    if network_keys == ["torus"]:
        topology = _read_pods(reader, _read_torus(reader, base), chip)
    elif network_keys in (["tiers"], ["levels"]):
        if network_keys == ["levels"]:
            levels = read_levels(reader)
            topology = switched_by_levels(levels) if levels else None
        else:
            topology = _read_tiers(reader)
        if "pods" in table:
            reader.add_problem(
                "pods", f"a torus beside it: {network_keys[0]} take the place of pods, with one more of so many groups,"
            )
    calibration = read_calibration(reader, chip) if "calibration" in table else None
    name = reader.text("name", file.stem)
    raise_problems(reader.problems)
    assert chip is not None
    assert topology is not None
    if math.prod(topology.levels) > MAX_DEVICES:
        raise InputError(f"{where}: {math.prod(topology.levels):,} devices; at most {MAX_DEVICES:,} are planned for")
    return MeasuredCluster(Cluster(name=name, chip=chip, topology=topology, levels=levels), calibration)


def _read_chip_table(reader: TableReader) -> tuple[Chip | None, str | None]:
    """Read the chip of a file and the name of its base, if any: `chip = "h100"`, or a table of values."""
    raw = reader.table.get("chip")
    if isinstance(raw, Mapping):
        raw = dict(raw)
        name = raw.pop("name", f"{raw.get('base', 'chip')} of {reader.where}")
        base_name = raw.pop("base", None)
    else:
        name, base_name, raw = raw, raw, {}
    try:
        if base_name is not None and not isinstance(base_name, str):
            raise InputError(f"chip: found {short_repr(base_name)}; the name of a chip or a [chip] table is required")
        if base_name is None and not raw:
            raise InputError('chip: nothing found; chip = "NAME" or a [chip] table is required')
        where = f"{reader.where}: chip"
        base = load_chip(base_name) if base_name is not None else None
        return read_chip(name, raw, where, base), base_name
    except InputError as error:
        prefix = "" if error.problems[0].startswith(reader.where) else f"{reader.where}: "
        reader.problems += [prefix + problem for problem in error.problems]
        return None, None


def _read_torus(reader: TableReader, base: TomlTable) -> Torus | None:
    """Read the torus of a file; missing bandwidth, latency and wrap rule are the catalogue chip's."""
    raw = reader.table["torus"]
    if not isinstance(raw, Mapping):
        reader.add_problem("torus", "a table with shape, bytes_per_s, hop_latency_s and wrap_rule")
        return None
    where, num_problems = f"{reader.where}: torus", len(reader.problems)
    torus = TableReader(where, {**_catalog_links(base), **raw}, _TORUS_KEYS, reader.problems)
    shape = torus.sizes("shape")
    rates = (torus.quantity("bytes_per_s"), torus.latency("hop_latency_s", optional=False))
    rule = torus.table.get("wrap_rule")
    if rule not in (*WRAP_RULES, "whole_pod") or (rule == "whole_pod" and "wrap_rule" in raw):
        torus.add_problem("wrap_rule", f"one of {', '.join(WRAP_RULES)}")
    if len(shape) > 3:
        torus.add_problem("shape", "a list of at most 3 sizes")
    twisted = torus.flag("twisted")
    if twisted and not (is_twistable(shape) and rule in ("multiple_of_4", "always")):
        torus.add_problem("twisted", f"false, or a torus that wraps of shape {TWISTABLE_SHAPES}")
    if len(reader.problems) > num_problems:
        return None
    links = {"bytes_per_s": rates[0], "hop_latency_s": rates[1], "wrap_rule": rule}
    entry = {**links, "pod": base["torus"]["pod"]} if rule == "whole_pod" else links
    return build_torus(entry, shape, twisted=twisted)


def _read_pods(reader: TableReader, torus: Torus | None, chip: Chip | None) -> Torus | Pods | None:
    """Return the torus, or a number of pods of it."""
    num_pods = reader.size("pods") if "pods" in reader.table else 1
    if num_pods == 1 or torus is None or chip is None:
        return torus
    try:
        return build_pods(torus, num_pods, chip)
    except MissingValueError as error:
        reader.problems.append(f"{reader.where}: {error}")
        return None


def _catalog_links(base: TomlTable) -> TomlTable:
    return {key: value for key, value in base.get("torus", {}).items() if key in _TORUS_KEYS}


def _read_tiers(reader: TableReader) -> Switched | None:
    """Read the tiers of a file, from the inside out."""
    raw = reader.table["tiers"]
    if not isinstance(raw, list) or not raw or not all(isinstance(tier, Mapping) for tier in raw):
        reader.add_problem("tiers", 'a list of tables such as { name = "nvlink", size = 8, bytes_per_s = "450 GB/s" }')
        return None
    num_problems, tiers = len(reader.problems), []
    for number, table in enumerate(raw):
        tier = TableReader(f"{reader.where}: tiers[{number}]", table, _TIER_KEYS, reader.problems)
        tiers.append(
            Tier(
                name=tier.text("name"), size=tier.size("size"), bytes_per_s=tier.quantity("bytes_per_s"),
                fraction=tier.fraction("fraction"), hop_latency_s=tier.latency("hop_latency_s"),
                base_latency_s=tier.latency("base_latency_s"), links=tier.size("links") if "links" in table else 0,
            )
        )  # fmt: skip
        if table.get("links") == tiers[-1].links < tiers[-1].size - 1:
            tier.add_problem("links", f"a link to each of the {tiers[-1].size - 1} others")
    return None if len(reader.problems) > num_problems else Switched(tiers=tuple(tiers))


CALIBRATION_KEYS = tuple(field.name for field in fields(Calibration))


def read_calibration(reader: TableReader, chip: Chip | None) -> Calibration | None:
    """Read the calibration of a file; None if it is wrong, and the reader then has the problems.

    Missing values are those of published runs for the file's base chip under the stack; a missing clock follows from the
    chip's power limit.
    """
    raw = reader.table["calibration"]
    if not isinstance(raw, Mapping):
        reader.add_problem("calibration", "a table with a stack and constants")
        return None
    num_problems, where = len(reader.problems), f"{reader.where}: calibration"
    table = TableReader(where, raw, (*CALIBRATION_KEYS, "synchronises"), reader.problems)
    constants = _read_constants(table)
    spread = _read_spread(table)
    clock = (
        table.number_between("clock", LOWEST_CLOCK, HIGHEST_CLOCK, "a part of the usual clock")
        if "clock" in raw
        else None
    )
    flags = {name: table.flag(name) for name in ("fused_attention", "has_capacity", "is_measured") if name in raw}
    if "synchronises" in raw:  # the name in files that were written before 2026-11-28
        flags["has_capacity"] = not table.flag("synchronises")
    source, notes, loss = table.text("source", reader.where), table.text_table("spread_notes"), _read_loss(table)
    published = _published_calibration(table, chip)
    if len(reader.problems) > num_problems or published is None or chip is None:
        return None
    return Calibration(
        stack=published.stack, constants={**published.constants, **constants}, spread={**published.spread, **spread},
        spread_notes=notes, clock=relative_clock(chip) if clock is None else clock, source=source, loss=loss or published.loss,
        **{"fused_attention": published.fused_attention, "is_measured": bool(constants), **flags},
    )  # fmt: skip


def _published_calibration(table: TableReader, chip: Chip | None) -> Calibration | None:
    """Return the calibration from published runs for the chip under the stack that the table names."""
    try:
        return published_calibration(chip.catalog_name if chip else "", get_stack(table.table.get("stack", "")))
    except (InputError, TypeError):  # no such name, or not text
        table.add_problem("stack", f"one of {', '.join(stack_names())}")
        return None


def _read_loss(table: TableReader) -> str | None:
    loss = table.table.get("loss")
    if loss is not None and loss not in LOSS_KERNELS:
        table.add_problem("loss", f"one of {', '.join(LOSS_KERNELS)}")
        return None
    return loss


def _read_constants(table: TableReader) -> dict[str, float]:
    raw = table.table.get("constants", {})
    if not isinstance(raw, Mapping):
        table.add_problem("constants", f"a table of {', '.join(CONSTANTS)}")
        return {}
    allowed = {**CONSTANTS, **BENCH_ONLY_CONSTANTS}
    reader = TableReader(f"{table.where}.constants", raw, tuple(allowed), table.problems)
    return {
        name: reader.number_between(name, allowed[name].low, allowed[name].high, allowed[name].meaning)
        for name in raw
        if name in allowed
    }


def _read_spread(table: TableReader) -> dict[str, tuple[float, float]]:
    raw = table.table.get("spread", {})
    if not isinstance(raw, Mapping):
        table.add_problem("spread", f"a table of {', '.join(MODEL_KINDS)}")
        return {}
    reader = TableReader(f"{table.where}.spread", raw, MODEL_KINDS, table.problems)
    spreads = {}
    for kind in (kind for kind in raw if kind in MODEL_KINDS):
        factors = raw[kind]
        if (
            isinstance(factors, list)
            and len(factors) == 2
            and all(_is_number(factor) for factor in factors)
            and 0 < factors[0] <= 1 <= factors[1]
        ):
            spreads[kind] = (float(factors[0]), float(factors[1]))
        else:
            reader.add_problem(kind, "two factors around 1, such as [0.9, 1.15],")
    return spreads


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e6


def calibration_entries(calibration: Calibration) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of the `[calibration]` table, the constants last."""
    last = ("spread", "spread_notes", "constants")
    for name in (
        *(key for key in CALIBRATION_KEYS if key not in last and getattr(calibration, key) is not None),
        *last,
    ):
        value = getattr(calibration, name)
        if name != "spread_notes" or value:
            yield name, {key: list(pair) for key, pair in value.items()} if name == "spread" else value


_BARE = re.compile(r"[A-Za-z0-9_-]+")


def format_cluster_toml(nominal: Cluster, calibration: Calibration, remarks: Mapping[str, str] | None = None) -> str:
    """Return the file of a cluster with its nominal rates and a calibration.

    Only values that differ from the chip's base in the catalogue are written. `remarks`: comments by the name of a constant.
    Read again, the file gives the same cluster to the last digit.
    """
    lines = [
        f"name = {format_toml_value(nominal.name)}",
        *_chip_line(nominal.chip),
        *_torus_toml_lines(nominal.topology),
    ]
    lines += [*_chip_lines(nominal.chip), *_switch_lines(nominal), "", "[calibration]"]
    for name, value in calibration_entries(calibration):
        if name != "constants":
            lines.append(f"{name} = {format_toml_value(value)}")
    lines += ["", "[calibration.constants]"]
    for name, value in calibration.constants.items():
        remark = (remarks or {}).get(name, "")
        lines.append(f"{name} = {format_toml_value(value)}" + (f"  # {remark}" if remark else ""))
    return "\n".join(lines) + "\n"


def format_toml_value(value: Any) -> str:
    """Return a value in TOML syntax."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_format_key(key)} = {format_toml_value(v)}" for key, v in value.items()) + " }"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(format_toml_value, value)) + "]"
    return repr(value)


def _format_key(text: str) -> str:
    return text if _BARE.fullmatch(text) else format_toml_value(text)


def _is_catalog_chip(chip: Chip) -> bool:
    return chip.base is not None and chip == load_chip(chip.base)


def _chip_line(chip: Chip) -> Iterator[str]:
    if _is_catalog_chip(chip):
        yield f"chip = {format_toml_value(chip.base)}"


def _chip_lines(chip: Chip) -> Iterator[str]:
    """Yield the values that differ from the catalogue's chip, or from a chip's defaults."""
    if _is_catalog_chip(chip):
        return
    base_name = chip.base
    base_chip = load_chip(base_name) if base_name is not None else None
    yield from (
        "",
        "[chip]",
        *([f"base = {format_toml_value(base_name)}"] if base_name is not None else []),
        f"name = {format_toml_value(chip.name)}",
    )
    for field in fields(Chip):
        value = getattr(chip, field.name)
        if field.name not in ("name", "base", "sources") and value != (
            getattr(base_chip, field.name) if base_chip else _default(field)
        ):
            yield f"{field.name} = {format_toml_value(value)}"
    base_sources = base_chip.sources if base_chip else {}
    yield f"sources = {format_toml_value({key: text for key, text in chip.sources.items() if base_sources.get(key) != text})}"


def _default(field: Any) -> Any:
    return None if field.default is MISSING else field.default


def _torus_toml_lines(topology: Topology) -> Iterator[str]:
    torus = topology.torus if isinstance(topology, Pods) else topology
    if isinstance(topology, Pods):
        yield f"pods = {topology.num_pods}"
    if isinstance(torus, Torus):
        yield f"torus = {format_toml_value({field.name: getattr(torus, field.name) for field in fields(torus)})}"


def _switch_lines(cluster: Cluster) -> Iterator[str]:
    """Yield the levels of a cluster, or else its tiers."""
    if cluster.levels:
        for level in cluster.levels:
            yield from (
                "",
                "[[levels]]",
                *(f"{key} = {format_toml_value(value)}" for key, value in level_entries(level)),
            )
        return
    for tier in cluster.topology.tiers if isinstance(cluster.topology, Switched) else ():
        values = {f.name: getattr(tier, f.name) for f in fields(tier) if f.name not in ("links", "reduces")}
        values |= {"links": tier.links} if tier.links else {}
        yield from ("", "[[tiers]]", *(f"{name} = {format_toml_value(value)}" for name, value in values.items()))
