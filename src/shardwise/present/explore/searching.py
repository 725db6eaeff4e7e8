"""The process in which searches run, `python -m shardwise.present.explore.searching`.

Models, clusters and jobs go in, and what it found comes out.
Messages are pickles on the standard streams, between the explorer and its own child alone.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from shardwise.hardware import Cluster
from shardwise.layout import Choices, Layout, stack_of
from shardwise.model import Architecture, Job
from shardwise.present.explore.state import layout_text
from shardwise.price import Problem
from shardwise.search import Plan, make_plan
from shardwise.search.vectorised.search_layouts import PricedLayout, SearchResult, search_layouts
from shardwise.values import ShardwiseError

MOST_POINTS = 300  # layouts beside the front: more are no picture


def found_for(model: Architecture, cluster: Cluster, job: Job) -> Iterator[dict[str, Any]]:
    """What searches of a job find, as they find it: the plan that `shardwise plan` takes, then the front."""
    try:
        chosen = make_plan(Problem(model, cluster, job))
    except ShardwiseError as error:
        yield {"state": "done", "best": None, "problems": list(error.problems)}
        return
    best = _best(chosen)
    yield {"state": "searching", "best": best, "problems": []}
    problem = Problem(model, cluster, job).with_defaults()
    choices = Choices().limit_to_stack(stack_of(problem.cluster), model, job, problem.cluster.scale_up_size)
    result = search_layouts(problem, choices=choices)
    yield {"state": "done", "best": best, "problems": [], **_front(result)}


def searched(chosen: Plan) -> dict[str, Any]:
    """The same for a plan that is there: its search again, for the front."""
    choices = Choices().limit_to_stack(stack_of(chosen.cluster), chosen.model, chosen.job, chosen.cluster.scale_up_size)
    result = search_layouts(chosen.problem, choices=choices)
    return {"state": "done", "best": _best(chosen), "problems": [], **_front(result)}


def _best(chosen: Plan) -> dict[str, Any]:
    others = [{**_point(other.layout, other.estimate.step_time_s, other.estimate.memory_bytes), "reason": other.reason}
              for other in chosen.alternatives]  # fmt: skip
    return {**_point(chosen.layout, chosen.estimate.step_time_s, chosen.estimate.memory_bytes), "alternatives": others}


def _point(layout: Layout, step_time_s: float, memory_bytes: float) -> dict[str, Any]:
    return {
        "layout": layout_text(layout),
        "text": str(layout),
        "step_time_s": step_time_s,
        "memory_bytes": memory_bytes,
    }


def _front(result: SearchResult) -> dict[str, Any]:
    """The Pareto front of time and memory, and of each way to factor the devices the fastest that fits."""
    every = sorted(result.by_factorisation, key=lambda one: one.step_time_s)
    some = every[:: max(1, len(every) // MOST_POINTS)][:MOST_POINTS]
    return {
        "front": _points(result.pareto), "points": _points(some), "num_layouts": result.num_layouts,
        "num_fitting": result.num_fitting, "num_factorisations": len(every),
    }  # fmt: skip


def _points(rows: Sequence[PricedLayout]) -> list[dict[str, Any]]:
    return [_point(one.layout, one.step_time_s, one.memory_bytes) for one in rows]


def main() -> None:
    """Answer until the explorer closes the stream."""
    while True:
        try:
            model, cluster, job = pickle.load(sys.stdin.buffer)
        except (EOFError, KeyboardInterrupt):
            return
        for message in found_for(model, cluster, job):
            pickle.dump(message, sys.stdout.buffer)
            sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
