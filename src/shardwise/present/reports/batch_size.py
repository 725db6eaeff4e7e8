"""Reports of experiments on the batch size: a measured noise scale, a sweep, the fit to it, branches of a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from shardwise.batch_size.batch_sweep_fit import NOT_REACHED, select_best_runs
from shardwise.present import charts
from shardwise.present.rendering.numbers import count, percent, quantity, share, significant
from shardwise.present.rendering.report import Block, Cell, Line, Number, Report, Row, Section, Table
from shardwise.values import format_count, format_quantity, pluralize

if TYPE_CHECKING:
    from shardwise.batch_size import BranchOutcome, RunNoise, SweepFit, SweptRuns
    from shardwise.batch_size.batch_sweep_fit import BatchRun, TradeoffFit
    from shardwise.batch_size.branch_losses import ComparedBranch


def noise_report(noise: RunNoise) -> Report:
    """Report the noise scale with its interval, the batch beside it, and the run in windows."""
    title = f"{noise.path}: {pluralize(noise.num_measured, 'step')} measured the noise scale"
    return [Section(list(_noise_head(noise)), title=title), Section([_noise_windows(noise)])]


def _noise_head(noise: RunNoise) -> Iterator[Block]:
    yield f"  noise scale: {charts.describe_noise(noise.late)}, over the last half of these steps"
    yield Line(
        (
            "  a batch of ", count(noise.batch_tokens, "batch_tokens", "tokens"), " tokens makes ",
            percent(noise.progress, "progress"),
            " of the progress of the true gradient's step: 1 / (1 + B_noise / B)",
        )
    )  # fmt: skip
    small = count(noise.small_tokens, "small_tokens", "tokens")
    yield Line(("  B_simple = tr(Sigma) / |G|², from gradients of ", small, " tokens and of the batch"))


def _noise_windows(noise: RunNoise) -> Table:
    rows: list[Row] = [("steps", "tokens seen", "loss", "noise scale", "90% interval", "|G|²", "tr(Sigma)")]
    for index, window in enumerate(noise.parts):
        measured, path = window.measured, f"parts.{index}"
        squared, trace = measured.noise.squared_gradient, measured.noise.covariance_trace
        rows.append(
            (
                f"{window.first_step}-{window.last_step}",
                Number(format_count(window.seen_tokens), window.seen_tokens, "tokens", f"{path}.seen_tokens"),
                Number(f"{window.loss:.3f}", window.loss, "", f"{path}.loss"),
                _tokens(measured.tokens, f"{path}.noise.tokens"),
                f"{_tokens(measured.low).text} to {_tokens(measured.high).text}",
                significant(squared, f"{path}.noise.squared_gradient", digits=3),
                significant(trace, f"{path}.noise.covariance_trace", digits=3),
            )
        )  # fmt: skip
    return Table(rows=tuple(rows), right=range(1, len(rows[0])))


def _tokens(tokens: float, path: str = "") -> Number:
    """Return a noise scale; one without an end is null in the payload."""
    if tokens == math.inf:
        return Number("∞", None, "tokens", path)
    return Number(format_count(tokens), tokens, "tokens", path)


def sweep_report(swept: SweptRuns) -> Report:
    """Report the best runs of each batch, and those that ended without a result."""
    title = f"{swept.folder}: {pluralize(len(swept.runs), 'run')} to a loss of {swept.to_loss}"
    return [
        Section([_best_runs(select_best_runs(swept.runs))], title=title),
        Section(list(_failed_runs(swept))),
        Section([f"next: shardwise batch fit {swept.folder}"]),
    ]


def _best_runs(best: tuple[BatchRun, ...]) -> Table:
    """Return a row for each batch: the mean over its seeds."""
    rows: list[Row] = [("batch, tokens", "learning rate", "seeds", "steps", "tokens")]
    for batch in sorted({run.batch_tokens for run in best}):
        runs = [run for run in best if run.batch_tokens == batch]
        steps = [run.steps for run in runs if run.steps is not None]
        rates = ", ".join(sorted({format_quantity(run.learning_rate or 0.0) for run in runs}))
        reached: tuple[Cell, Cell] = ("not reached", "")
        if steps:
            mean = sum(steps) / len(steps)
            reached = count(mean, unit="steps"), Number(format_count(mean * batch), mean * batch, "tokens")
        rows.append((count(batch, unit="tokens"), rates, f"{len(steps)}", *reached))
    return Table(rows=tuple(rows), right=range(5))


def _failed_runs(swept: SweptRuns) -> Iterator[str]:
    for run in swept.runs:
        if run.failed not in (None, NOT_REACHED):
            yield f"failed: batch {run.batch_tokens:,.0f}, learning rate {run.learning_rate:g}, seed {run.seed}: {run.failed}"


def fit_report(sweep: SweepFit) -> Report:
    """Report the critical batch with its interval, the law, and the steps of each batch beside those of the law."""
    fit = sweep.fit
    loss = "" if fit.target_loss is None else f" of {fit.target_loss:g}"
    runs = f"{pluralize(len(fit.runs), 'run')} to the loss{loss}, {len(fit.batches)} batches"
    failed = [f"not fitted: batch {run.batch_tokens:,.0f}, seed {run.seed}: {run.failed}" for run in fit.not_reached]
    return [
        Section(list(_fit_head(fit)), title=f"{sweep.source}: {runs}"),
        Section([_fitted_batches(fit)]),
        Section(failed),
    ]


def _fit_head(fit: TradeoffFit) -> Iterator[Block]:
    law = fit.tradeoff
    facts = (
        ("critical batch", law.critical_batch_tokens, fit.critical_batch_interval90, "tokens", "critical_batch_tokens"),
        ("fewest steps", law.min_steps, fit.min_steps_interval90, "steps", "min_steps"),
        ("fewest tokens", law.min_tokens, fit.min_tokens_interval90, "tokens", "min_tokens"),
    )
    rows = tuple(
        (
            name, Number(f"{format_count(value)} {unit}", value, unit, path, interval),
            f"90% interval {format_count(interval[0])} to {format_count(interval[1])}",
        )
        for name, value, interval, unit, path in facts
    )  # fmt: skip
    yield Table(rows=rows, head=False, indent=2)
    residual = share(fit.rms_residual, "rms_residual")
    yield Line(("  S(B) = S_min · (1 + B_crit / B): root mean square of the residuals ", residual))
    if not fit.within:
        side = "above" if law.critical_batch_tokens > fit.batches[-1] else "below"
        yield f"  note: the critical batch lies {side} all batches that were run, and is extrapolated: run some {side} it"


def _fitted_batches(fit: TradeoffFit) -> Table:
    rows: list[Row] = [("batch, tokens", "runs", "steps", "of the law", "off", "tokens")]
    for batch in fit.batches:
        runs = [(index, fitted) for index, fitted in enumerate(fit.runs) if fitted.run.batch_tokens == batch]
        steps = [fitted.run.steps for _, fitted in runs if fitted.run.steps is not None]
        mean, off = sum(steps) / len(steps), sum(fitted.residual for _, fitted in runs) / len(runs)
        first, fitted = runs[0]
        rows.append(
            (
                count(batch, f"runs.{first}.batch_tokens", "tokens"), f"{len(runs)}", count(mean, unit="steps"),
                count(fitted.fitted_steps, f"runs.{first}.fitted_steps", "steps"), Number(f"{off:+.1%}", off, "%"),
                count(mean * batch, unit="tokens"),
            )
        )  # fmt: skip
    return Table(rows=tuple(rows), right=range(len(rows[0])))


def branches_report(outcome: BranchOutcome) -> Report:
    """Report the critical batch, and each branch beside those of smaller batches."""
    point, compared = outcome.point, outcome.compared
    branches = pluralize(len(compared.compared), "branch")
    title = f"{branches} from step {point.step:,} of {point.run}, {format_count(point.window_tokens)} tokens each"
    return [
        Section(list(_branches_head(outcome)), title=title),
        Section([_branch_table(outcome)]),
        Section([f"failed: batch {branch.batch_tokens:,.0f}: {branch.failed}" for branch in compared.failed]),
    ]


def _branches_head(outcome: BranchOutcome) -> Iterator[Block]:
    point, compared = outcome.point, outcome.compared
    yield f"  {charts.describe_branches(compared)}"
    yield Line(
        (
            "  tolerance ", quantity(compared.tolerance, "", "tolerance"),
            " nats above the lowest loss of all smaller batches; the run's batch is ",
            count(point.batch_tokens, "batch_tokens", "tokens"), " tokens, its learning rate ",
            quantity(point.learning_rate, "", "learning_rate"),
        )
    )  # fmt: skip
    if compared.next_tokens is None:
        yield "  note: the largest batch is within the tolerance, and the critical one may be larger: try larger ones"
    elif compared.is_smallest:
        yield "  note: only the smallest batch is within the tolerance, and the critical one may be smaller: try smaller ones"


def _branch_table(outcome: BranchOutcome) -> Table:
    head = ("batch, tokens", "of the run's", "learning rate", "steps", "loss", "over smaller ones", "", "held-out loss")
    rows: list[Row] = [head]
    for index, comparison in enumerate(outcome.compared.compared):
        rows.append(_branch_row(comparison, outcome.point.batch_tokens, f"branches.{index}"))
    return Table(rows=tuple(rows), right=(0, 1, 2, 3, 4, 5, 7))


def _branch_row(comparison: ComparedBranch, run_batch_tokens: float, path: str) -> Row:
    branch, excess = comparison.branch, comparison.excess
    held_out: Cell = "" if branch.held_out_loss is None else _loss(branch.held_out_loss, f"{path}.held_out_loss")
    assert branch.loss is not None  # it is compared
    return (
        count(branch.batch_tokens, f"{path}.batch_tokens", "tokens"), f"{branch.batch_tokens / run_batch_tokens:.3g}",
        quantity(branch.learning_rate, "", f"{path}.learning_rate"), count(branch.steps, f"{path}.steps", "steps"),
        _loss(branch.loss, f"{path}.loss"), Number(f"{excess:+.4f}", excess, "", f"{path}.excess"),
        "within" if comparison.is_within else "over", held_out,
    )  # fmt: skip


def _loss(loss: float, path: str) -> Number:
    return Number(f"{loss:.4f}", loss, "", path)
