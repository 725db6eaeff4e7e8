"""Traffic of tensor parallelism hides beside products of weight gradients, and while a device waits for its host."""

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


def test_only_stacks_like_megatron_overlap_traffic_with_weight_gradients() -> None:
    kinds = {name: get_stack(name).overlaps_gradients for name in ("megatron-2022", "torchtitan", "maxtext")}
    assert kinds == {"megatron-2022": True, "torchtitan": False, "maxtext": False}


def test_backward_traffic_hides_beside_the_products_of_weight_gradients() -> None:
    """Two of the three collectives of a backward pass with sequence parallelism hide; the gather of output gradients comes
    first."""
    overlapped = block_at(replace(RATES, overlaps_gradients=True))
    traffic_s = PLAIN.backward_traffic_s["tp"]
    assert PLAIN.weight_s > traffic_s > 0
    assert overlapped.backward_traffic_s["tp"] == pytest.approx(traffic_s / 3)
    assert overlapped.forward_traffic_s == PLAIN.forward_traffic_s
    assert overlapped.backward_s == PLAIN.backward_s


def test_traffic_longer_than_the_products_hides_in_part() -> None:
    peaks = {dtype: peak * 20 for dtype, peak in RATES.chip.peak_flops_per_s.items()}
    fast = replace(RATES, chip=replace(RATES.chip, peak_flops_per_s=peaks))
    plain, overlapped = block_at(fast), block_at(replace(fast, overlaps_gradients=True))
    assert 0 < plain.weight_s < plain.backward_traffic_s["tp"] * 2 / 3
    assert plain.backward_traffic_s["tp"] - overlapped.backward_traffic_s["tp"] == pytest.approx(plain.weight_s)


def test_traffic_in_pieces_does_not_hide_a_second_time() -> None:
    pieces = replace(LAYOUT, async_tp=True)
    plain, overlapped = block_at(RATES, pieces), block_at(replace(RATES, overlaps_gradients=True), pieces)
    assert plain.backward_traffic_s["tp"] < PLAIN.backward_traffic_s["tp"]
    assert overlapped.backward_traffic_s == plain.backward_traffic_s


def test_traffic_runs_while_the_device_waits_for_its_host() -> None:
    """A pass takes the host's time; exposed is the traffic beyond the wait."""
    forward = num_kernels(block_parts(pricing_at(RATES)), "forward")
    kernels_s, traffic_s = PLAIN.forward_s, PLAIN.forward_traffic_s["tp"]
    for share in (0.25, 0.5, 2.0):
        rates = replace(RATES, host_s=(kernels_s + share * traffic_s) / forward)
        block = block_at(rates)
        assert block.forward_s == pytest.approx(kernels_s + share * traffic_s)
        assert block.forward_traffic_s["tp"] == pytest.approx(max(1 - share, 0) * traffic_s)


def test_gaps_of_the_list_do_not_count_the_traffic_within_them() -> None:
    """Kernels of the list, the gaps that the host adds, and traffic add up to the unit's time."""
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
    """Seconds of a layer's recomputation and backward pass, and its exposed tensor-parallel traffic."""
    block = block_at(rates, layout)
    return float(block.recompute_s + block.backward_s), float(block.backward_traffic_s["tp"])


def test_time_that_a_host_is_ahead_in_the_backward_pass_offsets_the_recomputation() -> None:
    """Kernels of a backward pass are longer than those of the recomputation, with equally many launches."""
    layout = replace(LAYOUT, recompute="full")
    parts = pricing_at(RATES, layout).pricer.parts(pricing_at(RATES, layout).scheme, "block")
    plain, (kernels_s, traffic_s) = block_at(RATES, layout), backward_of(RATES, layout)
    recomputed, backward = num_kernels(parts, "recompute"), num_kernels(parts, "backward")
    # a host that is late with the recomputation by less than it is early with the backward pass
    of_recomputation, of_backward = plain.recompute_s / recomputed, plain.backward_s / backward
    late, early = sorted((of_recomputation, of_backward))
    host_s = late + 0.25 * (early - late)
    assert host_s * (recomputed + backward) < kernels_s
    assert backward_of(replace(RATES, host_s=host_s), layout) == pytest.approx((kernels_s, traffic_s))
    # equal queues: the device waits for the difference only, during which the traffic of both phases runs
    host_s = (kernels_s + 0.5 * traffic_s) / (recomputed + backward)
    assert sum(backward_of(replace(RATES, host_s=host_s), layout)) == pytest.approx(kernels_s + traffic_s)
    host_s = (kernels_s + 2 * traffic_s) / (recomputed + backward)
    assert backward_of(replace(RATES, host_s=host_s), layout) == pytest.approx((kernels_s + 2 * traffic_s, 0.0))


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9, 1.0, 1.1, 3.0])
def test_the_list_and_the_price_agree_on_the_hosts_waits(share: float) -> None:
    """Kernels, gaps and collectives of the list add up to the unit's time, whichever of the two queues is longer."""
    layout = replace(LAYOUT, recompute="full")
    priced = pricing_at(RATES, layout)
    parts = priced.pricer.parts(priced.scheme, "block")
    phases = ("recompute", "backward")
    unit_s, traffic_s = backward_of(RATES, layout)
    rates = replace(RATES, host_s=share * (unit_s + traffic_s) / sum(num_kernels(parts, phase) for phase in phases))
    listed = InstructionPricer(pricing_at(rates, layout), "block")
    kernels_s = sum(float(priced.pricer.compute_s(parts, phase, priced.values)) for phase in phases)
    kernels_s += sum(
        float(priced.pricer.kernels_s(parts, phase, priced.values, making_gradients=True)) for phase in phases
    )
    gaps_s = sum(num_kernels(parts, phase) * listed.gap_s(phase) for phase in phases)
    assert kernels_s + gaps_s + traffic_s == pytest.approx(sum(backward_of(rates, layout)))
