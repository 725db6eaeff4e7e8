"""Sharding schemes of tests: the choices that differ from those of one device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardwise.layout.sharding_scheme import ShardingScheme
from shardwise.model.structure import ModelStructure

CHOICES = ("zero_stage", "sequence_parallel", "recompute", "cp_variant", "async_tp", "whole_experts")


def scheme_of(
    structure: ModelStructure, zero_stage: int = 0, sequence_parallel: bool = False, recompute: str = "none", **changes: Any
) -> ShardingScheme:  # fmt: skip
    """Return the scheme of a model with these choices; `changes` are further fields."""
    return replace(
        ShardingScheme.unsharded(structure), zero_stage=zero_stage, sequence_parallel=sequence_parallel,
        recompute=recompute, **changes,
    )  # fmt: skip


def scheme_id(value: object) -> str:
    """Return a test's id for a scheme, its choices without the model; for other values their text."""
    if isinstance(value, ShardingScheme):
        return " ".join(str(getattr(value, name)) for name in CHOICES)
    return str(value)
