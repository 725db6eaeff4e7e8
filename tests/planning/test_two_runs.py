"""Two published runs, one of which the demo plans, and the books' numbers for the first."""

from __future__ import annotations

import pytest

import shardwise as sw
from shardwise.model.job import OVERLAP_CONVENTIONS, OverlapConvention


@pytest.fixture(scope="module", params=OVERLAP_CONVENTIONS)
def overlap(request: pytest.FixtureRequest) -> OverlapConvention:
    value: OverlapConvention = request.param
    return value


def pod_job(overlap: OverlapConvention) -> sw.Job:
    return sw.Job(global_batch_tokens=4 * 2**20, seq_len=4096, tokens=15e12, overlap=overlap)


def test_the_pods_plan_is_at_least_as_fast_as_the_books(overlap: OverlapConvention) -> None:
    """S3, section 2.5: (dp·fsdp·cp = 2240, tp = 4) on 16x20x28 chips."""
    model, cluster, job = sw.load_model("llama-3-70b"), sw.load_cluster("tpu-v5p:16x20x28"), pod_job(overlap)
    plan = sw.plan(model, cluster, job)
    books = []
    for recompute in ("none", "full"):
        for sequence_parallel in (False, True):
            layout = sw.Layout(
                fsdp=1120, cp=2, tp=4, zero_stage=3, recompute=recompute, sequence_parallel=sequence_parallel
            )  # fmt: skip
            books.append(sw.estimate(model, cluster, job, layout))
    assert plan.estimate.fits
    assert plan.estimate.step_time_s <= min(book.step_time_s for book in books if book.fits) * (1 + 1e-12)


def test_the_pods_rules() -> None:
    model, cluster = sw.load_model("llama-3-70b"), sw.load_cluster("tpu-v5p:16x20x28")
    rules = {rule.name: rule for rule in sw.book_rules(model, cluster, pod_job("per_axis"))}
    assert rules["tokens_per_chip"].value == pytest.approx(468.1, abs=0.05)
    assert rules["fsdp_min_tokens_per_chip"].value == pytest.approx(850, rel=1e-9)
    assert "communication-bound" in rules["fsdp_min_tokens_per_chip"].verdict
    assert rules["mixed_min_tokens_per_chip_sum"].value == pytest.approx(453.6, abs=0.05)
    assert rules["mixed_min_tokens_per_chip_max"].value == pytest.approx(113.4, abs=0.05)
    assert "compute-bound" in rules["mixed_min_tokens_per_chip_sum"].verdict
    assert rules["fsdp_optimal_degree"].value == pytest.approx(1619, abs=0.5)
    assert rules["train_days_at_40_mfu"].value == pytest.approx(44.3, abs=0.05)


def test_512_h100() -> None:
    model, cluster = sw.load_model("llama-3-70b"), sw.load_cluster("h100:512")
    job = sw.Job(global_batch_tokens=4 * 2**20, seq_len=8192)
    plan = sw.plan(model, cluster, job)
    layout = sw.Layout(
        tp=8, pp=4, fsdp=16, zero_stage=3, recompute="selective", sequence_parallel=True, schedule="1f1b"
    )  # fmt: skip
    assert plan.estimate.margin >= 0.10
    assert plan.estimate.step_time_s < sw.estimate(model, cluster, job, layout).step_time_s
    assert 0.4 < plan.estimate.mfu < cluster.chip.matmul_fraction
    assert plan.estimate.mfu < plan.estimate.hfu


def test_overlap_conventions_are_ordered(overlap: OverlapConvention) -> None:
    """Traffic that overlaps with more work is never exposed longer."""
    model, cluster = sw.load_model("llama-3-70b"), sw.load_cluster("tpu-v5p:16x20x28")
    layout = sw.Layout(fsdp=1120, cp=2, tp=4, zero_stage=3, recompute="full", sequence_parallel=True)
    step = {o: sw.estimate(model, cluster, pod_job(o), layout).step_time_s for o in OVERLAP_CONVENTIONS}
    assert step["max"] <= step["sum"] <= step["per_axis"]
    assert step[overlap] > 0


def test_uneven_batches_are_priced_at_the_fullest_replica_and_stated() -> None:
    """8,960 chips and 1,024 sequences: 1,024 of 1,120 replicas work at cp = 2, or 1,120 sequences fill them."""
    model, cluster, job = sw.load_model("llama-3-70b"), sw.load_cluster("tpu-v5p:16x20x28"), pod_job("per_axis")
    layout = sw.Layout(fsdp=1120, cp=2, tp=4, zero_stage=3, recompute="full", sequence_parallel=True)
    waste = sw.estimate(model, cluster, job, layout).waste
    assert waste["sequences"] == pytest.approx(1 - 1024 / 1120)
    assert waste["nearest_full_batch_tokens"] == 1120 * 4096


def test_a_job_that_does_not_fit_is_refused_with_the_smallest_miss() -> None:
    with pytest.raises(sw.NothingFitsError, match="too much"):
        sw.plan(
            sw.load_model("llama-3-405b"), sw.load_cluster("h100:8"), sw.Job(global_batch_tokens=65536, seq_len=8192)
        )
