"""What ranks find together of a step that is wrong: by which policy, and which tensor of which rank was the first."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import Tensor

from shardwise.train.engine import Engine
from shardwise.train.policy import POLICIES, Judge, Trouble
from shardwise.train.together import largest, texts
from shardwise.train.world import World

SHOWN = 3  # ranks in a message


def common_trouble(trouble: Trouble | None, judge: Judge, step: int, world: World) -> Trouble | None:
    """Of what each rank finds wrong with a step the gravest, the same on all ranks.

    Ranks that compute the same may find different things all the same, where the memory of one of them is damaged.
    """
    gravest = largest(world, 0 if trouble is None else len(POLICIES) - POLICIES.index(trouble.policy), "what is wrong")
    if not gravest:
        return None
    policy = POLICIES[len(POLICIES) - gravest]
    found = texts(world, trouble.text if trouble is not None and trouble.policy == policy else "")
    return Trouble(step, policy, judge.actions[policy], next(filter(None, found)))


def first_non_finite(engine: Engine, own_loss: float, world: World) -> str:
    """The first tensor that is not finite, by rank, unit and name, the same on all ranks, which call this together.

    Weights come first, for they make all else; then gradients in the order of the backward pass, in which what is not finite
    spreads. Gradients are summed over the ranks when they are looked at, so that the rank is found from `own_loss`, the loss of
    each rank's own targets.
    """
    weights = texts(world, next(_strange(engine, _weights(engine)), ""))
    if any(weights):
        return _named(weights, "weight")
    losses = texts(world, "" if math.isfinite(own_loss) else f"its own targets have a loss of {own_loss}")
    gradients = texts(world, next(_strange(engine, _gradients(engine), backward=True), ""))
    found = [_named(some, what) for some, what in ((losses, ""), (gradients, "gradient")) if any(some)]
    return "; ".join(found) or "every weight and every gradient is finite"


def _weights(engine: Engine) -> Iterator[tuple[str, Tensor]]:
    for group in engine.groups:
        tensors = ((name, view) for name, view in group.views.items() if isinstance(view, Tensor))
        yield from tensors if group.whole else ()
        yield from ((one.name, group.state[one.start : one.start + one.size]) for one in group.intervals())


def _gradients(engine: Engine) -> Iterator[tuple[str, Tensor]]:
    for group in engine.groups:
        if group.group.trained:
            yield from ((one.name, group.gradient_shard[one.start : one.start + one.size]) for one in group.intervals())


def _strange(engine: Engine, tensors: Iterator[tuple[str, Tensor]], *, backward: bool = False) -> Iterator[str]:
    """Those that are not finite, in the order of the units or against it, in words."""
    units = [one.name for path, _ in engine.instance.units for one in engine.instance.used[path].values()]
    order = {name: place for place, name in reversed(list(enumerate(units)))}
    for name, tensor in sorted(tensors, key=lambda pair: order[pair[0]], reverse=backward):
        count = tensor.numel() - int(tensor.isfinite().sum())
        if count:
            unit, _, weight = name.rpartition(".")
            yield f"{weight} of unit {unit} has {count:,} of {tensor.numel():,} elements that are not finite"


def _named(by_rank: list[str], what: str) -> str:
    ranks = [rank for rank, text in enumerate(by_rank) if text]
    more = f" and {len(ranks) - SHOWN} ranks more" if len(ranks) > SHOWN else ""
    return ", ".join(f"rank {rank}: {what + ' ' if what else ''}{by_rank[rank]}" for rank in ranks[:SHOWN]) + more
