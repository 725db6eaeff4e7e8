"""Times of a kernel: the bound without a calibration, and each effect that a calibration adds."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from shardwise.hardware.chips import load_chip
from shardwise.hardware.cluster_loading import load_cluster
from shardwise.hardware.network.links import Cut
from shardwise.hardware.network.switches import all_to_all_seconds_per_byte
from shardwise.hardware.published_constants import published_calibration, with_calibration
from shardwise.hardware.stacks import RoutedLayers, get_stack
from shardwise.layout.layout import Layout
from shardwise.model.job import Job
from shardwise.model.load import load_model
from shardwise.price import Problem
from shardwise.price.estimate import estimate
from shardwise.price.layout_pricer import Pricing
from shardwise.price.overlap import HIDEABLE_TOGETHER, exposed_by_axis, exposed_s
from shardwise.price.roofline import (
    ALIGNED_ELEMENTS,
    CAPACITY_SHARE,
    MISALIGNED_FACTOR,
    SCORE_BYTES,
    KernelWork,
    chip_rates,
)
from shardwise.price.unit_cost import UnitPricer
from shardwise.price.unit_memory import UnitMemory
from shardwise.values.symbolic import CachedSymbolValues, SymbolValues, multiply_symbols

CHIP = load_chip("h100")
CALIBRATION = published_calibration("h100", get_stack("nemo-25"))
RATES = chip_rates(CHIP, CALIBRATION)
BOUND = chip_rates(CHIP, None)
SQUARE = KernelWork(2.0 * 8192**3, 3 * 2.0 * 8192**2, 8192.0, (8192.0, 8192.0), 0.0, 0.0, 0.0, False)


def test_without_a_calibration_a_product_runs_at_the_chips_measured_rate() -> None:
    assert BOUND.kernel_s("contract", "bf16", SQUARE) == pytest.approx(SQUARE.flops / (989e12 * 0.803))
    assert BOUND.kernel_s("scan", "bf16", SQUARE) == BOUND.kernel_s("contract", "bf16", SQUARE)
    assert BOUND.kernel_s("map", "bf16", SQUARE) == pytest.approx(SQUARE.num_bytes / 3.35e12)
    assert BOUND.with_launches_s(1.0, 100, routed=True) == 1.0


def test_a_short_sum_takes_longer_by_the_ramp() -> None:
    """Half of the sum, twice as often: the same FLOPs, k0 once more."""
    ramp = CALIBRATION["matmul_ramp"]
    halved = SQUARE._replace(contraction=4096.0)
    ratio = RATES.kernel_s("contract", "bf16", halved) / RATES.kernel_s("contract", "bf16", SQUARE)
    assert ratio == pytest.approx((1 + ramp / 4096) / (1 + ramp / 8192))
    assert RATES.kernel_s("contract", "bf16", SQUARE) == pytest.approx(
        SQUARE.flops / RATES.flops_per_s("bf16") * (1 + ramp / 8192)
    )


def test_rates_stay_below_their_ceilings_and_grow_with_their_fractions() -> None:
    """Far below the ceiling the rate is the fraction itself; at the ceiling it still has a slope, which the fit follows."""
    chip = RATES.chip
    fractions = np.linspace(0.1, 1.0, 91)
    rates = replace(RATES, matmul_fraction=fractions, memory_fraction=fractions)
    for reached, ceiling in (
        (rates.flops_per_s("bf16") / chip.peak("bf16"), chip.matmul_fraction),
        (rates.bytes_per_s / chip.memory_bytes_per_s, chip.memory_fraction),
    ):
        assert np.all(reached < ceiling)
        assert np.all(np.diff(reached) > 0)
        low = fractions < 0.5 * ceiling
        assert reached[low] == pytest.approx(fractions[low], rel=1e-4)
    measured = replace(rates, is_limited=False)
    assert measured.bytes_per_s == pytest.approx(fractions * chip.memory_bytes_per_s)


@pytest.mark.parametrize("change", [{"extents": (8188.0, 8192.0)}, {"extents": (8192.0, 8190.0)}])
def test_extents_that_do_not_fill_transactions_cost_an_eighth(change: dict[str, object]) -> None:
    assert 8192 % ALIGNED_ELEMENTS == 0
    ratio = RATES.kernel_s("contract", "bf16", SQUARE._replace(**change)) / RATES.kernel_s("contract", "bf16", SQUARE)
    assert ratio == pytest.approx(MISALIGNED_FACTOR, rel=1e-4)
    assert BOUND.kernel_s("contract", "bf16", SQUARE._replace(**change)) == BOUND.kernel_s("contract", "bf16", SQUARE)


def test_few_rows_for_each_expert_fill_tiles_badly() -> None:
    def seconds(rows: float) -> float:
        return float(RATES.kernel_s("contract", "bf16", SQUARE._replace(group_rows=rows)))

    assert seconds(64.0) / seconds(1e9) == pytest.approx(2.0)
    assert seconds(1e9) > RATES.kernel_s("contract", "bf16", SQUARE)


def test_attention_that_writes_its_scores_moves_them_and_computes_the_masked_ones() -> None:
    scores, width = 64.0 * 2048 * 2048, 128.0
    fused = KernelWork(2.0 * scores * width, 0.0, 0.0, (), 0.0, scores, width, False)  # the causal half of two products
    plain = replace(RATES, fused_attention=False)
    moved = scores * SCORE_BYTES[False] / RATES.bytes_per_s
    assert plain.kernel_s("scan", "bf16", fused) > moved * CALIBRATION["attention"]
    assert plain.kernel_s("scan", "bf16", fused) > RATES.kernel_s("scan", "bf16", fused)
    odd = fused._replace(width=127.0)
    assert plain.kernel_s("scan", "bf16", odd) > plain.kernel_s("scan", "bf16", fused)


def test_gaps_add_up_but_a_slow_host_hides_the_device() -> None:
    gaps = 100 * CALIBRATION["launch_s"]
    assert RATES.with_launches_s(1.0, 100, routed=False) == pytest.approx(1.0 + gaps)
    stalled = CALIBRATION["routing_s"]
    assert RATES.with_launches_s(0.0, 100, routed=True) == pytest.approx(math.hypot(gaps, stalled))
    dropping = replace(RATES, has_capacity=True)
    assert dropping.with_launches_s(0.0, 100, routed=True) == pytest.approx(math.hypot(gaps, stalled * CAPACITY_SHARE))
    replayed = replace(RATES, routed=RoutedLayers(graphs="router"))
    assert replayed.with_launches_s(0.0, 100, routed=True) < RATES.with_launches_s(0.0, 100, routed=True)


def test_a_host_is_behind_or_ahead_of_its_device() -> None:
    slow, fast = replace(RATES, host_s=1e-4), replace(RATES, host_s=0.0)
    gaps_s = 100 * CALIBRATION["launch_s"]
    assert slow.host_behind_s(1e-3, 100, routed=False) == pytest.approx(1e-2 - 1e-3 - gaps_s)
    assert slow.host_behind_s(1.0, 100, routed=False) == pytest.approx(1e-2 - 1.0 - gaps_s)
    behind_s = slow.host_behind_s(np.array([1e-3, 1.0]), 100, routed=False)
    assert behind_s.tolist() == [slow.host_behind_s(kernels_s, 100, routed=False) for kernels_s in (1e-3, 1.0)]
    assert slow.host_behind_s(1e-3, 100, routed=True) == 0.0
    assert BOUND.host_behind_s(1e-3, 100, routed=False) == fast.host_behind_s(1e-3, 100, routed=False) == 0.0


def test_a_measured_stack_exposes_awaited_traffic_and_a_share_of_the_rest() -> None:
    traffic = {"tp": 2.0, "fsdp": 6.0, "pp": 2.0}
    assert exposed_s("per_axis", 10.0, traffic, share=0.25) == 2.0 + 2.0
    assert exposed_s("per_axis", 3.0, traffic, share=0.25) == 2.0 + 5.0  # what compute is too short to hide
    assert exposed_by_axis("per_axis", 10.0, traffic, share=0.25) == {"tp": 2.0, "fsdp": 1.5, "pp": 0.5}
    assert exposed_s("per_axis", 10.0, traffic) == 4.0  # by convention tp and pp show and fsdp hides


def test_traffic_hidden_by_a_schedule_stays_hidden_under_a_stack() -> None:
    """DualPipe runs a forward and a backward pass at once, for their exchanges of tokens; gathers hide as the stack has it."""
    traffic = {"ep": 4.0, "fsdp": 2.0, "control": 2.0}
    assert exposed_s("per_axis", 10.0, traffic, HIDEABLE_TOGETHER, share=0.25) == 1.0  # a quarter of the others
    assert exposed_s("per_axis", 10.0, traffic, share=0.25) == 2.0
    assert exposed_s("per_axis", 5.0, traffic, HIDEABLE_TOGETHER, share=0.25) == 3.0
    assert exposed_s("per_axis", 10.0, {**traffic, "tp": 1.0}, HIDEABLE_TOGETHER, share=0.25) == 2.0


def test_copies_of_a_row_leave_a_node_once() -> None:
    """8 of 256 experts on 4 nodes: of 6 copies for other nodes 2.7 leave, one for each target node."""
    network = load_cluster("h100:32").topology
    cuts = [Cut(8, 1), Cut(4, 1)]
    once = all_to_all_seconds_per_byte(network, cuts, 8) / all_to_all_seconds_per_byte(network, cuts)  # type: ignore[arg-type]
    assert once == pytest.approx(4 * (1 - (3 / 4) ** 8) / 8)
    inside = [Cut(8, 1), Cut(1, 8)]
    assert all_to_all_seconds_per_byte(network, inside, 8) == all_to_all_seconds_per_byte(network, inside)  # type: ignore[arg-type]


def test_prices_at_an_array_of_rates_equal_prices_at_each_rate() -> None:
    model, job = load_model("llama-3-8b"), Job(global_batch_tokens=2**20, seq_len=8192)
    cluster = with_calibration(load_cluster("h100:16"), CALIBRATION)
    pricing = Pricing(Problem(model, cluster, job), Layout(fsdp=8, tp=2, recompute="selective"))
    launches = np.array([1e-6, 1e-5, 1e-4])
    batched = pricing.at(replace(RATES, launch_s=launches), cluster.topology).slowest_s()
    single = [
        pricing.at(replace(RATES, launch_s=float(launch_s)), cluster.topology).slowest_s() for launch_s in launches
    ]
    assert batched == pytest.approx(single, rel=1e-12)
    assert list(batched) == sorted(batched)


@pytest.mark.parametrize("layout", ["fsdp=16 recompute=full", "fsdp=4 tp=2 pp=2 recompute=selective"])
def test_other_numbers_of_layers_that_recompute_are_priced_from_the_same_units(layout: str) -> None:
    model, job, cluster = (
        load_model("llama-3-8b"),
        Job(global_batch_tokens=2**20, seq_len=8192),
        load_cluster("h100:16"),
    )

    def pricing(num_layers: int) -> Pricing:
        return Pricing(Problem(model, cluster, job), replace(Layout.parse(layout), recompute_layers=num_layers))

    base = pricing(16)
    costs, memory = base.unit_costs(), list[float]()
    for num_layers in (1, 7, 15):
        derived, direct = base.with_recompute_layers(num_layers), pricing(num_layers)
        assert derived.fullest_device(derived.stages(costs))[1] == direct.fullest_device(direct.stages())[1]
        memory.append(sum(direct.fullest_device(direct.stages())[1].values()))
    assert memory == sorted(memory, reverse=True)
    assert len(set(memory)) == 3


@pytest.mark.parametrize(
    ("owner", "part"),
    [(UnitPricer, "work"), (UnitPricer, "payloads"), (UnitMemory, "activation_bytes"), (UnitMemory, "state_at_rest")],
)
def test_parts_that_do_not_depend_on_rates_are_computed_once(
    owner: type, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, job = load_model("llama-3-8b"), Job(global_batch_tokens=2**20, seq_len=8192)
    cluster = with_calibration(load_cluster("h100:16"), CALIBRATION)
    pricing = Pricing(Problem(model, cluster, job), Layout(fsdp=8, tp=2, recompute="selective"))
    called, usual = [], getattr(owner, part)
    monkeypatch.setattr(owner, part, lambda *arguments: called.append(part) or usual(*arguments))
    at_first, num_called = pricing.slowest_s(), len(called)
    assert num_called > 0
    assert pricing.at(replace(RATES, launch_s=1e-3), cluster.topology).slowest_s() > at_first
    assert len(called) == num_called


def test_an_estimate_with_a_calibration_has_an_interval() -> None:
    model, job = load_model("llama-3-8b"), Job(global_batch_tokens=2**20, seq_len=8192, loss="unfused")
    bound = estimate(Problem(model, load_cluster("h100:16"), job), Layout(fsdp=16, zero_stage=3))
    calibrated = estimate(
        Problem(model, with_calibration(load_cluster("h100:16"), CALIBRATION), job), Layout(fsdp=16, zero_stage=3)
    )
    assert bound.interval90 is None
    assert calibrated.interval90 is not None
    assert calibrated.interval90[0] < calibrated.step_time_s < calibrated.interval90[1]
    assert bound.step_time_s < calibrated.step_time_s
    assert sum(calibrated.time.values()) == pytest.approx(calibrated.step_time_s)
    assert calibrated.memory == bound.memory


def test_frozen_values_evaluate_once() -> None:
    values = SymbolValues({"a": 3})
    frozen = CachedSymbolValues(values)
    square = multiply_symbols(["a", "a"])
    assert square.evaluate(frozen) == square.evaluate(values) == 9.0
    frozen["a"] = 5  # whoever freezes values changes them no more
    assert square.evaluate(frozen) == 9.0


def test_written_attention_scores_are_saved_unless_recomputed() -> None:
    """2 bytes for each score of 32 heads and 2 sequences in each of 32 layers: the softmax, without dropout."""
    model, job = load_model("llama-3-8b"), Job(global_batch_tokens=2**17, seq_len=2048)
    cluster = with_calibration(load_cluster("h100:8"), CALIBRATION)
    plain = replace(cluster, calibration=replace(CALIBRATION, fused_attention=False))
    layout = Layout(fsdp=8, zero_stage=3, micro_batch_seqs=2)
    fused, unfused = (
        estimate(Problem(model, variant, job), layout).memory["activations"] for variant in (cluster, plain)
    )
    assert unfused - fused == pytest.approx(2 * 32 * 2 * 32 * 2048**2)
    recomputed = replace(layout, recompute="selective")
    assert (
        estimate(Problem(model, plain, job), recomputed).memory["activations"]
        == estimate(Problem(model, cluster, job), recomputed).memory["activations"]
    )
