"""Which results of a program to save for its backward pass: for every number of bytes those with the least to recompute.

Operations are visited from the last to the first. What a later choice does not need is neither saved nor recomputed, so that a
choice is one pair of saved tensors and recomputed slice, as `model.backward.split_saved` makes it. Of the choices that leave the
same tensors needed only those stay of which no other has fewer bytes and fewer seconds: dynamic programming, exact for bytes and
seconds that add up. Jain et al. 2020, Checkmate (arXiv 1910.02653), solve the same problem as an integer program.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardwise.model.operations import Operation
from shardwise.model.program import Program

State = frozenset[str]
MOST = 200  # choices of each of two programs that are combined: steps of half a percent of the bytes


@dataclass(frozen=True, slots=True)
class Saving:
    """The results to save, in the program's order, their bytes, and the seconds that the rest takes to be computed again."""

    kept: tuple[str, ...]
    num_bytes: float
    seconds: float


def savings(
    forward: Program, reads: Iterable[str], sizes: Mapping[str, float], seconds: Mapping[str, float], keeps: Iterable[str]
) -> tuple[Saving, ...]:  # fmt: skip
    """Every choice that no other beats in both bytes and seconds, from the most bytes to the fewest.

    `reads` are what the backward pass reads; `sizes` the bytes of results, and `seconds` those of the operation that makes a
    result first, both by its name (0 where there is none). Only results among `keeps` may be saved.

    >>> from shardwise.model.operations import Map
    >>> from shardwise.model.program import ProgramBuilder, Role
    >>> builder = ProgramBuilder()
    >>> x = builder.input("x", ("D",), Role.ACTIVATION)
    >>> for name, last in (("y", "x"), ("z", "y")):
    ...     _ = builder.add(Map((last,), (builder.tensor(name, ("D",), Role.ACTIVATION),), "relu"))
    >>> found = savings(builder.build(["z"]), ["y", "z"], {"y": 4.0, "z": 4.0}, {"y": 1.0, "z": 2.0}, ["y", "z"])
    >>> [(one.kept, one.num_bytes, one.seconds) for one in found]
    [(('y', 'z'), 8.0, 0.0), (('z',), 4.0, 1.0), ((), 0.0, 3.0)]
    """
    may = frozenset(keeps)
    made = {out for operation in forward.operations for out in operation.outputs}
    labels: dict[State, list[Saving]] = {frozenset(made.intersection(reads)): [Saving((), 0.0, 0.0)]}
    for operation in reversed(forward.operations):
        found: dict[State, list[Saving]] = {}
        for needed, choices in labels.items():
            outs = tuple(out for out in operation.outputs if out in needed)
            if not outs:
                found.setdefault(needed, []).extend(choices)
                continue
            rest = needed.difference(outs)
            if may.issuperset(outs):
                size = sum(sizes.get(out, 0.0) for out in outs)
                kept = [Saving((*outs, *one.kept), one.num_bytes + size, one.seconds) for one in choices]
                found.setdefault(rest, []).extend(kept)
            own = seconds.get(operation.outputs[0], 0.0)
            again = [Saving(one.kept, one.num_bytes, one.seconds + own) for one in choices]
            found.setdefault(rest.union(made.intersection(operation.operands)), []).extend(again)
        labels = {needed: _unbeaten(choices) for needed, choices in found.items()}
    return tuple(reversed(_unbeaten(one for choices in labels.values() for one in choices)))


def worth_saving(forward: Program, reads: Iterable[str]) -> tuple[str, ...]:
    """The results that a choice may save: what the backward pass reads, and what products, attention and experts' exchanges give.
    What else is elementwise is as large as what it is made of, and made again beside it."""
    read = set(reads)
    found = (op for op in forward.operations if read.intersection(op.outputs) or _is_dear(op))
    return tuple(out for operation in found for out in operation.outputs)


def combined(
    first: Sequence[Saving], second: Sequence[Saving], times: tuple[float, float]
) -> tuple[tuple[Saving, Saving], ...]:
    """Pairs of choices for two programs that run so many times, of which no other beats both bytes and seconds together; of each
    program `MOST` choices, evenly over their bytes."""
    pairs = [
        (
            one.num_bytes * times[0] + other.num_bytes * times[1],
            one.seconds * times[0] + other.seconds * times[1],
            one,
            other,
        )
        for one in _spread(first)
        for other in _spread(second)
    ]
    found: list[tuple[Saving, Saving]] = []
    least = float("inf")
    for _, seconds, one, other in sorted(pairs, key=lambda pair: pair[:2]):
        if seconds < least:
            least = seconds
            found.append((one, other))
    return tuple(found)


def _spread(choices: Sequence[Saving]) -> list[Saving]:
    """The fastest choice of each step of bytes, and the first and the last."""
    whole = max(one.num_bytes for one in choices) or 1.0
    fastest: dict[int, Saving] = {}
    for one in sorted(choices, key=lambda one: one.seconds, reverse=True):
        fastest[int(one.num_bytes / whole * MOST)] = one
    return list(fastest.values())


def _unbeaten(choices: Iterable[Saving]) -> list[Saving]:
    """From the fewest bytes to the most."""
    found: list[Saving] = []
    for one in sorted(choices, key=lambda one: (one.num_bytes, one.seconds, one.kept)):
        if not found or one.seconds < found[-1].seconds:
            found.append(one)
    return found


def _is_dear(operation: Operation) -> bool:
    return operation.kind in ("contract", "scan") or getattr(operation, "function", "") == "handover"
