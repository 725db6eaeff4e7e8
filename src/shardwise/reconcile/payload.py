"""A run against its plan as plain data: what `shardwise reconcile --json` prints."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from shardwise.planning.plan import Plan
from shardwise.reconcile.collectives import Collectives
from shardwise.reconcile.compare import Reconciliation

SCHEMA = "shardwise.reconcile/2"


def reconcile_payload(plan: Plan, found: Reconciliation) -> dict[str, Any]:
    """The versioned payload that `--json` prints."""
    time, memory = found.time, found.memory
    return {
        "schema": SCHEMA, "model": plan.model.name, "cluster": plan.cluster.name, "layout": str(plan.layout),
        "machine": found.machine, "noisy": found.noisy, "changes": dict(found.changes), "remarks": list(found.remarks),
        "time": {
            **asdict(time), "within": time.within, "rest_share": time.rest_share,
            "terms": [
                {**asdict(one), "difference_s": one.difference_s, "share": one.measured_s / time.measured_s} for one in time.terms
            ],
        },
        "attribution": {**asdict(found.attribution), "term": found.attribution.term.name, "ratio": found.attribution.ratio}
        if found.attribution
        else None,
        "memory": {
            **asdict(memory),
            "terms": [{**asdict(one), "within": one.within} for one in memory.terms],
            "total": {**asdict(memory.total), "within": memory.total.within},
        },
        "collectives": collectives_payload(found.collectives),
        "advice": list(found.advice),
    }  # fmt: skip


def collectives_payload(found: Collectives) -> dict[str, Any]:
    """The lists' part of a payload."""
    return {**asdict(found), "equal": found.equal, "miscounted": [
        {**one.issued._asdict(), "planned": one.planned, "found": one.found} for one in found.miscounted
    ]}  # fmt: skip
