"""Norms as calls of their own, forward and backward, each with the sums that it reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from shardwise.engine.torch.calls import Call, Calls
from shardwise.engine.torch.norms import NORMS, Norm
from shardwise.engine.torch.phases import Fused, Phase
from shardwise.model.operations import Map
from shardwise.model.program import Program

SUMS = ("sum", "sum_square")
SUMS_BACK = ("sum_to", "sum_square_dx")


def norm_calls(calls: Calls, phase: Phase) -> Iterator[Fused]:
    """All norms of a phase whose sums stay where they are made."""
    moved = calls.moved()
    for one in _norms_back(calls, phase) if phase.name == "backward" else _norms(calls, phase):
        if moved.isdisjoint(_sums_of(one)):
            yield one


def _sums_of(one: Fused) -> Iterator[str]:
    """The sums that a norm, or its gradient, makes or reads, and their gradients."""
    for operation in one.operations:
        of_norm = isinstance(operation, Map) and operation.function.startswith(tuple(NORMS))
        yield from operation.inputs if of_norm else (*operation.inputs, *operation.outputs)


def _norm_of(program: Program, sums: str) -> Map:
    """The norm that reads some sums."""
    norms = (one for one in program.operations if isinstance(one, Map) and one.function in NORMS)
    return next(one for one in norms if sums in one.inputs[1:-1])


def _norms(calls: Calls, phase: Phase) -> Iterator[Fused]:
    """Each norm with the sums that it reads; where these or its result alone are made again, they are made with it."""
    program, maps = calls.unit.forward.program, list(phase.maps)
    sums = {one.outputs[0]: one for one in maps if one.function in SUMS}
    norms = [one for one in maps if one.function in NORMS]
    for one in {id(norm): norm for norm in (*(_norm_of(program, name) for name in sums), *norms)}.values():
        x, *kept, weight = one.inputs
        made, results = [name for name in kept if name in sums], [*one.outputs] if one in norms else []
        places = [place for place, name in enumerate((*one.outputs, *kept)) if name in (*results, *made)]
        call = Call(_norm_kernel(NORMS[one.function], calls, places), (x, weight), (*results, *made), phase.name)
        yield Fused(call, (*(sums[name] for name in made), *([one] if results else [])))


def _norm_kernel(norm: Norm, calls: Calls, places: Sequence[int]) -> Any:
    """Of the result and the sums those at some places, in a tuple where there are several."""
    epsilon, offset = calls.numerics.norm_epsilon, calls.numerics.norm_offset

    def kernel(x: Tensor, weight: Tensor) -> Any:
        every = norm.forward(x, weight + offset if offset else weight, epsilon)
        found = tuple(every[place] for place in places)
        return found if len(found) > 1 else found[0]

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
