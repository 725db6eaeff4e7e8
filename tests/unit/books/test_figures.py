"""The data of the pictures: knees, crossings, critical batches and memory are the books' and the estimate's."""

from __future__ import annotations

import pytest

import shardwise as sw
from shardwise.book_formulas.rooflines import block_roofline, load_chip_and_links
from shardwise.book_formulas.rules import mixed_math_over_comms
from shardwise.present.charts.chart import Chart, Curve, Points, RuleLine
from shardwise.present.charts.draw_chart import draw
from shardwise.present.figures.roofline_charts import (
    Strategies,
    attention_share_curves,
    block_chart,
    matmul_curves,
    roofline_chart,
    strategy_ratios,
    strategy_times,
)
from shardwise.price import Problem
from shardwise.price.estimate import stage_memories
from shardwise.values.errors import InputError
from unit.draw.page import check_texts, marks_of


def line(chart: Chart, start: str) -> dict[float, float]:
    (curve,) = [line for line in marks_of(chart, Curve) if line.label.startswith(start)]
    return dict(curve.points)


def test_the_knee_is_at_peak_over_bandwidth() -> None:
    chip, links = load_chip_and_links("tpu-v5e")
    chart = roofline_chart(chip, links, [Points(label="kernel", points=((100.0, 81e12),))])
    for start, peak, rate in (
        ("bf16 from memory", 197e12, 810e9), ("int8 from memory", 394e12, 810e9), ("bf16 from torus", 197e12, 90e9),
    ):  # fmt: skip
        low, knee, high = sorted(line(chart, start))
        assert knee == peak / rate
        assert line(chart, start)[knee] == pytest.approx(peak, rel=1e-12)
        assert line(chart, start)[high] == peak
        assert line(chart, start)[low] == pytest.approx(rate * low)
    assert marks_of(chart, RuleLine)[0].at == 197e12 / 810e9


def test_formats_with_the_same_peak_share_a_line() -> None:
    """Also where peaks are nearly the same."""
    chip, links = load_chip_and_links("mi300x")
    assert [line.label for line in marks_of(roofline_chart(chip, links, []), Curve)][
        1
    ] == "fp8, int8 from memory, 5.3 TB/s"
    chip, links = load_chip_and_links("h100")
    labels = [line.label for line in marks_of(roofline_chart(chip, links, []), Curve)]
    assert labels[0] == "bf16, fp16 from memory, 3.35 TB/s"
    assert len(labels) == 6  # each peak but fp16 and int8, and two networks


def test_kernels_in_the_same_place_share_a_point() -> None:
    chip, links = load_chip_and_links("tpu-v5e")
    kernels = [
        Points(label=label, points=((x, y),), share=share)
        for label, x, y, share in (
            ("one", 100.0, 81e12, 0.5),
            ("other", 100.1, 81e12, 0.25),
            ("third", 200.0, 162e12, 0.0),
        )
    ]
    assert [(p.label, p.points[0][0], p.share) for p in marks_of(roofline_chart(chip, links, kernels), Points)] == [
        ("one, and 1 alike: 75.0% of the time", 100.0, 0.75),
        ("third", 200.0, 0.0),
    ]


def test_shares_of_a_blocks_kernels_add_up_to_its_time() -> None:
    """Elementwise operations have no place on a roofline; the subtitle states their share."""
    chip, links = load_chip_and_links("h100")
    roofline = block_roofline(sw.load_model("llama-3-70b"), chip, 1, 8192, links=links)
    chart = block_chart(roofline)
    elementwise = sum(operation.seconds for operation in roofline.operations if not operation.flops)
    total = roofline.total_s("forward") + roofline.total_s("backward")
    assert sum(point.share for point in marks_of(chart, Points)) + elementwise / total == pytest.approx(1.0)
    assert f"{elementwise / total:.1%} goes to elementwise" in chart.subtitle
    check_texts(draw(chart))


@pytest.mark.parametrize("name", ["h100", "mi300x", "tpu-v5e", "tpu-v5p"])
def test_each_link_of_a_chip_is_a_line(name: str) -> None:
    """Lines of links are in the rooflines of the chip and in those of a block on it; without links the chip's lines remain."""
    chip, links = load_chip_and_links(name)
    model = sw.load_model("llama-3-8b")
    block, unlinked = (
        block_chart(block_roofline(model, chip, 1, 8192, links=shown_links)) for shown_links in (links, None)
    )
    assert links
    for link in links:
        assert line(roofline_chart(chip, links, []), f"bf16 from {link}")
        assert line(block, f"bf16 from {link}")
    assert len(marks_of(block, Curve)) == len(marks_of(unlinked, Curve)) + len(links)


def test_curves_reach_the_peak_at_their_markers() -> None:
    chart = matmul_curves(sw.load_chip("tpu-v5e"), ((1024, 4096), (8192, 28672)), weights="int8")
    for curve, marker in zip(marks_of(chart, Curve), marks_of(chart, RuleLine), strict=True):
        points = dict(curve.points)
        assert points[marker.at] == pytest.approx(197e12, rel=1e-12)
        assert max(points[x] for x in points if x < marker.at) < 197e12 * (1 - 1e-6)
        assert {points[x] for x in points if x > marker.at * 1.001} == {197e12}


def test_attention_relative_to_the_mlp_equals_the_books_formulas() -> None:
    """S0, part 3, question 4: a prompt's attention grows with T, and a step of decoding with the keys that it reads."""
    model, chip = sw.load_model("llama-3-8b"), sw.load_chip("tpu-v5e")
    chart = attention_share_curves(model, chip, batches=(16, 256))
    prompt, smaller, larger = (
        line(chart, start) for start in ("a prompt", "one token for each of 16", "one token for each of 256")
    )
    longest = max(prompt)
    assert prompt[longest] == pytest.approx(4 * longest * 32 * 128 / (6 * 4096 * 14336))
    keys, weights = 2 * longest * 8 * 128 + 2 * 32 * 128, 3 * 4096 * 14336
    assert smaller[longest] == pytest.approx(16 * keys / (weights + 3 * 16 * (4096 + 14336)), rel=1e-6)
    assert all(larger[s] > smaller[s] for s in smaller)
    assert all(smaller[s] > prompt[s] for s in smaller)


def test_ratios_on_a_small_slice_equal_the_books() -> None:
    """S0's figure on 4x4x4 with F = 30,000: FSDP crosses 1 at 850, the mix at 4·2550²/(2·30,000), TP nowhere."""
    chart = strategy_ratios(sw.load_cluster("tpu-v5p:4x4x4"))
    mixed, fsdp, tp = (line(chart, start) for start in ("FSDP ×", "FSDP,", "TP,"))
    at_mixed, at_fsdp = (marker.at for marker in marks_of(chart, RuleLine))
    assert at_fsdp == pytest.approx(850)
    assert at_mixed == pytest.approx(433.5)
    assert fsdp[at_fsdp] == pytest.approx(1)
    assert mixed[at_mixed] == pytest.approx(1)
    assert list(tp.values()) == pytest.approx([3 * 30_000 / (64 * 2550)] * len(tp))
    for tokens, ratio in mixed.items():
        assert ratio == pytest.approx(mixed_math_over_comms(tokens, 30_000, 2550))


def test_the_books_crossing_in_text_is_that_of_a_wider_layer() -> None:
    """Its "roughly 400" is for F = 32,768."""
    chart = strategy_ratios(sw.load_cluster("tpu-v5p:4x4x4"), d_ff=32_768)
    assert marks_of(chart, RuleLine)[0].at == pytest.approx(396.9, abs=0.05)


def test_times_on_a_large_slice_equal_the_books() -> None:
    """S0's figure on 16x16x16: the mix is compute-bound from 1.6e6 tokens, which the book misprints as 1.6e10."""
    chart = strategy_times(sw.load_cluster("tpu-v5p:16x16x16"))
    compute, mixed, fsdp = (dict(marks_of(chart, Curve)[i].points) for i in (0, 1, 4))
    at_mixed, at_fsdp = (marker.at for marker in marks_of(chart, RuleLine))
    assert at_mixed == pytest.approx(1.6e6, rel=0.02)
    assert at_fsdp == pytest.approx(4096 * 850)
    slope = 4 * 8192 * 32_768 / (4096 * 459e12)
    assert compute == pytest.approx({batch: slope * batch for batch in compute})
    assert mixed[at_mixed] == pytest.approx(slope * at_mixed)
    assert fsdp[at_fsdp] == pytest.approx(slope * at_fsdp)


def test_no_other_split_is_faster_than_the_best() -> None:
    layer = Strategies(sw.load_cluster("tpu-v5p:16x16x16"), 8192, 32_768)
    for batch in (5e5, 2e6, 1e7):
        best = layer.split(batch, layer.best_tp(batch)).comms_s
        assert all(layer.split(batch, tp).comms_s >= best for tp in (2, 4, 8, 16, 32))
    assert layer.mixes((1e6, 1e9)) == (1e6,)


@pytest.mark.parametrize("cluster", ["h100:8", "tpu-v5p:1x1x4"])
def test_strategies_require_a_torus_with_axes(cluster: str) -> None:
    with pytest.raises(InputError, match="a torus of two axes or more"):
        Strategies(sw.load_cluster(cluster), 8192, 32_768)


@pytest.mark.parametrize("schedule", ["1f1b", "afab"])
def test_memory_of_the_fullest_stage_equals_the_estimates(schedule: str) -> None:
    model, cluster = sw.load_model("llama-3-8b"), sw.load_cluster("h100:16")
    job = sw.Job(global_batch_tokens=2**19, seq_len=4096)
    layout = sw.Layout(fsdp=4, pp=4, zero_stage=1, recompute="full", schedule=schedule)  # type: ignore[arg-type]
    stages = stage_memories(Problem(model, cluster, job), layout)
    assert len(stages) == 4
    fullest = max(stages, key=lambda stage: sum(stage.values()))
    assert fullest == sw.estimate(model, cluster, job, layout).memory


def test_illegal_layouts_have_no_memory() -> None:
    model, cluster = sw.load_model("llama-3-8b"), sw.load_cluster("h100:8")
    with pytest.raises(InputError):
        stage_memories(Problem(model, cluster, sw.Job(global_batch_tokens=2**19, seq_len=4096)), sw.Layout(dp=4))
