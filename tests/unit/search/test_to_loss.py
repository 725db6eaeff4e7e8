"""The choice of batch and devices among priced points: the fastest, the cheapest, and points beyond the limits."""

from __future__ import annotations

from dataclasses import replace

import pytest

import shardwise as sw
from shardwise.batch_size.noise_scale import NoiseScale
from shardwise.batch_size.tradeoff import LossTarget
from shardwise.hardware.cluster_loading import double_cluster
from shardwise.price import Limits, Problem
from shardwise.search.loss_time import LossPoint, LossSearch, LossTime, plan_doublings, time_to_loss
from shardwise.search.plan_to_target_loss import LossQuestion, batches_around, choose_point, plan_to_loss
from shardwise.values.errors import InputError, MissingValueError, NothingFitsError

TARGET = LossTarget(noise=NoiseScale(tokens=2.0**20))
MODEL = sw.load_model("gpt-2")
JOB = sw.Job(global_batch_tokens=2**16, seq_len=1024)


def point(loss_s: float, chip_hours: float, usd: float | None = 1.0, *, within: bool = True) -> LossPoint:
    time = LossTime(
        batch_tokens=2**20, num_devices=8, step_time_s=1.0, batch_over_noise=1.0, side="at", steps=1.0, tokens=1.0,
        steps_ratio=2.0, tokens_ratio=2.0, token_s=loss_s / 2, loss_s=loss_s, chip_hours=chip_hours,
        usd=None if usd is None else usd * chip_hours,
    )  # fmt: skip
    return LossPoint(
        cluster=f"h100:{chip_hours:g}", chip="h100", num_devices=8, batch_tokens=2**20, time=time, within_limits=within
    )


def choice(*points: LossPoint, goal: str = "time", limits: Limits | None = None) -> LossSearch:
    search = LossSearch(
        target=TARGET,
        points=points,
        limits=limits or Limits(),
        goal="time" if goal == "time" else "usd",
        chosen=None,
        reason="",
    )
    return choose_point(search)


def test_the_fastest_is_chosen_unless_a_cheaper_one_is_within_its_interval() -> None:
    assert choice(point(100, 10), point(90, 20)).chosen == 1
    near = choice(point(100, 10), point(98, 20))
    assert (near.chosen, near.reason) == (0, "the soonest at the loss, and the cheapest of those within 3% of it")


def test_the_cheapest_is_chosen_unless_a_faster_one_is_within_its_interval() -> None:
    assert choice(point(100, 10), point(10, 20), goal="usd").chosen == 0
    near = choice(point(100, 10), point(50, 10.2), goal="usd")
    assert (near.chosen, near.reason) == (1, "the fewest dollars to the loss, and the soonest of those within 3% of it")


def test_without_a_price_chip_hours_decide() -> None:
    search = choice(point(100, 10, usd=None), point(90, 30, usd=0.1), goal="usd")
    assert search.chosen == 0
    assert search.reason == "the fewest chip-hours to the loss (no sourced price_usd_per_hour of h100)"


def test_points_beyond_the_limits_are_not_chosen() -> None:
    limits = Limits(deadline_s=95.0)
    assert choice(point(100, 10, within=False), point(90, 20), limits=limits).chosen == 1
    none = choice(point(100, 10, within=False), limits=limits)
    assert (none.chosen, none.plan, none.diagonal) == (None, None, ())
    assert none.reason == "no batch on any cluster meets the deadline"


@pytest.mark.parametrize(
    ("noise", "seq_len", "first", "last"), [(2**20, 4096, 2**16, 2**24), (5000, 1024, 1024, 64 * 1024)]
)
def test_batches_are_whole_sequences_around_the_noise_scale(noise: float, seq_len: int, first: int, last: int) -> None:
    batches = batches_around(noise, seq_len)
    assert (batches[0], batches[-1]) == (first, last)
    assert all(batch % seq_len == 0 for batch in batches)


def test_the_value_of_a_better_noise_scale_equals_searches_with_it() -> None:
    """At another noise scale the plans stay the same, and the choice equals that of a search with this noise scale."""
    problems = [Problem(MODEL, sw.load_cluster(name), JOB) for name in ("h100:4", "h100:8")]
    sizes = (2**14, 2**16, 2**18)
    target = LossTarget(noise=NoiseScale(tokens=2**16, interval90=(2**14, 2**19)))
    search = plan_to_loss(problems, LossQuestion(target, sizes))
    for row in search.sensitivity:
        repeated = plan_to_loss(problems, LossQuestion(LossTarget(noise=NoiseScale(tokens=row.noise_tokens)), sizes))
        assert repeated.chosen is not None
        best = repeated.points[repeated.chosen]
        assert (row.cluster, row.batch_tokens) == (best.cluster, best.batch_tokens)
        assert best.time is not None
        assert row.loss_s == pytest.approx(best.time.loss_s)


def test_a_cluster_of_the_catalogue_can_be_twice_as_large() -> None:
    names = ("h100:24", "tpu-v5p:4x4x4")
    assert [doubled.name for doubled in (double_cluster(sw.load_cluster(name)) for name in names) if doubled] == [
        "h100:48", "tpu-v5p:4x4x8",
    ]  # fmt: skip


def test_a_cluster_that_cannot_be_doubled_is_reported() -> None:
    plan = sw.plan("gpt-2", "h100:8", JOB)
    file_plan = replace(plan, cluster=replace(plan.cluster, name="mine.toml"))
    batch_and_devices, batch, devices = plan_doublings(file_plan, TARGET)
    assert "mine.toml has no cluster of twice its size in the catalogue" in batch_and_devices.problem
    assert batch_and_devices.loss_ratio is devices.loss_ratio is None
    assert batch.loss_ratio is not None


def test_every_point_states_why_it_does_not_fit() -> None:
    problem = Problem(sw.load_model("llama-3-70b"), sw.load_cluster("h100:1"), JOB)
    with pytest.raises(NothingFitsError) as raised:
        plan_to_loss([problem], LossQuestion(TARGET, (2**16, 2**17)))
    assert len(raised.value.problems) == 2


def test_points_without_a_sourced_rate_are_not_reported_as_not_fitting() -> None:
    problem = Problem(
        sw.load_model("llama-3-8b"), sw.load_cluster("a100-80gb:8"), replace(JOB, precision="fp8_deepseek_v3")
    )
    with pytest.raises(MissingValueError, match="no sourced fp8"):
        plan_to_loss([problem], LossQuestion(TARGET, (2**20,)))


def test_times_and_dollars_to_the_loss_carry_the_interval_of_the_step() -> None:
    plan = sw.plan(MODEL, sw.load_cluster("h100:8", stack="megatron"), JOB)
    time = time_to_loss(plan, TARGET)
    assert plan.estimate.interval90 is not None
    ratios = [end / plan.estimate.step_time_s for end in plan.estimate.interval90]
    for name in ("loss_s", "token_s", "chip_hours", "usd"):
        assert [end / getattr(time, name) for end in getattr(time, f"{name}_interval90")] == pytest.approx(
            ratios, rel=0.01
        )


def test_an_empty_target_is_refused() -> None:
    with pytest.raises(InputError, match="target: tokens is 0"):
        LossTarget(noise=NoiseScale(tokens=1.0), tokens=0.0)
