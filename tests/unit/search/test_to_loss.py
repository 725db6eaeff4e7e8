"""The choice of batch and devices among points whose times are known: what is the soonest, the cheapest, and what is missed."""

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
    found = LossSearch(
        target=TARGET,
        points=points,
        limits=limits or Limits(),
        goal="time" if goal == "time" else "usd",
        chosen=None,
        reason="",
    )
    return choose_point(found)


def test_the_soonest_is_chosen_unless_a_cheaper_one_cannot_be_told_from_it() -> None:
    assert choice(point(100, 10), point(90, 20)).chosen == 1
    near = choice(point(100, 10), point(98, 20))
    assert (near.chosen, near.reason) == (0, "the soonest at the loss, and the cheapest of those within 3% of it")


def test_the_cheapest_is_chosen_unless_a_sooner_one_cannot_be_told_from_it() -> None:
    assert choice(point(100, 10), point(10, 20), goal="usd").chosen == 0
    near = choice(point(100, 10), point(50, 10.2), goal="usd")
    assert (near.chosen, near.reason) == (1, "the fewest dollars to the loss, and the soonest of those within 3% of it")


def test_without_a_price_chip_hours_decide() -> None:
    found = choice(point(100, 10, usd=None), point(90, 30, usd=0.1), goal="usd")
    assert found.chosen == 0
    assert found.reason == "the fewest chip-hours to the loss (no sourced price_usd_per_hour of h100)"


def test_what_misses_the_limits_is_not_chosen() -> None:
    limits = Limits(deadline_s=95.0)
    assert choice(point(100, 10, within=False), point(90, 20), limits=limits).chosen == 1
    none = choice(point(100, 10, within=False), limits=limits)
    assert (none.chosen, none.plan, none.diagonal) == (None, None, ())
    assert none.reason == "no batch on any cluster meets the deadline"


@pytest.mark.parametrize(
    ("noise", "seq_len", "first", "last"), [(2**20, 4096, 2**16, 2**24), (5000, 1024, 1024, 64 * 1024)]
)
def test_batches_are_whole_sequences_around_the_noise_scale(noise: float, seq_len: int, first: int, last: int) -> None:
    found = batches_around(noise, seq_len)
    assert (found[0], found[-1]) == (first, last)
    assert all(batch % seq_len == 0 for batch in found)


def test_a_better_estimate_of_the_noise_scale_is_weighed() -> None:
    """At another noise scale the plans stay, and the choice among them is that of a search with it."""
    problems = [Problem(MODEL, sw.load_cluster(name), JOB) for name in ("h100:4", "h100:8")]
    sizes = (2**14, 2**16, 2**18)
    target = LossTarget(noise=NoiseScale(tokens=2**16, interval90=(2**14, 2**19)))
    found = plan_to_loss(problems, LossQuestion(target, sizes))
    for one in found.sensitivity:
        again = plan_to_loss(problems, LossQuestion(LossTarget(noise=NoiseScale(tokens=one.noise_tokens)), sizes))
        assert again.chosen is not None
        best = again.points[again.chosen]
        assert (one.cluster, one.batch_tokens) == (best.cluster, best.batch_tokens)
        assert best.time is not None
        assert one.loss_s == pytest.approx(best.time.loss_s)


def test_a_cluster_of_the_catalogue_can_be_twice_as_large() -> None:
    names = ("h100:24", "tpu-v5p:4x4x4")
    assert [found.name for found in (double_cluster(sw.load_cluster(name)) for name in names) if found] == [
        "h100:48", "tpu-v5p:4x4x8",
    ]  # fmt: skip


def test_a_cluster_that_does_not_grow_is_said() -> None:
    plan = sw.plan("gpt-2", "h100:8", JOB)
    own = replace(plan, cluster=replace(plan.cluster, name="mine.toml"))
    both, batch, devices = plan_doublings(own, TARGET)
    assert "mine.toml has no cluster of twice its size in the catalogue" in both.problem
    assert both.loss_ratio is devices.loss_ratio is None
    assert batch.loss_ratio is not None


def test_where_nothing_fits_every_point_says_why() -> None:
    problem = Problem(sw.load_model("llama-3-70b"), sw.load_cluster("h100:1"), JOB)
    with pytest.raises(NothingFitsError) as raised:
        plan_to_loss([problem], LossQuestion(TARGET, (2**16, 2**17)))
    assert len(raised.value.problems) == 2


def test_where_no_rate_has_a_source_it_is_not_said_that_nothing_fits() -> None:
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


def test_a_target_of_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="target: tokens is 0"):
        LossTarget(noise=NoiseScale(tokens=1.0), tokens=0.0)
