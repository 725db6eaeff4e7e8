"""A run of a small trainer: its loop, its log, how it resumes, and what is refused before it starts."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from train import stand_in
from train.shard_files import write_shards
from train.stand_in import Bigram, small_plan, write_inputs

import shardwise as sw
from shardwise.model.optimizers.definition import get_optimizer, optimizer_fields
from shardwise.records.run_folder import RunFolder, read_json
from shardwise.records.step_inspection import MeasuredMemory, RunInspection, list_traced_steps, parse_inspection
from shardwise.records.step_log import read_log
from shardwise.run.recipe import parse_recipe, recipe_payload
from shardwise.run.trainer import run_identity
from shardwise.run.trainer.flags import build_parser, parse_settings
from shardwise.run.trainer.preflight import open_data
from shardwise.search.plan_file import dump_plan, load_plan
from shardwise.train import rank_main


@pytest.fixture
def inputs(tmp_path: Path) -> list[str]:
    return [*write_inputs(tmp_path), "--learning-rate", "5", "--schedule", "constant"]


def train(flags: Sequence[str]) -> int:
    return rank_main(flags, stand_in.parts())


def checkpoints_of(flags: Sequence[str]) -> list[int]:
    """The steps of the checkpoints of a run."""
    return sorted(int(path.name.removeprefix("step-")) for path in (Path(flags[4]) / "checkpoints").iterdir())


def log_of(flags: Sequence[str]) -> Any:
    return read_log(Path(flags[4]) / "log.jsonl")


def test_a_run_learns_and_writes_log_summary_and_checkpoints(
    inputs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert train([*inputs, "--steps", "12", "--validate-every", "5", "--checkpoint-every", "4"]) == 0
    folder, log = RunFolder(Path(inputs[4])), log_of(inputs)
    assert [record.step for record in log.steps] == list(range(1, 13))
    assert log.steps[0].loss == pytest.approx(math.log(stand_in.VOCAB))
    assert log.steps[-1].loss < log.steps[0].loss
    assert list(log.validation) == [5, 10, 12]
    assert checkpoints_of(inputs) == [8, 12]
    summary = read_json(folder.summary)
    assert summary["first_loss"] == log.steps[0].loss
    assert summary["held_out_loss"] == log.validation[12] < math.log(stand_in.VOCAB)
    assert held_out_sequences(inputs) == sorted(held_out_sequences(inputs)) == list(range(100 // stand_in.SEQ_LEN))
    assert summary["num_tokens"] == 12 * 8 * stand_in.SEQ_LEN
    assert summary["data_s"] == 1e-5
    of = folder.read_inputs()
    assert (of.recipe["steps"], of.recipe["validate_every"]) == (12, 5)
    assert of.plan["layout"]["dp"] == 1
    assert len(of.data_fingerprint) == 64


def test_the_log_has_torchtitans_names_and_the_formula(
    inputs: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwise.run.trainer.run_reporter.LOCAL", "another")  # a chip whose peak is known
    train([*inputs, "--steps", "3"])
    header, *lines = [json.loads(line) for line in (Path(inputs[4]) / "log.jsonl").read_text().splitlines()]
    assert "MFU = " in header["formula"]
    assert header["formula"] in capsys.readouterr().err
    first = lines[0]
    assert {"loss_metrics/global_avg_loss", "grad_norm", "throughput(tps)", "tflops", "mfu(%)", "time_metrics/end_to_end(s)",
            "time_metrics/data_loading(s)", "n_tokens_seen"} <= first.keys()  # fmt: skip
    tokens = 8 * stand_in.SEQ_LEN
    assert first["throughput(tps)"] == pytest.approx(tokens / first["time_metrics/end_to_end(s)"])
    assert first["tflops"] * 1e12 == pytest.approx(header["flops_per_token"] * first["throughput(tps)"])
    assert first["mfu(%)"] / 100 == pytest.approx(first["tflops"] * 1e12 / header["peak_flops_per_s"])
    assert first["hfu(%)"] >= first["mfu(%)"]
    assert [line["n_tokens_seen"] for line in lines if "n_tokens_seen" in line] == [tokens, 2 * tokens, 3 * tokens]


def test_one_step_of_each_start_is_watched_and_does_not_count(inputs: list[str]) -> None:
    folder = RunFolder(Path(inputs[4]))

    def inspection() -> RunInspection:
        return parse_inspection(read_json(folder.measured), "measured.json")

    train([*inputs, "--steps", "1"])
    assert (log_of(inputs).inspected, inspection().step) == ({1}, 1)  # there is no other
    assert read_json(folder.summary)["step_time_s"] == log_of(inputs).steps[0].step_time_s
    train([*inputs, "--resume", "--steps", "4"])
    log, measured = log_of(inputs), inspection()
    assert (log.inspected, measured.step) == ({1, 3}, 3)
    assert [record.step for record in log.timed_steps] == [2, 4]
    assert read_json(folder.summary)["step_time_s"] == median(record.step_time_s for record in log.timed_steps)
    assert measured.before == measured.after == {"products": 1e-3, "memory": 2e-3}
    assert measured.relative_changes() == {"products": 0.0, "memory": 0.0}
    assert measured.memory == MeasuredMemory(
        peak_bytes=1000, at_peak={"parameters": 1000}, largest={"parameters": 1000}
    )
    assert measured.process is not None
    assert measured.process.resident_bytes > 10**7
    assert (measured.process.allocated_bytes, measured.device) == (None, "cpu")
    train([*inputs, "--steps", "1", "--force"])
    assert inspection().step == 1


def test_without_a_terminal_a_tenth_of_the_steps_is_shown(
    inputs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    train([*inputs, "--steps", "40"])
    shown = [line.split()[1] for line in capsys.readouterr().err.splitlines() if line.startswith("step ")]
    assert shown[:-1] == [f"{step}/40" for step in (1, *range(4, 41, 4))]
    assert shown[-1] == "40:"  # the held-out loss


def held_out_sequences(flags: Sequence[str]) -> list[int]:
    """The sequences of a validation loss: all of the held-out text."""
    settings = parse_settings(build_parser().parse_args([*flags, "--steps", "1"]))
    held_out = open_data(load_plan(flags[0]), settings).held_out
    return [int(number) for number in held_out["data"].batch(0).sequences_B]


@pytest.fixture
def mixed(tmp_path: Path) -> list[str]:
    """Flags of a run on a mixture of two sources, the second of which is small."""
    flags = write_inputs(tmp_path)
    write_shards(tmp_path / "code", [[1, 2, 3, 0] * 10], [[1, 2, 3, 0] * 10], vocab_size=stand_in.VOCAB)
    first, second = f"{flags[2]}=0.75", f"{tmp_path / 'code'}=0.25"
    return [flags[0], "--data", first, *flags[3:], "--data", second, "--learning-rate", "5", "--schedule", "constant"]


def test_a_mixture_is_drawn_by_weight_and_resumes_at_the_same_sample(
    mixed: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train([*mixed, "--steps", "12"]) == 0
    whole, summary = log_of(mixed), read_json(tmp_path / "run" / "summary.json")
    assert RunFolder(tmp_path / "run").read_inputs().recipe["data"] == [
        [str(tmp_path / "data"), 0.75],
        [str(tmp_path / "code"), 0.25],
    ]
    sources = summary["sources"]
    in_code = (10 * 4 - 1) // stand_in.SEQ_LEN
    assert {name: source["share"] for name, source in sources.items()} == {"data": 0.75, "code": 0.25}
    assert sources["code"]["epochs"] == 12 * 8 * 0.25 / in_code
    mean = 0.75 * sources["data"]["held_out_loss"] + 0.25 * sources["code"]["held_out_loss"]
    assert summary["held_out_loss"] == pytest.approx(mean)
    last = json.loads((tmp_path / "run" / "log.jsonl").read_text().splitlines()[-1])
    assert last["validation_metrics/loss/code"] == sources["code"]["held_out_loss"]
    assert train([*mixed, "--steps", "5", "--force"]) == 0
    assert train([*mixed, "--steps", "12", "--resume"]) == 0
    assert [record.loss for record in log_of(mixed).steps] == [record.loss for record in whole.steps]
    capsys.readouterr()
    reweighted = [word.replace("=0.25", "=0.5") for word in mixed]
    assert train([*reweighted, "--steps", "15", "--resume"]) == 2
    assert "--resume: found data of fingerprint" in capsys.readouterr().err


def test_sources_that_cannot_be_mixed_are_refused(
    mixed: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_shards(tmp_path / "other", [[1, 0] * 20], vocab_size=stand_in.VOCAB, tokenizer_sha256="a" * 64)
    for source, part in (
        ("code=-1", "--data: found 'code=-1'; DIR or DIR=WEIGHT, with a weight above 0, is required"),
        ("code=much", "--data: found 'much'"),
        (f"{tmp_path / 'code'}=2", "more than once; each folder once"),
        (f"{tmp_path / 'other'}=1", "other: its tokenizer's hash is aaaaaaaaaaaa; 000000000000 is required"),
    ):
        assert train([*mixed, "--steps", "2", "--data", source]) == 2
        assert part in capsys.readouterr().err


def make_stopping(after: int, number: int) -> type[Bigram]:
    class Stopping(Bigram):
        def train_step(self) -> Any:
            record = super().train_step()
            if self.step == after:
                os.kill(os.getpid(), number)
                os.kill(os.getpid(), number)  # a terminal and a launcher both send theirs
            return record

    return Stopping


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_that_is_stopped_goes_on_as_if_it_had_not_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int, code: int
) -> None:
    losses = {}
    for name in ("whole", "stopped"):
        (tmp_path / name).mkdir()
        flags = [*write_inputs(tmp_path / name), "--learning-rate", "5"]
        before = signal.getsignal(number)
        with monkeypatch.context() as patched:
            if name == "stopped":
                patched.setattr(stand_in, "Bigram", make_stopping(7, number))
            ended = train([*flags, "--steps", "15", "--checkpoint-every", "4"])
        assert signal.getsignal(number) is before
        if name == "stopped":
            assert ended == code
            err = capsys.readouterr().err
            assert f"stopped by {signal.Signals(number).name} after step 7 of 15" in err
            assert f"shardwise train {flags[0]} --data {flags[2]} --out {flags[4]} --resume" in err
            assert train([*flags, "--resume"]) == 0
        losses[name] = [record.loss for record in log_of(flags).steps]
    assert len(losses["whole"]) == 15
    assert losses["stopped"] == losses["whole"]


def test_a_signal_in_the_last_step_stops_nothing(inputs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stand_in, "Bigram", make_stopping(5, signal.SIGTERM))
    assert train([*inputs, "--steps", "5"]) == 0
    assert read_json(Path(inputs[4]) / "summary.json")["held_out_loss"] is not None


def test_steps_after_the_checkpoint_are_run_again_and_logged_once(inputs: list[str]) -> None:
    train([*inputs, "--steps", "10", "--checkpoint-every", "4"])
    whole = [record.loss for record in log_of(inputs).steps]
    out = Path(inputs[4])
    shutil.rmtree(out / "checkpoints" / "step-00000010")
    with (out / "log.jsonl").open("a") as file:
        file.write('{"step": 11, "loss_met')  # killed as it wrote
    assert train([*inputs, "--resume"]) == 0
    log = log_of(inputs)
    assert [record.step for record in log.steps] == list(range(1, 11))
    assert [record.loss for record in log.steps] == whole
    assert [header["first_step"] for header in log.headers] == [0, 8]


def test_a_damaged_checkpoint_is_named_and_what_is_lost_is_run_again(
    inputs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    train([*inputs, "--steps", "10", "--checkpoint-every", "4"])
    whole = [record.loss for record in log_of(inputs).steps]
    damaged = Path(inputs[4]) / "checkpoints" / "step-00000010" / "rank-00000.bin"
    damaged.write_bytes(bytes(damaged.stat().st_size))
    capsys.readouterr()
    assert train([*inputs, "--resume", "--steps", "12"]) == 0
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert warnings[0].startswith(f"warning: checkpoint: {damaged} is damaged")
    assert "going on from the checkpoint of step 8; 2 steps (256 tokens) are lost and run again" in warnings[1]
    log = log_of(inputs)
    assert [record.step for record in log.steps] == list(range(1, 13))
    assert [record.loss for record in log.steps[:8]] == whole[:8]
    for name in ("step-00000008", "step-00000012"):
        (Path(inputs[4]) / "checkpoints" / name / "checkpoint.json").unlink()
    before = {path: path.read_bytes() for path in Path(inputs[4]).rglob("*") if path.is_file()}
    assert train([*inputs, "--resume", "--steps", "14"]) == 2
    assert "no checkpoint of the run can be read: begin it again with --force" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in Path(inputs[4]).rglob("*") if path.is_file()} == before


def test_a_run_can_be_made_longer_and_not_go_on_beyond_its_end(
    inputs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    train([*inputs, "--steps", "4"])
    before = {path.name: path.read_bytes() for path in Path(inputs[4]).iterdir() if path.is_file()}
    assert train([*inputs, "--resume", "--validate-every", "1"]) == 2
    assert before == {path.name: path.read_bytes() for path in Path(inputs[4]).iterdir() if path.is_file()}
    assert "has done 4 of 4; a larger --steps is required" in capsys.readouterr().err
    assert train([*inputs, "--resume", "--steps", "6"]) == 0
    assert len(log_of(inputs).steps) == 6


def test_a_run_in_the_folder_is_kept_unless_asked_otherwise(
    inputs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    train([*inputs, "--steps", "4"])
    assert train([*inputs, "--steps", "3"]) == 2
    assert "holds a run; --resume goes on with it, --force replaces it" in capsys.readouterr().err
    assert len(log_of(inputs).steps) == 4
    assert train([*inputs, "--steps", "3", "--force"]) == 0
    assert len(log_of(inputs).steps) == 3
    assert checkpoints_of(inputs) == [3]


def test_another_run_is_not_resumed(inputs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train([*inputs, "--steps", "4"])
    (tmp_path / "other").mkdir()
    write_inputs(tmp_path / "other", seed=1)
    for flags, plan, part in (
        (["--seed", "3"], None, "found recipe.seed 3; the run in"),
        (["--data", str(tmp_path / "other" / "data")], None, "found data of fingerprint"),
        ([], small_plan(vocab_size=40), "found model.vocab_size 40; the run in"),
        ([], small_plan(batch_seqs=4), "found job.global_batch_tokens 64; the run in"),
        ([], small_plan(optimizer="lion"), "found job.optimizer lion; the run in"),
    ):
        dump_plan(plan or small_plan(), inputs[0])
        assert train([*inputs, "--resume", "--steps", "9", *flags]) == 2
        assert part in capsys.readouterr().err
    dump_plan(small_plan(micro_batch_seqs=2), inputs[0])
    assert train([*inputs, "--resume", "--steps", "9"]) == 0


def checkpoint_of(flags: Sequence[str], step: int) -> Path:
    return Path(flags[4]) / "checkpoints" / f"step-{step:08d}"


def test_a_checkpoint_knows_its_run(inputs: list[str]) -> None:
    assert train([*inputs, "--steps", "4"]) == 0
    run = read_json(checkpoint_of(inputs, 4) / "checkpoint.json")["values"]["run"]
    assert run["versions"] == {"shardwise": sw.__version__, "torch": torch.__version__}
    assert run["fields"]["recipe.seed"] == 0
    assert run["fields"]["model.vocab_size"] == stand_in.VOCAB
    assert run["fields"]["data of fingerprint"] == read_json(Path(inputs[4]) / "run.json")["data_fingerprint"]
    assert len(run["fingerprint"]) == 16


def test_a_checkpoint_of_another_run_is_refused_and_named(
    inputs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """That of seed 1 in the folder of seed 0."""
    seed_1_flags = [*inputs[:4], str(tmp_path / "other"), *inputs[5:]]
    assert train([*inputs, "--steps", "4"]) == 0
    assert train([*seed_1_flags, "--steps", "4", "--seed", "1"]) == 0
    shutil.rmtree(checkpoint_of(inputs, 4))
    shutil.copytree(checkpoint_of(seed_1_flags, 4), checkpoint_of(inputs, 4))
    capsys.readouterr()
    assert train([*inputs, "--resume", "--steps", "6"]) == 2
    err = capsys.readouterr().err
    assert "found recipe.seed 0; the checkpoint of step 4 has 1, which is required" in err
    assert "--force" in err
    assert [record.step for record in log_of(inputs).steps] == [1, 2, 3, 4]
    assert train([*inputs, "--resume", "--steps", "6", "--force"]) == 0
    assert "warning: --resume: found recipe.seed 0; the checkpoint of step 4 has 1" in capsys.readouterr().err
    assert [record.step for record in log_of(inputs).steps] == [1, 2, 3, 4, 5, 6]
    assert train([*inputs, "--resume", "--steps", "7"]) == 0  # the checkpoint of step 6 is this run's


def test_a_checkpoint_under_the_name_of_another_step_is_refused(
    inputs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert train([*inputs, "--steps", "4"]) == 0
    checkpoint_of(inputs, 4).rename(checkpoint_of(inputs, 5))
    assert train([*inputs, "--resume", "--steps", "6"]) == 2
    assert "the checkpoint of step 5 holds step 4; the step in its name is required" in capsys.readouterr().err


def test_other_versions_than_those_that_wrote_a_checkpoint_are_named(
    inputs: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train([*inputs, "--steps", "4"]) == 0
    monkeypatch.setattr(run_identity, "version", lambda name: "9.9.9")
    assert train([*inputs, "--resume", "--steps", "6"]) == 0
    expected = f"warning: torch 9.9.9 goes on with a checkpoint of torch {torch.__version__}\n"
    assert expected in capsys.readouterr().err


def test_a_run_goes_on_with_other_data_by_force(inputs: list[str], tmp_path: Path) -> None:
    assert train([*inputs, "--steps", "4"]) == 0
    (tmp_path / "other").mkdir()
    write_inputs(tmp_path / "other", seed=1)
    flags = [*inputs, "--resume", "--steps", "6", "--data", str(tmp_path / "other" / "data")]
    assert train(flags) == 2
    assert train([*flags, "--force"]) == 0


REFUSED = [
    (["--steps", "0"], "--steps: found '0'"),
    ([], "--steps: found none"),
    (["--steps", "5", "--clip", "0"], "clip_norm is 0.0"),
    (["--steps", "5", "--warmup", "6"], "warmup_steps + decay_steps are 6; at most the 5 steps"),
    (["--steps", "5", "--set", "recipe.colour=2"], "recipe has no 'colour'"),
    (["--steps", "5", "--set", "recipe.beta3=0.9"], "recipe has no 'beta3' (did you mean 'beta1' or 'beta2'?)"),
    (["--steps", "5", "--set", "recipe.beta2=much"], "--set recipe.beta2: found 'much'"),
    (["--steps", "5", "--set", "recipe.beta2=7"], "recipe: beta2 is 7.0; a number of at least 0, below 1, is required"),
    (["--steps", "5", "--set", "recipe.batch_ramp=4"], "STEP:SEQUENCES,... is required"),
    (["--steps", "5", "--resume"], "holds no run"),
    (["--steps", "5", "--elastic", "--force"], "leave one out"),
    (["--steps", "5", "--tensorboard"], "the tensorboard package is not installed"),
]


@pytest.mark.parametrize(("flags", "part"), REFUSED, ids=[" ".join(flags) or "nothing" for flags, _ in REFUSED])
def test_wrong_flags_are_refused_before_anything_is_written(
    inputs: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, flags: list[str], part: str
) -> None:
    monkeypatch.setattr("shardwise.run.trainer.preflight.find_spec", lambda name: None)
    assert train([*inputs, *flags]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert part in err
    assert not Path(inputs[4]).exists()


def test_recipe_fields_are_set_by_flags_and_by_name(inputs: list[str]) -> None:
    flags = ["--steps", "6", "--clip", "none", "--reduce", "after", "--seed", "5", "--schedule", "wsd", "--decay", "2",
             "--set", "recipe.beta2=0.99", "--set", "recipe.batch_ramp=0:2,3:4",
             "--set", "recipe.respect_documents=true"]  # fmt: skip
    assert train([*inputs, *flags]) == 0
    recipe = RunFolder(Path(inputs[4])).read_inputs().recipe
    assert (recipe["clip_norm"], recipe["reduction"], recipe["seed"], recipe["beta2"]) == (None, "after", 5, 0.99)
    assert [record.num_tokens // stand_in.SEQ_LEN for record in log_of(inputs).steps] == [2, 2, 2, 4, 4, 4]
    assert any(record.num_targets < record.num_tokens for record in log_of(inputs).steps)


def test_a_run_keeps_every_value_of_its_optimizer(inputs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Those that nobody set too, so that a run goes on with them; of another optimizer there are none."""
    dump_plan(small_plan(optimizer="lion"), inputs[0])
    assert train([*inputs, "--steps", "3", "--set", "recipe.beta1=0.8"]) == 0
    recipe = RunFolder(Path(inputs[4])).read_inputs().recipe
    assert {name: recipe.get(name) for name in optimizer_fields()} == {
        **dict.fromkeys(optimizer_fields()), "beta1": 0.8, "beta2": 0.99, "weight_decay": 0.1,
    }  # fmt: skip
    assert train([*inputs, "--resume", "--steps", "5", "--set", "recipe.weight_decay=0.3"]) == 0
    capsys.readouterr()
    assert train([*inputs, "--force", "--steps", "3", "--set", "recipe.epsilon=1e-6"]) == 2
    assert "found 'epsilon'; the plan's optimizer has beta1, beta2, weight_decay" in capsys.readouterr().err


def test_a_recipe_of_an_earlier_version_is_read() -> None:
    """It had the fields of AdamW beside its own."""
    kept = {"steps": 9, "learning_rate": 1e-3, "beta1": 0.8, "beta2": 0.95, "epsilon": 1e-6, "weight_decay": 0.0}
    recipe = parse_recipe({**kept, "what later versions add": 3}, "recipe")
    assert (recipe.steps, recipe.optimizer) == (9, {name: kept[name] for name in get_optimizer("adamw").fields})
    payload = recipe_payload(recipe, "adamw")
    assert payload.items() >= kept.items()
    assert "optimizer" not in payload, "which earlier versions do not know"
    assert parse_recipe(recipe_payload(recipe, "adamw"), "recipe") == recipe


def test_unwritable_folders_are_refused(inputs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    for out, part in (("file", "is a file"), ("file/run", "is a file"), ("full", "holds other files")):
        assert train([*inputs, "--steps", "2", "--out", str(tmp_path / out), "--force"]) == 2
        assert part in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["notes.txt"]


def test_without_held_out_text_there_is_no_validation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = write_inputs(tmp_path, held_out=False)
    assert train([*flags, "--steps", "2", "--validate-every", "1"]) == 2
    assert "no document is held out" in capsys.readouterr().err
    assert train([*flags, "--steps", "2"]) == 0
    assert read_json(tmp_path / "run" / "summary.json")["held_out_loss"] is None


def test_another_number_of_processes_than_devices_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = write_inputs(tmp_path, small_plan(2))
    assert train([*flags, "--steps", "2"]) == 2
    assert (
        "found 1 processes; the plan (dp=2 micro_batch_seqs=1 recompute=none) is of 2 devices"
        in capsys.readouterr().err
    )


def test_steps_are_recorded_where_asked_and_do_not_count(inputs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert train([*inputs, "--steps", "8", "--profile", "2:4"]) == 0
    folder = RunFolder(Path(inputs[4]))
    assert list_traced_steps(folder) == {2: (0,), 3: (0,), 4: (0,)}
    # the step that is inspected for its memory is the first that is not recorded
    assert log_of(inputs).inspected == {1, 2, 3, 4, 5}  # the first ones for their memory
    assert train([*inputs, "--steps", "10", "--resume", "--profile", "9:9"]) == 0
    assert set(list_traced_steps(folder)) == {2, 3, 4, 9}
    assert train([*inputs, "--steps", "3", "--force"]) == 0
    assert list_traced_steps(folder) == {}


@pytest.mark.parametrize("steps", ["0:2", "3:2", "4", "2:9", "a:b", "1:"])
def test_steps_that_the_run_does_not_have_are_refused(
    inputs: list[str], steps: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train([*inputs, "--steps", "8", "--profile", steps]) == 2
    assert "--profile: found" in capsys.readouterr().err
