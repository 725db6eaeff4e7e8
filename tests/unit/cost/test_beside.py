"""What tensor parallelism moves hides beside products of weight gradients, and while a device waits for its host."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.hardware.cluster_loading import load_cluster
from shardwise.hardware.published_constants import published_calibration, with_calibration
from shardwise.hardware.stacks import get_stack
from shardwise.layout.layout import Layout
from shardwise.model.job import Job
from shardwise.model.load import load_model
from shardwise.price import Problem
from shardwise.price.instruction_prices import InstructionPricer
from shardwise.price.layout_pricer import Pricing
from shardwise.price.roofline import Rates, chip_rates
from shardwise.price.unit_cost import ActivationCost
from shardwise.price.unit_inputs import UnitCostInputs

MODEL, CLUSTER = load_model("llama-3-8b"), load_cluster("h100:8")
CALIBRATION = published_calibration("h100", get_stack("megatron-2022"))
RATES = replace(chip_rates(CLUSTER.chip, CALIBRATION), host_s=0.0, overlaps_gradients=False)
LAYOUT = Layout(dp=2, tp=4, sequence_parallel=True)


def pricing_at(rates: Rates, layout: Layout = LAYOUT) -> Pricing:
    """Sequences of 2,048, whose kernels are short."""
    pricing = Pricing(
        Problem(MODEL, with_calibration(CLUSTER, CALIBRATION), Job(global_batch_tokens=2**14, seq_len=2048)), layout
    )
    return pricing.at(rates, pricing.topology)


def block_at(rates: Rates, layout: Layout = LAYOUT) -> ActivationCost:
    pricing = pricing_at(rates, layout)
    return pricing.pricer.activation("block", pricing.scheme, pricing.values, pricing.links)


def block_parts(pricing: Pricing) -> UnitCostInputs:
    return pricing.pricer.parts(pricing.scheme, "block")


def num_kernels(parts: UnitCostInputs, phase: str) -> int:
    return sum(kernel.phase == phase for kernel in parts.kernels)


PLAIN = block_at(RATES)


def test_only_stacks_of_megatrons_kind_move_beside_weight_gradients() -> None:
    kinds = {name: get_stack(name).overlaps_gradients for name in ("megatron-2022", "torchtitan", "maxtext")}
    assert kinds == {"megatron-2022": True, "torchtitan": False, "maxtext": False}


def test_backward_traffic_hides_beside_the_products_of_weight_gradients() -> None:
    """Of the three collectives of a backward pass over parts of sequences two: the gradients of outputs come before all."""
    beside = block_at(replace(RATES, overlaps_gradients=True))
    moved_s = PLAIN.backward_traffic_s["tp"]
    assert PLAIN.weight_s > moved_s > 0
    assert beside.backward_traffic_s["tp"] == pytest.approx(moved_s / 3)
    assert beside.forward_traffic_s == PLAIN.forward_traffic_s
    assert beside.backward_s == PLAIN.backward_s


def test_traffic_that_is_longer_than_those_products_hides_in_part() -> None:
    peaks = {dtype: peak * 20 for dtype, peak in RATES.chip.peak_flops_per_s.items()}
    fast = replace(RATES, chip=replace(RATES.chip, peak_flops_per_s=peaks))
    apart, beside = block_at(fast), block_at(replace(fast, overlaps_gradients=True))
    assert 0 < apart.weight_s < apart.backward_traffic_s["tp"] * 2 / 3
    assert apart.backward_traffic_s["tp"] - beside.backward_traffic_s["tp"] == pytest.approx(apart.weight_s)


def test_traffic_in_pieces_does_not_hide_a_second_time() -> None:
    pieces = replace(LAYOUT, async_tp=True)
    apart, beside = block_at(RATES, pieces), block_at(replace(RATES, overlaps_gradients=True), pieces)
    assert apart.backward_traffic_s["tp"] < PLAIN.backward_traffic_s["tp"]
    assert beside.backward_traffic_s == apart.backward_traffic_s


def test_where_the_device_waits_for_its_host_traffic_runs_meanwhile() -> None:
    """A pass takes what its host takes, and of its traffic what is longer than the wait shows."""
    forward = num_kernels(block_parts(pricing_at(RATES)), "forward")
    own_s, moved_s = PLAIN.forward_s, PLAIN.forward_traffic_s["tp"]
    for share in (0.25, 0.5, 2.0):
        rates = replace(RATES, host_s=(own_s + share * moved_s) / forward)
        found = block_at(rates)
        assert found.forward_s == pytest.approx(own_s + share * moved_s)
        assert found.forward_traffic_s["tp"] == pytest.approx(max(1 - share, 0) * moved_s)


def test_a_gap_of_the_list_holds_no_traffic_that_fills_it() -> None:
    """What the host adds to the kernels of the list, and its traffic, are together what the unit takes."""
    pricing = pricing_at(RATES)
    parts = block_parts(pricing)
    forward = num_kernels(parts, "forward")
    slow = replace(RATES, host_s=(PLAIN.forward_s + 0.5 * PLAIN.forward_traffic_s["tp"]) / forward)
    for rates in (RATES, slow):
        listed, unit = InstructionPricer(pricing_at(rates), "block"), block_at(rates)
        gaps_s = forward * listed.gap_s("forward")
        device_s = float(pricing.pricer.compute_s(parts, "forward", pricing.values))
        assert device_s + gaps_s + PLAIN.forward_traffic_s["tp"] == pytest.approx(
            unit.forward_s + unit.forward_traffic_s["tp"]
        )


def backward_of(rates: Rates, layout: Layout) -> tuple[float, float]:
    """Seconds of a layer's recomputation and backward pass, and what of its tensor-parallel traffic shows."""
    block = block_at(rates, layout)
    return float(block.recompute_s + block.backward_s), float(block.backward_traffic_s["tp"])


def test_what_a_host_gets_ahead_in_a_backward_pass_it_need_not_wait_for_in_the_recomputation() -> None:
    """The device's kernels of a backward pass are longer than those of the recomputation, for as many launches."""
    layout = replace(LAYOUT, recompute="full")
    parts = pricing_at(RATES, layout).pricer.parts(pricing_at(RATES, layout).scheme, "block")
    plain, (own_s, moved_s) = block_at(RATES, layout), backward_of(RATES, layout)
    recomputed, backward = num_kernels(parts, "recompute"), num_kernels(parts, "backward")
    # a host that is late with the recomputation by less than it is early with the backward pass
    of_recomputation, of_backward = plain.recompute_s / recomputed, plain.backward_s / backward
    late, early = sorted((of_recomputation, of_backward))
    host_s = late + 0.25 * (early - late)
    assert host_s * (recomputed + backward) < own_s
    assert backward_of(replace(RATES, host_s=host_s), layout) == pytest.approx((own_s, moved_s))
    # both queues as long: the device waits for no more than the difference, in which the traffic of both phases runs
    host_s = (own_s + 0.5 * moved_s) / (recomputed + backward)
    assert sum(backward_of(replace(RATES, host_s=host_s), layout)) == pytest.approx(own_s + moved_s)
    host_s = (own_s + 2 * moved_s) / (recomputed + backward)
    assert backward_of(replace(RATES, host_s=host_s), layout) == pytest.approx((own_s + 2 * moved_s, 0.0))


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9, 1.0, 1.1, 3.0])
def test_the_list_and_the_price_agree_on_what_a_host_hides(share: float) -> None:
    """Kernels with their gaps and collectives of the list take what the unit takes, whichever of both queues is longer."""
    layout = replace(LAYOUT, recompute="full")
    priced = pricing_at(RATES, layout)
    parts = priced.pricer.parts(priced.scheme, "block")
    phases = ("recompute", "backward")
    own_s, moved_s = backward_of(RATES, layout)
    rates = replace(RATES, host_s=share * (own_s + moved_s) / sum(num_kernels(parts, phase) for phase in phases))
    listed = InstructionPricer(pricing_at(rates, layout), "block")
    kernels_s = sum(float(priced.pricer.compute_s(parts, phase, priced.values)) for phase in phases)
    kernels_s += sum(
        float(priced.pricer.kernels_s(parts, phase, priced.values, making_gradients=True)) for phase in phases
    )
    gaps_s = sum(num_kernels(parts, phase) * listed.gap_s(phase) for phase in phases)
    assert kernels_s + gaps_s + moved_s == pytest.approx(sum(backward_of(rates, layout)))
