"""The loss over the vocabulary as calls of its own: one where a rank has all words, several where it has a part of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from shardwise.derive.walk import Compute
from shardwise.engine.torch.calls import TRAINS, Call, Calls
from shardwise.engine.torch.loss import cross_entropy
from shardwise.engine.torch.phases import Fused, Phase
from shardwise.engine.torch.split_loss import SplitVocabulary
from shardwise.model.operations import Contract, Operation
from shardwise.model.program import Role
from shardwise.sharding.spec import Axes

LOSS_BACK = ("scale", "token_loss_dsum", "negate", "sum_exp_dx")


def loss_calls(calls: Calls, phase: Phase) -> Iterator[Fused]:
    """Those of a head's phase."""
    logits = _logits(calls)
    if logits is None or phase.name == "recompute":
        return
    group = _group(calls, phase, logits)
    axes = calls.rank.several(calls.unit.forward.specs[logits].axes_of("V"))
    if not group:
        return
    if phase.name == "forward":
        yield from _split(calls, group, logits, axes) if axes else [_whole(calls, group, logits)]
    else:
        yield _split_back(calls, group, logits, axes) if axes else _back(group, logits)


def _group(calls: Calls, phase: Phase, logits: str) -> list[Operation]:
    """What is made of the logits, or the gradient that is made of the loss's."""
    if phase.name == "forward":
        behind, group = {logits}, list[Operation]()
        for step in phase.steps:
            if behind & set(step.operation.inputs):
                group.append(step.operation)
                behind |= set(step.operation.outputs)
        return group
    return [step.operation for step in phase.steps if _is_of_loss(calls, step)]


def _is_of_loss(calls: Calls, step: Compute) -> bool:
    if getattr(step.operation, "function", "") in LOSS_BACK:
        return True
    return calls.unit.tensors[step.operation.outputs[0]].role is Role.LOGITS and not isinstance(
        step.operation, Contract
    )


def _whole(calls: Calls, group: list[Operation], logits: str) -> Fused:
    """All in one; with a backward pass to come, logits become their gradient."""
    targets = next(one.inputs[1] for one in group if one.kind == "lookup")
    scale, cap = group[-1].inputs[1], calls.numerics.logit_cap

    def kernel(logits: Tensor, targets: Tensor, scale: Tensor, trains: bool) -> Tensor:
        return cross_entropy(logits, targets, scale, cap, replace=trains)

    return Fused(Call(kernel, (logits, targets, scale, TRAINS), group[-1].outputs, "forward"), tuple(group))


def _back(group: list[Operation], logits: str) -> Fused:
    """The gradient of the logits, which the forward pass has written over them."""
    return Fused(Call(lambda x: x, (logits,), group[-1].outputs, "backward", is_view=True), tuple(group))


def _vocabulary(calls: Calls, axes: Axes) -> SplitVocabulary:
    width, vocabulary = calls.sizes["V"] // calls.rank.mesh.size(axes), calls.architecture.vocab_size
    first = calls.rank.position(axes) * width
    return SplitVocabulary(first, min(max(vocabulary - first, 0), width), calls.numerics.logit_cap)


def _named(group: Iterable[Operation]) -> dict[str, Any]:
    """The operations of a head's loss by what they do."""
    return {getattr(one, "function", one.kind): one for one in group}


def _split(calls: Calls, group: list[Operation], logits: str, axes: Axes) -> Iterator[Fused]:
    """Steps between which statistics are made whole."""
    own, named = _vocabulary(calls, axes), _named(group)
    largest, total, target = (named[name] for name in ("maximum", "sum_exp", "lookup"))
    token, last = named["token_loss"], named["scaled_sum"]
    yield Fused(Call(own.largest, largest.inputs, largest.outputs, "forward"), (largest,))
    yield Fused(Call(own.sum_exp, total.inputs, total.outputs, "forward"), (total,))
    yield Fused(Call(own.target_logit, target.inputs, target.outputs, "forward"), (target,))
    targets = calls.key(target.inputs[1], calls.unit.forward.specs[target.outputs[0]])
    reads = (*token.inputs, targets, last.inputs[1])
    yield Fused(Call(own.loss, reads, last.outputs, "forward"), (token, last))


def _split_back(calls: Calls, group: list[Operation], logits: str, axes: Axes) -> Fused:
    """The gradient of this rank's logits, over them."""
    named, forward = _named(group), _named(calls.unit.forward.program.operations)
    largest, total = forward["maximum"].outputs[0], forward["sum_exp"].outputs[0]
    targets, scale = forward["lookup"].inputs[1], named["scale"].inputs[1]
    reads = (logits, largest, total, targets, scale)
    return Fused(
        Call(_vocabulary(calls, axes).gradient, reads, group[-1].outputs, "backward", is_view=True), tuple(group)
    )


def _logits(calls: Calls) -> str | None:
    operations: Iterable[Operation] = calls.unit.forward.program.operations
    made = (one.outputs[0] for one in operations if isinstance(one, Contract))
    return next((name for name in made if calls.unit.tensors[name].role is Role.LOGITS), None)
