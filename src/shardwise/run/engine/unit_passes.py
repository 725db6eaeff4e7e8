"""One kind of unit on one rank: its instructions as calls of PyTorch kernels on numbered places, run forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from shardwise.derive.sharded_program import ComputeStep
from shardwise.model.architecture import Architecture
from shardwise.model.backward import gradient_name
from shardwise.model.program import Program, Role
from shardwise.pipeline.actions import BACKWARD_INPUT, BACKWARD_WEIGHT, FULL_BACKWARD
from shardwise.run.engine.call_builder import MASK, ROUTER_STATISTICS, TRAINS, CallBuilder, KernelCall
from shardwise.run.engine.call_rewrites import compile_runs, deliver_gradients, write_gradients, write_gradients_last
from shardwise.run.engine.collective_calls import MOVING_PREFIX, CollectiveInstruction
from shardwise.run.engine.fused_calls import PhaseSteps, build_phase_calls
from shardwise.run.engine.rank_coordinates import Rank
from shardwise.run.engine.ring_calls import RingAttentionStep, RingStep, substitute_rings
from shardwise.run.kernels.matmul import ProductFormats
from shardwise.step.collective_matmul import CollectiveMatmul
from shardwise.step.instructions import (
    KERNEL,
    START,
    WAIT,
    Instruction,
    InstructionId,
    KernelLaunch,
    LocalSlice,
    StartCollective,
    WaitCollective,
)
from shardwise.step.unit_instructions import UnitInstructions

Slots = list[Any]  # what a unit holds, by place
BACKWARD_PHASES = ("recompute", "backward")


class SlotCall(NamedTuple):
    """A call on slots: reads from `get`, writes to one slot or several, and frees tensors after their last use.

    `identity` says which instructions of the unit it stands for.
    """

    kernel: Callable[..., Any]
    get: Callable[[Slots], tuple[Any, ...]]
    put: int | tuple[int, ...]
    frees: tuple[int, ...]
    identity: InstructionId


class BackwardCalls(NamedTuple):
    """The steps of a backward pass, or of a part of it, after those that recompute what was not saved."""

    recompute: tuple[SlotCall, ...] = ()
    steps: tuple[SlotCall, ...] = ()


class TorchUnit:
    """The passes of a unit, from its template. `place` numbers what it holds by name. `input` and `output` are the hidden states
    that come and go, `loss` what else it makes.

    `backward` has the backward pass by kind of pass (`pipeline.actions`): whole (B), and with `split` also in two, of which the
    first gives the gradient of the input (I) and the second those of the weights (W). `compiled`: calls that follow one another
    are compiled together. `narrow`: what products with the unit's weights cast their operands to.
    """

    def __init__(
        self, template: UnitInstructions, architecture: Architecture, rank: Rank, dtype: torch.dtype, *,
        compiled: bool = False, split: bool = False, narrow: ProductFormats | None = None,
    ) -> None:  # fmt: skip
        self.template, self.unit, self.compiled = template, template.unit, compiled
        self.place: dict[str, int] = {}
        self.name_of = _kernel_names(template)
        program, calls = self.unit.forward.program, CallBuilder(self.unit, architecture, rank, dtype, narrow)
        self.weight_of = self._gradients(Role.WEIGHT)
        self.input = self._hidden_state(program, program.inputs)
        self.output = self._hidden_state(program, program.outputs)
        self.loss = next((name for name in program.outputs if name != self.output), None)
        self.gradient_of_input = next(iter(self._gradients(Role.RESIDUAL)), None)
        saved = {*(calls.key(*one) for one in self.unit.saved.items()), *program.outputs, ROUTER_STATISTICS}
        forward = self._build_calls(calls, template.passes["forward"], ("forward",))
        self.forward_calls = self._compile_calls(calls, list(write_gradients(forward, self.weight_of)), saved)
        self.forward = self._steps(self.forward_calls, saved)
        self.backward = {**self._full_backward(calls), **(self._split_backward(calls) if split else {})}
        self.batch_parts = {key: cut for key, cut in calls.batch_parts.items() if key in self.place}

    def _full_backward(self, calls: CallBuilder) -> dict[str, BackwardCalls]:
        """The backward pass at once."""
        given = {self.gradient_of_input or ""}
        made = self._build_calls(calls, self.template.passes["backward"], BACKWARD_PHASES)
        giving = write_gradients_last if self.compiled else write_gradients
        joined = self._compile_calls(calls, list(giving(made, self.weight_of)), given)
        steps, border = self._steps(joined, given), sum(call.phase == "recompute" for call in joined)
        return {FULL_BACKWARD: BackwardCalls(steps[:border], steps[border:])}

    def _split_backward(self, calls: CallBuilder) -> dict[str, BackwardCalls]:
        """In two: all gradients of weights are given away in the second part, also those that the first makes beside."""
        given = {self.gradient_of_input or ""}
        inputs = self._build_calls(calls, self.template.backward_input, BACKWARD_PHASES)
        weights = self._build_calls(calls, self.template.backward_weight, BACKWARD_PHASES)
        beside = {name for call in inputs for name in call.writes if name in self.weight_of}
        giving = write_gradients_last if self.compiled else write_gradients
        later = [*deliver_gradients(inputs, self.weight_of), *giving(weights, self.weight_of)]
        read = {name for call in later for name in call.reads}
        first = self._compile_calls(calls, inputs, given | beside | read)
        second = self._compile_calls(calls, later, set())
        steps, border = self._steps([*first, *second], given), sum(call.phase == "recompute" for call in first)
        return {
            BACKWARD_INPUT: BackwardCalls(steps[:border], steps[border : len(first)]), BACKWARD_WEIGHT:
            BackwardCalls(steps=steps[len(first) :]),
        }  # fmt: skip

    @staticmethod
    def _build_calls(
        calls: CallBuilder, instructions: Iterable[Instruction], phases: Sequence[str]
    ) -> list[KernelCall]:
        """The calls of instructions."""
        return [
            call
            for phase in _split_into_phases(substitute_rings(calls, instructions), phases)
            for call in build_phase_calls(calls, phase)
        ]

    def _compile_calls(self, calls: CallBuilder, made: list[KernelCall], stays: Set[str]) -> list[KernelCall]:
        """Calls, compiled together where the unit is; `stays` is read after them."""
        if not self.compiled:
            return made
        sights = {key for key, (name, _) in calls.batch_parts.items() if name == MASK}
        return compile_runs(made, stays, {calls.gates, TRAINS, *sights})

    @staticmethod
    def _hidden_state(program: Program, names: Iterable[str]) -> str | None:
        """The hidden state among some of a program's tensors."""
        return next((name for name in names if program.tensors[name].role is Role.RESIDUAL), None)

    def _gradients(self, role: Role) -> dict[str, str]:
        """The gradients that the backward pass gives of the unit's tensors with a role, and whose they are."""
        tensors, backward = self.unit.tensors, self.unit.backward.program
        found = {name: tensors[name].gradient_of for name in backward.outputs}
        return {name: own for name, own in found.items() if tensors[own].role is role}

    def forward_until(self, name: str) -> tuple[SlotCall, ...]:
        """The forward pass up to a tensor."""
        made = next(number for number, call in enumerate(self.forward_calls) if name in call.writes)
        return self._steps(self.forward_calls[: made + 1], {name})

    def at(self, name: str) -> int:
        """The place of a tensor."""
        return self.place.setdefault(name, len(self.place))

    def empty_slots(self) -> Slots:
        """Nothing yet."""
        return [None] * len(self.place)

    def _steps(self, calls: Sequence[KernelCall], stays: Set[str]) -> tuple[SlotCall, ...]:
        """Calls with their slots. A tensor is freed after its last use, or written over where it is this pass's own."""
        last = {name: number for number, call in enumerate(calls) for name in (*call.writes, *call.reads)}
        own = {gradient_name(self.output or "")}
        steps = []
        for number, call in enumerate(calls):
            ends = {
                name for name in (*call.reads, *call.writes) if last[name] == number and self._is_local_to_pass(name)
            }
            ends -= stays
            kernel = next(
                (call.over[i] for i, n in enumerate(call.reads) if i in call.over and n in own & ends), call.kernel
            )
            own = (own - set(call.reads)) if call.is_view else (own | set(call.writes))
            get = _slot_reader([self.at(n) for n in call.reads])
            steps.append(SlotCall(kernel, get, self._put(call), self._places(ends), self._identity(call)))
        return tuple(steps)

    def _identity(self, call: KernelCall) -> InstructionId:
        """By the names of the unit's list; what makes the results of several kernels has the names of all."""
        if call.traffic is not None:
            return InstructionId(START if MOVING_PREFIX in call.writes[0] else WAIT, call.traffic.name, call.phase)
        names = dict.fromkeys(self.name_of.get((call.phase, made), made) for made in call.results)
        return InstructionId(KERNEL, " + ".join(names) or "slice", call.phase, call.results)

    def _put(self, call: KernelCall) -> int | tuple[int, ...]:
        places = tuple(self.at(name) for name in call.writes)
        return places[0] if len(places) == 1 else places

    def _is_local_to_pass(self, key: str) -> bool:
        """Whether a tensor comes and goes within a pass: no weight, no part of the batch, and nothing else from outside."""
        name, tensors = key.split(" ")[0], self.unit.tensors
        return name == MOVING_PREFIX or (name in tensors and tensors[name].role not in (Role.WEIGHT, Role.CONSTANT))

    def _places(self, names: Iterable[str]) -> tuple[int, ...]:
        return tuple(sorted(self.at(name) for name in names))


def _kernel_names(template: UnitInstructions) -> dict[tuple[str, str], str]:
    """The name of the kernel that makes each result, by phase and result."""
    return {(kernel.phase, made): kernel.name for kernel in template.kernels for made in kernel.outputs}


def _split_into_phases(instructions: Iterable[Instruction | RingStep], names: Sequence[str]) -> list[PhaseSteps]:
    """The instructions of a pass by phase: a phase ends where a kernel or a collective of the next one starts."""
    parts: dict[str, list[ComputeStep | CollectiveInstruction | RingStep]] = {name: [] for name in names}
    phase = names[0]
    for one in instructions:
        match one:
            case KernelLaunch():
                phase = one.kernel.phase
                parts[phase] += one.kernel.steps
            case RingAttentionStep():
                parts[phase].append(one)
            case StartCollective() | CollectiveMatmul():
                phase = max(phase, one.collective.phase, key=lambda name: names.index(name) if name in names else -1)
                parts[phase].append(one)
            case WaitCollective() | LocalSlice():
                parts[phase].append(one)
    return [PhaseSteps(name, of_phase) for name, of_phase in parts.items()]


def _slot_reader(places: Sequence[int]) -> Callable[[Slots], tuple[Any, ...]]:
    if len(places) == 1:
        (only,) = places
        return lambda held: (held[only],)
    return itemgetter(*places)


def run_calls(steps: Iterable[SlotCall], held: Slots) -> None:
    """Run steps on what a unit holds."""
    for kernel, get, put, frees, _ in steps:
        made = kernel(*get(held))
        if put.__class__ is int:
            held[put] = made
        elif put:
            for place, one in zip(put, made, strict=True):  # type: ignore[arg-type]
                held[place] = one
        made = one = None  # or what is freed would stay
        for place in frees:
            held[place] = None
