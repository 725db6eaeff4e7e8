"""Figures of memory and scaling: published numbers, and the effect of every axis on every term."""

from __future__ import annotations

import pytest

from shardwise.hardware import load_cluster
from shardwise.layout.layout import Layout
from shardwise.present.charts.chart import Chart, Curve, Points, StackedBars
from shardwise.present.figures import playbook_charts
from unit.draw.page import marks_of


def part(chart: Chart, panel: int, name: str) -> list[float]:
    (bars,) = marks_of(chart, StackedBars, panel)
    return [part.value for bar in bars.bars for part in bar if part.name == name]


def totals(chart: Chart, panel: int) -> list[float]:
    return list(marks_of(chart, StackedBars, panel)[0].sums)


def values(chart: Chart, panel: int) -> list[float]:
    return [value for _, value in marks_of(chart, Points, panel)[0].points]


def test_memory_of_zero_stages_equals_the_papers() -> None:
    """Rajbhandari et al. 2020, figure 1: 7.5B parameters, 64 devices, K = 12."""
    printed = [round(total / 1e9, 1) for total in marks_of(playbook_charts.zero_bars(), StackedBars)[0].sums]
    assert printed == [120.0, 31.4, 16.6, 1.9]


def test_state_does_not_depend_on_the_length_and_activations_grow_with_it() -> None:
    """Llama 3 8B has 8.03B parameters: 2 bytes of weights and of gradients each, 4 of master weights, 8 of moments."""
    chart = playbook_charts.memory_by_length(("llama-3-8b",), (1024, 2048, 4096))
    for name, width in (("parameters", 2), ("gradients", 2), ("master", 4), ("optimizer", 8)):
        assert part(chart, 0, name) == pytest.approx([8.03e9 * width] * 3, rel=1e-3)
    first, second, third = part(chart, 0, "activations")
    assert second == pytest.approx(2 * first)
    assert third == pytest.approx(4 * first)


def test_more_recomputation_saves_fewer_bytes() -> None:
    chart = playbook_charts.recompute_memory(lengths=(4096,))
    none, selective, full = (part(chart, panel, "activations")[0] for panel in range(3))
    assert full < selective <= none
    # Nothing but the input of each of 32 blocks is kept: 4,096 tokens of 4,096 numbers in two bytes; a little more for the head.
    assert full == pytest.approx(32 * 4096 * 4096 * 2, rel=0.2)


def test_each_stage_of_zero_divides_its_terms() -> None:
    chart = playbook_charts.zero_memory(degrees=(1, 8))
    divided = {0: (), 1: ("optimizer", "master"), 2: ("optimizer", "master", "gradients"),
               3: ("optimizer", "master", "gradients", "parameters")}  # fmt: skip
    for stage, names in divided.items():
        for name in ("optimizer", "master", "gradients", "parameters"):
            single_device, eight_devices = part(chart, stage, name)
            assert eight_devices == pytest.approx(single_device / 8 if name in names else single_device, rel=1e-3), (
                stage,
                name,
            )


def test_sequence_parallelism_divides_the_remaining_activations() -> None:
    chart = playbook_charts.tp_memory(degrees=(1, 8))
    for panel in range(2):
        single_device, eight_devices = part(chart, panel, "parameters")
        assert eight_devices == pytest.approx(single_device / 8, rel=2e-3)
    assert part(chart, 0, "activations")[0] == part(chart, 1, "activations")[0]
    assert part(chart, 1, "activations")[1] < part(chart, 0, "activations")[1]


def test_a_ring_divides_activations_and_no_weights() -> None:
    chart = playbook_charts.cp_memory(lengths=(16384,), degrees=(1, 4))
    assert part(chart, 1, "parameters") == part(chart, 0, "parameters")
    assert part(chart, 1, "activations")[0] == pytest.approx(part(chart, 0, "activations")[0] / 4, rel=0.05)


def test_a_pipeline_divides_weights_and_no_activations() -> None:
    """The playbook's observation: pp micro-batches of 1/pp of the layers, and some, since the head counts as layers."""
    chart = playbook_charts.pp_memory(degrees=(2, 4), lengths=(4096,))
    two, four = part(chart, 0, "parameters")
    assert four < 0.7 * two
    first, second = part(chart, 0, "activations")
    assert second == pytest.approx(first, rel=0.15)


def test_every_parallelism_saves_memory() -> None:
    chart = playbook_charts.memory_savings(lengths=(4096,), policies=("full",))
    single_device, *parallel = totals(chart, 0)
    assert all(total < single_device for total in parallel)
    assert len(chart.panels[0].x.categories) == len(playbook_charts.SAVINGS) == len(parallel) + 1


def test_larger_batches_fit_on_more_devices_and_their_memory_is_the_largest_that_fits() -> None:
    chart = playbook_charts.tp_scaling(degrees=(2, 8))
    fewest_seqs, most_seqs = (round(value) for value in values(chart, 1))
    assert 0 < fewest_seqs < most_seqs
    capacity = load_cluster("h100:1").chip.capacity_bytes
    for tp, num_seqs in ((2, fewest_seqs), (8, most_seqs)):
        layout = Layout(tp=tp, sequence_parallel=True, micro_batch_seqs=num_seqs)
        more = Layout(tp=tp, sequence_parallel=True, micro_batch_seqs=num_seqs + 1)
        assert sum(playbook_charts.fullest("llama-3-8b", playbook_charts.SEQ_LEN, layout).values()) <= capacity
        assert sum(playbook_charts.fullest("llama-3-8b", playbook_charts.SEQ_LEN, more).values()) > capacity


def test_throughput_falls_across_nodes_and_with_bubbles() -> None:
    inside, across = values(playbook_charts.tp_scaling(degrees=(8, 16)), 0)
    assert across < inside
    chart = playbook_charts.pp_scaling(degrees=(8,))
    slow, fast = values(chart, 0)[0], values(chart, 1)[0]
    # 1F1B: idle over ideal time is (p - 1) / m; with m = p - 1 it is 1, with 32 it is 7/32.
    assert fast / slow == pytest.approx((1 + 1) / (1 + 7 / 32), rel=0.1)


def test_memory_of_replicas_does_not_depend_on_their_number() -> None:
    chart = playbook_charts.dp_scaling(degrees=(8, 64))
    first, second = totals(chart, 1)
    assert first == second


def test_bus_bandwidth_stays_below_the_links() -> None:
    """NVLink gives a device 450 GB/s one way."""
    for line in marks_of(playbook_charts.collective_bandwidths(num_nodes=(1, 2, 64)), Curve):
        assert [nodes for nodes, _ in line.points] == [1, 2, 64]
        assert all(0 < rate < 450e9 for _, rate in line.points)
