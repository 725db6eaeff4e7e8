"""Reports of chips, of clusters and of their networks."""

from __future__ import annotations

from shardwise.hardware import Chip, Pods, Topology, Torus, load_chip, load_cluster
from shardwise.present.catalogue_values import CatalogueEntries
from shardwise.present.rendering.numbers import count, share
from shardwise.present.rendering.report import Cell, Number, Report, Row, Section, Table
from shardwise.present.reports.catalogue_cells import format_catalogue_value, value_cell


def chips_table(entries: CatalogueEntries) -> Report:
    """Report chips with their peaks, memory, power and price."""
    rows: list[Row] = [("chip", "vendor", "bf16", "fp8", "memory", "bandwidth", "matmul", "power", "per host", "USD/h")]
    rows += [_chip_row(load_chip(name), f"entries.{index}.values") for index, name in enumerate(entries.names)]
    notes = [
        "Dense peaks; matmul: what the best shapes reach of the bf16 peak; USD/h: of one chip,",
        "of the day that `show chips NAME` gives with its source. A dash: no source, or no such format.",
    ]
    return [Section([Table(rows=tuple(rows), right=range(2, 10))]), Section(notes)]


def _chip_row(chip: Chip, path: str) -> Row:
    peaks = (
        value_cell("flops_per_s", chip.peak_flops_per_s[dtype], f"{path}.peak_flops_per_s.{dtype}.value")
        if dtype in chip.peak_flops_per_s
        else "-"
        for dtype in ("bf16", "fp8")
    )
    memory = value_cell("memory_bytes", chip.memory_bytes, f"{path}.memory_bytes.value")
    bandwidth = value_cell("memory_bytes_per_s", chip.memory_bytes_per_s, f"{path}.memory_bytes_per_s.value")
    is_measured = "matmul_fraction" in chip.sources
    matmul = share(chip.matmul_fraction, f"{path}.matmul_fraction.value", digits=0) if is_measured else "-"
    power: Cell = Number(f"{chip.power_w:g} W", chip.power_w, "W", f"{path}.power_w.value") if chip.power_w else "-"
    price = chip.price_usd_per_hour
    usd: Cell = Number(f"{price:g}", price, "USD/h", f"{path}.price_usd_per_hour.value") if price else "-"
    return (chip.name, chip.vendor, *peaks, memory, bandwidth, matmul, power, str(chip.devices_per_host or "-"), usd)


FORMS: tuple[Row, ...] = (
    ("CHIP:COUNT", "devices behind switches: one node or less, or whole nodes (h100:512)"),
    ("CHIP:SHAPE", "a slice of a torus (tpu-v5p:4x4x8), twisted (tpu-v5p:4x4x8_twisted)"),
    ("CHIP:SHAPE*N", "N pods of such a slice on the data-centre network (tpu-v5e:16x16*4)"),
    ("local:N", "N processes that share one host"),
    ("FILE.toml", "your own chip and network: docs/extending.md"),
)


def clusters_table(entries: CatalogueEntries) -> Report:
    """Report the forms of clusters, and an example of each size of the catalogue's chips."""
    rows: list[Row] = [("cluster", "devices", "network")]
    for index, name in enumerate(entries.names):
        cluster = load_cluster(name)
        num_devices = count(cluster.num_devices, f"entries.{index}.values.num_devices.value")
        rows.append((name, num_devices, _network_text(cluster.topology)))
    return [Section([Table(rows=FORMS, head=False)]), Section([Table(rows=tuple(rows), right=(1,))])]


def _network_text(network: Topology) -> str:
    """Return a network in a few words."""
    if isinstance(network, Pods):
        rate = _rate(network.bytes_per_s)
        return f"{network.num_pods} pods of {_network_text(network.torus)}, {rate} for each chip between pods"
    if isinstance(network, Torus) and network.twisted:
        shape = format_catalogue_value("", network.shape)
        return f"twisted torus {shape}, links of {_rate(network.bytes_per_s)}"
    if isinstance(network, Torus):
        kinds = " x ".join(
            f"{'ring' if wraps else 'line'} of {size}" for size, wraps in zip(network.shape, network.wraps, strict=True)
        )
        return f"{kinds}, links of {_rate(network.bytes_per_s)}"
    return (
        " x ".join(
            f"{tier.name} {'mesh of ' if tier.links else ''}{tier.size} ({_rate(tier.bytes_per_s)})"
            for tier in network.tiers
            if tier.size > 1
        )
        or "one device"
    )


def _rate(bytes_per_s: float) -> str:
    return format_catalogue_value("bytes_per_s", bytes_per_s)
