"""Memory of layouts, or of the stages of one, as stacked bars against the capacity of the device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shardwise.hardware import Chip
from shardwise.present.draw.bars import Bar, BarChart
from shardwise.values import format_bytes


def memory_chart(title: str, subtitle: str, bars: Iterable[tuple[str, Mapping[str, float]]], chip: Chip) -> BarChart:
    """Stacked memory of layouts or stages against the chip's capacity."""
    return BarChart(
        title=title, subtitle=subtitle,
        bars=tuple(Bar(label=label, parts=parts) for label, parts in bars),
        limit=chip.memory_bytes, limit_label=f"{chip.name}: {format_bytes(chip.memory_bytes)}",
    )  # fmt: skip
