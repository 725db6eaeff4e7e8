"""What a run's folder says that a plan can be held against, or why it says too little."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.errors import InputError, require
from shardwise.measurement.folder import RunFolder, read_json
from shardwise.measurement.inspection import Measured, parse_measured
from shardwise.measurement.log import Log, read_log
from shardwise.measurement.record import StepRecord
from shardwise.optimizer.table import DEFAULT
from shardwise.planning.payload import plan_payload
from shardwise.planning.plan import Plan
from shardwise.train.recipe import Recipe, parse_recipe

WARM_UP = 2  # steps of each start that do not count: allocators fill, kernels are chosen, caches are cold
LEAST_STEPS = 3  # that count, for a median
# What of a job decides what runs; the rest of it is how it is priced.
RUN_OF_JOB = ("seq_len", "global_batch_tokens", "precision")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """A run since its latest start: the steps whose seconds count, the watched step's record, what was seen of it, the recipe."""

    counted: tuple[StepRecord, ...]
    watched: StepRecord
    seen: Measured
    recipe: Recipe


def read_run(plan: Plan, path: Path) -> MeasuredRun:
    """The run of a plan. Raises `InputError` for a folder without one, one of another plan, and one too short to judge."""
    folder = RunFolder(path)
    if not folder.holds_a_run:
        raise InputError(f"reconcile: {path} holds no run; the folder that `shardwise train --out` named is required")
    of = folder.read()
    require(list(_differences(plan, of.plan, path)))
    log, seen = read_log(folder.log), _seen(folder)
    watched = next((record for record in log.steps if record.step == seen.step), None)
    if watched is None:
        raise InputError(
            f"reconcile: the log of {path} has no step {seen.step}, which was watched; run the plan again with `shardwise train`"
        )
    return MeasuredRun(
        counted=_counted(plan, log, path), watched=watched, seen=seen, recipe=parse_recipe(of.recipe, str(folder.recipe))
    )  # fmt: skip


def _differences(plan: Plan, ran: Mapping[str, Any], path: Path) -> Iterator[str]:
    """In what the plan is not the one that was run. The cluster that it is priced on may be another."""
    mine, found = _decides(json.loads(json.dumps(plan_payload(plan)))), _decides(ran)
    for name in mine:
        if mine[name] != found.get(name):
            yield (
                f"reconcile: found {name} {mine[name]} in the plan; the run in {path} has {found.get(name)}, which is required: "
                f"give {path / 'plan.json'}, or run this plan"
            )


def _decides(payload: Mapping[str, Any]) -> dict[str, Any]:
    """What decides what runs: the model but for its name, the layout but for its placement, the batch."""
    model, job, layout = (payload.get(name) or {} for name in ("model", "job", "layout"))
    found = {f"model.{name}": value for name, value in model.items() if name != "name"}
    found |= {f"job.{name}": job.get(name) for name in RUN_OF_JOB}
    found["job.optimizer"] = job.get("optimizer", DEFAULT)  # files of earlier versions have none
    return found | {f"layout.{name}": value for name, value in layout.items() if name not in ("placement", "text")}


def _seen(folder: RunFolder) -> Measured:
    if not folder.measured.exists():
        raise InputError(
            f"reconcile: {folder.path} has no measured.json: an older version ran it; run the plan again with `shardwise train`"
        )
    seen = parse_measured(read_json(folder.measured), str(folder.measured))
    if seen.step is None or seen.memory is None:
        raise InputError(
            f"reconcile: the run in {folder.path} has not come to the step that is watched; at least {WARM_UP} steps are required"
        )
    return seen


def _counted(plan: Plan, log: Log, path: Path) -> tuple[StepRecord, ...]:
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
