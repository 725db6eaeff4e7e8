"""Calls that follow one another as one function, compiled by torch.compile."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence, Set
from types import FunctionType
from typing import Any

import torch

from shardwise.engine.torch.calls import GRADIENTS, Call

COMPILER = "inductor"  # of torch.compile: its default


def compiled(calls: Sequence[Call], stays: Set[str], apart: Set[str]) -> list[Call]:
    """The same, with all that follow one another as one; those that touch one of `apart`, or give gradients away, stay alone.

    `stays` are the tensors that are read after the last of the calls.
    """
    alone = apart | {GRADIENTS}
    touched = [(not call.alone and alone.isdisjoint((*call.reads, *call.writes)), call.phase) for call in calls]
    runs = itertools.groupby(enumerate(calls), lambda pair: touched[pair[0]])
    found: list[Call] = []
    for (joins, _), run in runs:
        numbered = list(run)
        own = [call for _, call in numbered]
        behind = calls[numbered[-1][0] + 1 :]
        later = stays | {name for call in behind for name in call.reads}
        has_more = any(call.into is None for call in own)  # than products, which are kernels already
        found += [_joined(own, later)] if joins and has_more else own
    return found


def _joined(calls: Sequence[Call], later: Set[str]) -> Call:
    """Calls as one, which writes what is read later."""
    written = [name for call in calls for name in call.writes]
    reads = tuple(dict.fromkeys(_read_from_outside(calls)))
    writes = tuple(name for name in written if name in later)

    def run(*operands: Any) -> Any:
        held = dict(zip(reads, operands, strict=True))
        for call in calls:
            made = call.kernel(*(held[name] for name in call.reads))
            held |= zip(call.writes, made, strict=True) if len(call.writes) > 1 else ((call.writes[0], made),)
        return tuple(held[name] for name in writes) if len(writes) > 1 else held[writes[0]]

    makes = tuple(name for call in calls for name in call.makes)
    return Call(_compiled(run), reads, writes, calls[0].phase, makes=makes)


def _read_from_outside(calls: Sequence[Call]) -> Iterator[str]:
    made: set[str] = set()
    for call in calls:
        yield from (name for name in call.reads if name not in made)
        made |= set(call.writes)


_numbers = itertools.count()


def _compiled(run: Callable[..., Any]) -> Callable[..., Any]:
    """A function compiled by itself: torch.compile counts and limits what it compiles by code object."""
    assert isinstance(run, FunctionType)
    code = run.__code__.replace(co_name=f"segment_{next(_numbers)}")
    own = FunctionType(code, run.__globals__, code.co_name, None, run.__closure__)
    found: Callable[..., Any] = torch.compile(own, backend=COMPILER)
    return found
