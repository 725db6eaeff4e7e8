"""Figures of simulated steps."""

from __future__ import annotations

from shardwise.model import Job, load_model
from shardwise.present.api.given import cluster_of, layout_of
from shardwise.present.draw.axis import Axis
from shardwise.present.draw.line_chart import Line, LineChart
from shardwise.present.draw.palette import TERM_COLOURS
from shardwise.present.draw.timeline import TimelineChart
from shardwise.present.pictures.simulated_step_timeline import step_chart
from shardwise.price import Problem, Simulation, simulate

NODE = "h100:8"
SEQ_LEN = 4096


def _simulated(model: str, layout_text: str, num_micro_batches: int = 1) -> Simulation:
    """A step of so many micro-batches in each replica."""
    layout = layout_of(layout_text)
    num_seqs = layout.num_replicas * layout.micro_batch_seqs * num_micro_batches
    job = Job(global_batch_tokens=SEQ_LEN * num_seqs, seq_len=SEQ_LEN)
    return simulate(Problem(load_model(model), cluster_of(NODE, None), job), layout)


def overlap(model: str, layout: str) -> TimelineChart:
    """What a device computes and sends over a step."""
    return step_chart(_simulated(model, layout))


def memory_of_a_step(model: str = "llama-3.2-1b", layout: str = "dp=8 micro_batch_seqs=2") -> LineChart:
    """Bytes of a device over a step of three micro-batches: what each pass holds, from its start."""
    found = _simulated(model, layout, num_micro_batches=3)
    points: list[tuple[float, float]] = []
    for when, held in found.memories[0].curve:
        points += [(when, points[-1][1])] if points else []
        points.append((when, held))
    points.append((found.step_time_s, points[-1][1]))
    return LineChart(
        title=f"Memory of a device over a step of {model}",
        subtitle=f"{layout} on {NODE}, sequences of {SEQ_LEN:,} tokens, simulated.",
        x=Axis(title="time", unit="s", linear=True),
        y=Axis(title="bytes of a device", unit="B", linear=True),
        lines=(Line(label="held", points=tuple(points), colour=TERM_COLOURS["activations"]),),
    )  # fmt: skip
