"""A phase's steps as calls, those that run as one kernel together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shardwise.derive.walk import Compute
from shardwise.engine.torch.calls import Call, Calls
from shardwise.engine.torch.fusing_loss import loss_calls
from shardwise.engine.torch.fusing_norms import norm_calls
from shardwise.engine.torch.makers import call_of
from shardwise.engine.torch.moving import moving_calls
from shardwise.engine.torch.phases import Fused, Phase
from shardwise.engine.torch.ringing import Around, made_around, ring_call
from shardwise.engine.torch.routed_moving import moves_rows, row_calls
from shardwise.lowering.instruction import Slice
from shardwise.model.operations import Accumulate


def fused(calls: Calls, phase: Phase) -> list[Fused]:
    """All groups of a phase that have a kernel of their own."""
    return [*norm_calls(calls, phase), *loss_calls(calls, phase)]


def in_calls(calls: Calls, phase: Phase) -> Iterator[Call]:
    """A phase's calls in order, each group where the last of its steps stands."""
    groups = fused(calls, phase)
    dropped = frozenset(name for group in groups for name in group.dropped)
    group_of = {id(operation): group for group in groups for operation in group.operations}
    left = {id(group): len(group.operations) for group in groups}
    within = {name for group in groups for one in group.operations for name in one.outputs} - {
        name for group in groups for name in group.call.writes
    }  # what no call makes
    for step in phase.parts:
        if isinstance(step, Around):
            yield replace(ring_call(calls, step, phase.name), makes=made_around(step))
            continue
        if not isinstance(step, Compute):
            unmade = isinstance(step, Slice) and step.step.tensor.name in within
            moves = None if isinstance(step, Slice) else step.traffic
            if moves_rows(step, calls):
                yield replace(row_calls(calls, step, phase.name), moves=moves)
            elif not unmade:
                yield from (replace(call, moves=moves) for call in moving_calls(calls, step, phase.name))
            continue
        group = group_of.get(id(step.operation))
        if group is None:
            made = call_of(calls, _without(step, dropped), phase.name)
            yield replace(made, makes=step.operation.outputs)
            continue
        left[id(group)] -= 1
        if not left[id(group)]:
            made = calls.located(group.call, phase.made_by(group.operations))
            yield replace(made, makes=tuple(name for one in group.operations for name in one.outputs))


def _without(step: Compute, dropped: frozenset[str]) -> Compute:
    """A sum of gradients without those that are parts of others."""
    operation = step.operation
    if not isinstance(operation, Accumulate) or dropped.isdisjoint(operation.inputs):
        return step
    kept = tuple(name for name in operation.inputs if name not in dropped)
    return Compute(Accumulate(kept, operation.outputs), step.placed)
