"""A question of the page: its state with model, cluster, job and layout resolved, and the head of every answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from shardwise.hardware import Cluster
from shardwise.layout import Layout, violations
from shardwise.measure import Reconciliation, read_run
from shardwise.measure.reconcile.reconciliation import reconcile
from shardwise.model import Architecture, Job
from shardwise.present.explorer.opened_plan import Known
from shardwise.present.explorer.state import State, write_query
from shardwise.search import Plan, plan_layout
from shardwise.values import ShardwiseError, raise_problems

LayoutSource = Literal["address", "search", "fallback"]
COMPUTED = ("plan", "problems", "measured")  # cached properties that do not depend on the view


@dataclass(frozen=True, kw_only=True)
class ViewRequest:
    """A state, its model, cluster, job and layout, and what a search has found so far (None: nothing is searched).

    `layout_source` says where the layout is from: the address, a search's best, or the fallback until a search has its best.
    """

    state: State
    model: Architecture
    cluster: Cluster
    job: Job
    layout: Layout
    known: Known
    search: Mapping[str, Any] | None = None
    layout_source: LayoutSource = "address"

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

    def take_results(self, other: ViewRequest) -> None:
        """Take over what was computed for the same layout in another view."""
        self.__dict__.update({name: other.__dict__[name] for name in COMPUTED if name in other.__dict__})


def resolve_request(state: State, known: Known, search: Mapping[str, Any] | None = None) -> ViewRequest:
    """The values of a state. Raises `InputError` for names that are not known and values that cannot be."""
    state = known.with_usual_job(state)
    cluster = known.cluster(state)
    best = Layout.parse(search["best"]["layout"]) if search and search.get("best") else None
    layout = state.layout or best or first_layout(cluster.num_devices)
    source: LayoutSource = "address" if state.layout else "search" if best else "fallback"
    return ViewRequest(
        state=replace(state, layout=layout), model=known.model(state), cluster=cluster, job=known.job(state), layout=layout,
        known=known, search=search, layout_source=source,
    )  # fmt: skip


def first_layout(num_devices: int) -> Layout:
    """Where a search has not come to an end: parameters sharded over all devices (ZeRO-3)."""
    return Layout(fsdp=num_devices, zero_stage=3) if num_devices > 1 else Layout()


def head(request: ViewRequest) -> dict[str, Any]:
    """What every view has: the whole address, the layout in words, and what a search found so far."""
    state = request.state
    return {
        "view": state.view, "query": write_query(state), "layout_text": str(request.layout),
        "model_name": request.model.name, "cluster_name": request.cluster.name, "search": _search(request), "problems": [],
        "has_run": request.known.run is not None, "layout_source": request.layout_source,
    }  # fmt: skip


def _search(request: ViewRequest) -> dict[str, Any] | None:
    """How far the search is and the best it found; the front is a view's own."""
    search = request.search
    if search is None:
        return None
    best = search["best"]
    shown = best and {name: best[name] for name in ("layout", "text", "step_time_s", "memory_bytes")}
    return {"state": search["state"], "best": shown, "problems": search["problems"]}
