"""Rewrites of a list of calls: gradients of weights written where they rest, and calls that follow one another as one
function, compiled by torch.compile.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwise.run.engine.call_builder import GRADIENTS, NO_TARGET, KernelCall, OutputTarget


class GradientSink(Protocol):
    """Where the gradients of a unit's weights go."""

    def target(self, weight: str) -> OutputTarget:
        """A contiguous tensor in the weight's shape for the gradient, if there is one, and whether to add to what is there."""

    def deliver(self, weight: str, gradient: Tensor | None) -> None:
        """A gradient is ready; None: it has been written to its target."""


def write_gradients(calls: Iterable[KernelCall], weight_of: Mapping[str, str]) -> Iterator[KernelCall]:
    """Calls, each gradient of a weight given away as soon as it is made, and made where it rests, where that can be."""
    for call in calls:
        made = [name for name in call.writes if name in weight_of]
        if made and call.into is not None:
            yield _write_to_target(call, weight_of[made[0]])
            continue
        if made and call.into_each is not None:
            yield _write_to_targets(call, weight_of)
            continue
        yield call
        yield from (_deliver_call(name, weight_of[name], call.phase) for name in made)


def write_gradients_last(calls: Sequence[KernelCall], weight_of: Mapping[str, str]) -> Iterator[KernelCall]:
    """Calls, and behind them all gradients given away: nothing comes between calls that are compiled together."""
    yield from calls
    for call in calls:
        yield from (_deliver_call(name, weight_of[name], call.phase) for name in call.writes if name in weight_of)


def deliver_gradients(calls: Iterable[KernelCall], weight_of: Mapping[str, str]) -> list[KernelCall]:
    """The giving away of all gradients that some calls make, for a pass that comes later."""
    return [
        _deliver_call(name, weight_of[name], "backward") for call in calls for name in call.writes if name in weight_of
    ]


def _deliver_call(name: str, weight: str, phase: str) -> KernelCall:
    return KernelCall(
        lambda gradients, gradient: gradients.deliver(weight, gradient), (GRADIENTS, name), (), phase, results=(name,)
    )


def _write_to_target(call: KernelCall, weight: str) -> KernelCall:
    """A call that writes a gradient to its target."""
    kernel, into = call.kernel, call.into
    assert into is not None

    def give(gradients: GradientSink, *operands: Any) -> None:
        target, add = gradients.target(weight)
        if target is None:
            gradients.deliver(weight, kernel(*operands))
        else:
            into(target, *operands, add=add)
            gradients.deliver(weight, None)

    return KernelCall(give, (GRADIENTS, *call.reads), (), call.phase, results=call.results)


def _write_to_targets(call: KernelCall, weight_of: Mapping[str, str]) -> KernelCall:
    """A call that writes several results, the gradients among them to their targets."""
    into, weights = call.into_each, [weight_of.get(name) for name in call.writes]
    assert into is not None

    def give(gradients: GradientSink, *operands: Any) -> Any:
        targets = [gradients.target(weight) if weight else NO_TARGET for weight in weights]
        found = into(targets, *operands)
        for weight, (target, _), gradient in zip(weights, targets, found, strict=True):
            if weight:
                gradients.deliver(weight, gradient if target is None else None)
        others = [one for weight, one in zip(weights, found, strict=True) if not weight]
        return others[0] if len(others) == 1 else others

    others = tuple(name for name in call.writes if name not in weight_of)
    return KernelCall(give, (GRADIENTS, *call.reads), others, call.phase, never_compiled=True, results=call.results)


COMPILER = "inductor"  # of torch.compile: its default


def compile_runs(calls: Sequence[KernelCall], stays: Set[str], apart: Set[str]) -> list[KernelCall]:
    """The same, with all that follow one another as one; those that touch one of `apart`, or give gradients away, stay alone.

    `stays` are the tensors that are read after the last of the calls.
    """
    alone = apart | {GRADIENTS}
    touched = [
        (not call.never_compiled and alone.isdisjoint((*call.reads, *call.writes)), call.phase) for call in calls
    ]
    runs = itertools.groupby(enumerate(calls), lambda pair: touched[pair[0]])
    found: list[KernelCall] = []
    for (joins, _), run in runs:
        numbered = list(run)
        own = [call for _, call in numbered]
        behind = calls[numbered[-1][0] + 1 :]
        later = stays | {name for call in behind for name in call.reads}
        has_more = any(call.into is None for call in own)  # than products, which are kernels already
        found += [_join_calls(own, later)] if joins and has_more else own
    return found


def _join_calls(calls: Sequence[KernelCall], later: Set[str]) -> KernelCall:
    """Calls as one, which writes what is read later."""
    written = [name for call in calls for name in call.writes]
    reads = tuple(dict.fromkeys(_outside_reads(calls)))
    writes = tuple(name for name in written if name in later)

    def run(*operands: Any) -> Any:
        held = dict(zip(reads, operands, strict=True))
        for call in calls:
            made = call.kernel(*(held[name] for name in call.reads))
            held |= zip(call.writes, made, strict=True) if len(call.writes) > 1 else ((call.writes[0], made),)
        return tuple(held[name] for name in writes) if len(writes) > 1 else held[writes[0]]

    makes = tuple(name for call in calls for name in call.results)
    return KernelCall(_compile_segment(run), reads, writes, calls[0].phase, results=makes)


def _outside_reads(calls: Sequence[KernelCall]) -> Iterator[str]:
    made: set[str] = set()
    for call in calls:
        yield from (name for name in call.reads if name not in made)
        made |= set(call.writes)


_segment_numbers = itertools.count()


def _compile_segment(run: Callable[..., Any]) -> Callable[..., Any]:
    """A function compiled by itself: torch.compile counts and limits what it compiles by code object."""
    assert isinstance(run, FunctionType)
    code = run.__code__.replace(co_name=f"segment_{next(_segment_numbers)}")
    own = FunctionType(code, run.__globals__, code.co_name, None, run.__closure__)
    found: Callable[..., Any] = torch.compile(own, backend=COMPILER)
    return found
