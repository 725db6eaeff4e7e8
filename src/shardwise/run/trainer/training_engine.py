"""A model laid out by a plan, and one optimizer step of any number of micro-batches. Letters: B sequences, T positions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from shardwise.layout import get_cp_variant
from shardwise.run.engine.micro_batch import MicroBatch, positions_read
from shardwise.run.engine.model import ModelOptions
from shardwise.run.engine.model_builder import UnitTensors, build_torch_model, initial_value
from shardwise.run.engine.rank_coordinates import Rank
from shardwise.run.faults.rank_status import mark_waiting
from shardwise.run.kernels.device_dispatch import at_least_fp32
from shardwise.run.kernels.positions_and_masks import PositionRange
from shardwise.run.mixed_precision import LossScaler, training_dtypes
from shardwise.run.parallel.delayed_scaling import SharedAmaxScaler
from shardwise.run.parallel.flat_parameters import ParameterShard, WeightGatherer, build_flat_groups
from shardwise.run.parallel.gradient_reducer import GradientReducer, MicroBatchNorms
from shardwise.run.parallel.mesh_collectives import MeshCollectives
from shardwise.run.parallel.sharded_optimizer import ShardedOptimizer
from shardwise.run.parallel.world import World
from shardwise.run.recipe import TrainingRecipe
from shardwise.run.step_clock import StepClock
from shardwise.run.trainer.expert_balance import ExpertBalancer, Statistic
from shardwise.run.trainer.pipeline_runner import PassContext, PipelineRunner, StepObserver
from shardwise.run.trainer.step_graph import GraphedPasses
from shardwise.run.trainer.timeline_recorder import TimelineRecorder
from shardwise.step import PIPELINE, RankProgram, balance_biases
from shardwise.values.estimate_term_names import GATHERED, GRADIENTS, MASTER, OPTIMIZER, PARAMETERS

__all__ = ["MicroBatch", "StepResult", "TrainingEngine"]

# Returns whether to update the weights from the loss and the norm of all reduced gradients: a scalar on their device, the same
# on all processes. The host does not read it before the end of the step.
UpdateCheck = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class StepResult:
    """The loss of the global batch and the norm of its gradients before clipping; scalars on the device.

    `local_loss` is this process's part of the loss. `mtp_losses`: the losses of multi-token prediction by module, with
    their weight. `skipped`: the gradients of the scaled loss were not finite. `is_update`: the weights were updated.
    `small_squares`: if the noise scale is measured, the sum of the squared norms of the gradients of each replica's
    micro-batches, which add up to the gradient.
    """

    loss: Tensor
    norm: Tensor
    local_loss: Tensor
    mtp_losses: tuple[Tensor, ...] = ()
    skipped: bool = False
    is_update: bool = True
    small_squares: Tensor | None = None


def are_finite(loss: Tensor, norm: Tensor) -> Tensor:
    """Return whether both are finite, a scalar on their device."""
    return loss.isfinite() & norm.isfinite()


class TrainingEngine:
    """A model on this process, trained together with all others of the world. Its weights are uninitialised at first."""

    def __init__(self, instance: RankProgram, recipe: TrainingRecipe, world: World) -> None:
        self.recipe, self.world = recipe, world
        self.instance = instance = instance.for_pp_rank(world.coordinate.get("pp", 0))
        formats = training_dtypes(instance.precision)
        self.scaler = LossScaler(recipe) if formats.scales_loss else None
        self.clock = StepClock(world.device)
        self.exchange = MeshCollectives(world, self.clock)
        self.scales = SharedAmaxScaler(instance, recipe, self.exchange)
        self.groups = build_flat_groups(instance, formats, world)
        # All processes create all groups in one order: creation is a collective.
        for axes in sorted(instance.axes):
            world.group(axes)
            if axes == PIPELINE:
                world.group(axes, onward=False)
        trained = [group for group in self.groups if group.group.trained]
        self.norms = MicroBatchNorms(instance, self.exchange)
        self.reducer = GradientReducer(
            trained, self._gradient_names(), self.exchange, self.norms, reduction=recipe.reduction,
            each_pass=recipe.reduce_each_micro_batch,
        )  # fmt: skip
        self.gatherer = self._gatherer()
        self.updater = ShardedOptimizer(
            trained, self.exchange, recipe, instance.norm_axes, instance.optimizer, instance.traffic
        )
        self.rank = self._rank()
        options = ModelOptions(self.gatherer, lambda: self.clock("recompute"), recipe.prediction_weight)
        self.model = build_torch_model(
            instance, formats.activations, self._unit_tensors, world.device, rank=self.rank, options=options
        )
        stages = instance.drop_single_device_axes(PIPELINE) if instance.architecture.num_experts else ()
        self.balancer = ExpertBalancer(self.model.balance_biases, self.exchange, instance.routing_axes, recipe, stages)
        self.observer = StepObserver()
        self.passes = PassContext(
            instance, self.model, self.reducer, self.gatherer, self.balancer, self.exchange, self.clock, self.observer
        )
        self.gradients_ended: Callable[[], None] = lambda: None  # called when all are reduced, before clipping
        self.update_check: UpdateCheck = are_finite
        self.graphed: GraphedPasses | None = None
        self._statistics: list[Statistic] = []  # of experts, in the order in which a graph of passes returns them

    def _rank(self) -> Rank:
        """Return this process's rank on the mesh."""
        chunks_per_rank = get_cp_variant(self.instance.layout.cp_variant).sequence_pieces
        return Rank(self.world.mesh, self.world.coordinate, self.exchange, chunks_per_rank, self.recipe.capacity_factor)

    def _gradient_names(self) -> dict[str, dict[str, str]]:
        """Return, by unit path, the parameter's full name of each weight that gets a gradient."""
        parameters = self.instance.parameters_by_unit
        return {
            path: {weight: parameter.name for weight, parameter in parameters[path].items() if parameter.trained}
            for path in parameters
        }

    def _unit_tensors(self, path: str) -> UnitTensors:
        """Return the weights of the unit at a path, and the targets of its gradients."""
        views = {name: view for group in self.groups for name, view in group.views.items()}
        parameters = self.instance.parameters_by_unit[path]
        weights = {weight: views[parameter.name] for weight, parameter in parameters.items()}
        kept_casts = {weight for weight, parameter in parameters.items() if parameter.name in self._kept_casts}
        return UnitTensors(weights, self.reducer.of_unit(path), scales=self.scales.of(path), kept_casts=kept_casts)

    @cached_property
    def _kept_casts(self) -> frozenset[str]:
        """Full names of the weights whose casts are kept during a step: those that rest whole, and not as casts.

        Weights that are gathered have one use in each order for each gather, so that nothing would be saved.
        """
        if self.instance.policy.weight_casts == "each_use":
            return frozenset()
        ungathered = (group for group in self.groups if not group.splits_weights)
        return frozenset(name for group in ungathered for name, view in group.views.items() if isinstance(view, Tensor))

    def _gatherer(self) -> WeightGatherer:
        instance, flat = self.instance, dict(zip(self.instance.groups, self.groups, strict=True))
        units = instance.units
        forward, backward = (
            [[flat[group] for group in instance.gathered(path, unit, phase)] for path, unit in units]
            for phase in ("forward", "backward")
        )
        kept_gathered = {index for index, (_, unit) in enumerate(units) if instance.keeps_gathered(unit)}
        return WeightGatherer(forward, backward, kept_gathered, self.exchange)

    def places_read(self, seq_len: int) -> tuple[PositionRange, ...] | None:
        """Return the positions of a sequence whose ids and targets this process reads; None: all."""
        return positions_read(self.rank, seq_len, self.instance.architecture.num_predict_layers)

    def initialize(self, seed: int) -> None:
        """Give every weight its initial value (`run.engine.model_builder`): the same in every layout."""

        def value(shard: ParameterShard) -> Tensor:
            full = initial_value(self.instance.architecture, shard.member.parameter, seed)
            return full[shard.window.slices].reshape(-1)[shard.offset : shard.offset + shard.size]

        self.set_weights(value)

    def set_weights(self, value: Callable[[ParameterShard], Tensor]) -> None:
        """Set the weights, each process its own shards."""
        for group in self.groups:
            group.set_weights(value)
        self.publish()

    def publish(self) -> None:
        """Copy updated shards to all processes whose weights are replicated."""
        for group in self.groups:
            group.publish()
            if group.sync.step_gather:
                self.exchange.all_gather(group.weights, group.shard.clone(), group.sync.step_gather).wait()

    @torch.no_grad()
    def step(
        self, micro_batches: Iterable[MicroBatch], num_targets: int, num_micro_batches: int, step: int,
        rate: float | None = None,
    ) -> StepResult:  # fmt: skip
        """Run one optimizer step, the `step`th from 0, over this process's micro-batches of a batch of `num_targets` in
        all. `rate`: a learning rate other than the recipe's for the plan's batch.

        Whether the weights are updated (`update_check`) is decided on the device. The host waits for it once, at the end.
        """
        self.balancer.begin_step()
        self.scales.begin_step()
        self.norms.begin_step(measures=self.recipe.measures_noise_at(step))
        loss_scale = self.scaler.scale if self.scaler else 1.0
        losses = self._run_passes(micro_batches, num_targets, num_micro_batches, loss_scale)
        self.balancer.end_step(self._zero_losses()[0])
        self.scales.end_step()
        self.gradients_ended()
        norm, squares = self.updater.norm() / loss_scale, self.norms.end_step()
        local_loss = losses[0].clone()
        loss = self.summed(losses[0])
        allows = self.update_check(loss, norm)
        with self.clock("optimizer"):
            rate = self.recipe.learning_rate_at(step) if rate is None else rate
            pending = self.updater.step(rate, norm, loss_scale=loss_scale, allows=allows)
        for work in pending:
            work.wait()
        mtp_losses = tuple(self.summed(mtp_loss) for mtp_loss in losses[1:])
        small_squares = None if squares is None else squares / loss_scale**2
        is_update, skipped = self._read_outcome(allows, norm)
        return StepResult(loss, norm, local_loss, mtp_losses, skipped, is_update, small_squares)

    def _run_passes(
        self, micro_batches: Iterable[MicroBatch], num_targets: int, num_micro_batches: int, loss_scale: float
    ) -> list[Tensor]:
        """Run the passes of a step and the reductions of its gradients, as a graph where there is one; return the losses."""

        def passes(batches: Iterable[MicroBatch]) -> list[Tensor]:
            self.model.begin_passes()
            runner = PipelineRunner(self.passes, batches, num_targets, num_micro_batches, loss_scale=loss_scale)
            losses = runner.run() or self._zero_losses()
            self.reducer.end_step()
            return losses

        if self.graphed is None or self.graphed.obstacle is not None:
            return passes(micro_batches)  # read one after the other, while the one before is computed

        def passes_with_statistics(batches: Iterable[MicroBatch]) -> list[Tensor]:
            losses = passes(batches)
            statistics = self.balancer.statistics()
            self._statistics = list(statistics)
            return [*losses, *statistics.values()]

        results = self.graphed.run(passes_with_statistics, list(micro_batches), num_targets, self.clock.paused)
        num_losses = len(results) - len(self._statistics)
        self.balancer.restore(dict(zip(self._statistics, results[num_losses:], strict=True)))
        return results[:num_losses]

    @contextmanager
    def eager_passes(self) -> Iterator[None]:
        """Issue the kernels of each pass meanwhile, also where a graph would replay them: observers see each."""
        graphed, self.graphed = self.graphed, None
        try:
            yield
        finally:
            self.graphed = graphed

    def _read_outcome(self, allows: Tensor, norm: Tensor) -> tuple[bool, bool]:
        """Return whether the weights were updated, and whether gradients of a scaled loss were not finite, which moves
        the scale. The host waits for the step here."""
        if allows.is_meta:
            return True, False
        with mark_waiting("the kernels and collectives of the step"):
            is_update, is_finite = torch.stack((allows, norm.isfinite())).tolist()
        if not is_update:
            self.updater.undo_step_count()
        if self.scaler is not None:
            self.scaler.update(is_finite=is_finite)
        return is_update, self.scaler is not None and not is_finite

    def summed(self, loss: Tensor) -> Tensor:
        """Sum a loss of this process's targets in place over all processes that have others, and return it."""
        return self.exchange.sum_and_wait(loss, self.instance.loss_axes)

    def _zero_losses(self) -> list[Tensor]:
        """Return the zero losses of a process without a head."""
        count, dtype = 1 + self.instance.architecture.num_predict_layers, at_least_fp32(self.model.dtype)
        return [torch.zeros((), dtype=dtype, device=self.world.device) for _ in range(count)]

    @torch.no_grad()
    def loss(self, micro_batches: Iterable[MicroBatch], num_targets: int) -> Tensor:
        """Return the loss of a batch, without a step."""
        batches = list(micro_batches)
        self.model.begin_passes()
        passes = PipelineRunner(self.passes, batches, num_targets, len(batches), trains=False)
        (loss, *_) = passes.run() or self._zero_losses()
        return self.summed(loss)

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers that a checkpoint keeps besides parameters and moments: biases of routers' choices, by
        name."""
        names = balance_biases(self.instance.architecture)
        biases = self.model.balance_biases
        yield from ((names[self.model.layers[unit_index].path], bias) for unit_index, bias in biases.items())

    def observe(
        self, forward_ended: Callable[[], None], gathered: Callable[[Tensor], None],
        messaging: Callable[[Tensor], None] = lambda values: None,
    ) -> None:  # fmt: skip
        """Set observers for the coming steps.

        `forward_ended` is called after each forward pass; `gathered` with scattered gradients as they arrive, and with
        gathered weights when they come or go; `messaging` with tensors that are sent to another stage, and with
        gradients received from one.
        """
        self.observer.forward_ended, self.observer.messaging = forward_ended, messaging
        for group in self.reducer.groups:
            group.on_allocated = gathered
        for flat in self.groups:
            flat.on_resize = gathered if flat.splits_weights else flat.on_resize

    def set_recorder(self, recorder: TimelineRecorder | None) -> None:
        """Let a recorder record passes, kernels, collectives and the update from now on; None: no recorder."""
        self.model.recorder = self.exchange.recorder = recorder
        self.clock.recorder = None if recorder is None else recorder.span
        self.observer.pass_span = StepObserver.pass_span if recorder is None else recorder.record_pass

    def stored_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors stored between steps, with their memory term; gathered weights come and go."""
        for group in self.groups:
            yield GATHERED if group.splits_weights else PARAMETERS, group.weights
            yield from ((PARAMETERS, tensor) for tensor in group.stored_tensors())
            if group.has_master:
                yield MASTER, group.state
        casts = (cast for layer in self.model.layers for cast in layer.casts.values())
        yield from ((PARAMETERS, tensor) for cast in casts for tensor in cast.tensors())
        for gradients in self.reducer.groups:
            staged = () if gradients.staging is None else gradients.staging.stored_tensors()
            yield from ((GRADIENTS, tensor) for tensor in (gradients.flat.gradients, *staged))
            if gradients.flat.update is not None:
                yield OPTIMIZER, gradients.flat.update
        yield from ((OPTIMIZER, moment) for _, _, moment in self.updater.checkpoint_tensors())

    def unplanned_tensors(self) -> Iterator[Tensor]:
        """Yield the tensors stored between steps that no memory term has: routers' biases, FP8 scales from earlier steps, and
        the optimizer's counts of steps."""
        yield from (bias for _, bias in self.buffers())
        yield from self.scales.tensors()
        yield from self.updater.step_counts()

    def checkpoint_tensors(self) -> Iterator[tuple[str, ParameterShard, Tensor]]:
        """Yield what a checkpoint keeps of every parameter: this process's shard of its weight and of its moments."""
        for group in self.groups:
            for shard in group.intervals():
                yield "model", shard, group.state[shard.start : shard.start + shard.size]
        yield from self.updater.checkpoint_tensors()
