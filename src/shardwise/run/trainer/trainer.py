"""A run's state from step to step: the engine that a plan and a recipe give, its batches, and what a checkpoint keeps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from shardwise.batch_size import BatchRamp
from shardwise.layout import Layout
from shardwise.model import Architecture
from shardwise.records import RankTrace, StepInspection, StepRecord
from shardwise.run.checkpoints.manifest import Json, TensorShard
from shardwise.run.checkpoints.reader import BUFFER_PREFIX, NUM_LEFT_OUT
from shardwise.run.data.batches import Batches
from shardwise.run.faults.agreement import all_are_true
from shardwise.run.parallel.flat_parameters import ParameterShard
from shardwise.run.parallel.world import World
from shardwise.run.recipe import NON_FINITE, TrainingRecipe
from shardwise.run.trainer.anomaly_detector import AnomalyDetector, StepAnomaly
from shardwise.run.trainer.anomaly_response import agree_on_anomaly, first_non_finite
from shardwise.run.trainer.data_loader import MicroBatchLoader
from shardwise.run.trainer.engine_prediction import engine_instance
from shardwise.run.trainer.noise_scale import noise_sample, targets_of_parts
from shardwise.run.trainer.profiler import profiled_step
from shardwise.run.trainer.step_graph import plan_graph
from shardwise.run.trainer.step_inspector import StorageRecorder, inspect_step
from shardwise.run.trainer.training_engine import StepResult, TrainingEngine, are_finite
from shardwise.search import Plan

LOSS_SCALE_KEY = "loss_scale"  # value in a checkpoint
SCALES_PREFIX = "scales."  # of the names of FP8 scales from earlier steps, in a checkpoint

# Opens a folder of weights and returns a function that loads them into an engine; raises `InputError` if it cannot be read.
OpenWeights = Callable[[str, Architecture], Callable[[TrainingEngine], None]]


class Trainer:
    """Trains the plan's model on batches, a step at a time, from initial weights. Raises `InputError` if these come
    from a stored model that cannot be read, or is another one than the plan's."""

    def __init__(
        self,
        plan: Plan,
        recipe: TrainingRecipe,
        batches: Batches,
        world: World,
        open_weights: OpenWeights | None = None,
    ) -> None:
        self.plan, self.recipe, self.batches, self.world = plan, recipe, batches, world
        set_weights = None
        if recipe.initial is not None:
            assert open_weights is not None, "a run that begins with stored weights has a reader of them"
            set_weights = open_weights(recipe.initial, plan.model)
        with StorageRecorder() as self._constructed:
            self.engine = TrainingEngine(engine_instance(plan, recipe), recipe, world)
        self.engine.graphed = plan_graph(plan, self.engine.instance, recipe, world.device)
        if set_weights is None:
            self.engine.initialize(recipe.seed)
        else:
            set_weights(self.engine)
        replica = world.position(self.engine.instance.batch_axes)
        self.loader = MicroBatchLoader(
            plan.layout, replica, world.device, recipe.respect_documents, self.engine.places_read
        )
        self._prefetched = self.loader.prefetch(batches, recipe.steps)
        self.step = self.num_left_out = 0
        self.detector = AnomalyDetector(recipe.policies, window=recipe.spike_window, deviations=recipe.spike_deviations)
        self.anomaly: StepAnomaly | None = None
        self.engine.update_check = self._allows_update

    @property
    def layout(self) -> Layout:
        return self.plan.layout

    @property
    def step_graph(self) -> str | None:
        """Why the passes of steps are not replayed as a graph, or "captured"; None without a GPU."""
        graphed = self.engine.graphed
        return None if graphed is None or self.world.device.type != "cuda" else graphed.obstacle or "captured"

    def train_step(self) -> StepRecord:
        """Run one optimizer step and measure it."""
        started = time.perf_counter()
        engine, step, clock = self.engine, self.step, self.engine.clock
        clock.begin()
        num_targets = self.batches.num_targets(step)
        num_micro_batches = self.batches.num_micro_batches(step, self.layout.num_replicas, self.layout.micro_batch_seqs)
        micro_batches = self.loader.on_device(self._prefetched.step(step), clock)
        num_seqs = self.batches.global_batch_seqs(step)
        rate = self.recipe.learning_rate_at(step, num_seqs / self.plan.job.num_seqs)
        result = engine.step(micro_batches, num_targets, num_micro_batches, step, rate)
        # The engine takes the micro-batches that it needs; only the end of the step lets the reader go on to the next one.
        assert next(micro_batches, None) is None, "the engine has run every micro-batch"
        loss, norm = float(result.loss), float(result.norm)
        self.anomaly = self._find_anomaly(result, loss, norm)
        seconds = clock.end()
        self.step += 1
        self.num_left_out += not result.is_update
        if result.is_update:
            self.detector.record(loss, norm)
        auxiliary, mtp_losses = engine.balancer.loss, result.mtp_losses
        return StepRecord(
            step=self.step, loss=loss, grad_norm=norm, learning_rate=rate,
            num_tokens=num_seqs * self.batches.seq_len, num_targets=num_targets,
            step_time_s=time.perf_counter() - started, seconds=seconds,
            auxiliary_loss=None if auxiliary is None else float(auxiliary), expert_imbalance=engine.balancer.imbalance,
            dropped_share=engine.balancer.dropped_share,
            loss_scale=None if engine.scaler is None else engine.scaler.scale,
            num_skipped=None if engine.scaler is None else engine.scaler.num_skipped,
            prediction_loss=float(sum(mtp_losses)) / self.recipe.prediction_weight if mtp_losses else None,
            **self._noise(step, result, norm),
        )  # fmt: skip

    def _noise(self, step: int, result: StepResult, norm: float) -> dict[str, float]:
        """Return the record's fields of the noise scale, if the step measured it."""
        if result.small_squares is None:
            return {}
        instance = self.engine.instance
        num_parts = self.world.mesh.size(instance.drop_single_device_axes(instance.scheme.replica_axes))
        targets = targets_of_parts(self.batches, step, self.layout, num_parts)
        sample = noise_sample(float(result.small_squares), norm, targets)
        return {} if sample is None else asdict(sample)

    def _allows_update(self, loss: Tensor, norm: Tensor) -> Tensor:
        """Return whether a step without anomaly on any rank may update the weights, a scalar on the device."""
        max_loss, max_norm = self.detector.limits()
        # in float64, in which the limits are computed
        allows = are_finite(loss, norm) & (loss.double() <= max_loss) & (norm.double() <= max_norm)
        return all_are_true(self.world, allows, "whether the step is as those before")

    def _find_anomaly(self, result: StepResult, loss: float, norm: float) -> StepAnomaly | None:
        """Return the anomaly of a step that has run, the same on all ranks. Its gradients are still there, so that the
        origin of what is not finite can be located; gradients that a scaled loss made overflow are none."""
        if result.is_update:
            return None
        step = self.step + 1
        anomaly = self.detector.check(step, loss, 0.0 if result.skipped else norm)
        agreed = agree_on_anomaly(anomaly, self.detector, step, self.world)
        if agreed is None or agreed.policy != NON_FINITE:
            return agreed
        return agreed.at_location(first_non_finite(self.engine, float(result.local_loss), self.world))

    def resize(self, ramp: BatchRamp) -> None:
        """Take batches from a ramp from the next step on; what was read ahead is read again."""
        self.batches.ramp = ramp
        self._prefetched.restart()

    def skip_to(self, step: int) -> None:
        """Continue after step `step`, leaving out the batches between."""
        self.num_left_out += step - self.step
        self.step = step

    def inspected_step(self) -> tuple[StepRecord, StepInspection]:
        """Run one optimizer step, recording its bytes by term and every collective, which slows it down."""
        if self.world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.world.device)
        with self.engine.eager_passes(), inspect_step(self.engine, self._constructed) as inspector:
            record = self.train_step()
        return record, inspector.inspection

    def profiled_step(self) -> tuple[StepRecord, RankTrace]:
        """Run one optimizer step, recording this rank's timeline."""
        with self.engine.eager_passes():
            return profiled_step(self.engine, self.train_step)

    def state(self) -> dict[str, TensorShard | tuple[TensorShard, ...] | Json]:
        """Return what a checkpoint keeps: this process's shards of weights and moments, and the progress of the run."""
        state: dict[str, TensorShard | tuple[TensorShard, ...] | Json] = {
            f"{kind}.{shard.name}": _shard_tensors(shard, values.detach())
            for kind, shard, values in self.engine.checkpoint_tensors()
        }
        for name, buffer in self.engine.buffers():
            state[BUFFER_PREFIX + name] = _replicated(buffer)
        state |= {SCALES_PREFIX + name: _replicated(values) for name, values in self.engine.scales.state().items()}
        scaler = self.engine.scaler
        counts: dict[str, Json] = {"step": self.step, NUM_LEFT_OUT: self.num_left_out}
        return {**state, **counts, **({} if scaler is None else {LOSS_SCALE_KEY: scaler.state()})}

    def restore(self, values: Mapping[str, Any]) -> None:
        """Continue from plain values of a checkpoint whose shards have been loaded."""
        self.step, self.num_left_out = int(values["step"]), int(values.get(NUM_LEFT_OUT, 0))
        scaler = self.engine.scaler
        if scaler is not None:
            scaler.restore(values[LOSS_SCALE_KEY])
        self.engine.updater.set_steps(self.step - self.num_left_out)
        self.engine.publish()

    def validation_loss(self, batches: Batches) -> float:
        """Return nats per target over the first step of `batches`: every held-out sequence once
        (`run.trainer.preflight`)."""
        held_out = self.loader.on_device(self.loader.on_host(batches, 0), self.engine.clock)
        return float(self.engine.loss(held_out, batches.num_targets(0)))


def _replicated(values: Tensor) -> TensorShard:
    """Return a tensor that is equal on every process."""
    return TensorShard(tuple(values.shape), (0,) * values.ndim, values)


def _shard_tensors(shard: ParameterShard, values: Tensor) -> TensorShard | tuple[TensorShard, ...]:
    """Return a process's shard of a parameter: an interval of the flattened one, or boxes if the parameter is split."""
    if shard.covers_parameter:
        return TensorShard(shard.global_shape, (shard.offset,), values)
    boxes, position = [], 0
    for box in shard.boxes():
        boxes.append(
            TensorShard(shard.global_shape, box.offsets, values[position : position + box.volume].view(box.lengths))
        )
        position += box.volume
    return tuple(boxes)
