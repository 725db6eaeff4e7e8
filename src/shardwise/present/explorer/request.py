"""Request of the page: a state with model, cluster, job and layout resolved, and the head of every answer."""

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
from shardwise.present.explorer.opened_plan import NameResolver
from shardwise.present.explorer.state import State, write_query
from shardwise.search import Plan, plan_layout
from shardwise.values import ShardwiseError, raise_problems

LayoutSource = Literal["address", "search", "fallback"]
COMPUTED = ("plan", "problems", "measured")  # cached properties that do not depend on the view


@dataclass(frozen=True, kw_only=True)
class ViewRequest:
    """A state, its model, cluster, job and layout, and the search's report so far (None: nothing is searched).

    `layout_source` says where the layout is from: the address, a search's best, or the fallback until a search has its best.
    """

    state: State
    model: Architecture
    cluster: Cluster
    job: Job
    layout: Layout
    resolver: NameResolver
    search: Mapping[str, Any] | None = None
    layout_source: LayoutSource = "address"

    @cached_property
    def problems(self) -> tuple[str, ...]:
        """Return why the layout cannot run; empty if it can."""
        return tuple(self.problems_of(self.layout))

    def problems_of(self, layout: Layout) -> list[str]:
        """Return why a layout cannot run: every rule that it breaks."""
        try:
            self.model.require_positions(self.job.seq_len)
        except ShardwiseError as error:
            return list(error.problems)
        return violations(self.model, self.job, self.cluster.num_devices, layout)

    def require_legal(self) -> None:
        """Raise `InputError` with all problems of the layout."""
        raise_problems(self.problems)

    @cached_property
    def plan(self) -> Plan:
        """Return the plan of the layout, priced as by `shardwise estimate`. Raises `InputError` with its problems."""
        return plan_layout(self.model, self.cluster, self.job, self.layout)

    @cached_property
    def measured(self) -> Reconciliation | None:
        """Return the opened run compared with its plan; None for another job or layout than the plan's."""
        run, start = self.resolver.run, self.resolver.start
        if run is None or (self.state.setting, self.layout) != (start.setting, start.layout):
            return None
        return reconcile(self.plan, read_run(self.plan, run))

    def take_results(self, request: ViewRequest) -> None:
        """Take over the results of a request of the same layout in another view."""
        self.__dict__.update({name: request.__dict__[name] for name in COMPUTED if name in request.__dict__})


def resolve_request(state: State, resolver: NameResolver, search: Mapping[str, Any] | None = None) -> ViewRequest:
    """Return the request of a state. Raises `InputError` for unknown names and invalid values."""
    state = resolver.with_usual_job(state)
    cluster = resolver.cluster(state)
    best = Layout.parse(search["best"]["layout"]) if search and search.get("best") else None
    layout = state.layout or best or first_layout(cluster.num_devices)
    source: LayoutSource = "address" if state.layout else "search" if best else "fallback"
    return ViewRequest(
        state=replace(state, layout=layout), model=resolver.model(state), cluster=cluster, job=resolver.job(state), layout=layout,
        resolver=resolver, search=search, layout_source=source,
    )  # fmt: skip


def first_layout(num_devices: int) -> Layout:
    """Return the layout until a search has ended: parameters sharded over all devices (ZeRO-3)."""
    return Layout(fsdp=num_devices, zero_stage=3) if num_devices > 1 else Layout()


def head(request: ViewRequest) -> dict[str, Any]:
    """Return the fields of every view: the full address, the layout as text, and the search's report so far."""
    state = request.state
    return {
        "view": state.view, "query": write_query(state), "layout_text": str(request.layout),
        "model_name": request.model.name, "cluster_name": request.cluster.name, "search": _search(request), "problems": [],
        "has_run": request.resolver.run is not None, "layout_source": request.layout_source,
    }  # fmt: skip


def _search(request: ViewRequest) -> dict[str, Any] | None:
    """Return the search's state, its best layout and its problems, without the front."""
    search = request.search
    if search is None:
        return None
    best = search["best"]
    best_summary = best and {name: best[name] for name in ("layout", "text", "step_time_s", "memory_bytes")}
    return {
        "state": search["state"],
        "outcome": search["outcome"],
        "best": best_summary,
        "problems": search["problems"],
    }
