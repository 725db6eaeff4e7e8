"""The order of a grid without predictions: as it is listed, within its budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.measure.experiments.grid_file import ExperimentBudget
from shardwise.measure.experiments.ledger import LedgerRow
from shardwise.measure.experiments.ledger_lines import ACTIVE, LedgerLine
from shardwise.measure.experiments.ledger_summary import RunTimes, cost_of_attempts
from shardwise.price.reliability import SECONDS_PER_HOUR


@dataclass(frozen=True, slots=True)
class ListedOrder:
    """Runs every configuration, in the order of the grid."""

    fingerprints: Sequence[str]
    budget: ExperimentBudget
    experiment: Mapping[str, Any]

    def review(self, rows: Mapping[str, LedgerRow]) -> Sequence[LedgerLine]:
        """Return no change: nothing is skipped without a prediction."""
        return ()

    def order(self, rows: Mapping[str, LedgerRow]) -> Sequence[LedgerRow]:
        """Return the configurations that have not been run."""
        waiting = [rows[name] for name in self.fingerprints if rows[name].state == "predicted"]
        return within_budget(waiting, rows, self.budget, self.experiment)


def within_budget(
    waiting: Sequence[LedgerRow], rows: Mapping[str, LedgerRow], budget: ExperimentBudget, experiment: Mapping[str, Any]
) -> Sequence[LedgerRow]:
    """Return the first of the configurations that wait which the rest of a budget pays for.

    What has ended counts as it was, what runs as it is predicted. A price that is not known counts as none.
    """
    times = RunTimes.of(rows.values(), experiment)
    spent = cost_of_attempts(rows.values())
    num_runs = sum(len(row.attempts) for row in rows.values())
    hours, dollars = spent.device_hours, spent.usd or 0.0
    for row in rows.values():
        if row.state in ACTIVE:
            hours, dollars = hours + device_hours(row, times), dollars + run_usd(row, times)
    chosen: list[LedgerRow] = []
    for row in waiting:
        num_runs += 1
        hours, dollars = hours + device_hours(row, times), dollars + run_usd(row, times)
        if (
            num_runs > (budget.runs or num_runs)
            or hours > (budget.device_hours or hours)
            or dollars > (budget.usd or dollars)
        ):
            break
        chosen.append(row)
    return chosen


def device_hours(row: LedgerRow, times: RunTimes) -> float:
    """Return the hours of devices that a run is predicted to take."""
    return times.seconds(row) * row.configuration.num_devices / SECONDS_PER_HOUR


def run_usd(row: LedgerRow, times: RunTimes) -> float:
    """Return the dollars that a run is predicted to take; 0 for a chip without a price."""
    price = row.prediction.usd_per_hour if row.prediction else None
    return 0.0 if price is None else times.seconds(row) / SECONDS_PER_HOUR * price
