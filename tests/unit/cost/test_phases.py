"""The price of a run whose batch changes: the sum of its phases, each priced by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import shardwise as sw
from shardwise.batch_size.batch_schedule import parse_batch_schedule
from shardwise.layout.layout import Layout
from shardwise.present.command_line import main
from shardwise.present.reports.wording import run_lines
from shardwise.price import Problem
from shardwise.price.reliability import Reliability
from shardwise.price.training_run import Run, price_scheduled_run
from shardwise.search.plan_file import load_plan
from shardwise.values.errors import InputError

MODEL, CLUSTER = sw.load_model("llama-3-8b"), sw.load_cluster("h100:64")
JOB = sw.Job(global_batch_tokens=2**22, seq_len=8192, tokens=2e12)
LAYOUT = Layout(fsdp=64, zero_stage=3)
NEVER_FAILS = Reliability(failures_per_device_hour=0.0)


def run_of(text: str, layout: Layout = LAYOUT, **changes: object) -> Run:
    job = replace(JOB, **changes)  # type: ignore[arg-type]
    return price_scheduled_run(Problem(MODEL, CLUSTER, job), layout, parse_batch_schedule(text), NEVER_FAILS)


def seconds(batches: Sequence[tuple[int, float]]) -> float:
    """Seconds of the steps of each batch, where each batch is priced as a separate job."""
    jobs = ((replace(JOB, global_batch_tokens=batch), count) for batch, count in batches)
    return sum(count * sw.estimate(MODEL, CLUSTER, job, LAYOUT).step_time_s for job, count in jobs)


def test_days_and_dollars_are_the_sums_of_the_phases() -> None:
    first = -(-(10**11) // 2**20) * 2**20  # the first multiple of 2^20 from 100e9 on
    remaining_steps = (2e12 - first) / 2**22
    run = run_of("0:1Mi,100G:4Mi")
    assert [phase.num_steps for phase in run.phases] == pytest.approx([first / 2**20, remaining_steps])
    assert run.ideal_days * 86400 == pytest.approx(
        seconds([(2**20, first / 2**20), (2**22, remaining_steps)]), rel=1e-12
    )
    assert run.days == run.ideal_days == pytest.approx(sum(phase.days for phase in run.phases))
    assert run.usd == pytest.approx(sum(phase.usd or 0.0 for phase in run.phases))
    assert run.usd == pytest.approx(run.days * 24 * 64 * (CLUSTER.chip.price_usd_per_hour or 0.0))
    assert run.num_steps == pytest.approx(first / 2**20 + remaining_steps, abs=1)


def test_a_single_phase_equals_the_run_without_a_schedule() -> None:
    plan = sw.plan(MODEL, CLUSTER, JOB, reliability=NEVER_FAILS)
    plain = plan.run
    priced = price_scheduled_run(plan.problem, plan.layout, parse_batch_schedule("4Mi"), NEVER_FAILS)
    assert plain is not None
    assert priced.days == pytest.approx(plain.days, rel=1e-12)
    assert [quantity.source for quantity in priced.inputs] == [quantity.source for quantity in plain.inputs]


def test_a_smaller_batch_has_fewer_micro_batches_and_costs_more_for_a_token() -> None:
    ramped, constant = run_of("0:512Ki,500G:4Mi"), run_of("4Mi")
    assert ramped.days > constant.days
    assert next(quantity.source for quantity in ramped.inputs if quantity.name == "step_time_s") == "mean of the phases"
    assert any("524,288 tokens: 953,675 steps of" in line for line in run_lines(ramped))


@pytest.mark.parametrize(
    ("text", "changes", "part"),
    [
        ("0:1Mi,100G:4Mi", {"tokens": None}, "found no --tokens"),
        ("noise:lambda=1Mi", {}, "the noise scale of the run is not known before it"),
        ("0:1M", {}, "a batch of 1,000,000 tokens is not a whole number of sequences of 8,192; the nearest are"),
    ],
)
def test_schedules_that_cannot_be_priced_are_refused(text: str, changes: dict[str, object], part: str) -> None:
    with pytest.raises(InputError) as caught:
        run_of(text, **changes)
    assert part in str(caught.value)


FLAGS = [
    "plan",
    "llama-3-8b",
    "h100:8",
    "--batch-tokens",
    "512Ki",
    "--seq-len",
    "8Ki",
    "--tokens",
    "100G",
    "--pin",
    "fsdp=8",
]


def test_a_plan_keeps_the_phases_of_its_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    assert main([*FLAGS, "--batch-schedule", "0:128Ki,1G:512Ki", "--out", str(out), "-v"]) == 0
    run = load_plan(out).run
    assert run is not None
    assert (run.phases[0].batch_tokens, run.phases[0].num_steps) == (131072, 7630.0)
    assert "131,072 tokens: 7,630 steps of" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "part"),
    [
        (
            ["--batch-schedule", "1Mi", "--sweep", "gpus=8,16"],
            "--batch-schedule: found with --sweep; a plan of one cluster",
        ),
        (
            ["h100:16", "--batch-schedule", "1Mi"],
            "--batch-schedule: found with 2 clusters; a plan of one cluster is required",
        ),
        (["--batch-schedule", "much"], "--batch-schedule: found 'much'"),
    ],
)
def test_a_schedule_requires_a_single_plan(more: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*FLAGS[:3], *more[:1], *FLAGS[3:], *more[1:]] if more[0][0] != "-" else [*FLAGS, *more]
    assert main(flags) == 2
    assert part in capsys.readouterr().err
