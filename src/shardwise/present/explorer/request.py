"""A question of the page: its state with model, cluster, job and layout resolved, and the head of every answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from shardwise.hardware import Cluster
from shardwise.layout import Layout, violations
from shardwise.measure import Reconciliation, read_run
from shardwise.measure.reconcile.reconciliation import reconcile
from shardwise.model import Architecture, Job
from shardwise.present.explorer.opened_plan import Known
from shardwise.present.explorer.state import State, write_query
from shardwise.search import Plan, plan_layout
from shardwise.values import ShardwiseError, raise_problems

WORKED_OUT = ("plan", "problems", "measured")  # of a layout, whatever the view


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A state, its model, cluster, job and layout, and what a search has found so far (None: nothing yet)."""

    state: State
    model: Architecture
    cluster: Cluster
    job: Job
    layout: Layout
    known: Known
    found: Mapping[str, Any] | None = None

    @cached_property
    def problems(self) -> tuple[str, ...]:
        """Why the layout cannot run; empty where it can."""
        return tuple(self.problems_of(self.layout))

    def problems_of(self, layout: Layout) -> list[str]:
        """Why a layout cannot run, every rule at once."""
        try:
            self.model.require_positions(self.job.seq_len)
        except ShardwiseError as error:
            return list(error.problems)
        return violations(self.model, self.job, self.cluster.num_devices, layout)

    def require_legal(self) -> None:
        """Raise `InputError` with everything that is wrong with the layout."""
        raise_problems(self.problems)

    @cached_property
    def plan(self) -> Plan:
        """The layout as `shardwise estimate` prices it. Raises `InputError` with its problems."""
        return plan_layout(self.model, self.cluster, self.job, self.layout)

    @cached_property
    def measured(self) -> Reconciliation | None:
        """The opened run held against its plan where this is its plan's job and layout; None anywhere else."""
        known, start = self.known, self.known.start
        if known.run is None or (self.state.setting, self.layout) != (start.setting, start.layout):
            return None
        return reconcile(self.plan, read_run(self.plan, known.run))

    def again(self, state: State, found: Mapping[str, Any] | None) -> Asked:
        """The same layout asked for in another view, with what was worked out of it."""
        other = replace(self, state=state, found=found)
        other.__dict__.update({name: self.__dict__[name] for name in WORKED_OUT if name in self.__dict__})
        return other


def asked(state: State, known: Known, found: Mapping[str, Any] | None = None) -> Asked:
    """The values of a state. Raises `InputError` for names that are not known and values that cannot be."""
    cluster = known.cluster(state)
    best = Layout.parse(found["best"]["layout"]) if found and found.get("best") else None
    layout = state.layout or best or first_layout(cluster.num_devices)
    return Asked(
        state=replace(state, layout=layout), model=known.model(state), cluster=cluster, job=known.job(state), layout=layout,
        known=known, found=found,
    )  # fmt: skip


def first_layout(num_devices: int) -> Layout:
    """Where a search has not come to an end: parameters sharded over all devices (ZeRO-3)."""
    return Layout(fsdp=num_devices, zero_stage=3) if num_devices > 1 else Layout()


def head(asked: Asked) -> dict[str, Any]:
    """What every view has: the whole address, the layout in words, and what a search found so far."""
    state = asked.state
    return {
        "view": state.view, "query": write_query(state), "layout_text": str(asked.layout),
        "model_name": asked.model.name, "cluster_name": asked.cluster.name, "search": _search(asked), "problems": [],
        "has_run": asked.known.run is not None,
    }  # fmt: skip


def _search(asked: Asked) -> dict[str, Any] | None:
    """How far the search is and the best it found; the front is a view's own."""
    found = asked.found
    if found is None:
        return None
    best = found["best"]
    shown = best and {name: best[name] for name in ("layout", "text", "step_time_s", "memory_bytes")}
    return {"state": found["state"], "best": shown, "problems": found["problems"]}
