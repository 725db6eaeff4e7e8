"""A run of the opened plan beside what was predicted: what `shardwise reconcile` prints."""

from __future__ import annotations

from typing import Any

from shardwise.errors import InputError
from shardwise.explore.asked import Asked
from shardwise.explore.controls import controls
from shardwise.explore.views.head import head
from shardwise.reconcile.compare import reconcile
from shardwise.reconcile.payload import reconcile_payload
from shardwise.reconcile.read import read_run


def run(asked: Asked) -> dict[str, Any]:
    """The payload of `shardwise reconcile`. Raises `InputError` where no run was opened, and for another layout than it ran."""
    if asked.known.run is None:
        raise InputError("run: no run was opened; shardwise explore plan.json --run FOLDER is required")
    asked.require_legal()
    return head(asked) | {
        "controls": controls(asked),
        "reconcile": reconcile_payload(asked.plan, reconcile(asked.plan, read_run(asked.plan, asked.known.run))),
    }
