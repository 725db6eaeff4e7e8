"""Charts of the books on what fills a device: sequence length, recompute policy, ZeRO stage, degree of every axis."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from shardwise.book_formulas.rules import zero_state_bytes
from shardwise.hardware import Cluster, load_cluster
from shardwise.layout import Layout
from shardwise.model import Architecture, Job, load_model
from shardwise.present.charts.chart import Axis, Chart, bar_chart, categories, column_panel
from shardwise.price import Problem
from shardwise.price.estimate import stage_memories
from shardwise.values import MEMORY_TERMS, format_quantity

CHIP = "h100"
LENGTHS = (1024, 2048, 4096, 8192, 16384)
POLICIES = ("none", "selective", "full")
Memory = Mapping[str, float]


def fullest(model: str | Architecture, seq_len: int, layout: Layout, num_micro_batches: int = 1) -> Memory:
    """Bytes of the fullest device of H100s under a layout, by term; each replica has so many micro-batches of a step."""
    architecture = load_model(model) if isinstance(model, str) else model
    replicas = layout.dp * layout.fsdp
    job = Job(global_batch_tokens=seq_len * replicas * num_micro_batches * layout.micro_batch_seqs, seq_len=seq_len)
    return max(
        stage_memories(Problem(architecture, _cluster(layout), job), layout), key=lambda memory: sum(memory.values())
    )


def _cluster(layout: Layout) -> Cluster:
    return load_cluster(f"{CHIP}:{layout.num_devices}")


def memory_panels(
    title: str, subtitle: str, axis_title: str, columns: Sequence[str], rows: Mapping[str, Sequence[Memory]]
) -> Chart:
    """Stacked memory, a panel for each row, against the capacity of a device."""
    capacity = load_cluster(f"{CHIP}:1").chip.memory_bytes

    x = Axis(title=axis_title, categories=categories(columns))
    panels = (
        column_panel(
            x, name, "B", {term: [memory[term] for memory in memories] for term in MEMORY_TERMS},
            limit=capacity, dashed=f"{CHIP}: {capacity / 1e9:.0f} GB",
        )
        for name, memories in rows.items()
    )  # fmt: skip
    return Chart(title=title, subtitle=subtitle, panels=tuple(panels))


def _over_lengths(rows: Mapping[str, Callable[[int], Memory]], lengths: Sequence[int]) -> dict[str, list[Memory]]:
    return {name: [memory(length) for length in lengths] for name, memory in rows.items()}


def memory_by_length(
    models: Sequence[str] = ("llama-3-8b", "llama-3-70b", "llama-3.1-405b"), lengths: Sequence[int] = LENGTHS
) -> Chart:
    """One sequence on one device, nothing sharded, nothing recomputed. Source: the playbook, "Memory for activations"."""
    rows = {name: lambda length, name=name: fullest(name, length, Layout()) for name in models}
    return memory_panels(
        "Memory by the length of sequences", "One sequence at a time on one device, bf16 with fp32 states; nothing recomputed.",
        "tokens of a sequence", [f"{length:,}" for length in lengths], _over_lengths(rows, lengths),
    )  # fmt: skip


def recompute_memory(model: str = "llama-3-8b", lengths: Sequence[int] = LENGTHS) -> Chart:
    """The same under each policy of recomputation. Source: the playbook, "Activation recomputation"."""
    rows = {
        f"recompute {policy}": lambda length, policy=policy: fullest(model, length, Layout(recompute=policy))
        for policy in POLICIES
    }
    return memory_panels(
        f"Memory of {model} by what is recomputed", "One sequence at a time on one device, bf16 with fp32 states.",
        "tokens of a sequence", [f"{length:,}" for length in lengths], _over_lengths(rows, lengths),
    )  # fmt: skip


def zero_bars(num_params: float = 7.5e9, degree: int = 64) -> Chart:
    """Weights, gradients and optimizer state of a device under each stage of ZeRO. Source: the playbook, "ZeRO"; its figure
    is that of the ZeRO paper, whose numbers are 120, 31.4, 16.6 and 1.9 GB."""
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
    """Memory against the degree of data parallelism, by ZeRO stage. Source: the playbook, "ZeRO-3"."""
    rows = {
        f"ZeRO {stage}": [fullest(model, seq_len, _data_parallel(stage, degree)) for degree in degrees]
        for stage in range(4)
    }
    return memory_panels(
        f"Memory of {model} by ZeRO stage", f"One sequence of {seq_len:,} tokens on each device, selective recomputation.",
        "data-parallel devices", list(map(str, degrees)), rows,
    )  # fmt: skip


def _data_parallel(zero_stage: int, degree: int) -> Layout:
    if zero_stage == 0 or degree == 1:
        return Layout(dp=degree, recompute="selective")
    return Layout(fsdp=degree, zero_stage=zero_stage, recompute="selective")


def tp_memory(model: str = "llama-3-70b", seq_len: int = 4096, degrees: Sequence[int] = (1, 2, 4, 8, 16)) -> Chart:
    """Memory against the degree of tensor parallelism, without and with sequence parallelism. Source: the playbook, "Tensor
    parallelism" and "Sequence parallelism"."""

    def of(sequence_parallel: bool) -> list[Memory]:
        layouts = (Layout(tp=tp, sequence_parallel=sequence_parallel and tp > 1) for tp in degrees)
        return [fullest(model, seq_len, layout) for layout in layouts]

    return memory_panels(
        f"Memory of {model} by tensor parallelism", f"One sequence of {seq_len:,} tokens; nothing else is sharded.",
        "tensor-parallel devices", list(map(str, degrees)),
        {"tensor parallelism": of(False), "tensor and sequence parallelism": of(True)},
    )  # fmt: skip


def cp_memory(
    model: str = "llama-3-8b", lengths: Sequence[int] = (4096, 16384, 65536, 131072), degrees: Sequence[int] = (1, 4, 16)
) -> Chart:  # fmt: skip
    """Memory against the length of sequences, by context parallelism beside tensor parallelism. Source: the playbook, "Context
    parallelism"."""

    def layout(cp: int) -> Layout:
        split = Layout(tp=4, sequence_parallel=True)
        return replace(split, cp=cp, cp_variant="zigzag") if cp > 1 else split

    rows = {f"tp=4 cp={cp}": lambda length, cp=cp: fullest(model, length, layout(cp)) for cp in degrees}
    return memory_panels(
        f"Memory of {model} by context parallelism",
        "One sequence at a time, tp=4 with sequence parallelism; nothing recomputed.",
        "tokens of a sequence", [f"{length:,}" for length in lengths], _over_lengths(rows, lengths),
    )  # fmt: skip


def pp_memory(
    model: str = "llama-3-8b", degrees: Sequence[int] = (1, 2, 4, 8), lengths: Sequence[int] = (4096, 16384)
) -> Chart:
    """Memory of the fullest stage against the number of stages, 1F1B with as many micro-batches: weights are divided, activations
    are not. Source: the playbook, "Pipeline parallelism"."""
    rows = {
        f"sequences of {length:,}": [fullest(model, length, _pipeline(pp), pp) for pp in degrees] for length in lengths
    }
    return memory_panels(
        f"Memory of {model} by pipeline stages", "The fullest stage under 1F1B, as many micro-batches of one sequence as stages.",
        "pipeline stages", list(map(str, degrees)), rows,
    )  # fmt: skip


def _pipeline(pp: int) -> Layout:
    return Layout(pp=pp, schedule="1f1b") if pp > 1 else Layout()


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
    model: str = "llama-3-8b", lengths: Iterable[int] = (1024, 4096, 16384), policies: Sequence[str] = POLICIES[1:]
) -> Chart:
    """What each axis, and some products of them, leaves on a device of eight, by recomputation and length. Source: the playbook,
    "5D parallelism in a nutshell"."""
    lengths = tuple(lengths)
    rows = {
        f"recompute {policy}, sequences of {length:,}": [
            fullest(model, length, replace(layout, recompute=policy), layout.pp) for layout in SAVINGS.values()
        ]
        for policy in policies
        for length in lengths
    }
    return memory_panels(
        f"Memory of {model} under each parallelism",
        "The fullest of eight devices, micro-batches of one sequence; pipelines have as many as stages.",
        "layout", list(SAVINGS), rows,
    )  # fmt: skip
