"""The recipe of a run in small."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.changes import parse_changes
from shardwise.errors import InputError
from shardwise.planning.plan import Plan
from shardwise.train.recipe import Recipe
from shardwise.train.recipe_flags import changed, whole

# Steep, clipped, and in several buckets, so that each of these counts within a few steps of a small model.
LEARNING_RATE, CLIP_NORM, BUCKET_BYTES = 1e-2, 0.5, 2_000
MOST_STEPS = 10  # the limits of `judge` are those of a few steps: rounding grows with them


def recipe_of(plan: Plan, steps: str, seed: str, changes: Sequence[str]) -> Recipe:
    """That of some steps, with values of the user's (`recipe.NAME=VALUE`). Raises `InputError` for what is none.

    Where the plan's job packs documents, attention keeps to them.
    """
    num_steps = whole(steps, "--steps")
    if not 1 <= num_steps <= MOST_STEPS:
        raise InputError(f"--steps: found {num_steps}; 1 to {MOST_STEPS} are required")
    usual = Recipe(
        steps=num_steps, learning_rate=LEARNING_RATE, warmup_steps=min(2, num_steps), clip_norm=CLIP_NORM,
        bucket_bytes=BUCKET_BYTES, seed=whole(seed, "--seed"), respect_documents=plan.job.document_tokens is not None,
    )  # fmt: skip
    return changed(usual, parse_changes(changes, rooms=("recipe",))["recipe"])
