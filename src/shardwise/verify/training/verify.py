"""Does a plan's layout train as one process does? Its axes and variants on meshes of a few processes, each judged by itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from typing_extensions import TypedDict

from shardwise.job import Job
from shardwise.layout.payload import LayoutPayload, layout_payload
from shardwise.model.payload import ModelPayload, model_payload
from shardwise.planning.plan import Plan
from shardwise.planning.runnable import require_runnable
from shardwise.precision import precision_named
from shardwise.progress import Progress, silent
from shardwise.train.processes import together
from shardwise.train.recipe import Recipe
from shardwise.verify.training.case import Case
from shardwise.verify.training.judge import LIMITS, Errors, differing, errors
from shardwise.verify.training.shrink import SEQ_LEN, Small, num_micro_batches, shrunk
from shardwise.verify.training.steps import Found, run_case

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
    """Train a small model for the recipe's steps on meshes of at most `shrink.MOST_DEVICES` processes of this machine's CPU that
    have all that the plan's layout has, in float64, and on one process from the same values and tokens.

    Raises `InputError` for a layout that does not run, and where a process fails.
    """
    require_runnable(plan.model, plan.layout, precision_named(plan.job.precision), plan.job.optimizer)
    smalls = shrunk(plan.model, plan.layout)
    cases = [case_of(plan, recipe, small) for small in smalls]
    found = _in_order(_found(cases), cases, progress)
    verified = []
    for small, case, one in zip(smalls, cases, found, strict=True):
        judged = errors(one, run_case(case.alone()))
        verified.append(
            Verified(degrees=small.degrees, case=case, errors=judged, differing=differing(case, one.issued))
        )
    return Verification(meshes=tuple(verified))


def case_of(plan: Plan, recipe: Recipe, small: Small) -> Case:
    """Some micro-batches for each replica, the last one short where the plan's batch is uneven over them."""
    layout, num_seqs = plan.layout, plan.job.global_batch_tokens // plan.job.seq_len
    uneven = layout.pp == 1 and bool(num_seqs % (layout.num_replicas * layout.micro_batch_seqs))
    case = Case(
        architecture=small.architecture, layout=small.layout, recipe=recipe, seq_len=SEQ_LEN, num_seqs=1,
        optimizer=plan.job.optimizer,
    )  # fmt: skip
    return replace(case, num_seqs=num_micro_batches(small.layout) * case.micro_batch_seqs - uneven)


def _found(cases: Sequence[Case]) -> Iterator[tuple[int, Found]]:
    """What each case gives, by its number; those of one size one after the other in the same processes."""
    sizes = sorted({case.layout.num_devices for case in cases}, reverse=True)
    for size in sizes:
        numbers = [number for number, case in enumerate(cases) if case.layout.num_devices == size]
        own = [cases[number] for number in numbers]
        runs = together(_run, own, "cpu", size, len(own), "verify") if size > 1 else map(run_case, own)
        yield from zip(numbers, runs, strict=True)


def _run(rank: int, size: int, device: torch.device, cases: Sequence[Case]) -> Iterator[Found]:
    torch.set_num_threads(1)
    yield from map(run_case, cases)


def _in_order(found: Iterator[tuple[int, Found]], cases: Sequence[Case], progress: Progress) -> list[Found]:
    results: dict[int, Found] = {}
    progress("meshes", 0, len(cases))
    for number, one in found:
        results[number] = one
        progress("meshes", len(results), len(cases))
    return [results[number] for number in range(len(cases))]


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
