"""Orders written as words, and DualPipe's and DualPipeV's, which are the same words on other stages.

A word is a slot: F0 a forward pass of way 0, I1 a backward pass of way 1 for activations alone, F0B1 a forward and a
whole backward pass together, W the oldest weights' gradient that waits. A rank has two ways: its two virtual stages, or
its two copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from shardwise.schedule.action import FORWARD, INPUT, WEIGHT, Action, Slot


def dual_words(half: int, near: int, num_rounds: int) -> Iterator[str]:
    """What a rank runs that is `near` ranks from an end, of `half` ranks from an end to the middle, in words.

    Each way has `num_rounds` micro-batches; way 0 comes in nearer. Source: DeepSeek-AI 2025, DualPipe
    (dualpipe.py and dualpipev.py), whose eight steps these lines are.
    """
    to_middle = half - 1 - near
    yield from ["F0"] * 2 * to_middle
    yield from ["F0", "F1"] * (near + 1)
    yield from ["I1", "W", "F1"] * to_middle
    # The rank in the middle would only wait for its first pair.
    yield from ["F0B1", "F1B0"] if to_middle else ["F0", "B1", "F1B0"]
    yield from ["F0B1", "F1B0"] * (num_rounds - 2 * half + near)
    yield from ["B1", "F1B0"] * to_middle
    yield from _last_pairs(near)
    yield from ["W", "I0"] * to_middle
    yield from ["W"] * (near + 1)


def _last_pairs(near: int) -> Iterator[str]:
    """Backward passes of both ways, from the middle of them on without weights' gradients."""
    for number in range(2 * (near + 1)):
        yield f"{'B' if number <= near else 'I'}{1 - number % 2}"


def numbered(
    words: Iterable[str], *, stages: Sequence[int], first: Sequence[int], apart: bool = False
) -> Iterator[Slot]:
    """The slots of words: way w is stage `stages[w]`, whose micro-batches come in turn from `first[w]` on.

    A word W is the oldest input's gradient of either way whose weights' has not come; with `apart` it names its way (W0).
    """
    next_up: dict[tuple[str, int], int] = {}
    waiting: list[Action] = []
    for word in words:
        if word == WEIGHT:
            yield (waiting.pop(0)._replace(kind=WEIGHT),)
            continue
        slot = []
        for kind, way in zip(word[::2], map(int, word[1::2]), strict=True):
            key = (kind if kind in (FORWARD, WEIGHT) else INPUT, way)
            number = next_up[key] = next_up.get(key, first[way] - 1) + 1
            slot.append(Action(kind, stages[way], number))
        waiting += [action for action in slot if action.kind == INPUT and not apart]
        yield tuple(slot)
