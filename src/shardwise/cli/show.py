"""`shardwise show`: what the catalogues have, each value with its source."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.cluster.chip import Chip

SCHEMA = "shardwise.show/1"
Value = tuple[str, Any, str]  # name, value, source; None and "": there is no source for it
Row = tuple[str, ...]
UNITS = {
    "flops_per_s": "FLOP/s",
    "bytes_per_s": "B/s",
    "bytes": "B",
    "usd_per_hour": "USD/h",
}  # by a part of a value's name
EPILOG = """examples:
  shardwise show chips
  shardwise show chips h200
  shardwise show clusters tpu-v5p:4x4x8
  shardwise show clusters my-cluster.toml --json"""


def configure(verbs: Any) -> None:
    """Declare the verb."""
    parser = verbs.add_parser(
        "show", help="list models, chips, clusters and precisions; with a name, every value and its source",
        description="List what the catalogues have. With a name: every value of it with its source.", epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("kind", choices=("models", "chips", "clusters", "precisions"), help="which catalogue")
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="one entry; of clusters a shorthand or the path of a .toml file"
    )
    parser.add_argument("--json", action="store_true", help="print the payload as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> str:
    """The catalogue or one entry of it, as text or as JSON."""
    kinds: Mapping[str, tuple[Callable[[], tuple[str, ...]], Callable[[str], list[Value]], Callable[[], str]]] = {
        "models": (_model_names, _model, _models), "chips": (_chip_names, _chip, _chips),
        "clusters": (_cluster_names, _cluster, _clusters), "precisions": (_precision_names, _precision, _precisions),
    }  # fmt: skip
    names, values_of, summary = kinds[arguments.kind]
    if arguments.json:
        shown = [arguments.name] if arguments.name else names()
        return json.dumps(
            {"schema": SCHEMA, "kind": arguments.kind, "entries": [_payload(n, values_of(n)) for n in shown]}, indent=2
        )
    if not arguments.name:
        return summary()
    values = values_of(arguments.name)
    return _model_entry(arguments.name, values) if arguments.kind == "models" else _entry(arguments.name, values)


def _payload(name: str, values: Sequence[Value]) -> dict[str, Any]:
    return {"name": name, "values": {key: {"value": value, "source": source} for key, value, source in values}}


def _entry(name: str, values: Sequence[Value]) -> str:
    rows = [
        (f"  {key}", "no source" if value is None and not source else _shown(key, value), source)
        for key, value, source in values
    ]
    return "\n".join([name, table(rows)])


def _model_entry(name: str, values: Sequence[Value]) -> str:
    """A model without the fields that are as in a plain block: most models have few that are not."""
    from shardwise.model.architecture import Architecture

    plain = {field.name: field.default for field in fields(Architecture)}
    told = [value for value in values if value[0] not in plain or value[1] != plain[value[0]]]
    return f"{_entry(name, told)}\n  the other fields are as in a plain block; --json prints them"


def table(rows: Sequence[Row], *, right: Sequence[int] = ()) -> str:
    """Rows in columns, as wide as their widest cell; those in `right` end at the same place."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = (
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def _shown(key: str, value: Any) -> str:
    """A value in the unit that its name says."""
    from shardwise.units import format_count, format_quantity, format_seconds

    if value is None or value == () or value == []:
        return "none"
    if isinstance(value, (list, tuple)):
        return ("x" if isinstance(value[0], int) and not isinstance(value[0], bool) else ", ").join(
            _shown("", part) for part in value
        )
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if key.endswith("num_params") and isinstance(value, float):
        return format_count(value)
    if key.endswith("_w"):
        return f"{value:g} W"
    for part, unit in UNITS.items():
        if part in key:
            return format_quantity(float(value), unit, digits=4)
    if key.endswith("latency_s"):
        return format_seconds(float(value))
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _model_names() -> tuple[str, ...]:
    from shardwise.model.load import model_names

    return model_names()


def _model(name: str) -> list[Value]:
    from shardwise.model.counts import num_active_params, num_params
    from shardwise.model.load import load_model

    model = load_model(name)
    values = asdict(model)
    source = values.pop("source")
    values.pop("name")
    counts = {"num_params": num_params(model), "num_active_params": num_active_params(model)}
    counted = [(name, count, "counted from the program") for name, count in counts.items()]
    return [*counted, *((k, v, source) for k, v in values.items())]


def _models() -> str:
    from shardwise.model.counts import num_active_params, num_params
    from shardwise.model.load import load_model
    from shardwise.units import format_count

    rows: list[Row] = [
        ("model", "parameters", "active", "experts", "layers", "d_model", "d_ff", "heads", "kv heads", "vocabulary")
    ]
    for name in _model_names():
        model = load_model(name)
        sizes = (model.num_layers, model.d_model, model.d_ff, model.num_heads, model.num_kv_heads, model.vocab_size)
        active = format_count(num_active_params(model)) if model.num_experts else "-"
        experts = f"{model.experts_per_token} of {model.num_experts}" if model.num_experts else "-"
        rows.append((name, format_count(num_params(model)), active, experts, *map(str, sizes)))
    return table(rows, right=range(1, 10))


def _chip_names() -> tuple[str, ...]:
    from shardwise.cluster.chips import chip_names

    return chip_names()


def _chip(name: str) -> list[Value]:
    from shardwise.cluster.chips import catalogue_entry, load_chip

    entry = catalogue_entry(name)
    return [*_chip_values(load_chip(name)), *_network_values(entry, entry["sources"])]


def _chip_values(chip: Chip) -> Iterator[Value]:
    """Every value of a chip; what has no source is None (estimates take 1 for a fraction and 0 for the runtime: a bound)."""
    values = asdict(chip)
    for key in ("name", "sources"):
        values.pop(key)
    for dtype, peak in values.pop("peak_flops_per_s").items():
        yield f"peak_flops_per_s.{dtype}", peak, chip.sources.get("peak_flops_per_s", "")
    for key, value in values.items():
        bound = key in ("matmul_fraction", "memory_fraction", "runtime_bytes") and key not in chip.sources
        yield key, None if bound else value, chip.sources.get(key, "")


def _network_values(network: Mapping[str, Any], sources: Mapping[str, str], otherwise: str = "") -> Iterator[Value]:
    """Every value of a torus or of tiers of switches; a fraction of 1 and a latency of 0 were not measured."""
    from shardwise.units import parse_quantity

    for key, value in network.get("torus", {}).items():
        number = parse_quantity(value) if key == "bytes_per_s" else value
        yield f"torus.{key}", number, sources.get(key, sources.get("torus", otherwise))
    for tier in network.get("tiers", ()):
        for key, value in tier.items():
            if key != "name":
                about = "latency" if "latency" in key else key
                source = sources.get(f"{tier['name']}_{about}", sources.get(tier["name"], otherwise))
                if (key, value) == ("fraction", 1.0) or (about, value) == ("latency", 0.0):
                    value, source = None, ""
                yield f"{tier['name']}.{key}", parse_quantity(value) if key == "bytes_per_s" else value, source


def _chips() -> str:
    from shardwise.cluster.chips import load_chip

    rows: list[Row] = [("chip", "vendor", "bf16", "fp8", "memory", "bandwidth", "matmul", "power", "per host")]
    for name in _chip_names():
        chip = load_chip(name)
        peaks = [
            _shown("flops_per_s", chip.peak_flops_per_s[d]) if d in chip.peak_flops_per_s else "-"
            for d in ("bf16", "fp8")
        ]
        measured = f"{chip.matmul_fraction:.0%}" if "matmul_fraction" in chip.sources else "-"
        rows.append((
            name, chip.vendor, *peaks, _shown("_bytes", chip.memory_bytes), _shown("_bytes_per_s", chip.memory_bytes_per_s),
            measured, f"{chip.power_w:g} W" if chip.power_w else "-", str(chip.devices_per_host or "-"),
        ))  # fmt: skip
    note = "Dense peaks; matmul: what the best shapes reach of the bf16 peak. A dash: no source, or no such format."
    return table(rows, right=range(2, 9)) + f"\n\n{note}"


def _cluster_names() -> tuple[str, ...]:
    return (*(form for _, forms in _known_clusters() for form in forms), "local:4")


def _known_clusters() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each chip with the shorthands of one host or node and of the largest that has one shape."""
    from shardwise.cluster.chips import catalogue_entry

    for name in _chip_names():
        entry = catalogue_entry(name)
        if "torus" in entry:
            shapes = [entry["host_shape"], *([entry["torus"]["pod"]] if "pod" in entry["torus"] else [])]
        else:
            sized = [tier["size"] for tier in entry["tiers"] if "size" in tier]
            shapes = [sized] if sized else [[1]]
            shapes += [[8 * shapes[0][0]]] if len(entry["tiers"]) > len(sized) else []
        yield name, tuple(f"{name}:{'x'.join(map(str, shape))}" for shape in shapes)


def _cluster(text: str) -> list[Value]:
    from shardwise.cluster.load import load_cluster
    from shardwise.cluster.topology import Torus

    cluster = load_cluster(text)
    own = text.strip() if text.strip().lower().endswith(".toml") else ""
    sources = {} if own else _network_sources(cluster.chip.name)
    links = asdict(cluster.topology)
    if isinstance(cluster.topology, Torus):
        links = {"torus": {**links, "wraps": cluster.topology.wraps}}
    values: list[Value] = [("num_devices", cluster.num_devices, own), ("chip", cluster.chip.name, own)]
    return [*values, *_network_values(links, sources, own), *_chip_values(cluster.chip)]


def _network_sources(chip: str) -> Mapping[str, str]:
    """Sources of a catalogue chip's network; what `local:N` assumes of its own."""
    from shardwise.cluster.chips import catalogue_entry

    if chip == "local":
        half = "half of a process's share of the memory bandwidth: a byte is written once and read once"
        return {"shared memory": half}
    sources: Mapping[str, str] = catalogue_entry(chip)["sources"]
    return sources


def _clusters() -> str:
    from shardwise.cluster.load import load_cluster

    rows: list[Row] = [("cluster", "devices", "network")]
    for form in _cluster_names():
        cluster = load_cluster(form)
        rows.append((form, f"{cluster.num_devices:,}", _network(cluster.topology)))
    forms = (
        "CHIP:COUNT  devices behind switches: one node or less, or whole nodes (h100:512)\n"
        "CHIP:SHAPE  a slice of a torus (tpu-v5p:4x4x8)\n"
        "local:N     N processes that share one host\n"
        "FILE.toml   a chip and a network of one's own: docs/extending.md"
    )
    return f"{forms}\n\n{table(rows, right=(1,))}"


def _network(network: Any) -> str:
    """A network in a few words."""
    from shardwise.cluster.topology import Torus

    if isinstance(network, Torus):
        kinds = " x ".join(
            f"{'ring' if wraps else 'line'} of {size}" for size, wraps in zip(network.shape, network.wraps, strict=True)
        )
        return f"{kinds}, links of {_shown('bytes_per_s', network.bytes_per_s)}"
    return (
        " x ".join(
            f"{tier.name} {tier.size} ({_shown('bytes_per_s', tier.bytes_per_s)})"
            for tier in network.tiers
            if tier.size > 1
        )
        or "one device"
    )


def _precision_names() -> tuple[str, ...]:
    from shardwise.job import PRECISIONS

    return tuple(PRECISIONS)


def _precision(name: str) -> list[Value]:
    from shardwise.job import precision_named

    recipe = precision_named(name)
    values = asdict(recipe)
    source = values.pop("source")
    values.pop("name")
    return [
        ("bytes_per_parameter", recipe.bytes_per_parameter, source),
        *((k, v or "none", source) for k, v in values.items()),
    ]


def _precisions() -> str:
    from shardwise.job import PRECISIONS

    rows: list[Row] = [
        ("precision", "bytes/parameter", "weights", "gradients", "master", "moments", "activations", "source")
    ]
    for name, recipe in PRECISIONS.items():
        formats = (recipe.weights, recipe.gradients, recipe.master or "-", recipe.moments, recipe.activations)
        rows.append((name, f"{recipe.bytes_per_parameter:g}", *formats, recipe.source))
    return table(rows, right=(1,))
