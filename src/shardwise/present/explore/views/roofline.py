"""Roofline of the kernels of one block, on one device of the layout: what `shardwise roofline MODEL --layout` prints."""

from __future__ import annotations

from typing import Any

from shardwise.book_formulas import block_roofline, link_bandwidths
from shardwise.book_formulas.rooflines.payloads import block_payload
from shardwise.hardware import Chip
from shardwise.present.explore.asked import Asked
from shardwise.present.explore.fields import EXACT, OWN, Field, Fields, fields_payload

SOURCE = "Williams et al., Roofline, 2009; Austin et al., How to Scale Your Model, 2025, chapter 1"
DERIVED = "derive/sharded_unit.py: the kernels of the block's derived program, with a device's sizes"
BOUND = "a bound: kernels at the vendor's peak and bandwidth, compute and traffic overlapped"


def roofline(asked: Asked) -> dict[str, Any]:
    """The payload of the block's kernels, what memory bounds of them, bytes/s of the chip's other memories and links."""
    asked.require_legal()
    chip = asked.cluster.chip
    found = block_roofline(asked.model, chip, asked.layout.micro_batch_seqs, asked.job.seq_len, asked.layout)
    shown = block_payload(found, asked.model, chip)
    phases = shown["phases"]
    memory_s, time_s = (sum(phase[name] for phase in phases.values()) for name in ("memory_bound_s", "time_s"))
    return {
        "roofline": shown, "memory_bound_share": memory_s / time_s, "bandwidths": link_bandwidths(chip, {}),
        "fields": fields_payload(_fields(chip, tuple(phases))),
    }  # fmt: skip


def _fields(chip: Chip, phases: tuple[str, ...]) -> Fields:
    every, peak, rate = "roofline.operations.*.", "roofline.peak_flops_per_s", "roofline.memory_bytes_per_s"
    both = {f"{what}, {name}": f"roofline.phases.{name}.{key}" for name in phases
            for what, key in (("bound by memory", "memory_bound_s"), ("all", "time_s"))}  # fmt: skip
    return {
        every + "flops": Field(
            "FLOPs of matrix products and attention; elementwise operations have none", "2 · the sizes of all dims",
            "FLOPs", DERIVED, EXACT,
        ),
        every + "moved_bytes": Field(
            "bytes between the kernel and the device's memory", "what it reads and writes, each once", "B", DERIVED, EXACT,
        ),
        every + "intensity": Field(
            "arithmetic intensity", "FLOPs / bytes", "FLOPs/B", SOURCE, EXACT,
            {"FLOPs": every + "flops", "bytes": every + "moved_bytes"},
        ),
        every + "time_s": Field(
            "seconds of the kernel", "max(FLOPs / peak, bytes / bandwidth)", "s", SOURCE, BOUND,
            {"FLOPs": every + "flops", "bytes": every + "moved_bytes", "peak": peak, "bandwidth": rate},
        ),
        "memory_bound_share": Field(
            "share of the block's seconds in kernels that take longer to move bytes than to compute",
            "Σ seconds bound by memory / Σ seconds", "%", SOURCE, BOUND, both,
        ),
        "roofline.phases.*.memory_bound_s": Field("seconds of the kernels that memory binds", "Σ seconds", "s", SOURCE, BOUND),
        "roofline.phases.*.time_s": Field("seconds of a pass through the block", "Σ seconds", "s", SOURCE, BOUND),
        peak: Field("the chip's dense peak", "given", "FLOP/s", chip.sources.get("peak_flops_per_s", OWN), BOUND),
        rate: Field("bandwidth of the chip's memory", "given", "B/s", chip.sources.get("memory_bytes_per_s", OWN), BOUND),
        "roofline.critical_intensity": Field(
            "the intensity from which on compute binds", "peak / bandwidth", "FLOPs/B", SOURCE, BOUND,
            {"peak": peak, "bandwidth": rate},
        ),
    }  # fmt: skip
