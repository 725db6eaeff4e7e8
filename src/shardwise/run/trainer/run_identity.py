"""Identity of a run: model, data and the order of its samples, kept in its folder and its checkpoints.

Degrees, micro-batches and schedules of the learning rate may change. So may batches if the recipe has a schedule of them: the
checkpoint has those before it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

from shardwise.model import DEFAULT_OPTIMIZER
from shardwise.records import RunFolder
from shardwise.records.run_folder import RUN_KEY
from shardwise.run.recipe import TrainingRecipe
from shardwise.search import Plan, plan_payload
from shardwise.search.plan import software_versions

# fields that a batch schedule replaces
SCHEDULED_FIELDS = ("job.global_batch_tokens", "recipe.batch_ramp", "recipe.batch_schedule")
FINGERPRINT_DIGITS = 16


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """The values that a run keeps when it goes on, by name, and whether its batches follow a schedule."""

    fields: Mapping[str, Any]
    is_scheduled: bool = False

    @classmethod
    def of(cls, plan: Plan, recipe: TrainingRecipe, data_fingerprint: str) -> RunIdentity:
        """Return the identity of a run of a plan."""
        fields = _identity(plan_payload(plan), asdict(recipe), data_fingerprint)
        return cls(fields, recipe.batch_schedule is not None)

    @classmethod
    def in_folder(cls, out: RunFolder) -> RunIdentity:
        """Return the identity of the run in a folder. Raises `InputError` if it cannot be read."""
        recorded = out.read_inputs()
        return cls(_identity(recorded.plan, recorded.recipe, recorded.data_fingerprint))

    @property
    def fingerprint(self) -> str:
        """A short hash of the fields."""
        content = json.dumps(self.fields, sort_keys=True).encode("utf-8")
        return hashlib.sha256(content).hexdigest()[:FINGERPRINT_DIGITS]

    def differences(self, fields: Mapping[str, Any], owner: str) -> list[str]:
        """Return texts of how this run differs from the fields of another one, which belong to `owner`."""
        return [
            f"--resume: found {name} {_clip(value)}; {owner} has {_clip(fields.get(name))}, which is required: give the same, "
            "start another run with another --out, or go on all the same with --force"
            for name, value in self.fields.items()
            if value != fields.get(name) and not (self.is_scheduled and name in SCHEDULED_FIELDS)
        ]

    def checkpoint_state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of its run: fingerprint, fields, and the versions that wrote it."""
        return {RUN_KEY: {"fingerprint": self.fingerprint, "fields": self.fields, "versions": engine_versions()}}


def engine_versions() -> dict[str, str]:
    """Return the versions of Shardwise and PyTorch."""
    return {"shardwise": software_versions()["shardwise"], "torch": version("torch")}


def checkpoint_problems(identity: RunIdentity, step: int, values: Mapping[str, Any]) -> list[str]:
    """Return texts of how the checkpoint in the folder of `step` is not one of a run; it has these plain values. Checkpoints of
    earlier versions do not name their run, and are not refused."""
    name, problems = f"the checkpoint of step {step}", []
    if values.get("step") != step:
        problems.append(
            f"--resume: {name} holds step {values.get('step')}; the step in its name is required: restore its folder's name, or "
            "go on all the same with --force"
        )
    run = values.get(RUN_KEY)
    return problems if not isinstance(run, dict) else [*problems, *identity.differences(run.get("fields", {}), name)]


def version_changes(values: Mapping[str, Any]) -> list[str]:
    """Return texts of versions that differ from those that wrote a checkpoint, under which the same step may round otherwise."""
    run = values.get(RUN_KEY)
    written = run.get("versions", {}) if isinstance(run, dict) else {}
    return [
        f"{name} {current} goes on with a checkpoint of {name} {written[name]}"
        for name, current in engine_versions().items()
        if written.get(name, current) != current
    ]


def _identity(plan: Mapping[str, Any], recipe: Mapping[str, Any], data_fingerprint: str) -> dict[str, Any]:
    model, job, recipe = (_as_json(payload) for payload in (plan.get("model", {}), plan.get("job", {}), recipe))
    identity = {f"model.{name}": value for name, value in model.items() if name != "name"}
    identity |= {f"job.{name}": job.get(name) for name in ("seq_len", "global_batch_tokens")}
    identity["job.optimizer"] = job.get("optimizer", DEFAULT_OPTIMIZER)  # runs of earlier versions lack it
    identity |= {f"recipe.{name}": recipe.get(name) for name in ("seed", "respect_documents", "initial")}
    identity["recipe.batch_ramp"] = recipe.get("batch_ramp") or []
    identity["recipe.batch_schedule"] = recipe.get("batch_schedule")
    return identity | {"data of fingerprint": data_fingerprint}


def _as_json(payload: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a payload as JSON restores it, with lists for tuples."""
    plain: Mapping[str, Any] = json.loads(json.dumps(payload))
    return plain


def _clip(value: object) -> str:
    return value[:12] if isinstance(value, str) else str(value)
