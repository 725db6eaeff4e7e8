"""One kind of unit on one rank: its instructions as calls of PyTorch kernels on numbered places, run forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from shardwise.derive.sharded_program import Compute
from shardwise.model.architecture import Architecture
from shardwise.model.backward import gradient_name
from shardwise.model.program import Program, Role
from shardwise.pipeline.actions import BACKWARD, INPUT, WEIGHT
from shardwise.run.engine.call_builder import ROUTED, SIGHT, TRAINS, Call, Calls
from shardwise.run.engine.call_rewrites import compiled, given_later, with_giving, with_giving_behind
from shardwise.run.engine.collective_calls import MOVING, Moving
from shardwise.run.engine.fused_calls import Phase, in_calls
from shardwise.run.engine.rank_coordinates import Rank
from shardwise.run.engine.ring_calls import Around, Ring, rings
from shardwise.run.kernels.matmul import Narrow
from shardwise.step.collective_matmul import InPieces
from shardwise.step.instructions import KERNEL, START, WAIT, Identity, Instruction, Launch, Slice, Start, Wait
from shardwise.step.unit_instructions import Template

Held = list[Any]  # what a unit holds, by place
BACKWARD_PHASES = ("recompute", "backward")


class Step(NamedTuple):
    """A call on slots: reads from `get`, writes to one slot or several, and frees tensors after their last use.

    `identity` says which instructions of the unit it stands for.
    """

    kernel: Callable[..., Any]
    get: Callable[[Held], tuple[Any, ...]]
    put: int | tuple[int, ...]
    frees: tuple[int, ...]
    identity: Identity


class Backward(NamedTuple):
    """The steps of a backward pass, or of a part of it, after those that recompute what was not saved."""

    recompute: tuple[Step, ...] = ()
    steps: tuple[Step, ...] = ()


class TorchUnit:
    """The passes of a unit, from its template. `place` numbers what it holds by name. `input` and `output` are the hidden states
    that come and go, `loss` what else it makes.

    `backward` has the backward pass by kind of pass (`pipeline.actions`): whole (B), and with `split` also in two, of which the
    first gives the gradient of the input (I) and the second those of the weights (W). `compiled`: calls that follow one another
    are compiled together. `narrow`: what products with the unit's weights cast their operands to.
    """

    def __init__(
        self, template: Template, architecture: Architecture, rank: Rank, dtype: torch.dtype, *,
        compiled: bool = False, split: bool = False, narrow: Narrow | None = None,
    ) -> None:  # fmt: skip
        self.template, self.unit, self.compiled = template, template.unit, compiled
        self.place: dict[str, int] = {}
        self.name_of = _kernel_names(template)
        program, calls = self.unit.forward.program, Calls(self.unit, architecture, rank, dtype, narrow)
        self.weight_of = self._gradients(Role.WEIGHT)
        self.input = self._hidden(program, program.inputs)
        self.output = self._hidden(program, program.outputs)
        self.loss = next((name for name in program.outputs if name != self.output), None)
        self.gradient_of_input = next(iter(self._gradients(Role.RESIDUAL)), None)
        saved = {*(calls.key(*one) for one in self.unit.saved.items()), *program.outputs, ROUTED}
        forward = self._made(calls, template.passes["forward"], ("forward",))
        self.forward_calls = self._joined(calls, list(with_giving(forward, self.weight_of)), saved)
        self.forward = self._steps(self.forward_calls, saved)
        self.backward = {**self._whole(calls), **(self._split(calls) if split else {})}
        self.cuts = {key: cut for key, cut in calls.cuts.items() if key in self.place}

    def _whole(self, calls: Calls) -> dict[str, Backward]:
        """The backward pass at once."""
        given = {self.gradient_of_input or ""}
        made = self._made(calls, self.template.passes["backward"], BACKWARD_PHASES)
        giving = with_giving_behind if self.compiled else with_giving
        joined = self._joined(calls, list(giving(made, self.weight_of)), given)
        steps, border = self._steps(joined, given), sum(call.phase == "recompute" for call in joined)
        return {BACKWARD: Backward(steps[:border], steps[border:])}

    def _split(self, calls: Calls) -> dict[str, Backward]:
        """In two: all gradients of weights are given away in the second part, also those that the first makes beside."""
        given = {self.gradient_of_input or ""}
        inputs = self._made(calls, self.template.of_inputs, BACKWARD_PHASES)
        weights = self._made(calls, self.template.of_weights, BACKWARD_PHASES)
        beside = {name for call in inputs for name in call.writes if name in self.weight_of}
        giving = with_giving_behind if self.compiled else with_giving
        later = [*given_later(inputs, self.weight_of), *giving(weights, self.weight_of)]
        read = {name for call in later for name in call.reads}
        first = self._joined(calls, inputs, given | beside | read)
        second = self._joined(calls, later, set())
        steps, border = self._steps([*first, *second], given), sum(call.phase == "recompute" for call in first)
        return {
            INPUT: Backward(steps[:border], steps[border : len(first)]), WEIGHT: Backward(steps=steps[len(first) :]),
        }  # fmt: skip

    @staticmethod
    def _made(calls: Calls, instructions: Iterable[Instruction], phases: Sequence[str]) -> list[Call]:
        """The calls of instructions."""
        return [call for phase in _phases(rings(calls, instructions), phases) for call in in_calls(calls, phase)]

    def _joined(self, calls: Calls, made: list[Call], stays: Set[str]) -> list[Call]:
        """Calls, compiled together where the unit is; `stays` is read after them."""
        if not self.compiled:
            return made
        sights = {key for key, (name, _) in calls.cuts.items() if name == SIGHT}
        return compiled(made, stays, {calls.gates, TRAINS, *sights})

    @staticmethod
    def _hidden(program: Program, names: Iterable[str]) -> str | None:
        """The hidden state among some of a program's tensors."""
        return next((name for name in names if program.tensors[name].role is Role.RESIDUAL), None)

    def _gradients(self, role: Role) -> dict[str, str]:
        """The gradients that the backward pass gives of the unit's tensors with a role, and whose they are."""
        tensors, backward = self.unit.tensors, self.unit.backward.program
        found = {name: tensors[name].gradient_of for name in backward.outputs}
        return {name: own for name, own in found.items() if tensors[own].role is role}

    def until(self, name: str) -> tuple[Step, ...]:
        """The forward pass up to a tensor."""
        made = next(number for number, call in enumerate(self.forward_calls) if name in call.writes)
        return self._steps(self.forward_calls[: made + 1], {name})

    def at(self, name: str) -> int:
        """The place of a tensor."""
        return self.place.setdefault(name, len(self.place))

    def held(self) -> Held:
        """Nothing yet."""
        return [None] * len(self.place)

    def _steps(self, calls: Sequence[Call], stays: Set[str]) -> tuple[Step, ...]:
        """Calls with their slots. A tensor is freed after its last use, or written over where it is this pass's own."""
        last = {name: number for number, call in enumerate(calls) for name in (*call.writes, *call.reads)}
        own = {gradient_name(self.output or "")}
        steps = []
        for number, call in enumerate(calls):
            ends = {name for name in (*call.reads, *call.writes) if last[name] == number and self._passes(name)}
            ends -= stays
            kernel = next(
                (call.over[i] for i, n in enumerate(call.reads) if i in call.over and n in own & ends), call.kernel
            )
            own = (own - set(call.reads)) if call.is_view else (own | set(call.writes))
            get = _getter([self.at(n) for n in call.reads])
            steps.append(Step(kernel, get, self._put(call), self._places(ends), self._identity(call)))
        return tuple(steps)

    def _identity(self, call: Call) -> Identity:
        """By the names of the unit's list; what makes the results of several kernels has the names of all."""
        if call.moves is not None:
            return Identity(START if MOVING in call.writes[0] else WAIT, call.moves.name, call.phase)
        names = dict.fromkeys(self.name_of.get((call.phase, made), made) for made in call.makes)
        return Identity(KERNEL, " + ".join(names) or "slice", call.phase, call.makes)

    def _put(self, call: Call) -> int | tuple[int, ...]:
        places = tuple(self.at(name) for name in call.writes)
        return places[0] if len(places) == 1 else places

    def _passes(self, key: str) -> bool:
        """Whether a tensor comes and goes within a pass: no weight, no part of the batch, and nothing else from outside."""
        name, tensors = key.split(" ")[0], self.unit.tensors
        return name == MOVING or (name in tensors and tensors[name].role not in (Role.WEIGHT, Role.CONSTANT))

    def _places(self, names: Iterable[str]) -> tuple[int, ...]:
        return tuple(sorted(self.at(name) for name in names))


def _kernel_names(template: Template) -> dict[tuple[str, str], str]:
    """The name of the kernel that makes each result, by phase and result."""
    return {(kernel.phase, made): kernel.name for kernel in template.kernels for made in kernel.outputs}


def _phases(instructions: Iterable[Instruction | Around], names: Sequence[str]) -> list[Phase]:
    """The instructions of a pass by phase: a phase ends where a kernel or a collective of the next one starts."""
    parts: dict[str, list[Compute | Moving | Around]] = {name: [] for name in names}
    phase = names[0]
    for one in instructions:
        match one:
            case Launch():
                phase = one.kernel.phase
                parts[phase] += one.kernel.steps
            case Ring():
                parts[phase].append(one)
            case Start() | InPieces():
                phase = max(phase, one.traffic.phase, key=lambda name: names.index(name) if name in names else -1)
                parts[phase].append(one)
            case Wait() | Slice():
                parts[phase].append(one)
    return [Phase(name, of_phase) for name, of_phase in parts.items()]


def _getter(places: Sequence[int]) -> Callable[[Held], tuple[Any, ...]]:
    if len(places) == 1:
        (only,) = places
        return lambda held: (held[only],)
    return itemgetter(*places)


def run(steps: Iterable[Step], held: Held) -> None:
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
