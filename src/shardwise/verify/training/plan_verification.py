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
from shardwise.run.recipe import Recipe
from shardwise.search.plan import Plan
from shardwise.values.errors import InputError
from shardwise.values.precision import precision_named
from shardwise.values.progress import Progress, silent
from shardwise.verify.training.compare_runs import LIMITS, Errors, differing, errors, run_case
from shardwise.verify.training.small_case import Case
from shardwise.verify.training.small_meshes import SEQ_LEN, Small, num_micro_batches, shrunk

SCHEMA = "shardwise.verify/1"


class Farthest(TypedDict):
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
    farthest: Farthest
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
class Verified:
    """A small mesh: its degrees by atomic axis, what was run, how far it is off, and how its collectives differ from the list."""

    degrees: Mapping[str, int]
    case: Case
    errors: Errors
    differing: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return self.errors.ok and not self.differing


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """Of a plan's layout, mesh by mesh."""

    meshes: tuple[Verified, ...]

    @property
    def largest(self) -> dict[str, float]:
        """The largest relative error of each kind."""
        return {name: max(one.errors.largest[name] for one in self.meshes) for name in LIMITS}

    @property
    def captured_equals_list(self) -> bool:
        return not any(one.differing for one in self.meshes)

    @property
    def ok(self) -> bool:
        return all(one.ok for one in self.meshes)


def verify(plan: Plan, recipe: Recipe, progress: Progress = silent) -> Verification:
    """Train a small model for the recipe's steps on meshes of at most `small_meshes.MOST_DEVICES` ranks, threads of this process,
    that have all that the plan's layout has, in float64, and on one rank from the same values and tokens.

    Raises `InputError` for a layout that does not run, and where a rank fails; where ranks wait for each other and none can go
    on, it says what each one waits for.
    """
    require_runnable(plan.model, plan.layout, precision_named(plan.job.precision), plan.job.optimizer)
    smalls = shrunk(plan.model, plan.layout)
    progress("meshes", 0, len(smalls))
    verified = []
    for number, small in enumerate(smalls, start=1):
        verified.append(_verified(small, case_of(plan, recipe, small)))
        progress("meshes", number, len(smalls))
    return Verification(meshes=tuple(verified))


def _verified(small: Small, case: Case) -> Verified:
    """Hold the ranks of one mesh against one process. Raises `InputError` where a rank fails."""
    try:
        found = run_case(case)
    except RuntimeError as error:
        raise InputError(
            f"verify: {case.layout}: {'; '.join([str(error), *getattr(error, '__notes__', ())])}"
        ) from error
    judged = errors(found, run_case(case.alone()))
    return Verified(degrees=small.degrees, case=case, errors=judged, differing=differing(case, found.issued))


def case_of(plan: Plan, recipe: Recipe, small: Small) -> Case:
    """Some micro-batches for each replica, the last one short where the plan's batch is uneven over them."""
    layout, num_seqs = plan.layout, plan.job.global_batch_tokens // plan.job.seq_len
    uneven = layout.pp == 1 and bool(num_seqs % (layout.num_replicas * layout.micro_batch_seqs))
    case = Case(
        architecture=small.architecture, layout=small.layout, recipe=recipe, seq_len=SEQ_LEN, num_seqs=1,
        optimizer=plan.job.optimizer,
    )  # fmt: skip
    return replace(case, num_seqs=num_micro_batches(small.layout) * case.micro_batch_seqs - uneven)


def verify_payload(found: Verification) -> dict[str, Any]:
    """What `shardwise verify --json` prints."""
    return {
        "schema": SCHEMA, "meshes": [_mesh(one) for one in found.meshes], "max_relative_error": found.largest,
        "captured_equals_list": found.captured_equals_list, "ok": found.ok,
    }  # fmt: skip


def _job(case: Case) -> Job:
    return Job(global_batch_tokens=case.num_targets, seq_len=case.seq_len, optimizer=case.optimizer)


def _mesh(one: Verified) -> dict[str, Any]:
    return {
        "degrees": dict(one.degrees), "num_processes": one.case.layout.num_devices,
        "layout": layout_payload(one.case.layout, one.case.architecture, _job(one.case), None),
        "model": model_payload(one.case.architecture),
        "max_relative_error": dict(one.errors.largest),
        "without_gradient": list(one.errors.idle), "farthest": {"gradient": one.errors.gradient, "weight": one.errors.weight},
        "collectives": one.case.instance.issued(one.case.num_micro_batches).total(), "differing": list(one.differing),
        "ok": one.ok,
    }  # fmt: skip
