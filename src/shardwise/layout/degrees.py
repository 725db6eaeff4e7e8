"""The degrees of a layout as numbers, or as columns of a search, and what follows from them: atomic degrees, micro-batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.layout.context_parallel import cp_variant_names
from shardwise.layout.layout import Layout
from shardwise.model.architecture import Architecture
from shardwise.model.job import Job
from shardwise.values.elementwise import Value, ceil_div, gcd

Degrees = Mapping[str, Value]


def seqs_per_replica(job: Job, degrees: Degrees) -> Value:
    """Sequences of the fullest replica in one step."""
    return ceil_div(job.num_seqs, degrees["dp"] * degrees["fsdp"])


def num_micro_batches(job: Job, degrees: Degrees) -> Value:
    """Micro-batches of the fullest replica in one step."""
    return ceil_div(seqs_per_replica(job, degrees), degrees["micro_batch_seqs"])


def layout_degrees(layout: Layout) -> dict[str, Any]:
    """The numbers of a layout that rules and costs read."""
    names = ("dp", "fsdp", "tp", "cp", "pp", "ep", "num_virtual_stages", "zero_stage", "micro_batch_seqs")
    flags = {"sequence_parallel": int(layout.sequence_parallel), "async_tp": int(layout.async_tp)}
    flags |= {"cp_variant": cp_variant_names().index(layout.cp_variant), "etp": layout.expert_tp}
    return {**{name: getattr(layout, name) for name in names}, **flags, "schedule": layout.schedule}


def atomic_degrees(architecture: Architecture, degrees: Mapping[str, Value]) -> dict[str, Value]:
    """The degrees (numbers or arrays) with each axis that is a pair as its two parts.

    `tp` is key-value heads times query heads of a group: tp_kv = gcd(tp, K), tp_rep the rest. Of `fsdp`, expert
    parallelism borrows `ep` (but for the part of it that is `tp`, with whole experts); what is left of it keeps the name.
    """
    tp = degrees["tp"]
    tp_kv = gcd(tp, architecture.num_kv_heads)
    ep = degrees["ep"] * degrees.get("etp", tp) // tp
    parts = {"tp_kv": tp_kv, "tp_rep": tp // tp_kv, "ep": ep, "fsdp": degrees["fsdp"] // ep}
    return {**degrees, **parts}
