"""A small training run: a model, a layout, batches of random tokens in float64, and its recipe. No PyTorch here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shardwise.layout import Layout
from shardwise.model import DEFAULT_OPTIMIZER, Architecture
from shardwise.run import TrainingRecipe
from shardwise.run.trainer.flags import apply_changes, parse_whole_number
from shardwise.run.trainer.plan_for_engine import issue_policy
from shardwise.search import Plan
from shardwise.step import RankProgram
from shardwise.values import InputError, Precision, parse_overrides

Ids = NDArray[np.int64]
FP64 = Precision(
    name="fp64", weights="fp64", gradients="fp64", master=None, moments="fp64", activations="fp64",
    gradient_reduction="fp64",
)  # fmt: skip
MEAN_DOCUMENT_TOKENS = 5  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingCase:
    """Steps of a model under a layout, with `num_seqs` sequences of `seq_len` random tokens each."""

    architecture: Architecture
    layout: Layout
    recipe: TrainingRecipe
    num_seqs: int
    seq_len: int
    precision: Precision = FP64
    optimizer: str = DEFAULT_OPTIMIZER

    @property
    def instance(self) -> RankProgram:
        """Program of the layout, as the engine issues its collectives."""
        return RankProgram(
            architecture=self.architecture, layout=self.layout, precision=self.precision,
            policy=issue_policy(self.recipe, routed=self.architecture.num_experts > 0), seq_len=self.seq_len,
            optimizer=self.optimizer,
        )  # fmt: skip

    @property
    def micro_batch_seqs(self) -> int:
        """Sequences of a micro-batch over all replicas."""
        return self.layout.num_replicas * self.layout.micro_batch_seqs

    @property
    def num_micro_batches(self) -> int:
        return -(-self.num_seqs // self.micro_batch_seqs)

    @property
    def num_targets(self) -> int:
        return self.num_seqs * self.seq_len

    def on_single_device(self) -> TrainingCase:
        """Return the case with the same micro-batches on one device, which recomputes nothing."""
        return replace(self, layout=Layout(micro_batch_seqs=self.micro_batch_seqs))

    def micro_batches(self, step: int, replica: int) -> Iterator[tuple[Ids, Ids, Ids | None]]:
        """Yield one replica's part of each global micro-batch: ids, targets and document numbers, [B, T] each. Document
        numbers are None unless attention keeps to documents."""
        rng = np.random.default_rng((self.recipe.seed, step))
        tokens = rng.integers(self.architecture.vocab_size, size=(self.num_seqs, self.seq_len + 1))
        is_document_end = rng.random((self.num_seqs, self.seq_len)) < 1 / MEAN_DOCUMENT_TOKENS
        documents: Ids = np.cumsum(is_document_end, axis=1, dtype=np.int64)
        for first in range(0, self.num_seqs, self.micro_batch_seqs):
            global_rows = np.arange(first, min(first + self.micro_batch_seqs, self.num_seqs))
            rows = np.array_split(global_rows, self.layout.num_replicas)[replica]
            yield tokens[rows, :-1], tokens[rows, 1:], documents[rows] if self.recipe.respect_documents else None


# Steep, clipped, and in several buckets, so that each of these counts within a few steps of a small model.
LEARNING_RATE, CLIP_NORM, BUCKET_BYTES = 1e-2, 0.5, 2_000
MOST_STEPS = 10  # the limits of `judge` are those of a few steps: rounding grows with them


def small_recipe(plan: Plan, steps: str, seed: str, changes: Sequence[str]) -> TrainingRecipe:
    """Return the recipe of a few steps, with the user's `recipe.NAME=VALUE` changes. Raises `InputError`. If the plan's
    job packs documents, attention keeps to them."""
    num_steps = parse_whole_number(steps, "--steps")
    if not 1 <= num_steps <= MOST_STEPS:
        raise InputError(f"--steps: found {num_steps}; 1 to {MOST_STEPS} are required")
    recipe = TrainingRecipe(
        steps=num_steps, learning_rate=LEARNING_RATE, warmup_steps=min(2, num_steps), clip_norm=CLIP_NORM,
        bucket_bytes=BUCKET_BYTES, seed=parse_whole_number(seed, "--seed"),
        respect_documents=plan.job.document_tokens is not None,
    )  # fmt: skip
    return apply_changes(recipe, parse_overrides(changes, rooms=("recipe",))["recipe"])
