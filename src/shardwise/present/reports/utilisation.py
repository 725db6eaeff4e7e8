"""A measured run, as sections."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shardwise.present.rendering.report import BAR_STEPS, Report, Row, Section, ShareBar, Status, Table
from shardwise.present.reports.wording import format_step
from shardwise.values import format_bytes, format_quantity, format_seconds, pluralize

if TYPE_CHECKING:
    from shardwise.measure import MeasuredStep, UtilisationReport
    from shardwise.measure.utilisation import StepBreakdown
    from shardwise.records.logs.training_log import TrainingLog
    from shardwise.search import Plan

VERDICTS = {
    "inside": "inside the interval",
    "faster": "faster than the interval",
    "slower": "slower than the interval",
}


def mfu_report(found: UtilisationReport, row: str | None, otherwise: tuple[str, ...] = ()) -> Report:
    """What was measured, what that is, the prediction beside it, where the time goes.

    `row`: the file that a row was added to, with the fields of the run that are `otherwise`.
    """
    sections = [Section([*_headline(found), *_utilisation(found)]), Section(list(_log(found.measured)))]
    if found.plan is not None and found.account is not None:
        against = list(_prediction(found, found.plan, found.account))
        sections += [Section(against, title=f"against {found.plan.layout}"), _parts(found.account)]
    elif found.plan is not None:
        sections.append(Section(list(_choice(found, found.plan))))
    else:
        sections.append(
            Section(
                ["give --batch-tokens to compare the step time with the prediction, and --layout to see where it goes"]
            )
        )
    unknown = (
        [f"options of the launch that were not understood: {', '.join(found.ran.unknown)}"] if found.ran.unknown else []
    )
    return [*sections, Section(unknown), Section(list(_row(row, otherwise)) if row else [])]


def _headline(found: UtilisationReport) -> Iterator[str]:
    ran, measured = found.ran, found.measured
    rate = measured.tokens_per_s_per_device
    batch = f"{ran.batch_tokens:,} tokens per batch, " if ran.batch_tokens else ""
    yield (
        f"{ran.model.name} on {ran.cluster.name} ({ran.cluster.num_devices:,} devices), {batch}sequences of "
        f"{ran.job.seq_len:,}, {ran.job.precision}"
    )
    step = f"step {format_seconds(measured.step_time_s)} measured   " if measured.step_time_s else ""
    yield f"  {step}{rate:,.0f} tokens/s per device, {rate * ran.cluster.num_devices:,.0f} in all"


def _utilisation(found: UtilisationReport) -> Iterator[str]:
    used = found.used
    hfu = f"   HFU {used.hfu:.1%}" if used.hfu is not None else ""
    yield f"  MFU {used.mfu:.1%} (causal attention)   {used.mfu_full:.1%} (full attention){hfu}"
    yield (
        f"  MFU = {format_quantity(used.flops_per_token, 'FLOP', digits=4)}/token x tokens/s of a device / "
        f"{format_quantity(used.peak_flops_per_s, 'FLOP/s', digits=4)}, the dense {used.peak_format} peak of "
        f"{found.ran.cluster.chip.name}; {format_quantity(used.flops_per_token_full, 'FLOP', digits=4)}/token with full attention"
    )


def _log(measured: MeasuredStep) -> Iterator[str]:
    from shardwise.records.logs.training_log import RULE

    log, steady = measured.log, measured.steady
    if log is None or steady is None:
        return
    span = " to ".join(f"{1 / pace:,.0f}" for pace in (steady.high, steady.low))
    lines = pluralize(steady.num_lines, "line")
    yield f"{log.medium} of {log.format.title}: {lines} of steps {log.first.step:,} to {log.steps[-1].step:,}"
    if log.by_clock:
        yield "  without times of steps: each is the time since the line before it was logged"
    yield (
        f"  {pluralize(steady.num_steady, 'line')} counted, 80% of them between {span} tokens/s per device; left out: "
        f"{steady.num_warm_up} of warm-up, {steady.num_outliers} far off, {steady.num_other_batch} of another batch or untimed"
    )
    yield f"  rule: {RULE}"
    if steady.overhead >= 0.0005:
        yield f"  with those far off (checkpoints, evaluation, stalls) a step takes {steady.overhead:.1%} longer on average"
    yield from _said(log, steady.mfu, steady.tflops)
    if log.torn:
        yield f"  {pluralize(log.torn, 'line')} of steps could not be read: cut off, or written over by another rank"


def _said(log: TrainingLog, mfu: float | None, tflops: float | None) -> Iterator[str]:
    """What the framework itself makes of the run."""
    said = [f"MFU {mfu:.1%}"] if mfu is not None else []
    said += [f"{format_quantity(tflops * 1e12, 'FLOP/s', digits=4)} per device"] if tflops is not None else []
    if said:
        yield f"  by its own count: {', '.join(said)}"
    if log.first.loss is not None and log.steps[-1].loss is not None:
        yield f"  loss {log.first.loss:.4f} at first, {log.steps[-1].loss:.4f} at last"


def _prediction(found: UtilisationReport, plan: Plan, account: StepBreakdown) -> Iterator[str | Status]:
    ratio, calibration = account.measured_s / account.predicted_s, plan.cluster.calibration
    stack = calibration.stack if calibration else ""
    if account.interval90 is None:
        yield f"  bound {format_seconds(account.predicted_s)}: the measured step is {ratio:.2f} times that"
    else:
        yield (
            f"  predicted {format_step(account.predicted_s, account.interval90)} for {stack}: measured is "
            f"{abs(ratio - 1):.1%} {'longer' if ratio > 1 else 'shorter'}, {VERDICTS[account.verdict]}"
        )
    if account.bound_s is not None:
        yield f"  kernels and links at the best that micro-benchmarks reach: {format_seconds(account.bound_s)}"
    yield from _memory(found, plan)
    yield from (Status(f"  note: {note}", "note") for note in plan.estimate.notes)
    if found.measured.log is not None and found.measured.log.format.name == "shardwise":
        yield "  this run measured each term itself: shardwise reconcile compares them"


def _memory(found: UtilisationReport, plan: Plan) -> Iterator[str]:
    """The measured peak beside what the same instrument would read of the prediction."""
    from shardwise.measure.calibrate.published_runs.run_table import instrument_reading
    from shardwise.price import loss_kind

    log = found.measured.log
    if log is None or log.memory_bytes is None:
        return
    expected = instrument_reading(plan.estimate.memory, loss_kind(plan.cluster, plan.job), log.format.memory_kind)
    yield (
        f"  memory {format_bytes(log.memory_bytes)} ({log.format.memory_kind}), {format_bytes(expected)} predicted of "
        f"{format_bytes(plan.estimate.memory_capacity_bytes)}"
    )


def _parts(account: StepBreakdown) -> Section:
    rows: tuple[Row, ...] = tuple(
        (
            part.name, f"{'-' if part.seconds < 0 else ''}{format_seconds(abs(part.seconds)):>10}", f"{part.share:.1%}",
            ShareBar("#" * round(BAR_STEPS * max(part.share, 0.0)), part.name),
        )
        for part in account.parts
    )  # fmt: skip
    table = Table(rows=rows, right=(1, 2), head=False, indent=2, line="  {:<54}{}  {:>6}  {}")
    return Section([table], title="where the measured step goes, by the prediction")


def _choice(found: UtilisationReport, plan: Plan) -> Iterator[str]:
    """The layout to take, where that of the run is not known."""
    assert found.measured.step_time_s is not None, "a plan is made where the batch is known"
    priced = plan.estimate
    yield "the layout of the run is not known (--layout); the plan's choice for the same job"
    yield f"  {plan.layout}"
    yield (
        f"  step {format_step(priced.step_time_s, priced.interval90)}, MFU {priced.mfu:.1%}: measured is "
        f"{found.measured.step_time_s / priced.step_time_s:.2f} times that"
    )


def _row(row: str, otherwise: tuple[str, ...]) -> Iterator[str]:
    yield f"added a row to {row}"
    yield from (f"  which cannot say {text}" for text in otherwise)
