"""Verify that a plan's layout trains as one process does, on meshes of a few processes with its axes and variants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shardwise.layout import Layout, LayoutFacts, require_runnable
from shardwise.model import Job, ModelFacts
from shardwise.run import TrainingRecipe
from shardwise.search import Plan
from shardwise.step import count_collectives
from shardwise.values import InputError, Payload, Precision, Progress, get_precision, ignore_progress
from shardwise.verify.training.compare_runs import (
    ERROR_LIMITS,
    CaseResult,
    RelativeErrors,
    collective_differences,
    relative_errors,
    run_case,
    run_reference,
)
from shardwise.verify.training.rounding_errors import ROUNDING_LIMITS, PrecisionComparison, compare_precision
from shardwise.verify.training.training_case import (
    SEQ_LEN,
    SmallMesh,
    TrainingCase,
    long_seq_len,
    num_micro_batches,
    shrink_plan,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshVerification:
    """Result on a small mesh: degrees by atomic axis, case, errors in float64 of all steps and of a step of long sequences,
    rounding in the plan's own precision, and differences of its collectives from the list."""

    degrees: Mapping[str, int]
    case: TrainingCase
    errors: RelativeErrors
    long_errors: RelativeErrors
    precision: PrecisionComparison
    differing: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return self.errors.ok and self.long_errors.ok and self.precision.ok and not self.differing

    @property
    def largest(self) -> dict[str, float]:
        """Largest relative error of each kind in float64."""
        return {name: max(self.errors.largest[name], self.long_errors.largest[name]) for name in ERROR_LIMITS}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanVerification:
    """Verification of a plan's layout, mesh by mesh."""

    layout: Layout
    meshes: tuple[MeshVerification, ...]

    @property
    def largest(self) -> dict[str, float]:
        """Largest relative error of each kind."""
        return {name: max(mesh.largest[name] for mesh in self.meshes) for name in ERROR_LIMITS}

    @property
    def rounding(self) -> dict[str, float]:
        """How many times as far from float64 as one process the sharded runs in the plan's precision are."""
        names = [name for name in ROUNDING_LIMITS if all(name in mesh.precision.errors for mesh in self.meshes)]
        return {name: max(mesh.precision.ratios[name] for mesh in self.meshes) for name in names}

    @property
    def captured_equals_list(self) -> bool:
        return not any(mesh.differing for mesh in self.meshes)

    @property
    def ok(self) -> bool:
        return all(mesh.ok for mesh in self.meshes)


def verify_plan(plan: Plan, recipe: TrainingRecipe, progress: Progress = ignore_progress) -> PlanVerification:
    """Train a small model for the recipe's steps, sharded and on one rank, from the same values and tokens: in float64, in the
    plan's own precision, and a step of long sequences in float64.

    The meshes have at most `training_case.MOST_DEVICES` ranks, threads of this process, and together all that the plan's
    layout has.

    Raises `InputError` for a layout that does not run, and if a rank fails; on a deadlock it says what each rank waits
    for.
    """
    precision = get_precision(plan.job.precision)
    require_runnable(plan.model, plan.layout, precision, plan.job.optimizer)
    small_meshes = shrink_plan(plan.model, plan.layout)
    progress("meshes", 0, len(small_meshes))
    verified = []
    for number, small in enumerate(small_meshes, start=1):
        verified.append(_verify_mesh(small, small_case(plan, recipe, small), precision))
        progress("meshes", number, len(small_meshes))
    return PlanVerification(layout=plan.layout, meshes=tuple(verified))


def _verify_mesh(small: SmallMesh, case: TrainingCase, precision: Precision) -> MeshVerification:
    """Compare the ranks of one mesh with one process. Raises `InputError` if a rank fails."""
    long, in_precision = long_case(case), replace(case, precision=precision)
    sharded, exact = _run(case, captures=True), run_reference(case)
    sharded_in_precision = _run(in_precision, captures=True)
    differing = collective_differences(case, sharded.issued)
    differing_in_precision = collective_differences(in_precision, sharded_in_precision.issued)
    return MeshVerification(
        degrees=small.degrees, case=case, errors=relative_errors(sharded, exact),
        long_errors=relative_errors(_run(long), run_reference(long)),
        precision=compare_precision(
            precision.name, sharded_in_precision, run_case(in_precision.on_single_device()), exact
        ),
        differing=(*differing, *(f"{precision.name}: {text}" for text in differing_in_precision)),
    )  # fmt: skip


def _run(case: TrainingCase, *, captures: bool = False) -> CaseResult:
    """Run the ranks of a case. Raises `InputError` if a rank fails."""
    try:
        return run_case(case, captures=captures)
    except RuntimeError as error:
        raise InputError(
            f"verify: {case.layout}: {'; '.join([str(error), *getattr(error, '__notes__', ())])}"
        ) from error


def long_case(case: TrainingCase) -> TrainingCase:
    """Return one step of a case with sequences longer than a block of queries, a micro-batch of each replica for each stage."""
    return replace(
        case, recipe=replace(case.recipe, steps=1, warmup_steps=min(case.recipe.warmup_steps, 1)),
        seq_len=long_seq_len(case.layout), num_seqs=case.layout.pp * case.micro_batch_seqs,
    )  # fmt: skip


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
class RoundingRecord(Payload):
    """Rounding of the sharded run in the plan's precision: how many times as far from float64 as one process it is."""

    precision: str
    ratios: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshRecord(Payload):
    """Verification on a small mesh: layout, model, errors against one process, and collectives that differ from the list."""

    degrees: Mapping[str, int]
    num_processes: int
    layout: LayoutFacts
    model: ModelFacts
    max_relative_error: Mapping[str, float]
    rounding: RoundingRecord
    without_gradient: Sequence[str]
    farthest: FarthestTensorsRecord
    collectives: int
    differing: Sequence[str]
    ok: bool

    @classmethod
    def of(cls, mesh: MeshVerification) -> MeshRecord:
        """Return the record of a mesh."""
        case, errors = mesh.case, mesh.errors
        farthest = errors if mesh.long_errors.ok or not errors.ok else mesh.long_errors
        job = Job(global_batch_tokens=case.num_targets, seq_len=case.seq_len, optimizer=case.optimizer)
        return cls.from_attributes(
            mesh, errors, num_processes=case.layout.num_devices, model=ModelFacts.of(case.architecture),
            layout=LayoutFacts.of(case.layout, case.architecture, job, None), max_relative_error=mesh.largest,
            rounding=RoundingRecord.from_attributes(mesh.precision), farthest=FarthestTensorsRecord.from_attributes(farthest),
            collectives=count_collectives(case.instance, case.num_micro_batches).total(),
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationRecord(Payload):
    """Comparison of training under a plan's layout with training in one process, on small meshes."""

    SCHEMA = "shardwise.verify/1"
    meshes: Sequence[MeshRecord]
    max_relative_error: Mapping[str, float]
    rounding: Mapping[str, float]
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
