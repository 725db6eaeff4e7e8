"""Figures of "How to Scale Your Model"."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from shardwise.book_formulas import kernel_roofline, link_bandwidths, load_chip_and_links
from shardwise.hardware import load_chip, load_cluster
from shardwise.model import load_model
from shardwise.present.charts.chart import Chart, Points
from shardwise.present.figures.figure import BOOK, Figure, book_figure
from shardwise.present.figures.playbook_charts import pipeline_timeline, sharding_scheme
from shardwise.present.figures.roofline_charts import (
    attention_share_curves,
    matmul_curves,
    roofline_chart,
    strategy_ratios,
    strategy_times,
    systolic_frames,
    systolic_use,
)

CHIP = "tpu-v5e"
SLICE, POD = "tpu-v5p:4x4x4", "tpu-v5p:16x16x16"
WIDTHS = ((512, 2048), (1024, 4096), (8192, 28672))
_HEADS = {"N": 64, "K": 8, "H": 128}
KERNELS: tuple[tuple[str, str, Mapping[str, float]], ...] = (
    ("dot product", "dot", {"N": 2**20}),
    ("a step of decoding, 8,192 keys", "attention", {"B": 64, "T": 1, "S": 8192, **_HEADS}),
    ("16 tokens times a weight", "matmul", {"B": 16, "D": 8192, "F": 28672}),
    ("240 tokens times a weight", "matmul", {"B": 240, "D": 8192, "F": 28672}),
    ("attention over a prompt of 8,192", "attention", {"T": 8192, **_HEADS}),
)


def roofline() -> Chart:
    """Draw the rooflines of a chip from every memory and link, with kernels of very different intensity."""
    chip, links = load_chip_and_links(CHIP)
    rooflines = ((label, kernel_roofline(chip, kernel, sizes)) for label, kernel, sizes in KERNELS)
    points = [
        Points(label=label, points=((roofline.cost.intensity, roofline.attainable_flops_per_s),))
        for label, roofline in rooflines
    ]
    return roofline_chart(chip, link_bandwidths(chip, links), points)


def products(weights: str) -> Chart:
    """Draw the attainable FLOP/s of products against their batch, with weights in a format."""
    return matmul_curves(load_chip(CHIP), WIDTHS, weights=weights)


def _scheme(name: str, section: str, original: str, mesh: Mapping[str, int]) -> Figure:
    here = "Both products of an MLP, step by step as derived, with the devices that hold each shard."
    title = f"How to Parallelize a Transformer: {section}"
    charts = partial(sharding_scheme, name, mesh)
    return _figure(f"sharding-{name.lower().replace(' ', '-')}", charts, title, original, here, path="training/")


_figure = partial(book_figure, BOOK)
FIGURES = (
    _figure("roofline", roofline, "All About Rooflines: visualizing rooflines",
            "Two algorithms of different intensity under two bandwidths, on logarithmic axes.",
            f"{CHIP}: the same for kernels with sizes, from on-chip memory, HBM, the host and other chips.", path="roofline/"),
    _figure("roofline-matmul", partial(products, "int8"), "All About Rooflines, question 3",
            "Left to the reader: attainable FLOP/s against B of a product with int8 weights, for several D and F.",
            "Three pairs of D and F; a marker is where compute begins to bind.", path="roofline/"),
    _figure("roofline-matmul-bf16", partial(products, "bf16"), "All About Rooflines, question 2",
            "Described in words: a product in bf16 is bound by compute from B = 240.",
            "The same curves as of question 3, weights in bf16.", path="roofline/"),
    _figure("systolic-array", systolic_frames, "How to Think About TPUs, appendix B",
            "An animation: weights enter diagonally, then activations, and sums leave below.",
            "A product of 2 x 3 and 3 x 3, a frame for each cycle.", path="tpus/"),
    _figure("systolic-cycles", systolic_use, "How to Think About TPUs, appendix B",
            "Described in words: filling and draining are a bubble, and weights should be as large as the array.",
            "The share of cells and cycles that multiply, against the rows of activations.", path="tpus/"),
    _figure("attention-share", lambda: attention_share_curves(load_model("llama-3-70b"), load_chip(CHIP)),
            "All the Transformer Math, question 4",
            "Left to the reader: the cost of attention beside that of the feed-forward block, as the context grows.",
            "A layer of Llama 3 70B on TPU v5e, for a prompt and for steps of decoding.", path="transformers/"),
    _scheme("data parallelism", "data parallelism",
            "Activations split by batch, weights copied to every device.", {"X": 4}),
    _scheme("FSDP", "fully-sharded data parallelism",
            "Weights split as well, and gathered before they are used.", {"X": 4}),
    _scheme("tensor parallelism", "tensor parallelism",
            "Weights split along F, activations gathered before and scattered behind.", {"Y": 4}),
    _scheme("FSDP and tensor parallelism", "mixed FSDP and tensor parallelism",
            "Weights split over both axes, so that no parameter is held twice.", {"X": 2, "Y": 2}),
    _figure("strategies-4x4x4", lambda: strategy_ratios(load_cluster(SLICE)),
            "How to Parallelize a Transformer: mixed FSDP and tensor parallelism, first plot",
            "Compute over communication on 4 x 4 x 4 chips of v5p, F = 30,000: between about 400 and 850 tokens per chip only "
            "the mix is bound by compute.",
            "The crossings are computed: 434 and 850 tokens per chip. The text's 400 is for F = 32,768.", path="training/"),
    _figure("strategies-16x16x16", lambda: strategy_times(load_cluster(POD)),
            "How to Parallelize a Transformer: mixed FSDP and tensor parallelism, second plot",
            "Seconds of communication of each strategy on 16 x 16 x 16 chips against the batch, with those of compute.",
            "The mix is bound by compute from 1.6e6 tokens; the caption prints 1.6e10 for the same formula.", path="training/"),
    _figure("strategies-zoom", lambda: strategy_times(load_cluster(POD), batches=(1e6, 2e7)),
            "How to Parallelize a Transformer: mixed FSDP and tensor parallelism, third plot",
            "The same from 1M to 100M tokens: an 8-long axis for tensor parallelism is best up to 6M, pure FSDP above.",
            "The same strategies between 1M and 20M tokens.", path="training/"),
    _figure("pipeline-dualpipe", lambda: pipeline_timeline("dualpipe", 8, 20),
            "How to Parallelize a Transformer: pipelining; also The Ultra-Scale Playbook: zero bubble and DualPipe",
            "DeepSeek-V3's schedule: forward and backward passes of micro-batches from both ends, run together.",
            "Eight stages and twenty micro-batches, passes of a second each.", path="training/"),
)  # fmt: skip
