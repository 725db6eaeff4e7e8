"""The degrees of a layout as numbers, or as columns of a search, and what follows from them: atomic degrees, micro-batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.layout.context_parallel import cp_variant_names
from shardwise.layout.layout import Layout
from shardwise.model import Architecture, Job
from shardwise.values import Value, ceil_div
from shardwise.values.elementwise import gcd

Degrees = Mapping[str, Value]


def seqs_per_replica(job: Job, degrees: Degrees) -> Value:
    """Return sequences of the fullest replica in one step."""
    return ceil_div(job.num_seqs, degrees["dp"] * degrees["fsdp"])


def num_micro_batches(job: Job, degrees: Degrees) -> Value:
    """Return micro-batches of the fullest replica in one step."""
    return ceil_div(seqs_per_replica(job, degrees), degrees["micro_batch_seqs"])


def layout_degrees(layout: Layout) -> dict[str, Any]:
    """Return the numbers of a layout that rules and costs read. `cp_variant` is an index, flags are 0 or 1."""
    names = ("dp", "fsdp", "tp", "cp", "pp", "ep", "num_virtual_stages", "zero_stage", "micro_batch_seqs")
    flags = {"sequence_parallel": int(layout.sequence_parallel), "async_tp": int(layout.async_tp)}
    flags |= {"cp_variant": cp_variant_names().index(layout.cp_variant), "etp": layout.expert_tp}
    return {**{name: getattr(layout, name) for name in names}, **flags, "schedule": layout.schedule}


def atomic_degrees(architecture: Architecture, degrees: Mapping[str, Value]) -> dict[str, Value]:
    """Return the degrees (numbers or arrays) with each compound axis as its two atomic parts.

    `tp` is key-value heads times query heads of a group: tp_kv = gcd(tp, K), tp_rep the rest. Expert parallelism borrows `ep`
    from `fsdp`, which keeps the quotient. With whole experts (etp = 1) it is taken from `tp` first, and from `fsdp` only what
    exceeds it.
    """
    tp = degrees["tp"]
    tp_kv = gcd(tp, architecture.num_kv_heads)
    ep = degrees["ep"] * degrees.get("etp", tp) // tp
    parts = {"tp_kv": tp_kv, "tp_rep": tp // tp_kv, "ep": ep, "fsdp": degrees["fsdp"] // ep}
    return {**degrees, **parts}
