"""Memory of layouts and of their stages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shardwise.cluster.chip import Chip
from shardwise.cluster.cluster import Cluster
from shardwise.cost.memory_terms import MEMORY
from shardwise.cost.pricing import Pricing
from shardwise.draw.bars import Bar, BarChart
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
