"""Programs that an experiment runs: how each is started for a configuration, what limits it, and how its log is read.

`train` is our trainer. A framework that `export` writes is started by its launch, and measured by the reader of its log.
`command` is any other program: a line with placeholders, and a pattern for what it prints.
"""

from __future__ import annotations

import math
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from shardwise.interop.frameworks.targets import TARGETS, get_target
from shardwise.interop.launches.export_launch import export
from shardwise.layout import Layout
from shardwise.measure.experiments.attempt_files import AttemptFolder, AttemptJob
from shardwise.measure.experiments.candidates import Candidate, placeholder_values
from shardwise.measure.experiments.grid_file import COMMAND, DEFAULT_TIME_LIMIT_S, STEP_GROUPS, TRAIN, ExperimentGrid
from shardwise.measure.experiments.ledger import LedgerRow
from shardwise.measure.experiments.ledger_lines import RunMeasurement
from shardwise.measure.experiments.ledger_summary import UNKNOWN_START_S
from shardwise.measure.utilisation import RunSetup, compute_utilisation, read_measured_log
from shardwise.price import Problem
from shardwise.records import RunFolder
from shardwise.records.logs.training_log import num_warm_up
from shardwise.search import Plan, dump_plan, plan_layout
from shardwise.values import InputError, MissingValueError, describe_unknown
from shardwise.values.input_files import read_lines
from shardwise.values.input_texts import parse_number

TIME_MARGIN = 1.5  # of the predicted time of a run at the slow end of its interval: a choice
LEAST_TIME_S = 60.0  # that any run may take
LEAST_SILENT_S = 120.0  # after which a run counts as hung, at least: compilers and data loaders take a minute
SILENT_STEPS = 20.0  # slow steps without any output: frameworks log every 10th step or more often
_PLACEHOLDER = re.compile(r"(?<!\$)\{(\w+)\}")  # ${NAME} is the shell's
MEMORY_GROUPS: Mapping[str, float] = {"memory_bytes": 1.0, "memory_gb": 1e9}
MOST_LINES = 1_000_000  # of an output


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLimits:
    """Limits of a run, in seconds: how long it may take, and how long without a sign of life."""

    time_limit_s: float
    hang_after_s: float


def predict_limits(grid: ExperimentGrid, row: LedgerRow, start_s: float | None = None) -> RunLimits:
    """Return the limits of the next attempt of a configuration, from its prediction; twice as long after each time limit.

    `start_s` is what runs have taken besides their steps; without it, what the grid assumes.

    A run of 20 steps of 2 to 3 s that takes 60 s to start may take 1.5 · (60 + 20 · 3) = 180 s.
    """
    start = start_s if start_s is not None else grid.start_s if grid.start_s is not None else UNKNOWN_START_S
    most_s = grid.time_limit_s or math.inf
    num_timeouts = sum(line.state == "timeout" for line in row.attempts.values())
    if row.prediction is None:
        limit_s = (grid.time_limit_s or DEFAULT_TIME_LIMIT_S) * 2**num_timeouts
        return RunLimits(time_limit_s=limit_s, hang_after_s=grid.hang_after_s or limit_s)
    slow_step_s = row.prediction.ends[1]
    limit_s = max(TIME_MARGIN * (start + grid.steps * slow_step_s), LEAST_TIME_S) * 2**num_timeouts
    hang_s = max(SILENT_STEPS * slow_step_s, TIME_MARGIN * start, LEAST_SILENT_S)
    return RunLimits(time_limit_s=min(limit_s, most_s), hang_after_s=grid.hang_after_s or hang_s)


@dataclass(slots=True)
class ExperimentTarget(ABC):
    """The program of an experiment. Subclasses give its command, its heartbeats, and its measurement.

    `start_s` is what runs have taken besides their steps, None before one was done.
    """

    grid: ExperimentGrid
    candidates: Mapping[str, Candidate]
    start_s: float | None = None

    def write_job(self, row: LedgerRow, attempt: str, folder: AttemptFolder) -> AttemptJob:
        """Write the files that an attempt needs, and return what it runs and its limits. Raises `InputError`."""
        candidate, limits = self.candidates[row.configuration.fingerprint], predict_limits(self.grid, row, self.start_s)
        return AttemptJob(
            attempt=attempt, command=self.write_command(candidate, folder), environment=dict(self.grid.environment),
            time_limit_s=limits.time_limit_s, hang_after_s=limits.hang_after_s, heartbeats=self.heartbeats,
            num_nodes=row.configuration.num_nodes,
        )  # fmt: skip

    @property
    def heartbeats(self) -> Sequence[str]:
        """Patterns of files, besides the output, whose changes are signs of life."""
        return ()

    def is_complete(self, row: LedgerRow) -> bool:
        """Return False: the exit code decides."""
        return False

    @abstractmethod
    def write_command(self, candidate: Candidate, folder: AttemptFolder) -> list[str]:
        """Write the files of a run, and return its command. Raises `InputError` for one that the program cannot run."""

    @abstractmethod
    def read_measurement(self, row: LedgerRow, folder: AttemptFolder) -> RunMeasurement:
        """Return what a run measured. Raises `InputError` where its log does not say."""


class CommandTarget(ExperimentTarget):
    """Any program: a shell line, and a pattern of what it prints."""

    def write_command(self, candidate: Candidate, folder: AttemptFolder) -> list[str]:
        assert self.grid.command is not None
        values = placeholder_values(candidate)

        def value_of(match: re.Match[str]) -> str:
            if match[1] not in values:
                raise InputError(f"{self.grid.path}: [command] line: {describe_unknown(match[1], values)}")
            return str(values[match[1]])

        return ["bash", "-c", _PLACEHOLDER.sub(value_of, self.grid.command.line)]

    def read_measurement(self, row: LedgerRow, folder: AttemptFolder) -> RunMeasurement:
        assert self.grid.command is not None
        return read_by_pattern(folder.output, self.grid.command.pattern)


def read_by_pattern(path: Path, pattern: str) -> RunMeasurement:
    """Return what an output says by the groups of a pattern: medians behind the warm-up, of memory and loss the last.

    Raises `InputError` for an output without a step's time.
    """
    expression, columns = re.compile(pattern), dict[str, list[float]]()
    for _, raw in zip(range(MOST_LINES), read_lines(path), strict=False):
        for match in expression.finditer(raw.decode("utf-8", errors="replace")):
            for name, text in match.groupdict().items():
                if text is not None:
                    columns.setdefault(name, []).append(_parse_value(path, name, text))
    steps = [factor * value for name, factor in STEP_GROUPS.items() for value in columns.get(name, ())]
    if not steps:
        raise InputError(f"{path}: no line matches {pattern!r}; a line with a step's time is required")
    memory = [factor * value for name, factor in MEMORY_GROUPS.items() for value in columns.get(name, ())]
    read_names = {*STEP_GROUPS, *MEMORY_GROUPS, "loss", "mfu", "tokens_per_s_per_device"}
    return RunMeasurement(
        step_time_s=median(steps[num_warm_up(len(steps)) :]), num_steps=len(steps), memory_bytes=max(memory, default=None),
        loss=columns["loss"][-1] if "loss" in columns else None, mfu=_typical(columns.get("mfu")),
        tokens_per_s_per_device=_typical(columns.get("tokens_per_s_per_device")),
        values={name: values[-1] for name, values in columns.items() if name not in read_names} or None,
    )  # fmt: skip


def _typical(values: Sequence[float] | None) -> float | None:
    return median(values[num_warm_up(len(values)) :]) if values else None


def _parse_value(path: Path, name: str, text: str) -> float:
    try:
        return parse_number(text.replace(",", ""))
    except ValueError:
        raise InputError(f"{path}: {name}: found {text!r}; a number is required") from None


class PlannedTarget(ExperimentTarget):
    """A program that runs a plan."""

    def plan_of(self, candidate: Candidate) -> tuple[Plan, Problem, Layout]:
        """Return the plan of a candidate for the grid's number of steps, its problem and its layout."""
        assert candidate.problem is not None
        assert candidate.layout is not None
        problem = candidate.problem
        job = replace(problem.job, tokens=float(self.grid.steps * problem.job.global_batch_tokens))
        plan = plan_layout(problem.architecture, problem.cluster, job, candidate.layout, as_run=False)
        return plan, problem, candidate.layout

    def log_files(self, folder: AttemptFolder) -> list[Path]:
        """Return the files of a run's log."""
        return [folder.output]

    def read_measurement(self, row: LedgerRow, folder: AttemptFolder) -> RunMeasurement:
        candidate = self.candidates[row.configuration.fingerprint]
        _, problem, layout = self.plan_of(candidate)
        setup = RunSetup(
            model=problem.architecture, cluster=problem.cluster, job=problem.job, layout=layout,
            batch_tokens=problem.job.global_batch_tokens, software="",
        )  # fmt: skip
        _, measured = read_measured_log(self.log_files(folder), setup)
        if measured.step_time_s is None or measured.log is None:
            raise InputError(f"{folder.output}: the time of no step; a log with one is required")
        try:
            mfu = compute_utilisation(problem, measured.tokens_per_s_per_device).mfu
        except (InputError, MissingValueError):  # a host, or a chip without a peak
            mfu = None
        return RunMeasurement(
            step_time_s=measured.step_time_s, num_steps=measured.log.steps[-1].step, mfu=mfu,
            tokens_per_s_per_device=measured.tokens_per_s_per_device, memory_bytes=measured.log.memory_bytes,
            loss=measured.log.steps[-1].loss,
        )  # fmt: skip


PLAN_FILE, RUN_FOLDER = "plan.json", "run"


class TrainTarget(PlannedTarget):
    """Our trainer: `shardwise train`, which starts the ranks of a node, or is started on each node by torchrun."""

    @property
    def heartbeats(self) -> Sequence[str]:
        return (f"{RUN_FOLDER}/*",)

    def write_command(self, candidate: Candidate, folder: AttemptFolder) -> list[str]:
        plan, _, _ = self.plan_of(candidate)
        dump_plan(plan, folder.path / PLAN_FILE)
        data = [f"--data={source}" for source in self.grid.data]
        arguments = [PLAN_FILE, *data, f"--steps={self.grid.steps}", f"--out={RUN_FOLDER}", "--schedule=constant"]
        if candidate.configuration.num_nodes == 1:
            return [sys.executable, "-m", "shardwise", "train", *arguments]
        files = export(plan, get_target("slurm"))
        launcher = files.command.partition(" -m shardwise.train ")[0]
        return ["bash", "-c", f"{launcher} -m shardwise.train {' '.join(arguments)}"]

    def log_files(self, folder: AttemptFolder) -> list[Path]:
        return [RunFolder(folder.path / RUN_FOLDER).path]


class FrameworkTarget(PlannedTarget):
    """A framework that `export` writes: its launch files in the attempt's folder, and the log that it prints."""

    def write_command(self, candidate: Candidate, folder: AttemptFolder) -> list[str]:
        plan, _, _ = self.plan_of(candidate)
        launch = export(plan, get_target(self.grid.target))
        for name, text in launch.files.items():
            path = folder.path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return ["bash", "-c", launch.command]


def make_target(grid: ExperimentGrid, candidates: Mapping[str, Candidate]) -> ExperimentTarget:
    """Return the target of an experiment. Raises `InputError` for an unknown one."""
    targets: dict[str, Callable[[ExperimentGrid, Mapping[str, Candidate]], ExperimentTarget]] = {
        COMMAND: CommandTarget, TRAIN: TrainTarget, **dict.fromkeys(TARGETS, FrameworkTarget)
    }  # fmt: skip
    if grid.target not in targets:
        raise InputError(f"{grid.path}: target: {describe_unknown(grid.target, targets)}")
    return targets[grid.target](grid, candidates)
