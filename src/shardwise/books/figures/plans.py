"""Memory of layouts and of their stages, and the best utilisation by model and nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from shardwise.cluster.chip import Chip
from shardwise.cluster.cluster import Cluster
from shardwise.cost.memory_terms import MEMORY
from shardwise.cost.pricing import Pricing
from shardwise.draw.bars import Bar, BarChart
from shardwise.draw.heat_map import HeatMap
from shardwise.job import Job
from shardwise.layout.layout import Layout
from shardwise.layout.legality import require_legal
from shardwise.model.architecture import Architecture
from shardwise.units import format_bytes


def stage_memories(
    architecture: Architecture, cluster: Cluster, job: Job, layout: Layout
) -> tuple[Mapping[str, float], ...]:
    """Bytes of a device of each pipeline stage, by term; the fullest is what `estimate` reports.

    Raises `InputError` with every rule that the layout breaks.
    """
    require_legal(architecture, job, cluster.num_devices, layout)
    pricing = Pricing(architecture, cluster, job, layout)
    return tuple(MEMORY.values(memory) for memory in pricing.memories(pricing.stages()))


def memory_chart(title: str, subtitle: str, bars: Iterable[tuple[str, Mapping[str, float]]], chip: Chip) -> BarChart:
    """Stacked memory of layouts or stages against the chip's capacity."""
    return BarChart(
        title=title, subtitle=subtitle,
        bars=tuple(Bar(label=label, parts=parts) for label, parts in bars),
        limit=chip.memory_bytes, limit_label=f"{chip.name}: {format_bytes(chip.memory_bytes)}",
    )  # fmt: skip


def utilisation_map(
    models: Sequence[str], num_nodes: Sequence[int], best_mfu: Callable[[str, int], float | None], job: str
) -> HeatMap:
    """The best MFU of every model on every number of nodes; the search is handed in, and None where nothing fits.

    Source: the playbook, "Benchmarking thousands of configurations", its heat map.
    """
    return HeatMap(
        title="Best MFU by model and nodes", subtitle=job, row_title="model", column_title="nodes of 8 devices",
        rows=tuple(models), columns=tuple(map(str, num_nodes)),
        values=tuple(tuple(best_mfu(model, nodes) for nodes in num_nodes) for model in models),
        absent="no layout fits in memory",
    )  # fmt: skip
