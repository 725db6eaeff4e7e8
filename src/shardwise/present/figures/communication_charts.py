"""Charts of the books on communication."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from shardwise.book_formulas.rules import (
    LayerTimes,
    critical_intensity,
    fsdp_min_tokens_per_chip,
    fsdp_optimal_degree,
    min_batch_tokens,
    mixed_min_tokens_per_chip,
    mlp_layer_times,
)
from shardwise.hardware import Cluster, Torus
from shardwise.present.charts.chart import Axis, Chart, Curve, RuleLine, curve_chart
from shardwise.values import InputError, format_quantity


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
) -> Chart:
    """Compute over communication of FSDP, TP and the best mix against tokens per chip: above 1 compute binds.

    FSDP grows as the batch, the mix as its square root, TP not at all. Source: the book, "Training", the figure on 4x4x4.
    Differs: with its F = 30,000 the mix reaches 1 at 434 tokens per chip; the text's "roughly 400" is for F = 32,768.
    """
    layer = Strategies(cluster, d_model, d_ff)
    batches = tuple(layer.num_chips * each for each in sorted((*spread(*tokens), layer.fsdp_from, layer.mixed_from)))

    def line(label: str, times: Callable[[float], LayerTimes], at: Sequence[float] = batches) -> Curve:
        points = tuple((batch / layer.num_chips, times(batch).math_over_comms) for batch in at)
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
    """Seconds of compute, and of communication of each strategy, against the batch: under the compute line, it is hidden.

    Source: the book, "Training", the figure on 16x16x16. Differs: the book prints that the best split is compute-bound from
    1.6e10 tokens; its own formula, 4096 · 2 · 2550² / 32768, is 1.6e6.
    """
    layer = Strategies(cluster, d_model, d_ff)
    bounds = [min_batch_tokens(layer.num_chips, each) for each in (layer.mixed_from, layer.fsdp_from)]
    span = tuple(sorted((*spread(*batches), *bounds)))

    def line(label: str, times: Callable[[float], LayerTimes], at: Sequence[float] = span) -> Curve:
        return Curve(label=label, points=tuple((batch, times(batch).comms_s) for batch in at))

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
    """Numbers evenly apart on a logarithmic axis, both ends included."""
    count = max(1, round(SAMPLES_PER_DECADE * math.log10(high / low)))
    return tuple(low * (high / low) ** (i / count) for i in range(count + 1))
