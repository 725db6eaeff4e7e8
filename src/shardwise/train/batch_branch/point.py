"""The checkpoint of a run from which branches go on: where it lies, and the run's batch and learning rate there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwise.errors import InputError
from shardwise.files import SEAL
from shardwise.measurement.folder import RunFolder, RunOf
from shardwise.planning.codec import load_plan
from shardwise.planning.plan import Plan
from shardwise.train.batching import resumed_ramp
from shardwise.train.checkpoint.folders import complete
from shardwise.train.checkpoint.manifest import read_payload
from shardwise.train.checkpoint.reading import files_of
from shardwise.train.recipe import BATCH_RATES, BatchRate, Recipe, parse_recipe
from shardwise.train.trials.runner import CHECKPOINT_EVERY


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A run's checkpoint. `values` are its plain ones, `seal` the sum that tells it from others."""

    run: RunFolder
    of: RunOf
    plan: Plan
    recipe: Recipe
    step: int
    checkpoint: Path
    values: Mapping[str, Any]
    seal: object

    @classmethod
    def read(cls, path: Path, step: int | None) -> Start:
        """The checkpoint of a step of the run in a folder (None: the newest). Raises `InputError`."""
        run = RunFolder(path)
        if not run.holds_a_run:
            raise InputError(f"{path} holds no run; the folder that `shardwise train --out` named is required")
        found = complete(run.checkpoints)
        if not found or (step is not None and step not in found):
            there = ", ".join(map(str, sorted(found))) or "none"
            wanted = "any" if step is None else f"step {step}"
            raise InputError(
                f"--step: found no checkpoint of {wanted} in {run.checkpoints}, which has {there}; one of them is required: "
                "--keep-every of `shardwise train` keeps more"
            )
        at = max(found) if step is None else step
        of, payload = run.read(), read_payload(found[at])
        values = files_of(found[at], payload).values
        return cls(
            run=run, of=of, plan=load_plan(run.plan), recipe=parse_recipe(of.recipe, str(run.recipe)), step=at,
            checkpoint=found[at], values=values, seal=payload.get(SEAL),
        )  # fmt: skip

    @property
    def batch_tokens(self) -> int:
        """Tokens of the batch that the run goes on with."""
        ramp = resumed_ramp(self.plan, self.recipe, self.values, self.step)
        return ramp.sequences(self.step) * self.plan.job.seq_len

    @property
    def learning_rate(self) -> float:
        """The run's own after the checkpoint."""
        return self.recipe.learning_rate_at(self.step, self.batch_tokens / self.plan.job.global_batch_tokens)

    def rate_of(self, batch_tokens: int, rule: BatchRate) -> float:
        """The learning rate of a branch: the run's, changed as the rule has it (`BATCH_RATES`)."""
        return self.learning_rate * math.pow(batch_tokens / self.batch_tokens, BATCH_RATES[rule])

    def recipe_of(self, batch_tokens: int, rule: BatchRate, num_steps: int) -> Recipe:
        """The run's recipe for a branch of so many steps: another batch, a learning rate that stays, and nothing by which its
        samples would come to differ from those of others."""
        return replace(
            self.recipe, steps=self.step + num_steps, learning_rate=self.rate_of(batch_tokens, rule), schedule="constant",
            warmup_steps=0, decay_steps=0, batch_ramp=(), batch_schedule=str(batch_tokens), batch_lr="none", to_loss=None,
            noise_scale_every=0, validate_every=0, checkpoint_every=CHECKPOINT_EVERY, keep_checkpoints=1, keep_every=0,
            loss_spike="ignore", norm_spike="ignore",
        )  # fmt: skip
