"""Advice of a search that finds nothing: adapters where the optimizer's state is among the largest terms."""

from __future__ import annotations

import pytest

import shardwise as sw
from shardwise.values import NothingFitsError


def test_adapters_are_named_where_the_optimizer_does_not_fit() -> None:
    with pytest.raises(NothingFitsError, match=r"or train low-rank adapters alone \(--set job.lora_rank=16\)"):
        sw.plan("llama-3.1-8b", "a100-80gb:1", global_batch_tokens="64Ki", seq_len=4096)
    plan = sw.plan(
        "llama-3.1-8b", "a100-80gb:1", global_batch_tokens="64Ki", seq_len=4096, overrides=["job.lora_rank=16"]
    )
    assert plan.estimate.fits
    with pytest.raises(NothingFitsError) as refusal:  # weights alone are too many: adapters do not help
        sw.plan(
            "llama-3.1-405b", "a100-80gb:1", global_batch_tokens="64Ki", seq_len=4096, overrides=["job.lora_rank=16"]
        )
    assert "adapters" not in str(refusal.value)
