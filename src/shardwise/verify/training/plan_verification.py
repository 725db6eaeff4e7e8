"""Verify that a plan's layout trains as one process does, on meshes of a few processes with its axes and variants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from typing_extensions import TypedDict

from shardwise.layout import Layout, LayoutFacts, require_runnable
from shardwise.model import Job, ModelFacts
from shardwise.run import TrainingRecipe
from shardwise.search import Plan
from shardwise.step import count_collectives
from shardwise.values import InputError, Progress, get_precision, ignore_progress
from shardwise.verify.training.compare_runs import (
    ERROR_LIMITS,
    RelativeErrors,
    collective_differences,
    relative_errors,
    run_case,
)
from shardwise.verify.training.training_case import SEQ_LEN, SmallMesh, TrainingCase, num_micro_batches, shrink_plan

SCHEMA = "shardwise.verify/1"


class FarthestTensors(TypedDict):
    """The gradient and the weight that are farthest off."""

    gradient: str
    weight: str


class MeshPayload(TypedDict):
    """A small mesh: what was run on it, how far it is off one process, and how its collectives differ from the list."""

    degrees: dict[str, int]
    layout: LayoutFacts
    num_processes: int
    model: ModelFacts
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
    """Result on a small mesh: degrees by atomic axis, case, errors, and differences of its collectives from the list."""

    degrees: Mapping[str, int]
    case: TrainingCase
    errors: RelativeErrors
    differing: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return self.errors.ok and not self.differing


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanVerification:
    """Verification of a plan's layout, mesh by mesh."""

    layout: Layout
    meshes: tuple[MeshVerification, ...]

    @property
    def largest(self) -> dict[str, float]:
        """Largest relative error of each kind."""
        return {name: max(mesh.errors.largest[name] for mesh in self.meshes) for name in ERROR_LIMITS}

    @property
    def captured_equals_list(self) -> bool:
        return not any(mesh.differing for mesh in self.meshes)

    @property
    def ok(self) -> bool:
        return all(mesh.ok for mesh in self.meshes)


def verify_plan(plan: Plan, recipe: TrainingRecipe, progress: Progress = ignore_progress) -> PlanVerification:
    """Train a small model for the recipe's steps, sharded and on one rank, in float64 from the same values and tokens.

    The meshes have at most `training_case.MOST_DEVICES` ranks, threads of this process, and together all that the plan's
    layout has.

    Raises `InputError` for a layout that does not run, and if a rank fails; on a deadlock it says what each rank waits
    for.
    """
    require_runnable(plan.model, plan.layout, get_precision(plan.job.precision), plan.job.optimizer)
    small_meshes = shrink_plan(plan.model, plan.layout)
    progress("meshes", 0, len(small_meshes))
    verified = []
    for number, small in enumerate(small_meshes, start=1):
        verified.append(_verify_mesh(small, small_case(plan, recipe, small)))
        progress("meshes", number, len(small_meshes))
    return PlanVerification(layout=plan.layout, meshes=tuple(verified))


def _verify_mesh(small: SmallMesh, case: TrainingCase) -> MeshVerification:
    """Compare the ranks of one mesh with one process. Raises `InputError` if a rank fails."""
    try:
        sharded = run_case(case)
    except RuntimeError as error:
        raise InputError(
            f"verify: {case.layout}: {'; '.join([str(error), *getattr(error, '__notes__', ())])}"
        ) from error
    errors = relative_errors(sharded, run_case(case.on_single_device()))
    return MeshVerification(
        degrees=small.degrees, case=case, errors=errors, differing=collective_differences(case, sharded.issued)
    )


def small_case(plan: Plan, recipe: TrainingRecipe, small: SmallMesh) -> TrainingCase:
    """Return a case with a few micro-batches per replica, the last one short if the plan's batch is uneven."""
    layout, num_seqs = plan.layout, plan.job.global_batch_tokens // plan.job.seq_len
    uneven = layout.pp == 1 and bool(num_seqs % (layout.num_replicas * layout.micro_batch_seqs))
    case = TrainingCase(
        architecture=small.architecture, layout=small.layout, recipe=recipe, seq_len=SEQ_LEN, num_seqs=1,
        optimizer=plan.job.optimizer,
    )  # fmt: skip
    return replace(case, num_seqs=num_micro_batches(small.layout) * case.micro_batch_seqs - uneven)


def verify_payload(verification: PlanVerification) -> dict[str, Any]:
    """Return the JSON of `shardwise verify --json`."""
    return {
        "schema": SCHEMA, "meshes": [_mesh_payload(mesh) for mesh in verification.meshes],
        "max_relative_error": verification.largest, "captured_equals_list": verification.captured_equals_list,
        "ok": verification.ok,
    }  # fmt: skip


def _job(case: TrainingCase) -> Job:
    return Job(global_batch_tokens=case.num_targets, seq_len=case.seq_len, optimizer=case.optimizer)


def _mesh_payload(mesh: MeshVerification) -> dict[str, Any]:
    return {
        "degrees": dict(mesh.degrees), "num_processes": mesh.case.layout.num_devices,
        "layout": LayoutFacts.of(mesh.case.layout, mesh.case.architecture, _job(mesh.case), None),
        "model": ModelFacts.of(mesh.case.architecture),
        "max_relative_error": dict(mesh.errors.largest),
        "without_gradient": list(mesh.errors.without_gradient),
        "farthest": {"gradient": mesh.errors.gradient, "weight": mesh.errors.weight},
        "collectives": count_collectives(mesh.case.instance, mesh.case.num_micro_batches).total(),
        "differing": list(mesh.differing), "ok": mesh.ok,
    }  # fmt: skip
