"""Where logits do not fit, the advice names the kind of loss that would."""

from __future__ import annotations

from dataclasses import replace

import pytest

import shardwise as sw
from shardwise.present.command_line import main
from shardwise.price import Problem
from shardwise.search.verdicts import describe_leaner_loss, price_leaner_losses
from shardwise.values.engine_policies import LOSS_KERNELS

# One sequence of 32Ki over a vocabulary of 262,144 in 14 bytes a logit: 120 GB of logits beside 20 GB of the rest.
WORDS = ["gemma-3-1b", "h100:1", "--batch-tokens", "32Ki", "--seq-len", "32Ki"]
MODEL, CLUSTER = sw.load_model("gemma-3-1b"), sw.load_cluster("h100:1")
JOB, LAYOUT = sw.Job(global_batch_tokens=2**15, seq_len=2**15), sw.Layout(recompute="full")
UNFUSED = ["--set", "job.loss=unfused"]  # without it the job has the leanest loss of its stack


def test_leaner_losses_are_priced_by_decreasing_memory() -> None:
    priced = price_leaner_losses(Problem(MODEL, CLUSTER, JOB), LAYOUT)
    assert list(priced) == ["fused", "streamed", "chunked"]
    for name, estimated in priced.items():
        assert estimated == sw.estimate(MODEL, CLUSTER, replace(JOB, loss=name), LAYOUT)
        assert estimated.memory["logits"] == pytest.approx(2**15 * 262_144 * LOSS_KERNELS[name].bytes_per_logit)
    assert not price_leaner_losses(Problem(MODEL, CLUSTER, replace(JOB, loss="chunked")), LAYOUT)
    assert not price_leaner_losses(
        Problem(MODEL, CLUSTER, replace(JOB, loss="in_place")), LAYOUT
    )  # the engine has no other


def test_a_search_that_finds_nothing_names_the_loss(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *WORDS, *UNFUSED]) == 3
    assert "logits 120 GB" in capsys.readouterr().err
    assert main(["plan", *WORDS]) == 3
    error = capsys.readouterr().err
    assert "logits 68.7 GB" in error
    assert "it fits with --set job.loss=streamed (54 GB, a step of " in error
    assert main(["plan", *WORDS, "--set", "job.loss=streamed"]) == 0


def test_a_leaner_loss_that_is_not_enough_is_reported() -> None:
    now = sw.estimate(MODEL, CLUSTER, JOB, LAYOUT)
    priced = {
        name: replace(estimated, fits=False)
        for name, estimated in price_leaner_losses(Problem(MODEL, CLUSTER, JOB), LAYOUT).items()
    }
    assert describe_leaner_loss(now, priced) == "--set job.loss=chunked would leave 28.2 GB, which is still too much; "
    elsewhere = replace(now, memory={**now.memory, "activations": 1e12})  # which fill the memory
    assert describe_leaner_loss(elsewhere, priced) == ""
    assert describe_leaner_loss(now, {}) == ""


def test_where_logits_are_not_what_fills_the_memory_no_loss_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama-3-405b", "h100:8", "--batch-tokens", "64Ki", "--seq-len", "8192"]) == 3
    assert "job.loss" not in capsys.readouterr().err


def test_a_layout_that_does_not_fit_is_told_the_loss(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", *WORDS, "--layout", "recompute=full", "--set", "chip.memory_bytes=79.9GB"]) == 0
    assert "smallest change that fits: --set job.loss=streamed\n" in capsys.readouterr().out
    several = ["llama-3.2-1b", "h100:8", "--batch-tokens", "1Mi", "--seq-len", "8Ki", "--layout"]
    assert main(["estimate", *several, "fsdp=8 micro_batch_seqs=4", *UNFUSED]) == 0
    assert "smallest change that fits: micro_batch_seqs 4 → 2; or --set job.loss=fused\n" in capsys.readouterr().out


def test_an_explanation_tells_the_loss_of_a_plan_and_of_another_layout() -> None:
    job = sw.Job(global_batch_tokens=2**20, seq_len=8192, loss="unfused")
    plan = sw.plan("llama-3.2-1b", "h100:8", job)
    against = sw.explain(plan, "fsdp=8 micro_batch_seqs=4 recompute=none").against
    assert against is not None
    assert (against.smallest_change or "").endswith("; or --set job.loss=fused")
    over = sw.explain(sw.plan_layout(plan.model, plan.cluster, job, sw.Layout.parse("fsdp=8 micro_batch_seqs=4")))
    assert (over.fit.smallest_change or "").endswith("; or --set job.loss=fused")
