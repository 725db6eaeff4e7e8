"""Plans of one job on several clusters, compared with a deadline and a budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from typing_extensions import TypedDict

from shardwise.cost.run import Run
from shardwise.draw.notebook import Pictured, Shown
from shardwise.layout.payload import LayoutPayload
from shardwise.planning.explain.reasons import MODEL_ERROR
from shardwise.planning.payload import PlanPayload, layout_of_plan, plan_payload
from shardwise.planning.plan import Plan
from shardwise.units import SECONDS_PER_DAY

SCHEMA = "shardwise.comparison/2"


class ContenderPayload(TypedDict):
    """One cluster. Where it has no plan, `problem` says why, and the plan's fields are null."""

    cluster: str
    chip: str
    num_devices: int
    problem: str | None
    layout: LayoutPayload | None
    stack: str | None
    interval90: tuple[float, float] | None
    step_time_s: float | None
    tokens_per_s_per_device: float | None
    mfu: float | None
    memory_bytes: float | None
    ideal_days: float | None
    goodput: float | None
    days: float | None
    chip_hours: float | None
    usd: float | None
    energy_mwh: float | None
    missing: list[str]
    in_time: bool | None
    within_budget: bool | None
    notes: list[str]


class ComparisonPayload(TypedDict):
    """Plans of one job on several clusters; `plan` is that of the `chosen` one."""

    schema: Literal["shardwise.comparison/2"]
    deadline_days: float | None
    budget_usd: float | None
    chosen: str | None
    reason: str
    clusters: list[ContenderPayload]
    plan: PlanPayload | None


PRICE = "price_usd_per_hour"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a run: seconds from its first step to its last, and US dollars. None: no limit.

    >>> limits = Limits(deadline_s=30 * 86400)
    >>> bool(limits), limits.budget_usd, limits.met(None)  # no run: the deadline cannot be judged
    (True, None, False)
    """

    deadline_s: float | None = None
    budget_usd: float | None = None

    def __bool__(self) -> bool:
        return self.deadline_s is not None or self.budget_usd is not None

    def in_time(self, run: Run | None) -> bool | None:
        """Whether the run meets the deadline; None without a deadline or without a run."""
        return None if self.deadline_s is None or run is None else run.days * SECONDS_PER_DAY <= self.deadline_s

    def within_budget(self, run: Run | None) -> bool | None:
        """Whether the run is within the budget; None without a budget, a run or a price of the chip."""
        return None if self.budget_usd is None or run is None or run.usd is None else run.usd <= self.budget_usd

    def met(self, run: Run | None) -> bool:
        """Whether all limits are met; one that cannot be judged counts as missed."""
        judged = (self.deadline_s is None, self.in_time(run)), (self.budget_usd is None, self.within_budget(run))
        return all(free or met is True for free, met in judged)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One cluster: its plan, or why it has none; which of the limits it meets (None: cannot be judged)."""

    cluster: str
    chip: str
    num_devices: int
    plan: Plan | None
    problem: str | None
    in_time: bool | None
    within_budget: bool | None

    @property
    def run(self) -> Run | None:
        """The whole run on this cluster."""
        return self.plan.run if self.plan else None

    @property
    def stack(self) -> str | None:
        """The stack for which its plan is predicted; None for a bound."""
        calibration = self.plan.cluster.calibration if self.plan else None
        return calibration.stack if calibration else None

    @property
    def interval90(self) -> tuple[float, float] | None:
        """The 90% prediction interval in seconds; None for a bound."""
        return self.plan.estimate.interval90 if self.plan else None

    @property
    def notes(self) -> tuple[str, ...]:
        """Caveats of its estimate, such as a chip that is priced at its peak."""
        return tuple(self.plan.estimate.notes) if self.plan else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison(Pictured):
    """The contenders in the order given, and the index of the chosen one (`chosen`); None where none meets the limits.

    `reason` says why it was chosen, or what comes nearest to the limits.

    >>> import shardwise as sw
    >>> limits = sw.Limits(budget_usd=1e6)
    >>> found = sw.plan_clusters(
    ...     "gpt-2", ["h100:8", "h100:16"], limits=limits, global_batch_tokens="64Ki", seq_len=1024, tokens="10G"
    ... )
    >>> found.contenders[found.chosen].plan is found.plan
    True
    """

    contenders: tuple[Contender, ...]
    limits: Limits
    chosen: int | None
    reason: str

    def shown(self) -> Shown:
        """The contenders as a table and a picture, as a notebook displays them."""
        from shardwise.planning.picture import shown_comparison

        return shown_comparison(self)

    @property
    def plan(self) -> Plan | None:
        """The plan of the chosen contender, or None."""
        return None if self.chosen is None else self.contenders[self.chosen].plan


def compare(contenders: Sequence[Contender], limits: Limits) -> Comparison:
    """Choose: with a deadline the cheapest that meets all limits, otherwise the fastest that does.

    Where one of those has no sourced price, chip-hours decide in place of dollars. A job without a length in tokens is
    compared by its tokens per second.
    """
    able = [i for i, one in enumerate(contenders) if one.plan and (not limits or limits.met(one.run))]
    if not able:
        return Comparison(contenders=tuple(contenders), limits=limits, chosen=None, reason=_none(limits))
    measure, reason = _measure([contenders[i] for i in able], limits)
    ranked = sorted(able, key=lambda i: measure(contenders[i]))
    if len(ranked) > 1:
        lead = measure(contenders[ranked[1]]) / measure(contenders[ranked[0]]) - 1
        if lead < MODEL_ERROR:
            reason += f"; {contenders[ranked[1]].cluster} is within {lead:.1%}, below the model's error"
    return Comparison(contenders=tuple(contenders), limits=limits, chosen=ranked[0], reason=reason)


def _none(limits: Limits) -> str:
    asked = [
        name for name, limit in (("deadline", limits.deadline_s), ("budget", limits.budget_usd)) if limit is not None
    ]
    return f"no cluster meets the {' and the '.join(asked)}" if asked else "no layout fits on any of the clusters"


def _measure(able: Sequence[Contender], limits: Limits) -> tuple[Callable[[Contender], float], str]:
    """The quantity that decides (less is better), and its wording."""
    if limits.deadline_s is None:
        return _seconds, "the fastest" if limits.budget_usd is None else "the fastest within the budget"
    kept = "meets the deadline" + ("" if limits.budget_usd is None else " and the budget")
    dearer = sorted({one.chip for one in able if one.run and one.run.usd is None})
    if dearer:
        return _chip_hours, f"the one of the fewest chip-hours that {kept}: no sourced {PRICE} for {', '.join(dearer)}"
    return _dollars, f"the cheapest that {kept}"


def _seconds(one: Contender) -> float:
    """Days of the run; where its length is not known, of a step, which gives the same order without interruptions."""
    assert one.plan
    return one.run.days * SECONDS_PER_DAY if one.run else one.plan.estimate.step_time_s


def _chip_hours(one: Contender) -> float:
    assert one.run
    return one.run.chip_hours


def _dollars(one: Contender) -> float:
    assert one.run
    assert one.run.usd is not None
    return one.run.usd


def comparison_payload(comparison: Comparison) -> dict[str, Any]:
    """The versioned payload that `plan --json` prints for several clusters; `plan` is that of the chosen one."""
    limits, chosen = comparison.limits, comparison.plan
    return {
        "schema": SCHEMA,
        "deadline_days": None if limits.deadline_s is None else limits.deadline_s / SECONDS_PER_DAY,
        "budget_usd": limits.budget_usd,
        "chosen": None if comparison.chosen is None else comparison.contenders[comparison.chosen].cluster,
        "reason": comparison.reason,
        "clusters": [_contender(one) for one in comparison.contenders],
        "plan": plan_payload(chosen) if chosen else None,
    }


def _contender(one: Contender) -> dict[str, Any]:
    estimate, run = one.plan.estimate if one.plan else None, one.run
    return {
        "cluster": one.cluster, "chip": one.chip, "num_devices": one.num_devices, "problem": one.problem,
        "layout": layout_of_plan(one.plan) if one.plan else None, "stack": one.stack,
        "interval90": list(one.interval90) if one.interval90 else None,
        **{name: getattr(estimate, name, None) for name in ("step_time_s", "tokens_per_s_per_device", "mfu", "memory_bytes")},
        **{name: getattr(run, name, None) for name in ("ideal_days", "goodput", "days", "chip_hours", "usd", "energy_mwh")},
        "missing": list(run.missing) if run else [], "in_time": one.in_time, "within_budget": one.within_budget,
        "notes": list(one.notes),
    }  # fmt: skip
