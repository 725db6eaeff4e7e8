"""The passes of an optimizer step on one process, in the order of its schedule, with the messages between stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from shardwise.pipeline import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, FULL_BACKWARD, Action
from shardwise.pipeline.messages import StageMessage
from shardwise.run.engine.micro_batch import MicroBatch
from shardwise.run.engine.model import InFlightPass, TorchModel
from shardwise.run.parallel.flat_parameters import WeightGatherer
from shardwise.run.parallel.gradient_reducer import GradientReducer
from shardwise.run.parallel.mesh_collectives import MeshCollectives, PendingWork
from shardwise.run.step_clock import StepClock
from shardwise.run.trainer.expert_balance import ExpertBalancer
from shardwise.step import PIPELINE, RankProgram

StageMicroBatch = tuple[int, int]  # a stage and a micro-batch


class IncomingTensor(NamedTuple):
    """A hidden state or its gradient, which has arrived or is on its way."""

    values: Tensor
    pending: PendingWork | None = None

    def wait(self) -> Tensor:
        """Wait for the values and return them."""
        if self.pending is not None:
            self.pending.wait()
        return self.values


@dataclass
class StepObserver:
    """Callbacks during the passes of a step; by default they do nothing.

    `forward_ended` is called between each forward pass and its backward pass; `messaging` with tensors that are sent to
    another stage, and with gradients received from one; `pass_span` returns a context that is entered around the
    computation of each pass, without its waits for other stages.
    """

    forward_ended: Callable[[], None] = lambda: None
    messaging: Callable[[Tensor], None] = lambda values: None
    pass_span: Callable[[Action], AbstractContextManager[None]] = lambda action: nullcontext()


@dataclass(frozen=True, slots=True)
class PassContext:
    """Context that the passes use."""

    instance: RankProgram
    model: TorchModel
    reducer: GradientReducer
    gatherer: WeightGatherer
    balancer: ExpertBalancer
    exchange: MeshCollectives
    clock: StepClock
    observer: StepObserver


class PipelineRunner:
    """The passes of one step: `num_targets` are those of the whole step, `num_micro_batches` those of this process. For
    evaluation (`trains` is False) there are only forward passes. Gradients are those of the loss times `loss_scale`."""

    def __init__(
        self, context: PassContext, micro_batches: Iterable[MicroBatch], num_targets: int, num_micro_batches: int, *,
        trains: bool = True, loss_scale: float = 1.0,
    ) -> None:  # fmt: skip
        self.loss_scale = loss_scale
        self.context, self.num_targets, self.num_micro_batches = context, num_targets, num_micro_batches
        self.trains, instance = trains, context.instance
        self.steps = (instance.steps if trains else instance.forward_steps)(num_micro_batches)
        self.micro_batches = iter(micro_batches)
        self.batches: dict[int, MicroBatch] = {}
        self.shapes: list[tuple[int, ...]] = []
        self.last_stage = {action.micro_batch: action.stage for action in self._actions() if action.kind == FORWARD}
        self.in_flight: dict[StageMicroBatch, InFlightPass] = {}
        self.penalties: dict[StageMicroBatch, dict[int, Tensor]] = {}
        # Inputs by the action that made them (`_inbox_key`): a stage's own outputs, and what other stages sent.
        self.inbox: dict[Action, IncomingTensor] = {}
        # gloo and NCCL read a sent tensor until the send is done, so each is referenced here until then.
        self.sent: dict[StageMessage, tuple[PendingWork, Tensor]] = {}
        self.losses: list[Tensor] = []

    def _actions(self) -> Iterable[Action]:
        return (action for step in self.steps for action in step.slot)

    def run(self) -> list[Tensor]:
        """Run the passes in schedule order; return this rank's losses. These are the model's and those of multi-token
        prediction; none without a head."""
        context = self.context
        backward = (action for action in self._actions() if action.kind != FORWARD)
        units = context.instance.units_with_weight_grads
        context.reducer.begin_step(Counter(units(action.kind, action.stage) for action in backward))
        for step in self.steps:
            for message in step.receives:
                self._receive(message)
            for action in step.slot:
                self._forward(action) if action.kind == FORWARD else self._backward(action)
            for message in step.sends:
                self._send(message)
            if any(action.kind != FORWARD for action in step.slot):
                # Reduce the remaining gradients after the messages, for which another stage waits.
                with context.clock("backward"):
                    context.reducer.end_pass()
            # Some messages have gone before the order of the schedule proves it.
            done = [message for message, (pending, _) in self.sent.items() if pending.is_done]
            for message in (*step.acknowledged, *done):
                self._release_message(message)
        for message in list(self.sent):
            self._release_message(message)
        return self.losses

    def _forward(self, action: Action) -> None:
        context, stage_micro_batch = self.context, action[1:]
        x = self._take_input(Action(FORWARD, action.stage - 1, action.micro_batch))
        batch = self._batch(action.micro_batch)
        if self.last_stage[action.micro_batch] == action.stage:
            del self.batches[action.micro_batch]
        with context.clock("forward"), context.observer.pass_span(action):
            num_targets = self.num_targets / self.loss_scale
            in_flight = context.model.forward(batch, num_targets, trains=self.trains, stage=action.stage, x=x)
            if self.trains:
                self.penalties[stage_micro_batch] = self._penalties(in_flight)
            if not (self.trains and context.instance.backward_follows_forward):
                context.gatherer.end()
        if in_flight.output is None:
            losses = self._unscaled((in_flight.loss, *in_flight.mtp_losses))
            if self.losses:
                losses = [loss + earlier for loss, earlier in zip(losses, self.losses, strict=True)]
            self.losses = losses
        else:
            self.inbox[action], in_flight.output = IncomingTensor(in_flight.output), None
        if self.trains:
            self.in_flight[stage_micro_batch] = in_flight
            context.observer.forward_ended()

    def _penalties(self, in_flight: InFlightPass) -> dict[int, Tensor]:
        penalties = self.context.balancer.penalties(in_flight.routed, self.num_micro_batches)
        if self.loss_scale == 1.0:
            return penalties
        return {router: penalty * self.loss_scale for router, penalty in penalties.items()}

    def _unscaled(self, losses: Sequence[Tensor]) -> list[Tensor]:
        """Return losses without the loss scale; the same tensors if there is none."""
        return [*losses] if self.loss_scale == 1.0 else [loss / self.loss_scale for loss in losses]

    def _backward(self, action: Action) -> None:
        """Run a full backward pass, only its input gradients (for which the stage before waits), or only its weight
        gradients."""
        context, stage_micro_batch = self.context, action[1:]
        in_flight, dx = self.in_flight[stage_micro_batch], None
        if action.kind != BACKWARD_WEIGHT:
            dx = self._take_input(Action(FULL_BACKWARD, action.stage + 1, action.micro_batch))
        units = context.instance.units_with_weight_grads(action.kind, action.stage)
        context.reducer.begin_pass(units, action.micro_batch)
        with context.clock("backward"), context.observer.pass_span(action):
            if action.kind == BACKWARD_WEIGHT:
                context.model.weights(in_flight)
            else:
                self._backward_of_inputs(action, in_flight, dx)
            context.gatherer.end()
        if action.kind != BACKWARD_INPUT:  # its weight gradients follow in a pass of their own
            del self.in_flight[stage_micro_batch]

    def _backward_of_inputs(self, action: Action, in_flight: InFlightPass, dx: Tensor | None) -> None:
        penalties = self.penalties.pop(action[1:])
        dx = self.context.model.backward(in_flight, penalties, kind=action.kind, dx=dx)
        if dx is not None:
            self.inbox[Action(FULL_BACKWARD, action.stage, action.micro_batch)] = IncomingTensor(dx)

    def _take_input(self, key: Action) -> Tensor | None:
        """Return the input from another stage; None at the ends of the model."""
        arriving = self.inbox.pop(key, None)
        return None if arriving is None else arriving.wait()

    def _batch(self, number: int) -> MicroBatch:
        while len(self.shapes) <= number:
            batch = next(self.micro_batches)
            self.batches[len(self.shapes)] = batch
            self.shapes.append((len(batch.ids_BT), batch.seq_len))
        return self.batches[number]

    def _receive(self, message: StageMessage) -> None:
        """Start to receive a message of another stage."""
        context, key = self.context, _inbox_key(message.action)
        if len(self.shapes) <= key.micro_batch:
            self._batch(key.micro_batch)
        values = context.model.empty_hidden_state(context.instance.hidden_state_spec, self.shapes[key.micro_batch])
        if key.kind != FORWARD:  # a received activation is counted by what the forward pass saves
            context.observer.messaging(values)
        self.inbox[key] = IncomingTensor(values, context.exchange.receive(values, message.source, PIPELINE))

    def _send(self, message: StageMessage) -> None:
        values = self.inbox.pop(_inbox_key(message.action)).wait().contiguous()
        self.context.observer.messaging(values)
        self.sent[message] = self.context.exchange.send(values, message.target, PIPELINE), values

    def _release_message(self, message: StageMessage) -> None:
        """Wait until a message is sent, and free its tensor."""
        if message in self.sent:
            pending, _ = self.sent.pop(message)
            pending.wait()


def _inbox_key(action: Action) -> Action:
    """Return the inbox key of an action's output: gradients have one key, whichever pass computes them."""
    return action if action.kind == FORWARD else action._replace(kind=FULL_BACKWARD)
