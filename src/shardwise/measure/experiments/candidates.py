"""Configurations of an experiment: the layouts of a search at each point of its grid, or the values of a command, predicted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from shardwise.interop.launches.launch import cluster_machines
from shardwise.layout import Choices, Layout, choices_from_pins, layout_as_run, stack_of
from shardwise.layout.layout import AXES
from shardwise.measure.experiments.grid_file import COMMAND, TRAIN, ExperimentGrid
from shardwise.measure.experiments.ledger_lines import Configuration, RunPrediction, Setting
from shardwise.price import Estimate, Problem
from shardwise.price.estimate import estimate
from shardwise.search.plan_sweep import SweepCase, sweep_cases
from shardwise.search.vectorised.search_layouts import search_layouts
from shardwise.values import InputError, NothingFitsError, Progress, ignore_progress, pluralize, prefix_progress

BORDERLINE_EXCESS = 0.25  # of the memory: layouts that need up to this share more are kept, as out of memory


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A configuration that can be run, with what predicts it; a command without a cluster has no problem."""

    configuration: Configuration
    problem: Problem | None = None
    layout: Layout | None = None
    defaults: tuple[str, ...] = ()

    @cached_property
    def priced(self) -> Estimate | None:
        """The estimate of its layout; None for a command alone."""
        return estimate(self.problem, self.layout) if self.problem is not None and self.layout is not None else None

    @property
    def step_terms(self) -> Mapping[str, float]:
        """Predicted seconds of a step by term."""
        return self.priced.time if self.priced else {}

    def predict(self) -> RunPrediction | None:
        """Return the prediction before anything is measured; None for a command alone."""
        priced = self.priced
        if priced is None or self.problem is None:
            return None
        price = self.problem.cluster.chip.price_usd_per_hour
        return RunPrediction(
            step_time_s=priced.step_time_s, interval90=priced.interval90, memory_bytes=priced.memory_bytes,
            capacity_bytes=priced.memory_capacity_bytes, fits=priced.verdict, mfu=priced.mfu,
            tokens_per_s_per_device=priced.tokens_per_s_per_device,
            usd_per_hour=None if price is None else price * self.problem.cluster.num_devices,
        )  # fmt: skip


def list_candidates(grid: ExperimentGrid, progress: Progress = ignore_progress) -> dict[str, Candidate]:
    """Return the candidates of an experiment by fingerprint, in the order of its grid.

    Raises `InputError` with all that is wrong, and `NothingFitsError` where no point of the grid has a legal layout.
    """
    candidates = _command_candidates(grid) if grid.problem is None else _planned_candidates(grid, progress)
    listed = {candidate.configuration.fingerprint: candidate for candidate in candidates}
    if not listed:
        raise NothingFitsError(f"{grid.path}: no legal layout at any point; fewer pins, or other sweeps, are required")
    return listed


def _command_candidates(grid: ExperimentGrid) -> Iterator[Candidate]:
    command = grid.command
    assert command is not None  # `read_grid` requires it
    for values in command.combinations():
        label = " ".join(f"{name}={value}" for name, value in values.items()) or command.line
        yield Candidate(
            configuration=Configuration(
                settings={"target": COMMAND, "command": command.line, **values}, label=label, num_nodes=command.num_nodes,
                num_devices=command.num_devices,
            )
        )  # fmt: skip


def _planned_candidates(grid: ExperimentGrid, progress: Progress) -> Iterator[Candidate]:
    fields = dict(grid.problem or {})
    model, cluster = fields.pop("model", None), fields.pop("cluster", None)
    if not isinstance(model, str) or not isinstance(cluster, str):
        raise InputError(
            f"{grid.path}: [problem]: found {sorted(grid.problem or {})}; a model and a cluster are required"
        )
    runnable = grid.target == TRAIN
    cases = sweep_cases(model, cluster, None, fields, grid.sweeps, pins={}, maxima={}, runnable=runnable)
    for number, case in enumerate(cases, 1):
        case_progress = prefix_progress(progress, f"{number} of {len(cases)}")
        texts: dict[str, Setting] = {"model": str(case.at.get("model", model)), "cluster": case.cluster.name}
        yield from _layout_candidates(grid, case, texts, case_progress)


def _layout_candidates(
    grid: ExperimentGrid, case: SweepCase, texts: Mapping[str, Setting], progress: Progress
) -> Iterator[Candidate]:
    problem = Problem(case.model, case.cluster, case.job).with_defaults()
    machines = cluster_machines(problem.cluster)
    job: dict[str, Setting] = {
        "seq_len": problem.job.seq_len, "global_batch_tokens": problem.job.global_batch_tokens,
        "precision": problem.job.precision, "optimizer": problem.job.optimizer, "stack": _stack_name(problem),
        "target": grid.target, "steps": grid.steps,
    }  # fmt: skip
    swept = {name: value for name, value in case.at.items() if name not in ("gpus", "model")}
    group = " ".join((problem.architecture.name, "on", problem.cluster.name, *(f"{n}={v}" for n, v in swept.items())))
    for values in grid.command.combinations() if grid.command else [{}]:
        for layout in _layouts(grid, problem, case, progress):
            yield Candidate(
                configuration=Configuration(
                    settings={**texts, **job, **values, "layout": str(layout)}, group=group, num_nodes=machines.num_nodes,
                    num_devices=machines.num_devices, label=" ".join((str(layout), *(f"{n}={v}" for n, v in values.items()))),
                ),
                problem=problem, layout=layout, defaults=case.defaults,
            )  # fmt: skip


def _stack_name(problem: Problem) -> str:
    stack = stack_of(problem.cluster)
    return stack.name if stack else ""


def _layouts(grid: ExperimentGrid, problem: Problem, case: SweepCase, progress: Progress) -> list[Layout]:
    """Return the layouts of a point: of each combination of pins the fastest, with those just beyond the memory."""
    layouts: list[Layout] = []
    stack = stack_of(problem.cluster)
    combinations = list(grid.pin_combinations())
    for number, pins in enumerate(combinations, 1):
        progress(f"layouts of {pluralize(len(combinations), 'combination')}", number, len(combinations))
        choices = choices_from_pins(pins, {}, case.choices, runnable=grid.target == TRAIN) or Choices()
        choices = choices.limit_to_stack(stack, problem.architecture, case.job, problem.cluster.scale_up_size)
        layouts += [layout_as_run(stack, layout) for layout in _search(problem, choices, grid)]
    return list(dict.fromkeys(layouts))


def _search(problem: Problem, choices: Choices, grid: ExperimentGrid) -> list[Layout]:
    """Return the fastest layouts that fit, then some that need a little more memory; with neither the one that needs least."""
    try:
        fitting = search_layouts(problem, choices=choices, top=grid.top)
        nearby = search_layouts(problem, choices=choices, top=grid.top, reserve=-BORDERLINE_EXCESS)
    except NothingFitsError:  # no legal layout with these pins
        return []
    layouts = [row.layout for row in fitting.best]
    beyond = [row.layout for row in nearby.best if row.memory_bytes > problem.cluster.chip.capacity_bytes]
    return [*layouts, *beyond[: max(grid.borderline, grid.top // 4)]] or [fitting.least_memory.layout]


def placeholder_values(candidate: Candidate) -> dict[str, Setting]:
    """Return what stands for the placeholders of a command: settings, degrees of the layout, counts of machines."""
    configuration, layout = candidate.configuration, candidate.layout
    values = dict(configuration.settings)
    if layout is not None and candidate.problem is not None:
        values |= {axis: getattr(layout, axis) for axis in AXES}
        values |= {
            "micro_batch_seqs": layout.micro_batch_seqs, "recompute": layout.recompute, "zero_stage": layout.zero_stage,
            "global_batch_seqs": candidate.problem.job.num_seqs,
        }  # fmt: skip
    return {**values, "num_nodes": configuration.num_nodes, "num_devices": configuration.num_devices}
