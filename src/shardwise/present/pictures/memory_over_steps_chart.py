"""The anatomy of the first steps as a picture: memory by category over time, one step behind the other."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.present.draw.axis import Axis
from shardwise.present.draw.line_chart import Band, Line, LineChart, Marker
from shardwise.records.step_memory_and_collectives import MemoryTrace
from shardwise.values import format_bytes

GAP = 0.02  # between two steps, of the time of all


def anatomy_chart(steps: Sequence[MemoryTrace], about: str) -> LineChart:
    """What rests at the bottom, what comes and goes above it; steps one behind the other, as long as they took."""
    length = sum(step.samples[-1].seconds for step in steps if step.samples)
    begins, now = [], 0.0
    for step in steps:
        begins.append(now)
        now += (step.samples[-1].seconds if step.samples else 0.0) + GAP * length
    terms = steps[0].terms
    bands = []
    for place, term in enumerate(terms):
        edges = tuple(
            (
                begin + sample.seconds,
                float(sum(sample.bytes_by_term[:place])),
                float(sum(sample.bytes_by_term[: place + 1])),
            )
            for begin, step in zip(begins, steps, strict=True)
            for sample in step.samples
        )
        if any(high > low for _, low, high in edges):
            bands.append(Band(label=term, edges=edges))
    whole = tuple(
        (begin + sample.seconds, float(sum(sample.bytes_by_term)))
        for begin, step in zip(begins, steps, strict=True)
        for sample in step.samples
    )
    return LineChart(
        title=f"Memory of the first {len(steps)} steps, by category",
        subtitle=f"{about}, rank {steps[0].rank}; at most {format_bytes(max(step.peak_bytes for step in steps))}",
        x=Axis(title="seconds, watched from below, which is slower", unit="s", linear=True),
        y=Axis(title="held by tensors", unit="B", linear=True), lines=(Line(label="all", points=whole, reference=True),),
        markers=tuple(Marker(label=f"step {step.step}", x=begin) for begin, step in zip(begins, steps, strict=True)),
        bands=tuple(bands),
    )  # fmt: skip
