"""Chips and clusters by name or from a TOML file; adding a chip touches one data file (docs/extending.md)."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import lru_cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from shardwise.cluster.chip import MOST, OPTIONAL, Chip
from shardwise.cluster.cluster import MOST_DEVICES, Cluster, nearest, parse_shorthand, spread
from shardwise.cluster.topology import Switched, Tier, Topology, Torus
from shardwise.dtypes import BYTES_PER_ELEMENT
from shardwise.errors import InputError, MissingValueError, require
from shardwise.units import parse_quantity

Entry = Mapping[str, Any]
CATALOGUE: Traversable = resources.files("shardwise.cluster").joinpath("catalog")
WRAP_RULES = ("multiple_of_4", "only_16", "always", "never")
_CHIP_KEYS = tuple(f.name for f in fields(Chip) if f.name != "name")
_TIER_KEYS = ("name", "size", "bytes_per_s", "fraction", "hop_latency_s", "base_latency_s")
_TORUS_KEYS = ("shape", "bytes_per_s", "hop_latency_s", "wrap_rule")


@lru_cache(maxsize=1)
def _catalogue() -> Mapping[str, Entry]:
    """Every chip's table, with the names of its sources replaced by the sources."""
    entries: dict[str, Entry] = {}
    for file in sorted(CATALOGUE.iterdir(), key=lambda f: f.name):
        if file.name.endswith(".toml"):
            tables = tomllib.loads(file.read_text(encoding="utf-8"))
            known = tables.pop("sources")
            for name, table in tables.items():
                entries[name] = {**table, "sources": {field: known[key] for field, key in table["sources"].items()}}
    return entries


def chip_names() -> tuple[str, ...]:
    """Names of the chips in the catalogue."""
    return tuple(_catalogue())


def catalogue_entry(name: str) -> Entry:
    """A chip's table as the catalogue has it. Raises `InputError` that lists the names."""
    if name not in _catalogue():
        raise InputError(f"chip: found {name!r}; the catalogue has {', '.join(chip_names())}")
    return _catalogue()[name]


def load_chip(name: str) -> Chip:
    """A chip of the catalogue by name. Raises `InputError` that lists the names."""
    entry = catalogue_entry(name)
    return read_chip(name, {key: entry[key] for key in entry if key not in ("torus", "tiers")}, f"chip {name}")


def load_cluster(text: str) -> Cluster:
    """A cluster from its shorthand (`tpu-v5p:16x20x28`, `h100:512`, `local:4`) or its own file (`my-cluster.toml`).

    `local:N` is N processes that share the host of the catalogue's `cpu`. Raises `InputError`.
    """
    if text.strip().lower().endswith(".toml"):
        return read_cluster(text.strip())
    name, shape = parse_shorthand(text)
    if name == "local":
        return _local(text, shape)
    entry = catalogue_entry(name)
    build = _torus if "torus" in entry else _switched
    return Cluster(name=text.strip().lower(), chip=load_chip(name), topology=build(name, entry, shape))


def topology_of_shape(name: str, shape: tuple[int, ...]) -> Topology:
    """The network that a bare chip's devices would form: a torus of this shape, or switches over so many devices.

    A torus of any shape is given, whether or not the vendor sells it. Raises `InputError` for an unknown chip.
    """
    entry = catalogue_entry(name)
    if "torus" in entry:
        return _links_of(entry["torus"], shape)
    return _switched(name, entry, (math.prod(shape),))


def _torus(name: str, entry: Entry, shape: tuple[int, ...]) -> Topology:
    torus = entry["torus"]
    pod = sorted(torus.get("pod", ()))
    most = torus.get("pod_chips", math.prod(pod))
    if len(shape) != torus["num_axes"]:
        example = "x".join(map(str, torus.get("pod", (4,) * torus["num_axes"])))
        raise InputError(
            f"cluster: {name} is a torus of {torus['num_axes']} axes; a shape such as {name}:{example} is required"
        )
    if math.prod(shape) > most or any(size > room for size, room in zip(sorted(shape), pod, strict=False)):
        whole = f", {'x'.join(map(str, torus['pod']))} ({most} chips)" if pod else f" of {most} chips"
        raise InputError(f"cluster: {name}:{'x'.join(map(str, shape))} is larger than a pod{whole}")
    return _links_of(torus, shape)


def _links_of(torus: Entry, shape: tuple[int, ...]) -> Torus:
    """The torus of a shape. `whole_pod`: the whole pod wraps, a smaller slice does not."""
    rule = torus["wrap_rule"]
    if rule == "whole_pod":
        rule = "always" if sorted(shape) == sorted(torus["pod"]) else "never"
    return Torus(
        shape=shape, bytes_per_s=parse_quantity(torus["bytes_per_s"]), hop_latency_s=torus["hop_latency_s"], wrap_rule=rule
    )  # fmt: skip


def _switched(name: str, entry: Entry, shape: tuple[int, ...]) -> Topology:
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
    sizes = spread(count, groups, host)
    if sizes is None:
        low, high = nearest(count, groups, host)
        parts = "" if host == groups[0] else f" or equal parts of them, in hosts of {host}"
        raise InputError(
            f"cluster: {name} comes in nodes of {groups[0]}{parts}; {count} is no multiple of it, "
            f"the nearest counts are {low} and {high}"
        )
    return Switched(tiers=tuple(_tier(tier, size) for tier, size in zip(tiers, sizes, strict=True)))


def _tier(entry: Entry, size: int) -> Tier:
    """A tier; without a measurement the fraction is 1 and latencies are 0, and times over it are a bound."""
    return Tier(
        name=entry["name"], size=size, bytes_per_s=parse_quantity(entry["bytes_per_s"]),
        fraction=entry.get("fraction", 1.0), hop_latency_s=entry.get("hop_latency_s", 0.0),
        base_latency_s=entry.get("base_latency_s", 0.0),
    )  # fmt: skip


def _local(text: str, shape: tuple[int, ...]) -> Cluster:
    """Processes that share one host: each has an equal part of it, and what one sends another reads from memory.

    Assumes: every byte sent is written once and read once, so half of the memory's bandwidth; no latency. A bound.
    """
    if len(shape) != 1:
        raise InputError(f"cluster: found {text!r}; local:N with a number of processes is required, such as local:4")
    host, count = load_chip("cpu"), shape[0]
    shared = f"an equal part, 1/{count}, of the catalogue's cpu: "
    chip = replace(
        host, name="local", peak_flops_per_s={dtype: peak / count for dtype, peak in host.peak_flops_per_s.items()},
        memory_bytes=host.memory_bytes / count, memory_bytes_per_s=host.memory_bytes_per_s / count,
        host_shape=(count,), sources={key: shared + source for key, source in host.sources.items()},
    )  # fmt: skip
    tier = Tier(
        name="shared memory", size=count, bytes_per_s=chip.memory_bytes_per_s / 2, fraction=1.0, hop_latency_s=0.0
    )
    return Cluster(name=text.strip().lower(), chip=chip, topology=Switched(tiers=(tier,)))


def read_cluster(path: str) -> Cluster:
    """A cluster of one's own from a TOML file: a chip, and either a torus or tiers. Raises `InputError` with all problems."""
    file = Path(path)
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"cluster: cannot read {path}: {error.strerror}; the path of a .toml file is required"
        ) from None
    except (ValueError, RecursionError) as error:  # not UTF-8, not TOML, a null byte in the path, nested too deeply
        raise InputError(f"cluster: {path} is no TOML: {error}") from None
    where = file.name
    reader = _Reader(where, table, ("name", "chip", "torus", "tiers"))
    chip, base = _chip_of(reader)
    has = [key for key in ("torus", "tiers") if key in table]
    if len(has) != 1:
        found = "both" if has else "neither"
        reader.problems.append(f"{where}: found {found} of torus and tiers; one of them is required")
    topology: Topology | None = None
    if has == ["torus"]:
        topology = _own_torus(reader, base)
    elif has == ["tiers"]:
        topology = _own_tiers(reader)
    name = reader.text("name", file.stem)
    require(reader.problems)
    assert chip is not None
    assert topology is not None
    if math.prod(topology.levels) > MOST_DEVICES:
        raise InputError(f"{where}: {math.prod(topology.levels):,} devices; at most {MOST_DEVICES:,} are planned for")
    return Cluster(name=name, chip=chip, topology=topology)


def _chip_of(reader: _Reader) -> tuple[Chip | None, Entry]:
    """The chip of a file and the catalogue's table it starts from, if any: `chip = "h100"`, or a table of values."""
    given = reader.table.get("chip")
    if isinstance(given, Mapping):
        given = dict(given)
        name = given.pop("name", f"{given.get('base', 'chip')} of {reader.where}")
        base_name = given.pop("base", None)
    else:
        name, base_name, given = given, given, {}
    try:
        if base_name is not None and not isinstance(base_name, str):
            raise InputError(f"chip: found {_shown(base_name)}; the name of a chip or a [chip] table is required")
        if base_name is None and not given:
            raise InputError('chip: nothing found; chip = "NAME" or a [chip] table is required')
        base = catalogue_entry(base_name) if base_name is not None else {}
        where = f"{reader.where}: chip"
        start = load_chip(base_name) if base_name is not None else None
        return read_chip(name, given, where, start), base
    except InputError as error:
        prefix = "" if error.problems[0].startswith(reader.where) else f"{reader.where}: "
        reader.problems += [prefix + problem for problem in error.problems]
        return None, {}


def read_chip(name: Any, table: Entry, where: str, base: Chip | None = None) -> Chip:
    """A chip from a table of its fields; what is left out is the base's. Raises `InputError` with all problems."""
    reader = _Reader(where, table, _CHIP_KEYS)
    if not isinstance(name, str):
        reader.problems.append(f"{where}: name: found {_shown(name)}; a text is required")
    readers: dict[str, Callable[[str], Any]] = {
        "host_shape": reader.sizes, "matrix_unit": reader.size, "price_date": reader.text,
        "matmul_fraction": reader.fraction, "memory_fraction": reader.fraction, "runtime_bytes": reader.at_least_0,
    }  # fmt: skip
    values: dict[str, Any] = {}
    for key in ("memory_bytes", "memory_bytes_per_s", "runtime_bytes", *OPTIONAL, "matmul_fraction", "memory_fraction"):
        if key in table or (base is None and key in ("memory_bytes", "memory_bytes_per_s")):
            values[key] = readers.get(key, reader.quantity)(key)
    if base is None:
        values["vendor"] = reader.text("vendor", "")
    if "peak_flops_per_s" in table or base is None:
        peaks = _peaks(reader)
        values["peak_flops_per_s"] = {**base.peak_flops_per_s, **peaks} if base else peaks
    sources = {key: where.removesuffix(": chip") for key in values if key != "vendor"}
    sources |= reader.texts("sources")
    require(reader.problems)
    try:
        if base is None:
            return Chip(name=name, sources=sources, **values)
        return replace(base, name=name, sources={**base.sources, **sources}, **values)
    except InputError as error:
        raise InputError(*(f"{where}: {problem.partition(': ')[2]}" for problem in error.problems)) from None


def _peaks(reader: _Reader) -> dict[str, float]:
    given = reader.table.get("peak_flops_per_s")
    if not isinstance(given, Mapping):
        reader.wrong("peak_flops_per_s", 'dense peaks by number format, such as { bf16 = "989 TFLOP/s" }')
        return {}
    peaks = _Reader(f"{reader.where}: peak_flops_per_s", given, tuple(BYTES_PER_ELEMENT), reader.problems)
    return {dtype: peaks.quantity(dtype) for dtype in given if dtype in BYTES_PER_ELEMENT}


def _own_torus(reader: _Reader, base: Entry) -> Torus | None:
    """The torus of a file; bandwidth, latency and wrap rule are the catalogue chip's where they are left out."""
    given = reader.table["torus"]
    if not isinstance(given, Mapping):
        reader.wrong("torus", "a table with shape, bytes_per_s, hop_latency_s and wrap_rule")
        return None
    where, before = f"{reader.where}: torus", len(reader.problems)
    torus = _Reader(where, {**_own_links(base), **given}, _TORUS_KEYS, reader.problems)
    shape = torus.sizes("shape")
    values = (torus.quantity("bytes_per_s"), torus.latency("hop_latency_s", optional=False))
    rule = torus.table.get("wrap_rule")
    if rule not in (*WRAP_RULES, "whole_pod") or (rule == "whole_pod" and "wrap_rule" in given):
        torus.wrong("wrap_rule", f"one of {', '.join(WRAP_RULES)}")
    if len(shape) > 3:
        torus.wrong("shape", "a list of at most 3 sizes")
    if len(reader.problems) > before:
        return None
    links = {"bytes_per_s": values[0], "hop_latency_s": values[1], "wrap_rule": rule}
    return _links_of({**links, "pod": base["torus"]["pod"]} if rule == "whole_pod" else links, shape)


def _own_links(base: Entry) -> Entry:
    return {key: value for key, value in base.get("torus", {}).items() if key in _TORUS_KEYS}


def _own_tiers(reader: _Reader) -> Switched | None:
    """The tiers of a file, from the inside out."""
    given = reader.table["tiers"]
    if not isinstance(given, list) or not given or not all(isinstance(tier, Mapping) for tier in given):
        reader.wrong("tiers", 'a list of tables such as { name = "nvlink", size = 8, bytes_per_s = "450 GB/s" }')
        return None
    before, tiers = len(reader.problems), []
    for number, table in enumerate(given):
        tier = _Reader(f"{reader.where}: tiers[{number}]", table, _TIER_KEYS, reader.problems)
        tiers.append(
            Tier(
                name=tier.text("name"), size=tier.size("size"), bytes_per_s=tier.quantity("bytes_per_s"),
                fraction=tier.fraction("fraction"), hop_latency_s=tier.latency("hop_latency_s"),
                base_latency_s=tier.latency("base_latency_s"),
            )
        )  # fmt: skip
    return None if len(reader.problems) > before else Switched(tiers=tuple(tiers))


class _Reader:
    """Reads the values of one table of a file and collects what is wrong with them.

    What is wrong is read as some other value of its kind; whoever reads looks at `problems` before use.
    """

    def __init__(self, where: str, table: Entry, keys: Sequence[str], problems: list[str] | None = None) -> None:
        self.where, self.table = where, table
        self.problems = [] if problems is None else problems
        for key in table:
            if key not in keys:
                self.problems.append(f"{where}: found {_shown(key)}; the keys are {', '.join(keys)}")

    def wrong(self, key: str, required: str) -> None:
        """Note that a value is not what is required."""
        found = f"found {_shown(self.table[key])}" if key in self.table else "missing"
        self.problems.append(f"{self.where}: {key}: {found}; {required} is required")

    def quantity(self, key: str) -> float:
        """A number or a text such as "96 GB", above 0."""
        return self._number(key, lambda value: 0 < value <= MOST, 'a number above 0, such as 8e10 or "80 GB",')

    def at_least_0(self, key: str) -> float:
        """A number or a text such as "1.5 GB", or 0."""
        return self._number(key, lambda value: 0 <= value <= MOST, 'a number of at least 0, such as 1.5e9 or "1.5 GB",')

    def fraction(self, key: str) -> float:
        """A part of a peak; 1 when it is left out."""
        return (
            self._number(key, lambda value: 0 < value <= 1, "a number above 0 and at most 1")
            if key in self.table
            else 1.0
        )

    def latency(self, key: str, *, optional: bool = True) -> float:
        """Seconds; 0 when they are left out, unless they must not be."""
        if optional and key not in self.table:
            return 0.0
        return self._number(key, lambda value: 0 <= value <= 1, "a number of seconds from 0 to 1, such as 2.7e-6,")

    def _number(self, key: str, allowed: Callable[[float], bool], required: str) -> float:
        try:
            value = parse_quantity(self.table[key])
        except (KeyError, InputError, OverflowError, ValueError):  # missing, no number, or one of too many digits
            value = math.nan
        if not allowed(value):
            self.wrong(key, required)
        return value

    def size(self, key: str) -> int:
        """A whole number of at least 1."""
        return (self.sizes(key, (self.table[key],)) if key in self.table else self.sizes(key))[0]

    def sizes(self, key: str, given: Any = None) -> tuple[int, ...]:
        """A list of whole numbers of at least 1."""
        alone = given is not None
        given = given if alone else self.table.get(key)
        if not isinstance(given, (list, tuple)) or not given or not all(_is_size(size) for size in given):
            self.wrong(key, f"{'a whole number' if alone else 'a list of whole numbers'} of 1 to {MOST_DEVICES:,}")
            return (1,)
        return tuple(given)

    def text(self, key: str, default: str | None = None) -> str:
        """A text that is not empty."""
        value = self.table.get(key, default)
        if not isinstance(value, str) or (not value and value is not default):
            self.wrong(key, "a text")
            return ""
        return value

    def texts(self, key: str) -> dict[str, str]:
        """A table of texts; empty when it is left out."""
        value = self.table.get(key, {})
        if not isinstance(value, Mapping) or not all(isinstance(text, str) for text in value.values()):
            self.wrong(key, "a table of texts")
            return {}
        return dict(value)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST_DEVICES


def _shown(value: Any) -> str:
    """A value in an error: short, on one line."""
    try:
        text = repr(value)
    except ValueError:  # Python prints no integer of more than 4,300 digits
        text = "a number of very many digits"
    return text if len(text) <= 60 else f"{text[:57]}..."
