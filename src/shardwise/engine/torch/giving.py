"""Gradients of weights on their way to where they rest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from shardwise.engine.torch.calls import GRADIENTS, Call


class Gradients(Protocol):
    """Where the gradients of a unit's weights go."""

    def target(self, weight: str) -> tuple[Tensor | None, bool]:
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
    return Call(lambda gradients, gradient: gradients.give(weight, gradient), (GRADIENTS, name), (), phase)


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

    return Call(give, (GRADIENTS, *call.reads), (), call.phase)
