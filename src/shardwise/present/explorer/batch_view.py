"""View of the critical batch size: steps and tokens to a loss for each batch, and their days on this layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardwise.batch_size import BatchTradeoff
from shardwise.batch_size.noise_scale import critical_batch_of_loss
from shardwise.present.explorer.control_values import Option, doublings
from shardwise.present.explorer.controls import controls
from shardwise.present.explorer.number_provenance import EXACT, Field, Fields, fields_payload, kind_of
from shardwise.present.explorer.request import ViewRequest, head
from shardwise.present.explorer.run_card import run_tokens
from shardwise.price import Problem
from shardwise.price.estimate import estimate
from shardwise.values import InputError, ShardwiseError, format_binary, parse_quantity

LOSS = 2.5  # nats a token: what a small model reaches; a choice, the noise scale's default
SMALLEST, LARGEST = 1 << 16, 1 << 26  # tokens of the batches that are compared


def batch(request: ViewRequest) -> dict[str, Any]:
    """Return steps S(B) and tokens E(B) to the same loss for batches of B tokens, and their days where the layout runs.

    The detail `noise_tokens` is the gradient's noise scale (default: Kaplan et al.'s at a loss of `LOSS`), `min_steps` the fewest
    steps (default: at the job's batch the run takes the job's tokens, or Chinchilla's 20 for each parameter).
    """
    request.require_legal()
    noise = _quantity_detail(request, "noise_tokens") or critical_batch_of_loss(LOSS)
    batch = float(request.job.global_batch_tokens)
    steps = _quantity_detail(request, "min_steps") or run_tokens(request) / (batch + noise)
    tradeoff = BatchTradeoff(min_steps=steps, noise_tokens=noise)
    sizes = [size for size in doublings(int(batch), SMALLEST, LARGEST) if size % request.job.seq_len == 0]
    return head(request) | {
        "noise_tokens": noise, "noise_given": request.state.detail("noise_tokens") is not None, "min_steps": steps,
        "min_tokens": tradeoff.min_tokens, "critical_batch_tokens": tradeoff.critical_batch_tokens, "batch_tokens": batch,
        "times_min_steps": tradeoff.steps(batch) / steps, "times_min_tokens": tradeoff.tokens(batch) / tradeoff.min_tokens,
        "rows": [_row(request, tradeoff, size) for size in sizes], "controls": controls(request),
        "fields": fields_payload(_fields(request)),
        "noise_options": [_noise_option(size) for size in doublings(1 << 20, SMALLEST, LARGEST)],
    }  # fmt: skip


def _fields(request: ViewRequest) -> Fields:
    source = "McCandlish et al., An Empirical Model of Large-Batch Training, 2018, equations 2.11 and 2.12"
    kind = "a prediction of that model, without an interval"
    row, fewest, noise = "rows.*.", {"S_min": "min_steps"}, {"B_noise": "noise_tokens"}
    is_measured = request.state.detail("noise_tokens") is not None
    return {
        "noise_tokens": Field("the gradient's noise scale", "B_noise, measured by a run of yours", "tokens", source, "given")
        if is_measured
        else Field(
            f"the gradient's noise scale at a loss of {LOSS:g} nats", "2e8 / loss^(1 / 0.21)", "tokens",
            "Kaplan et al., Scaling Laws for Neural Language Models, 2020, equation 5.3", "an assumption: none was given",
        ),
        "critical_batch_tokens": Field(
            "the batch that takes twice the fewest steps and twice the fewest tokens", "B_crit = E_min / S_min = B_noise",
            "tokens", source, kind, {"E_min": "min_tokens", **fewest},
        ),
        "min_steps": Field(
            "the fewest steps, with batches without noise: so many that the job takes its tokens, or 20 for each parameter "
            "(Hoffmann et al. 2022, table 3)", "S_min = tokens of the job / (B + B_noise)",
            "steps", source, kind, {"B": "batch_tokens", **noise},
        ) if request.state.detail("min_steps") is None else Field("the fewest steps", "S_min, given", "steps", source, "given"),
        "min_tokens": Field("the fewest tokens, with ever smaller batches", "E_min = B_noise · S_min", "tokens", source, kind,
                            {**noise, **fewest}),
        "batch_tokens": Field("tokens of a step of this job", "given", "tokens", "the job", "given"),
        "times_min_steps": Field("steps of this batch over the fewest", "1 + B_noise / B", "×", source, kind,
                                 {"B": "batch_tokens", **noise}),
        "times_min_tokens": Field("tokens of this batch over the fewest", "1 + B / B_noise", "×", source, kind,
                                  {"B": "batch_tokens", **noise}),
        row + "batch_tokens": Field("tokens of a step", "a power of two, or this job's", "tokens", "the job", EXACT),
        row + "steps": Field("steps to the same loss", "S(B) = S_min · (1 + B_noise / B)", "steps", source, kind,
                             {"B": row + "batch_tokens", **fewest, **noise}),
        row + "tokens": Field("tokens to the same loss", "E(B) = S_min · (B + B_noise)", "tokens", source, kind,
                              {"B": row + "batch_tokens", **fewest, **noise}),
        row + "step_time_s": Field("seconds of a step of this batch on the layout", "the sum of the terms of time", "s",
                                   "price/stage_step_time.py", kind_of(request)),
        row + "days": Field("days to the same loss on the layout", "S(B) · seconds of a step / 86,400", "days", source,
                            kind_of(request), {"S(B)": row + "steps", "seconds of a step": row + "step_time_s"}),
        row + "days_interval90.*": Field(
            "an end of the 90% prediction interval: the same with the step at that end of its interval",
            "S(B) · seconds of a step / 86,400", "days", source, kind_of(request),
        ),
    }  # fmt: skip


def _quantity_detail(request: ViewRequest, name: str) -> float | None:
    text = request.state.detail(name)
    if text is None:
        return None
    value = parse_quantity(text, label=name, unit="")
    if not 1 <= value <= 1e15:
        raise InputError(f"{name}: found {text!r}; 1 to 1e15 is required")
    return value


def _noise_option(size: int) -> dict[str, Any]:
    return Option(value=format_binary(size), edit={"noise_tokens": format_binary(size)}).payload()


def _row(request: ViewRequest, tradeoff: BatchTradeoff, size: int) -> dict[str, Any]:
    """Return the costs of a batch; seconds and days are None where the layout does not run it."""
    row = {
        "batch_tokens": size,
        "steps": tradeoff.steps(size),
        "tokens": tradeoff.tokens(size),
        "step_time_s": None,
        "days": None,
        "days_interval90": None,
        "problem": "",
    }
    try:
        plan = request.plan
        priced = estimate(Problem(plan.model, plan.cluster, replace(plan.job, global_batch_tokens=size)), plan.layout)
    except ShardwiseError as error:
        return {**row, "problem": error.problems[0]}
    steps = tradeoff.steps(size)
    interval = priced.interval90 and [end_s * steps / 86400.0 for end_s in priced.interval90]
    days = priced.step_time_s * steps / 86400.0
    return {**row, "step_time_s": priced.step_time_s, "days": days, "days_interval90": interval}
