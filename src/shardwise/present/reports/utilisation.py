"""Report of a measured run: its utilisation, its log, and where its step goes by the prediction."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shardwise.measure.calibrate.published_runs.run_table import instrument_reading
from shardwise.present.rendering.numbers import count, num_bytes, quantity, seconds, share
from shardwise.present.rendering.report import (
    BAR_STEPS,
    Block,
    Cell,
    Line,
    Number,
    Report,
    Row,
    Section,
    ShareBar,
    Status,
    Table,
)
from shardwise.present.reports.wording import format_step
from shardwise.price import loss_kind
from shardwise.records.logs.training_log import RULE
from shardwise.values import format_bytes, format_seconds, pluralize

if TYPE_CHECKING:
    from shardwise.measure import MeasuredStep, UtilisationReport
    from shardwise.measure.utilisation import RecordedRow, StepBreakdown
    from shardwise.records.logs.training_log import RunSteadyState, TrainingLog
    from shardwise.search import Plan

VERDICTS = {
    "inside": "inside the interval",
    "faster": "faster than the interval",
    "slower": "slower than the interval",
}
LEAST_OVERHEAD = 0.0005  # of a step: less is printed as 0.0%


def mfu_report(report: UtilisationReport) -> Report:
    """Report what was measured, its utilisation, the prediction beside it, where the time goes, and the recorded row."""
    plan, breakdown = report.plan, report.breakdown
    doubts = [f"  note: {warning}" for warning in report.warnings]
    sections = [Section([*_headline(report), *_utilisation(report), *doubts]), Section(list(_log(report.measured)))]
    if plan is not None and breakdown is not None:
        prediction = list(_prediction(report, plan, breakdown))
        sections += [Section(prediction, title=f"against {plan.layout}"), _parts(breakdown)]
    elif plan is not None:
        sections.append(Section(list(_best_plan(report, plan))))
    else:
        hint = "give --batch-tokens to compare the step time with the prediction, and --layout to see where it goes"
        sections.append(Section([hint]))
    unknown = report.setup.unknown
    options = [f"options of the launch that were not understood: {', '.join(unknown)}"] if unknown else []
    return [*sections, Section(options), Section(list(_recorded_row(report.row)) if report.row else [])]


def _headline(report: UtilisationReport) -> Iterator[Line]:
    setup, measured = report.setup, report.measured
    rate, num_devices = measured.tokens_per_s_per_device, setup.cluster.num_devices
    batch: tuple[Cell, ...] = ()
    if setup.batch_tokens:
        batch = (count(setup.batch_tokens, "batch_tokens", "tokens"), " tokens per batch, ")
    yield Line(
        (
            f"{setup.model.name} on {setup.cluster.name} (", count(num_devices, "num_devices"), " devices), ", *batch,
            "sequences of ", count(setup.job.seq_len, "seq_len", "tokens"), f", {setup.job.precision}",
        )
    )  # fmt: skip
    step: tuple[Cell, ...] = ()
    if measured.step_time_s:
        step = ("step ", seconds(measured.step_time_s, "step_time_s", kind="measured"), " measured   ")
    yield Line(
        (
            "  ", *step, count(rate, "utilisation.tokens_per_s_per_device", "tokens/s"), " tokens/s per device, ",
            count(rate * num_devices, unit="tokens/s"), " in all",
        )
    )  # fmt: skip


def _utilisation(report: UtilisationReport) -> Iterator[Line]:
    used = report.utilisation
    hfu: tuple[Cell, ...] = () if used.hfu is None else ("   HFU ", share(used.hfu, "utilisation.hfu"))
    yield Line(
        (
            "  MFU ", share(used.mfu, "utilisation.mfu"), " (causal attention)   ",
            share(used.mfu_full, "utilisation.mfu_full"), " (full attention)", *hfu,
        )
    )  # fmt: skip
    yield Line(
        (
            "  MFU = ", quantity(used.flops_per_token, "FLOP", "utilisation.flops_per_token", digits=4),
            "/token x tokens/s of a device / ",
            quantity(used.peak_flops_per_s, "FLOP/s", "utilisation.peak_flops_per_s", digits=4),
            f", the dense {used.peak_format} peak of {report.setup.cluster.chip.name}; ",
            quantity(used.flops_per_token_full, "FLOP", "utilisation.flops_per_token_full", digits=4),
            "/token with full attention",
        )
    )  # fmt: skip


def _log(measured: MeasuredStep) -> Iterator[Block]:
    log, steady = measured.log, measured.steady
    if log is None or steady is None:
        return
    rates = " to ".join(f"{1 / pace:,.0f}" for pace in (steady.high, steady.low))
    yield Line(
        (
            f"{log.medium} of {log.format.title}: {pluralize(steady.num_lines, 'line')} of steps ",
            count(log.first.step, "log.first_step"), " to ", count(log.steps[-1].step, "log.last_step"),
        )
    )  # fmt: skip
    if log.by_clock:
        yield "  without times of steps: each is the time since the line before it was logged"
    yield (
        f"  {pluralize(steady.num_steady, 'line')} counted, 80% of them between {rates} tokens/s per device; left out: "
        f"{steady.num_warm_up} of warm-up, {steady.num_outliers} far off, {steady.num_other_batch} of another batch or untimed"
    )
    yield f"  rule: {RULE}"
    if steady.overhead >= LEAST_OVERHEAD:
        overhead = share(steady.overhead, "log.overhead")
        yield Line(
            (
                "  with those far off (checkpoints, evaluation, stalls) a step takes ", overhead, " longer on average",
            )
        )  # fmt: skip
    yield from _framework_counts(log, steady)
    if log.torn:
        yield f"  {pluralize(log.torn, 'line')} of steps could not be read: cut off, or written over by another rank"


def _framework_counts(log: TrainingLog, steady: RunSteadyState) -> Iterator[Line]:
    """Yield what the framework itself makes of the run: its MFU and rate, and the losses."""
    counts: list[tuple[Cell, ...]] = []
    if steady.mfu is not None:
        counts.append(("MFU ", share(steady.mfu, "log.mfu")))
    if steady.tflops is not None:
        counts.append((quantity(steady.tflops * 1e12, "FLOP/s", digits=4), " per device"))
    if counts:
        first_count, *more_counts = counts
        yield Line(("  by its own count: ", *first_count, *(cell for cells in more_counts for cell in (", ", *cells))))
    first_loss, last_loss = log.first.loss, log.steps[-1].loss
    if first_loss is not None and last_loss is not None:
        yield Line(
            (
                "  loss ", Number(f"{first_loss:.4f}", first_loss, "", "log.first_loss"), " at first, ",
                Number(f"{last_loss:.4f}", last_loss, "", "log.last_loss"), " at last",
            )
        )  # fmt: skip


def _prediction(report: UtilisationReport, plan: Plan, breakdown: StepBreakdown) -> Iterator[Block]:
    ratio, calibration = breakdown.measured_s / breakdown.predicted_s, plan.cluster.calibration
    stack = calibration.stack if calibration else ""
    if breakdown.interval90 is None:
        bound = seconds(breakdown.predicted_s, "account.predicted_s", kind="bound")
        yield Line(("  bound ", bound, f": the measured step is {ratio:.2f} times that"))
    else:
        step = format_step(breakdown.predicted_s, breakdown.interval90)
        predicted = Number(step, breakdown.predicted_s, "s", "account.predicted_s", breakdown.interval90, "prediction")
        side = "longer" if ratio > 1 else "shorter"
        yield Line(
            (
                "  predicted ", predicted, f" for {stack}: measured is {abs(ratio - 1):.1%} {side}, "
                f"{VERDICTS[breakdown.verdict]}",
            )
        )  # fmt: skip
    if breakdown.bound_s is not None:
        bound = seconds(breakdown.bound_s, "account.bound_s", kind="bound")
        yield Line(("  kernels and links at the best that micro-benchmarks reach: ", bound))
    yield from _memory(report, plan)
    yield from (Status(f"  note: {note}", "note") for note in plan.estimate.notes)
    if report.measured.log is not None and report.measured.log.format.name == "shardwise":
        yield "  this run measured each term itself: shardwise reconcile compares them"


def _memory(report: UtilisationReport, plan: Plan) -> Iterator[Line]:
    """Yield the measured peak beside what the same instrument would read of the prediction."""
    log = report.measured.log
    if log is None or log.memory_bytes is None:
        return
    expected = instrument_reading(plan.estimate.memory, loss_kind(plan.cluster, plan.job), log.format.memory_kind)
    yield Line(
        (
            "  memory ", num_bytes(log.memory_bytes, "log.memory_bytes"),
            f" ({log.format.memory_kind}), {format_bytes(expected)} predicted of "
            f"{format_bytes(plan.estimate.memory_capacity_bytes)}",
        )
    )  # fmt: skip


def _parts(breakdown: StepBreakdown) -> Section:
    rows: tuple[Row, ...] = tuple(
        (
            part.name,
            Number(
                f"{'-' if part.seconds < 0 else ''}{format_seconds(abs(part.seconds)):>10}", part.seconds, "s",
                f"account.parts.{index}.seconds",
            ),
            share(part.share, f"account.parts.{index}.share"),
            ShareBar("#" * round(BAR_STEPS * max(part.share, 0.0)), part.name),
        )
        for index, part in enumerate(breakdown.parts)
    )  # fmt: skip
    table = Table(rows=rows, right=(1, 2), head=False, indent=2, line="  {:<54}{}  {:>6}  {}")
    return Section([table], title="where the measured step goes, by the prediction")


def _best_plan(report: UtilisationReport, plan: Plan) -> Iterator[Block]:
    """Yield the layout to take where that of the run is unknown."""
    step_time_s, estimate = report.measured.step_time_s, plan.estimate
    assert step_time_s is not None, "a plan is made where the batch is known"
    step = Number(
        format_step(estimate.step_time_s, estimate.interval90), estimate.step_time_s, "s", "plan.step_time_s",
        estimate.interval90, "prediction" if estimate.interval90 else "bound",
    )  # fmt: skip
    yield "the layout of the run is not known (--layout); the plan's choice for the same job"
    yield f"  {plan.layout}"
    yield Line(
        (
            "  step ", step, ", MFU ", share(estimate.mfu, "plan.mfu"),
            f": measured is {step_time_s / estimate.step_time_s:.2f} times that",
        )
    )  # fmt: skip


def _recorded_row(row: RecordedRow) -> Iterator[str]:
    yield f"added a row to {row.file}"
    yield from (f"  which cannot say {text}" for text in row.lost_fields)
