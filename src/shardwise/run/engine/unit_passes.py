"""One kind of unit (embedding, block or head) on one rank: its instructions as calls of PyTorch kernels on numbered
slots, and their execution.

An instruction becomes a call of its own, but for operations that run as one kernel (`fused_calls`) and rings (`rings`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import replace
from operator import itemgetter
from typing import Any, NamedTuple

from shardwise.derive import ComputeStep, Ring
from shardwise.model import Accumulate, Program, Role
from shardwise.model.backward import gradient_name
from shardwise.pipeline import BACKWARD_INPUT, BACKWARD_WEIGHT, FULL_BACKWARD
from shardwise.run.engine.calls import (
    ROUTER_STATISTICS,
    CallBuilder,
    KernelCall,
    deliver_gradients,
    write_gradients,
)
from shardwise.run.engine.collective_calls import MOVING_PREFIX, CollectiveInstruction, build_collective_calls
from shardwise.run.engine.expert_parallel import expert_row_call, moves_expert_rows
from shardwise.run.engine.fused_calls import find_fused_calls
from shardwise.run.engine.kernel_calls import build_call
from shardwise.run.engine.rings import build_ring_call
from shardwise.step import (
    START,
    Instruction,
    Kernel,
    LocalSlice,
    RunRing,
    StartCollective,
    UnitInstructions,
    WaitCollective,
)
from shardwise.step.instructions import KERNEL, WAIT, InstructionId

Slots = list[Any]  # the tensors of a unit for one micro-batch, by slot number
BACKWARD_PHASES = ("recompute", "backward")
PhasePart = ComputeStep | CollectiveInstruction | Ring  # of a phase: what becomes calls


class SlotCall(NamedTuple):
    """A call on slots: reads through `get`, writes to one slot or several (`put`), and frees slots after their last
    use.

    `identity` says which instructions of the unit it stands for.
    """

    kernel: Callable[..., Any]
    get: Callable[[Slots], tuple[Any, ...]]
    put: int | tuple[int, ...]
    frees: tuple[int, ...]
    identity: InstructionId


class BackwardCalls(NamedTuple):
    """Calls of a backward pass, or of a part of it, after those that recompute what was not saved."""

    recompute: tuple[SlotCall, ...] = ()
    steps: tuple[SlotCall, ...] = ()


class TorchUnit:
    """The passes of a unit, from its template; `builder` builds their calls.

    `slot_of` maps the name of a tensor to its slot. `castable` are the weights that may be cast before their products read
    them, as nothing else does, with the split of their dims (`KernelCall.casts`). `input` and `output` are the hidden states
    that enter and leave, `loss` the loss where the unit makes one. `backward` has the backward pass by kind
    (`pipeline.actions`): full (B), and with `split` also in two parts, of which the first makes the gradient of the input
    (I) and the second those of the weights (W).
    """

    def __init__(self, template: UnitInstructions, builder: CallBuilder, *, split: bool) -> None:
        self.template, self.unit = template, template.unit
        self.slot_of: dict[str, int] = {}
        self._splits_read: dict[str, set[tuple[int, int] | None]] = {}
        # the name of the kernel that makes each result, by phase and result
        self.name_of = {(kernel.phase, name): kernel.name for kernel in template.kernels for name in kernel.outputs}
        program = self.unit.forward.program
        self.weight_of = self._gradients(Role.WEIGHT)
        self.input = self._hidden_state(program, program.inputs)
        self.output = self._hidden_state(program, program.outputs)
        self.loss = next((name for name in program.outputs if name != self.output), None)
        self.gradient_of_input = next(iter(self._gradients(Role.RESIDUAL)), None)
        saved = {
            *builder.saved_keys(),
            *program.outputs,
            ROUTER_STATISTICS,
        }
        forward = self._build_calls(builder, template.passes["forward"], ("forward",))
        self.forward_calls = list(write_gradients(forward, self.weight_of))
        self.forward = self._steps(self.forward_calls, saved)
        self.backward = {**self._full_backward(builder), **(self._split_backward(builder) if split else {})}
        # Weights that nothing but products reads, which may be cast before: `KernelCall.casts`, where all agree.
        self.castable: dict[str, tuple[int, int]] = {}
        for name in program.weights:
            readings = self._splits_read.get(name, {None})
            dims_split = next(iter(readings))
            if dims_split is not None and len(readings) == 1:
                self.castable[name] = dims_split
        self.batch_parts = {key: cut for key, cut in builder.batch_parts.items() if key in self.slot_of}

    def _full_backward(self, builder: CallBuilder) -> dict[str, BackwardCalls]:
        """Return the backward pass in one part."""
        read_after = {self.gradient_of_input or ""}
        backward_calls = self._build_calls(builder, self.template.passes["backward"], BACKWARD_PHASES)
        calls = list(write_gradients(backward_calls, self.weight_of))
        steps, num_recompute = self._steps(calls, read_after), sum(call.phase == "recompute" for call in calls)
        return {FULL_BACKWARD: BackwardCalls(steps[:num_recompute], steps[num_recompute:])}

    def _split_backward(self, builder: CallBuilder) -> dict[str, BackwardCalls]:
        """Return the backward pass in two parts; the second delivers the weight gradients of both."""
        read_after = {self.gradient_of_input or ""}
        inputs = self._build_calls(builder, self.template.backward_input, BACKWARD_PHASES)
        weights = self._build_calls(builder, self.template.backward_weight, BACKWARD_PHASES)
        later = [*deliver_gradients(inputs, self.weight_of), *write_gradients(weights, self.weight_of)]
        steps = self._steps([*inputs, *later], read_after)
        num_recompute = sum(call.phase == "recompute" for call in inputs)
        return {
            BACKWARD_INPUT: BackwardCalls(steps[:num_recompute], steps[num_recompute : len(inputs)]),
            BACKWARD_WEIGHT: BackwardCalls(steps=steps[len(inputs) :]),
        }

    @staticmethod
    def _build_calls(
        builder: CallBuilder, instructions: Iterable[Instruction], phases: Sequence[str]
    ) -> list[KernelCall]:
        parts_by_phase = _split_into_phases(instructions, phases)
        return [call for phase, parts in parts_by_phase.items() for call in _build_phase_calls(builder, phase, parts)]

    @staticmethod
    def _hidden_state(program: Program, names: Iterable[str]) -> str | None:
        """Return the hidden state among some of a program's tensors."""
        return next((name for name in names if program.tensors[name].role is Role.RESIDUAL), None)

    def _gradients(self, role: Role) -> dict[str, str]:
        """Return the gradients that the backward pass makes of tensors with a role, each with the name of its tensor."""
        tensors, backward = self.unit.tensors, self.unit.backward.program
        primals = {name: tensors[name].gradient_of for name in backward.outputs}
        return {name: primal for name, primal in primals.items() if tensors[primal].role is role}

    def forward_until(self, name: str) -> tuple[SlotCall, ...]:
        """Return the forward pass up to the call that writes a tensor."""
        last = next(number for number, call in enumerate(self.forward_calls) if name in call.writes)
        return self._steps(self.forward_calls[: last + 1], {name})

    def slot(self, name: str) -> int:
        """Return the slot of a tensor; a new one on first use."""
        return self.slot_of.setdefault(name, len(self.slot_of))

    def empty_slots(self) -> Slots:
        """Return empty slots for one micro-batch."""
        return [None] * len(self.slot_of)

    def _steps(self, calls: Sequence[KernelCall], read_after: Set[str]) -> tuple[SlotCall, ...]:
        """Bind calls to slots. A tensor is freed after its last use, or overwritten there where this pass made it."""
        last_use = {name: number for number, call in enumerate(calls) for name in (*call.writes, *call.reads)}
        # Tensors that this pass made alone: a kernel may overwrite one of them on its last use. A view shares memory with
        # what it reads, so neither may be overwritten.
        writable = {gradient_name(self.output or "")}
        steps = []
        for number, call in enumerate(calls):
            for name in call.reads:
                self._splits_read.setdefault(name, set()).add(call.casts.get(name))
            freed = {
                name
                for name in (*call.reads, *call.writes)
                if last_use[name] == number and self._is_local_to_pass(name)
            }
            freed -= read_after
            kernel = next(
                (call.over[i] for i, n in enumerate(call.reads) if i in call.over and n in writable & freed),
                call.kernel,
            )
            writable = (writable - set(call.reads)) if call.is_view else (writable | set(call.writes))
            get = _slot_reader([self.slot(n) for n in call.reads])
            steps.append(SlotCall(kernel, get, self._put(call), self._places(freed), self._identity(call)))
        return tuple(steps)

    def _identity(self, call: KernelCall) -> InstructionId:
        """Return the instruction that a call stands for; one for several kernels has all their names."""
        if call.traffic is not None:
            return InstructionId(START if MOVING_PREFIX in call.writes[0] else WAIT, call.traffic.name, call.phase)
        names = dict.fromkeys(self.name_of.get((call.phase, output), output) for output in call.results)
        return InstructionId(KERNEL, " + ".join(names) or "slice", call.phase, call.results)

    def _put(self, call: KernelCall) -> int | tuple[int, ...]:
        slots = tuple(self.slot(name) for name in call.writes)
        return slots[0] if len(slots) == 1 else slots

    def _is_local_to_pass(self, key: str) -> bool:
        """Return whether a tensor lives within one pass: no weight, no part of the batch, nothing from outside."""
        name, tensors = key.split(" ")[0], self.unit.tensors
        return name == MOVING_PREFIX or (name in tensors and tensors[name].role not in (Role.WEIGHT, Role.CONSTANT))

    def _places(self, names: Iterable[str]) -> tuple[int, ...]:
        return tuple(sorted(self.slot(name) for name in names))


def _split_into_phases(instructions: Iterable[Instruction], names: Sequence[str]) -> dict[str, list[PhasePart]]:
    """Return the instructions of a pass by phase: a phase ends where a kernel or a collective of the next one starts."""
    parts: dict[str, list[PhasePart]] = {name: [] for name in names}
    phase = names[0]
    for instruction in instructions:
        match instruction:
            case Kernel():
                phase = instruction.phase
                parts[phase] += instruction.steps
            case RunRing():
                phase = instruction.phase
                parts[phase] += (part for part in instruction.other_members if isinstance(part, CollectiveInstruction))
                parts[phase].append(instruction.ring)
            case StartCollective():
                phase = max(
                    phase, instruction.collective.phase, key=lambda name: names.index(name) if name in names else -1
                )
                parts[phase].append(instruction)
            case WaitCollective() | LocalSlice():
                parts[phase].append(instruction)
    return parts


def _build_phase_calls(builder: CallBuilder, phase: str, parts: Sequence[PhasePart]) -> Iterator[KernelCall]:
    """Yield a phase's calls in order, a fused one where the last of its steps stands."""
    steps = [part for part in parts if isinstance(part, ComputeStep)]
    fused_calls = find_fused_calls(builder, phase, steps)
    dropped = frozenset(name for fused in fused_calls for name in fused.dropped)
    fused_by_operation = {id(operation): fused for fused in fused_calls for operation in fused.operations}
    num_missing = {id(fused): len(fused.operations) for fused in fused_calls}
    # Results inside a fused kernel, which no call writes.
    internal = {name for fused in fused_calls for operation in fused.operations for name in operation.outputs}
    internal -= {name for fused in fused_calls for name in fused.call.writes}
    for part in parts:
        if isinstance(part, Ring):
            yield build_ring_call(builder, part, phase)
        elif not isinstance(part, ComputeStep):
            if not (isinstance(part, LocalSlice) and part.step.tensor.name in internal):
                yield from _build_collective_calls(builder, phase, part)
        elif id(part.operation) not in fused_by_operation:
            call = build_call(builder, _drop_summed_terms(part, dropped), phase)
            yield replace(call, results=part.operation.outputs)
        else:
            fused = fused_by_operation[id(part.operation)]
            num_missing[id(fused)] -= 1
            if not num_missing[id(fused)]:
                operations = {id(operation) for operation in fused.operations}
                call = builder.with_tensor_keys(
                    fused.call, [step for step in steps if id(step.operation) in operations]
                )
                yield replace(call, results=tuple(name for operation in fused.operations for name in operation.outputs))


def _build_collective_calls(
    builder: CallBuilder, phase: str, instruction: CollectiveInstruction
) -> Iterator[KernelCall]:
    traffic = None if isinstance(instruction, LocalSlice) else instruction.collective
    if moves_expert_rows(instruction, builder):
        yield replace(expert_row_call(builder, instruction, phase), traffic=traffic)
    else:
        yield from (replace(call, traffic=traffic) for call in build_collective_calls(builder, instruction, phase))


def _drop_summed_terms(step: ComputeStep, dropped: frozenset[str]) -> ComputeStep:
    """Return a sum of gradients without the terms that a fused kernel has already added."""
    operation = step.operation
    if not isinstance(operation, Accumulate) or dropped.isdisjoint(operation.inputs):
        return step
    inputs = tuple(name for name in operation.inputs if name not in dropped)
    return ComputeStep(Accumulate(inputs, operation.outputs), step.placed)


def _slot_reader(indices: Sequence[int]) -> Callable[[Slots], tuple[Any, ...]]:
    if len(indices) == 1:
        (index,) = indices
        return lambda slots: (slots[index],)
    return itemgetter(*indices)


def run_calls(steps: Iterable[SlotCall], slots: Slots) -> None:
    """Run calls on the slots of a unit."""
    for kernel, get, put, frees, _ in steps:
        outputs = kernel(*get(slots))
        if put.__class__ is int:
            slots[put] = outputs
        elif put:
            for slot, tensor in zip(put, outputs, strict=True):  # type: ignore[arg-type]
                slots[slot] = tensor
        outputs = tensor = None  # a local reference would keep freed tensors until the next kernel has run
        for slot in frees:
            slots[slot] = None
