"""Rewrites of a list of calls: gradients of weights written to where they are stored, and runs of calls compiled by
torch.compile."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwise.run.engine.call_builder import GRADIENTS, NO_TARGET, KernelCall, OutputTarget


class GradientSink(Protocol):
    """Destination of the gradients of a unit's weights."""

    def target(self, weight: str) -> OutputTarget:
        """Return a contiguous tensor for a weight's gradient, or None, and whether to add to what is there."""

    def deliver(self, weight: str, gradient: Tensor | None) -> None:
        """Take a gradient that is ready; None: it has been written to its target."""


def write_gradients(calls: Iterable[KernelCall], weight_of: Mapping[str, str]) -> Iterator[KernelCall]:
    """Yield calls, each weight gradient delivered as soon as it is made, and written to its target where a kernel can."""
    for call in calls:
        gradients = [name for name in call.writes if name in weight_of]
        if gradients and call.into is not None:
            yield _write_to_target(call, weight_of[gradients[0]])
            continue
        if gradients and call.into_each is not None:
            yield _write_to_targets(call, weight_of)
            continue
        yield call
        yield from (_deliver_call(name, weight_of[name], call.phase) for name in gradients)


def write_gradients_last(calls: Sequence[KernelCall], weight_of: Mapping[str, str]) -> Iterator[KernelCall]:
    """Yield calls, then all deliveries of gradients: nothing separates calls that are compiled together."""
    yield from calls
    for call in calls:
        yield from (_deliver_call(name, weight_of[name], call.phase) for name in call.writes if name in weight_of)


def deliver_gradients(calls: Iterable[KernelCall], weight_of: Mapping[str, str]) -> list[KernelCall]:
    """Return the deliveries of all gradients that some calls make, for a later pass."""
    return [
        _deliver_call(name, weight_of[name], "backward") for call in calls for name in call.writes if name in weight_of
    ]


def _deliver_call(name: str, weight: str, phase: str) -> KernelCall:
    return KernelCall(
        lambda gradients, gradient: gradients.deliver(weight, gradient), (GRADIENTS, name), (), phase, results=(name,)
    )


def _write_to_target(call: KernelCall, weight: str) -> KernelCall:
    """Return a call that writes a gradient to its target."""
    kernel, into = call.kernel, call.into
    assert into is not None

    def deliver(gradients: GradientSink, *operands: Any) -> None:
        target, add = gradients.target(weight)
        if target is None:
            gradients.deliver(weight, kernel(*operands))
        else:
            into(target, *operands, add=add)
            gradients.deliver(weight, None)

    return KernelCall(deliver, (GRADIENTS, *call.reads), (), call.phase, results=call.results)


def _write_to_targets(call: KernelCall, weight_of: Mapping[str, str]) -> KernelCall:
    """Return a call that writes several results, the gradients among them to their targets."""
    into, weights = call.into_each, [weight_of.get(name) for name in call.writes]
    assert into is not None

    def deliver(gradients: GradientSink, *operands: Any) -> Any:
        targets = [gradients.target(weight) if weight else NO_TARGET for weight in weights]
        tensors = into(targets, *operands)
        for weight, (target, _), gradient in zip(weights, targets, tensors, strict=True):
            if weight:
                gradients.deliver(weight, gradient if target is None else None)
        remaining = [tensor for weight, tensor in zip(weights, tensors, strict=True) if not weight]
        return remaining[0] if len(remaining) == 1 else remaining

    remaining_names = tuple(name for name in call.writes if name not in weight_of)
    return KernelCall(
        deliver, (GRADIENTS, *call.reads), remaining_names, call.phase, never_compiled=True, results=call.results
    )


COMPILER = "inductor"  # of torch.compile: its default


def compile_runs(calls: Sequence[KernelCall], read_after: Set[str], excluded: Set[str]) -> list[KernelCall]:
    """Return calls with each run of consecutive ones compiled as one; those that touch `excluded` or deliver gradients
    stay separate.

    `read_after` are the tensors that are read after the last call.
    """
    uncompiled = excluded | {GRADIENTS}
    groups = [
        (not call.never_compiled and uncompiled.isdisjoint((*call.reads, *call.writes)), call.phase) for call in calls
    ]
    runs = itertools.groupby(enumerate(calls), lambda pair: groups[pair[0]])
    compiled: list[KernelCall] = []
    for (is_compilable, _), run in runs:
        numbered = list(run)
        run_calls = [call for _, call in numbered]
        later_calls = calls[numbered[-1][0] + 1 :]
        read_later = read_after | {name for call in later_calls for name in call.reads}
        has_more = any(call.into is None for call in run_calls)  # a run of products alone gains nothing
        compiled += [_join_calls(run_calls, read_later)] if is_compilable and has_more else run_calls
    return compiled


def _join_calls(calls: Sequence[KernelCall], read_later: Set[str]) -> KernelCall:
    """Return calls as one, which writes what is read later."""
    written = [name for call in calls for name in call.writes]
    reads = tuple(dict.fromkeys(_outside_reads(calls)))
    writes = tuple(name for name in written if name in read_later)

    def run(*operands: Any) -> Any:
        tensors = dict(zip(reads, operands, strict=True))
        for call in calls:
            outputs = call.kernel(*(tensors[name] for name in call.reads))
            tensors |= zip(call.writes, outputs, strict=True) if len(call.writes) > 1 else ((call.writes[0], outputs),)
        return tuple(tensors[name] for name in writes) if len(writes) > 1 else tensors[writes[0]]

    makes = tuple(name for call in calls for name in call.results)
    return KernelCall(_compile_segment(run), reads, writes, calls[0].phase, results=makes)


def _outside_reads(calls: Sequence[KernelCall]) -> Iterator[str]:
    written: set[str] = set()
    for call in calls:
        yield from (name for name in call.reads if name not in written)
        written |= set(call.writes)


_segment_numbers = itertools.count()


def _compile_segment(run: Callable[..., Any]) -> Callable[..., Any]:
    assert isinstance(run, FunctionType)
    # torch.compile caches, counts and limits what it compiles by code object: each segment has its own.
    code = run.__code__.replace(co_name=f"segment_{next(_segment_numbers)}")
    segment = FunctionType(code, run.__globals__, code.co_name, None, run.__closure__)
    compiled: Callable[..., Any] = torch.compile(segment, backend=COMPILER)
    return compiled
