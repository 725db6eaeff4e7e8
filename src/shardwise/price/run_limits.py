"""The limits of a run: a deadline and a budget."""

from collections.abc import Iterable
from dataclasses import dataclass

from shardwise.price.training_run import Run
from shardwise.values import SECONDS_PER_DAY, InputError, MissingValueError, argument_label, parse_duration, run_all
from shardwise.values.units import parse_usd

PRICE_FIELD = "price_usd_per_hour"


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
        """Return True if the run meets the deadline; None without a deadline or without a run."""
        return None if self.deadline_s is None or run is None else run.days * SECONDS_PER_DAY <= self.deadline_s

    def within_budget(self, run: Run | None) -> bool | None:
        """Return True if the run is within the budget; None without a budget, a run or a price of the chip."""
        return None if self.budget_usd is None or run is None or run.usd is None else run.usd <= self.budget_usd

    def met(self, run: Run | None) -> bool:
        """Return True if all limits are met; one that cannot be judged counts as missed."""
        judged = (self.deadline_s is None, self.in_time(run)), (self.budget_usd is None, self.within_budget(run))
        return all(free or met is True for free, met in judged)


def parse_limits(deadline: str | None, budget: str | None, tokens: float | None) -> Limits:
    """Return the limits of texts such as "30d" and "2M", for a run of so many tokens.

    Raises `InputError` for texts that are no time and no dollars, and for a limit of a run without a length.

    >>> parse_limits("30d", "2M", 1e12)
    Limits(deadline_s=2592000.0, budget_usd=2000000.0)
    """
    written = [argument_label(name) for name, text in (("deadline", deadline), ("budget", budget)) if text is not None]
    if written and tokens is None:
        label = argument_label("tokens")
        raise InputError(
            f"{' and '.join(written)}: found no {label}; the length of the run is required, such as {label} 15T"
        )
    deadline_s, budget_usd = run_all(
        lambda: None if deadline is None else parse_duration(deadline, label=argument_label("deadline")),
        lambda: None if budget is None else parse_usd(budget, label=argument_label("budget")),
    )
    return Limits(deadline_s=deadline_s, budget_usd=budget_usd)


def missing_price(chips: Iterable[str]) -> MissingValueError:
    """Return the error of a budget for chips without a sourced price."""
    return MissingValueError(
        f"{argument_label('budget')}: no sourced {PRICE_FIELD} of {', '.join(sorted(set(chips)))}; give one with "
        f"--set chip.{PRICE_FIELD}=VALUE"
    )
