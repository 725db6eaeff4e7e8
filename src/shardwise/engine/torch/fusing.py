"""Steps that run as one kernel: norms, forward and backward, and the loss over the whole vocabulary."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from shardwise.derive.walk import Compute
from shardwise.engine.torch.calls import TRAINS, Call, Calls
from shardwise.engine.torch.loss import cross_entropy
from shardwise.engine.torch.makers import call_of
from shardwise.engine.torch.norms import NORMS, Norm
from shardwise.model.operations import Accumulate, Contract, Map, Operation
from shardwise.model.program import Program, Role

SUMS = ("sum", "sum_square")
SUMS_BACK = ("sum_to", "sum_square_dx")
LOSS_BACK = ("scale", "token_loss_dsum", "negate", "sum_exp_dx")


class Fused(NamedTuple):
    """A call, the operations that it stands for, and what of their results it has no need to make."""

    call: Call
    operations: tuple[Operation, ...]
    dropped: frozenset[str] = frozenset()


class Phase(NamedTuple):
    """The steps of a phase in order."""

    name: str
    steps: Sequence[Compute]

    @property
    def maps(self) -> Iterator[Map]:
        return (step.operation for step in self.steps if isinstance(step.operation, Map))


def fused(calls: Calls, phase: Phase) -> list[Fused]:
    """All groups of a phase that have a kernel of their own."""
    back = phase.name == "backward"
    norms = _norms_back(calls, phase) if back else _norms(calls, phase)
    return [*norms, *(_loss_back(calls, phase) if back else _loss(calls, phase))]


def in_calls(calls: Calls, phase: Phase) -> Iterator[Call]:
    """A phase's calls in order, each group where the last of its steps stands."""
    groups = fused(calls, phase)
    dropped = frozenset(name for group in groups for name in group.dropped)
    group_of = {id(operation): group for group in groups for operation in group.operations}
    left = {id(group): len(group.operations) for group in groups}
    for step in phase.steps:
        group = group_of.get(id(step.operation))
        if group is None:
            yield call_of(calls, _without(step, dropped), phase.name)
            continue
        left[id(group)] -= 1
        if not left[id(group)]:
            yield group.call


def _without(step: Compute, dropped: frozenset[str]) -> Compute:
    """A sum of gradients without those that are parts of others."""
    operation = step.operation
    if not isinstance(operation, Accumulate) or dropped.isdisjoint(operation.inputs):
        return step
    kept = tuple(name for name in operation.inputs if name not in dropped)
    return Compute(Accumulate(kept, operation.outputs), step.placed)


def _norm_of(program: Program, sums: str) -> Map:
    """The norm that reads some sums."""
    norms = (one for one in program.operations if isinstance(one, Map) and one.function in NORMS)
    return next(one for one in norms if sums in one.inputs[1:-1])


def _norms(calls: Calls, phase: Phase) -> Iterator[Fused]:
    """Each norm with the sums that it reads; where these alone are made again, they are made with it."""
    program, maps = calls.unit.forward.program, list(phase.maps)
    sums = {one.outputs[0]: one for one in maps if one.function in SUMS}
    present = {one.outputs[0] for one in maps}
    for one in {id(norm): norm for norm in (_norm_of(program, name) for name in sums)}.values():
        x, *kept, weight = one.inputs
        made = (sums[name] for name in kept)
        has_result = one.outputs[0] in present
        kernel = _norm_kernel(NORMS[one.function], calls, kept_alone=not has_result)
        writes = (*one.outputs, *kept) if has_result else tuple(kept)
        yield Fused(Call(kernel, (x, weight), writes, phase.name), (*made, *([one] if has_result else [])))


def _norm_kernel(norm: Norm, calls: Calls, *, kept_alone: bool) -> Any:
    epsilon, offset = calls.numerics.norm_epsilon, calls.numerics.norm_offset

    def kernel(x: Tensor, weight: Tensor) -> Any:
        found = norm.forward(x, weight + offset if offset else weight, epsilon)
        if not kept_alone:
            return found
        return found[1:] if len(found) > 2 else found[1]

    return kernel


def _norms_back(calls: Calls, phase: Phase) -> Iterator[Fused]:
    maps = list(phase.maps)
    for one in maps:
        function = one.function.removesuffix("_dx")
        if function not in NORMS or one.function == function:
            continue
        dy, *kept, weight = one.inputs
        of_norm = [
            m for m in maps if m.function.startswith(f"{function}_d") and m.inputs[0] == dy and kept[0] in m.inputs
        ]
        through = {m.outputs[0] for m in of_norm if not m.function.endswith(("_dx", "_dweight"))}
        sums = [m for m in maps if m.function in SUMS_BACK and m.inputs[0] in through]
        x = next(m.inputs[1] for m in of_norm if m.function.endswith("_dsquares"))
        to_weight = [m.outputs[0] for m in of_norm if m.function.endswith("_dweight")]
        kernel = _norm_gradient(NORMS[function], calls, needs_weight=bool(to_weight))
        call = Call(kernel, (dy, x, *kept, weight), (*one.outputs, *to_weight), phase.name)
        yield Fused(call, (*of_norm, *sums), frozenset(m.outputs[0] for m in sums))


def _norm_gradient(norm: Norm, calls: Calls, *, needs_weight: bool) -> Any:
    offset = calls.numerics.norm_offset

    def kernel(dy: Tensor, x: Tensor, *others: Tensor) -> Any:
        *kept, weight = others
        scaled = weight + offset if offset else weight
        found = norm.backward(dy, x, *kept, scaled, needs_weight=needs_weight)
        return found if needs_weight else found[0]

    return kernel


def _loss(calls: Calls, phase: Phase) -> Iterator[Fused]:
    """The loss of a head whose rank has the whole vocabulary; with a backward pass to come, logits become their gradient."""
    logits = _logits(calls)
    if logits is None or phase.name != "forward":
        return
    behind, group = {logits}, list[Operation]()
    for step in phase.steps:
        if behind & set(step.operation.inputs):
            group.append(step.operation)
            behind |= set(step.operation.outputs)
    targets = next(one.inputs[1] for one in group if one.kind == "lookup")
    scale, cap = group[-1].inputs[1], calls.numerics.logit_cap

    def kernel(logits: Tensor, targets: Tensor, scale: Tensor, trains: bool) -> Tensor:
        return cross_entropy(logits, targets, scale, cap, replace=trains)

    yield Fused(Call(kernel, (logits, targets, scale, TRAINS), group[-1].outputs, phase.name), tuple(group))


def _loss_back(calls: Calls, phase: Phase) -> Iterator[Fused]:
    """The gradient of the logits, which the forward pass has written over them."""
    logits = _logits(calls)
    if logits is None:
        return
    tensors = calls.unit.tensors
    group = [
        step.operation
        for step in phase.steps
        if getattr(step.operation, "function", "") in LOSS_BACK
        or (tensors[step.operation.outputs[0]].role is Role.LOGITS and not isinstance(step.operation, Contract))
    ]
    yield Fused(Call(lambda x: x, (logits,), group[-1].outputs, phase.name, is_view=True), tuple(group))


def _logits(calls: Calls) -> str | None:
    operations: Iterable[Operation] = calls.unit.forward.program.operations
    made = (one.outputs[0] for one in operations if isinstance(one, Contract))
    return next((name for name in made if calls.unit.tensors[name].role is Role.LOGITS), None)
