"""Estimates of the variants of context parallelism and of asynchronous tensor parallelism, against sums by hand."""

from __future__ import annotations

import dataclasses

import pytest

from shardwise.cluster.load import load_cluster
from shardwise.cost.estimate import Estimate, estimate
from shardwise.job import Job
from shardwise.layout.layout import Layout
from shardwise.model.architecture import Architecture
from shardwise.model.load import load_model

MODEL = dataclasses.replace(load_model("llama-3-8b"), num_layers=4)
CLUSTER = load_cluster("h100:8")
JOB = Job(global_batch_tokens=65536, seq_len=65536)
SHORT = Job(global_batch_tokens=8192, seq_len=8192)


def priced(job: Job = JOB, model: Architecture = MODEL, **fields: object) -> Estimate:
    return estimate(model, CLUSTER, job, Layout(**{"zero_stage": 3, **fields}))  # type: ignore[arg-type]


def test_long_sequences_hide_the_ring_behind_attention() -> None:
    """Bytes of keys and values grow with the length, attention with its square."""
    gathered, ring = priced(cp=8), priced(cp=8, cp_variant="zigzag")
    assert gathered.time["cp"] > 0
    assert ring.time["cp"] == 0
    assert ring.step_time_s == pytest.approx(gathered.step_time_s - gathered.time["cp"])
    assert ring.memory["buffers"] < gathered.memory["buffers"]


def test_a_ring_hides_behind_all_but_one_piece_of_attention() -> None:
    """Short sequences: of the traffic shows what is longer than 7/8 of the attention that it runs beside."""
    gathered, ring = priced(SHORT, cp=8), priced(SHORT, cp=8, cp_variant="zigzag")
    hidden = gathered.time["cp"] - ring.time["cp"]
    flops = 2 * 2 * MODEL.num_heads * MODEL.head_dim * 0.5 * 8192 * 1024
    forward = flops / CLUSTER.chip.matmul_flops_per_s("bf16")
    # 2 products forward, 5 backward
    assert 0 < ring.time["cp"] < gathered.time["cp"]
    assert hidden == pytest.approx(MODEL.num_layers * forward * (1 + 5 / 2) * 7 / 8, rel=1e-6)


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_the_last_rank_of_a_plain_ring_has_the_most_scores(cp: int) -> None:
    """1 - 1/2cp of the square of its rows in place of a half; the model's own FLOPs stay."""
    even = priced(cp=cp, fsdp=8 // cp, cp_variant="zigzag")
    uneven = priced(cp=cp, fsdp=8 // cp, cp_variant="ring")
    scores = 2 * 2 * MODEL.num_heads * MODEL.head_dim * JOB.seq_len * (JOB.seq_len / cp)
    more = (1 - 1 / (2 * cp) - 0.5) * scores * MODEL.num_layers / CLUSTER.chip.matmul_flops_per_s("bf16")
    assert uneven.time["forward"] - even.time["forward"] == pytest.approx(more, rel=1e-6)
    assert uneven.mfu * uneven.step_time_s == pytest.approx(even.mfu * even.step_time_s)
    assert uneven.hfu * uneven.step_time_s == pytest.approx(even.hfu * even.step_time_s)


def test_a_window_evens_out_a_plain_ring() -> None:
    """Every row past the window sees as many keys as the last."""
    model = dataclasses.replace(MODEL, sliding_window=4096)
    even, uneven = (priced(model=model, cp=8, cp_variant=v) for v in ("zigzag", "ring"))
    assert uneven.time["forward"] == pytest.approx(even.time["forward"], rel=0.01)


def test_ulysses_sends_an_eighth_of_what_it_keeps() -> None:
    """Each device hands on 7/8 of its queries, keys, values and results, once each way; gathering brings 7 others'."""
    model = dataclasses.replace(MODEL, num_kv_heads=MODEL.num_heads)
    gathered, exchanged = (priced(model=model, cp=8, cp_variant=v) for v in ("all_gather", "ulysses"))
    # one shard of q, k, v and of the result, against 8 of keys and values; half as many bytes on the wire for 4/2 tensors
    assert exchanged.time["cp"] == pytest.approx(gathered.time["cp"] * 4 / (2 * 8), rel=0.1)
    assert exchanged.time["forward"] == pytest.approx(gathered.time["forward"], rel=0.01)


def test_asynchronous_tensor_parallelism_shows_what_the_products_do_not_hide() -> None:
    plain, pieces = (priced(tp=8, zero_stage=0, sequence_parallel=True, async_tp=flag) for flag in (False, True))
    assert pieces.time["tp"] < 0.5 * plain.time["tp"]
    assert pieces.time["forward"] == plain.time["forward"]
    slow = dataclasses.replace(
        CLUSTER, topology=dataclasses.replace(
            CLUSTER.topology, tiers=tuple(dataclasses.replace(t, bytes_per_s=1e9) for t in CLUSTER.topology.tiers)  # type: ignore[union-attr]
        ),
    )  # fmt: skip
    layouts = [Layout(tp=8, sequence_parallel=True, async_tp=flag) for flag in (False, True)]
    bound = [estimate(MODEL, slow, JOB, layout).time["tp"] for layout in layouts]
    assert 0.95 * bound[0] < bound[1] < bound[0]
