"""The part of `show` about chips, clusters and their networks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardwise.present.rendering.report import Report, Row, Section, Table
from shardwise.present.reports.catalogue import shown


def chip_names() -> tuple[str, ...]:
    from shardwise.hardware import chip_names as names

    return names()


def chips_table(names: Sequence[str]) -> Report:
    from shardwise.hardware import load_chip

    rows: list[Row] = [("chip", "vendor", "bf16", "fp8", "memory", "bandwidth", "matmul", "power", "per host", "USD/h")]
    for name in names:
        chip = load_chip(name)
        peaks = [
            shown("flops_per_s", chip.peak_flops_per_s[d]) if d in chip.peak_flops_per_s else "-"
            for d in ("bf16", "fp8")
        ]
        measured = f"{chip.matmul_fraction:.0%}" if "matmul_fraction" in chip.sources else "-"
        rows.append((
            name, chip.vendor, *peaks, shown("_bytes", chip.memory_bytes), shown("_bytes_per_s", chip.memory_bytes_per_s),
            measured, f"{chip.power_w:g} W" if chip.power_w else "-", str(chip.devices_per_host or "-"),
            f"{chip.price_usd_per_hour:g}" if chip.price_usd_per_hour else "-",
        ))  # fmt: skip
    notes = [
        "Dense peaks; matmul: what the best shapes reach of the bf16 peak; USD/h: of one chip,",
        "of the day that `show chips NAME` gives with its source. A dash: no source, or no such format.",
    ]
    return [Section([Table(rows=tuple(rows), right=range(2, 10))]), Section(notes)]


def cluster_names() -> tuple[str, ...]:
    return (*(form for _, forms in _known_clusters() for form in forms), "local:4")


def _known_clusters() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each chip with the shorthands of one host or node and of the largest that has one shape."""
    from shardwise.hardware import get_catalog_entry

    for name in chip_names():
        entry = get_catalog_entry(name)
        if "torus" in entry:
            pod = [entry["torus"]["pod"]] if "pod" in entry["torus"] else []
            yield name, (*_forms(name, [entry["host_shape"], *pod]), *_special_forms(name, entry))
        else:
            sized = [tier["size"] for tier in entry["tiers"] if "size" in tier]
            shapes = [sized] if sized else [[1]]
            shapes += [[8 * shapes[0][0]]] if len(entry["tiers"]) > len(sized) else []
            yield name, _forms(name, shapes)


def _forms(name: str, shapes: Sequence[Sequence[int]]) -> tuple[str, ...]:
    return tuple(f"{name}:{'x'.join(map(str, shape))}" for shape in shapes)


def _special_forms(name: str, entry: Mapping[str, Any]) -> Iterator[str]:
    """The smallest twisted slice, and two whole pods, where the chip has them."""
    torus = entry["torus"]
    if torus.get("twists"):
        yield f"{name}:4x4x8_twisted"
    if "pod" in torus and "dcn_bytes_per_s_per_host" in entry:
        yield f"{_forms(name, [torus['pod']])[0]}*2"


FORMS: tuple[Row, ...] = (
    ("CHIP:COUNT", "devices behind switches: one node or less, or whole nodes (h100:512)"),
    ("CHIP:SHAPE", "a slice of a torus (tpu-v5p:4x4x8), twisted (tpu-v5p:4x4x8_twisted)"),
    ("CHIP:SHAPE*N", "N pods of such a slice on the data-centre network (tpu-v5e:16x16*4)"),
    ("local:N", "N processes that share one host"),
    ("FILE.toml", "your own chip and network: docs/extending.md"),
)


def clusters_table(names: Sequence[str]) -> Report:
    from shardwise.hardware import load_cluster

    rows: list[Row] = [("cluster", "devices", "network")]
    for form in names:
        cluster = load_cluster(form)
        rows.append((form, f"{cluster.num_devices:,}", _network(cluster.topology)))
    return [Section([Table(rows=FORMS, head=False)]), Section([Table(rows=tuple(rows), right=(1,))])]


def _network(network: Any) -> str:
    """A network in a few words."""
    from shardwise.hardware import Pods, Torus

    if isinstance(network, Pods):
        rate = shown("bytes_per_s", network.bytes_per_s)
        return f"{network.num_pods} pods of {_network(network.torus)}, {rate} for each chip between pods"
    if isinstance(network, Torus) and network.twisted:
        return f"twisted torus {shown('', network.shape)}, links of {shown('bytes_per_s', network.bytes_per_s)}"
    if isinstance(network, Torus):
        kinds = " x ".join(
            f"{'ring' if wraps else 'line'} of {size}" for size, wraps in zip(network.shape, network.wraps, strict=True)
        )
        return f"{kinds}, links of {shown('bytes_per_s', network.bytes_per_s)}"
    return (
        " x ".join(
            f"{tier.name} {'mesh of ' if tier.links else ''}{tier.size} ({shown('bytes_per_s', tier.bytes_per_s)})"
            for tier in network.tiers
            if tier.size > 1
        )
        or "one device"
    )
