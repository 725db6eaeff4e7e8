"""The first view: the verdict, the step's time, memory stage by stage, and what can be changed."""

from __future__ import annotations

from typing import Any

from shardwise.errors import ShardwiseError
from shardwise.explore.asked import Asked
from shardwise.explore.controls import controls
from shardwise.explore.fields import fields_payload
from shardwise.explore.state import layout_text
from shardwise.explore.views.head import head
from shardwise.explore.views.numbers import bubble
from shardwise.explore.views.run import run_fields
from shardwise.planning.memory import memory_payload
from shardwise.planning.payload import estimate_payload
from shardwise.reconcile.payload import reconcile_payload


def overview(asked: Asked) -> dict[str, Any]:
    """The payloads of `shardwise estimate` and `shardwise memory`; for a layout that cannot run the reasons in their place."""
    return head(asked) | {"controls": controls(asked), **_priced(asked)}


def _priced(asked: Asked) -> dict[str, Any]:
    try:
        if asked.problems:
            return {"problems": list(asked.problems), "estimate": None, "memory": None, "verdict": None}
        plan = asked.plan
    except ShardwiseError as error:
        return {"problems": list(error.problems), "estimate": None, "memory": None, "verdict": None}
    return {
        "problems": [], "estimate": estimate_payload(plan, None),
        "memory": memory_payload(plan.model, plan.cluster, [(plan.job, plan.layout)], []), "verdict": _verdict(asked),
        **_measured(asked),
    }  # fmt: skip


def _measured(asked: Asked) -> dict[str, Any]:
    """The opened run beside its plan: the payload of `shardwise reconcile`; nothing of another layout."""
    if asked.measured is None:
        return {}
    return {"reconcile": reconcile_payload(asked.plan, asked.measured), "fields": fields_payload(run_fields(asked))}


def _verdict(asked: Asked) -> dict[str, Any]:
    """Whether it fits, how it compares with the best that was found (None: nothing yet), what bounds it."""
    priced = asked.plan.estimate
    best = asked.found["best"] if asked.found else None
    return {
        "fits": priced.fits, "margin": priced.margin, "bound": priced.bound, "bubble": bubble(asked),
        "times_the_best": priced.step_time_s / best["step_time_s"] if best else None,
        "is_best": best is not None and best["layout"] == layout_text(asked.layout),
        "kind": "prediction" if priced.interval90 else "bound",
    }  # fmt: skip
