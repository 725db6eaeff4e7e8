"""A model laid out as a plan says, and one optimizer step of any number of micro-batches. Letters: B sequences, T positions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardwise.lowering.instance import Instance
from shardwise.lowering.parameters import unit_paths
from shardwise.train.clock import Clock
from shardwise.train.formats import formats_of
from shardwise.train.memory import GATHERED, GRADIENTS, MASTER, OPTIMIZER, PARAMETERS
from shardwise.train.model import build, parameter_weights
from shardwise.train.model.initialise import initial_value
from shardwise.train.parallel.exchange import Exchange
from shardwise.train.parallel.flat import FlatGroup, Interval
from shardwise.train.parallel.reducer import GradientReducer
from shardwise.train.parallel.update import Updater
from shardwise.train.parallel.weights import WeightGatherer
from shardwise.train.recipe import Recipe
from shardwise.train.recompute import recompute
from shardwise.train.routing import Balancer
from shardwise.train.world import World

COMPILER = "inductor"  # of torch.compile: its default


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Ids, targets and, where attention keeps to documents, their numbers: [B, T] each."""

    ids_BT: Tensor
    targets_BT: Tensor
    documents_BT: Tensor | None = None

    def to(self, device: torch.device) -> MicroBatch:
        """The same on a device; from pinned memory the copy runs beside what the host does next."""
        tensors = (self.ids_BT, self.targets_BT, self.documents_BT)
        return MicroBatch(*(one if one is None else one.to(device, non_blocking=True) for one in tensors))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class StepResult:
    """The loss of the global batch, and the norm of its gradients before they are clipped; scalars on the device."""

    loss: Tensor
    norm: Tensor


class Engine:
    """A model on this process, trained together with all others of the world. Its weights are uninitialised at first."""

    def __init__(self, instance: Instance, recipe: Recipe, world: World) -> None:
        self.instance, self.recipe, self.world = instance, recipe, world
        formats = formats_of(instance.precision)
        self.clock = Clock(world.device)
        self.exchange = Exchange(world, self.clock)
        self.model = build(instance.architecture, formats.weights)
        self._make_buffers()
        self.groups = [FlatGroup(group, self.model, formats, world) for group in instance.groups]
        self.batch_axes = instance.several(instance.batch_axes)
        self._join_groups()
        trained = [group for group in self.groups if group.group.trained]
        self.reducer = GradientReducer(
            trained, self.exchange, reduction=recipe.reduction, each_micro_batch=recipe.reduce_each_micro_batch
        )
        self.gatherer = self._gatherer()
        self.updater = Updater(trained, self.exchange, recipe)
        self.balancer = Balancer(self.model, self.exchange, self.batch_axes, recipe)
        self.forward_ended: Callable[[], None] = lambda: None  # called between each forward and its backward pass
        self._run_blocks_as_planned()

    def _run_blocks_as_planned(self) -> None:
        layout = self.instance.layout
        # compiled inside: the hooks that gather weights, and recomputation, stay out of the graph
        for block in self.model.layers.values() if self.recipe.compile else ():
            block.steps = torch.compile(block.steps, backend=COMPILER)  # type: ignore[assignment, arg-type]
        recompute(self.model, layout.recompute, layout.recompute_layers, lambda: self.clock("recompute"))

    def _make_buffers(self) -> None:
        for module in self.model.modules():
            for name, buffer in list(module.named_buffers(recurse=False)):
                module.register_buffer(name, torch.zeros_like(buffer, device=self.world.device))

    def _join_groups(self) -> None:
        """Make every process group at once, in one order on all processes."""
        used = {self.batch_axes}
        for group in self.groups:
            used |= set(group.sync)
        for axes in sorted(used - {()}):
            self.world.group(axes)

    def _gatherer(self) -> WeightGatherer:
        flat = dict(zip(self.instance.groups, self.groups, strict=True))
        paths = dict(unit_paths(self.instance.architecture))
        units: dict[str, nn.Module] = {path: self.model.get_submodule(path) for path in paths}
        used = {path: [flat[group] for group in self.instance.used_groups(path)] for path in paths}
        backward = frozenset(path for path, unit in paths.items() if "backward" in self.instance.gathers(unit))
        kept = frozenset(path for path, unit in paths.items() if self.instance.keeps_gathered(unit))
        return WeightGatherer(units, used, backward, kept, self.exchange)

    def initialise(self, seed: int) -> None:
        """Give every weight its initial value (`train.model.initialise`): the same in every layout."""
        weights = parameter_weights(self.model)

        def value(part: Interval) -> Tensor:
            name = part.member.parameter.name
            whole = initial_value(self.model, name, weights[name], part.member.shape, seed)
            return whole.reshape(-1)[part.offset : part.offset + part.size]

        self.fill(value)

    def fill(self, value: Callable[[Interval], Tensor]) -> None:
        """Give every weight a value, each process its part."""
        for group in self.groups:
            group.fill(value)
        self.publish()

    def publish(self) -> None:
        """Hand the parts that the processes update to all whose weights are whole."""
        for group in self.groups:
            group.publish()
            if group.sync.step_gather:
                self.exchange.all_gather(group.weights, group.shard.clone(), group.sync.step_gather).wait()

    def step(
        self, micro_batches: Iterable[MicroBatch], num_targets: int, num_micro_batches: int, step: int
    ) -> StepResult:
        """One optimizer step, the `step`th from 0, of this process's micro-batches of a batch with so many targets in all."""
        self.reducer.begin_step()
        self.balancer.begin_step()
        loss = torch.zeros((), device=self.world.device)
        for number, batch in enumerate(micro_batches, start=1):
            own = self._micro_batch(batch, num_targets, num_micro_batches, last=number == num_micro_batches)
            loss = own + loss
        self.balancer.end_step()
        norm = self.updater.norm()
        with self.clock("optimizer"):
            pending = self.updater.step(self.recipe.learning_rate_at(step), norm)
        for one in pending:
            one.wait()
        return StepResult(self.exchange.sum_now(loss, self.batch_axes), norm)

    def _micro_batch(self, batch: MicroBatch, num_targets: int, num_micro_batches: int, *, last: bool) -> Tensor:
        self.reducer.begin_micro_batch(last=last)
        with self.clock("forward"):
            output = self.model(batch.ids_BT, batch.targets_BT, num_targets, batch.documents_BT)
            penalty = self.balancer.penalty(output, num_micro_batches)
            total = output.loss if penalty is None else output.loss + penalty
        self.forward_ended()
        with self.clock("backward"):
            total.backward()
            self.reducer.end_micro_batch()
            self.gatherer.end()
        loss: Tensor = output.loss.detach()
        return loss

    @torch.no_grad()
    def loss(self, micro_batches: Iterable[MicroBatch], num_targets: int) -> Tensor:
        """The loss of a batch, without a step."""
        parts = [self.model(one.ids_BT, one.targets_BT, num_targets, one.documents_BT).loss for one in micro_batches]
        self.gatherer.end()
        return self.exchange.sum_now(torch.stack(parts).sum(), self.batch_axes)

    def watch(self, forward_ended: Callable[[], None], gathered: Callable[[Tensor], None]) -> None:
        """Call these from now on: after each forward pass; with gradients that are scattered and as they arrive, and with
        gathered weights whenever they come or go."""
        self.forward_ended = forward_ended
        for group in self.reducer.groups:
            group.made = gathered
        for flat in self.groups:
            flat.resized = gathered if flat.splits_weights else flat.resized

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """What rests on this process from step to step, by the terms of a plan's memory; gathered weights come and go."""
        for group in self.groups:
            yield GATHERED if group.splits_weights else PARAMETERS, group.weights
            yield PARAMETERS, group.shard
            if group.has_master:
                yield MASTER, group.state
        for gradients in self.reducer.groups:
            yield from ((GRADIENTS, one) for one in (gradients.flat.gradients, gradients.low) if one is not None)
        yield from ((OPTIMIZER, moment) for _, _, moment in self.updater.pieces())

    def pieces(self) -> Iterator[tuple[str, Interval, Tensor]]:
        """What a checkpoint keeps of every parameter: this process's part of its weight and of its moments."""
        for group in self.groups:
            for one in group.intervals():
                yield "model", one, group.state[one.start : one.start + one.size]
        yield from self.updater.pieces()
