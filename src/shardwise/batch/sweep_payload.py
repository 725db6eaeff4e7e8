"""The runs of a sweep as plain data: what `shardwise batch sweep --json` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from typing_extensions import TypedDict

from shardwise.batch.runs import BatchRun

SCHEMA = "shardwise.batch_runs/1"


class BatchRunPayload(TypedDict):
    """A run: its steps and tokens to the loss, None where it did not reach it, which `failed` says."""

    batch_tokens: float
    learning_rate: float | None
    seed: int
    steps: float | None
    tokens: float | None
    target_loss: float | None
    failed: str | None


class BatchRunsPayload(TypedDict):
    """All runs of a sweep over batches, those with a learning rate that is not the best of their batch too."""

    schema: Literal["shardwise.batch_runs/1"]
    runs: list[BatchRunPayload]


def sweep_payload(runs: Sequence[BatchRun]) -> dict[str, Any]:
    """The versioned payload."""
    names = tuple(BatchRunPayload.__annotations__)
    return {"schema": SCHEMA, "runs": [{name: getattr(run, name) for name in names} for run in runs]}
