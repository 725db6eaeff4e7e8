"""Runs whose global batch changes: which samples they take, how they go on, and what is refused before they start."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from train import stand_in
from train.launching import launch_ranks
from train.stand_in import SEQ_LEN, Bigram, small_plan, write_inputs

from shardwise.records.step_log import read_log
from shardwise.run.recipe import TrainingRecipe
from shardwise.run.trainer.batch_schedule import quantum_tokens, require_batches
from shardwise.search.plan_file import dump_plan
from shardwise.train import rank_main
from shardwise.values.errors import InputError

RAMP = "0:32,200:64,500:96"  # tokens; a sequence has 16


class Taking(Bigram):
    """Notes which sequences each step takes."""

    taken: ClassVar[dict[int, list[int]]] = {}

    def train_step(self) -> Any:
        self.taken[self.step] = self.batches.sequence_numbers(self.step).tolist()
        return super().train_step()


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(stand_in, "Bigram", Taking)
    monkeypatch.setattr(Taking, "taken", {})
    return [*write_inputs(tmp_path), "--learning-rate", "5", "--schedule", "constant"]


def train(flags: Sequence[str]) -> int:
    return rank_main(flags, stand_in.parts())


def steps_of(flags: Sequence[str]) -> Any:
    return read_log(Path(flags[4]) / "log.jsonl").steps


def taken() -> list[int]:
    """The sequences of all steps, in order."""
    return [number for step in sorted(Taking.taken) for number in Taking.taken[step]]


def in_order(flags: Sequence[str]) -> list[int]:
    """The order of the data, as a run takes it whose batch is one sequence."""
    Taking.taken.clear()
    assert train([*flags, "--out", f"{flags[4]}-single", "--batch-schedule", "16", "--steps", "300"]) == 0
    return taken()


def test_a_ramp_by_tokens_takes_every_sample_once_in_order(inputs: list[str]) -> None:
    assert train([*inputs, "--batch-schedule", RAMP, "--steps", "14"]) == 0
    sizes = [record.num_tokens for record in steps_of(inputs)]
    assert (
        sizes == [32] * 7 + [64] * 5 + [96] * 2
    )  # 7 · 32 = 224 is the first multiple of 32 from 200 on; 544 that from 500 on
    samples = taken()
    assert samples == in_order(inputs)[: len(samples)]
    line = json.loads((Path(inputs[4]) / "log.jsonl").read_text().splitlines()[7 + 1])
    assert line["n_tokens_seen"] == 7 * 32 + 64


@pytest.mark.parametrize("stop", [3, 7, 8, 12])
def test_a_run_with_a_ramp_goes_on_bit_by_bit(inputs: list[str], stop: int) -> None:
    flags = [*inputs, "--batch-schedule", RAMP, "--batch-lr", "sqrt"]
    assert train([*flags, "--steps", "16"]) == 0
    whole, samples = steps_of(inputs), taken()
    Taking.taken.clear()
    assert train([*flags, "--steps", str(stop), "--force"]) == 0
    assert train([*inputs, "--steps", "16", "--resume"]) == 0
    again = steps_of(inputs)
    assert [record.loss for record in again] == [record.loss for record in whole]
    assert [record.learning_rate for record in again] == [record.learning_rate for record in whole]
    assert taken() == samples


def test_another_batch_from_a_restart_on_goes_on_at_the_next_sample(inputs: list[str]) -> None:
    """A plan with more replicas has a larger batch: with a schedule the run goes on, and no sample is repeated or lost."""
    assert train([*inputs, "--steps", "5"]) == 0
    dump_plan(small_plan(batch_seqs=12), inputs[0])
    assert train([*inputs, "--steps", "9", "--resume"]) == 2
    assert train([*inputs, "--steps", "9", "--resume", "--batch-schedule", "192"]) == 0
    assert [record.num_tokens for record in steps_of(inputs)] == [128] * 5 + [192] * 4
    assert train([*inputs, "--steps", "12", "--resume", "--batch-schedule", "0:64,1500:256"]) == 0
    sizes = [record.num_tokens for record in steps_of(inputs)]
    assert sizes == [128] * 5 + [192] * 4 + [64] * 2 + [256]  # 1408 tokens were seen
    samples = taken()
    assert samples == in_order(inputs)[: len(samples)]


def test_a_checkpoint_has_the_batches_before_it(inputs: list[str]) -> None:
    assert train([*inputs, "--batch-schedule", RAMP, "--steps", "9"]) == 0
    manifest = json.loads(next((Path(inputs[4]) / "checkpoints").glob("step-*/checkpoint.json")).read_text())
    assert manifest["values"]["batch_ramp"] == [[0, 2], [7, 4]]


def test_a_run_of_an_earlier_version_goes_on(inputs: list[str], capsys: pytest.CaptureFixture[str],
                                             monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Its checkpoints do not have the batches: those of its plan, or of its ramp in steps, are meant."""
    monkeypatch.setattr("shardwise.run.trainer.loop.ramp_state", lambda ramp, step: {})
    assert train([*inputs, "--steps", "5"]) == 0
    assert train([*inputs, "--batch-schedule", "64", "--steps", "7", "--resume"]) == 2
    assert "of an earlier version, does not have the batches before it" in capsys.readouterr().err
    assert train([*inputs, "--set", "recipe.batch_ramp=0:2,3:4", "--steps", "5", "--force"]) == 0
    assert train([*inputs, "--steps", "7", "--resume"]) == 0
    assert [record.num_tokens for record in steps_of(inputs)] == [32] * 3 + [64] * 4


@pytest.mark.parametrize(("rule", "power"), [("none", 0.0), ("sqrt", 0.5), ("linear", 1.0)])
def test_the_learning_rate_follows_the_batch_by_a_rule(inputs: list[str], rule: str, power: float) -> None:
    assert train([*inputs, "--batch-schedule", RAMP, "--batch-lr", rule, "--steps", "14", "--warmup", "3"]) == 0
    recipe = TrainingRecipe(steps=14, learning_rate=5, schedule="constant", warmup_steps=3)
    for step, record in enumerate(steps_of(inputs)):
        expected = recipe.learning_rate_at(step) * (record.num_tokens / 128) ** power
        assert record.learning_rate == pytest.approx(expected, rel=1e-12)


REFUSED = [
    (
        ["--batch-schedule", "50"],
        "a batch of 50 tokens is not a whole number of sequences of 16; the nearest are 48 and 64",
    ),
    (["--batch-schedule", "0:32,9"], "TOKENS:BATCH,... is required"),
    (["--batch-schedule", "linear:from=32,by=40,over=900"], "found from=32 by=40 to a batch of 128 tokens"),
    (
        ["--batch-schedule", "32", "--set", "recipe.batch_ramp=0:2"],
        "batch_schedule is '32' beside a batch_ramp; one of the two",
    ),
    (["--to-loss", "-1"], "to_loss is -1.0; a number of nats above 0"),
]


@pytest.mark.parametrize(("flags", "part"), REFUSED, ids=[" ".join(flags) for flags, _ in REFUSED])
def test_wrong_schedules_are_refused_before_the_run(
    inputs: list[str], capsys: pytest.CaptureFixture[str], flags: list[str], part: str
) -> None:
    assert train([*inputs, "--steps", "5", *flags]) == 2
    assert part in capsys.readouterr().err
    assert not Path(inputs[4]).exists()


def test_micro_batches_that_the_pipeline_does_not_run_are_refused_with_the_nearest() -> None:
    """Interleaved stages take micro-batches in multiples of pp."""
    layout = {"pp": 2, "num_virtual_stages": 2, "schedule": "interleaved", "micro_batch_seqs": 2}
    plan = small_plan(2, batch_seqs=16, num_layers=4, **layout)
    require_batches(plan, TrainingRecipe(steps=9, batch_schedule="0:64,900:128"))
    with pytest.raises(InputError) as caught:
        require_batches(plan, TrainingRecipe(steps=9, batch_schedule="0:64,900:160"))
    assert (
        "a batch of 10 sequences (160 tokens): micro-batches: found 5; interleaved requires at least 2 in multiples of 2"
        in str(caught.value)
    )
    assert "the nearest are 128 and 192 tokens; change --batch-schedule" in str(caught.value)
    with pytest.raises(InputError, match=r"a batch of 10 sequences .* the nearest are 128 and 192 tokens"):
        require_batches(plan, TrainingRecipe(steps=9, batch_ramp=((0, 10),)))
    with pytest.raises(InputError, match=r"a batch of 6 sequences .* the nearest are 64 and 128 tokens"):
        require_batches(
            plan, TrainingRecipe(steps=9, noise_scale_every=1, batch_schedule="noise:lambda=100,from=64,by=32")
        )
    require_batches(plan, TrainingRecipe(steps=9, noise_scale_every=1, batch_schedule="noise:lambda=100"))
    assert quantum_tokens(plan) == 2 * 2 * SEQ_LEN


NOISE = "noise:lambda=40,from=32,to=256,by=32,every=4"


def noise_batches(num_steps: int) -> list[int]:
    """The batch of each step by hand: averages of the samples so far, each of which is exact."""
    sizes, trace, weight = [32], 0.0, 0.0
    for step in range(1, num_steps):
        trace, weight = 0.95 * trace + 0.05 * 64 * step, 0.95 * weight + 0.05
        batch_tokens = math.sqrt(40 * trace / weight)
        sizes.append(min(max(round(batch_tokens / 32) * 32, 32), 256) if step % 4 == 0 else sizes[-1])
    return sizes


def test_batches_follow_the_noise_scale_and_go_on_bit_by_bit(inputs: list[str]) -> None:
    flags = [*inputs, "--batch-schedule", NOISE, "--noise-scale-every", "1", "--batch-lr", "sqrt"]
    assert train([*flags, "--steps", "30"]) == 0
    whole, samples = steps_of(inputs), taken()
    assert [record.num_tokens for record in whole] == noise_batches(30)
    assert len(set(noise_batches(30))) > 3
    events = [event for event in read_log(Path(inputs[4]) / "log.jsonl").events if event["event"] == "batch"]
    changes = [step for step in range(1, 30) if noise_batches(30)[step] != noise_batches(30)[step - 1]]
    assert [event["step"] for event in events] == changes
    assert [event["batch_tokens"] for event in events] == [noise_batches(30)[step] for step in changes]
    for stop in (3, 4, 17, 20):
        Taking.taken.clear()
        assert train([*flags, "--steps", str(stop), "--force"]) == 0
        assert train([*inputs, "--steps", "30", "--resume"]) == 0
        assert [record.loss for record in steps_of(inputs)] == [record.loss for record in whole]
        assert taken() == samples
    assert samples == in_order(inputs)[: len(samples)]


def test_the_first_rank_decides_for_all(tmp_path: Path) -> None:
    """The others have measured another noise scale."""
    flags = write_inputs(tmp_path, small_plan(2))
    ranks = launch_ranks([*flags, "--steps", "14", "--batch-schedule", NOISE, "--noise-scale-every", "1"])
    assert ranks.ended() == 0, ranks.err
    assert [record.num_tokens for record in steps_of(flags)] == noise_batches(14)


def test_a_schedule_by_noise_scale_measures_it(inputs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert train([*inputs, "--batch-schedule", "noise:lambda=640", "--steps", "21"]) == 0
    measured = [record.step for record in steps_of(inputs) if record.small_norm_squared is not None]
    assert measured == [10, 20]
    assert steps_of(inputs)[0].num_tokens == 32, "two micro-batches, whose norms are compared"
    assert train([*inputs, "--batch-schedule", "noise:lambda=640,from=16", "--steps", "9", "--force"]) == 2
    assert "found a batch of 1 sequences in one part; two" in capsys.readouterr().err
    assert train([*inputs, "--set", "recipe.batch_schedule=noise:lambda=640", "--steps", "9", "--force"]) == 2
    assert "--noise-scale-every N is required" in capsys.readouterr().err


def test_a_run_ends_at_its_loss_and_goes_no_further(inputs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert train([*inputs, "--steps", "300", "--to-loss", "2.5"]) == 0
    err = capsys.readouterr().err
    assert "the smoothed loss is 2.5 after" in err
    whole = steps_of(inputs)
    assert 10 < len(whole) < 300
    event = next(event for event in read_log(Path(inputs[4]) / "log.jsonl").events if event["event"] == "target")
    assert len(whole) - 1 < event["steps"] <= len(whole)
    assert train([*inputs, "--resume"]) == 0
    assert len(steps_of(inputs)) == len(whole)
    assert train([*inputs, "--steps", str(len(whole) // 2), "--to-loss", "2.5", "--force"]) == 0
    assert train([*inputs, "--steps", "300", "--resume"]) == 0
    assert [record.loss for record in steps_of(inputs)] == [record.loss for record in whole]
    shutil.rmtree(inputs[4])
    assert train([*inputs, "--steps", "20", "--to-loss", "0.1"]) == 0
    assert len(steps_of(inputs)) == 20
    assert np.isfinite([record.loss for record in steps_of(inputs)]).all()
