"""Configs with one key changed are read with the library's count, or refused; the script beside this draws more of them."""

from __future__ import annotations

import pytest
from crosscheck.one_key_changes import OneKeyChange, draw_changes, judge

# Changes that were once read with another count.
FORMER_FAULTS = [
    OneKeyChange("youtu", "q_lora_rank", 0, False), OneKeyChange("aria_text", "mlp_bias", True, True),
    OneKeyChange("mpt", "d_model", 2049, True), OneKeyChange("bitnet", "hidden_size", 2561, False),
    OneKeyChange("minicpm3", "attention_bias", True, False), OneKeyChange("mamba", "intermediate_size", 1537, False),
    OneKeyChange("mamba", "expand", 1, False), OneKeyChange("qwen3_5_text", "attention_bias", True, True),
    OneKeyChange("dots3_note", "tie_word_embeddings", True, True),
    OneKeyChange("helium", "hidden_size", 2561, True), OneKeyChange("lfm3", "conv_L_cache", 2, False),
    OneKeyChange("emu3", "tie_word_embeddings", True, False), OneKeyChange("qwen3_5", "tie_word_embeddings", True, False),
    OneKeyChange("xlstm", "tie_word_embeddings", True, False),
]  # fmt: skip


@pytest.mark.thinned(10)
@pytest.mark.parametrize("seed", range(20))
def test_changes_are_read_exactly_or_refused(seed: int) -> None:
    for change in draw_changes(15, seed):
        assert judge(change) in ("exact", "refused", "unbuildable"), change


@pytest.mark.parametrize("change", FORMER_FAULTS, ids=[f"{change.model_type}-{change.key}" for change in FORMER_FAULTS])
def test_former_faults_are_refused(change: OneKeyChange) -> None:
    assert judge(change) == "refused"
