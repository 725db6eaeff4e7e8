"""Provenance of the page's numbers: formula, inputs, unit and source of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from shardwise.layout import layout_degrees, num_micro_batches
from shardwise.model import model_flops_per_token
from shardwise.present.explorer.request import ViewRequest
from shardwise.price import mfu_format

EXACT = "exact: a count that follows from sizes and degrees"
MEASURED = "measured"
OPENED_PLAN = "the opened plan"  # the source of values that the catalogue lacks


BYTES = "a prediction: the bytes of what the instruction list holds"
BOUND = "a bound: kernels and links at the best that micro-benchmarks reach"


def kind_of(request: ViewRequest, *, memory: bool = False) -> str:
    """Return the kind of a layout's seconds (`memory`: of its bytes) in words: a bound, or a prediction."""
    calibration = request.cluster.calibration
    if memory:
        return BYTES
    if calibration is None:
        return BOUND
    return f"a prediction for {calibration.stack}, with a 90% interval of the step: {calibration.source}"


class Field(NamedTuple):
    """Provenance of a payload's number: meaning, formula, unit, source of the formula, kind (a bound, a prediction, measured).

    `inputs` are other numbers of the formula by symbol, each at its place in the payload.
    """

    words: str
    formula: str
    unit: str
    source: str
    kind: str
    inputs: Mapping[str, str] = MappingProxyType({})


# By the place of a number: keys and indices from the payload's root, with dots; `*` is any key, the same in the places of inputs.
Fields = Mapping[str, Field]


def fields_payload(fields: Fields) -> dict[str, dict[str, Any]]:
    """Return the fields as objects for JSON, by place.

    >>> fields_payload({"area": Field("of a square", "side²", "m²", "Euclid", EXACT, {"side": "side"})})["area"]["inputs"]
    {'side': 'side'}
    """
    return {place: {**field._asdict(), "inputs": dict(field.inputs)} for place, field in fields.items()}


def field_path(fields: Fields, path: str) -> str:
    """Return the path of a number if a field explains it, else "".

    >>> field_path({"rows.*.days": Field("days", "steps · seconds", "days", "", EXACT)}, "rows.3.days")
    'rows.3.days'
    """
    keys = path.split(".")
    patterns = (place.split(".") for place in fields)
    has_provenance = any(
        len(pattern) == len(keys) and all(key in ("*", name) for key, name in zip(pattern, keys, strict=True))
        for pattern in patterns
    )
    return path if has_provenance else ""


Inputs = Mapping[str, float]


class PlanNumber(NamedTuple):
    """A number of a plan: its meaning, its formula, its unit, the source of the formula, its value, and its inputs by name."""

    words: str
    formula: str
    unit: str
    source: str
    value_of: Callable[[ViewRequest], float]
    inputs: Callable[[ViewRequest], Inputs]


def _flops(request: ViewRequest) -> Inputs:
    job, cluster = request.plan.job, request.plan.cluster
    dtype = mfu_format(job)
    return {
        "FLOPs of the model for each token, forward and backward": model_flops_per_token(request.model, job.attended_tokens),
        "tokens of a batch": job.global_batch_tokens, "devices": cluster.num_devices,
        f"peak FLOP/s of {cluster.chip.name} in {dtype}": cluster.chip.peak(dtype), "step, s": request.plan.estimate.step_time_s,
    }  # fmt: skip


def _rate(request: ViewRequest) -> Inputs:
    return {
        "tokens of a batch": request.job.global_batch_tokens, "step, s": request.plan.estimate.step_time_s,
        "devices": request.cluster.num_devices,
    }  # fmt: skip


def _sequences(request: ViewRequest) -> Inputs:
    layout = request.layout
    return {
        "sequences of a batch": request.job.num_seqs, "replicas": layout.num_replicas,
        "sequences of a micro-batch": layout.micro_batch_seqs,
    }  # fmt: skip


def bubble(request: ViewRequest) -> float:
    """Return the idle over the ideal time of a pipeline's ranks."""
    idle_s, step_s = _idle(request).values()
    return idle_s / (step_s - idle_s)


def _idle(request: ViewRequest) -> Inputs:
    priced = request.plan.estimate
    return {"bubble, s": priced.time["bubble"], "step, s": priced.step_time_s}


def _terms(tree: str) -> Callable[[ViewRequest], Inputs]:
    def inputs(request: ViewRequest) -> Inputs:
        return {f"{tree}.{name}": value for name, value in getattr(request.plan.estimate, tree).items() if value}

    return inputs


def _room(request: ViewRequest) -> Inputs:
    priced = request.plan.estimate
    return {
        "memory of the fullest device, B": priced.memory_bytes,
        "memory that a device has, B": priced.memory_capacity_bytes,
    }


NUMBERS: Mapping[str, PlanNumber] = {
    "step_time_s": PlanNumber(
        "seconds of one optimizer step, of the slowest stage", "the sum of the terms of time", "s", "price/stage_step_time.py",
        lambda request: request.plan.estimate.step_time_s, _terms("time"),
    ),
    "tokens_per_s_per_device": PlanNumber(
        "tokens of a batch in the step's seconds, for each device", "tokens / (step · devices)", "tokens/s", "price/estimate.py",
        lambda request: request.plan.estimate.tokens_per_s_per_device, _rate,
    ),
    "mfu": PlanNumber(
        "model FLOPs utilisation: causal attention once, no recomputation", "FLOPs · tokens / (devices · peak · step)", "%",
        "Chowdhery et al., PaLM, 2022, appendix B", lambda request: request.plan.estimate.mfu, _flops,
    ),
    "hfu": PlanNumber(
        "hardware FLOPs utilisation: what devices run, recomputation included", "MFU · FLOPs run / FLOPs needed", "%",
        "Korthikanti et al. 2022, section 6.3", lambda request: request.plan.estimate.hfu,
        lambda request: {"MFU": request.plan.estimate.mfu},
    ),
    "memory_bytes": PlanNumber(
        "bytes of a device of the fullest stage", "the sum of the terms of memory", "B", "price/device_memory.py",
        lambda request: request.plan.estimate.memory_bytes, _terms("memory"),
    ),
    "margin": PlanNumber(
        "the free share of a device's memory", "1 - memory / capacity", "%", "price/estimate.py",
        lambda request: request.plan.estimate.margin, _room,
    ),
    "bound_s": PlanNumber(
        "seconds of the step with kernels and links at the best that micro-benchmarks reach",
        "the sum of the terms of time at these rates", "s", "hardware/stacks.py",
        lambda request: request.plan.bound_s or request.plan.estimate.step_time_s, lambda request: {},
    ),
    "bubble": PlanNumber(
        "idle over ideal time of a pipeline's ranks", "bubble / (step - bubble)", "%",
        "Tazi et al., The Ultra-Scale Playbook, 2025: the bubble's ratio", bubble, _idle,
    ),
    "num_micro_batches": PlanNumber(
        "micro-batches of the fullest replica in a step", "⌈⌈sequences / replicas⌉ / micro-batch⌉", "",
        "layout/rules/model_and_cluster_rules.py",
        lambda request: float(num_micro_batches(request.job, layout_degrees(request.layout))), _sequences,
    ),
}  # fmt: skip
MEMORY = ("memory_bytes", "margin")  # numbers of memory; the rest are of time
