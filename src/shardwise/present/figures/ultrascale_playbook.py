"""Figures of the Ultra-Scale Playbook, drawn from our own numbers; some search layouts or simulate a step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from shardwise.hardware import load_cluster
from shardwise.hardware.network.message_simulation import ring_grid, simulate_collective
from shardwise.layout import Layout
from shardwise.model import Job, load_model
from shardwise.present.charts.chart import Axis, Chart, Curve
from shardwise.present.charts.common_charts import curve_chart
from shardwise.present.charts.sharding_charts import strip_of
from shardwise.present.charts.step_charts import step_chart
from shardwise.present.charts.sweep_charts import heat_map
from shardwise.present.figures import playbook_charts
from shardwise.present.figures.figure import PLAYBOOK, Figure, book_figure
from shardwise.present.figures.playbook_charts import bubbles, pipeline_timeline, ring_work
from shardwise.present.verbs.many_plans import sweep
from shardwise.price import Problem, Simulation, simulate
from shardwise.sharding import CollectiveKind

RING = 5  # devices of the playbook's animations


def ring(kind: CollectiveKind) -> Chart:
    """Draw a collective on a one-way ring, step by step."""
    return strip_of(simulate_collective(kind, 100e6, ring_grid((RING,), one_way=True), split=False))


NODE = "h100:8"
SIMULATED_SEQ_LEN = 4096


def _simulated(model: str, layout_text: str, num_micro_batches: int = 1) -> Simulation:
    """Simulate a step with a number of micro-batches in each replica."""
    layout = Layout.parse(layout_text)
    num_seqs = layout.num_replicas * layout.micro_batch_seqs * num_micro_batches
    job = Job(global_batch_tokens=SIMULATED_SEQ_LEN * num_seqs, seq_len=SIMULATED_SEQ_LEN)
    return simulate(Problem(load_model(model), load_cluster(NODE), job), layout)


def overlap(model: str, layout: str) -> Chart:
    """Draw compute and traffic of a device over a step."""
    return step_chart(_simulated(model, layout))


def memory_of_a_step(model: str = "llama-3.2-1b", layout: str = "dp=8 micro_batch_seqs=2") -> Chart:
    """Draw bytes of a device over a step of three micro-batches; those of a pass count from its start."""
    simulation = _simulated(model, layout, num_micro_batches=3)
    points: list[tuple[float, float]] = []
    for when, num_bytes in simulation.memories[0].curve:
        points += [(when, points[-1][1])] if points else []
        points.append((when, num_bytes))
    points.append((simulation.step_time_s, points[-1][1]))
    return curve_chart(
        title=f"Memory of a device over a step of {model}",
        subtitle=f"{layout} on {NODE}, sequences of {SIMULATED_SEQ_LEN:,} tokens, simulated.",
        x=Axis(title="time", unit="s"),
        y=Axis(title="bytes of a device", unit="B"),
        marks=(Curve(label="held", points=tuple(points), colour="term:activations"),),
    )  # fmt: skip


def _pipeline(name: str, section: str, original: str, here: str, *sizes: int) -> Figure:
    schedule = name.replace("-", "_") if name != "1f1b" else name
    section = f"Pipeline parallelism: {section}"
    return _figure(f"pipeline-{name}", lambda: pipeline_timeline(schedule, *sizes), section, original, here)


def _ring(kind: CollectiveKind, original: str) -> Figure:
    here = "A frame for each step, sent by the simulator that the closed forms of costs are tested against."
    name, section = f"collective-{kind.value.replace('_', '-')}", "A0: parallel programming crash course"
    return _figure(name, partial(ring, kind), section, original, here)


_EIGHT = (
    "Four stages and eight micro-batches, passes of a second each: forward, backward for activations and for weights."
)
# Source: the playbook, "Benchmarking thousands of configurations": 1M tokens, sequences of 4,096.
BATCH_TOKENS, SEARCHED_SEQ_LEN = 2**20, 4096

MODELS = ("llama-3.2-1b", "llama-3.2-3b", "llama-3-8b", "llama-3-70b")
NODES = (1, 2, 4, 8, 16, 32, 64)


def best_layouts(models: Sequence[str] = MODELS, num_nodes: Sequence[int] = NODES) -> Chart:
    """Draw the layout with the best predicted MFU for every model and number of H100s, in nodes of eight."""
    devices = ",".join(str(8 * nodes) for nodes in num_nodes)
    over = (f"model={','.join(models)}", f"gpus={devices}")
    swept = sweep(models[0], "h100:8", over=over, global_batch_tokens=BATCH_TOKENS, seq_len=SEARCHED_SEQ_LEN)
    return heat_map(swept)


_figure = partial(book_figure, PLAYBOOK)
FIGURES = (
    _figure("memory-of-a-step", memory_of_a_step, "Profiling the memory usage",
            "Memory of a device over the first steps of training, from PyTorch's profiler.",
            "A step of three micro-batches of Llama 3.2 1B, simulated pass by pass: the rise within a pass is drawn at its "
            "start, and the allocator's first step is left out."),
    _figure("memory-by-length", playbook_charts.memory_by_length, "Memory for activations",
            "Parameters, gradients, optimizer and activations of Llama models against the length of a sequence.",
            "The same by term. Attention is flash, so that no scores are kept; the playbook's formula has them."),
    _figure("recompute", playbook_charts.recompute_memory, "Activation recomputation",
            "The same memory with no, selective and full recomputation.",
            "Llama 3 8B under each policy. Selective rebuilds elementwise operations and saves about a third; the playbook's, "
            "of attention, saves little with flash attention."),
    _figure("dp-overlap", lambda: overlap("llama-3.2-1b", "dp=8 micro_batch_seqs=2"), "Data parallelism: overlap and buckets",
            "Gradients are reduced bucket by bucket while the backward pass goes on.",
            "Compute and traffic of a step of Llama 3.2 1B on eight H100s, simulated."),
    _figure("dp-scaling", playbook_charts.dp_scaling, "Data parallelism: revisiting global batch size",
            "Measured tokens/s of a device and memory against the number of data-parallel devices.",
            "The same, predicted for the usual stack of H100s."),
    _figure("zero-stages", playbook_charts.zero_bars, "ZeRO: memory usage revisited",
            "The ZeRO paper's example: state of 7.5B parameters over 64 devices, by stage.",
            "The rule 2 + 2 + 12 bytes: 120, 31.4, 16.6 and 1.88 GB."),
    _figure("zero-memory", playbook_charts.zero_memory, "ZeRO-3: parameter partitioning",
            "Memory of an 8B model against data-parallel degree and ZeRO stage.",
            "All terms of a device, activations and gathered weights included."),
    _figure("zero3-overlap", lambda: overlap("llama-3.2-1b", "fsdp=8 zero_stage=3 micro_batch_seqs=2"),
            "ZeRO-3: parameter partitioning",
            "Weights are gathered layer by layer, ahead of their use, in both passes.",
            "Compute and traffic of a step of Llama 3.2 1B on eight H100s, simulated."),
    _figure("tp-overlap", lambda: overlap("llama-3.2-1b", "tp=8 sequence_parallel=true micro_batch_seqs=4"),
            "Tensor parallelism in a transformer block",
            "The AllReduces of a layer stand between its products and cannot be hidden behind them.",
            "Compute and traffic of a step of Llama 3.2 1B with tp = 8 and sequence parallelism, simulated."),
    _figure("tp-scaling", playbook_charts.tp_scaling, "Tensor parallelism in a transformer block",
            "Measured tokens/s of a device and the largest batch against the degree of tensor parallelism.",
            "The same, predicted, with sequence parallelism; beyond a node throughput falls."),
    _figure("tp-memory", playbook_charts.tp_memory, "Tensor parallelism and sequence parallelism",
            "Memory of a 70B model against the degree of tensor parallelism, without and with sequence parallelism.",
            "All terms of a device."),
    _figure("ring-attention-work", ring_work, "Zig-Zag Ring Attention",
            "Causal masks of a sequence of 16 over four devices, in order and zigzag: in order the first has least to do.",
            "The share of the scores that each rank computes."),
    _figure("cp-memory", playbook_charts.cp_memory, "Context parallelism",
            "Memory of an 8B model against the length of sequences, by the degree of context parallelism.",
            "All terms of a device, tp = 4 beside."),
    _figure("pp-memory", playbook_charts.pp_memory, "Pipeline parallelism",
            "Memory of an 8B model by pipeline stages: parameters are divided, activations are not.",
            "The fullest stage under 1F1B, with as many micro-batches as stages."),
    _pipeline("naive", "splitting layers", "Sixteen layers on four devices, one batch: most of it is bubble.",
                  "Four stages and one micro-batch.", 4, 1),
    _pipeline("afab", "all forward, all backward", "Eight micro-batches: all forward passes first.", _EIGHT, 4, 8),
    _pipeline("1f1b", "one forward, one backward", "The same bubble with fewer activations held.", _EIGHT, 4, 8),
    _figure("pp-scaling", playbook_charts.pp_scaling, "Pipeline parallelism: one forward, one backward",
            "Measured throughput of 1F1B against stages, with m = p - 1 and with m = 32 micro-batches.",
            "The same, predicted."),
    _pipeline("interleaved", "interleaving stages", "Each device has several parts of the model.",
                  "Two virtual stages on each of four ranks, eight micro-batches.", 4, 8, 2),
    _figure("pipeline-bubbles", bubbles, "Pipeline parallelism: interleaving stages",
            "Bubbles of eight stages for several numbers of micro-batches m and of stages v on a device.",
            "The rule (p - 1) / (v·m)."),
    _pipeline("interleaved-breadth-first", "Llama 3.1", "Llama 3.1's schedule, between depth first and breadth first.",
                  "Breadth first: two virtual stages on each of four ranks, eight micro-batches.", 4, 8, 2),
    _pipeline("zb-h1", "zero bubble", "Weights' gradients fill the bubble; memory as of 1F1B.", _EIGHT, 4, 8),
    _pipeline("zb-h2", "zero bubble", "The same without a bubble inside, and with more activations.", _EIGHT, 4, 8),
    _figure("5d-memory", playbook_charts.memory_savings, "5D parallelism in a nutshell",
            "Memory of an 8B model under each parallelism, by length, with selective and with full recomputation.",
            "All terms of the fullest device of eight. Selective rebuilds elementwise operations; the playbook's, of "
            "attention, saves little with flash attention."),
    _figure("best-layouts", best_layouts, "Benchmarking thousands of configurations",
            "The best measured layout of every model on 1 to 64 nodes, batches of 1M tokens, with MFU as colour.",
            "The best predicted one of all legal layouts; the scale says for which stack. It takes a minute."),
    _figure("collective-bandwidth", playbook_charts.collective_bandwidths, "Pipeline parallelism: bandwidth between nodes",
            "Measured bandwidth of AllReduce, AllGather and ReduceScatter against the number of nodes.",
            "Bus bandwidth of 256 MiB by the cost of collectives; nothing of it is measured."),
    _ring(CollectiveKind.REDUCE_SCATTER, "An animation of the first half of a ring AllReduce over five devices."),
    _ring(CollectiveKind.ALL_GATHER, "An animation of the second half of a ring AllReduce over five devices."),
    _ring(CollectiveKind.ALL_REDUCE, "Both halves: 2 (N - 1) steps."),
)  # fmt: skip
