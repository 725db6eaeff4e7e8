"""Live tensors of a unit while it runs backward, beside its saved ones: derived for an engine that runs the derived operations
one after the other, a share of its activations for others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from shardwise.cost.formats import Formats, Keys, Saved
from shardwise.derive.products import Operand
from shardwise.lowering.liveness import Moment, moments
from shardwise.lowering.template import Template
from shardwise.sharding.spec import Axes, Spec
from shardwise.symbolic import Polynomial, Value, Values, maximum, total

# While a block runs backward, gradients of about half of its activations are alive beside them.
# Source: SimuMax's measured peaks (B200, allocated bytes): a block in its backward pass holds 1.5 times its activations.
GRADIENT_SHARE = 0.5
# Bytes of a score that the backward pass reads where attention is not fused: softmax's result and dropout's (2 each) and
# dropout's mask (1). Source: Korthikanti et al. 2022, 4.1. What was read last has a gradient (2) by then.
SCORES, THEIR_GRADIENT = 5.0, 2.0


class Some(NamedTuple):
    """What is there only where the group of devices along `over` is more than one, and so are the `rows`, if any are named."""

    kept: Saved
    over: Axes
    rows: Polynomial | None

    def num_bytes(self, formats: Formats, values: Values) -> Value:
        """With 0 where it is not there."""
        there = values.degree(self.over) > 1
        if self.rows is not None:
            there = there & (self.rows.evaluate(values) > 1)
        return formats.saved_bytes([self.kept], values) * there


class Held(NamedTuple):
    """Live tensors of a moment, some by their evaluated sizes; elements of weight gradients in flight and whether any were
    made by then, and bytes of each score where scores are written."""

    tensors: tuple[Saved, ...]
    some: tuple[Some, ...]
    gradients: Polynomial
    makes: bool
    score_bytes: float


def held_of(template: Template, taken: Iterable[Operand]) -> tuple[Held, ...]:
    """The moments of a unit's backward pass that may be the fullest: none of which another has all of and more."""
    keys = Keys(template.unit, taken)
    fullest: list[Held] = []
    for moment in moments(template):
        one = _held(moment, keys)
        if not any(_covers(other, one) for other in fullest):
            fullest = [other for other in fullest if not _covers(one, other)] + [one]
    return tuple(fullest)


def _held(moment: Moment, keys: Keys) -> Held:
    found: dict[tuple[Axes, Spec | None], list[tuple[str, Spec]]] = {}
    for part in moment.parts:
        found.setdefault((part.over, part.rows), []).append((part.name, part.spec))
    tensors = keys.saved(found.pop(((), None), []))
    some = tuple(
        Some(kept, over, rows.local_elements() if rows else None)
        for (over, rows), parts in found.items()
        for kept in keys.saved(parts)
    )
    gradients = total(spec.local_elements() for spec in moment.gradients)
    return Held(
        tensors, some, gradients, moment.makes, SCORES * moment.scores + THEIR_GRADIENT * moment.gradient_of_scores
    )


def _covers(more: Held, less: Held) -> bool:
    """Whether a moment holds as much as another of everything, at any sizes."""
    largest = _amounts(more)
    return all(largest.get(key, 0.0) >= amount for key, amount in _amounts(less).items())


def _amounts(held: Held) -> Mapping[object, float]:
    """Coefficients, by what they are of."""
    found: dict[object, float] = {"scores": held.score_bytes, "makes": held.makes}
    found |= {monomial.factors: monomial.coefficient for monomial in held.gradients.monomials}
    for kept, over, rows in (*((one, (), None) for one in held.tensors), *held.some):
        kind = kept._replace(elements=Polynomial()), over, rows
        found |= {(kind, monomial.factors): monomial.coefficient for monomial in kept.elements.monomials}
    return found


def fullest_bytes(held: Iterable[Held], formats: Formats, scores: Value, values: Values, *, zero_stage: int) -> Value:
    """Bytes of the fullest of some moments, without the logits and their gradient."""
    width = formats.made_beside_bytes(zero_stage)
    sizes = (
        formats.saved_bytes(one.tensors, values)
        + sum((some.num_bytes(formats, values) for some in one.some), start=0.0)
        + width * one.gradients.evaluate(values)
        + one.score_bytes * scores
        for one in held
    )
    return maximum(0.0, *sizes)
