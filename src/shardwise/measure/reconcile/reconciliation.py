"""A run, or the rehearsal of one rank, compared with its plan: time, memory, collectives, remarks, advice.

`read_run` refuses a run of another plan, and one with too little to compare; `rehearse_plan` compares collectives, and memory by
term (`run.trainer.rehearsal`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise import run
from shardwise.hardware import LOCAL, LOCAL_NOTE, Chip, chip_names
from shardwise.layout import layout_degrees, num_micro_batches, require_runnable
from shardwise.measure.reconcile.step_terms import (
    GATHERED,
    Attribution,
    CollectiveComparison,
    MemoryTerm,
    StepMemory,
    StepTime,
    attribute_error,
    compare_collectives,
    compare_memory,
    compare_step_time,
    find_dependencies,
)
from shardwise.model import DEFAULT_OPTIMIZER
from shardwise.price import MEMORY, Pricing
from shardwise.records import RunFolder, RunInspection, StepLog, StepRecord, read_json, read_log
from shardwise.records.step_inspection import RehearsedRank, parse_inspection
from shardwise.run import TrainingRecipe
from shardwise.run.recipe import parse_recipe
from shardwise.run.trainer.engine_prediction import engine_memory, engine_policy
from shardwise.run.trainer.flags import apply_changes
from shardwise.search import Plan, plan_payload
from shardwise.values import Displayable, InputError, format_bytes, get_precision, parse_overrides, raise_problems

WARM_UP = 2  # steps after each start that do not count: allocators fill, kernels are chosen, caches are cold
LEAST_STEPS = 3  # for a median
# Fields of a job that determine the run; the others determine its price.
DEFINING_JOB_FIELDS = ("seq_len", "global_batch_tokens", "precision")


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedRun:
    """A run since its latest start: its folder, the steps whose seconds count, the record and inspection of one step, the
    recipe."""

    path: Path
    timed_steps: tuple[StepRecord, ...]
    inspected_step: StepRecord
    inspection: RunInspection
    recipe: TrainingRecipe


def read_run(plan: Plan, path: Path) -> InspectedRun:
    """Read the run of a plan. Raises `InputError` for a folder without one, a run of another plan, and one too short."""
    folder = RunFolder(path)
    if not folder.contains_run:
        raise InputError(f"reconcile: {path} holds no run; the folder that `shardwise train --out` named is required")
    inputs = folder.read_inputs()
    raise_problems(list(_plan_differences(plan, inputs.plan, path)))
    log, inspection = read_log(folder.log), _read_inspection(folder)
    inspected_step = next((record for record in log.steps if record.step == inspection.step), None)
    if inspected_step is None:
        raise InputError(
            f"reconcile: the log of {path} has no step {inspection.step}, which was watched; run the plan again with "
            "`shardwise train`"
        )
    return InspectedRun(
        path=path, timed_steps=_select_steps(plan, log, path), inspected_step=inspected_step, inspection=inspection,
        recipe=parse_recipe(inputs.recipe, str(folder.recipe))
    )  # fmt: skip


def _plan_differences(plan: Plan, run_plan: Mapping[str, Any], path: Path) -> Iterator[str]:
    """Yield the fields in which the plan is not the one that was run; the cluster that it is priced on may differ."""
    plan_fields, run_fields = _defining_fields(json.loads(json.dumps(plan_payload(plan)))), _defining_fields(run_plan)
    for name in plan_fields:
        if plan_fields[name] != run_fields.get(name):
            yield (
                f"reconcile: found {name} {plan_fields[name]} in the plan; the run in {path} has {run_fields.get(name)}, which "
                f"is required: give {path / 'plan.json'}, or run this plan"
            )


def _defining_fields(payload: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a plan that determine the run: model without name, layout without placement, batch."""
    model, job, layout = (payload.get(name) or {} for name in ("model", "job", "layout"))
    defining = {f"model.{name}": value for name, value in model.items() if name != "name"}
    defining |= {f"job.{name}": job.get(name) for name in DEFINING_JOB_FIELDS}
    defining["job.optimizer"] = job.get("optimizer", DEFAULT_OPTIMIZER)  # files of earlier versions have none
    return defining | {f"layout.{name}": value for name, value in layout.items() if name not in ("placement", "text")}


def _read_inspection(folder: RunFolder) -> RunInspection:
    if not folder.measured.exists():
        raise InputError(
            f"reconcile: {folder.path} has no measured.json: an older version ran it; run the plan again with `shardwise train`"
        )
    inspection = parse_inspection(read_json(folder.measured), str(folder.measured))
    if inspection.step is None or inspection.memory is None:
        raise InputError(
            f"reconcile: the run in {folder.path} has not come to the step that is watched; at least {WARM_UP} steps are required"
        )
    return inspection


def _select_steps(plan: Plan, log: StepLog, path: Path) -> tuple[StepRecord, ...]:
    """Return the steps that count: of the latest start, after warm-up, not inspected, with the plan's batch."""
    first_step = (log.headers[-1].get("first_step", 0) if log.headers else 0) + WARM_UP
    counted = tuple(
        record
        for record in log.steps
        if record.step > first_step
        and record.step not in log.inspected
        and record.num_tokens == plan.job.global_batch_tokens
    )
    if len(counted) < LEAST_STEPS:
        raise InputError(
            f"reconcile: found {len(counted)} steps of {path} that count (after the first {WARM_UP} of its latest start, of "
            f"{plan.job.global_batch_tokens:,} tokens, not the watched one); at least {LEAST_STEPS} are required: "
            "run more --steps"
        )
    return counted


NOISY_CHANGE = 0.10  # relative change of the machine's probes during a run: above it the machine is noisy
LARGEST_REST = 0.10  # of a step: the part that no term explains should stay below it
ENGINE_LOSS = "in_place"  # the kind of loss of the engine (`values.engine_policies.LOSS_KERNELS`)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconciliation(Displayable):
    """A run, in the folder `path`, compared with its plan.

    `machine` ran the plan; `changes` are relative changes of its probes' times from before the run to after it, by
    name. `attribution` is None for a step that is as predicted, and on a noisy machine. `remarks` say how to read the
    numbers, the most important first; `advice` lists commands that would improve the plan.
    """

    plan: Plan
    path: Path
    machine: str
    changes: Mapping[str, float]
    time: StepTime
    attribution: Attribution | None
    memory: StepMemory
    collectives: CollectiveComparison
    remarks: tuple[str, ...]
    advice: tuple[str, ...]

    @property
    def noisy(self) -> bool:
        return bool(noisy_changes(self.changes))


def reconcile(plan: Plan, run: InspectedRun) -> Reconciliation:
    """Compare a run with its plan, term by term."""
    time = compare_step_time(plan.estimate, run.timed_steps)
    changes = run.inspection.relative_changes()
    attribution = None if noisy_changes(changes) else attribute_error(time, lambda name: find_dependencies(plan, name))
    return Reconciliation(
        plan=plan, path=run.path, machine=run.inspection.machine, changes=changes, time=time, attribution=attribution,
        memory=compare_memory(engine_memory(plan, run.recipe), run.inspection),
        collectives=compare_collectives(
            plan, run.recipe.for_step(run.inspected_step.step - 1), run.inspected_step.num_tokens,
            run.inspection.collectives),
        remarks=tuple(_remarks(plan, run, changes)),
        advice=tuple(_advice(plan, time, run.inspection, noisy=bool(noisy_changes(changes)))),
    )  # fmt: skip


def reconcile_run(plan: Plan, path: Path) -> Reconciliation:
    """Compare the run in a folder with its plan. Raises `InputError` as `read_run` does."""
    return reconcile(plan, read_run(plan, path))


def noisy_changes(changes: Mapping[str, float]) -> dict[str, float]:
    """Return the changes of the machine by more than `NOISY_CHANGE`, the largest first."""
    noisy = {name: change for name, change in changes.items() if abs(change) > NOISY_CHANGE}
    return dict(sorted(noisy.items(), key=lambda named_change: -abs(named_change[1])))


def _remarks(plan: Plan, run: InspectedRun, changes: Mapping[str, float]) -> Iterator[str]:
    chip, inspection = plan.cluster.chip, run.inspection
    if is_other_chip(chip, inspection):
        yield (
            f"the plan is priced for {chip.name}, and ran on another machine ({inspection.machine}): its seconds say nothing "
            "of that"
        )
    elif chip.name == LOCAL and plan.cluster.calibration is None:
        yield f"{LOCAL_NOTE}, not this machine: its seconds are those of another host"
    noisy = noisy_changes(changes)
    if noisy:
        change_texts = ", ".join(f"{name} {change:+.0%}" for name, change in noisy.items())
        largest = max(abs(change) for change in noisy.values())
        yield f"the machine changed by {largest:.0%} during the run ({change_texts}): times below are of a noisy machine"
    elif not changes:
        yield "the run has not ended: whether the machine changed meanwhile is not known"
    if plan.job.loss != ENGINE_LOSS:
        yield (
            f"the plan has the memory of the loss {plan.job.loss!r}; `train` runs {ENGINE_LOSS!r}: plan again with "
            f"--set job.loss={ENGINE_LOSS}"
        )
    yield from cast_remarks(plan, run.recipe)


def cast_remarks(plan: Plan, recipe: TrainingRecipe) -> Iterator[str]:
    """Yield a remark if memory is compared with another price than the plan's own."""
    policy = engine_policy(plan, recipe)
    if policy is not None and (plan.policy.casts, plan.policy.weight_casts) != (policy.casts, policy.weight_casts):
        engine_bytes, planned_bytes = (
            sum(memory.values()) for memory in (engine_memory(plan, recipe), plan.estimate.memory)
        )
        yield (
            f"memory is held against {format_bytes(engine_bytes)}, the price of `train`, which keeps what products in "
            f"{get_precision(plan.job.precision).matmul} take as it is, or as norms and gated activations "
            f"cast it, and casts of weights that rest whole; the plan's own "
            f"{format_bytes(planned_bytes)} is that of other software: plan again with --stack shardwise"
        )


def is_other_chip(chip: Chip, inspection: RunInspection) -> bool:
    """Return True if a chip of the catalogue is not the run's device; False for a chip outside the catalogue."""
    if chip.name not in chip_names():
        return False
    if inspection.device == "cpu":
        return chip.name != "cpu"
    return chip.name.partition("-")[0] not in re.split(r"[^a-z0-9]+", inspection.machine.lower())


def _advice(plan: Plan, time: StepTime, inspection: RunInspection, *, noisy: bool) -> Iterator[str]:
    """Yield commands that would fit the plan's seconds to this machine; nothing if the step is within its interval."""
    if noisy:
        yield "run it again while nothing else runs on the machine"
    if time.within:
        return
    if inspection.machine.startswith("CPU"):
        yield f"shardwise bench machine --processes {plan.layout.num_devices} --out machine.toml"
        yield "shardwise plan MODEL machine.toml ... --runnable, and reconcile that plan with this run or the next"
        return
    cluster = plan.cluster.name if ":" in plan.cluster.name else "CLUSTER.toml"
    yield "shardwise bench all --out machine.jsonl"
    yield f"shardwise calibrate {cluster} --bench machine.jsonl --out my-cluster.toml"
    yield "shardwise plan MODEL my-cluster.toml ..., and reconcile that plan with this run or the next"


REHEARSAL_TOLERANCE = 0.03  # of a term, and of the peak: bytes of tensors do not depend on the machine
SMALL_SHARE = 0.01  # of the peak: fewer gathered bytes may be there at one moment and not at another that is as full


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """Rehearsal of one of the plan's `ranks` ranks: what was planned and executed.

    `planned_micro_batches` are those of the plan's step; `remarks` say how to read the numbers."""

    plan: Plan
    ranks: int
    rehearsed: RehearsedRank
    planned_micro_batches: int
    memory: StepMemory
    collectives: CollectiveComparison
    remarks: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """True if collectives are as planned, memory is as close as `REHEARSAL_TOLERANCE`, and each tensor of the engine has
        a term."""
        return self.collectives.equal and not self.failed_terms and not self.memory.undeclared_bytes

    @property
    def terms(self) -> tuple[MemoryTerm, ...]:
        """Terms of memory, and the peak."""
        return (*self.memory.terms, self.memory.total)

    @property
    def failed_terms(self) -> tuple[MemoryTerm, ...]:
        """Judged terms that are not as planned."""
        judged = (term for term in self.terms if is_judged(term, self.memory.total))
        return tuple(term for term in judged if not term.is_within(REHEARSAL_TOLERANCE))


def is_judged(term: MemoryTerm, peak: MemoryTerm) -> bool:
    """Return True if a term is judged by itself.

    Logits and workspace are judged only within the peak: if two moments are nearly as full, the plan may have its peak
    at one and the rank at the other. The same holds for gathered weights if the plan has few at its peak: under ZeRO-1
    the rank's part of the head's gradients.
    """
    if term.name == GATHERED:
        return (term.predicted or 0.0) > SMALL_SHARE * (peak.predicted or 0.0)
    return term.name == "peak" or term.largest is not None


def rehearse_plan(plan: Plan, rank: int = 0, changes: Sequence[str] = ()) -> Rehearsal:
    """Run a step of one rank of a plan alone, and compare it with the plan; `changes` are texts "recipe.NAME=VALUE".

    Raises `InputError` for a plan that the engine does not run.
    """
    recipe = apply_changes(TrainingRecipe(steps=1), parse_overrides(changes, rooms=("recipe",))["recipe"])
    require_runnable(plan.model, plan.layout, get_precision(plan.job.precision), plan.job.optimizer)
    return compare_rehearsal(plan, recipe, run.rehearse_rank(plan, recipe, rank))


def compare_rehearsal(plan: Plan, recipe: TrainingRecipe, rehearsed: RehearsedRank) -> Rehearsal:
    """Compare the step of a rehearsed rank with the plan."""
    layout, pp_rank = plan.layout, rehearsed.coordinate.get("pp", 0)
    pricing = Pricing(plan.problem, layout, engine_policy(plan, recipe))
    planned = MEMORY.values(pricing.memories(pricing.stages())[pp_rank])
    num_seqs = rehearsed.num_micro_batches * layout.num_replicas * layout.micro_batch_seqs
    measured = RunInspection(
        device="meta", machine="", before={}, rank=rehearsed.rank, memory=rehearsed.inspection.memory
    )
    return Rehearsal(
        plan=plan, ranks=layout.num_devices, rehearsed=rehearsed, memory=compare_memory(planned, measured),
        planned_micro_batches=int(num_micro_batches(plan.job, layout_degrees(layout))),
        remarks=tuple(cast_remarks(plan, recipe)),
        collectives=compare_collectives(
            plan, recipe.for_step(0), num_seqs * plan.job.seq_len, rehearsed.inspection.collectives, even=True,
            pp_rank=pp_rank
        ),
    )  # fmt: skip
