"""The backward program of any forward program, and which forward results are saved for it or recomputed.

The transpose takes the operations one by one, in reverse; nothing about a transformer is written here. What the backward
program reads from the forward pass has to be saved or recomputed: `split_saved` takes a recompute policy (which results may
be saved) and returns the saved tensors and the smallest slice of the forward program that recomputes the others.

Without a fixed policy, dynamic programming finds for every number of saved bytes the results with the least to recompute.
Operations are visited from the last to the first. A result that no later choice needs is neither saved nor recomputed, so a
choice is one pair of saved tensors and recomputed slice, as `split_saved` makes it. Of the choices that leave the same
tensors needed, only those stay that no other choice beats in both bytes and seconds. This is exact for bytes and seconds that
add up. Jain et al. 2020, Checkmate (arXiv 1910.02653), solve the same problem as an integer program.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from shardwise.model.operations import Accumulate, Map, Operation
from shardwise.model.program import Program, Role, Tensor
from shardwise.model.recompute_policies import policy_named


def gradient_name(name: str) -> str:
    """The gradient of `x` is `d.x`."""
    return f"d.{name}"


@dataclass(frozen=True, slots=True)
class Backward:
    """The backward program, and which of its tensors is the gradient of which forward input.

    `nodes`: of what transposes give, the place of the forward operation that was transposed.
    """

    program: Program
    gradients: Mapping[str, str]
    nodes: Mapping[str, int]


def backward(forward: Program, *, given: Iterable[str], wanted: Iterable[str]) -> Backward:
    """Transpose `forward`: from the gradients of the tensors `given` to those of the inputs `wanted`.

    The program's inputs are the `d.` tensors of `given` and every forward tensor that a transpose reads.
    """
    return _Transposer(forward, tuple(given)).run(tuple(wanted))


class _Transposer:
    def __init__(self, forward: Program, given: tuple[str, ...]) -> None:
        self.forward = forward
        self.tensors: dict[str, Tensor] = dict(forward.tensors)
        self.operations: list[Operation] = []
        self.parts: dict[str, list[str]] = {}
        self.nodes: dict[str, int] = {}
        for name in given:
            self.parts[name] = [self.define(gradient_name(name), name)]
        self.given = tuple(gradient_name(name) for name in given)

    def run(self, wanted: tuple[str, ...]) -> Backward:
        useful = _reaching(self.forward, wanted)
        for place, operation in reversed(list(enumerate(self.forward.operations))):
            cotangents = {out: self.settle(out) for out in operation.outputs if out in self.parts}
            if cotangents and operation.outputs[0] in cotangents:
                before = len(self.operations)
                self.transpose(operation, cotangents, useful)
                self.nodes |= {out: place for one in self.operations[before:] for out in one.outputs}
        gradients = {name: self.settle(name) for name in wanted if name in self.parts}
        made = {out for operation in self.operations for out in operation.outputs}
        read = {name for operation in self.operations for name in operation.operands}
        inputs = tuple(name for name in (*self.given, *self.forward.tensors) if name in read - made)
        return Backward(
            Program(self.tensors, tuple(self.operations), inputs, tuple(gradients.values())), gradients, self.nodes
        )

    def define(self, name: str, like: str) -> str:
        tensor = self.forward.tensors[like]
        role = Role.WEIGHT_GRADIENT if tensor.role is Role.WEIGHT else tensor.role
        self.tensors[name] = Tensor(name, tensor.dims, role)
        return name

    def transpose(self, operation: Operation, cotangents: Mapping[str, str], useful: set[str]) -> None:
        dims = {name: tensor.dims for name, tensor in self.tensors.items()}
        shared: dict[int, tuple[str, ...]] = {}
        for position, (name, gradient) in enumerate(operation.gradients(cotangents, dims)):
            if name not in useful:
                continue
            if isinstance(gradient, Map) and gradient.function == "identity":
                self.parts.setdefault(name, []).append(gradient.inputs[0])
                continue
            if len(gradient.outputs) > 1:
                outputs = shared.get(id(gradient)) or self.emit_shared(gradient, operation)
                shared[id(gradient)] = outputs
                self.parts.setdefault(name, []).append(outputs[position])
            else:
                part = self.define(f"{gradient_name(name)}#{len(self.parts.get(name, ()))}", name)
                self.operations.append(replace(gradient, outputs=(part,)))
                self.parts.setdefault(name, []).append(part)

    def emit_shared(self, gradient: Operation, operation: Operation) -> tuple[str, ...]:
        names = operation.inputs[: len(gradient.outputs)]
        outputs = tuple(self.define(f"{gradient_name(n)}#{len(self.parts.get(n, ()))}", n) for n in names)
        self.operations.append(replace(gradient, outputs=outputs))
        return outputs

    def settle(self, name: str) -> str:
        """The gradient of `name`, summed once over all its uses."""
        parts = self.parts[name]
        if len(parts) > 1:
            given = gradient_name(name) in parts  # the gradient from outside is one of its parts
            whole = self.define(f"{gradient_name(name)}#whole" if given else gradient_name(name), name)
            self.operations.append(Accumulate((*parts, name), (whole,)))
            self.parts[name] = [whole]
        settled = self.parts[name][0]
        if settled.startswith(gradient_name(name)):
            self.tensors[settled] = replace(self.tensors[settled], gradient_of=name)
        return settled


def _reaching(forward: Program, wanted: Iterable[str]) -> set[str]:
    """Tensors that depend on one of `wanted`, and these themselves: only they need a gradient."""
    found = set(wanted)
    for operation in forward.operations:
        if found & set(operation.inputs):
            found |= set(operation.outputs)
    return found


@dataclass(frozen=True, slots=True)
class Recompute:
    """What a policy saves in the forward pass, and the operations that recompute the rest before the backward pass."""

    saved: tuple[str, ...]
    operations: tuple[Operation, ...]


def split_saved(forward: Program, reads: Iterable[str], policy: str) -> Recompute:
    """Split what the backward pass `reads` into saved tensors and a minimal slice of `forward` that recomputes the others."""
    producer = {out: operation for operation in forward.operations for out in operation.outputs}
    saves = policy_named(policy).of(forward)
    saved: list[str] = []
    recomputed: set[int] = set()
    waiting = [name for name in reads if name in forward.tensors]
    seen: set[str] = set()
    while waiting:
        name = waiting.pop(0)
        if name in seen:
            continue
        seen.add(name)
        if name not in producer or saves(name):
            if forward.tensors[name].role not in (Role.WEIGHT, Role.CONSTANT):
                saved.append(name)
            continue
        recomputed.add(id(producer[name]))
        waiting.extend(producer[name].operands)
    order = {name: index for index, name in enumerate(forward.tensors)}
    operations = tuple(operation for operation in forward.operations if id(operation) in recomputed)
    return Recompute(tuple(sorted(saved, key=order.__getitem__)), operations)


State = frozenset[str]
MOST = 200  # choices of each of two programs that are combined: steps of half a percent of the bytes


@dataclass(frozen=True, slots=True)
class Saving:
    """The results to save, in the program's order, their bytes, and the seconds that the rest takes to be computed again."""

    kept: tuple[str, ...]
    num_bytes: float
    seconds: float


def savings(
    forward: Program, reads: Iterable[str], sizes: Mapping[str, float], seconds: Mapping[str, float], keeps: Iterable[str]
) -> tuple[Saving, ...]:  # fmt: skip
    """Every choice that no other beats in both bytes and seconds, from the most bytes to the fewest.

    `reads` are what the backward pass reads; `sizes` the bytes of results, and `seconds` those of the operation that makes a
    result first, both by its name (0 where there is none). Only results among `keeps` may be saved.

    >>> from shardwise.model.operations import Map
    >>> from shardwise.model.program import ProgramBuilder, Role
    >>> builder = ProgramBuilder()
    >>> x = builder.input("x", ("D",), Role.ACTIVATION)
    >>> for name, last in (("y", "x"), ("z", "y")):
    ...     _ = builder.add(Map((last,), (builder.tensor(name, ("D",), Role.ACTIVATION),), "relu"))
    >>> found = savings(builder.build(["z"]), ["y", "z"], {"y": 4.0, "z": 4.0}, {"y": 1.0, "z": 2.0}, ["y", "z"])
    >>> [(one.kept, one.num_bytes, one.seconds) for one in found]
    [(('y', 'z'), 8.0, 0.0), (('z',), 4.0, 1.0), ((), 0.0, 3.0)]
    """
    may = frozenset(keeps)
    made = {out for operation in forward.operations for out in operation.outputs}
    labels: dict[State, list[Saving]] = {frozenset(made.intersection(reads)): [Saving((), 0.0, 0.0)]}
    for operation in reversed(forward.operations):
        found: dict[State, list[Saving]] = {}
        for needed, choices in labels.items():
            outs = tuple(out for out in operation.outputs if out in needed)
            if not outs:
                found.setdefault(needed, []).extend(choices)
                continue
            rest = needed.difference(outs)
            if may.issuperset(outs):
                size = sum(sizes.get(out, 0.0) for out in outs)
                kept = [Saving((*outs, *one.kept), one.num_bytes + size, one.seconds) for one in choices]
                found.setdefault(rest, []).extend(kept)
            own = seconds.get(operation.outputs[0], 0.0)
            again = [Saving(one.kept, one.num_bytes, one.seconds + own) for one in choices]
            found.setdefault(rest.union(made.intersection(operation.operands)), []).extend(again)
        labels = {needed: _unbeaten(choices) for needed, choices in found.items()}
    return tuple(reversed(_unbeaten(one for choices in labels.values() for one in choices)))


def worth_saving(forward: Program, reads: Iterable[str]) -> tuple[str, ...]:
    """The results that a choice may save: what the backward pass reads, and what products, attention and experts' exchanges give.
    What else is elementwise is as large as what it is made of, and made again beside it."""
    read = set(reads)
    found = (op for op in forward.operations if read.intersection(op.outputs) or _is_dear(op))
    return tuple(out for operation in found for out in operation.outputs)


def combined(
    first: Sequence[Saving], second: Sequence[Saving], times: tuple[float, float]
) -> tuple[tuple[Saving, Saving], ...]:
    """Pairs of choices for two programs that run so many times, of which no other beats both bytes and seconds together; of each
    program `MOST` choices, evenly over their bytes."""
    pairs = [
        (
            one.num_bytes * times[0] + other.num_bytes * times[1],
            one.seconds * times[0] + other.seconds * times[1],
            one,
            other,
        )
        for one in _spread(first)
        for other in _spread(second)
    ]
    found: list[tuple[Saving, Saving]] = []
    least = float("inf")
    for _, seconds, one, other in sorted(pairs, key=lambda pair: pair[:2]):
        if seconds < least:
            least = seconds
            found.append((one, other))
    return tuple(found)


def _spread(choices: Sequence[Saving]) -> list[Saving]:
    """The fastest choice of each step of bytes, and the first and the last."""
    whole = max(one.num_bytes for one in choices) or 1.0
    fastest: dict[int, Saving] = {}
    for one in sorted(choices, key=lambda one: one.seconds, reverse=True):
        fastest[int(one.num_bytes / whole * MOST)] = one
    return list(fastest.values())


def _unbeaten(choices: Iterable[Saving]) -> list[Saving]:
    """From the fewest bytes to the most."""
    found: list[Saving] = []
    for one in sorted(choices, key=lambda one: (one.num_bytes, one.seconds, one.kept)):
        if not found or one.seconds < found[-1].seconds:
            found.append(one)
    return found


def _is_dear(operation: Operation) -> bool:
    return operation.kind in ("contract", "scan") or getattr(operation, "function", "") == "handover"
