"""The whole training run of a layout: tokens, days, dollars and energy, with the interval that the step's gives them."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any

from shardwise.book_formulas.rules import tokens_per_param_optimal
from shardwise.model import Architecture, Job, num_params
from shardwise.present.explorer.number_provenance import EXACT, Field, Fields, kind_of
from shardwise.present.explorer.request import ViewRequest
from shardwise.price import Reliability
from shardwise.price.training_run import RunTotals, checkpoint_seconds, run_totals

SCALED = ("ideal_days", "days", "usd", "energy_mwh")  # quantities that follow the seconds of a step
OPTIMAL_SOURCE = "Hoffmann et al., Training Compute-Optimal Large Language Models, 2022, table 3"
RELIABILITY = Reliability()  # the explorer changes none of its rates
PRICE_MODULE = "price/training_run.py"


def run_tokens(request: ViewRequest) -> float:
    """Return the tokens of the run: those of the job, else the compute-optimal 20 for each parameter."""
    return request.job.tokens or tokens_per_param_optimal() * num_params(request.model)


def training_run_payload(request: ViewRequest) -> dict[str, Any]:
    """Return the run as `shardwise estimate --json` has it under `run`, and the ends of the 90% interval of what follows a step.

    Days, dollars and MWh; those without a sourced price or power are None, and `missing` has the reason. Raises `InputError` for
    a run that never ends.
    """
    priced = request.plan.estimate
    tokens, chip = run_tokens(request), request.cluster.chip
    num_steps = tokens / request.job.global_batch_tokens
    run, *ends = (
        _totals(request, tokens, num_steps, step) for step in (priced.step_time_s, *(priced.interval90 or ()))
    )
    return {
        "tokens": tokens, "num_steps": math.ceil(num_steps), "goodput": run.goodput, "chip_hours": run.chip_hours,
        **{name: getattr(run, name) for name in SCALED},
        "interval90": {name: [getattr(end, name) for end in ends] if ends and getattr(run, name) is not None else None
                       for name in SCALED},
        "price_date": chip.price_date, "assumes_optimal_tokens": request.job.tokens is None,
        "price_usd_per_hour": chip.price_usd_per_hour, "power_w": chip.power_w, "pue": RELIABILITY.pue,
        "missing": _missing(request),
    }  # fmt: skip


def _totals(request: ViewRequest, tokens: float, num_steps: float, step_time_s: float) -> RunTotals:
    """Price the run with steps of so many seconds."""
    problem = replace(request.plan.problem, job=replace(request.job, tokens=tokens))
    checkpoint_s = _checkpoint_seconds(request.model, request.job, request.cluster.num_devices)
    return run_totals(problem, num_steps, step_time_s, checkpoint_s, RELIABILITY)


# A drag prices many layouts of one job, which share it; counting the parameters takes as long as pricing a layout.
@lru_cache(maxsize=16)
def _checkpoint_seconds(architecture: Architecture, job: Job, num_devices: int) -> float:
    return checkpoint_seconds(architecture, job, num_devices, RELIABILITY)


def _missing(request: ViewRequest) -> dict[str, str]:
    """Return the reasons why quantities are unknown, by name."""
    chip = request.cluster.chip
    reasons = {
        "usd": chip.price_usd_per_hour is None and f"no sourced price of an hour of {chip.name}",
        "energy_mwh": chip.power_w is None and f"no sourced power of {chip.name}",
    }
    return {name: reason for name, reason in reasons.items() if reason}


def training_run_fields(request: ViewRequest) -> Fields:
    """Return the provenance of the card's numbers, without the unknown ones."""
    kind, place, chip = kind_of(request), "training_run.", request.cluster.chip
    tokens = Field("tokens of the whole run", "given", "tokens", "the job", "given") if request.job.tokens else Field(
        "compute-optimal tokens of the whole run", "20 · parameters", "tokens", OPTIMAL_SOURCE,
        "an assumption: the job names no tokens",
    )  # fmt: skip
    interval = "an end of the 90% prediction interval: the same with the step at that end of its interval"
    fields = {
        "tokens": tokens,
        "num_steps": Field("optimizer steps of the run", "⌈tokens / tokens of a batch⌉", "steps", PRICE_MODULE, EXACT,
                           {"tokens": place + "tokens"}),
        "ideal_days": Field("days without interruptions", "tokens / batch · step time", "days", PRICE_MODULE, kind,
                            {"tokens": place + "tokens", "step": "estimate.estimate.step_time_s"}),
        "goodput": Field("share of the time that trains: without checkpoints, restarts and repeated steps",
                         "t / (M · e^((R + d) / M) · (e^((t + d) / M) - 1))", "%", f"{PRICE_MODULE}: Daly 2006", kind),
        "days": Field("days with interruptions", "ideal days / goodput", "days", PRICE_MODULE, kind,
                      {"ideal days": place + "ideal_days", "goodput": place + "goodput"}),
        "chip_hours": Field("hours of all devices", "devices · days · 24", "hours", PRICE_MODULE, kind, {"days": place + "days"}),
        "usd": Field("dollars of all devices from the first step to the last", "chip-hours · price of a chip-hour", "USD",
                     chip.sources.get("price_usd_per_hour", PRICE_MODULE), kind,
                     {"chip-hours": place + "chip_hours", "price, USD/h": place + "price_usd_per_hour"}),
        "energy_mwh": Field("energy of the chips; hosts and networks are left out", "chip-hours · watts of a chip · PUE / 10⁶",
                            "MWh", chip.sources.get("power_w", PRICE_MODULE), kind,
                            {"chip-hours": place + "chip_hours", "watts": place + "power_w", "PUE": place + "pue"}),
    }  # fmt: skip
    if request.plan.estimate.interval90:
        fields |= {
            f"interval90.{name}.*": fields[name]._replace(words=interval, inputs={})
            for name in ("days", "usd", "energy_mwh")
        }
    missing = _missing(request)
    return {
        place + name: field for name, field in fields.items() if not any(part in missing for part in name.split("."))
    }
