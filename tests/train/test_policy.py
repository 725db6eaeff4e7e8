"""Abnormal steps are detected; the run stops, skips them or goes back, and records it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from train import stand_in
from train.stand_in import Bigram, small_plan, write_inputs

from shardwise.records.step_log import StepLog, read_log
from shardwise.run.recipe import AnomalyAction
from shardwise.run.trainer.anomaly_detector import AnomalyDetector
from shardwise.run.trainer.flags import build_parser, parse_settings
from shardwise.run.trainer.preflight import open_data
from shardwise.search.plan_file import load_plan
from shardwise.train import rank_main
from shardwise.values.errors import InputError

SPIKES: Sequence[str] = ("--set", "recipe.spike_window=6")


@pytest.fixture
def inputs(tmp_path: Path) -> list[str]:
    flags = write_inputs(tmp_path, small_plan())
    return [
        *flags,
        "--learning-rate",
        "5",
        "--schedule",
        "constant",
        "--steps",
        "20",
        "--checkpoint-every",
        "5",
        *SPIKES,
    ]


def train(flags: Sequence[str], monkeypatch: pytest.MonkeyPatch, spikes: Mapping[int, float]) -> int:
    monkeypatch.setattr(Bigram, "spikes", spikes)
    return rank_main(flags, stand_in.parts())


def log_of(flags: Sequence[str]) -> StepLog:
    return read_log(Path(flags[4]) / "log.jsonl")


def train_steps(flags: Sequence[str], steps: Sequence[int]) -> tuple[torch.Tensor, dict[int, float]]:
    """The bigram's logits after these steps alone, by a loop of the test's own, and their losses."""
    settings = parse_settings(build_parser().parse_args(flags))
    batches = open_data(load_plan(settings.plan), settings).train
    logits, losses = torch.zeros(stand_in.VOCAB, stand_in.VOCAB, dtype=torch.float64), {}
    for step in steps:
        batch = batches.batch(step - 1)
        parameter = logits.clone().requires_grad_()
        loss = stand_in.summed_loss(parameter, batch.inputs_BT, batch.targets_BT) / batch.num_targets
        loss.backward()
        assert parameter.grad is not None
        logits, losses[step] = logits - 5 * parameter.grad, float(loss.detach())
    return logits, losses


@pytest.mark.parametrize("name", ["loss_spike", "norm_spike"])
def test_a_spike_lies_above_the_mean_by_deviations_of_the_steps_before(name: str) -> None:
    values = np.random.default_rng(0).normal(3.0, 0.1, 200)
    actions: dict[str, AnomalyAction] = {
        "non_finite": "stop",
        "loss_spike": "ignore",
        "norm_spike": "ignore",
        name: "skip",
    }
    judge = AnomalyDetector(actions, window=50, deviations=3.0)
    for number, value in enumerate(values.tolist()):
        before = values[max(number - 50, 0) : number]
        limit = float(before.mean() + 3 * before.std(ddof=1)) if len(before) >= 25 else 1e9
        for tried, is_spike in ((limit - 1e-9, False), (limit + 1e-9, len(before) >= 25)):
            loss, norm = (tried, 1.0) if name == "loss_spike" else (1.0, tried)
            assert (judge.check(1, loss, norm) is not None) is is_spike
        judge.record(*((value, 1.0) if name == "loss_spike" else (1.0, value)))


def test_a_batch_that_is_left_out_changes_nothing(inputs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert train([*inputs, "--policy", "loss-spike=skip"], monkeypatch, {8: 10.0}) == 0
    log = log_of(inputs)
    (event,) = [event for event in log.events if "policy" in event]
    assert (event["event"], event["step"], event["policy"]) == ("skip", 8, "loss_spike")
    assert event["done"] == "its batch is left out: no weight was updated"
    _, losses = train_steps(inputs, [step for step in range(1, 21) if step != 8])
    assert {record.step: record.loss for record in log.steps if record.step != 8} == pytest.approx(losses, rel=1e-12)


def test_a_run_goes_back_to_its_checkpoint_and_passes_over_the_batches(
    inputs: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train([*inputs, "--policy", "norm-spike=rewind"], monkeypatch, {13: 10.0}) == 0
    log = log_of(inputs)
    (event,) = [event for event in log.events if "policy" in event]
    assert (event["event"], event["step"], event["to_step"], event["num_rewinds"]) == ("rewind", 13, 10, 1)
    assert "step 13: found a norm of all gradients of " in capsys.readouterr().err
    _, losses = train_steps(inputs, [*range(1, 11), *range(14, 21)])
    assert {record.step: record.loss for record in log.steps if record.step > 13} == pytest.approx(
        {step: loss for step, loss in losses.items() if step > 13}, rel=1e-12
    )
    assert [record.step for record in log.steps] == list(range(1, 21)), "no batch is read twice"


def test_a_run_that_was_stopped_judges_as_if_it_had_not_been(
    inputs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [*inputs, "--policy", "norm-spike=skip"]
    assert train([*flags[:-1], "norm-spike=skip", "--steps", "10"], monkeypatch, {9: 10.0}) == 0
    assert train([*inputs[:5], "--resume", "--steps", "20"], monkeypatch, {9: 10.0, 11: 10.0}) == 0
    assert [event["step"] for event in log_of(inputs).events if "policy" in event] == [9, 11]


def test_rollbacks_are_limited(
    inputs: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*inputs, "--policy", "non-finite=rewind", "--set", "recipe.max_rewinds=2"]
    assert train(flags, monkeypatch, dict.fromkeys(range(8, 20), math.nan)) == 2
    assert [(event["event"], event["step"]) for event in log_of(inputs).events if "policy" in event] == [
        ("rewind", 8), ("rewind", 9), ("rewind", 10),
    ]  # fmt: skip
    (error,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert "the run has gone back 2 times, which recipe.max_rewinds allows" in error


def test_without_a_checkpoint_there_is_nowhere_to_go_back_to(
    inputs: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train([*inputs, "--policy", "non-finite=rewind"], monkeypatch, {3: math.inf}) == 2
    assert "there is no checkpoint to go back to; --checkpoint-every is required" in capsys.readouterr().err


def test_non_finite_values_end_a_run_by_default(
    inputs: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(inputs, monkeypatch, {7: math.nan}) == 2
    stderr = capsys.readouterr().err
    assert "error: step 7: found a loss of nan and a norm of all gradients of nan; finite ones are required" in stderr
    assert [(event["event"], event["step"]) for event in log_of(inputs).events if "policy" in event] == [("stop", 7)]


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--policy", "loss-spike"], "--policy: found 'loss-spike'; NAME=ACTION is required"),
        (["--policy", "loss=skip"], "--policy: found 'loss=skip'; NAME=ACTION is required"),
        (["--policy", "loss-spike=leave"], "loss_spike is 'leave'; one of ignore, stop, skip, rewind is required"),
        (["--policy", "non-finite=ignore"], "non_finite is 'ignore'; one of stop, skip, rewind is required"),
    ],
)
def test_unknown_policies_are_refused(
    inputs: list[str], flags: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InputError) as raised:
        parse_settings(build_parser().parse_args([*inputs, *flags]))
    assert problem in str(raised.value)
