"""Throughput against the degree of one axis, and bandwidth of collectives against the number of nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from shardwise.hardware import Cut, load_cluster
from shardwise.hardware.network.compare_collective_algorithms import collective_report
from shardwise.hardware.network.nccl_bandwidths import CollectiveName
from shardwise.layout import Layout
from shardwise.model import Job, load_model
from shardwise.present.draw.axis import Axis
from shardwise.present.draw.line_chart import Line, LineChart
from shardwise.present.draw.panels import Column, Panel, PanelChart
from shardwise.present.pictures.book_figures.memory_charts import CHIP, fullest
from shardwise.price import Estimate, Problem
from shardwise.price.estimate import estimate
from shardwise.values import MEMORY_TERMS, format_bytes

SEQ_LEN = 4096
DEVICES_OF_NODE = 8
COLLECTIVES: tuple[CollectiveName, ...] = ("all_reduce", "all_gather", "reduce_scatter")


def predicted(model: str, layout: Layout, num_micro_batches: int = 1) -> Estimate:
    """A step on H100s under a layout, each replica with so many micro-batches of sequences of 4,096 tokens."""
    num_seqs = layout.num_replicas * num_micro_batches * layout.micro_batch_seqs
    job = Job(global_batch_tokens=SEQ_LEN * num_seqs, seq_len=SEQ_LEN)
    return estimate(Problem(load_model(model), load_cluster(f"{CHIP}:{layout.num_devices}"), job), layout)


def _rate(found: Sequence[Estimate | None]) -> Panel:
    rates = tuple(one.tokens_per_s_per_device if one else None for one in found)
    return Panel(title="tokens/s of a device", unit="", parts={"tokens/s": rates})


def _chart(title: str, subtitle: str, axis: str, degrees: Sequence[int], panels: Sequence[Panel]) -> PanelChart:
    return PanelChart(
        title=title, subtitle=subtitle, axis_title=axis,
        columns=tuple(Column(label=str(degree)) for degree in degrees), panels=tuple(panels),
    )  # fmt: skip


def dp_scaling(model: str = "llama-3.2-1b", degrees: Sequence[int] = (8, 16, 32, 64, 128, 256, 512)) -> PanelChart:
    """Tokens/s of a device and its memory against plain data parallelism, one sequence on each device. Source: the playbook,
    "Data parallelism"."""
    found = [predicted(model, Layout(dp=degree)) for degree in degrees]
    parts = {term: tuple(one.memory[term] for one in found) for term in MEMORY_TERMS}
    memory = Panel(title="memory of a device", unit="B", parts=parts)
    return _chart(
        f"Data parallelism of {model}", f"One sequence of {SEQ_LEN:,} tokens on each H100, nodes of eight, predicted.",
        "data-parallel devices", degrees, [_rate(found), memory],
    )  # fmt: skip


def largest_micro_batch(model: str, layout_of: Callable[[int], Layout], most: int = 1024) -> int:
    """The most sequences of a micro-batch whose memory a device holds; 0 where not even one fits."""
    capacity = load_cluster(f"{CHIP}:1").chip.memory_bytes

    def fits(num_seqs: int) -> bool:
        return sum(fullest(model, SEQ_LEN, layout_of(num_seqs)).values()) <= capacity

    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def tp_scaling(model: str = "llama-3-8b", degrees: Sequence[int] = (2, 4, 8, 16, 32)) -> PanelChart:
    """Tokens/s of a device, and the largest micro-batch, against tensor parallelism with sequence parallelism. Source: the
    playbook, "Tensor parallelism"."""

    def layout(tp: int, num_seqs: int) -> Layout:
        return Layout(tp=tp, sequence_parallel=tp > 1, micro_batch_seqs=num_seqs)

    most = [largest_micro_batch(model, partial(layout, tp)) for tp in degrees]
    found = [
        predicted(model, layout(tp, num_seqs)) if num_seqs else None for tp, num_seqs in zip(degrees, most, strict=True)
    ]
    batches = Panel(title="sequences of a micro-batch, at most", unit="", parts={"sequences": tuple(map(float, most))})
    return _chart(
        f"Tensor parallelism of {model}",
        f"The largest micro-batch of sequences of {SEQ_LEN:,} tokens on H100s, nodes of eight, predicted.",
        "tensor-parallel devices", degrees, [_rate(found), batches],
    )  # fmt: skip


def pp_scaling(model: str = "llama-3-8b", degrees: Sequence[int] = (2, 4, 8, 16, 32), many: int = 32) -> PanelChart:
    """Tokens/s of a device against pipeline stages under 1F1B, with few micro-batches and with many. Source: the playbook, "One
    forward, one backward"."""

    def panel(title: str, num_micro_batches: Callable[[int], int]) -> Panel:
        layouts = (Layout(pp=pp, schedule="1f1b", recompute="selective") for pp in degrees)
        found = [predicted(model, layout, num_micro_batches(layout.pp)) for layout in layouts]
        rates = tuple(one.tokens_per_s_per_device for one in found)
        return Panel(title=f"tokens/s of a device, {title}", unit="", parts={"tokens/s": rates})

    return _chart(
        f"Pipeline parallelism of {model}",
        f"1F1B, micro-batches of one sequence of {SEQ_LEN:,} tokens on H100s, nodes of eight, predicted.",
        "pipeline stages p", degrees,
        [panel("m = p - 1 micro-batches", lambda pp: pp - 1), panel(f"m = {many}", lambda pp: many)],
    )  # fmt: skip


def collective_bandwidths(
    num_bytes: float = 256 * 2**20, num_nodes: Sequence[int] = (1, 2, 4, 8, 16, 32, 64)
) -> LineChart:
    """Bus bandwidth, by NCCL's convention, of collectives over all devices of some nodes. Source: the playbook, "Pipeline
    parallelism", its plot of what was measured."""
    topology = load_cluster(f"{CHIP}:{DEVICES_OF_NODE * max(num_nodes)}").sustained_topology

    def line(operation: CollectiveName) -> Line:
        reports = (
            collective_report(operation, num_bytes, topology, [Cut(DEVICES_OF_NODE, 1), Cut(nodes, 1)])
            for nodes in num_nodes
        )
        points = tuple((float(nodes), one.busbw) for nodes, one in zip(num_nodes, reports, strict=True))
        return Line(label=operation.replace("_", "-"), points=points)

    return LineChart(
        title=f"Bus bandwidth of collectives of {format_bytes(num_bytes)} on H100s", lines=tuple(map(line, COLLECTIVES)),
        subtitle="All devices of the nodes take part; links as micro-benchmarks reach them.",
        x=Axis(title="nodes of eight devices"), y=Axis(title="bus bandwidth of a device, bytes/s"),
    )  # fmt: skip
