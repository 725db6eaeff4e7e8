"""A whole training run: days with interruptions, chip-hours, dollars, energy; its limits: a deadline and a budget.

The global batch of a run may change: each phase is priced with the same layout and another number of micro-batches.

Letters: M seconds between failures of the whole job, R seconds to be running again, d (delta) seconds to write a
checkpoint, t (tau) seconds of training between two checkpoints (`reliability.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from shardwise.batch_size.batch_schedule import BatchSchedule, PhasedBatches, steps_per_phase
from shardwise.hardware import MAX_QUANTITY, Cluster
from shardwise.layout import Layout
from shardwise.model import Architecture, Job, factor_bytes, get_optimizer
from shardwise.model.optimizer_program import state_bytes
from shardwise.model.parameters_and_flops import num_factored_state_elements, num_matrix_params, num_trained_params
from shardwise.price.estimate import Estimate, estimate
from shardwise.price.problem import Problem
from shardwise.price.reliability import (
    RELIABILITY_SOURCES,
    RELIABILITY_UNITS,
    SECONDS_PER_HOUR,
    Reliability,
    goodput,
    time_between_failures,
    young_interval,
)
from shardwise.values import (
    SECONDS_PER_DAY,
    InputError,
    MissingValueError,
    argument_label,
    get_precision,
    parse_duration,
    run_all,
)
from shardwise.values.units import parse_usd

FORMULAS: Mapping[str, str] = {
    "ideal_days": "tokens / batch · step time", "mtbf_s": "M = 3600 / (failures per device-hour · devices)",
    "checkpoint_bytes": "parameters · (weights + master copy + moments), the bytes of the precision recipe",
    "checkpoint_s": "d = checkpoint bytes / (bytes/s of a device · devices); training waits for it",
    "checkpoint_interval_s": "t = sqrt(2·d·M), at most M, at least a step",
    "goodput": "t / (M · e^((R + d) / M) · (e^((t + d) / M) - 1)): a checkpoint is read back in d",
    "days": "ideal days / goodput", "num_interruptions": "days / M", "chip_hours": "devices · days · 24",
    "usd": "chip-hours · price of a chip-hour",
    "energy_mwh": "chip-hours · watts of a chip · PUE; hosts and networks left out",
}  # fmt: skip


Interval = tuple[float, float]  # ends of a 90% prediction interval
SCALED_TOTALS = ("ideal_days", "days", "chip_hours", "usd", "energy_mwh")  # totals that follow the seconds of a step


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInput:
    """A value that the run was computed from, and where it comes from."""

    name: str
    value: float
    unit: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPhase:
    """Steps of a run with one batch, in tokens: seconds of each, days with interruptions, and dollars where they are known."""

    batch_tokens: int
    num_steps: float
    step_time_s: float
    days: float
    usd: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A training run from its first step to its last, interruptions included.

    `ideal_days` are without interruptions, `days` with them; `goodput` is their ratio. `lost` are the shares of the time spent on
    checkpoints and interruptions: with `goodput` they add up to 1. Seconds, bytes, hours, US dollars (`usd`) and MWh
    (`energy_mwh`) are in the names. Without failures there are no checkpoints, and `mtbf_s` and `checkpoint_interval_s` are None.
    `usd` and `energy_mwh` are None where the chip has no sourced price or power; `missing` names these. `phases` are those of a
    run whose batch changes. The fields in `_interval90` are the same quantities with the step at the ends of its 90% prediction
    interval; None for a lower bound. Prices, powers and failure rates are taken as exact.

    >>> import shardwise as sw
    >>> run = sw.plan("gpt-2", "h100:8", global_batch_tokens="64Ki", seq_len=1024, tokens="10G").run
    >>> abs(run.goodput + sum(run.lost.values()) - 1) < 1e-12
    True
    """

    tokens: float
    num_steps: int
    ideal_days: float
    goodput: float
    lost: Mapping[str, float]
    days: float
    mtbf_s: float | None
    num_interruptions: float
    checkpoint_bytes: float
    checkpoint_s: float
    checkpoint_interval_s: float | None
    chip_hours: float
    usd: float | None
    price_date: str | None
    energy_mwh: float | None
    missing: tuple[str, ...]
    reliability: Reliability
    inputs: tuple[RunInput, ...]
    formulas: Mapping[str, str]
    phases: tuple[RunPhase, ...] = ()
    ideal_days_interval90: Interval | None = None
    days_interval90: Interval | None = None
    chip_hours_interval90: Interval | None = None
    usd_interval90: Interval | None = None
    energy_mwh_interval90: Interval | None = None


def training_run(
    architecture: Architecture, cluster: Cluster, job: Job, estimate: Estimate, reliability: Reliability | None = None
) -> Run | None:
    """Return days, chip-hours, dollars and energy of training on the job's tokens; None for a job without `tokens`.

    Assumes failures at a constant rate per device, training that waits while a checkpoint is written, and devices that are paid
    for and draw full power from the first step to the last. `reliability` has the rates (defaults with sources in `Reliability`).
    Raises `InputError` for a run that never ends. Source: Daly 2006, the wall-clock time with checkpoints; see `FORMULAS`.

    >>> import shardwise as sw
    >>> model, cluster = sw.load_model("llama-3-8b"), sw.load_cluster("h100:64")
    >>> job = sw.Job(global_batch_tokens=2**20, seq_len=8192, tokens=1e12)
    >>> run = training_run(model, cluster, job, sw.estimate(model, cluster, job, "fsdp=64"))
    >>> run.num_steps, run.ideal_days < run.days, run.chip_hours == 64 * 24 * run.days
    (953675, True, True)
    """
    if job.tokens is None:
        return None
    return price_run_steps(
        Problem(architecture, cluster, job), job.tokens / job.global_batch_tokens, estimate.step_time_s, reliability,
        estimate.interval90,
    )  # fmt: skip


def price_run_steps(
    problem: Problem, num_steps: float, step_time_s: float,
    reliability: Reliability | None = None, interval90: Interval | None = None,
) -> Run:  # fmt: skip
    """Return the run of a job with `tokens` in so many steps, which take `step_time_s` on average, with 90% between the ends of
    `interval90`."""
    assert problem.job.tokens is not None
    rates = reliability or Reliability()
    size = checkpoint_bytes(problem.architecture, problem.job)
    write_s = _write_seconds(size, problem.cluster.num_devices, rates)
    totals = run_totals(problem, num_steps, step_time_s, write_s, rates)
    ends = [run_totals(problem, num_steps, end_s, write_s, rates) for end_s in interval90 or ()]
    chip = problem.cluster.chip
    return Run(
        tokens=problem.job.tokens, num_steps=math.ceil(num_steps), **totals._asdict(),
        checkpoint_bytes=size, checkpoint_s=write_s, price_date=chip.price_date,
        missing=tuple(name for name in ("price_usd_per_hour", "power_w") if getattr(chip, name) is None),
        reliability=rates, inputs=tuple(_run_inputs(problem, (num_steps, step_time_s), size, rates)),
        formulas=FORMULAS, **_total_intervals(ends),
    )  # fmt: skip


def _total_intervals(ends: Sequence[RunTotals]) -> dict[str, Any]:
    """Return the intervals of a run's totals from the totals at both ends of the step's interval; None for those not known."""
    pairs = {name: [getattr(end, name) for end in ends] for name in SCALED_TOTALS}
    return {
        f"{name}_interval90": (pair[0], pair[1]) if pair and None not in pair else None for name, pair in pairs.items()
    }


class RunTotals(NamedTuple):
    """Totals of a run that follow the seconds of its step: fields of `Run`."""

    ideal_days: float
    goodput: float
    lost: Mapping[str, float]
    days: float
    mtbf_s: float | None
    num_interruptions: float
    checkpoint_interval_s: float | None
    chip_hours: float
    usd: float | None
    energy_mwh: float | None


def run_totals(
    problem: Problem, num_steps: float, step_time_s: float, checkpoint_s: float, reliability: Reliability
) -> RunTotals:
    """Return days, chip-hours, dollars and energy of so many steps of `step_time_s` on average; `checkpoint_s` seconds write a
    checkpoint (`checkpoint_seconds`).

    Raises `InputError` for a run that never ends. Source: Daly 2006; see `FORMULAS`.
    """
    chip, num_devices = problem.cluster.chip, problem.cluster.num_devices
    ideal_s = num_steps * step_time_s
    pace = _run_pace(checkpoint_s, num_devices, step_time_s, reliability)
    wall_s = ideal_s / pace.goodput if pace.goodput > 0 else math.inf
    chip_hours = num_devices * wall_s / SECONDS_PER_HOUR
    if not math.isfinite(chip_hours * MAX_QUANTITY):
        raise InputError(
            f"run: {problem.job.tokens:g} tokens are never done; fewer tokens, or a lower run.failures_per_device_hour or "
            "run.restart_s, are required"
        )
    price, power = chip.price_usd_per_hour, chip.power_w
    return RunTotals(
        ideal_days=ideal_s / SECONDS_PER_DAY, goodput=pace.goodput, lost=pace.lost, days=wall_s / SECONDS_PER_DAY,
        mtbf_s=pace.mtbf_s, num_interruptions=wall_s / pace.mtbf_s if pace.mtbf_s else 0.0,
        checkpoint_interval_s=pace.interval_s, chip_hours=chip_hours, usd=None if price is None else chip_hours * price,
        energy_mwh=None if power is None else chip_hours * power * reliability.pue / 1e6,
    )  # fmt: skip


class _RunPace(NamedTuple):
    """Pace of a job between its interruptions; without failures there are no checkpoints."""

    goodput: float
    lost: Mapping[str, float]
    mtbf_s: float | None = None
    interval_s: float | None = None


def checkpoint_seconds(architecture: Architecture, job: Job, num_devices: int, reliability: Reliability) -> float:
    """Return d: the seconds to write a checkpoint, at the bandwidth that each device has to the storage.

    >>> from shardwise.model.load import load_model
    >>> job = Job(global_batch_tokens=2**22, seq_len=4096)
    >>> round(checkpoint_seconds(load_model("llama-3-8b"), job, 64, Reliability(checkpoint_bytes_per_s_per_device=1e9)), 2)
    1.76
    """
    return _write_seconds(checkpoint_bytes(architecture, job), num_devices, reliability)


def _write_seconds(size: float, num_devices: int, reliability: Reliability) -> float:
    return size / (reliability.checkpoint_bytes_per_s_per_device * num_devices)


def _run_pace(write_s: float, num_devices: int, step_s: float, reliability: Reliability) -> _RunPace:
    mtbf_s = time_between_failures(num_devices, reliability)
    if mtbf_s is None:
        return _RunPace(1.0, {"checkpoints": 0.0, "interruptions": 0.0})
    # A checkpoint falls between two steps, and a restart reads one back.
    interval_s = max(step_s, reliability.checkpoint_interval_s or young_interval(write_s, mtbf_s))
    share = goodput(interval_s, write_s, mtbf_s, reliability.restart_s + write_s)
    writing = share * write_s / interval_s
    lost = {"checkpoints": writing, "interruptions": max(0.0, 1 - share - writing)}
    return _RunPace(share, lost, mtbf_s, interval_s)


def checkpoint_bytes(architecture: Architecture, job: Job) -> float:
    """Return the bytes of a checkpoint: weights, master copy and moments; 14 for each trained parameter in bf16 with AdamW.

    Differs: a checkpoint of the fp32 master copy without the bf16 weights takes 12. BLOOM's, with 176B parameters, had 2.3
    TiB, 14 for each (BigScience, BLOOM model card, 2022).
    """
    gradients = num_trained_params(architecture) * get_precision(job.precision).gradient_bytes
    return trained_bytes(architecture, job) - gradients


def trained_bytes(architecture: Architecture, job: Job) -> float:
    """Return the bytes of weights, gradients, master copies and moments of all trained parameters, once."""
    precision, optimizer = get_precision(job.precision), get_optimizer(job.optimizer)
    num_matrices = num_matrix_params(architecture, tables=optimizer.covers_vocabulary)
    num_others = num_trained_params(architecture) - num_matrices
    other_bytes = num_others * state_bytes(precision, optimizer.for_weight(is_matrix=False))
    factors = num_factored_state_elements(architecture, optimizer) * factor_bytes(precision, optimizer)
    return other_bytes + num_matrices * state_bytes(precision, optimizer) + factors


def _run_inputs(
    problem: Problem, steps: tuple[float, float], checkpoint_size: float, reliability: Reliability
) -> Iterator[RunInput]:
    """Yield every value that the run is computed from; those of `Reliability` with the source of the default, or as set."""
    chip, recipe, defaults = problem.cluster.chip, get_precision(problem.job.precision), Reliability()
    bytes_per_parameter = checkpoint_size / num_trained_params(problem.architecture)
    yield RunInput(name="tokens", value=problem.job.tokens or 0.0, unit="tokens", source="the job")
    batch, (num_steps, step_time_s) = problem.job.global_batch_tokens, steps
    changes = not math.isclose(num_steps * batch, problem.job.tokens or 0.0)
    phase_source = "mean of the phases" if changes else None
    yield RunInput(name="global_batch_tokens", value=(problem.job.tokens or 0.0) / num_steps if changes else batch, unit="tokens",
                source=phase_source or "the job")  # fmt: skip
    yield RunInput(name="step_time_s", value=step_time_s, unit="s", source=phase_source or "the estimate")
    yield RunInput(name="num_devices", value=problem.cluster.num_devices, unit="devices", source="the cluster")
    yield RunInput(name="checkpoint_bytes_per_parameter", value=bytes_per_parameter, unit="B", source=recipe.source)
    for name, unit in RELIABILITY_UNITS.items():
        value = getattr(reliability, name)
        if value is not None:
            source = RELIABILITY_SOURCES[name] if value == getattr(defaults, name) else "set by hand"
            yield RunInput(name=name, value=value, unit=unit, source=source)
    for name, unit in (("price_usd_per_hour", "USD/h"), ("power_w", "W")):
        value = getattr(chip, name)
        if value is not None:
            date = f"{chip.price_date}: " if name == "price_usd_per_hour" and chip.price_date else ""
            yield RunInput(name=name, value=value, unit=unit, source=f"{date}{chip.sources.get(name, 'no source')}")


BATCH_SCHEDULE_FLAG = "--batch-schedule"


def price_scheduled_run(
    problem: Problem, layout: Layout, schedule: BatchSchedule,
    reliability: Reliability | None = None,
) -> Run:  # fmt: skip
    """Return days, chip-hours and dollars of training with batches by a schedule, in all and by batch phase.

    A phase's step is that of the layout with the batch of the phase; its days are its share of all, interruptions included.
    Raises `InputError` for a job without `tokens`, a schedule by noise scale, which is not known before a run, and batches that
    the layout does not run.

    >>> import shardwise as sw
    >>> from shardwise.batch_size.batch_schedule import parse_batch_schedule
    >>> model, cluster = sw.load_model("llama-3-8b"), sw.load_cluster("h100:64")
    >>> job = sw.Job(global_batch_tokens=2**20, seq_len=8192, tokens=1e12)
    >>> ramp = parse_batch_schedule("0:512Ki,100G:1Mi")
    >>> run = price_scheduled_run(Problem(model, cluster, job), sw.Layout.parse("fsdp=64"), ramp)
    >>> [(phase.batch_tokens, round(phase.num_steps)) for phase in run.phases]
    [(524288, 190735), (1048576, 858307)]
    >>> abs(sum(phase.days for phase in run.phases) - run.days) < 1e-9
    True
    """
    batches = schedule.resolve(
        problem.job.global_batch_tokens, layout.num_replicas * layout.micro_batch_seqs * problem.job.seq_len
    )
    if problem.job.tokens is None:
        raise InputError(
            f"{BATCH_SCHEDULE_FLAG}: found no --tokens; the length of the run is required, such as --tokens 15T"
        )
    if not isinstance(batches, PhasedBatches):
        raise InputError(
            f"{BATCH_SCHEDULE_FLAG}: the noise scale of the run is not known before it; batches by tokens, such as "
            "0:1Mi,100G:4Mi, are required"
        )
    parts = steps_per_phase(batches.phases, problem.job.tokens, problem.job.seq_len)
    jobs = [replace(problem.job, global_batch_tokens=batch) for batch, _ in parts]
    priced = run_all(
        *(lambda phase_job=phase_job: estimate(replace(problem, job=phase_job), layout) for phase_job in jobs)
    )
    times, counts = [phase_estimate.step_time_s for phase_estimate in priced], [count for _, count in parts]
    ideal_s = sum(time * count for time, count in zip(times, counts, strict=True))
    intervals = [phase_estimate.interval90 for phase_estimate in priced]
    low_s, high_s = (
        sum(interval[end] * count for interval, count in zip(intervals, counts, strict=True) if interval) / sum(counts)
        for end in (0, 1)
    )
    interval90 = None if None in intervals else (low_s, high_s)
    run = price_run_steps(problem, sum(counts), ideal_s / sum(counts), reliability, interval90)
    return replace(run, phases=tuple(_run_phases(run, [batch for batch, _ in parts], counts, times)))


def _run_phases(run: Run, batches: Sequence[int], counts: Sequence[float], times: Sequence[float]) -> list[RunPhase]:
    ideal_s = sum(time * count for time, count in zip(times, counts, strict=True))
    shares = [time * count / ideal_s for time, count in zip(times, counts, strict=True)]
    return [
        RunPhase(
            batch_tokens=batch, num_steps=count, step_time_s=time, days=share * run.days,
            usd=None if run.usd is None else share * run.usd,
        )
        for batch, count, time, share in zip(batches, counts, times, shares, strict=True)
    ]  # fmt: skip


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
