"""Which of the found layouts is taken: the simplest of those that predictions do not distinguish from the fastest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from shardwise.cluster.cluster import Cluster
from shardwise.job import Job
from shardwise.layout.layout import Layout
from shardwise.layout.legality import EVEN_BATCH, degrees_of
from shardwise.model.architecture import Architecture
from shardwise.network.topology import Switched
from shardwise.planning.explain import RESOLUTION
from shardwise.search.choices import AXES, Choices
from shardwise.search.result import Found, SearchResult
from shardwise.search.search import search

EQUAL = 1e-5  # relative; bounds that differ by less differ only in the rounding up of shards
NUM_NEAR = 10_000  # more than the layouts of one factorisation, all its placements included


def simplest(
    architecture: Architecture, cluster: Cluster, job: Job, found: SearchResult, choices: Choices | None, reserve: float
) -> Layout:
    """The simplest fitting layout whose predicted step is within `RESOLUTION` of the fastest; of bounds, which hold exactly under
    what they assume, the simplest of those that are equal.

    First degrees: batches that come out even, then tp within a node, then replicas of fewer devices (pp=128 with cp=8 is two
    axes, and is not used in practice), then fewer axes that split the model or the sequence, then stages as they come out even,
    then smaller cp, tp and pp, then one data-parallel axis rather than two; of equals the faster. Then, of the layouts of these
    degrees, an even batch and the fewest virtual stages.
    """
    within = found.best[0].step_time_s * (1.0 + (RESOLUTION if cluster.calibration else EQUAL))

    def near(rows: Iterable[Found]) -> Iterator[Found]:
        return (row for row in rows if row.step_time_s <= within)

    rows = list(near((*found.best, *found.even, *found.by_factorisation)))
    degrees = min(rows, key=lambda row: (*_degrees_key(cluster, job, row.layout), row.step_time_s)).layout
    same = [row for row in rows if _degrees(row.layout) == _degrees(degrees)]
    same += near(_of_degrees(architecture, cluster, job, degrees, choices, reserve))
    return min(
        same, key=lambda row: (not is_even(job, row.layout), row.layout.num_virtual_stages, row.step_time_s)
    ).layout


def _of_degrees(
    architecture: Architecture, cluster: Cluster, job: Job, layout: Layout, choices: Choices | None, reserve: float
) -> Iterator[Found]:
    """The fitting layouts of the same degrees."""
    pins = {axis: getattr(layout, axis) for axis in AXES}
    if layout.expert_tp != layout.tp:  # whole experts are a mode of the search, by the degree of ep without them
        pins.pop("ep")
    narrowed = replace(choices or Choices(), pins={}).narrowed(pins, {})
    yield from search(architecture, cluster, job, choices=narrowed, top=NUM_NEAR, reserve=reserve).best


def is_even(job: Job, layout: Layout) -> bool:
    """Whether no replica is idle and every micro-batch is full."""
    return bool(EVEN_BATCH.legal(None, job, 0, degrees_of(layout)))  # type: ignore[arg-type]


def _degrees_key(cluster: Cluster, job: Job, layout: Layout) -> tuple[int, ...]:
    """What makes degrees simpler, the most important first; less is simpler."""
    replica = layout.tp * layout.cp * layout.pp
    splitting = sum(getattr(layout, axis) > 1 for axis in ("tp", "cp", "pp", "ep"))
    twice = layout.dp > 1 and layout.fsdp > 1
    given = layout.layers_per_stage is not None
    return (
        not is_even(job, layout),
        _leaves_node(cluster, layout),
        replica,
        splitting,
        given,
        layout.cp,
        layout.tp,
        layout.pp,
        twice,
    )


def _leaves_node(cluster: Cluster, layout: Layout) -> bool:
    """Whether tensor parallelism goes beyond the innermost switch. No published run does that; Narayanan et al. 2021 (arXiv
    2104.04473), takeaway 1: tensor parallelism up to the devices of a node, then a pipeline."""
    topology = cluster.topology
    return isinstance(topology, Switched) and layout.tp > (topology.tiers[0].size or layout.tp)


def _degrees(layout: Layout) -> tuple[int, ...]:
    return (*(getattr(layout, axis) for axis in AXES), layout.expert_tp)
