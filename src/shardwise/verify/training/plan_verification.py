"""Verify that a plan's layout trains as one process does, on meshes of a few processes with its axes and variants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shardwise.layout import Layout, LayoutFacts, require_runnable
from shardwise.model import Job, ModelFacts
from shardwise.run import TrainingRecipe
from shardwise.search import Plan
from shardwise.step import count_collectives
from shardwise.values import InputError, Payload, Progress, get_precision, ignore_progress
from shardwise.verify.training.compare_runs import (
    ERROR_LIMITS,
    RelativeErrors,
    collective_differences,
    relative_errors,
    run_case,
)
from shardwise.verify.training.training_case import SEQ_LEN, SmallMesh, TrainingCase, num_micro_batches, shrink_plan


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


@dataclass(frozen=True, slots=True, kw_only=True)
class FarthestTensorsRecord(Payload):
    """Names of the gradient and the weight with the largest errors."""

    gradient: str
    weight: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshRecord(Payload):
    """Verification on a small mesh: layout, model, errors against one process, and collectives that differ from the list."""

    degrees: Mapping[str, int]
    num_processes: int
    layout: LayoutFacts
    model: ModelFacts
    max_relative_error: Mapping[str, float]
    without_gradient: Sequence[str]
    farthest: FarthestTensorsRecord
    collectives: int
    differing: Sequence[str]
    ok: bool

    @classmethod
    def of(cls, mesh: MeshVerification) -> MeshRecord:
        """Return the record of a mesh."""
        case, errors = mesh.case, mesh.errors
        job = Job(global_batch_tokens=case.num_targets, seq_len=case.seq_len, optimizer=case.optimizer)
        return cls.from_attributes(
            mesh, errors, num_processes=case.layout.num_devices, model=ModelFacts.of(case.architecture),
            layout=LayoutFacts.of(case.layout, case.architecture, job, None), max_relative_error=errors.largest,
            farthest=FarthestTensorsRecord.from_attributes(errors),
            collectives=count_collectives(case.instance, case.num_micro_batches).total(),
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationRecord(Payload):
    """Comparison of training under a plan's layout with training in one process, on small meshes."""

    SCHEMA = "shardwise.verify/1"
    meshes: Sequence[MeshRecord]
    max_relative_error: Mapping[str, float]
    captured_equals_list: bool
    ok: bool

    @classmethod
    def of(cls, verification: PlanVerification) -> VerificationRecord:
        """Return the record of a verification."""
        return cls.from_attributes(
            verification,
            meshes=[MeshRecord.of(mesh) for mesh in verification.meshes],
            max_relative_error=verification.largest,
        )
