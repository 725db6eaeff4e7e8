"""A sharded product step by step: how each tensor lies at the start, and what each step leaves."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.derive import CollectiveStep, ShardedExpression, ShardedProgram
from shardwise.present.pictures.shard_holder_grids import Moment


def moments(made: ShardedExpression, program: ShardedProgram) -> Iterator[Moment]:
    """The operands, then the tensor that each step changes or makes, partial sums included."""
    for name, spec in zip(made.names, made.operands, strict=True):
        yield Moment(heading="start", name=name, spec=spec)
    for number, step in enumerate(program.steps, 1):
        if isinstance(step, CollectiveStep):
            collective = step.collective
            what = f"{collective.kind} over {','.join(collective.axes)}"
            yield Moment(heading=f"{number}: {what}", name=step.tensor.name, spec=collective.after)
        else:
            for name, spec in zip(step.operation.outputs, step.placed.outputs, strict=True):
                yield Moment(heading=f"{number}: each device computes", name=name, spec=spec)
