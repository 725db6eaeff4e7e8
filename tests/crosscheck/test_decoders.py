"""The list of causal language models: complete, without a wrong count, and what it says of each is so."""

from __future__ import annotations

import pytest
from crosscheck.decoders import Decoder, classify, complete_config, counted, read_decoders, rotary_angles

from shardwise.model.huggingface.config import parse_config

DECODERS = read_decoders()
BUILT = [row for row in DECODERS if row.state in ("exact", "refused")]


def test_the_list_has_every_causal_language_model() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    assert {row.model_type: row.model_class for row in DECODERS} == dict(NAMES)
    assert all(row.reason for row in DECODERS if row.state != "exact")


def test_no_decoder_is_counted_wrongly_and_most_exactly() -> None:
    assert {row.state for row in DECODERS} == {"exact", "refused", "unbuildable", "no decoder"}
    rows = counted(DECODERS)
    assert sum(row.state == "exact" for row in rows) >= 0.89 * len(rows)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("row", BUILT, ids=[row.model_type for row in BUILT])
def test_a_default_config_is_in_the_state_that_the_list_says(row: Decoder) -> None:
    assert classify(row.model_type) == (row.state, row.num_params, row.reason)


def test_rotary_angles_of_default_configs_are_those_of_their_code() -> None:
    """What a family turns otherwise is named as not modelled, so that nothing is trained with other angles."""
    compared, different = 0, {}
    for row in (row for row in BUILT if row.state == "exact"):
        config = complete_config(row.model_type)
        architecture, angles = parse_config(config), rotary_angles(config)
        if angles is None or any("rotary angles" in setting for setting in architecture.numerics.unread):
            continue
        rotary = architecture.numerics.rotary
        compared += 1
        if (rotary.base, rotary.part) != pytest.approx(angles):
            different[row.model_type] = (rotary.base, rotary.part, *angles)
    assert different == {}
    assert compared > 90
