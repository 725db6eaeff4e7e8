"""What a launch that was read costs, whether it fits, and what would be faster."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from typing_extensions import TypedDict

from shardwise.cluster.cluster import Cluster
from shardwise.cluster.stacks import predicted, stack_named
from shardwise.cost.estimate import Estimate
from shardwise.export.better import Change, ChangePayload, better
from shardwise.export.launch import Parts, machines_of
from shardwise.export.reading import Heard, read
from shardwise.export.target import Files
from shardwise.job import Job
from shardwise.layout.payload import LayoutPayload
from shardwise.model.architecture import Architecture
from shardwise.model.payload import ModelPayload, model_payload
from shardwise.planning.payload import layout_of_plan
from shardwise.planning.plan import Plan, plan_layout

SCHEMA = "shardwise.read/2"


class ReadPayload(TypedDict):
    """A launch that was read. `unknown`: options that the release does not have; `unread`: those that no plan depends on."""

    schema: Literal["shardwise.read/2"]
    target: str
    version: str
    model: ModelPayload
    cluster: str
    job: Job
    layout: LayoutPayload
    unknown: list[str]
    unread: list[str]
    notes: list[str]
    estimate: Estimate
    better: list[ChangePayload]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A launch as it was read, as a plan with its estimate, and the changes that make it faster."""

    heard: Heard
    plan: Plan
    better: tuple[Change, ...]

    def payload(self) -> dict[str, Any]:
        """What `shardwise read --json` prints."""
        heard, plan = self.heard, self.plan
        return {
            "schema": SCHEMA, "target": heard.target.name, "version": heard.target.version,
            "model": model_payload(plan.model), "cluster": plan.cluster.name, "job": asdict(plan.job),
            "layout": layout_of_plan(plan),
            "unknown": list(heard.unknown), "unread": list(heard.unread), "notes": list(heard.notes),
            "estimate": asdict(plan.estimate),
            "better": [change.payload(plan) for change in self.better],
        }  # fmt: skip


def judge_launch(
    files: Files, cluster: Cluster, *, target: str | None = None, model: Architecture | None = None, beside: Parts | None = None
) -> Verdict:  # fmt: skip
    """The verdict on a launch's files on a cluster, predicted for its framework's stack unless the cluster was measured.

    `target` is the framework where the options do not tell it, `model` the model where the launch does not say it, `beside` other
    parts that it leaves out (`reading.BESIDE`). Raises
    `InputError` for what is no launch, and for one that is not legal on this cluster.
    """
    heard = read(files, machines_of(cluster), target=target, model=model, beside=beside)
    where = cluster if cluster.calibration else predicted(cluster, stack_named(heard.target.stack))
    launch = heard.launch
    found = plan_layout(launch.model, where, launch.job, launch.layout)
    return Verdict(heard=heard, plan=found, better=tuple(better(launch, heard.target, where)))
