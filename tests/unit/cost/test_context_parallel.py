"""Estimates of the variants of context parallelism and of asynchronous tensor parallelism, against sums by hand."""

from __future__ import annotations

import dataclasses

import pytest

from shardwise.hardware.cluster_loading import load_cluster
from shardwise.hardware.network.switches import Switched
from shardwise.layout.layout import Layout
from shardwise.model.architecture import Architecture
from shardwise.model.job import Job
from shardwise.model.load import load_model
from shardwise.price import Problem
from shardwise.price.estimate import Estimate, estimate

MODEL = dataclasses.replace(load_model("llama-3-8b"), num_layers=4)
CLUSTER = load_cluster("h100:8")
JOB = Job(global_batch_tokens=65536, seq_len=65536)
SHORT = Job(global_batch_tokens=8192, seq_len=8192)


def estimate_layout(job: Job = JOB, model: Architecture = MODEL, **fields: object) -> Estimate:
    return estimate(Problem(model, CLUSTER, job), Layout(**{"zero_stage": 3, **fields}))  # type: ignore[arg-type]


def test_long_sequences_hide_the_ring_behind_attention() -> None:
    """Bytes of keys and values grow with the length, attention with its square."""
    gathered, ring = estimate_layout(cp=8), estimate_layout(cp=8, cp_variant="zigzag")
    assert gathered.time["cp"] > 0
    assert ring.time["cp"] == 0
    assert ring.step_time_s == pytest.approx(gathered.step_time_s - gathered.time["cp"])
    assert ring.memory["buffers"] < gathered.memory["buffers"]


def test_a_ring_hides_behind_all_pieces_of_attention_but_the_last() -> None:
    """Short sequences: exposed is the part of the traffic that exceeds 7/8 of the attention beside it."""
    assert isinstance(CLUSTER.topology, Switched)
    nvlink = CLUSTER.topology.tiers[0]
    ring = estimate_layout(SHORT, cp=8, cp_variant="zigzag")
    flops = 2 * 2 * MODEL.num_heads * MODEL.head_dim * 0.5 * 8192 * 1024
    compute = flops / CLUSTER.chip.matmul_flops_per_s("bf16") * 7 / 8
    block = 1024 * MODEL.num_kv_heads * MODEL.head_dim * 2 / (nvlink.bytes_per_s * nvlink.fraction)
    ring_s = 7 * (block + nvlink.base_latency_s + nvlink.hop_latency_s)
    # keys and values forward, beside 2 products; these and their gradients backward, beside 5
    exposed_s = max(2 * ring_s - compute, 0) + max(4 * ring_s - 2.5 * compute, 0)
    assert exposed_s > 0
    assert ring.time["cp"] == pytest.approx(MODEL.num_layers * exposed_s)


def test_a_ring_leaves_its_node_through_a_single_card() -> None:
    """16 devices in two nodes: a gather leaves a node through all its cards, each hop of a ring through one."""
    cluster = load_cluster("h100:16")
    assert isinstance(cluster.topology, Switched)
    card = cluster.topology.tiers[1]
    layouts = [Layout(zero_stage=3, cp=16, cp_variant=v) for v in ("all_gather", "zigzag")]
    job = Job(global_batch_tokens=4096, seq_len=4096)  # too short for attention to hide much
    gathered, ring = (estimate(Problem(MODEL, cluster, job), layout).time["cp"] for layout in layouts)
    block = 256 * MODEL.num_kv_heads * MODEL.head_dim * 2 / (card.bytes_per_s * card.fraction)
    assert ring > gathered
    assert ring == pytest.approx(
        MODEL.num_layers * 6 * 15 * (block + card.base_latency_s + card.hop_latency_s), rel=0.2
    )


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_the_last_rank_of_a_plain_ring_has_the_most_scores(cp: int) -> None:
    """1 - 1/2cp of the square of its rows in place of a half; the model's own FLOPs stay."""
    even = estimate_layout(cp=cp, fsdp=8 // cp, cp_variant="zigzag")
    uneven = estimate_layout(cp=cp, fsdp=8 // cp, cp_variant="ring")
    scores = 2 * 2 * MODEL.num_heads * MODEL.head_dim * JOB.seq_len * (JOB.seq_len / cp)
    more = (1 - 1 / (2 * cp) - 0.5) * scores * MODEL.num_layers / CLUSTER.chip.matmul_flops_per_s("bf16")
    assert uneven.time["forward"] - even.time["forward"] == pytest.approx(more, rel=1e-6)
    assert uneven.mfu * uneven.step_time_s == pytest.approx(even.mfu * even.step_time_s)
    assert uneven.hfu * uneven.step_time_s == pytest.approx(even.hfu * even.step_time_s)


def test_a_window_balances_a_plain_ring() -> None:
    """Every row past the window attends to as many keys as the last row."""
    model = dataclasses.replace(MODEL, sliding_window=4096)
    even, uneven = (estimate_layout(model=model, cp=8, cp_variant=v) for v in ("zigzag", "ring"))
    assert uneven.time["forward"] == pytest.approx(even.time["forward"], rel=0.01)


def test_ulysses_moves_nine_shards_instead_of_six_whole_tensors() -> None:
    """Each device sends 7/8 of its queries, keys, values and results, once each way; a gather receives those of 7 other
    devices."""
    model = dataclasses.replace(MODEL, num_kv_heads=MODEL.num_heads)
    gathered, exchanged = (estimate_layout(model=model, cp=8, cp_variant=v) for v in ("all_gather", "ulysses"))
    # forward q, k, v and the result, backward the result and its gradient, then those of q, k and v: 9 shards of 1/8, against
    # 6 whole keys or values
    assert exchanged.time["cp"] == pytest.approx(gathered.time["cp"] * 9 / (6 * 8), rel=0.1)
    assert exchanged.time["forward"] == pytest.approx(gathered.time["forward"], rel=0.01)


def test_asynchronous_tensor_parallelism_exposes_traffic_beyond_its_products() -> None:
    plain, pieces = (
        estimate_layout(tp=8, zero_stage=0, sequence_parallel=True, async_tp=flag) for flag in (False, True)
    )
    assert pieces.time["tp"] < 0.5 * plain.time["tp"]
    # positions are read once for queries and keys, whose products are adjacent
    assert pieces.time["forward"] == pytest.approx(plain.time["forward"], rel=1e-4)
    slow = dataclasses.replace(
        CLUSTER, topology=dataclasses.replace(
            CLUSTER.topology, tiers=tuple(dataclasses.replace(t, bytes_per_s=1e9) for t in CLUSTER.topology.tiers)  # type: ignore[union-attr]
        ),
    )  # fmt: skip
    layouts = [Layout(tp=8, sequence_parallel=True, async_tp=flag) for flag in (False, True)]
    bound = [estimate(Problem(MODEL, slow, JOB), layout).time["tp"] for layout in layouts]
    assert 0.95 * bound[0] < bound[1] < bound[0]
