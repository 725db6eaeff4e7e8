"""On which side of the critical batch a plan lies, and what the next doubling gains."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.batch.target import LossTarget
from shardwise.planning.loss_time import Doubling, LossTime, loss_time
from shardwise.planning.plan import Plan
from shardwise.units import format_count


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticalBatch:
    """The target of a plan, its times to it, its side of the critical batch in words, and the next doublings."""

    target: LossTarget
    time: LossTime
    because: str
    doublings: tuple[Doubling, ...]


def critical_batch(plan: Plan, target: LossTarget, doublings: tuple[Doubling, ...]) -> CriticalBatch:
    """Where a plan lies; `doublings` are what it was planned as with twice the batch, the devices or both."""
    time = loss_time(plan, target)
    return CriticalBatch(target=target, time=time, because=side_text(time, target), doublings=doublings)


def side_text(time: LossTime, target: LossTarget) -> str:
    """The side of the critical batch, how much more than the fewest of both the batch takes, and what twice the batch would."""
    law, batch = target.tradeoff, time.batch_tokens
    steps, tokens = law.steps(2 * batch) / law.steps(batch), law.tokens(2 * batch) / law.tokens(batch)
    return (
        f"{batch:,} tokens are {time.batch_over_noise:.2g} times the critical batch of {format_count(target.noise.tokens)}, "
        f"{time.side} it: {time.steps_ratio:.3g} times the fewest steps, {time.tokens_ratio:.3g} times the fewest tokens; twice "
        f"the batch would take {steps:.0%} of these steps and {tokens:.0%} of these tokens"
    )
