"""Bubbles of pipelines, and the work of ranks along a split sequence."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.book_formulas.rules import attended_pairs
from shardwise.layout import get_cp_variant
from shardwise.pipeline import build_actions
from shardwise.pipeline.schedule import bubble_ratio
from shardwise.pipeline.timeline import play_actions
from shardwise.present.draw.bars import Bar, BarChart
from shardwise.present.draw.panels import Column, Panel, PanelChart
from shardwise.present.draw.timeline import TimelineChart
from shardwise.present.pictures.pipeline_schedule_timeline import timeline_chart


def pipeline_timeline(
    schedule: str, num_stages: int = 4, num_micro_batches: int = 8, num_virtual_stages: int | None = None
) -> TimelineChart:
    """A schedule played with passes of a second each: forward, backward for activations, backward for weights. Source: the
    playbook, "Pipeline parallelism"."""
    return timeline_chart(play_actions(build_actions(schedule, num_stages, num_micro_batches, num_virtual_stages)))


def bubbles(
    num_stages: int = 8,
    num_micro_batches: Sequence[int] = (1, 8, 16, 32),
    num_virtual_stages: Sequence[int] = (1, 2, 4, 8),
) -> BarChart:
    """Idle over ideal time, (p - 1) / (v·m), for m micro-batches and v virtual stages on each rank. Source: the playbook,
    "Interleaving stages"; one micro-batch is the naive pipeline."""
    bars = (
        Bar(label=f"m = {m}, v = {v}", parts={"bubble": bubble_ratio(num_stages, m, v)})
        for m in num_micro_batches
        for v in num_virtual_stages
        if v == 1 or m % num_stages == 0  # what interleaving takes
    )
    return BarChart(
        title=f"Bubble of a pipeline of {num_stages} stages", bars=tuple(bars), unit="%",
        subtitle="Idle over ideal time: m micro-batches, v virtual stages on each rank; v = 1: AFAB, 1F1B; v > 1: interleaved.",
    )  # fmt: skip


def ring_work(degree: int = 4, seq_len: int = 16) -> PanelChart:
    """Which share of a causal mask's scores each rank of a ring computes: pieces in order, and one from either end (zigzag).
    Source: the playbook, "Ring Attention" and "Zig-Zag Ring Attention"."""

    def share(variant: str, rank: int) -> float:
        pieces = get_cp_variant(variant).sequence_pieces
        length = seq_len / (pieces * degree)
        places = (rank,) if pieces == 1 else (rank, pieces * degree - 1 - rank)
        pairs = sum(attended_pairs(length, (place + 1) * length, causal=True) for place in places)
        return pairs / attended_pairs(seq_len, seq_len, causal=True)

    return PanelChart(
        title=f"Scores of {degree} ranks under a causal mask", axis_title="rank",
        subtitle=f"Share of the pairs of {seq_len} queries and keys; the fullest rank decides.",
        columns=tuple(Column(label=str(rank)) for rank in range(degree)),
        panels=tuple(
            Panel(
                title=title, unit="%", parts={"scores": tuple(share(variant, rank) for rank in range(degree))}, joined=False,
                limit=1 / degree, dashed="an even share",
            )
            for variant, title in (("ring", "ring: the sequence in order"), ("zigzag", "zigzag: a piece from either end"))
        ),
    )  # fmt: skip
