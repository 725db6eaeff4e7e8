"""The demo's model trained in every precision recipe that runs: `python benchmarks/precision.py [NAME ...] [--steps N]`.

Prints the last losses (the mean of the last tenth of the steps) beside fp32's in the same setting and from the same seeds, the
mean of that difference with its standard error, and how far fp32's own losses lie apart. `fp32, weights a last place off`
begins with each weight at the next number, and so shows how far runs amplify a difference. fp16 is trained with the three
techniques of Micikevicius et al. 2018 (arXiv 1710.03740), without each, and without any: an fp32 copy of the weights, a scaled
loss, and sums in fp32. On this model and at its learning rate only the scale is missed. The other two are in settings of their
own, one layer of the model: updates of less than half of a weight's last place, and a residual stream whose sums of squares
exceed 65,504.

Each step has one micro-batch, whose gradients are as small as they are in a global batch of `GLOBAL_TOKENS`: the loss is
divided by all targets of a step, so that is what a micro-batch of a large batch gives. The optimizer does not see the factor.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from shardwise.layout.layout import Layout
from shardwise.layout.rules.engine import require_runnable
from shardwise.model.load import load_model
from shardwise.model.optimizer_program import bytes_per_parameter
from shardwise.run.data.batches import Batches
from shardwise.run.data.corpus_writer import write_corpus
from shardwise.run.data.documents import python_library
from shardwise.run.data.token_shard_reader import TokenShards
from shardwise.run.engine.micro_batch import MicroBatch
from shardwise.run.kernels import matmul, norms
from shardwise.run.parallel.world import World
from shardwise.run.recipe import TrainingRecipe
from shardwise.run.trainer.training_engine import TrainingEngine
from shardwise.step.rank_program import RankProgram
from shardwise.values.errors import InputError
from shardwise.values.precision import PRECISIONS, Precision

ROOT = Path(__file__).parents[1]
MODEL = load_model(str(ROOT / "examples" / "small-llama" / "config.json"))
SEQ_LEN, NUM_SEQS, GLOBAL_TOKENS = 64, 8, 2**20
CORPUS_BYTES = 2_000_000
# Products of 16 pairs are summed by one instruction, and its sum is rounded to the accumulator's format. Source: PTX ISA,
# mma.sync.m16n8k16 with .f16 accumulators.
SUMMED_AT_ONCE = 16


@dataclass(frozen=True)
class Setting:
    """What all that is compared has in common. `embedding_scale` multiplies what leaves the embedding."""

    layers: int = 3
    learning_rate: float = 3e-3
    is_warmed_up: bool = True
    embedding_scale: float = 1.0


USUAL = Setting()
# Adam moves a weight by at most about the learning rate. Weights are drawn with a standard deviation of 0.02: five of six exceed
# 2**-8, from where on numbers of fp16 lie at least 2**-18 = 3.8e-6 apart, and an update of less than half of that is lost.
SMALL_UPDATES = Setting(layers=1, learning_rate=1e-6, is_warmed_up=False)
# Embeddings of a standard deviation of 0.02, times 1000: a root mean square of 20, and 256 squares sum up to 102,400.
LARGE_STREAM = Setting(layers=1, is_warmed_up=False, embedding_scale=1000.0)


@dataclass(frozen=True)
class Variant:
    """A recipe in a setting, and what it is trained without."""

    precision: Precision
    setting: Setting
    loss_scale: float = 2.0**16
    sums_in_fp16: bool = False
    is_nudged: bool = False  # every initial weight is the next larger number of its format


def variants(usual: Setting = USUAL) -> Mapping[str, Variant]:
    """Every recipe that runs on one device, and fp16 without its techniques."""
    fp32, fp16 = PRECISIONS["fp32"], PRECISIONS["fp16"]
    bare = replace(fp16, master=None)
    return {
        **{name: Variant(precision, usual) for name, precision in PRECISIONS.items() if _runs(precision)},
        "fp32, weights a last place off": Variant(fp32, usual, is_nudged=True),
        "fp8_nanotron, an fp32 master copy": Variant(replace(PRECISIONS["fp8_nanotron"], master="fp32"), usual),
        "fp16 without an fp32 copy of the weights": Variant(bare, usual),
        "fp16 without loss scaling": Variant(fp16, usual, loss_scale=1.0),
        "fp16 with sums in fp16": Variant(fp16, usual, sums_in_fp16=True),
        "fp16 without any of the three": Variant(bare, usual, loss_scale=1.0, sums_in_fp16=True),
        "small updates: fp32": Variant(fp32, SMALL_UPDATES),
        "small updates: fp16": Variant(fp16, SMALL_UPDATES),
        "small updates: fp16 without an fp32 copy of the weights": Variant(bare, SMALL_UPDATES),
        "large stream: fp32": Variant(fp32, LARGE_STREAM),
        "large stream: fp16": Variant(fp16, LARGE_STREAM),
        "large stream: fp16 with sums in fp16": Variant(fp16, LARGE_STREAM, sums_in_fp16=True),
    }


def _runs(precision: Precision) -> bool:
    try:
        require_runnable(MODEL, Layout(), precision)
    except InputError:
        return False
    return True


@contextmanager
def sums_in_fp16() -> Iterator[None]:
    """Products of fp16 and squares of norms whose running sums are rounded to fp16."""
    multiplied, norm = matmul.multiply, norms.NORMS["rms_norm"]

    def rounded(rows: Tensor, columns: Tensor) -> Tensor:
        total = torch.zeros(len(rows), columns.shape[1], dtype=torch.float16)
        pairs = zip(torch.split(rows, SUMMED_AT_ONCE, 1), torch.split(columns, SUMMED_AT_ONCE, 0), strict=True)
        for row_part, column_part in pairs:
            total = torch.addmm(total.float(), row_part.float(), column_part.float()).half()
        return total

    def rounded_norm(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        rows = x.reshape(-1, weight.numel())
        total = torch.zeros(len(rows), 1, dtype=torch.float16)
        for part in torch.split(rows.float(), SUMMED_AT_ONCE, 1):
            total = (total.float() + part.square().sum(-1, keepdim=True)).half()
        scale = (total.float() / weight.numel() + epsilon).rsqrt()
        return (rows * scale * weight.flatten()).to(x.dtype).view(x.shape), scale

    matmul.multiply = rounded
    norms.NORMS["rms_norm"] = replace(norm, forward=rounded_norm)  # type: ignore[index]
    try:
        yield
    finally:
        matmul.multiply = multiplied
        norms.NORMS["rms_norm"] = norm  # type: ignore[index]


@contextmanager
def products_in_fp32() -> Iterator[None]:
    """Products of bf16 made in fp32 and rounded, as those of fp16 are on a CPU: sums are fp32's either way, and a CPU without
    instructions for bf16 takes fifty times as long."""
    usual = matmul.accumulates_in_fp32
    matmul.accumulates_in_fp32 = lambda rows: rows.element_size() == 2
    try:
        yield
    finally:
        matmul.accumulates_in_fp32 = usual


def losses(variant: Variant, batches: Batches, num_steps: int, seed: int = 0) -> list[float]:
    """The loss of each step, in nats per target; NaN from the one on that could not be trained."""
    layout, setting = Layout(micro_batch_seqs=NUM_SEQS), variant.setting
    numerics = replace(MODEL.numerics, embedding_scale=setting.embedding_scale)
    model = replace(MODEL, num_layers=setting.layers, numerics=numerics)
    instance = RankProgram(architecture=model, layout=layout, precision=variant.precision, seq_len=SEQ_LEN)
    recipe = TrainingRecipe(
        steps=num_steps, learning_rate=setting.learning_rate, schedule="cosine" if setting.is_warmed_up else "constant",
        warmup_steps=num_steps // 10 if setting.is_warmed_up else 0, loss_scale=variant.loss_scale,
    )  # fmt: skip
    engine = TrainingEngine(instance, recipe, World(instance.mesh))
    engine.initialize(seed)
    if variant.is_nudged:
        for group in engine.groups:
            group.state.copy_(torch.nextafter(group.state, torch.full_like(group.state, torch.inf)))
        engine.publish()
    step_losses: list[float] = []
    for step in range(num_steps):
        read = batches.batch(step)
        batch = MicroBatch(torch.from_numpy(read.inputs_BT), torch.from_numpy(read.targets_BT))
        try:
            loss = float(engine.step([batch], GLOBAL_TOKENS, 1, step).loss) * GLOBAL_TOKENS / (NUM_SEQS * SEQ_LEN)
        except InputError:
            loss = float("nan")
        step_losses.append(loss)
    return step_losses


@dataclass(frozen=True)
class Row:
    """What a variant was trained to, seed by seed: the mean loss of the last tenth of the steps, and the first loss."""

    first: float
    last: tuple[float, ...]

    def over(self, exact: Row) -> tuple[float, float]:
        """How far the last losses are above those of the same seeds in fp32, relative: the mean, and its standard error (NaN of
        one seed)."""
        ratios = [loss / exact_loss - 1 for loss, exact_loss in zip(self.last, exact.last, strict=True)]
        return statistics.mean(ratios), standard_error(ratios)


def standard_error(values: Sequence[float]) -> float:
    """That of their mean: the sample's standard deviation over the root of how many there are."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def trained(variant: Variant, folder: Path, num_steps: int, seeds: Sequence[int]) -> Row:
    """A variant trained from each of some seeds, of its first weights and of the order of its data."""
    firsts, lasts = [], []
    for seed in seeds:
        batches = Batches(TokenShards(folder, "train"), seq_len=SEQ_LEN, batch=NUM_SEQS, seed=seed)
        with sums_in_fp16() if variant.sums_in_fp16 else products_in_fp32():
            step_losses = losses(variant, batches, num_steps, seed)
        firsts.append(step_losses[0])
        lasts.append(statistics.mean(step_losses[-max(num_steps // 10, 1) :]))
    return Row(statistics.mean(firsts), tuple(lasts))


def main() -> None:
    """Print a row for each variant."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="variants, fp32 of a setting first (default: all)")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0], help="of first weights and of the order of the data"
    )
    parser.add_argument("--learning-rate", type=float, default=USUAL.learning_rate, help="of the usual setting")
    arguments = parser.parse_args()
    known = variants(replace(USUAL, learning_rate=arguments.learning_rate))
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "data"
        write_corpus(python_library(CORPUS_BYTES), folder, vocab_size=MODEL.vocab_size, held_out=0.01)
        exact: dict[Setting, Row] = {}
        print(
            "| recipe | first loss | last loss | over fp32's | standard error | bytes per parameter | s a step | by seed |\n"
            "|---|---|---|---|---|---|---|---|"
        )
        for name in arguments.names or known:
            started, variant = time.process_time(), known[name]
            row = trained(variant, folder, arguments.steps, arguments.seeds)
            seconds = (time.process_time() - started) / arguments.steps / len(arguments.seeds)
            mean, error = row.over(exact.setdefault(variant.setting, row))
            width, seeds = bytes_per_parameter(variant.precision), " ".join(f"{loss:.4f}" for loss in row.last)
            print(
                f"| {name} | {row.first:.4f} | {statistics.mean(row.last):.4f} | {mean:+.2%} | {error:.2%} | {width:g} | "
                f"{seconds:.2f} | {seeds} |",
                flush=True,
            )
        for exact_row in exact.values():
            print(
                f"fp32's scatter from seed to seed: {standard_error(exact_row.last) * math.sqrt(len(exact_row.last)):.4f} nats"
            )


if __name__ == "__main__":
    main()
