"""Which of the planned batches and clusters is chosen, and whether another noise scale would choose another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from shardwise.batch.target import LossTarget
from shardwise.planning.compare import PRICE
from shardwise.planning.explain.reasons import RESOLUTION
from shardwise.planning.loss_time import LossTime, loss_run, loss_time
from shardwise.search.to_loss.loss_points import LossSearch, Sensitivity

# How far off a noise scale without an interval may be. A choice: McCandlish et al. 2018 find B_simple and the critical batch of
# sweeps within such a factor for most tasks.
UNSURE = 2.0


def chosen(found: LossSearch) -> LossSearch:
    """The search with its choice, and the reason."""
    able = [i for i, point in enumerate(found.points) if point.time and point.within_limits]
    if not able:
        asked = {"deadline": found.limits.deadline_s, "budget": found.limits.budget_usd}
        limits = " and the ".join(name for name, limit in asked.items() if limit is not None)
        return replace(found, chosen=None, reason=f"no batch on any cluster meets the {limits}")
    number, reason = _by_time(found, able) if found.goal == "time" else _by_usd(found, able)
    return replace(found, chosen=number, reason=reason + ("" if not found.limits else " within the limits"))


def _times(found: LossSearch, numbers: Sequence[int]) -> dict[int, LossTime]:
    return {i: time for i in numbers if (time := found.points[i].time)}


def _by_time(found: LossSearch, able: Sequence[int]) -> tuple[int, str]:
    """The soonest; of those that a prediction cannot tell from it, the one of the fewest dollars."""
    times = _times(found, able)
    soonest = min(times, key=lambda i: times[i].loss_s)
    near = [i for i in times if times[i].loss_s <= times[soonest].loss_s * (1 + RESOLUTION)]
    best = min(near, key=_dollars(found, times))
    return best, "the soonest at the loss" + (
        "" if best == soonest else f", and the cheapest of those within {RESOLUTION:.0%} of it"
    )


def _by_usd(found: LossSearch, able: Sequence[int]) -> tuple[int, str]:
    """The cheapest; of those that a prediction cannot tell from it, the soonest."""
    times = _times(found, able)
    cost = _dollars(found, times)
    cheapest = min(times, key=cost)
    near = [i for i in times if cost(i) <= cost(cheapest) * (1 + RESOLUTION)]
    best = min(near, key=lambda i: times[i].loss_s)
    dearer = sorted({found.points[i].chip for i in times if times[i].usd is None})
    reason = "the fewest dollars to the loss"
    if dearer:
        reason = f"the fewest chip-hours to the loss (no sourced {PRICE} of {', '.join(dearer)})"
    return best, reason + ("" if best == cheapest else f", and the soonest of those within {RESOLUTION:.0%} of it")


def _dollars(found: LossSearch, times: dict[int, LossTime]) -> Callable[[int], float]:
    """Dollars; chip-hours where one of them has no price."""
    if any(time.usd is None for time in times.values()):
        return lambda i: times[i].chip_hours
    return lambda i: times[i].usd or 0.0


def sensitivity(found: LossSearch) -> Iterator[Sensitivity]:
    """What would be chosen at the ends of the noise scale's interval, or at half and twice of it; nothing is planned again."""
    if found.chosen is None:
        return
    noise = found.target.noise
    low, high = noise.interval90 or (noise.tokens / UNSURE, noise.tokens * UNSURE)
    for tokens in (low, high):
        other = _at(found, found.target.with_noise(tokens / noise.tokens))
        if other.chosen is None:
            yield Sensitivity(noise_tokens=tokens, cluster=None, batch_tokens=None, loss_s=None, regret=None)
            continue
        best, kept = other.points[other.chosen], other.points[found.chosen]
        regret = other.cost(kept) / other.cost(best) - 1.0
        yield Sensitivity(
            noise_tokens=tokens, cluster=best.cluster, batch_tokens=best.batch_tokens,
            loss_s=best.time.loss_s if best.time else None, regret=max(regret, 0.0),
        )  # fmt: skip


def _at(found: LossSearch, target: LossTarget) -> LossSearch:
    """The same plans to another target."""
    points = tuple(
        replace(
            point,
            time=loss_time(point.plan, target),
            within_limits=not found.limits or found.limits.met(loss_run(point.plan, target)),
        )
        if point.plan
        else point
        for point in found.points
    )
    return chosen(replace(found, target=target, points=points, chosen=None))
