"""The first view: the verdict, the step's time, memory stage by stage, and what can be changed."""

from __future__ import annotations

from typing import Any

from shardwise.measure import reconcile_payload
from shardwise.present.explore.asked import Asked
from shardwise.present.explore.controls import controls
from shardwise.present.explore.fields import EXACT, OWN, Field, Fields, fields_payload
from shardwise.present.explore.kinds import kind_of
from shardwise.present.explore.state import layout_text
from shardwise.present.explore.views.head import head
from shardwise.present.explore.views.numbers import bubble
from shardwise.present.explore.views.run import run_fields
from shardwise.search import memory_payload
from shardwise.search.plan_file import estimate_payload
from shardwise.values import ShardwiseError


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
        "fields": fields_payload({**_fields(asked), **(run_fields(asked) if asked.measured else {})}),
        **_measured(asked),
    }  # fmt: skip


def _measured(asked: Asked) -> dict[str, Any]:
    """The opened run beside its plan: the payload of `shardwise reconcile`; nothing of another layout."""
    return {"reconcile": reconcile_payload(asked.plan, asked.measured)} if asked.measured else {}


def _fields(asked: Asked) -> Fields:
    """Of the numbers that are no terms; of those `why` tells."""
    kind, memory, step = kind_of(asked), kind_of(asked, memory=True), "estimate.estimate.step_time_s"
    best, chip = "search.best.step_time_s", asked.cluster.chip
    source = "hardware/calibration_constants.py: the spread of measured over predicted step times of published runs"
    return {
        "verdict.times_the_best": Field(
            "the step over that of the best layout that the search found", "step / step of the best", "×", "search/planner.py",
            kind,
            {"step": step, "step of the best": best},
        ),
        step: Field("seconds of one optimizer step", "the sum of the terms of time", "s", "price/step_time.py", kind),
        best: Field("seconds of a step of the best layout", "the sum of the terms of time", "s", "price/step_time.py", kind),
        "search.best.memory_bytes": Field(
            "bytes of a device of its fullest stage", "the sum of the terms of memory", "B", "price/device_memory.py", memory,
        ),
        "estimate.estimate.interval90.*": Field(
            "an end of the 90% prediction interval", "step · factor of the stack", "s", source, kind, {"step": step},
        ),
        "estimate.estimate.hidden.*": Field(
            "traffic of the axis behind compute", "seconds of the traffic - the exposed ones", "s", "price/overlap.py", kind,
        ),
        "estimate.estimate.memory_capacity_bytes": Field(
            "memory of a device", "given", "B", chip.sources.get("memory_bytes", OWN), EXACT,
        ),
    }  # fmt: skip


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
