"""A run's state from step to step: the engine that a plan and a recipe make, its batches, and what a checkpoint keeps."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shardwise.data.batches import Batches
from shardwise.errors import InputError
from shardwise.layout.layout import Layout
from shardwise.measurement.inspection import Inspection
from shardwise.measurement.record import StepRecord
from shardwise.measurement.trace import RankTrace
from shardwise.planning.plan import Plan
from shardwise.train.checkpoint.loading import BUFFER
from shardwise.train.checkpoint.piece import Json, Piece
from shardwise.train.conversion.formats import open_stored
from shardwise.train.engine import Engine
from shardwise.train.feed import Feed
from shardwise.train.initial import begin_with
from shardwise.train.inspect import watched
from shardwise.train.issued import instance_of
from shardwise.train.parallel.flat import Interval
from shardwise.train.profile import profiled_step
from shardwise.train.recipe import Recipe
from shardwise.train.waits import waiting
from shardwise.train.world import World

LOSS_SCALE = "loss_scale"  # in a checkpoint


class Trainer:
    """Trains the plan's model on batches, a step at a time; weights have their initial values at first.

    Raises `InputError` where these are to come from a model that cannot be read, or is another one than the plan's.
    """

    def __init__(self, plan: Plan, recipe: Recipe, batches: Batches, world: World) -> None:
        self.plan, self.recipe, self.batches, self.world = plan, recipe, batches, world
        stored = None if recipe.initial is None else open_stored(recipe.initial, plan.model)
        self.engine = Engine(instance_of(plan, recipe), recipe, world)
        if stored is None:
            self.engine.initialise(recipe.seed)
        else:
            begin_with(self.engine, stored)
        replica = world.position(self.engine.instance.batch_axes)
        self.feed = Feed(plan.layout, replica, world.device, recipe.respect_documents, self.engine.places_read)
        self._ahead = self.feed.ahead(batches, recipe.steps)
        self.step = 0

    @property
    def layout(self) -> Layout:
        return self.plan.layout

    def train_step(self) -> StepRecord:
        """One optimizer step, measured."""
        started = time.perf_counter()
        engine, step, clock = self.engine, self.step, self.engine.clock
        clock.begin()
        num_targets = self.batches.num_targets(step)
        count = self.batches.num_micro_batches(step, self.layout.num_replicas, self.layout.micro_batch_seqs)
        micro_batches = self.feed.on_device(self._ahead.step(step), clock)
        result = engine.step(micro_batches, num_targets, count, step)
        with waiting("the kernels and collectives of the step"):
            loss, norm = float(result.loss), float(result.norm)  # a GPU has finished the step by then
        seconds = clock.end()
        _require_finite(loss, 0.0 if result.skipped else norm, step)
        self.step += 1
        auxiliary, further = engine.balancer.loss, result.further
        return StepRecord(
            step=self.step, loss=loss, grad_norm=norm, learning_rate=self.recipe.learning_rate_at(step),
            num_tokens=self.batches.global_batch_seqs(step) * self.batches.seq_len, num_targets=num_targets,
            step_time_s=time.perf_counter() - started, seconds=seconds,
            auxiliary_loss=None if auxiliary is None else float(auxiliary), expert_imbalance=engine.balancer.imbalance,
            dropped_share=engine.balancer.dropped_share,
            loss_scale=None if engine.scaler is None else engine.scaler.scale,
            num_skipped=None if engine.scaler is None else engine.scaler.num_skipped,
            prediction_loss=float(sum(further)) / self.recipe.prediction_weight if further else None,
        )  # fmt: skip

    def inspected_step(self) -> tuple[StepRecord, Inspection]:
        """One optimizer step like any other, watched from below: its bytes by term, and every collective. It is slower for it."""
        if self.world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.world.device)
        with watched(self.engine) as watch:
            record = self.train_step()
        return record, watch.found

    def profiled_step(self) -> tuple[StepRecord, RankTrace]:
        """One optimizer step like any other, with the timeline of what this rank does in it."""
        return profiled_step(self.engine, self.train_step)

    def state(self) -> dict[str, Piece | tuple[Piece, ...] | Json]:
        """What a checkpoint keeps: this process's part of weights and moments, and how far the run is."""
        found: dict[str, Piece | tuple[Piece, ...] | Json] = {
            f"{kind}.{one.name}": _pieces(one, values.detach()) for kind, one, values in self.engine.pieces()
        }
        for name, buffer in self.engine.buffers():
            found[BUFFER + name] = Piece(tuple(buffer.shape), (0,) * buffer.ndim, buffer)
        scaler = self.engine.scaler
        return {**found, "step": self.step, **({} if scaler is None else {LOSS_SCALE: scaler.state()})}

    def restore(self, values: Mapping[str, Any]) -> None:
        """Go on from a state whose pieces have been filled, and these plain values."""
        self.step = int(values["step"])
        scaler = self.engine.scaler
        if scaler is not None:
            scaler.restore(values[LOSS_SCALE])
        self.engine.updater.set_steps(self.step - (scaler.num_skipped if scaler else 0))
        self.engine.publish()

    def validation_loss(self, batches: Batches) -> float:
        """Nats per target over the first step of `batches`: of held-out text every sequence once (`train.admission`)."""
        held_out = self.feed.on_device(self.feed.on_host(batches, 0), self.engine.clock)
        return float(self.engine.loss(held_out, batches.num_targets(0)))


def _pieces(one: Interval, values: Tensor) -> Piece | tuple[Piece, ...]:
    """What a process has of a parameter: an interval of the flattened one, or boxes of it where the parameter is split."""
    if one.is_of_whole:
        return Piece(one.whole, (one.offset,), values)
    found, done = [], 0
    for box in one.boxes():
        found.append(Piece(one.whole, box.offsets, values[done : done + box.volume].view(box.lengths)))
        done += box.volume
    return tuple(found)


def _require_finite(loss: float, norm: float, step: int) -> None:
    """Raise `InputError`, on every process alike, before a checkpoint keeps what cannot be trained any further."""
    if not math.isfinite(loss + norm):
        raise InputError(
            f"step {step + 1}: found a loss of {loss} and a norm of all gradients of {norm}; finite ones are required: a lower "
            "--learning-rate or a longer --warmup, from the last checkpoint with --resume"
        )
