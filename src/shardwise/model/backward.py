"""The backward program of any forward program, and the slice of the forward that it has to recompute.

`backward` transposes the operations one by one, in reverse; nothing about a transformer is written here. What the
result reads from the forward pass is what has to be saved, or rebuilt: `split_saved` takes a recompute policy (which
results may be saved) and gives the saved tensors and the minimal slice that rebuilds the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from shardwise.model.operations import Accumulate, Map, Operation
from shardwise.model.program import Program, Role, Tensor
from shardwise.model.recompute import policy_named


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
