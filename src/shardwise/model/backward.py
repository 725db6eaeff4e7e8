"""The backward program of any forward program, and which forward results are saved for it or recomputed.

The transpose takes the operations one by one, in reverse; nothing about a transformer is written here. What the backward
program reads from the forward pass has to be saved or recomputed: `split_saved` takes a recompute policy (which results may be
saved) and returns the saved tensors and the smallest slice of the forward program that recomputes the others.

Without a fixed policy, dynamic programming (`pareto_save_choices`) finds for every number of saved bytes the results with the
least to recompute. Jain et al. 2020, Checkmate (arXiv 1910.02653), solve the same problem as an integer program.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from shardwise.model.operations import Accumulate, Map, Operation
from shardwise.model.program import Program, Role, Tensor
from shardwise.model.recompute_policies import get_recompute_policy, is_expensive_to_recompute


def gradient_name(name: str) -> str:
    """Return the name of a tensor's gradient: `d.x` for `x`."""
    return f"d.{name}"


@dataclass(frozen=True, slots=True)
class BackwardProgram:
    """The backward program, and the name of the gradient of each differentiated input.

    `forward_index` gives, for each result of a transposed operation, the index of the forward operation.
    """

    program: Program
    gradients: Mapping[str, str]
    forward_index: Mapping[str, int]


def transpose_program(forward: Program, *, outputs: Iterable[str], inputs: Iterable[str]) -> BackwardProgram:
    """Transpose `forward`: from the gradients of the tensors `outputs` to those of the inputs `inputs`.

    The program's inputs are the `d.` tensors of `outputs` and every forward tensor that a transpose reads.
    """
    return _Transposer(forward, tuple(outputs)).run(tuple(inputs))


class _Transposer:
    def __init__(self, forward: Program, outputs: tuple[str, ...]) -> None:
        self.forward = forward
        self.tensors: dict[str, Tensor] = dict(forward.tensors)
        self.dims = {name: tensor.dims for name, tensor in forward.tensors.items()}  # all that gradients read
        self.operations: list[Operation] = []
        self.gradient_parts: dict[str, list[str]] = {}
        self.forward_index: dict[str, int] = {}
        for name in outputs:
            self.gradient_parts[name] = [self.add_gradient_tensor(gradient_name(name), name)]
        self.output_gradients = tuple(gradient_name(name) for name in outputs)

    def run(self, differentiated: tuple[str, ...]) -> BackwardProgram:
        needs_gradient = _tensors_depending_on(self.forward, differentiated)
        for index, operation in reversed(list(enumerate(self.forward.operations))):
            cotangents = {out: self.sum_gradient_parts(out) for out in operation.outputs if out in self.gradient_parts}
            if cotangents and operation.outputs[0] in cotangents:
                num_before = len(self.operations)
                self.transpose(operation, cotangents, needs_gradient)
                self.forward_index |= {out: index for added in self.operations[num_before:] for out in added.outputs}
        gradients = {name: self.sum_gradient_parts(name) for name in differentiated if name in self.gradient_parts}
        computed = {out for operation in self.operations for out in operation.outputs}
        reads = {name for operation in self.operations for name in operation.operands}
        inputs = tuple(name for name in (*self.output_gradients, *self.forward.tensors) if name in reads - computed)
        return BackwardProgram(
            Program(self.tensors, tuple(self.operations), inputs, tuple(gradients.values())),
            gradients,
            self.forward_index,
        )

    def add_gradient_tensor(self, name: str, like: str) -> str:
        tensor = self.forward.tensors[like]
        role = Role.WEIGHT_GRADIENT if tensor.role is Role.WEIGHT else tensor.role
        self.tensors[name] = Tensor(name, tensor.dims, role)
        return name

    def transpose(self, operation: Operation, cotangents: Mapping[str, str], needs_gradient: set[str]) -> None:
        shared: dict[int, tuple[str, ...]] = {}
        num_earlier: Counter[int] = Counter()  # entries of the same gradient so far: the index of its result
        for name, gradient in operation.gradients(cotangents, self.dims):
            position = num_earlier[id(gradient)]
            num_earlier[id(gradient)] += 1
            if name not in needs_gradient:
                continue
            if isinstance(gradient, Map) and gradient.function == "identity":
                self.gradient_parts.setdefault(name, []).append(gradient.inputs[0])
                continue
            if len(gradient.outputs) > 1:
                outputs = shared.get(id(gradient)) or self.add_shared_gradient(gradient, operation)
                shared[id(gradient)] = outputs
                self.gradient_parts.setdefault(name, []).append(outputs[position])
            else:
                part = self.add_gradient_tensor(f"{gradient_name(name)}#{len(self.gradient_parts.get(name, ()))}", name)
                self.add_gradient(gradient, (part,))
                self.gradient_parts.setdefault(name, []).append(part)

    def add_gradient(self, gradient: Operation, outputs: tuple[str, ...]) -> None:
        """Add an operation of a gradient. An input `?x` is the part of the gradient of `x` that was added last."""
        inputs = tuple(self.gradient_parts[i[1:]][-1] if i.startswith("?") else i for i in gradient.inputs)
        self.operations.append(replace(gradient, inputs=inputs, outputs=outputs))

    def add_shared_gradient(self, gradient: Operation, operation: Operation) -> tuple[str, ...]:
        names = operation.inputs[: len(gradient.outputs)]
        outputs = tuple(
            self.add_gradient_tensor(f"{gradient_name(n)}#{len(self.gradient_parts.get(n, ()))}", n) for n in names
        )
        self.add_gradient(gradient, outputs)
        return outputs

    def sum_gradient_parts(self, name: str) -> str:
        """Return the gradient of `name`, summed once over all its uses."""
        parts = self.gradient_parts[name]
        if len(parts) > 1:
            is_output = gradient_name(name) in parts  # the gradient from outside is one of its parts
            # Parts are named `d.x#0`, `d.x#1`, ... in the order in which uses are transposed, and `d.x` is their sum. Where the
            # caller gives a `d.x` (an output that is read as well), the sum is `d.x#whole`.
            total = self.add_gradient_tensor(f"{gradient_name(name)}#whole" if is_output else gradient_name(name), name)
            self.operations.append(Accumulate((*parts, name), (total,)))
            self.gradient_parts[name] = [total]
        gradient = self.gradient_parts[name][0]
        if gradient.startswith(gradient_name(name)):  # not one that an identity passed on under another tensor's name
            self.tensors[gradient] = replace(self.tensors[gradient], gradient_of=name)
        return gradient


def _tensors_depending_on(forward: Program, inputs: Iterable[str]) -> set[str]:
    """Return the tensors that depend on one of `inputs`, and these themselves: only they need a gradient."""
    dependent = set(inputs)
    for operation in forward.operations:
        if dependent & set(operation.inputs):
            dependent |= set(operation.outputs)
    return dependent


@dataclass(frozen=True, slots=True)
class RecomputeSplit:
    """Results that the forward pass saves, and the operations that recompute the rest before the backward pass."""

    saved: tuple[str, ...]
    operations: tuple[Operation, ...]


def split_saved(forward: Program, reads: Iterable[str], policy: str) -> RecomputeSplit:
    """Split what the backward pass `reads` into saved tensors and a minimal slice of `forward` that recomputes the others."""
    producer = {out: operation for operation in forward.operations for out in operation.outputs}
    may_save = get_recompute_policy(policy).may_save(forward)
    saved: list[str] = []
    recomputed: set[int] = set()
    queue = [name for name in reads if name in forward.tensors]
    visited: set[str] = set()
    while queue:
        name = queue.pop(0)
        if name in visited:
            continue
        visited.add(name)
        if name not in producer or may_save(name):
            # Weights rest on the device (or are gathered again), constants can be computed anywhere: neither takes memory.
            if forward.tensors[name].role not in (Role.WEIGHT, Role.CONSTANT):
                saved.append(name)
            continue
        recomputed.add(id(producer[name]))
        queue.extend(producer[name].operands)
    order = {name: index for index, name in enumerate(forward.tensors)}
    operations = tuple(operation for operation in forward.operations if id(operation) in recomputed)
    return RecomputeSplit(tuple(sorted(saved, key=order.__getitem__)), operations)


NeededResults = frozenset[str]
MAX_CHOICES = 200  # choices of each of two programs that are combined: steps of half a percent of the bytes


@dataclass(frozen=True, slots=True)
class SaveChoice:
    """Results to save, in the program's order; their bytes; and the seconds that recomputing the rest takes."""

    saved: tuple[str, ...]
    num_bytes: float
    seconds: float


def pareto_save_choices(
    forward: Program, reads: Iterable[str], sizes: Mapping[str, float], seconds: Mapping[str, float], saveable: Iterable[str]
) -> tuple[SaveChoice, ...]:  # fmt: skip
    """Return every choice that no other beats in both bytes and seconds, from the most bytes to the fewest.

    `reads` are what the backward pass reads; `sizes` the bytes of results, and `seconds` those of the operation that computes
    a result, by the name of its first result (0 where there is none). Only results among `saveable` may be saved.

    Dynamic programming visits operations from the last to the first. Its state is the set of results that are still required;
    for each state it keeps the choices that no other beats. That is exact, since bytes and seconds add up and what an
    operation adds depends on the state alone: a result that no later choice requires is neither saved nor recomputed.

    >>> from shardwise.model.operations import Map
    >>> from shardwise.model.program import ProgramBuilder, Role
    >>> builder = ProgramBuilder()
    >>> x = builder.input("x", ("D",), Role.ACTIVATION)
    >>> for name, last in (("y", "x"), ("z", "y")):
    ...     _ = builder.add(Map((last,), (builder.tensor(name, ("D",), Role.ACTIVATION),), "relu"))
    >>> choices = pareto_save_choices(builder.build(["z"]), ["y", "z"], {"y": 4.0, "z": 4.0}, {"y": 1.0, "z": 2.0}, ["y", "z"])
    >>> [(choice.saved, choice.num_bytes, choice.seconds) for choice in choices]
    [(('y', 'z'), 8.0, 0.0), (('z',), 4.0, 1.0), ((), 0.0, 3.0)]
    """
    saveable_names = frozenset(saveable)
    computed = {out for operation in forward.operations for out in operation.outputs}
    best: dict[NeededResults, list[SaveChoice]] = {frozenset(computed.intersection(reads)): [SaveChoice((), 0.0, 0.0)]}
    for operation in reversed(forward.operations):
        next_choices: dict[NeededResults, list[SaveChoice]] = {}
        for required, choices in best.items():
            outputs = tuple(out for out in operation.outputs if out in required)
            if not outputs:
                next_choices.setdefault(required, []).extend(choices)
                continue
            remaining = required.difference(outputs)
            if saveable_names.issuperset(outputs):
                size = sum(sizes.get(out, 0.0) for out in outputs)
                saving = [
                    SaveChoice((*outputs, *choice.saved), choice.num_bytes + size, choice.seconds) for choice in choices
                ]
                next_choices.setdefault(remaining, []).extend(saving)
            cost = seconds.get(operation.outputs[0], 0.0)
            recomputing = [SaveChoice(choice.saved, choice.num_bytes, choice.seconds + cost) for choice in choices]
            next_choices.setdefault(remaining.union(computed.intersection(operation.operands)), []).extend(recomputing)
        best = {required: _pareto_front(choices) for required, choices in next_choices.items()}
    return tuple(reversed(_pareto_front(choice for choices in best.values() for choice in choices)))


def saveable_results(forward: Program, reads: Iterable[str]) -> tuple[str, ...]:
    """Return the results worth saving: what the backward pass reads, and results of products, attention and AllToAlls. Other
    results are as large as their operands, and are recomputed from these."""
    names_read = set(reads)
    saveable = (op for op in forward.operations if names_read.intersection(op.outputs) or is_expensive_to_recompute(op))
    return tuple(out for operation in saveable for out in operation.outputs)


def combine_choices(
    choices: Sequence[Sequence[SaveChoice]], num_runs: Sequence[float]
) -> tuple[tuple[SaveChoice, ...], ...]:
    """Return choices for several programs, one of each, that no other beats in both bytes and seconds together.

    `num_runs` says how often each program runs. At most about `MAX_CHOICES` choices of each are tried, and of those of the
    programs before it, evenly over their bytes.
    """
    front = [_JointChoice(0.0, 0.0, ())]
    for of_program, runs in zip(choices, num_runs, strict=True):
        earlier = front if len(front) <= MAX_CHOICES + 1 else _fastest_by_bytes(front)
        later = _fastest_by_bytes(of_program)
        joint = sorted(
            (left.with_choice(right, runs) for left in earlier for right in later),
            key=lambda candidate: candidate[:2],
        )
        front, fewest_seconds = [], float("inf")
        for candidate in joint:
            if candidate.seconds < fewest_seconds:
                fewest_seconds = candidate.seconds
                front.append(candidate)
    return tuple(candidate.choices for candidate in front)


class _JointChoice(NamedTuple):
    """Choices for several programs, with the bytes and seconds of all their runs."""

    num_bytes: float
    seconds: float
    choices: tuple[SaveChoice, ...]

    def with_choice(self, choice: SaveChoice, num_runs: float) -> _JointChoice:
        return _JointChoice(
            self.num_bytes + choice.num_bytes * num_runs, self.seconds + choice.seconds * num_runs, (*self.choices, choice)
        )  # fmt: skip


Choice = TypeVar("Choice", SaveChoice, _JointChoice)


def _fastest_by_bytes(choices: Sequence[Choice]) -> list[Choice]:
    """Return the fastest choice of each step of bytes."""
    max_bytes = max(choice.num_bytes for choice in choices) or 1.0
    fastest: dict[int, Choice] = {}
    for choice in sorted(choices, key=lambda choice: choice.seconds, reverse=True):
        fastest[int(choice.num_bytes / max_bytes * MAX_CHOICES)] = choice
    return list(fastest.values())


def _pareto_front(choices: Iterable[SaveChoice]) -> list[SaveChoice]:
    """Return the choices that no other beats, from the fewest bytes to the most; names break ties, for a unique result."""
    front: list[SaveChoice] = []
    for choice in sorted(choices, key=lambda choice: (choice.num_bytes, choice.seconds, choice.saved)):
        if not front or choice.seconds < front[-1].seconds:
            front.append(choice)
    return front
