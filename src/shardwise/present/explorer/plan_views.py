"""Views of a plan: overview, memory, Pareto front, an opened run."""

from __future__ import annotations

from typing import Any

from shardwise.measure import read_run
from shardwise.measure.reconcile.reconciliation import reconcile
from shardwise.present.explorer.background_search import SEARCHING
from shardwise.present.explorer.control_values import Edit
from shardwise.present.explorer.controls import controls
from shardwise.present.explorer.number_provenance import (
    EXACT,
    MEASURED,
    OPENED_PLAN,
    Field,
    Fields,
    bubble,
    field_path,
    fields_payload,
    kind_of,
)
from shardwise.present.explorer.page_wording import page_wording
from shardwise.present.explorer.request import ViewRequest, head
from shardwise.present.explorer.run_card import training_run_fields, training_run_payload
from shardwise.present.explorer.state import layout_text
from shardwise.present.registry import payload_of
from shardwise.present.rendering.page_report import panels, report_to_json
from shardwise.present.reports.run import reconcile_report
from shardwise.price import Estimate, Problem
from shardwise.search import compare_memory
from shardwise.search.plan_file import plan_payload
from shardwise.values import InputError, MissingValueError, ShardwiseError


def overview(request: ViewRequest) -> dict[str, Any]:
    """Return the payloads of `shardwise estimate` and `shardwise memory`; problems in their place if the layout cannot run."""
    return head(request) | {"controls": controls(request), **_priced(request)}


def _priced(request: ViewRequest) -> dict[str, Any]:
    try:
        if request.problems:
            return {"problems": list(request.problems), "estimate": None, "memory": None, "verdict": None}
        plan = request.plan
    except ShardwiseError as error:
        is_known = not isinstance(error, MissingValueError)
        return {
            "problems": list(error.problems), "is_known": is_known, "estimate": None, "memory": None, "verdict": None
        }  # fmt: skip
    return {
        "problems": [], "estimate": plan_payload(plan),
        "memory": payload_of(compare_memory(plan.problem, [(plan.job, plan.layout)])), "verdict": _verdict(request),
        "training_run": training_run_payload(request), "notes": _notes(plan.estimate),
        "fields": fields_payload({**_overview_provenance(request), **training_run_fields(request),
                                  **(run_fields(request) if request.measured else {})}),
        **_measured(request),
    }  # fmt: skip


def _notes(priced: Estimate) -> list[str]:
    """Return the notes of an estimate in the page's wording; waste first."""
    waste = [
        f"a batch without waste: {value:,.0f} tokens"
        if name == "nearest_full_batch_tokens"
        else f"waste by uneven {name}: {value:.1%}"
        for name, value in priced.waste.items()
    ]
    return [*waste, *map(page_wording, priced.notes)]


def _measured(request: ViewRequest) -> dict[str, Any]:
    """Return the payload of `shardwise reconcile`, if this is the layout of the opened run."""
    return {"reconcile": payload_of(request.measured)} if request.measured else {}


def _overview_provenance(request: ViewRequest) -> Fields:
    """Return the provenance of the numbers that are no terms; `why` has that of the terms."""
    kind, memory, step = kind_of(request), kind_of(request, memory=True), "estimate.estimate.step_time_s"
    best, chip = "search.best.step_time_s", request.cluster.chip
    source = "hardware/calibration_constants.py: the spread of measured over predicted step times of published runs"
    return {
        "verdict.times_the_best": Field(
            "the step over that of the best layout that the search found", "step / step of the best", "×", "search/planner.py",
            kind,
            {"step": step, "step of the best": best},
        ),
        step: Field("seconds of one optimizer step", "the sum of the terms of time", "s", "price/stage_step_time.py", kind),
        best: Field(
            "seconds of a step of the best layout", "the sum of the terms of time", "s", "price/stage_step_time.py", kind
        ),
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
            "memory of a device", "given", "B",
            chip.sources.get("usable_bytes", chip.sources.get("memory_bytes", OPENED_PLAN)), EXACT,
        ),
    }  # fmt: skip


def _verdict(request: ViewRequest) -> dict[str, Any]:
    """Return if the layout fits, its step over that of the best (None: still unknown), and what bounds it."""
    priced = request.plan.estimate
    best = request.search["best"] if request.search else None
    return {
        "fits": priced.fits, "verdict": priced.verdict, "margin": priced.margin, "bound": priced.bound, "bubble": bubble(request),
        "times_the_best": priced.step_time_s / best["step_time_s"] if best else None,
        "is_best": best is not None and best["layout"] == layout_text(request.layout),
        "kind": "prediction" if priced.interval90 else "bound",
    }  # fmt: skip


# Models of the playbook's memory widget; the smallest Llama 3.2 in place of a tiny model.
PRESETS = ("llama-3.2-1b", "llama-3-8b", "llama-3-70b", "llama-3-405b")


def memory(request: ViewRequest) -> dict[str, Any]:
    """Return the payload of `shardwise memory`, with controls and presets."""
    payload = head(request) | {
        "controls": controls(request, free=True),
        "memory": None,
        "presets": _presets(request),
        "problems": list(request.problems),
    }
    if request.problems:
        return payload
    try:
        return payload | {"memory": payload_of(compare_memory(_problem(request), [(request.job, request.plan.layout)]))}
    except ShardwiseError as error:
        return payload | {"problems": list(error.problems)}


def _problem(request: ViewRequest) -> Problem:
    return Problem(request.model, request.cluster, request.job)


def _presets(request: ViewRequest) -> list[dict[str, Any]]:
    """Return models in their own sizes, on the current layout."""
    removed: Edit = {key: None for key, _ in request.state.changes if key.startswith("model.")}
    return [{"value": name, "edit": {**removed, "model": name}} for name in PRESETS]


def pareto(request: ViewRequest) -> dict[str, Any]:
    """Return the search's report so far, and the time and memory of the current layout."""
    return {
        "search": dict(request.search or SEARCHING),
        "memory_capacity_bytes": request.cluster.chip.capacity_bytes,
        "own": _current_point(request),
        "fields": fields_payload(_pareto_provenance(request)),
    }


def _pareto_provenance(request: ViewRequest) -> Fields:
    step = Field(
        "seconds of one optimizer step",
        "the sum of the terms of time",
        "s",
        "price/stage_step_time.py",
        kind_of(request),
    )
    memory = Field("bytes of a device of the fullest stage", "the sum of the terms of memory", "B", "price/device_memory.py",
                   kind_of(request, memory=True))  # fmt: skip
    source = "search/vectorised/search_layouts.py: every legal layout of the job is priced or bounded"
    return {
        "search.num_layouts": Field("legal layouts of the job", "Π choices less those that break a rule", "", source, EXACT),
        "search.num_fitting": Field("those that fit a device's memory", "memory ≤ capacity", "", source, EXACT),
        "search.front.*.step_time_s": step, "search.front.*.memory_bytes": memory,
    }  # fmt: skip


def _current_point(request: ViewRequest) -> dict[str, Any] | None:
    try:
        request.require_legal()
        priced = request.plan.estimate
    except ShardwiseError:
        return None
    return {"text": str(request.layout), "step_time_s": priced.step_time_s, "memory_bytes": priced.memory_bytes}


def run(request: ViewRequest) -> dict[str, Any]:
    """Return the payload of `shardwise reconcile`, and its report.

    Raises `InputError` without a run, and for another layout than it ran.
    """
    if request.resolver.run is None:
        raise InputError("run: no run was opened; start the explorer with a plan and the folder of its run")
    request.require_legal()
    reconciliation = request.measured or reconcile(request.plan, read_run(request.plan, request.resolver.run))
    fields = run_fields(request)
    report = panels(reconcile_report(reconciliation), "Measured against predicted")
    return head(request) | {
        "controls": controls(request), "fields": fields_payload(fields), "reconcile": payload_of(reconciliation),
        "report": report_to_json(report, lambda path: field_path(fields, f"reconcile.{path}")),
    }  # fmt: skip


def run_fields(request: ViewRequest) -> Fields:
    """Return the provenance of the numbers of `reconcile`."""
    time, log, watched = "reconcile.time.", "the run's log", "the run's watched step"
    predicted = Field(
        "seconds that the plan has for this", "a term of the plan", "s", "price/stage_step_time.py", kind_of(request)
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
                                         "price/overlap.py", kind_of(request)),
        "reconcile.memory.terms.*.predicted": Field("bytes that the plan has for this", "a term of the plan", "B",
                                                    "price/device_memory.py", kind_of(request, memory=True)),
        "reconcile.memory.terms.*.measured": Field("bytes of the term's storages",
            "run/trainer/step_inspector.py", "B", watched, MEASURED),
    }  # fmt: skip
