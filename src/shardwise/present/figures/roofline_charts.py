"""Charts of the books on rooflines, systolic arrays, and the communication of parallelism on a torus."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

from shardwise.book_formulas import BlockRoofline, KernelComparison, KernelRoofline, kernel_roofline, link_bandwidths
from shardwise.book_formulas.rules import (
    LayerTimes,
    SystolicArray,
    attainable_flops_per_s,
    critical_intensity,
    fsdp_min_tokens_per_chip,
    fsdp_optimal_degree,
    min_batch_tokens,
    mixed_min_tokens_per_chip,
    mlp_layer_times,
)
from shardwise.hardware import Chip, Cluster, Torus
from shardwise.model import Architecture
from shardwise.present.charts.chart import LETTERS, Axis, Cell, Chart, Curve, Points, RuleLine
from shardwise.present.charts.common_charts import curve_chart, frames_chart
from shardwise.values import InputError, format_quantity


class Strategies:
    """Times of an MLP layer under FSDP, TP and their mixes on a torus, by the batch. All axes are rings, as in the books."""

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
        """Return the times with all chips and axes for FSDP."""
        return self._times(batch, self.num_chips, 1, self.num_axes, 1)

    def tp(self, batch: float) -> LayerTimes:
        """Return the times with all chips and axes for TP."""
        return self._times(batch, 1, self.num_chips, 1, self.num_axes)

    def split(self, batch: float, tp: float) -> LayerTimes:
        """Return the times with TP of a degree on one axis, FSDP on the others, one kind of communication after the other."""
        return self._times(batch, self.num_chips / tp, tp, self.num_axes - 1, 1)

    def best_tp(self, batch: float) -> float:
        """Return the degree of TP of the best split, not rounded; at 1 or at all chips the best is no mix."""
        return self.num_chips / fsdp_optimal_degree(batch, self.d_ff, self.num_chips, self.num_axes - 1)

    def mixes(self, batches: Iterable[float]) -> tuple[float, ...]:
        """Return the batches whose best split is a mix."""
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
) -> Chart:
    """Draw compute over communication of FSDP, TP and the best mix against tokens per chip: above 1 compute binds.

    FSDP grows as the batch, the mix as its square root, TP not at all. Source: the book, "Training", the figure on 4x4x4.
    Differs: with its F = 30,000 the mix reaches 1 at 434 tokens per chip; the text's "roughly 400" is for F = 32,768.
    """
    layer = Strategies(cluster, d_model, d_ff)
    batches = tuple(
        layer.num_chips * tokens_per_chip
        for tokens_per_chip in sorted((*spread(*tokens), layer.fsdp_from, layer.mixed_from))
    )

    def line(label: str, times: Callable[[float], LayerTimes], line_batches: Sequence[float] = batches) -> Curve:
        points = tuple((batch / layer.num_chips, times(batch).math_over_comms) for batch in line_batches)
        return Curve(label=label, points=points)

    mixed_axes = f"{layer.num_axes - 1} + 1 axes"
    return curve_chart(
        title=f"Compute over communication of an MLP layer on {cluster.name}",
        subtitle=f"F = {d_ff:,}, forward pass in bf16; above 1 compute binds, below communication.",
        x=Axis(title="tokens per chip", log=True), y=Axis(title="T_math / T_comms", log=True),
        marks=(
            line(f"FSDP × TP, best split, {mixed_axes}", lambda batch: layer.split(batch, layer.best_tp(batch)),
                 layer.mixes(batches)),
            line(f"FSDP, {layer.num_axes} axes", layer.fsdp),
            line(f"TP, {layer.num_axes} axes", layer.tp),
            Curve(label="as long as each other", points=((tokens[0], 1.0), (tokens[1], 1.0)), reference=True),
            RuleLine(label=f"FSDP × TP from {layer.mixed_from:,.0f}", at=layer.mixed_from),
            RuleLine(label=f"FSDP from {layer.fsdp_from:,.0f}", at=layer.fsdp_from),
        ),
    )  # fmt: skip


def strategy_times(
    cluster: Cluster, *, d_model: int = 8192, d_ff: int = 32_768, batches: tuple[float, float] = (2e5, 5e7),
    tp_degrees: Sequence[int] = (8, 16),
) -> Chart:  # fmt: skip
    """Draw seconds of compute, and of communication of each strategy, against the batch: below the compute line it is hidden.

    Source: the book, "Training", the figure on 16x16x16. Differs: the book prints that the best split is compute-bound from
    1.6e10 tokens; its own formula, 4096 · 2 · 2550² / 32768, is 1.6e6.
    """
    layer = Strategies(cluster, d_model, d_ff)
    bounds = [
        min_batch_tokens(layer.num_chips, tokens_per_chip) for tokens_per_chip in (layer.mixed_from, layer.fsdp_from)
    ]
    span = tuple(sorted((*spread(*batches), *bounds)))

    def line(label: str, times: Callable[[float], LayerTimes], line_batches: Sequence[float] = span) -> Curve:
        return Curve(label=label, points=tuple((batch, times(batch).comms_s) for batch in line_batches))

    def split(tp: int) -> Curve:
        return line(f"FSDP {layer.num_chips // tp} × TP {tp}", lambda batch: layer.split(batch, tp))

    best = line("FSDP × TP, best split", lambda batch: layer.split(batch, layer.best_tp(batch)), layer.mixes(span))
    ends = (span[0], span[-1])
    return curve_chart(
        title=f"Compute and communication of an MLP layer on {cluster.name}",
        subtitle=f"D = {d_model:,}, F = {d_ff:,}, forward pass in bf16; what is above the compute line binds.",
        x=BATCH, y=Axis(title="time of one layer", unit="s", log=True),
        marks=(
            Curve(label="compute", points=tuple((b, layer.fsdp(b).math_s) for b in ends), reference=True),
            best, *map(split, tp_degrees),
            line(f"FSDP, {layer.num_axes} axes", layer.fsdp), line(f"TP, {layer.num_axes} axes", layer.tp),
            *(
                RuleLine(label=f"{name} from {format_quantity(bound)} tokens", at=bound)
                for name, bound in zip(("best split", "FSDP"), bounds, strict=True)
            ),
        ),
    )  # fmt: skip


SAMPLES_PER_DECADE = 24
INTENSITY = Axis(title="intensity, FLOPs per byte moved", log=True)
RATE = Axis(title="attainable FLOP/s of one chip", log=True)
BATCH = Axis(title="tokens of the global batch", log=True)


def spread(low: float, high: float) -> tuple[float, ...]:
    """Return numbers evenly apart on a logarithmic axis, both ends included."""
    count = max(1, round(SAMPLES_PER_DECADE * math.log10(high / low)))
    return tuple(low * (high / low) ** (i / count) for i in range(count + 1))


def roofline_chart(chip: Chip, links: Mapping[str, float], kernels: Sequence[Points], dtype: str = "bf16") -> Chart:
    """Draw min(C, W·intensity) for every peak of the chip from memory, for `dtype` from each link, and kernels as points.

    A kernel is at its intensity and at the FLOP/s that it attains; those in the same place are one point, with the share of all.
    Each knee lies at C / W.
    """
    peaks = {dtype: chip.peak(dtype)} | dict(chip.peak_flops_per_s)
    formats_by_peak: dict[float, list[str]] = {}  # peaks that a picture cannot tell apart are one line
    for name, peak in peaks.items():
        line_peak = next(
            (drawn_peak for drawn_peak in formats_by_peak if math.isclose(drawn_peak, peak, rel_tol=5e-3)), peak
        )
        formats_by_peak.setdefault(line_peak, []).append(name)
    memory = chip.memory_bytes_per_s
    roofs = [(f"{', '.join(names)} from memory", peak, memory) for peak, names in formats_by_peak.items()]
    roofs += [(f"{dtype} from {name}", peaks[dtype], rate) for name, rate in links.items()]
    knees = [critical_intensity(peak, rate) for _, peak, rate in roofs]
    ends = [*knees, *(kernel.points[0][0] for kernel in kernels)]
    low, high = min(ends) / 20.0, max(ends) * 3.0
    lines = tuple(
        Curve(
            label=f"{label}, {format_quantity(rate, 'B/s')}",
            points=tuple((x, attainable_flops_per_s(x, peak, rate)) for x in (low, knee, high)),
        )
        for (label, peak, rate), knee in zip(roofs, knees, strict=True)
    )
    return curve_chart(
        title=f"Roofline of {chip.name}",
        subtitle="Left of its knee, at C / W, a kernel is bound by bandwidth, right of it by compute.",
        x=INTENSITY, y=RATE, marks=(*lines, *_merged(kernels), RuleLine(label=f"{dtype}, memory: {knees[0]:,.1f}", at=knees[0])),
    )  # fmt: skip


def _merged(kernels: Iterable[Points]) -> Iterator[Points]:
    """Yield a point for each place, named after the first kernel there, with the share of all kernels in it."""
    places: list[list[Points]] = []
    for kernel in kernels:
        place = next((place for place in places if _is_near(place[0].points[0], kernel.points[0])), None)
        if place is None:
            places.append(place := [])
        place.append(kernel)
    for letter, place in zip(LETTERS, places, strict=False):
        share = sum(kernel.share for kernel in place)
        count_text = f", and {len(place) - 1} alike" if len(place) > 1 else ""
        time = f": {share:.1%} of the time" if share else ""
        yield replace(place[0], label=f"{place[0].label}{count_text}{time}", share=share, letter=letter)


def _is_near(first: tuple[float, float], second: tuple[float, float]) -> bool:
    return math.isclose(first[0], second[0], rel_tol=5e-3) and math.isclose(first[1], second[1])


def kernels_chart(comparison: KernelComparison) -> Chart:
    """Draw the kernels of a comparison on the rooflines of their chip."""
    points = [
        Points(label=roofline.label, points=((roofline.cost.intensity, roofline.attainable_flops_per_s),))
        for roofline in comparison.rooflines
    ]
    return roofline_chart(comparison.chip, comparison.bandwidths, points, comparison.rooflines[0].dtype)


def block_chart(roofline: BlockRoofline) -> Chart:
    """Draw the kernels of a model's block on the rooflines of a chip, each with its share of the time of both passes.

    Kernels without FLOPs of products and attention have no place on a roofline; the subtitle has their share.
    """
    total = sum(operation.seconds for operation in roofline.operations)
    kernels = [
        Points(
            label=f"{operation.phase} {operation.name}", points=((operation.intensity, operation.flops / operation.seconds),),
            share=operation.seconds / total,
        )
        for operation in roofline.operations
        if operation.flops
    ]  # fmt: skip
    chip = roofline.chip
    chart = roofline_chart(chip, link_bandwidths(chip, roofline.links), kernels, roofline.dtype)
    rest = 1.0 - sum(kernel.share for kernel in kernels)
    return replace(
        chart, title=f"A block of {roofline.model} on {chip.name}, {roofline.num_seqs} x {roofline.seq_len:,} tokens",
        subtitle=f"An area is a kernel's share of the time; {rest:.1%} goes to elementwise kernels, bound by memory.",
    )  # fmt: skip


def matmul_curves(
    chip: Chip, widths: Iterable[tuple[int, int]], dtype: str = "bf16", weights: str | None = None,
    batches: tuple[float, float] = (4.0, 4096.0),
) -> Chart:  # fmt: skip
    """Draw attainable FLOP/s of [B, D] · [D, F] against B for several (D, F). Source: the book, "All About Rooflines", question
    3."""

    def kernel(batch: float, d_in: int, d_out: int) -> KernelRoofline:
        return kernel_roofline(chip, "matmul", {"B": batch, "D": d_in, "F": d_out}, dtype, weights)

    lines, markers = [], []
    for d_in, d_out in widths:
        critical_size = kernel(1, d_in, d_out).critical_size
        visible_sizes = (critical_size,) if batches[0] < critical_size < batches[1] else ()
        points = []
        for batch in sorted((*spread(*batches), *visible_sizes)):
            points.append((batch, kernel(batch, d_in, d_out).attainable_flops_per_s))
        lines.append(Curve(label=f"D = {d_in:,}, F = {d_out:,}", points=tuple(points)))
        markers += [RuleLine(label=f"D = {d_in:,}: B = {size:,.0f}", at=size) for size in visible_sizes]
    stored = f"{weights or dtype} weights, {dtype} activations and arithmetic"
    return curve_chart(
        title=f"[B, D] · [D, F] on {chip.name}", subtitle=f"{stored}; a marker is where compute begins to bind.",
        x=Axis(title="batch B", log=True), y=RATE, marks=(*lines, *markers),
    )  # fmt: skip


def attention_share_curves(
    architecture: Architecture, chip: Chip, seq_lens: tuple[float, float] = (256.0, 2.0**20),
    batches: Sequence[int] = (16, 256), dtype: str = "bf16",
) -> Chart:  # fmt: skip
    """Draw time of attention over that of the MLP in one layer against the context: a prompt, and steps of decoding.

    Each kernel takes the longer of compute and memory traffic; attention is flash and sees the whole square. Source: the
    book, "Transformers", question 4, which leaves the plot to the reader; for a prompt the ratio is 1 near T = 6D where
    the MLP has 12·D² parameters (8D with the projections, `scores_equal_block_seq_len`).
    """
    a = architecture
    heads = {"N": a.num_heads, "K": a.num_kv_heads, "H": a.head_dim}

    def seconds(kernel: str, sizes: Mapping[str, float]) -> float:
        return kernel_roofline(chip, kernel, sizes, dtype).bounds.lower_s

    def mlp_s(tokens: float) -> float:
        into = seconds("matmul", {"B": tokens, "D": a.d_model, "F": a.d_ff})
        out = seconds("matmul", {"B": tokens, "D": a.d_ff, "F": a.d_model})
        return (2 if a.structure.has_gated_mlp else 1) * into + out

    def decoding(batch: int) -> Curve:
        step = mlp_s(batch)
        points = ((s, seconds("attention", {"B": batch, "T": 1, "S": s, **heads}) / step) for s in span)
        return Curve(label=f"one token for each of {batch}", points=tuple(points))

    span = spread(*seq_lens)
    prompt = tuple((s, seconds("attention", {"T": s, **heads}) / mlp_s(s)) for s in span)
    return curve_chart(
        title=f"Attention beside the MLP in a layer of {a.name} on {chip.name}",
        subtitle=f"Time of attention over that of the MLP, both overlapped with their traffic, {dtype}.",
        x=Axis(title="tokens of context", log=True), y=Axis(title="attention / MLP", log=True),
        marks=(
            Curve(label="a prompt", points=prompt), *map(decoding, batches),
            Curve(label="as long as each other", points=((seq_lens[0], 1.0), (seq_lens[1], 1.0)), reference=True),
        ),
    )  # fmt: skip


def systolic_frames(num_rows: int = 2, side: int = 3) -> Chart:
    """Draw the row of activations that each cell multiplies with its weight, cycle by cycle. Source: the book, "TPUs", appendix
    B."""
    array = SystolicArray(side=side)

    def cells(cycle: int) -> Iterator[Cell]:
        for place, depth in product(range(side), repeat=2):
            row = array.row_at(cycle, depth, place)
            if row is not None and row < num_rows:
                yield Cell(row=depth, column=place, colour=f"series:{row}", lines=(f"row {row}",))

    return frames_chart(
        f"[{num_rows}, {side}] · [{side}, {side}] on a systolic array of {side} x {side} cells",
        f"{array.fill} cycles for the weights, {num_rows} for the rows, {array.drain} until the last sum.",
        {f"cycle {cycle + 1}": tuple(cells(cycle)) for cycle in range(array.cycles(num_rows))},
        columns=[f"column {place}" for place in range(side)], rows=[f"k = {k}" for k in range(side)],
        note="A cell multiplies the row of activations that is written in it; sums go down, activations to the right.",
    )  # fmt: skip


def systolic_use(sides: Sequence[int] = (128, 256), rows: tuple[float, float] = (8.0, 8192.0)) -> Chart:
    """Draw the share of cells and cycles that multiply, against the rows of activations for each tile of weights. Source: the
    book, "TPUs", appendix B: of [8, 128] · [128, 128] in a long stream, 8 cycles each."""

    def line(side: int, num_tiles: int) -> Curve:
        array = SystolicArray(side=side)
        points = tuple((float(round(num_rows)), array.busy(round(num_rows), num_tiles)) for num_rows in spread(*rows))
        tiles = "one tile of weights" if num_tiles == 1 else f"{num_tiles} tiles, one after the other"
        return Curve(label=f"{side} x {side}, {tiles}", points=points)

    return curve_chart(
        title="How busy a systolic array is",
        subtitle="Less than 1 is filling and draining, and waiting for the next tile of weights.",
        x=Axis(title="rows of activations for each tile of weights", log=True),
        y=Axis(title="share of cells and cycles", unit="%"),
        marks=(line(side, num_tiles) for side in sides for num_tiles in (1, 64)),
    )  # fmt: skip
