"""Draw every figure to a folder: rooflines, communication against the batch, memory of layouts, utilisation by nodes.

python examples/figures.py FOLDER
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import shardwise as sw
from shardwise.books.figures import (
    attention_share_curves,
    matmul_curves,
    memory_chart,
    roofline_chart,
    strategy_ratios,
    strategy_times,
    utilisation_map,
)
from shardwise.books.roofline import bandwidths, chip_and_links, kernel_roofline
from shardwise.draw.bars import draw_bars
from shardwise.draw.drawing import Drawing
from shardwise.draw.heat_map import draw_heat_map
from shardwise.draw.line_chart import Point
from shardwise.draw.lines import draw_lines

MODELS = ("llama-3.2-1b", "llama-3-8b", "llama-2-13b", "qwen3-32b", "llama-3-70b")
NODES = (1, 2, 4, 8, 16, 32, 64)
JOB = sw.Job(global_batch_tokens=4 * 2**20, seq_len=4096)
SMALL = sw.Job(global_batch_tokens=2**20, seq_len=4096)  # few tokens for each of many devices
HEADS = {"N": 64, "K": 8, "H": 128}
KERNELS: tuple[tuple[str, str, dict[str, float], str | None], ...] = (
    ("dot product", "dot", {"N": 2**20}, None),
    ("a step of decoding, 8,192 keys", "attention", {"B": 64, "T": 1, "S": 8192, **HEADS}, None),
    ("16 tokens times a weight", "matmul", {"B": 16, "D": 8192, "F": 28672}, None),
    ("16 tokens times an int8 weight", "matmul", {"B": 16, "D": 8192, "F": 28672}, "int8"),
    ("240 tokens times a weight", "matmul", {"B": 240, "D": 8192, "F": 28672}, None),
    ("attention over a prompt of 8,192", "attention", {"T": 8192, **HEADS}, None),
)
WIDTHS = ((512, 2048), (1024, 4096), (8192, 28672))
LAYOUTS = (
    sw.Layout(dp=8),
    sw.Layout(dp=8, recompute="full"),
    sw.Layout(fsdp=8, zero_stage=1, recompute="full"),
    sw.Layout(fsdp=8, zero_stage=2, recompute="full"),
    sw.Layout(fsdp=8, zero_stage=3, recompute="full"),
    sw.Layout(fsdp=8, zero_stage=3),
    sw.Layout(fsdp=2, tp=4, zero_stage=3, sequence_parallel=True, recompute="selective"),
)


def rooflines() -> Iterator[tuple[str, Drawing]]:
    """Two chips with kernels, and a product against its batch with weights in bf16 and in int8."""
    for name in ("tpu-v5e", "h100"):
        chip, links = chip_and_links(name)
        kernels = []
        for label, kernel, sizes, weights in KERNELS:
            found = kernel_roofline(chip, kernel, sizes, weights=weights)
            kernels.append(Point(label=label, x=found.cost.intensity, y=found.attainable_flops_per_s))
        yield f"roofline-{name}", draw_lines(roofline_chart(chip, bandwidths(chip, links), kernels))
    chip = sw.load_chip("tpu-v5e")
    for weights in ("bf16", "int8"):
        yield f"matmul-{weights}-weights", draw_lines(matmul_curves(chip, WIDTHS, weights=weights))
    yield "attention-share", draw_lines(attention_share_curves(sw.load_model("llama-3-70b"), chip))


def strategies() -> Iterator[tuple[str, Drawing]]:
    """The book's two figures."""
    yield "strategies-4x4x4", draw_lines(strategy_ratios(sw.load_cluster("tpu-v5p:4x4x4")))
    yield "strategies-16x16x16", draw_lines(strategy_times(sw.load_cluster("tpu-v5p:16x16x16")))


def memory() -> Iterator[tuple[str, Drawing]]:
    """One model under several layouts; a small one on a single device by the length of its sequences."""
    model, cluster = sw.load_model("llama-3-8b"), sw.load_cluster("h100:8")
    bars = [(str(layout), sw.estimate(model, cluster, JOB, layout).memory) for layout in LAYOUTS]
    title = f"Memory of {model.name} on {cluster.name}, sequences of {JOB.seq_len:,}"
    yield "memory", draw_bars(memory_chart(title, "Bytes of one device.", bars, cluster.chip))
    model, cluster = sw.load_model("llama-3.2-1b"), sw.load_cluster("h100:1")
    bars = []
    for length in (1024, 2048, 4096, 8192, 16384):
        for recompute in ("none", "selective", "full"):
            job, layout = sw.Job(global_batch_tokens=length, seq_len=length), sw.Layout(recompute=recompute)
            label = f"{length:,} tokens, recompute {recompute}"
            bars.append((label, sw.estimate(model, cluster, job, layout).memory))
    title = f"Memory of {model.name} on {cluster.name}, one sequence at a time"
    yield "memory-by-length", draw_bars(memory_chart(title, "Bytes of one device.", bars, cluster.chip))


def utilisation() -> Iterator[tuple[str, Drawing]]:
    """The best plan of every model on every number of nodes."""

    def best_mfu(model: str, nodes: int) -> float | None:
        try:
            return sw.plan(sw.load_model(model), sw.load_cluster(f"h100:{8 * nodes}"), SMALL).estimate.mfu
        except sw.NothingFitsError:
            return None

    job = f"H100, batches of {SMALL.global_batch_tokens:,} tokens, sequences of {SMALL.seq_len:,}, bf16"
    yield "utilisation", draw_heat_map(utilisation_map(MODELS, NODES, best_mfu, job))


def main(folder: str) -> int:
    """Write every figure and print where."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    for figures in (rooflines, strategies, memory, utilisation):
        for name, drawing in figures():
            path = target / f"{name}.svg"
            path.write_text(drawing.svg(), encoding="utf-8")
            print(path)
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/figures.py FOLDER")
    sys.exit(main(sys.argv[1]))
