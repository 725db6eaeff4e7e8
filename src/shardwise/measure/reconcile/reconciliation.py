"""Read a run from its folder and compare it with its plan: time, memory and collectives, with remarks and advice.

`read_run` refuses a run of another plan, and one that says too little to be compared.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.hardware.chips import LOCAL, LOCAL_NOTE, Chip, chip_names
from shardwise.measure.reconcile.step_terms import (
    Attribution,
    CollectiveComparison,
    StepMemory,
    StepTime,
    attribute_error,
    compare_collectives,
    compare_memory,
    compare_step_time,
    find_dependencies,
)
from shardwise.model.optimizers.registry import DEFAULT_OPTIMIZER
from shardwise.present.draw.notebook import Pictured, Shown
from shardwise.records.run_folder import RunFolder, read_json
from shardwise.records.step_log import StepLog, StepRecord, read_log
from shardwise.records.step_memory_and_collectives import RunInspection, parse_inspection
from shardwise.run.recipe import TrainingRecipe, parse_recipe
from shardwise.run.trainer.plan_for_engine import engine_memory, engine_policy
from shardwise.search.plan import Plan
from shardwise.search.plan_file import plan_payload
from shardwise.values.errors import InputError, raise_problems
from shardwise.values.precision import get_precision
from shardwise.values.units import format_bytes

WARM_UP = 2  # steps of each start that do not count: allocators fill, kernels are chosen, caches are cold
LEAST_STEPS = 3  # that count, for a median
# What of a job decides what runs; the rest of it is how it is priced.
DEFINING_JOB_FIELDS = ("seq_len", "global_batch_tokens", "precision")


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedRun:
    """A run since its latest start: the steps whose seconds count, the watched step's record, what was seen of it, the recipe."""

    timed_steps: tuple[StepRecord, ...]
    inspected_step: StepRecord
    inspection: RunInspection
    recipe: TrainingRecipe


def read_run(plan: Plan, path: Path) -> InspectedRun:
    """The run of a plan. Raises `InputError` for a folder without one, one of another plan, and one too short to judge."""
    folder = RunFolder(path)
    if not folder.contains_run:
        raise InputError(f"reconcile: {path} holds no run; the folder that `shardwise train --out` named is required")
    of = folder.read_inputs()
    raise_problems(list(_plan_differences(plan, of.plan, path)))
    log, seen = read_log(folder.log), _read_inspection(folder)
    watched = next((record for record in log.steps if record.step == seen.step), None)
    if watched is None:
        raise InputError(
            f"reconcile: the log of {path} has no step {seen.step}, which was watched; run the plan again with `shardwise train`"
        )
    return InspectedRun(
        timed_steps=_select_steps(plan, log, path), inspected_step=watched, inspection=seen,
        recipe=parse_recipe(of.recipe, str(folder.recipe))
    )  # fmt: skip


def _plan_differences(plan: Plan, ran: Mapping[str, Any], path: Path) -> Iterator[str]:
    """In what the plan is not the one that was run. The cluster that it is priced on may be another."""
    mine, found = _defining_fields(json.loads(json.dumps(plan_payload(plan)))), _defining_fields(ran)
    for name in mine:
        if mine[name] != found.get(name):
            yield (
                f"reconcile: found {name} {mine[name]} in the plan; the run in {path} has {found.get(name)}, which is required: "
                f"give {path / 'plan.json'}, or run this plan"
            )


def _defining_fields(payload: Mapping[str, Any]) -> dict[str, Any]:
    """What decides what runs: the model but for its name, the layout but for its placement, the batch."""
    model, job, layout = (payload.get(name) or {} for name in ("model", "job", "layout"))
    found = {f"model.{name}": value for name, value in model.items() if name != "name"}
    found |= {f"job.{name}": job.get(name) for name in DEFINING_JOB_FIELDS}
    found["job.optimizer"] = job.get("optimizer", DEFAULT_OPTIMIZER)  # files of earlier versions have none
    return found | {f"layout.{name}": value for name, value in layout.items() if name not in ("placement", "text")}


def _read_inspection(folder: RunFolder) -> RunInspection:
    if not folder.measured.exists():
        raise InputError(
            f"reconcile: {folder.path} has no measured.json: an older version ran it; run the plan again with `shardwise train`"
        )
    seen = parse_inspection(read_json(folder.measured), str(folder.measured))
    if seen.step is None or seen.memory is None:
        raise InputError(
            f"reconcile: the run in {folder.path} has not come to the step that is watched; at least {WARM_UP} steps are required"
        )
    return seen


def _select_steps(plan: Plan, log: StepLog, path: Path) -> tuple[StepRecord, ...]:
    """The steps that count: of the latest start, after its first, unwatched, and of the plan's batch."""
    first = (log.headers[-1].get("first_step", 0) if log.headers else 0) + WARM_UP
    found = tuple(
        record
        for record in log.steps
        if record.step > first
        and record.step not in log.inspected
        and record.num_tokens == plan.job.global_batch_tokens
    )
    if len(found) < LEAST_STEPS:
        raise InputError(
            f"reconcile: found {len(found)} steps of {path} that count (after the first {WARM_UP} of its latest start, of "
            f"{plan.job.global_batch_tokens:,} tokens, not the watched one); at least {LEAST_STEPS} are required: "
            "run more --steps"
        )
    return found


NOISY_CHANGE = (
    0.10  # a change of the machine from before a run to after it that makes its times those of a noisy machine
)
LARGEST_REST = 0.10  # of a step, which what no term explains is to stay under
ENGINE_LOSS = "in_place"  # the kind that the engine has (`values.loss_kernels.LOSS_KERNELS`)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconciliation(Pictured):
    """All of it. `machine` is what ran the plan; `changes` by how much its work took longer after the run than before, by name.

    `attribution` is None for a step that is as predicted, and for one of a noisy machine. `remarks` say what the numbers must be
    read with, the most important first; `advice` which commands would mend the plan.
    """

    machine: str
    changes: Mapping[str, float]
    time: StepTime
    attribution: Attribution | None
    memory: StepMemory
    collectives: CollectiveComparison
    remarks: tuple[str, ...]
    advice: tuple[str, ...]

    def shown(self) -> Shown:
        from shardwise.present.pictures.reconciliation_charts import shown_reconciliation

        return shown_reconciliation(self)

    @property
    def noisy(self) -> bool:
        return bool(noisy_changes(self.changes))


def reconcile(plan: Plan, run: InspectedRun) -> Reconciliation:
    """Hold a run against its plan, term by term."""
    time = compare_step_time(plan.estimate, run.timed_steps)
    changes = run.inspection.relative_changes()
    attributed = None if noisy_changes(changes) else attribute_error(time, lambda name: find_dependencies(plan, name))
    return Reconciliation(
        machine=run.inspection.machine, changes=changes, time=time, attribution=attributed,
        memory=compare_memory(engine_memory(plan, run.recipe), run.inspection),
        collectives=compare_collectives(
            plan, run.recipe.for_step(run.inspected_step.step - 1), run.inspected_step.num_tokens, run.inspection.collectives),
        remarks=tuple(_remarks(plan, run, changes)),
        advice=tuple(_advice(plan, time, run.inspection, noisy=bool(noisy_changes(changes)))),
    )  # fmt: skip


def noisy_changes(changes: Mapping[str, float]) -> dict[str, float]:
    """What of the machine changed by more than `NOISY_CHANGE`, the most first."""
    found = {name: change for name, change in changes.items() if abs(change) > NOISY_CHANGE}
    return dict(sorted(found.items(), key=lambda item: -abs(item[1])))


def _remarks(plan: Plan, run: InspectedRun, changes: Mapping[str, float]) -> Iterator[str]:
    chip, seen = plan.cluster.chip, run.inspection
    if is_other_chip(chip, seen):
        yield f"the plan is priced for {chip.name}, and ran on another machine ({seen.machine}): its seconds say nothing of that"
    elif chip.name == LOCAL and plan.cluster.calibration is None:
        yield f"{LOCAL_NOTE}, not this machine: its seconds are those of another host"
    changed = noisy_changes(changes)
    if changed:
        named = ", ".join(f"{name} {change:+.0%}" for name, change in changed.items())
        most = max(abs(change) for change in changed.values())
        yield f"the machine changed by {most:.0%} during the run ({named}): times below are of a noisy machine"
    elif not changes:
        yield "the run has not ended: whether the machine changed meanwhile is not known"
    if plan.job.loss != ENGINE_LOSS:
        yield (
            f"the plan has the memory of the loss {plan.job.loss!r}; `train` runs {ENGINE_LOSS!r}: plan again with "
            f"--set job.loss={ENGINE_LOSS}"
        )
    yield from cast_remarks(plan, run.recipe)


def cast_remarks(plan: Plan, recipe: TrainingRecipe) -> Iterator[str]:
    """That memory is held against another price than the plan's own."""
    if engine_policy(plan, recipe) is not None and plan.policy.casts != "in_products":
        own, planned = (sum(of.values()) for of in (engine_memory(plan, recipe), plan.estimate.memory))
        yield (
            f"memory is held against {format_bytes(own)}, the price of `train`, which keeps what products in "
            f"{get_precision(plan.job.precision).matmul} take as it is; the plan's own {format_bytes(planned)} is that of "
            "software that keeps the casts: plan again with --stack shardwise"
        )


def is_other_chip(chip: Chip, seen: RunInspection) -> bool:
    """Whether a chip of the catalogue is another one than a run's device. Of a chip with a name of its own nothing is known."""
    if chip.name not in chip_names():
        return False
    if seen.device == "cpu":
        return chip.name != "cpu"
    return chip.name.partition("-")[0] not in re.split(r"[^a-z0-9]+", seen.machine.lower())


def _advice(plan: Plan, time: StepTime, seen: RunInspection, *, noisy: bool) -> Iterator[str]:
    """What would make the plan's seconds this machine's; nothing where they are."""
    if noisy:
        yield "run it again while nothing else runs on the machine"
    if time.within:
        return
    if seen.machine.startswith("CPU"):
        yield f"shardwise bench machine --processes {plan.layout.num_devices} --out machine.toml"
        yield "shardwise plan MODEL machine.toml ... --runnable, and reconcile that plan with this run or the next"
        return
    cluster = plan.cluster.name if ":" in plan.cluster.name else "CLUSTER.toml"
    yield "shardwise bench all --out machine.jsonl"
    yield f"shardwise calibrate {cluster} --bench machine.jsonl --out my-cluster.toml"
    yield "shardwise plan MODEL my-cluster.toml ..., and reconcile that plan with this run or the next"
