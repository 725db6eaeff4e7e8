"""A layout reports all of its impossible values together."""

from __future__ import annotations

import pytest

from shardwise.layout.layout import Layout
from shardwise.values.errors import InputError


def test_all_faults_are_reported_together() -> None:
    with pytest.raises(InputError) as caught:
        Layout(dp=0, tp=True, micro_batch_seqs=1.0, zero_stage=4, recompute="some", schedule="gpipe")  # type: ignore[arg-type]
    assert caught.value.problems == (
        "layout: dp is 0; a whole number of at least 1 is required",
        "layout: tp is True; a whole number of at least 1 is required",
        "layout: micro_batch_seqs is 1.0; a whole number of at least 1 is required",
        "layout: recompute is 'some'; one of none, selective, full, alternate, core_attn, layernorm, moe_act, mla_up_proj, "
        "mlp, moe, shared_experts, keep:TENSOR,..., budget:BYTES is required",
        "layout: zero_stage is 4; one of 0, 1, 2, 3 is required",
        "layout: schedule is 'gpipe'; one of none, afab, 1f1b, interleaved, zb_h1, zb_h2, dualpipe, looped_bfs, "
        "interleaved_breadth_first, interleaved_zb, zb_v, dualpipe_v is required",
    )


def test_numbers_of_devices_and_replicas() -> None:
    layout = Layout(dp=2, fsdp=3, tp=4, cp=5, pp=7, zero_stage=1, schedule="1f1b", sequence_parallel=True)
    assert layout.num_devices == 840
    assert layout.num_replicas == 6
    assert str(layout).startswith("dp=2 fsdp=3 tp=4 cp=5 pp=7 zero_stage=1 sequence_parallel=true")


@pytest.mark.parametrize(
    ("word", "name"), [("vpp=4", "num_virtual_stages"), ("mbs=2", "micro_batch_seqs"), ("sp=true", "sequence_parallel")]
)
def test_names_of_other_tools_are_accepted(word: str, name: str) -> None:
    with pytest.raises(InputError, match=f"did you mean '{name}'"):
        Layout.parse(word)
