"""Does a plan's layout train as one process does? Its axes and variants on meshes of a few processes, each judged by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from typing_extensions import TypedDict

from shardwise.layout.payload import LayoutPayload, layout_payload
from shardwise.layout.rules.engine import require_runnable
from shardwise.model.job import Job
from shardwise.model.payload import ModelPayload, model_payload
from shardwise.run.recipe import TrainingRecipe
from shardwise.search.plan import Plan
from shardwise.values.errors import InputError
from shardwise.values.precision import get_precision
from shardwise.values.progress import Progress, ignore_progress
from shardwise.verify.training.compare_runs import (
    ERROR_LIMITS,
    RelativeErrors,
    collective_differences,
    relative_errors,
    run_case,
)
from shardwise.verify.training.small_case import TrainingCase
from shardwise.verify.training.small_meshes import SEQ_LEN, SmallMesh, num_micro_batches, shrink_plan

SCHEMA = "shardwise.verify/1"


class FarthestTensors(TypedDict):
    """The gradient and the weight that are farthest off."""

    gradient: str
    weight: str


class MeshPayload(TypedDict):
    """A small mesh: what was run on it, how far it is off one process, and how its collectives differ from the list."""

    degrees: dict[str, int]
    layout: LayoutPayload
    num_processes: int
    model: ModelPayload
    max_relative_error: dict[str, float]
    without_gradient: list[str]
    farthest: FarthestTensors
    collectives: int
    differing: list[str]
    ok: bool


class VerifyPayload(TypedDict):
    """Whether a plan's layout trains as one process does."""

    schema: Literal["shardwise.verify/1"]
    meshes: list[MeshPayload]
    max_relative_error: dict[str, float]
    captured_equals_list: bool
    ok: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshVerification:
    """A small mesh: its degrees by atomic axis, what was run, how far it is off, and how its collectives differ from the list."""

    degrees: Mapping[str, int]
    case: TrainingCase
    errors: RelativeErrors
    differing: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return self.errors.ok and not self.differing


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanVerification:
    """Of a plan's layout, mesh by mesh."""

    meshes: tuple[MeshVerification, ...]

    @property
    def largest(self) -> dict[str, float]:
        """The largest relative error of each kind."""
        return {name: max(one.errors.largest[name] for one in self.meshes) for name in ERROR_LIMITS}

    @property
    def captured_equals_list(self) -> bool:
        return not any(one.differing for one in self.meshes)

    @property
    def ok(self) -> bool:
        return all(one.ok for one in self.meshes)


def verify_plan(plan: Plan, recipe: TrainingRecipe, progress: Progress = ignore_progress) -> PlanVerification:
    """Train a small model for the recipe's steps on meshes of at most `small_meshes.MOST_DEVICES` ranks, threads of this process,
    that have all that the plan's layout has, in float64, and on one rank from the same values and tokens.

    Raises `InputError` for a layout that does not run, and where a rank fails; where ranks wait for each other and none can go
    on, it says what each one waits for.
    """
    require_runnable(plan.model, plan.layout, get_precision(plan.job.precision), plan.job.optimizer)
    smalls = shrink_plan(plan.model, plan.layout)
    progress("meshes", 0, len(smalls))
    verified = []
    for number, small in enumerate(smalls, start=1):
        verified.append(_verify_mesh(small, small_case(plan, recipe, small)))
        progress("meshes", number, len(smalls))
    return PlanVerification(meshes=tuple(verified))


def _verify_mesh(small: SmallMesh, case: TrainingCase) -> MeshVerification:
    """Hold the ranks of one mesh against one process. Raises `InputError` where a rank fails."""
    try:
        found = run_case(case)
    except RuntimeError as error:
        raise InputError(
            f"verify: {case.layout}: {'; '.join([str(error), *getattr(error, '__notes__', ())])}"
        ) from error
    judged = relative_errors(found, run_case(case.on_one_device()))
    return MeshVerification(
        degrees=small.degrees, case=case, errors=judged, differing=collective_differences(case, found.issued)
    )


def small_case(plan: Plan, recipe: TrainingRecipe, small: SmallMesh) -> TrainingCase:
    """Some micro-batches for each replica, the last one short where the plan's batch is uneven over them."""
    layout, num_seqs = plan.layout, plan.job.global_batch_tokens // plan.job.seq_len
    uneven = layout.pp == 1 and bool(num_seqs % (layout.num_replicas * layout.micro_batch_seqs))
    case = TrainingCase(
        architecture=small.architecture, layout=small.layout, recipe=recipe, seq_len=SEQ_LEN, num_seqs=1,
        optimizer=plan.job.optimizer,
    )  # fmt: skip
    return replace(case, num_seqs=num_micro_batches(small.layout) * case.micro_batch_seqs - uneven)


def verify_payload(found: PlanVerification) -> dict[str, Any]:
    """What `shardwise verify --json` prints."""
    return {
        "schema": SCHEMA, "meshes": [_mesh_payload(one) for one in found.meshes], "max_relative_error": found.largest,
        "captured_equals_list": found.captured_equals_list, "ok": found.ok,
    }  # fmt: skip


def _job(case: TrainingCase) -> Job:
    return Job(global_batch_tokens=case.num_targets, seq_len=case.seq_len, optimizer=case.optimizer)


def _mesh_payload(one: MeshVerification) -> dict[str, Any]:
    return {
        "degrees": dict(one.degrees), "num_processes": one.case.layout.num_devices,
        "layout": layout_payload(one.case.layout, one.case.architecture, _job(one.case), None),
        "model": model_payload(one.case.architecture),
        "max_relative_error": dict(one.errors.largest),
        "without_gradient": list(one.errors.without_gradient),
        "farthest": {"gradient": one.errors.gradient, "weight": one.errors.weight},
        "collectives": one.case.instance.issued(one.case.num_micro_batches).total(), "differing": list(one.differing),
        "ok": one.ok,
    }  # fmt: skip
