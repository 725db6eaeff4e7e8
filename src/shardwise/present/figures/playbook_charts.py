"""Charts of the Ultra-Scale Playbook: memory by length, policy, ZeRO stage and degree; scaling, bubbles, split sequences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from shardwise.book_formulas.rules import attended_pairs, zero_state_bytes
from shardwise.derive.sharded_einsum import derive_by_cases, shard_expression
from shardwise.hardware import Cluster, Cut, collective_report, load_cluster
from shardwise.hardware.network.links import CollectiveName
from shardwise.layout import Layout, get_cp_variant
from shardwise.model import Architecture, Job, load_model
from shardwise.pipeline import build_actions, play_actions
from shardwise.pipeline.schedule_definition import bubble_ratio
from shardwise.present.charts.chart import Axis, Chart, Curve, Panel
from shardwise.present.charts.common_charts import bar_chart, categories, column_panel, curve_chart
from shardwise.present.charts.sharding_charts import moments, shards_chart
from shardwise.present.charts.step_charts import timeline_chart
from shardwise.price import Estimate, Problem
from shardwise.price.estimate import estimate, stage_memories
from shardwise.sharding import Mesh, parse_expression
from shardwise.values import MEMORY_TERMS, format_bytes, format_quantity

CHIP = "h100"
LENGTHS = (1024, 2048, 4096, 8192, 16384)
POLICIES = ("none", "selective", "full")
Memory = Mapping[str, float]
Value = TypeVar("Value", int, str)


def fullest(model: str | Architecture, seq_len: int, layout: Layout, num_micro_batches: int = 1) -> Memory:
    """Return bytes of the fullest H100 under a layout, by term; each replica has `num_micro_batches` micro-batches in a step."""
    architecture = load_model(model) if isinstance(model, str) else model
    replicas = layout.dp * layout.fsdp
    job = Job(global_batch_tokens=seq_len * replicas * num_micro_batches * layout.micro_batch_seqs, seq_len=seq_len)
    return max(
        stage_memories(Problem(architecture, _cluster(layout), job), layout), key=lambda memory: sum(memory.values())
    )


def _cluster(layout: Layout) -> Cluster:
    return load_cluster(f"{CHIP}:{layout.num_devices}")


def memory_panels(
    title: str, subtitle: str, axis_title: str, columns: Sequence[Value], rows: Mapping[str, Callable[[Value], Memory]]
) -> Chart:  # fmt: skip
    """Return stacked memory of each column, a panel for each row, against the capacity of a device."""
    capacity = load_cluster(f"{CHIP}:1").chip.capacity_bytes
    x = Axis(
        title=axis_title,
        categories=categories(f"{column:,}" if isinstance(column, int) else str(column) for column in columns),
    )

    def panel(name: str, memory_of: Callable[[Value], Memory]) -> Panel:
        memories = [memory_of(column) for column in columns]
        parts = {term: [memory[term] for memory in memories] for term in MEMORY_TERMS}
        return column_panel(x, name, "B", parts, limit=capacity, dashed=f"{CHIP}: {capacity / 1e9:.0f} GB")

    return Chart(
        title=title, subtitle=subtitle, panels=tuple(panel(name, memory_of) for name, memory_of in rows.items())
    )


def memory_by_length(
    models: Sequence[str] = ("llama-3-8b", "llama-3-70b", "llama-3.1-405b"), lengths: Sequence[int] = LENGTHS
) -> Chart:
    """Draw the memory of one sequence on one device, nothing sharded, nothing recomputed. Source: the playbook, "Memory for
    activations"."""
    return memory_panels(
        "Memory by the length of sequences", "One sequence at a time on one device, bf16 with fp32 states; nothing recomputed.",
        "tokens of a sequence", lengths, {model: partial(fullest, model, layout=Layout()) for model in models},
    )  # fmt: skip


def recompute_memory(model: str = "llama-3-8b", lengths: Sequence[int] = LENGTHS) -> Chart:
    """Draw the memory of one sequence on one device under each policy of recomputation. Source: the playbook, "Activation
    recomputation"."""
    return memory_panels(
        f"Memory of {model} by what is recomputed", "One sequence at a time on one device, bf16 with fp32 states.",
        "tokens of a sequence", lengths,
        {f"recompute {policy}": partial(fullest, model, layout=Layout(recompute=policy)) for policy in POLICIES},
    )  # fmt: skip


def zero_bars(num_params: float = 7.5e9, degree: int = 64) -> Chart:
    """Draw weights, gradients and optimizer state of a device under each stage of ZeRO. Source: the playbook, "ZeRO"; its
    figure is that of the ZeRO paper, whose numbers are 120, 31.4, 16.6 and 1.9 GB."""
    bars = {}
    for stage in range(4):
        state = zero_state_bytes(num_params, stage, degree)
        parts = {"parameters": state.weights, "gradients": state.gradients, "optimizer": state.optimizer}
        bars[f"ZeRO {stage}" if stage else "plain data parallelism"] = parts
    subtitle = (
        f"{format_quantity(num_params)} parameters over {degree} devices: 2 + 2 + 12 bytes each, with master weights."
    )
    return bar_chart("State of a device by stage of ZeRO", subtitle, bars)


def zero_memory(
    model: str = "llama-3-8b", seq_len: int = 4096, degrees: Sequence[int] = (1, 2, 4, 8, 16, 32, 64)
) -> Chart:
    """Draw memory against the degree of data parallelism, by ZeRO stage. Source: the playbook, "ZeRO-3"."""

    def memory(stage: int, degree: int) -> Memory:
        sharded = Layout(fsdp=degree, zero_stage=stage, recompute="selective")
        return fullest(model, seq_len, sharded if stage and degree > 1 else Layout(dp=degree, recompute="selective"))

    return memory_panels(
        f"Memory of {model} by ZeRO stage", f"One sequence of {seq_len:,} tokens on each device, selective recomputation.",
        "data-parallel devices", degrees, {f"ZeRO {stage}": partial(memory, stage) for stage in range(4)},
    )  # fmt: skip


def tp_memory(model: str = "llama-3-70b", seq_len: int = 4096, degrees: Sequence[int] = (1, 2, 4, 8, 16)) -> Chart:
    """Draw memory against the degree of tensor parallelism, without and with sequence parallelism. Source: the playbook,
    "Tensor parallelism" and "Sequence parallelism"."""

    def memory(sequence_parallel: bool, tp: int) -> Memory:
        return fullest(model, seq_len, Layout(tp=tp, sequence_parallel=sequence_parallel and tp > 1))

    return memory_panels(
        f"Memory of {model} by tensor parallelism", f"One sequence of {seq_len:,} tokens; nothing else is sharded.",
        "tensor-parallel devices", degrees,
        {"tensor parallelism": partial(memory, False), "tensor and sequence parallelism": partial(memory, True)},
    )  # fmt: skip


def cp_memory(
    model: str = "llama-3-8b", lengths: Sequence[int] = (4096, 16384, 65536, 131072), degrees: Sequence[int] = (1, 4, 16)
) -> Chart:  # fmt: skip
    """Draw memory against the length of sequences, by context parallelism beside tensor parallelism. Source: the playbook,
    "Context parallelism"."""

    def layout(cp: int) -> Layout:
        split = Layout(tp=4, sequence_parallel=True)
        return replace(split, cp=cp, cp_variant="zigzag") if cp > 1 else split

    return memory_panels(
        f"Memory of {model} by context parallelism",
        "One sequence at a time, tp=4 with sequence parallelism; nothing recomputed.",
        "tokens of a sequence", lengths, {f"tp=4 cp={cp}": partial(fullest, model, layout=layout(cp)) for cp in degrees},
    )  # fmt: skip


def pp_memory(
    model: str = "llama-3-8b", degrees: Sequence[int] = (1, 2, 4, 8), lengths: Sequence[int] = (4096, 16384)
) -> Chart:
    """Draw memory of the fullest stage against the number of stages, 1F1B with as many micro-batches: weights are divided,
    activations are not. Source: the playbook, "Pipeline parallelism"."""

    def memory(length: int, pp: int) -> Memory:
        return fullest(model, length, Layout(pp=pp, schedule="1f1b") if pp > 1 else Layout(), pp)

    return memory_panels(
        f"Memory of {model} by pipeline stages", "The fullest stage under 1F1B, as many micro-batches of one sequence as stages.",
        "pipeline stages", degrees, {f"sequences of {length:,}": partial(memory, length) for length in lengths},
    )  # fmt: skip


SAVINGS: Mapping[str, Layout] = {
    "one device": Layout(),
    "ZeRO 1, 8": Layout(fsdp=8, zero_stage=1),
    "ZeRO 2, 8": Layout(fsdp=8, zero_stage=2),
    "ZeRO 3, 8": Layout(fsdp=8, zero_stage=3),
    "tp 8": Layout(tp=8),
    "tp 8, sp": Layout(tp=8, sequence_parallel=True),
    "cp 8": Layout(cp=8, cp_variant="zigzag"),
    "pp 8": Layout(pp=8, schedule="1f1b"),
    "pp 2 · tp 4, sp": Layout(pp=2, tp=4, sequence_parallel=True, schedule="1f1b"),
    "cp 2 · tp 4, sp": Layout(cp=2, tp=4, sequence_parallel=True, cp_variant="zigzag"),
    "ZeRO 3, 2 · tp 4, sp": Layout(fsdp=2, tp=4, zero_stage=3, sequence_parallel=True),
}


def memory_savings(
    model: str = "llama-3-8b", lengths: Sequence[int] = (1024, 4096, 16384), policies: Sequence[str] = POLICIES[1:]
) -> Chart:
    """Draw memory of the fullest of eight devices under each axis and some products of axes, by recomputation and length.
    Source: the playbook, "5D parallelism in a nutshell"."""

    def memory(policy: str, length: int, name: str) -> Memory:
        return fullest(model, length, replace(SAVINGS[name], recompute=policy), SAVINGS[name].pp)

    return memory_panels(
        f"Memory of {model} under each parallelism",
        "The fullest of eight devices, micro-batches of one sequence; pipelines have as many as stages.",
        "layout", list(SAVINGS),
        {
            f"recompute {policy}, sequences of {length:,}": partial(memory, policy, length)
            for policy in policies
            for length in lengths
        },
    )  # fmt: skip


SEQ_LEN = 4096
DEVICES_OF_NODE = 8
COLLECTIVES: tuple[CollectiveName, ...] = ("all_reduce", "all_gather", "reduce_scatter")


def predicted(model: str, layout: Layout, num_micro_batches: int = 1) -> Estimate:
    """Return the estimate of a step on H100s; each replica has `num_micro_batches` micro-batches of sequences of 4,096 tokens."""
    num_seqs = layout.num_replicas * num_micro_batches * layout.micro_batch_seqs
    job = Job(global_batch_tokens=SEQ_LEN * num_seqs, seq_len=SEQ_LEN)
    return estimate(Problem(load_model(model), load_cluster(f"{CHIP}:{layout.num_devices}"), job), layout)


def _degrees(title: str, degrees: Sequence[int]) -> Axis:
    return Axis(title=title, categories=categories(map(str, degrees)))


def _rate(x: Axis, estimates: Sequence[Estimate | None], title_suffix: str = "") -> Panel:
    rates = [estimate.tokens_per_s_per_device if estimate else None for estimate in estimates]
    return column_panel(x, f"tokens/s of a device{title_suffix}", "", {"tokens/s": rates})


def dp_scaling(model: str = "llama-3.2-1b", degrees: Sequence[int] = (8, 16, 32, 64, 128, 256, 512)) -> Chart:
    """Draw tokens/s of a device and its memory against plain data parallelism, one sequence on each device. Source: the
    playbook, "Data parallelism"."""
    estimates = [predicted(model, Layout(dp=degree)) for degree in degrees]
    x, parts = (
        _degrees("data-parallel devices", degrees),
        {term: [estimate.memory[term] for estimate in estimates] for term in MEMORY_TERMS},
    )
    return Chart(
        title=f"Data parallelism of {model}",
        subtitle=f"One sequence of {SEQ_LEN:,} tokens on each H100, nodes of eight, predicted.",
        panels=(_rate(x, estimates), column_panel(x, "memory of a device", "B", parts)),
    )


def largest_micro_batch(model: str, layout_of: Callable[[int], Layout], max_num_seqs: int = 1024) -> int:
    """Return the number of sequences of the largest micro-batch that fits in a device's memory; 0 if not even one does."""
    capacity = load_cluster(f"{CHIP}:1").chip.capacity_bytes

    def fits(num_seqs: int) -> bool:
        return sum(fullest(model, SEQ_LEN, layout_of(num_seqs)).values()) <= capacity

    low, high = 0, 1
    while high <= max_num_seqs and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def tp_scaling(model: str = "llama-3-8b", degrees: Sequence[int] = (2, 4, 8, 16, 32)) -> Chart:
    """Draw tokens/s of a device, and the largest micro-batch, against tensor parallelism with sequence parallelism. Source:
    the playbook, "Tensor parallelism"."""

    def layout(tp: int, num_seqs: int) -> Layout:
        return Layout(tp=tp, sequence_parallel=tp > 1, micro_batch_seqs=num_seqs)

    micro_batch_sizes = [largest_micro_batch(model, partial(layout, tp)) for tp in degrees]
    estimates = [
        predicted(model, layout(tp, num_seqs)) if num_seqs else None
        for tp, num_seqs in zip(degrees, micro_batch_sizes, strict=True)
    ]
    x = _degrees("tensor-parallel devices", degrees)
    batches = column_panel(
        x, "sequences of a micro-batch, at most", "", {"sequences": [float(size) for size in micro_batch_sizes]}
    )
    return Chart(
        title=f"Tensor parallelism of {model}",
        subtitle=f"The largest micro-batch of sequences of {SEQ_LEN:,} tokens on H100s, nodes of eight, predicted.",
        panels=(_rate(x, estimates), batches),
    )


def pp_scaling(
    model: str = "llama-3-8b", degrees: Sequence[int] = (2, 4, 8, 16, 32), num_micro_batches: int = 32
) -> Chart:
    """Draw tokens/s of a device against pipeline stages under 1F1B, with p - 1 micro-batches and with `num_micro_batches`.
    Source: the playbook, "One forward, one backward"."""

    x = _degrees("pipeline stages p", degrees)

    def panel(title: str, micro_batches_of: Callable[[int], int]) -> Panel:
        layouts = (Layout(pp=pp, schedule="1f1b", recompute="selective") for pp in degrees)
        return _rate(x, [predicted(model, layout, micro_batches_of(layout.pp)) for layout in layouts], f", {title}")

    return Chart(
        title=f"Pipeline parallelism of {model}",
        subtitle=f"1F1B, micro-batches of one sequence of {SEQ_LEN:,} tokens on H100s, nodes of eight, predicted.",
        panels=(
            panel("m = p - 1 micro-batches", lambda pp: pp - 1),
            panel(f"m = {num_micro_batches}", lambda pp: num_micro_batches),
        ),
    )


def collective_bandwidths(num_bytes: float = 256 * 2**20, num_nodes: Sequence[int] = (1, 2, 4, 8, 16, 32, 64)) -> Chart:
    """Draw the bus bandwidth, by NCCL's convention, of collectives over all devices of some nodes. Source: the playbook,
    "Pipeline parallelism", its plot of measurements."""
    topology = load_cluster(f"{CHIP}:{DEVICES_OF_NODE * max(num_nodes)}").sustained_topology

    def line(operation: CollectiveName) -> Curve:
        reports = (
            collective_report(operation, num_bytes, topology, [Cut(DEVICES_OF_NODE, 1), Cut(nodes, 1)])
            for nodes in num_nodes
        )
        points = tuple((float(nodes), report.busbw) for nodes, report in zip(num_nodes, reports, strict=True))
        return Curve(label=operation.replace("_", "-"), points=points)

    return curve_chart(
        title=f"Bus bandwidth of collectives of {format_bytes(num_bytes)} on H100s", marks=map(line, COLLECTIVES),
        subtitle="All devices of the nodes take part; links as micro-benchmarks reach them.",
        x=Axis(title="nodes of eight devices", log=True), y=Axis(title="bus bandwidth of a device, bytes/s", log=True),
    )  # fmt: skip


def pipeline_timeline(
    schedule: str, num_stages: int = 4, num_micro_batches: int = 8, num_virtual_stages: int | None = None
) -> Chart:
    """Draw a schedule with passes of a second each: forward, backward for activations, backward for weights. Source: the
    playbook, "Pipeline parallelism"."""
    return timeline_chart(play_actions(build_actions(schedule, num_stages, num_micro_batches, num_virtual_stages)))


def bubbles(
    num_stages: int = 8,
    num_micro_batches: Sequence[int] = (1, 8, 16, 32),
    num_virtual_stages: Sequence[int] = (1, 2, 4, 8),
) -> Chart:
    """Draw idle over ideal time, (p - 1) / (v·m), for m micro-batches and v virtual stages on each rank. Source: the
    playbook, "Interleaving stages"; one micro-batch is the naive pipeline."""
    bars = {
        f"m = {m}, v = {v}": {"bubble": bubble_ratio(num_stages, m, v)}
        for m in num_micro_batches
        for v in num_virtual_stages
        if v == 1 or m % num_stages == 0  # interleaving requires it
    }
    return bar_chart(
        f"Bubble of a pipeline of {num_stages} stages",
        "Idle over ideal time: m micro-batches, v virtual stages on each rank; v = 1: AFAB, 1F1B; v > 1: interleaved.",
        bars, unit="%",
    )  # fmt: skip


def ring_work(degree: int = 4, seq_len: int = 16) -> Chart:
    """Draw the share of a causal mask's scores that each rank of a ring computes: pieces in order, and one from either end
    (zigzag). Source: the playbook, "Ring Attention" and "Zig-Zag Ring Attention"."""

    def share(variant: str, rank: int) -> float:
        pieces = get_cp_variant(variant).sequence_pieces
        length = seq_len / (pieces * degree)
        places = (rank,) if pieces == 1 else (rank, pieces * degree - 1 - rank)
        pairs = sum(attended_pairs(length, (place + 1) * length, causal=True) for place in places)
        return pairs / attended_pairs(seq_len, seq_len, causal=True)

    x = Axis(title="rank", categories=categories(map(str, range(degree))))
    variants = {"ring": "ring: the sequence in order", "zigzag": "zigzag: a piece from either end"}
    return Chart(
        title=f"Scores of {degree} ranks under a causal mask",
        subtitle=f"Share of the pairs of {seq_len} queries and keys; the fullest rank decides.",
        panels=tuple(
            column_panel(
                x, title, "%", {"scores": [share(variant, rank) for rank in range(degree)]}, joined=False, limit=1 / degree,
                dashed="an even share",
            )
            for variant, title in variants.items()
        ),
    )  # fmt: skip


SIZES = {"B": 64, "D": 64, "F": 256}
# Both products of the book's MLP. Source: the book, "Training", its table of four schemes.
SCHEMES: Mapping[str, tuple[str, str]] = {
    "data parallelism": ("In[B_X, D] * Win[D, F] -> Tmp[B_X, F]", "Tmp[B_X, F] * Wout[F, D] -> Out[B_X, D]"),
    "FSDP": ("In[B_X, D] * Win[D_X, F] -> Tmp[B_X, F]", "Tmp[B_X, F] * Wout[F, D_X] -> Out[B_X, D]"),
    "tensor parallelism": ("In[B, D_Y] * Win[D, F_Y] -> Tmp[B, F_Y]", "Tmp[B, F_Y] * Wout[F_Y, D] -> Out[B, D_Y]"),
    "FSDP and tensor parallelism": (
        "In[B_X, D_Y] * Win[D_X, F_Y] -> Tmp[B_X, F_Y]", "Tmp[B_X, F_Y] * Wout[F_Y, D_X] -> Out[B_X, D_Y]",
    ),
}  # fmt: skip


def sharding_scheme(name: str, mesh: Mapping[str, int]) -> tuple[Chart, Chart]:
    """Draw the two products of an MLP under a scheme of `SCHEMES`, each from its operands at rest to its result."""
    first, second = (_product(f"{name}: {text}", text, Mesh.of(mesh)) for text in SCHEMES[name])
    return first, second


def _product(title: str, text: str, mesh: Mesh) -> Chart:
    expression = parse_expression(text)
    program = shard_expression(expression, mesh, {dim: size for dim, size in SIZES.items() if dim in text})
    return shards_chart(title, moments(program, derive_by_cases(program)), program.mesh)
