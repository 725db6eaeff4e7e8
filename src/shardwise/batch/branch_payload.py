"""Compared branches as plain data: what `shardwise batch branch --json` prints."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Literal

from typing_extensions import TypedDict

from shardwise.batch.branches import BranchPoint, ComparedBranches

SCHEMA = "shardwise.batch_branches/1"


class BranchPayload(TypedDict):
    """A branch: its smoothed loss at the window's end, how far it is above the lowest of all smaller batches, and whether that is
    within the tolerance; None and why where it failed."""

    batch_tokens: float
    learning_rate: float
    steps: float
    loss: float | None
    held_out_loss: float | None
    excess: float | None
    is_within: bool | None
    failed: str | None


class BatchBranchesPayload(TypedDict):
    """Branches of a checkpoint, and the critical batch: the largest within the tolerance, in nats, of all smaller ones.
    `next_tokens` is the next larger batch that was tried."""

    schema: Literal["shardwise.batch_branches/1"]
    run: str
    step: int
    batch_tokens: float
    learning_rate: float
    window_tokens: float
    tolerance: float
    critical_batch_tokens: float
    next_tokens: float | None
    branches: list[BranchPayload]


def branches_payload(point: BranchPoint, found: ComparedBranches) -> dict[str, Any]:
    """The versioned payload."""
    branches = [asdict(one.branch) | {"excess": one.excess, "is_within": one.is_within} for one in found.compared]
    branches += [asdict(branch) | {"excess": None, "is_within": None} for branch in found.failed]
    return {
        "schema": SCHEMA, **asdict(point), "tolerance": found.tolerance,
        "critical_batch_tokens": found.critical_batch_tokens, "next_tokens": found.next_tokens, "branches": branches,
    }  # fmt: skip
