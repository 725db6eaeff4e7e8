"""Offload and recomputation of a part of the layers: moved and remaining bytes, and values between none and all layers."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from shardwise.hardware.cluster_loading import load_cluster
from shardwise.hardware.published_constants import with_published_constants
from shardwise.hardware.stacks import get_stack
from shardwise.layout.choices import Choices
from shardwise.layout.layers_per_stage import num_recomputed_layers
from shardwise.layout.layout import Layout, Offload
from shardwise.model.job import Job
from shardwise.model.load import load_model
from shardwise.model.parameters_and_flops import num_params
from shardwise.price import Problem
from shardwise.price.estimate import Estimate, estimate
from shardwise.price.simulation.result import simulate
from shardwise.search.nearest_fitting_layout import find_nearest_fitting
from shardwise.search.plan_file import parse_plan, plan_payload
from shardwise.search.planner import make_plan
from shardwise.values.errors import InputError, MissingValueError, NothingFitsError
from shardwise.values.estimate_term_names import TIME_TERMS

MODEL, CLUSTER = load_model("llama-3-8b"), load_cluster("h100:8")
JOB = Job(global_batch_tokens=32 * 8192, seq_len=8192)
BASE = Layout(fsdp=8, zero_stage=3)
PCIE = 63e9  # bytes/s of a PCIe 5.0 x16, each way


def run(layout: Layout, job: Job = JOB) -> Estimate:
    priced_step = estimate(Problem(MODEL, CLUSTER, job), layout)
    assert sum(priced_step.time.values()) == pytest.approx(priced_step.step_time_s, rel=1e-12)
    return priced_step


def test_the_optimizers_state_streams_up_and_down_at_once() -> None:
    """12 bytes for a parameter of the shard, beside the update's own kernels."""
    plain, offloaded = run(BASE), run(replace(BASE, offload="optimizer"))
    stream_s = num_params(MODEL) / 8 * 12 / PCIE
    assert offloaded.time["host"] + offloaded.time["optimizer"] == pytest.approx(stream_s, rel=1e-3)
    assert offloaded.step_time_s - plain.step_time_s == pytest.approx(offloaded.time["host"])
    unchanged = ("parameters", "gradients", "activations")
    assert all(offloaded.memory[term] == plain.memory[term] for term in unchanged)
    # the embedding and the head are the largest units, and two units are on the device at a time
    assert offloaded.memory["master"] == pytest.approx(2 * MODEL.vocab_size * MODEL.d_model / 8 * 4, rel=1e-3)
    assert plain.memory["master"] == pytest.approx(num_params(MODEL) / 8 * 4, rel=1e-3)


def test_deepspeeds_host_updates_the_state_at_the_rate_of_its_memory() -> None:
    """44 bytes of a host's memory for each of the 12 of a parameter's state, over the eight devices of the host."""
    stacks = {name: with_published_constants(CLUSTER, get_stack(name)) for name in ("deepspeed", "megatron")}
    layout = replace(BASE, offload="optimizer")
    step = {name: estimate(Problem(MODEL, cluster, JOB), layout) for name, cluster in stacks.items()}
    update_s = num_params(MODEL) * 44 / (614e9 * 0.75)
    assert step["deepspeed"].time["host"] + step["deepspeed"].time["optimizer"] == pytest.approx(update_s, rel=1e-3)
    assert step["megatron"].time["host"] + step["megatron"].time["optimizer"] == pytest.approx(
        num_params(MODEL) / 8 * 12 / PCIE, rel=1e-3
    )
    simulated = simulate(Problem(MODEL, stacks["deepspeed"], JOB), layout)
    assert simulated.step_time_s == pytest.approx(step["deepspeed"].step_time_s, rel=0.05)


def test_offloaded_activations_leave_two_layers_and_expose_longer_transfers() -> None:
    plain, offloaded = run(BASE), run(replace(BASE, offload="activations"))
    layer = (plain.memory["activations"] - offloaded.memory["activations"]) / (MODEL.num_layers - 2)
    micro_batches = 4
    transfer_s = micro_batches * layer * MODEL.num_layers / PCIE
    passes = plain.time["forward"], plain.time["backward"]
    assert transfer_s > passes[0]  # otherwise nothing is exposed
    assert offloaded.time["host"] == pytest.approx(sum(max(transfer_s - pass_s, 0.0) for pass_s in passes), rel=1e-9)
    assert offloaded.time["host"] + offloaded.hidden["host"] == pytest.approx(2 * transfer_s)


def test_short_transfers_hide() -> None:
    """With full recomputation a single tensor of a layer is offloaded, which takes less than the layer's work."""
    layout = replace(BASE, recompute="full")
    plain, offloaded = run(layout), run(replace(layout, offload="activations"))
    assert offloaded.time["host"] == 0
    assert offloaded.step_time_s == plain.step_time_s
    assert offloaded.memory["activations"] < plain.memory["activations"] / 8


def test_offloading_both_adds_up() -> None:
    optimizer, activations, combined = (
        run(replace(BASE, offload=tensors)) for tensors in ("optimizer", "activations", "both")
    )
    plain = run(BASE)
    saved_bytes = (plain.memory_bytes - optimizer.memory_bytes) + (plain.memory_bytes - activations.memory_bytes)
    assert plain.memory_bytes - combined.memory_bytes == pytest.approx(saved_bytes)
    assert combined.time["host"] == pytest.approx(optimizer.time["host"] + activations.time["host"])
    assert "host" in TIME_TERMS
    assert any("memory the hosts have" in note for note in combined.notes)
    assert not any("memory the hosts have" in note for note in plain.notes)


@pytest.mark.parametrize("offload", ["optimizer", "activations", "both"])
def test_a_chip_without_a_pcie_rate_is_refused_by_name(offload: Offload) -> None:
    bare = replace(CLUSTER, chip=replace(CLUSTER.chip, pcie_bytes_per_s=None))
    with pytest.raises(MissingValueError, match="chip h100: no sourced pcie_bytes_per_s"):
        estimate(Problem(MODEL, bare, JOB), replace(BASE, offload=offload))
    estimate(Problem(MODEL, bare, JOB), BASE)


def test_only_the_first_layers_recompute() -> None:
    assert num_recomputed_layers({"dense_block": 3, "block": 8}, 5) == {"dense_block": 3, "block": 2}
    assert num_recomputed_layers({"dense_block": 0, "block": 8}, 12) == {"dense_block": 0, "block": 8}


@pytest.mark.parametrize("policy", ["selective", "full"])
def test_recomputing_a_part_of_the_layers_costs_that_part(policy: str) -> None:
    """Time of recomputation and bytes of activations are linear in the number of layers."""
    ends = run(BASE), run(replace(BASE, recompute=policy))  # type: ignore[arg-type]
    for layers in (1, 8, 31, 32, 99):
        part = min(layers, 32) / 32
        partial = run(replace(BASE, recompute=policy, recompute_layers=layers))  # type: ignore[arg-type]
        for term in ("forward", "backward", "recompute"):
            assert partial.time[term] == pytest.approx((1 - part) * ends[0].time[term] + part * ends[1].time[term])
        memory = (1 - part) * ends[0].memory["activations"] + part * ends[1].memory["activations"]
        assert partial.memory["activations"] == pytest.approx(memory)
        assert ends[0].hfu / ends[0].mfu <= partial.hfu / partial.mfu <= ends[1].hfu / ends[1].mfu * (1 + 1e-12)
    assert run(replace(BASE, recompute=policy, recompute_layers=32)) == ends[1]  # type: ignore[arg-type]


def test_each_stage_recomputes_the_same_number_of_its_layers() -> None:
    layout = Layout(pp=4, dp=2, schedule="1f1b", recompute="full", recompute_layers=9)
    assert run(layout) == run(replace(layout, recompute_layers=None))  # no stage has more
    fewer = run(replace(layout, recompute_layers=3))
    assert fewer.time["recompute"] == pytest.approx(run(layout).time["recompute"] / 3)


def test_a_number_of_layers_requires_a_policy() -> None:
    with pytest.raises(
        InputError, match="recompute_layers: 4 layers of each stage with recompute = none; set another recompute"
    ):
        run(replace(BASE, recompute_layers=4))
    with pytest.raises(InputError, match="recompute_layers is 0; a whole number of at least 1"):
        replace(BASE, recompute="full", recompute_layers=0)
    with pytest.raises(InputError, match="offload is 'disk'; one of none, optimizer, activations, both"):
        replace(BASE, offload="disk")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="recompute_layers needs another recompute, such as full"):
        Choices().with_pins({"recompute": "none", "recompute_layers": 4}, {})


def test_the_smallest_change_can_be_a_part_of_the_layers() -> None:
    """If memory is slightly short for policy `selective`, only a part of the layers has to recompute."""
    selective = run(replace(BASE, recompute="selective")).memory_bytes
    little_less = replace(CLUSTER, chip=replace(CLUSTER.chip, memory_bytes=0.98 * selective))
    nearest = find_nearest_fitting(Problem(MODEL, little_less, JOB), BASE)
    assert nearest == replace(
        BASE, recompute="full", recompute_layers=16, placement=nearest.placement if nearest else None
    )
    full_recompute = estimate(Problem(MODEL, little_less, JOB), replace(BASE, recompute="full"))
    assert estimate(Problem(MODEL, little_less, JOB), nearest).step_time_s < full_recompute.step_time_s


def test_a_plan_with_offload_and_partial_recompute_is_read_back_from_its_file() -> None:
    pins = {"offload": "both", "recompute": "full", "recompute_layers": 8}
    job = replace(JOB, precision="fp8_deepseek_v3")
    plan = make_plan(Problem(MODEL, CLUSTER, job), choices=Choices().with_pins(pins, {}))
    read_back = parse_plan(json.loads(json.dumps(plan_payload(plan))))
    assert read_back.layout == plan.layout
    assert str(read_back.layout).endswith("recompute=full recompute_layers=8 offload=both")
    assert read_back.estimate == plan.estimate
    assert read_back.cluster == plan.cluster
    assert read_back.job == plan.job == replace(job, loss="fused")


def test_where_nothing_fits_offload_is_named() -> None:
    """Eight GPUs hold no 70B parameters with their state; without the optimizer's they do."""
    large, job = load_model("llama-3-70b"), Job(global_batch_tokens=8 * 8192, seq_len=8192)
    with pytest.raises(NothingFitsError, match=r"it fits with --pin offload=optimizer \(.* GB, a step of .* s\)"):
        make_plan(Problem(large, CLUSTER, job))
    pinned = make_plan(Problem(large, CLUSTER, job), choices=Choices().with_pins({"offload": "optimizer"}, {}))
    assert pinned.estimate.fits
    assert pinned.layout.offload == "optimizer"
    nearest = find_nearest_fitting(Problem(large, CLUSTER, job), replace(BASE, recompute="full"))
    assert nearest is not None
    assert nearest.offload != "none"
    with pytest.raises(NothingFitsError, match=r"offload to the host would leave .* still too much"):
        make_plan(Problem(load_model("llama-3-405b"), CLUSTER, job))
