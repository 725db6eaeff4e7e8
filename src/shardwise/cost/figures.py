"""The data of the pictures: rooflines, communication against the batch, memory of layouts, utilisation by model and nodes.

Every number comes from the rules or from the estimate; `charts` draws what is made here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardwise.charts import Axis, Bar, BarChart, HeatMap, Line, LineChart, Marker, Point
from shardwise.cluster.chip import Chip
from shardwise.cluster.chips import catalogue_entry, load_chip
from shardwise.cluster.cluster import Cluster
from shardwise.cluster.load import is_cluster, load_cluster
from shardwise.cluster.topology import Pods, Topology, Torus
from shardwise.cost.estimate import Pricing
from shardwise.cost.rules import (
    Bounds,
    LayerTimes,
    MatmulCost,
    attainable_flops_per_s,
    critical_intensity,
    fsdp_min_tokens_per_chip,
    fsdp_optimal_degree,
    matmul_cost,
    min_batch_tokens,
    mixed_min_tokens_per_chip,
    mlp_layer_times,
)
from shardwise.dtypes import bytes_per_element
from shardwise.errors import InputError
from shardwise.job import Job
from shardwise.layout.layout import Layout
from shardwise.layout.legality import require_legal
from shardwise.model.architecture import Architecture
from shardwise.units import format_bytes, format_quantity, parse_quantity

SAMPLES_PER_DECADE = 24
INTENSITY = Axis(title="intensity, FLOPs per byte moved")
RATE = Axis(title="attainable FLOP/s of one chip")
BATCH = Axis(title="tokens of the global batch")


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulRoofline:
    """[B, D] · [D, F] on one chip whose activations and arithmetic are of one format and whose weights may be of another."""

    batch: float
    d_in: int
    d_out: int
    dtype: str
    weights: str
    flops_per_s: float
    bytes_per_s: float

    @property
    def cost(self) -> MatmulCost:
        """2BDF FLOPs; the bytes of activations and of weights, each in its own format."""
        plain = matmul_cost(self.batch, self.d_in, self.d_out, bytes_per_element(self.dtype))
        saved = self.d_in * self.d_out * (bytes_per_element(self.dtype) - bytes_per_element(self.weights))
        return MatmulCost(flops=plain.flops, read_bytes=plain.read_bytes - saved, written_bytes=plain.written_bytes)

    @property
    def critical_intensity(self) -> float:
        """The knee, C / W in FLOPs per byte."""
        return critical_intensity(self.flops_per_s, self.bytes_per_s)

    @property
    def bounds(self) -> Bounds:
        """Seconds with compute and memory traffic overlapped, and one after the other."""
        return self.cost.bounds(self.flops_per_s, self.bytes_per_s)

    @property
    def bound(self) -> str:
        return "compute" if self.cost.intensity >= self.critical_intensity else "memory"

    @property
    def attainable_flops_per_s(self) -> float:
        return attainable_flops_per_s(self.cost.intensity, self.flops_per_s, self.bytes_per_s)

    @property
    def critical_batch(self) -> float:
        """Batch from which the product is bound by compute; infinite where the matrices are too narrow.

        Formula: B = w·I / (2 - e·I·(1/D + 1/F)), I = C / W, activations of e bytes and weights of w; `matmul_critical_batch`
        where e = w. Source: the book, "All About Rooflines", question 2 (int8 weights: half the batch).
        """
        knee, width = self.critical_intensity, bytes_per_element(self.dtype)
        room = 2.0 - width * knee * (1.0 / self.d_in + 1.0 / self.d_out)
        return bytes_per_element(self.weights) * knee / room if room > 0 else math.inf


def matmul_roofline(
    chip: Chip, batch: float, d_in: int, d_out: int, dtype: str, weights: str | None = None
) -> MatmulRoofline:
    """A product at the chip's dense peak and memory bandwidth as the vendor states them, as the books do.

    Raises `InputError` for an unknown format and `MissingValueError` for one without a peak.
    """
    for name in (dtype, weights or dtype):
        bytes_per_element(name)
    return MatmulRoofline(
        batch=batch, d_in=d_in, d_out=d_out, dtype=dtype, weights=weights or dtype,
        flops_per_s=chip.peak(dtype), bytes_per_s=chip.memory_bytes_per_s,
    )  # fmt: skip


def chip_and_links(text: str) -> tuple[Chip, Mapping[str, float]]:
    """A chip by name, shorthand or file, and bytes/s of each kind of link: a torus axis both ways, egress to each tier."""
    if is_cluster(text):
        cluster = load_cluster(text)
        return cluster.chip, _link_rates(cluster.topology)
    name = text.strip().lower()
    entry = catalogue_entry(name)
    if "torus" in entry:
        return load_chip(name), {"torus axis": 2.0 * parse_quantity(entry["torus"]["bytes_per_s"])}
    return load_chip(name), {tier["name"]: parse_quantity(tier["bytes_per_s"]) for tier in entry.get("tiers", ())}


def _link_rates(topology: Topology) -> Mapping[str, float]:
    if isinstance(topology, Torus):
        return {"torus axis": topology.axis_bytes_per_s()}
    if isinstance(topology, Pods):
        return {**_link_rates(topology.torus), "between pods": topology.bytes_per_s}
    return {tier.name: tier.bytes_per_s for tier in topology.tiers}


def roofline_chart(
    chip: Chip, links: Mapping[str, float], kernels: Sequence[tuple[str, float, float]], dtype: str = "bf16"
) -> LineChart:
    """min(C, W·intensity) for every peak of the chip from memory, for `dtype` from each link, and kernels as points.

    A kernel is a label, its intensity, and the FLOP/s that it attains. Each knee lies at C / W.
    """
    peaks = {dtype: chip.peak(dtype)} | dict(chip.peak_flops_per_s)
    alike: dict[float, list[str]] = {}  # formats with the same peak, as far as a picture shows, are one line
    for name, peak in peaks.items():
        near = next((known for known in alike if math.isclose(known, peak, rel_tol=5e-3)), peak)
        alike.setdefault(near, []).append(name)
    memory = chip.memory_bytes_per_s
    roofs = [(f"{', '.join(names)} from memory", peak, memory) for peak, names in alike.items()]
    roofs += [(f"{dtype} from {name}", peaks[dtype], rate) for name, rate in links.items()]
    knees = [critical_intensity(peak, rate) for _, peak, rate in roofs]
    ends = [*knees, *(intensity for _, intensity, _ in kernels)]
    low, high = min(ends) / 20.0, max(ends) * 3.0
    lines = tuple(
        Line(
            label=f"{label}, {format_quantity(rate, 'B/s')}",
            points=tuple((x, attainable_flops_per_s(x, peak, rate)) for x in (low, knee, high)),
        )
        for (label, peak, rate), knee in zip(roofs, knees, strict=True)
    )
    return LineChart(
        title=f"Roofline of {chip.name}",
        subtitle="Left of its knee, at C / W, a kernel is bound by bandwidth, right of it by compute.",
        x=INTENSITY, y=RATE, lines=lines,
        points=tuple(Point(label=label, x=intensity, y=rate) for label, intensity, rate in kernels),
        markers=(Marker(label=f"{dtype}, memory: {knees[0]:,.1f}", x=knees[0]),),
    )  # fmt: skip


def matmul_curves(
    chip: Chip, widths: Iterable[tuple[int, int]], dtype: str = "bf16", weights: str | None = None,
    batches: tuple[float, float] = (4.0, 4096.0),
) -> LineChart:  # fmt: skip
    """Attainable FLOP/s of [B, D] · [D, F] against B for several (D, F). Source: the book, "All About Rooflines", question 3."""
    lines, markers = [], []
    for d_in, d_out in widths:
        at = matmul_roofline(chip, 1, d_in, d_out, dtype, weights).critical_batch
        inside = (at,) if batches[0] < at < batches[1] else ()
        points = []
        for batch in sorted((*_spread(*batches), *inside)):
            points.append((batch, matmul_roofline(chip, batch, d_in, d_out, dtype, weights).attainable_flops_per_s))
        lines.append(Line(label=f"D = {d_in:,}, F = {d_out:,}", points=tuple(points)))
        markers += [Marker(label=f"D = {d_in:,}: B = {at:,.0f}", x=at) for at in inside]
    stored = f"{weights or dtype} weights, {dtype} activations and arithmetic"
    return LineChart(
        title=f"[B, D] · [D, F] on {chip.name}", subtitle=f"{stored}; a marker is where compute begins to bind.",
        x=Axis(title="batch B"), y=RATE, lines=tuple(lines), markers=tuple(markers),
    )  # fmt: skip


def _spread(low: float, high: float) -> tuple[float, ...]:
    """Numbers evenly apart on a logarithmic axis, both ends included."""
    count = max(1, round(SAMPLES_PER_DECADE * math.log10(high / low)))
    return tuple(low * (high / low) ** (i / count) for i in range(count + 1))


class Strategies:
    """One MLP layer under FSDP, TP and their mixes on a torus, by the batch. Rings on all axes, as the books take them."""

    def __init__(self, cluster: Cluster, d_model: int, d_ff: int) -> None:
        torus = cluster.topology
        self.num_axes = sum(size > 1 for size in torus.levels)
        if not isinstance(torus, Torus) or self.num_axes < 2:
            raise InputError(
                f"cluster: found {cluster.name}; a torus of two axes or more is required, such as tpu-v5p:4x4x4"
            )
        self.num_chips, self.d_model, self.d_ff = cluster.num_devices, d_model, d_ff
        self.flops_per_s, self.bytes_per_s = cluster.chip.peak("bf16"), torus.axis_bytes_per_s()
        self.alpha = critical_intensity(self.flops_per_s, self.bytes_per_s)

    def _times(self, batch: float, fsdp: float, tp: float, fsdp_axes: int, tp_axes: int) -> LayerTimes:
        return mlp_layer_times(
            batch, self.d_model, self.d_ff, self.flops_per_s, self.bytes_per_s,
            fsdp=fsdp, tp=tp, fsdp_axes=fsdp_axes, tp_axes=tp_axes,
        )  # fmt: skip

    def fsdp(self, batch: float) -> LayerTimes:
        """All chips and axes for FSDP."""
        return self._times(batch, self.num_chips, 1, self.num_axes, 1)

    def tp(self, batch: float) -> LayerTimes:
        """All chips and axes for TP."""
        return self._times(batch, 1, self.num_chips, 1, self.num_axes)

    def split(self, batch: float, tp: float) -> LayerTimes:
        """TP of a degree on one axis, FSDP on the others, one kind of communication after the other."""
        return self._times(batch, self.num_chips / tp, tp, self.num_axes - 1, 1)

    def best_tp(self, batch: float) -> float:
        """The degree of TP of the best split, not rounded; at 1 or at all chips the best is no mix."""
        return self.num_chips / fsdp_optimal_degree(batch, self.d_ff, self.num_chips, self.num_axes - 1)

    def mixes(self, batches: Iterable[float]) -> tuple[float, ...]:
        """The batches whose best split is a mix."""
        return tuple(batch for batch in batches if 1.0 < self.best_tp(batch) < self.num_chips)

    @property
    def fsdp_from(self) -> float:
        """Tokens per chip from which FSDP is bound by compute."""
        return fsdp_min_tokens_per_chip(self.alpha, self.num_axes)

    @property
    def mixed_from(self) -> float:
        """Tokens per chip from which the best split is bound by compute."""
        return mixed_min_tokens_per_chip(self.alpha, self.d_ff, self.num_axes - 1)


def strategy_ratios(
    cluster: Cluster, *, d_model: int = 8192, d_ff: int = 30_000, tokens: tuple[float, float] = (100.0, 5000.0)
) -> LineChart:
    """Compute over communication of FSDP, TP and the best mix against tokens per chip: above 1 compute binds.

    FSDP grows as the batch, the mix as its square root, TP not at all. Source: the book, "Training", the figure on 4x4x4.
    Differs: with its F = 30,000 the mix reaches 1 at 434 tokens per chip; the text's "roughly 400" is for F = 32,768.
    """
    layer = Strategies(cluster, d_model, d_ff)
    batches = tuple(layer.num_chips * each for each in sorted((*_spread(*tokens), layer.fsdp_from, layer.mixed_from)))

    def line(label: str, times: Callable[[float], LayerTimes], at: Sequence[float] = batches) -> Line:
        points = tuple((batch / layer.num_chips, times(batch).math_over_comms) for batch in at)
        return Line(label=label, points=points)

    mixed_axes = f"{layer.num_axes - 1} + 1 axes"
    return LineChart(
        title=f"Compute over communication of an MLP layer on {cluster.name}",
        subtitle=f"F = {d_ff:,}, forward pass in bf16; above 1 compute binds, below communication.",
        x=Axis(title="tokens per chip"), y=Axis(title="T_math / T_comms"),
        lines=(
            line(f"FSDP × TP, best split, {mixed_axes}", lambda batch: layer.split(batch, layer.best_tp(batch)),
                 layer.mixes(batches)),
            line(f"FSDP, {layer.num_axes} axes", layer.fsdp),
            line(f"TP, {layer.num_axes} axes", layer.tp),
            Line(label="as long as each other", points=((tokens[0], 1.0), (tokens[1], 1.0)), reference=True),
        ),
        markers=(
            Marker(label=f"FSDP × TP from {layer.mixed_from:,.0f}", x=layer.mixed_from),
            Marker(label=f"FSDP from {layer.fsdp_from:,.0f}", x=layer.fsdp_from),
        ),
    )  # fmt: skip


def strategy_times(
    cluster: Cluster, *, d_model: int = 8192, d_ff: int = 32_768, batches: tuple[float, float] = (2e5, 5e7),
    tp_degrees: Sequence[int] = (8, 16),
) -> LineChart:  # fmt: skip
    """Seconds of compute, and of communication of each strategy, against the batch: under the compute line, it is hidden.

    Source: the book, "Training", the figure on 16x16x16. Differs: the book prints that the best split is compute-bound from
    1.6e10 tokens; its own formula, 4096 · 2 · 2550² / 32768, is 1.6e6.
    """
    layer = Strategies(cluster, d_model, d_ff)
    bounds = [min_batch_tokens(layer.num_chips, each) for each in (layer.mixed_from, layer.fsdp_from)]
    span = tuple(sorted((*_spread(*batches), *bounds)))

    def line(label: str, times: Callable[[float], LayerTimes], at: Sequence[float] = span) -> Line:
        return Line(label=label, points=tuple((batch, times(batch).comms_s) for batch in at))

    def split(tp: int) -> Line:
        return line(f"FSDP {layer.num_chips // tp} × TP {tp}", lambda batch: layer.split(batch, tp))

    best = line("FSDP × TP, best split", lambda batch: layer.split(batch, layer.best_tp(batch)), layer.mixes(span))
    ends = (span[0], span[-1])
    return LineChart(
        title=f"Compute and communication of an MLP layer on {cluster.name}",
        subtitle=f"D = {d_model:,}, F = {d_ff:,}, forward pass in bf16; what is above the compute line binds.",
        x=BATCH, y=Axis(title="time of one layer", unit="s"),
        lines=(
            Line(label="compute", points=tuple((b, layer.fsdp(b).math_s) for b in ends), reference=True),
            best, *map(split, tp_degrees),
            line(f"FSDP, {layer.num_axes} axes", layer.fsdp), line(f"TP, {layer.num_axes} axes", layer.tp),
        ),
        markers=tuple(
            Marker(label=f"{name} from {format_quantity(bound)} tokens", x=bound)
            for name, bound in zip(("best split", "FSDP"), bounds, strict=True)
        ),
    )  # fmt: skip


def stage_memories(
    architecture: Architecture, cluster: Cluster, job: Job, layout: Layout
) -> tuple[Mapping[str, float], ...]:
    """Bytes of a device of each pipeline stage, by term; the fullest is what `estimate` reports.

    Raises `InputError` with every rule that the layout breaks.
    """
    require_legal(architecture, job, cluster.num_devices, layout)
    pricing = Pricing(architecture, cluster, job, layout)
    activation, state = pricing.unit_costs()
    return tuple(pricing.memory(stage, pricing.counts(stage), activation, state) for stage in range(layout.pp))


def memory_chart(title: str, subtitle: str, bars: Iterable[tuple[str, Mapping[str, float]]], chip: Chip) -> BarChart:
    """Stacked memory of layouts or stages against the chip's capacity."""
    return BarChart(
        title=title, subtitle=subtitle,
        bars=tuple(Bar(label=label, parts=parts) for label, parts in bars),
        limit=chip.memory_bytes, limit_label=f"{chip.name}: {format_bytes(chip.memory_bytes)}",
    )  # fmt: skip


def utilisation_map(
    models: Sequence[str], num_nodes: Sequence[int], best_mfu: Callable[[str, int], float | None], job: str
) -> HeatMap:
    """The best MFU of every model on every number of nodes; the search is handed in, and None where nothing fits.

    Source: the playbook, "Benchmarking thousands of configurations", its heat map.
    """
    return HeatMap(
        title="Best MFU by model and nodes", subtitle=job, row_title="model", column_title="nodes of 8 devices",
        rows=tuple(models), columns=tuple(map(str, num_nodes)),
        values=tuple(tuple(best_mfu(model, nodes) for nodes in num_nodes) for model in models),
        absent="no layout fits in memory",
    )  # fmt: skip
