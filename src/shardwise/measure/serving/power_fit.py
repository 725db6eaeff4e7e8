"""Fit of the power of a device to the readings beside published batches: an idle share, and slopes by use.

Readings are means over a batch by a device's rated power. Of the 44 eight are left out: single inputs of 4,096 and 8,192 tokens,
whose means fall (to a quarter of their neighbours') where both uses rise, so that they are over more than the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwise.measure.serving.batch_rows import BatchRow, published_batch_rows
from shardwise.measure.serving.row_stack import stack_rows
from shardwise.serve.device_power import DeviceUse
from shardwise.values import Payload

Array = NDArray[np.float64]
LONGEST_INPUT = 2048  # tokens of an input beyond which a reading is not of its run alone


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerValidation(Payload):
    """Shares of a rated power that `num_rows` readings lead to, and errors of readings whose model and degree are left out:
    their `mean` relative error, and the `deviation` of their logarithms."""

    num_rows: int
    idle: float
    memory: float
    compute: float
    mean_error: float
    deviation: float


def power_rows() -> tuple[BatchRow, ...]:
    """Return the batches with a reading of their own."""
    return tuple(
        row
        for row in published_batch_rows()
        if row.is_whole and row.mean_power_share is not None and row.isl <= LONGEST_INPUT
    )


def batch_uses(rows: Sequence[BatchRow]) -> Array:
    """Return for each batch 1 and the uses of memory and of the peak over its measured time: rows × 3."""
    uses = np.zeros((len(rows), 3))
    for stack in stack_rows([row.serving_row for row in rows]):
        batches = np.array([rows[i].batch for i in stack.index], dtype=np.float64)
        passes = np.array([rows[i].osl - 1 for i in stack.index], dtype=np.float64)
        seconds = np.array([rows[i].request_s for i in stack.index])
        routing = stack.rates.routing
        inputs = DeviceUse.of(stack.work.work(0.0 * batches, routing, prompts=batches), stack.rates)
        tokens = DeviceUse.of(stack.work.work(batches, routing), stack.rates)
        use = (inputs + tokens.scaled(passes)).scaled(1.0 / seconds)
        uses[stack.index] = np.stack([np.ones(len(batches)), use.memory, use.compute], axis=1)
    return uses


def validate_power() -> PowerValidation:
    """Return the fit of all readings, and its errors with each model and degree left out in turn.

    >>> validate_power().num_rows
    36
    """
    rows = power_rows()
    uses: Array = batch_uses(rows)
    shares: Array = np.array([row.mean_power_share or 0.0 for row in rows], dtype=np.float64)
    groups = np.array([f"{row.model} tp={row.tp}" for row in rows])
    residuals: Array = np.zeros(len(rows))
    for group in dict.fromkeys(groups.tolist()):
        left_out = groups == group
        predicted = uses[left_out] @ _solve(uses[~left_out], shares[~left_out])
        residuals[left_out] = np.log(predicted / shares[left_out])
    idle, memory, compute = _solve(uses, shares).tolist()
    return PowerValidation(
        num_rows=len(rows), idle=idle, memory=memory, compute=compute,
        mean_error=float(np.abs(np.expm1(residuals)).mean()), deviation=float(np.sqrt(np.mean(residuals**2))),
    )  # fmt: skip


def _solve(uses: Array, shares: Array) -> Array:
    """Return the coefficients of least squares."""
    return np.asarray(np.linalg.lstsq(uses, shares, rcond=None)[0], dtype=np.float64)
