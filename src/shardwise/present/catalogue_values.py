"""Entries of the catalogues as lists of values, each with its source, and those that `shardwise show` lists."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

from shardwise import verify
from shardwise.book_formulas import get_rule
from shardwise.book_formulas.named_rules import rule_values
from shardwise.hardware import (
    CONSTANTS,
    Chip,
    Pods,
    Topology,
    Torus,
    get_catalog_entry,
    get_stack,
    load_chip,
    load_cluster,
)
from shardwise.hardware.chip_units import DerivedPeak, derive_peaks, flops_per_usd, load_chip_units
from shardwise.hardware.network.torus import hop_distances
from shardwise.hardware.published_constants import constants_with_sources
from shardwise.interop import get_target
from shardwise.model import (
    DEFAULT_NUMERICS,
    Architecture,
    find_model_name,
    load_model,
    num_active_params,
    num_params,
)
from shardwise.model.optimizer_program import bytes_per_parameter
from shardwise.model.parameters_and_flops import num_mtp_params
from shardwise.present.catalogue_names import names_of
from shardwise.present.optimizer_values import optimizer_values
from shardwise.values import Payload, SourcedValue, format_quantity, get_precision, parse_quantity, to_json


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueEntries:
    """Entries of a catalogue by name, each a list of values with their sources.

    `is_listing`: entries beside one another, not one that was named. Of stacks the constants of a `chip` are among the values, of
    optimizers the bytes are those of a `precision`.
    """

    kind: str
    entries: Mapping[str, Sequence[SourcedValue]]
    is_listing: bool
    chip: str | None = None
    precision: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the entries, in the order of the catalogue."""
        return tuple(self.entries)


def find_entries(
    kind: str, text: str | None, chip: str | None = None, precision: str | None = None
) -> CatalogueEntries:
    """Return the entries of a catalogue whose names contain a text, or the one that it names; without a text all.

    Raises `InputError` for a text that no name contains.

    >>> chips = find_entries("chips", "v5")
    >>> chips.names, chips.is_listing
    (('tpu-v5e', 'tpu-v5p'), True)
    >>> find_entries("models", "Qwen/Qwen3-8B").names
    ('qwen3-8b',)
    """
    listed = _matching_names(kind, text)
    names = listed or (_exact_name(kind, text or ""),)
    return CatalogueEntries(
        kind=kind,
        entries={name: _values(kind, name, chip, precision) for name in names},
        is_listing=bool(listed),
        chip=chip,
        precision=precision,
    )


def _values(kind: str, name: str, chip: str | None, precision: str | None) -> list[SourcedValue]:
    if kind == "stacks":
        return stack_values(name, chip)
    return optimizer_values(name, precision) if kind == "optimizers" else _VALUES[kind](name)


def _matching_names(kind: str, text: str | None) -> Sequence[str]:
    """Return the names that contain a text; none where the text is itself a name."""
    names = names_of(kind)
    if text is None:
        return names
    text = text.strip().lower()
    return [] if text in names else [name for name in names if text in name]


def _exact_name(kind: str, text: str) -> str:
    """Return a name as the catalogue writes it; a path, or what is no name, as it is."""
    return (find_model_name(text) if kind == "models" else None) or text


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueRecord(Payload):
    """A value and its source; null and "" where there is no source for it."""

    value: Any
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryRecord(Payload):
    """An entry of a catalogue."""

    name: str
    values: Mapping[str, ValueRecord]


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueRecord(Payload):
    """Entries of a catalogue, each value with its source.

    >>> h100 = CatalogueEntries(kind="chips", entries={"h100": [("power_w", 700.0, "data sheet")]}, is_listing=False)
    >>> CatalogueRecord.of(h100).entries[0].values["power_w"]
    ValueRecord(value=700.0, source='data sheet')
    """

    SCHEMA = "shardwise.show/1"
    kind: str
    entries: Sequence[EntryRecord]

    @classmethod
    def of(cls, entries: CatalogueEntries) -> CatalogueRecord:
        """Return the record of entries."""
        records = [
            EntryRecord(
                name=name, values={key: ValueRecord(value=value, source=source) for key, value, source in values}
            )
            for name, values in entries.entries.items()
        ]
        return cls(kind=entries.kind, entries=records)


def chip_values(name: str) -> list[SourcedValue]:
    """Return the values of a chip and of the network that it comes with. Raises `InputError` for an unknown name."""
    entry = get_catalog_entry(name)
    chip = load_chip(name)
    return [*_chip_values(chip), *_unit_values(chip), *_network_values(entry, entry["sources"])]


def _chip_values(chip: Chip) -> Iterator[SourcedValue]:
    """Yield every value of a chip; one without a source is None (estimates take 1 for a fraction, 0 for the runtime: a bound)."""
    values = asdict(chip)
    for key in ("name", "base", "sources"):
        values.pop(key)
    for dtype, peak in values.pop("peak_flops_per_s").items():
        yield f"peak_flops_per_s.{dtype}", peak, chip.sources.get("peak_flops_per_s", "")
    for key, value in values.items():
        bound = key in ("matmul_fraction", "memory_fraction", "runtime_bytes") and key not in chip.sources
        yield key, None if bound else value, chip.sources.get(key, "")


def _unit_values(chip: Chip) -> Iterator[SourcedValue]:
    """Yield the units of a chip with their sources, the peaks that follow from them, and FLOPs per dollar."""
    units = load_chip_units(chip.catalog_name)
    if units is None:
        yield "units", None, ""
    else:
        values = asdict(units)
        sources = values.pop("sources")
        flops_per_cycle = values.pop("flops_per_cycle")
        for key, value in values.items():
            yield f"units.{key}", value, sources.get(key, sources["count"] if key == "unit" else "")
        for dtype, value in flops_per_cycle.items():
            yield f"units.flops_per_cycle.{dtype}", value, sources["flops_per_cycle"]
        for peak in derive_peaks(chip, units):
            yield from _derived_peak_values(peak)
    for dtype, flops in flops_per_usd(chip).items():
        yield f"flops_per_usd.{dtype}", flops, "the printed peak over price_usd_per_hour"


def _derived_peak_values(peak: DerivedPeak) -> Iterator[SourcedValue]:
    """Yield the peak that units and clock give and whether the printed one agrees, or the clock that the printed one implies."""
    per_cycle = f"{peak.count:,} {peak.unit} x {peak.flops_per_cycle:,.0f} FLOPs in a cycle"
    if peak.flops_per_s is None:
        if peak.implied_clock_hz is not None:
            note = f"no clock has a source; the printed peak over {per_cycle}"
            yield f"implied_clock_hz.{peak.dtype}", peak.implied_clock_hz, note
        return
    printed = "no peak is printed"
    if peak.printed is not None and peak.difference is not None:
        printed = f"the printed {format_quantity(peak.printed, 'FLOP/s', digits=4)} "
        printed += f"disagrees: {peak.difference:+.1%}" if peak.disagrees else "agrees"
    clock = format_quantity(peak.clock_hz or 0.0, "Hz", digits=4)
    yield f"derived_flops_per_s.{peak.dtype}", peak.flops_per_s, f"{per_cycle} x {clock}; {printed}"


def _network_values(
    network: Mapping[str, Any], sources: Mapping[str, str], otherwise: str = ""
) -> Iterator[SourcedValue]:
    """Yield every value of a torus or of tiers of switches; a fraction of 1 and a latency of 0 were not measured."""
    counted = dict.fromkeys(("mean_hops", "diameter"), "counted on the graph of the twisted torus, shortest ways")
    torus_sources = {**counted, **({"twisted": sources["twists"]} if "twists" in sources else {}), **sources}
    for key, value in network.get("torus", {}).items():
        number = parse_quantity(value) if key == "bytes_per_s" else value
        yield f"torus.{key}", number, torus_sources.get(key, torus_sources.get("torus", otherwise))
    for key, value in network.get("pods", {}).items():
        yield f"pods.{key}", value, sources["pods"] if key == "bytes_per_s" else otherwise
    for tier in network.get("tiers", ()):
        for key, value in tier.items():
            if key != "name" and (key, value) not in (("links", 0), ("reduces", False)):
                about = "latency" if "latency" in key else key
                source = sources.get(f"{tier['name']}_{about}", sources.get(tier["name"], otherwise))
                if (key, value) == ("fraction", 1.0) or (about, value) == ("latency", 0.0):
                    value, source = None, ""
                yield f"{tier['name']}.{key}", parse_quantity(value) if key == "bytes_per_s" else value, source


def cluster_values(text: str) -> list[SourcedValue]:
    """Return the values of a cluster, of its network and of its chip. Raises `InputError` for a text that is not a cluster."""
    cluster = load_cluster(text)
    file = text.strip() if text.strip().lower().endswith(".toml") else ""
    sources = {} if file else _network_sources(cluster.chip.name)
    links = _links(cluster.topology)
    if "pods" in links:
        sources = {**sources, "pods": _pods_source(cluster.chip)}
    values: list[SourcedValue] = [("num_devices", cluster.num_devices, file), ("chip", cluster.chip.name, file)]
    return [*values, *_network_values(links, sources, file), *_chip_values(cluster.chip)]


def _links(topology: Topology) -> dict[str, Any]:
    """Return the values of a network by part: the torus, the pods, the tiers."""
    if isinstance(topology, Pods):
        return {**_links(topology.torus), "pods": {"num_pods": topology.num_pods, "bytes_per_s": topology.bytes_per_s}}
    values = asdict(topology)
    if not isinstance(topology, Torus):
        return values
    values["wraps"] = topology.wraps
    if values.pop("twisted"):
        distances = hop_distances(topology.shape)
        values |= {"twisted": True, "mean_hops": distances.mean, "diameter": distances.diameter}
    return {"torus": values}


def _pods_source(chip: Chip) -> str:
    """Return the source of the rate between pods."""
    host = " x ".join(map(str, chip.host_shape or ()))
    return f"an equal part for each chip of a host of {host}: {chip.sources.get('dcn_bytes_per_s_per_host', '')}"


def _network_sources(chip: str) -> Mapping[str, str]:
    """Return the sources of a catalogue chip's network, or what `local:N` assumes."""
    if chip == "local":
        half = "half of a process's share of the memory bandwidth: a byte is written once and read once"
        return {"shared memory": half}
    sources: Mapping[str, str] = get_catalog_entry(chip)["sources"]
    return sources


def model_values(name: str) -> list[SourcedValue]:
    """Return every value of a model, with the numbers of its parameters. Raises `InputError` for an unknown name."""
    model = load_model(name)
    values = {name: value for name, value in asdict(model).items() if name in to_json(model)}
    source = values.pop("source")
    values.pop("name")
    for composite in ("numerics", "layer_kinds", "recurrence"):
        if isinstance(values.get(composite), Mapping):
            values |= _flatten(composite, values.pop(composite))
    parts = {f"omitted_parts.{part.name}": part.num_params or "size not known" for part in model.omitted_parts}
    values = {key: value for key, value in values.items() if key != "omitted_parts"} | parts
    counts = {"num_params": num_params(model), "num_active_params": num_active_params(model)}
    if model.num_predict_layers:  # in training only, and apart from what a model card counts
        counts["num_predict_params"] = num_mtp_params(model)
    counted = [(name, count, "counted from the program") for name, count in counts.items()]
    return [*counted, *((k, v, source) for k, v in values.items())]


def compare_entry(path: str) -> CatalogueEntries:
    """Return the model of a config.json with the model that `transformers` builds of it beside it. Raises `InputError`."""
    comparison = verify.compare_with_transformers(path)
    source = f"transformers {comparison.version}, {comparison.model_class}"
    values: list[SourcedValue] = [
        ("transformers.num_params", comparison.num_params, source),
        (
            "transformers.first_difference",
            comparison.first_difference or "none: all parameters are accounted for",
            source,
        ),
    ]
    return CatalogueEntries(kind="models", entries={path: [*model_values(path), *values]}, is_listing=False)


def plain_values() -> dict[str, Any]:
    """Return the defaults of a block by name: the values of most models."""
    return {field.name: field.default for field in fields(Architecture)} | _flatten(
        "numerics", asdict(DEFAULT_NUMERICS)
    )


def _flatten(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a composite value by dotted name."""
    parts: dict[str, Any] = {}
    for key, value in values.items():
        parts |= _flatten(f"{name}.{key}", value) if isinstance(value, Mapping) else {f"{name}.{key}": value}
    return parts


def precision_values(name: str) -> list[SourcedValue]:
    """Return every value of a recipe with its source. Raises `InputError` for an unknown name."""
    recipe = get_precision(name)
    values = asdict(recipe)
    source = values.pop("source")
    values.pop("name")
    return [
        ("bytes_per_parameter", bytes_per_parameter(recipe), source),
        *((k, "none" if v is None else v, source) for k, v in values.items()),
    ]


STACK_FIELDS = "hardware/catalog/stacks.toml"


class StackConstant(NamedTuple):
    """A constant of a stack or of a chip, with the values one standard deviation below and above it."""

    owner: str
    name: str
    value: float
    low: float
    high: float
    meaning: str
    source: str


def stack_constants(stack: str, chip: str | None) -> Iterator[StackConstant]:
    """Yield the four constants of a stack, and with a chip its eight."""
    constants = constants_with_sources(load_chip(chip).name if chip else "", get_stack(stack))
    for owner in ("stack", "chip") if chip else ("stack",):
        for name, constant in CONSTANTS.items():
            if constant.owner == owner:
                value, deviation, source = constants[name]
                unbounded = constant.to_unbounded(value)
                low, high = (float(constant.from_unbounded(unbounded + side * deviation)) for side in (-1, 1))
                yield StackConstant(owner, name, value, low, high, constant.meaning, source)


def stack_values(name: str, chip: str | None = None) -> list[SourcedValue]:
    """Return what a stack is and supports, and its constants, each with its meaning and uncertainty."""
    stack = get_stack(name)
    facts = ("kind", "unfused_attention", "overlaps_tp", "casts", "weight_casts")
    values: list[SourcedValue] = [(fact, getattr(stack, fact), STACK_FIELDS) for fact in facts]
    values.append(("precision", stack.precision, stack.precision_source or STACK_FIELDS))
    values += [
        (f"runs.{key}", value if isinstance(value, bool) else list(value), stack.abilities.source)
        for key, value in stack.abilities.items()
    ]
    for constant in stack_constants(name, chip):
        interval = f"{constant.low:.3g} to {constant.high:.3g} within a standard deviation"
        source = f"{constant.meaning}; {interval}; {constant.source}"
        values.append((f"{constant.owner}.{constant.name}", constant.value, source))
    return values


TARGET_FIELDS = "interop/frameworks/options"


def target_values(name: str) -> list[SourcedValue]:
    """Return the release that a target is written for, the stack that predicts it, and the options of the release."""
    target = get_target(name)
    return [
        ("title", target.title, target.source), ("version", target.version, target.source),
        ("stack", target.stack, STACK_FIELDS), ("says_model", target.includes_model, target.source),
        ("ranks", list(target.order or ["as the plan places them"]), target.source),
        ("num_options", len(target.options), f"{TARGET_FIELDS}/{target.options_file}.csv"),
    ]  # fmt: skip


def _rule_values(name: str) -> list[SourcedValue]:
    return rule_values(get_rule(name))


_VALUES: Mapping[str, Callable[[str], list[SourcedValue]]] = {
    "models": model_values, "chips": chip_values, "clusters": cluster_values, "precisions": precision_values,
    "targets": target_values, "rules": _rule_values,
}  # fmt: skip
