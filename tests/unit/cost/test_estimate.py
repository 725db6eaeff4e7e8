"""An estimate is the sum of its terms, and its terms follow the layout."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from shardwise.hardware.cluster_loading import load_cluster
from shardwise.layout.layout import Layout
from shardwise.model.job import OVERLAP_CONVENTIONS, Job, OverlapConvention
from shardwise.model.load import load_model
from shardwise.model.optimizer_program import bytes_per_parameter
from shardwise.model.parameters_and_flops import model_flops_per_token, num_params
from shardwise.price import Problem
from shardwise.price.estimate import Estimate, estimate
from shardwise.price.overlap import exposed_by_axis, exposed_s
from shardwise.values.errors import InputError
from shardwise.values.estimate_term_names import MEMORY_TERMS, TIME_TERMS
from shardwise.values.precision import get_precision

MODEL = load_model("llama-3-8b")
JOB = Job(global_batch_tokens=64 * 8192, seq_len=8192, tokens=15e12)
LAYOUTS = {
    "zero3": Layout(fsdp=64, zero_stage=3),
    "hybrid": Layout(dp=4, fsdp=16, zero_stage=1, recompute="full"),
    "tp": Layout(dp=8, tp=8, sequence_parallel=True),
    "cp": Layout(fsdp=16, cp=4, zero_stage=2, recompute="selective"),
    "pp": Layout(dp=8, tp=2, pp=4, schedule="1f1b"),
    "interleaved": Layout(dp=8, pp=8, num_virtual_stages=2, schedule="interleaved"),
    "afab": Layout(dp=8, pp=8, schedule="afab", recompute="full"),
    "all": Layout(dp=2, fsdp=2, tp=4, cp=2, pp=2, zero_stage=3, sequence_parallel=True, schedule="1f1b"),
}


def estimate_layout(
    layout: Layout, overlap: OverlapConvention = "per_axis", cluster: str = "h100:64", **job: Any
) -> Estimate:
    return estimate(Problem(MODEL, load_cluster(cluster), dataclasses.replace(JOB, overlap=overlap, **job)), layout)


@pytest.mark.parametrize("overlap", OVERLAP_CONVENTIONS)
@pytest.mark.parametrize("cluster", ["h100:64", "tpu-v5p:4x4x4"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_terms_add_up(name: str, cluster: str, overlap: OverlapConvention) -> None:
    priced_step = estimate_layout(LAYOUTS[name], overlap, cluster)
    assert set(priced_step.time) == set(TIME_TERMS)
    assert set(priced_step.memory) == set(MEMORY_TERMS)
    assert math.fsum(priced_step.time.values()) == pytest.approx(priced_step.step_time_s, rel=1e-12)
    assert math.fsum(priced_step.memory.values()) == pytest.approx(priced_step.memory_bytes, rel=1e-12)
    assert min(priced_step.time.values()) >= 0
    assert min(priced_step.memory.values()) >= 0
    assert min(priced_step.hidden.values(), default=0) >= 0


@pytest.mark.parametrize("name", LAYOUTS)
def test_throughput_mfu_days_and_margin_are_consistent(name: str) -> None:
    priced_step = estimate_layout(LAYOUTS[name])
    peak = load_cluster("h100:64").chip.peak("bf16")
    tokens = JOB.global_batch_tokens / priced_step.step_time_s / 64
    assert priced_step.tokens_per_s_per_device == pytest.approx(tokens, rel=1e-12)
    assert priced_step.mfu == pytest.approx(tokens * model_flops_per_token(MODEL, 8192) / peak, rel=1e-12)
    assert 0 < priced_step.mfu <= priced_step.hfu < 1
    assert priced_step.train_days == pytest.approx(
        15e12 / JOB.global_batch_tokens * priced_step.step_time_s / 86400, rel=1e-12
    )
    assert (
        priced_step.fits == (priced_step.memory_bytes <= priced_step.memory_capacity_bytes) == (priced_step.margin >= 0)
    )
    assert priced_step.margin == pytest.approx(
        1 - priced_step.memory_bytes / load_cluster("h100:64").chip.capacity_bytes
    )


def test_an_axis_of_size_1_has_no_traffic() -> None:
    """The traffic of an axis of size 1 is zero; only a pipeline has a bubble."""
    for name, layout in LAYOUTS.items():
        priced_step = estimate_layout(layout, "sum")
        for axis in ("tp", "cp", "pp", "dp"):
            if getattr(layout, axis) == 1:
                # the loss, a scalar, is summed over dp, fsdp and cp as one group
                assert priced_step.time[axis] + priced_step.hidden.get(axis, 0) <= (1e-4 if axis == "dp" else 0), (
                    name,
                    axis,
                )
        assert (priced_step.time["bubble"] > 0) == (layout.pp > 1), name
        assert (priced_step.time["recompute"] > 0) == (layout.recompute != "none"), name


def test_state_shrinks_with_each_stage_of_zero() -> None:
    """State over 64: all of it, then without the optimizer's, the gradients', the weights' 63/64."""
    bf16 = get_precision("bf16")
    params = num_params(MODEL)
    estimates = [
        estimate_layout(Layout(dp=64)),
        *(estimate_layout(Layout(fsdp=64, zero_stage=stage)) for stage in (1, 2, 3)),
    ]
    state = [sum(e.memory[term] for term in ("parameters", "gradients", "master", "optimizer")) for e in estimates]
    assert state == pytest.approx(
        [
            params * bytes_per_parameter(bf16),
            params * (4 + 12 / 64),
            params * (2 + 14 / 64),
            params * 16 / 64,
        ],
        rel=1e-12,
    )
    assert state == sorted(state, reverse=True)


def test_recomputing_trades_memory_for_time() -> None:
    estimates = [
        estimate_layout(Layout(fsdp=64, zero_stage=3, recompute=policy)) for policy in ("none", "selective", "full")
    ]  # type: ignore[arg-type]
    memory, time = [e.memory["activations"] for e in estimates], [e.time["recompute"] for e in estimates]
    assert memory == sorted(memory, reverse=True)
    assert time == sorted(time)
    assert len(set(memory)) == len(set(time)) == 3
    assert estimates[2].time["recompute"] < estimates[2].time["forward"]
    ratios = [e.hfu / e.mfu for e in estimates]
    assert 1 < ratios[0] <= ratios[1] < ratios[2] < 4 / 3 + 0.05
    # full: only the input of each block, B T D in bf16
    assert estimates[2].memory["activations"] >= 32 * 8192 * 4096 * 2


def test_memory_of_zero_3_by_hand() -> None:
    """Llama-3 8B, one sequence of 8192: hidden states of B T D in bf16, statistics of B T in fp32."""
    hidden, statistic = 8192 * 4096 * 2, 8192 * 4
    head = 2 * hidden + 3 * statistic  # its input, the normed input; sum of squares, maximum, sum of exponentials
    none, full = (
        estimate_layout(Layout(fsdp=64, zero_stage=3, recompute=policy)).memory for policy in ("none", "full")
    )  # type: ignore[arg-type]
    block = (none["activations"] - head) / 32
    assert full["activations"] == 32 * hidden + head
    # both residual streams and both normed (4), q and attention's output (2), k and v of a quarter each (0.5), gate, up and
    # their product of 3.5 each (10.5); two sums of squares and the log-sum-exp of 32 heads
    assert block == (4 + 2 + 0.5 + 10.5) * hidden + (2 + 32) * statistic
    # at the loss the logits are more than what a block needs later on; with a loss in parts they are not
    assert (none["logits"], none["workspace"]) == (8192 * 128256 * 14, 0)
    chunked = estimate_layout(Layout(fsdp=64, zero_stage=3, recompute="full"), loss="chunked").memory
    # half of a block's gradients beside what is rebuilt
    assert chunked["workspace"] == pytest.approx(block - hidden + block / 2)
    assert chunked["logits"] == 0
    weights = {"block": 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096, "head": 128256 * 4096 + 4096}
    # a block's and the head's gathered weights and unscattered gradients, 2 + 2 bytes
    assert none["gathered"] == 4 * (weights["block"] + weights["head"])
    assert none["runtime"] == load_cluster("h100:64").chip.runtime_bytes


def test_gathered_and_scattered_at_the_peak_of_the_trainer_by_hand() -> None:
    """Few words, so that the peak is in the last layer: weights of it and of the layer before, its gradients, those of the final
    norm on their way, and the half of these that arrives on one of two devices; all of it in bf16, 2 bytes. The gradient of the
    head's matrix has arrived when that of the norm is sent."""
    model = dataclasses.replace(load_model("llama-3-8b"), num_layers=4, vocab_size=64)
    job = Job(global_batch_tokens=2 * 8192, seq_len=8192, loss="in_place")
    memory = estimate(Problem(model, load_cluster("h100:2"), job), Layout(fsdp=2, zero_stage=3)).memory
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
    assert memory["logits"] == 0
    assert memory["gathered"] == 2 * (2 * layer + layer + 4096 + 4096 / 2)


def test_buffers_of_scattered_gradients_under_zero_1_by_hand() -> None:
    """At the loss: the head's gradients rest whole; the buffer has the part of one of two devices, in bf16 (2 bytes)."""
    model = dataclasses.replace(load_model("llama-3-8b"), num_layers=4)
    job = Job(global_batch_tokens=2 * 8192, seq_len=8192, loss="in_place")
    sharded, replicated = (
        estimate(Problem(model, load_cluster("h100:2"), job), Layout(**shape)).memory
        for shape in ({"fsdp": 2, "zero_stage": 1}, {"dp": 2})
    )
    assert sharded["logits"] > 0
    assert (sharded["gathered"], replicated["gathered"]) == (2 * (128256 * 4096 + 4096) / 2, 0)


@pytest.mark.parametrize("tied", [False, True])
def test_gathered_at_the_loss_of_the_trainer_by_hand(*, tied: bool) -> None:
    """In bf16, 2 bytes. Under ZeRO-3: weights of the head and of a layer, and the head's gradients, whose parts replace the
    head's weights. Under ZeRO-2: those gradients and the part of one of two devices, except with a tied head, which waits
    for the embedding's gradient."""
    model = dataclasses.replace(load_model("llama-3-8b"), num_layers=4, tied_embeddings=tied)
    job = Job(global_batch_tokens=2 * 8192, seq_len=8192, loss="in_place")
    gathered = {
        stage: estimate(Problem(model, load_cluster("h100:2"), job), Layout(fsdp=2, zero_stage=stage)).memory[
            "gathered"
        ]
        for stage in (2, 3)
    }
    layer, head = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096, 128256 * 4096 + 4096
    assert gathered == {2: 2 * (head + (0 if tied else head / 2)), 3: 2 * (layer + head + head)}


def test_gradients_of_a_tied_head_stay_in_the_layers_by_hand() -> None:
    """Few words, so that the peak is in the last layer: beside its own gradients those of the head, on two devices, in bf16."""
    model = dataclasses.replace(load_model("llama-3-8b"), num_layers=4, vocab_size=64, tied_embeddings=True)
    job = Job(global_batch_tokens=2 * 8192, seq_len=8192, loss="in_place")
    memory = estimate(Problem(model, load_cluster("h100:2"), job), Layout(fsdp=2, zero_stage=2)).memory
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
    assert memory["logits"] == 0
    assert memory["gathered"] == 2 * (layer + 64 * 4096 + 4096)


def test_alternate_recompute_keeps_every_other_product_by_hand() -> None:
    """Llama-3 8B as torchtitan keeps it: of seven products q, v, the first of the MLP's and down, which is not read again."""
    hidden, statistic = 8192 * 4096 * 2, 8192 * 4
    head = 2 * hidden + 3 * statistic
    alternate = estimate_layout(Layout(fsdp=64, zero_stage=3, recompute="alternate"))
    # a block's input, q and attention's output (3), v of a quarter, one of 3.5; the log-sum-exp of 32 heads
    assert alternate.memory["activations"] == head + 32 * ((3 + 0.25 + 3.5) * hidden + 32 * statistic)
    between = [
        estimate_layout(Layout(fsdp=64, zero_stage=3, recompute=p)).time["recompute"] for p in ("selective", "full")
    ]  # type: ignore[arg-type]
    assert between[0] < alternate.time["recompute"] < between[1]


def test_a_tpu_gathers_a_single_unit_at_a_time() -> None:
    """A GPU holds the head and a block at once, a TPU only the head."""
    gpu, tpu = (
        estimate_layout(Layout(fsdp=64, zero_stage=3), cluster=c).memory["gathered"]
        for c in ("h100:64", "tpu-v5p:4x4x4")
    )
    assert tpu == 4 * (128256 * 4096 + 4096)
    assert gpu == tpu + 4 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096)


def test_a_units_gradients_are_gathered_before_they_are_added_in_fp32() -> None:
    """One unit's in bf16, the largest's, where gradients rest in fp32 only; experts' come one at a time and are left out."""
    plain, main = (
        estimate_layout(Layout(fsdp=64, zero_stage=1), precision=p).memory["gathered"]
        for p in ("bf16", "bf16_fp32_main_gradients")
    )
    assert (plain, main) == (0, 2 * (128256 * 4096 + 4096))
    experts = load_model("mixtral-8x7b")
    job = dataclasses.replace(JOB, precision="bf16_fp32_main_gradients")
    priced_experts = estimate(Problem(experts, load_cluster("h100:64"), job), Layout(fsdp=64, ep=8, zero_stage=1))
    assert priced_experts.memory["gathered"] == 2 * (32000 * 4096 + 4096)


def test_compute_is_never_faster_than_the_peak() -> None:
    for name, layout in LAYOUTS.items():
        priced_step = estimate_layout(layout)
        flops = model_flops_per_token(MODEL, 8192) * JOB.global_batch_tokens / 64
        if layout.pp == 1:
            assert priced_step.time["forward"] + priced_step.time["backward"] > flops / 989e12, name


def test_the_bubble_is_the_closed_form_of_the_steady_step() -> None:
    """(p-1)/m of the micro-batches: 8 stages and 8 sequences of a replica give 7/8."""
    priced_step = estimate_layout(LAYOUTS["afab"], "per_axis")
    steady = sum(priced_step.time[term] for term in ("forward", "backward", "recompute", "pp"))
    assert priced_step.time["bubble"] == pytest.approx(7 / 8 * steady, rel=1e-9)


def test_all_forward_all_backward_holds_every_micro_batch() -> None:
    afab = estimate_layout(Layout(dp=8, pp=8, micro_batch_seqs=1, schedule="afab"), global_batch_tokens=128 * 8192)
    plain = estimate_layout(Layout(dp=8, pp=8, micro_batch_seqs=1, schedule="1f1b"), global_batch_tokens=128 * 8192)
    assert afab.step_time_s == plain.step_time_s
    # 16 micro-batches against 8, on the stage that is fullest
    assert afab.memory["activations"] > 1.8 * plain.memory["activations"]


def test_uneven_batches_and_stages_are_stated_as_waste() -> None:
    uneven = estimate_layout(Layout(dp=64), global_batch_tokens=65 * 8192)
    assert uneven.waste["sequences"] == pytest.approx(1 - 65 / 128)
    assert uneven.waste["nearest_full_batch_tokens"] == 128 * 8192
    assert "sequences" not in estimate_layout(Layout(dp=64)).waste
    assert 0.05 < estimate_layout(LAYOUTS["pp"]).waste["stages"] < 1 - 32 / (9 * 4) + 0.1


def test_a_partial_last_micro_batch_takes_a_partial_pass() -> None:
    """48 sequences of a replica in micro-batches of 32: `train` computes 32 and 16, a step and a half of 32. Other stacks have no
    micro-batches of two sizes, and are priced at the full size."""
    job = {"global_batch_tokens": 8 * 48 * 1024, "seq_len": 1024, "loss": None}

    def forward_s(size: int, stack: str) -> float:
        cluster = load_cluster("h100:8", stack=stack)
        problem = Problem(load_model("llama-3.2-1b"), cluster, dataclasses.replace(JOB, **job))
        return estimate(problem, Layout(dp=8, micro_batch_seqs=size)).time["forward"]

    full_s = {stack: forward_s(16, stack) for stack in ("shardwise", "megatron")}
    assert forward_s(32, "shardwise") == pytest.approx(full_s["shardwise"], rel=0.02)
    assert forward_s(32, "megatron") == pytest.approx(
        4 / 3 * full_s["megatron"], rel=0.06
    )  # its kernels start less often


def test_an_illegal_layout_is_refused_with_every_reason() -> None:
    with pytest.raises(InputError) as caught:
        estimate_layout(Layout(dp=3, tp=64))
    assert len(caught.value.problems) >= 2


TRAFFIC = {"tp": 3.0, "cp": 1.0, "pp": 0.5, "fsdp": 6.0, "dp": 2.0}


@pytest.mark.parametrize(
    ("overlap", "compute", "exposed"),
    [
        ("per_axis", 5.0, 4.5 + 3.0),  # 4.5 of tp, cp and pp, and what is left of 8 behind 5
        ("per_axis", 100.0, 4.5),
        ("sum", 5.0, 7.5),
        ("sum", 100.0, 0.0),
        ("max", 5.0, 1.0),
        ("max", 100.0, 0.0),
    ],
)
def test_overlap_conventions_expose_the_stated_traffic(
    overlap: OverlapConvention, compute: float, exposed: float
) -> None:
    """S0 adds all traffic, S3 takes the longest, real engines hide the data-parallel part."""
    assert exposed_s(overlap, compute, TRAFFIC) == exposed
    by_axis = exposed_by_axis(overlap, compute, TRAFFIC)
    assert sum(by_axis.values()) == pytest.approx(exposed)
    assert all(0 <= by_axis[axis] <= TRAFFIC[axis] for axis in TRAFFIC)


def test_conventions_are_ordered() -> None:
    """`max` never exposes more than `sum`, which never exposes more than `per_axis`."""
    for layout in LAYOUTS.values():
        times = [estimate_layout(layout, overlap).step_time_s for overlap in ("max", "sum", "per_axis")]  # type: ignore[arg-type]
        assert times == sorted(times)
