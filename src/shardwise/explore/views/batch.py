"""The critical batch size: steps and tokens to a loss for each batch, and how long they take on this layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardwise.books.rules import BatchTradeoff, critical_batch_of_loss, tokens_per_param_optimal
from shardwise.cost.estimate import estimate
from shardwise.errors import InputError, ShardwiseError
from shardwise.explore.asked import Asked
from shardwise.explore.controls import controls
from shardwise.explore.controls.sizes import doublings
from shardwise.explore.views.head import head
from shardwise.model.counts import num_params
from shardwise.units import format_binary, parse_quantity

LOSS = 2.5  # nats a token: what a small model reaches; a choice, for the noise scale where nobody says one
SMALLEST, LARGEST = 1 << 16, 1 << 26  # tokens of the batches that are compared


def batch(asked: Asked) -> dict[str, Any]:
    """Steps S(B) and tokens E(B) to the same loss for batches of B tokens, and the days that they take where the layout runs.

    The detail `noise_tokens` is the gradient's noise scale, `min_steps` the fewest steps: without them the former is Kaplan et
    al.'s at a loss of `LOSS`, the latter what leaves the job's tokens (or Chinchilla's 20 for each parameter) at its own batch.
    """
    asked.require_legal()
    noise = _given(asked, "noise_tokens") or critical_batch_of_loss(LOSS)
    own = float(asked.job.global_batch_tokens)
    tokens = asked.job.tokens or tokens_per_param_optimal() * num_params(asked.model)
    steps = _given(asked, "min_steps") or tokens / (own + noise)
    found = BatchTradeoff(min_steps=steps, noise_tokens=noise)
    sizes = [size for size in doublings(int(own), SMALLEST, LARGEST) if size % asked.job.seq_len == 0]
    return head(asked) | {
        "noise_tokens": noise, "noise_given": asked.state.detail("noise_tokens") is not None, "min_steps": steps,
        "min_tokens": found.min_tokens, "critical_batch_tokens": found.critical_batch_tokens, "batch_tokens": own,
        "source": "McCandlish et al., An Empirical Model of Large-Batch Training, 2018",
        "formulas": {"steps": "S(B) = S_min · (1 + B_noise / B)", "tokens": "E(B) = S_min · (B + B_noise)",
                     "critical_batch_tokens": "B_crit = E_min / S_min = B_noise", "days": "S(B) · seconds of the step at B"},
        "rows": [_row(asked, found, size) for size in sizes], "controls": controls(asked),
        "noise_options": [_noise(size) for size in doublings(1 << 20, SMALLEST, LARGEST)],
    }  # fmt: skip


def _given(asked: Asked, name: str) -> float | None:
    text = asked.state.detail(name)
    if text is None:
        return None
    value = parse_quantity(text, what=name, unit="")
    if not 1 <= value <= 1e15:
        raise InputError(f"{name}: found {text!r}; 1 to 1e15 is required")
    return value


def _noise(size: int) -> dict[str, Any]:
    return {"value": format_binary(size), "edit": {"noise_tokens": format_binary(size)}, "problem": ""}


def _row(asked: Asked, found: BatchTradeoff, size: int) -> dict[str, Any]:
    """What a batch takes; seconds are None where the layout does not run it."""
    row = {
        "batch_tokens": size,
        "steps": found.steps(size),
        "tokens": found.tokens(size),
        "step_time_s": None,
        "days": None,
        "problem": "",
    }
    try:
        plan = asked.plan
        priced = estimate(plan.model, plan.cluster, replace(plan.job, global_batch_tokens=size), plan.layout)
    except ShardwiseError as error:
        return {**row, "problem": error.problems[0]}
    return {**row, "step_time_s": priced.step_time_s, "days": priced.step_time_s * found.steps(size) / 86400.0}
