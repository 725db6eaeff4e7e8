"""A run of the opened plan beside what was predicted: what `shardwise reconcile` prints."""

from __future__ import annotations

from typing import Any

from shardwise.measure import read_run, reconcile_payload
from shardwise.measure.reconcile.reconciliation import reconcile
from shardwise.present.explore.asked import Asked
from shardwise.present.explore.controls import controls
from shardwise.present.explore.fields import EXACT, MEASURED, Field, Fields, fields_payload
from shardwise.present.explore.kinds import kind_of
from shardwise.present.explore.views.head import head
from shardwise.values import InputError


def run(asked: Asked) -> dict[str, Any]:
    """The payload of `shardwise reconcile`. Raises `InputError` where no run was opened, and for another layout than it ran."""
    if asked.known.run is None:
        raise InputError("run: no run was opened; shardwise explore plan.json --run FOLDER is required")
    asked.require_legal()
    found = asked.measured or reconcile(asked.plan, read_run(asked.plan, asked.known.run))
    return head(asked) | {
        "controls": controls(asked), "fields": fields_payload(run_fields(asked)),
        "reconcile": reconcile_payload(asked.plan, found),
    }  # fmt: skip


def run_fields(asked: Asked) -> Fields:
    """Of the numbers of `reconcile`."""
    time, log, watched = "reconcile.time.", "the run's log", "the run's watched step"
    predicted = Field(
        "seconds that the plan has for this", "shardwise explain --term", "s", "price/step_time.py", kind_of(asked)
    )
    mean = "the mean over the middle half of the steps by their time"
    return {
        time + "measured_s": Field("seconds of a step", mean, "s", log, MEASURED, {"steps": time + "num_steps"}),
        time + "low_s": Field("10th percentile of the steps", "of all steps that count", "s", log, MEASURED),
        time + "high_s": Field("90th percentile of the steps", "of all steps that count", "s", log, MEASURED),
        time + "num_steps": Field("steps that count", "steps of the log less the first ones", "", log, EXACT),
        time + "predicted_s": predicted,
        time + "terms.*.predicted_s": predicted,
        time + "terms.*.measured_s": Field("seconds of the term", mean, "s", "run/step_clock.py", MEASURED),
        time + "terms.*.difference_s": Field(
            "how much longer it took than predicted", "measured - predicted", "s", "measure/reconcile/step_terms.py", MEASURED,
            {"measured": time + "terms.*.measured_s", "predicted": time + "terms.*.predicted_s"},
        ),
        time + "terms.*.hidden_s": Field("traffic that is predicted behind compute", "seconds of the axis less the exposed", "s",
                                         "price/overlap.py", kind_of(asked)),
        "reconcile.memory.terms.*.predicted": Field("bytes that the plan has for this", "shardwise explain --term", "B",
                                                    "price/device_memory.py", kind_of(asked, memory=True)),
        "reconcile.memory.terms.*.measured": Field("bytes of the term's storages",
            "run/trainer/step_inspector.py", "B", watched, MEASURED),
    }  # fmt: skip
