"""What a unit holds at each moment of its backward pass: what it recomputed and what it makes, and what it still has saved.

The moments are the nodes of automatic differentiation: one operation that is recomputed, or all transposes of one operation.
What a node reads and makes is there at once, and what it was the last to read goes when it is done. What collectives hold
beside is no part of it. Source: PyTorch, torch/csrc/autograd (a node frees what was saved for it as soon as it has run;
tests/train/test_memory.py follows the storages).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

from shardwise.derive.derivation import Unit
from shardwise.derive.walk import Compute
from shardwise.model.decoder import PREDICTS
from shardwise.model.operations import ScanGradient
from shardwise.model.program import Role
from shardwise.sharding.spec import Spec

OUTSIDE = (Role.WEIGHT, Role.WEIGHT_GRADIENT, Role.CONSTANT)


class Moment(NamedTuple):
    """One of them: tensors by name; weights' gradients that it makes, by their dims, before they go to where they rest.

    `scores`: attention's are there, where they are written; `gradient_of_scores`: so is the gradient of them.
    """

    tensors: tuple[str, ...]
    gradients: tuple[Spec, ...]
    scores: bool
    gradient_of_scores: bool


def moments(unit: Unit) -> Iterator[Moment]:
    """All of them, in order."""
    nodes = list(_nodes(unit))
    last = {name: place for place, node in enumerate(nodes) for step in node for name in step.operation.operands}
    scanned = {out for one in unit.forward.program.operations if one.kind == "scan" for out in one.outputs}
    made = {out for node in nodes for step in node for out in step.operation.outputs}
    here = {*unit.saved, *last.keys() - made}
    waiting = [name for name in unit.backward.program.outputs if unit.tensors[name].role is Role.RESIDUAL]
    waiting *= unit.name in PREDICTS  # what the head gave as the gradient of the last hidden state is added to its own
    for place, node in enumerate(nodes):
        here |= {out for step in node for out in step.operation.outputs}
        yield Moment(
            (*sorted(name for name in here if unit.tensors[name].role not in OUTSIDE), *waiting),
            tuple(_gradients(unit, node)), not scanned.isdisjoint(here),
            any(isinstance(step.operation, ScanGradient) for step in node),
        )  # fmt: skip
        here = {name for name in here if last.get(name, -1) > place}


def _nodes(unit: Unit) -> Iterator[tuple[Compute, ...]]:
    """Steps that are at one moment."""
    for step in unit.recompute_steps:
        if isinstance(step, Compute):
            yield (step,)
    computed = (step for step in unit.backward_steps if isinstance(step, Compute))
    for _, steps in groupby(computed, lambda step: _node(unit, step.operation.outputs[0])):
        yield tuple(steps)


def _node(unit: Unit, out: str) -> int | str:
    """Whose transpose gives `out`; what adds the parts of a gradient up is the transpose of nothing, and a node of its own."""
    place = unit.nodes.get(out)
    return out if place is None else place


def _gradients(unit: Unit, node: tuple[Compute, ...]) -> Iterator[Spec]:
    """Shardings of the weights' gradients that a node makes, as it makes them."""
    for step in node:
        for name, spec in zip(step.operation.outputs, step.placed.outputs, strict=True):
            if unit.tensors[name].role is Role.WEIGHT_GRADIENT:
                yield spec
