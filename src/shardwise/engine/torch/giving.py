"""Gradients of weights on their way to where they rest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from shardwise.engine.torch.calls import GRADIENTS, NOWHERE, Call, Target


class Gradients(Protocol):
    """Where the gradients of a unit's weights go."""

    def target(self, weight: str) -> Target:
        """A contiguous tensor in the weight's shape for the gradient, if there is one, and whether to add to what is there."""

    def give(self, weight: str, gradient: Tensor | None) -> None:
        """A gradient is ready; None: it has been written to its target."""


def with_giving(calls: Iterable[Call], weight_of: Mapping[str, str]) -> Iterator[Call]:
    """Calls, each gradient of a weight given away as soon as it is made, and made where it rests, where that can be."""
    for call in calls:
        made = [name for name in call.writes if name in weight_of]
        if made and call.into is not None:
            yield _into(call, weight_of[made[0]])
            continue
        if made and call.into_each is not None:
            yield _into_each(call, weight_of)
            continue
        yield call
        yield from (_given(name, weight_of[name], call.phase) for name in made)


def with_giving_behind(calls: Sequence[Call], weight_of: Mapping[str, str]) -> Iterator[Call]:
    """Calls, and behind them all gradients given away: nothing comes between calls that are compiled together."""
    yield from calls
    for call in calls:
        yield from (_given(name, weight_of[name], call.phase) for name in call.writes if name in weight_of)


def given_later(calls: Iterable[Call], weight_of: Mapping[str, str]) -> list[Call]:
    """The giving away of all gradients that some calls make, for a pass that comes later."""
    return [_given(name, weight_of[name], "backward") for call in calls for name in call.writes if name in weight_of]


def _given(name: str, weight: str, phase: str) -> Call:
    return Call(
        lambda gradients, gradient: gradients.give(weight, gradient), (GRADIENTS, name), (), phase, makes=(name,)
    )


def _into(call: Call, weight: str) -> Call:
    """A call that writes a gradient to its target."""
    kernel, into = call.kernel, call.into
    assert into is not None

    def give(gradients: Gradients, *operands: Any) -> None:
        target, add = gradients.target(weight)
        if target is None:
            gradients.give(weight, kernel(*operands))
        else:
            into(target, *operands, add=add)
            gradients.give(weight, None)

    return Call(give, (GRADIENTS, *call.reads), (), call.phase, makes=call.makes)


def _into_each(call: Call, weight_of: Mapping[str, str]) -> Call:
    """A call that writes several results, the gradients among them to their targets."""
    into, weights = call.into_each, [weight_of.get(name) for name in call.writes]
    assert into is not None

    def give(gradients: Gradients, *operands: Any) -> Any:
        targets = [gradients.target(weight) if weight else NOWHERE for weight in weights]
        found = into(targets, *operands)
        for weight, (target, _), gradient in zip(weights, targets, found, strict=True):
            if weight:
                gradients.give(weight, gradient if target is None else None)
        others = [one for weight, one in zip(weights, found, strict=True) if not weight]
        return others[0] if len(others) == 1 else others

    others = tuple(name for name in call.writes if name not in weight_of)
    return Call(give, (GRADIENTS, *call.reads), others, call.phase, alone=True, makes=call.makes)
