"""The limits of a run: a deadline and a budget."""

from dataclasses import dataclass

from shardwise.price.training_run import Run
from shardwise.values import SECONDS_PER_DAY

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
