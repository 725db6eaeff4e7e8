"""One training step of a small decoder as stages of a pipeline on virtual devices.

Each rank works through the slots of its schedule in order, and waits for messages. Stages hand each other the hidden state and
its gradient and nothing else: every micro-batch of a stage has devices of its own, so that nothing passes by any other way.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shardwise.derive.sharded_program import CollectiveStep
from shardwise.derive.sharded_unit import ShardedUnit, derive_units
from shardwise.derive.tensor_specs import state_resting_spec
from shardwise.model.carried_tensors import has_carried_tensors
from shardwise.pipeline.actions import FORWARD, FULL_BACKWARD, Action
from shardwise.pipeline.registry import build_actions
from shardwise.sharding import CollectiveKind
from shardwise.step.unit_instructions import lower_derived_unit
from shardwise.values.engine_policies import IssuePolicy
from shardwise.values.symbolic import SymbolValues

from .training_step import Case, Outcome, StrictDevices, loss_spec

Message = tuple[str, int, int]  # kind of pass, stage and micro-batch that it is for


@dataclasses.dataclass(frozen=True)
class PipelineOutcome:
    """What a step gave, and how many elements of messages all devices received and were derived to receive."""

    outcome: Outcome
    received: int
    derived: int


def run_pipelined(case: Case, schedule: str, layers_per_stage: Sequence[int], num_ranks: int) -> PipelineOutcome:
    """One step of a case, with its layers in stages of so many, under a schedule on so many ranks."""
    return _Pipeline(case, schedule, layers_per_stage, num_ranks).run()


class _Pipeline:
    def __init__(self, case: Case, schedule: str, layers_per_stage: Sequence[int], num_ranks: int) -> None:
        assert not case.tied
        assert not has_carried_tensors(case.architecture)
        assert sum(layers_per_stage) == case.num_layers
        self.case, self.units = case, derive_units(case.scheme)
        virtual = len(layers_per_stage) // num_ranks
        self.actions = build_actions(schedule, num_ranks, case.num_micro_batches, virtual)
        self.lists = {unit.name: lower_derived_unit(unit, IssuePolicy()).passes for unit in self.units.values()}
        layers = [(name, f"{i}.") for i, name in enumerate(case.architecture.layer_units)]
        ends = np.cumsum(layers_per_stage).tolist()
        self.stages = [layers[end - count : end] for end, count in zip(ends, layers_per_stage, strict=True)]
        self.stages[0] = [("embedding", ""), *self.stages[0]]
        self.stages[-1] = [*self.stages[-1], ("head", "")]
        state, self.batches = case.inputs()
        self.devices = {
            (prefix or name, micro_batch): self._load(self.units[name], prefix, state)
            for stage in self.stages
            for name, prefix in stage
            for micro_batch in range(case.num_micro_batches)
        }
        self.mailbox: dict[Message, list[Any]] = {}
        self.losses: list[list[Any]] = []
        self.received = 0

    def _load(self, unit: ShardedUnit, prefix: str, state: Mapping[str, Any]) -> StrictDevices:
        """The devices of a unit and of one micro-batch, with its weights and the state of its optimizer."""
        devices = StrictDevices(self.case.mesh, self.case.sizes_of(unit.name), unit=unit, router=self.case.router)
        for name, dims in unit.weights.items():
            devices.scatter_array(name, unit.forward.specs[name], state[prefix + name])
            for part in self.case.optimizer_of(prefix + name).state if name in unit.trained else ():
                spec = state_resting_spec(self.case.scheme, dims, unit.update.program.dims(f"{name}.{part}"))
                devices.scatter_array(f"{name}.{part}", spec, state[f"{prefix}{name}.{part}"])
        return devices

    def run(self) -> PipelineOutcome:
        queues = [[action for slot in slots for action in slot] for slots in self.actions.order]
        while any(queues):
            ready = [queue for queue in queues if queue and self._is_ready(queue[0])]
            assert ready, f"all ranks wait for messages: {[queue[0] for queue in queues if queue]}"
            for queue in ready:
                action = queue.pop(0)
                (self._forward if action.kind == FORWARD else self._backward)(action)
        assert not self.mailbox, "messages that nobody received"
        return PipelineOutcome(self._update(), self.received, self._derived_messages())

    def _is_ready(self, action: Action) -> bool:
        """Whether the message that a pass starts from has come: the first stage's forward pass and the last one's backward pass
        start from none."""
        source_end = 0 if action.kind == FORWARD else len(self.stages) - 1
        return action.stage == source_end or tuple(action) in self.mailbox

    def _receive(self, action: Action) -> list[Any]:
        shards = self.mailbox.pop((action.kind, action.stage, action.micro_batch))
        self.received += sum(shard.size for shard in shards)
        return [shard.copy() for shard in shards]

    def _forward(self, action: Action) -> None:
        x = self._receive(action) if action.stage else None
        batch = self.batches[action.micro_batch]
        for name, prefix in self.stages[action.stage]:
            devices, program = self.devices[prefix or name, action.micro_batch], self.units[name].forward.program
            devices.constants = {
                key: (program.dims(key), array) for key, array in batch.items() if key in program.inputs
            }
            if x is not None:
                devices.live_shards["x", self.units[name].forward.specs["x"]] = x
            devices.run_instructions(program, self.lists[name]["forward"])
            (output,) = program.outputs
            spec = loss_spec(self.units[name]) if name == "head" else self.units[name].forward.specs[output]
            x = devices.live_shards[output, spec]
        assert x is not None
        if action.stage == len(self.stages) - 1:
            self.losses.append(x)
        else:
            self.mailbox[FORWARD, action.stage + 1, action.micro_batch] = x

    def _backward(self, action: Action) -> None:
        assert action.kind == FULL_BACKWARD
        is_last = action.stage == len(self.stages) - 1
        dx = [np.ones(()) for _ in range(self.case.mesh.num_devices)] if is_last else self._receive(action)
        for name, prefix in reversed(self.stages[action.stage]):
            unit, devices = self.units[name], self.devices[prefix or name, action.micro_batch]
            (output,) = unit.forward.program.outputs
            devices.live_shards[f"d.{output}", unit.forward.specs[output]] = dx
            devices.run_instructions(unit.backward.program, self.lists[name]["backward"])
            for gradient in set(unit.backward.program.outputs) - set(unit.gradients.values()):
                dx = devices.live_shards[gradient, unit.backward.specs[gradient]]
        if action.stage:
            self.mailbox[FULL_BACKWARD, action.stage - 1, action.micro_batch] = dx

    def _update(self) -> Outcome:
        """Add the gradients of all micro-batches, on the devices of the first, and update."""
        gradients, updated = {}, {}
        for name, prefix in (unit for stage in self.stages for unit in stage):
            unit, first = self.units[name], self.devices[prefix or name, 0]
            for weight, gradient in unit.gradients.items():
                key = gradient, unit.backward.specs[gradient]
                for micro_batch in range(1, self.case.num_micro_batches):
                    shards = self.devices[prefix or name, micro_batch].live_shards[key]
                    first.live_shards[key] = [a + b for a, b in zip(first.live_shards[key], shards, strict=True)]
                gradients[prefix + weight] = first.gather_array(*key)
            if name == "head":
                first.live_shards["loss", loss_spec(unit)] = [sum(parts) for parts in zip(*self.losses, strict=True)]
            first.run_instructions(unit.update.program, self.lists[name]["update"])
            updated |= {
                prefix + output: first.gather_array(output, unit.update.specs[output])
                for output in unit.update.program.outputs
            }
        head = self.devices["head", 0]
        loss = float(head.gather_array("loss", self.units["head"].forward.specs["loss"]))
        return Outcome(loss, gradients, updated, {}, {})

    def _derived_messages(self) -> int:
        """Elements that all devices receive by the program that hands a hidden state on, and by its transpose."""
        carry, values = self.units["carry"], SymbolValues({**self.case.sizes, **dict(self.case.mesh.axes)})
        steps = [*carry.forward.steps, *carry.backward_steps]
        kinds = Counter(step.collective.kind for step in steps if isinstance(step, CollectiveStep))
        assert kinds == {CollectiveKind.SEND_RECV: 2}, "a message forward and one backward"
        elements = sum(
            step.collective.before.local_elements().evaluate(values)
            for step in steps
            if isinstance(step, CollectiveStep)
        )
        crossings = len(self.stages) - 1
        return round(elements * self.case.mesh.num_devices * crossings * self.case.num_micro_batches)
