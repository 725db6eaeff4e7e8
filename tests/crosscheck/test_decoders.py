"""The list of causal language models: complete, without a wrong count, and what it says of each is so."""

from __future__ import annotations

import pytest
from crosscheck.decoders import Decoder, classify, counted, read_decoders

DECODERS = read_decoders()
BUILT = [row for row in DECODERS if row.state in ("exact", "refused")]


def test_the_list_has_every_causal_language_model() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    assert {row.model_type: row.model_class for row in DECODERS} == dict(NAMES)
    assert all(row.reason for row in DECODERS if row.state != "exact")


def test_none_is_wrong_and_most_are_exact() -> None:
    assert {row.state for row in DECODERS} == {"exact", "refused", "unbuildable", "no decoder"}
    rows = counted(DECODERS)
    assert sum(row.state == "exact" for row in rows) >= 0.89 * len(rows)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("row", BUILT, ids=[row.model_type for row in BUILT])
def test_a_default_config_is_in_the_state_that_the_list_says(row: Decoder) -> None:
    assert classify(row.model_type) == (row.state, row.num_params, row.reason)
