"""Ranks that hang, stop or are killed, and full disks: which message comes from which process, and which files remain."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from train.launching import launch_ranks, pids_of, torchrun
from train.stand_in import parts, small_plan, write_inputs

from shardwise.records.step_log import read_log
from shardwise.search.plan_file import dump_plan
from shardwise.train import rank_main

QUICK = ["--set", "recipe.silent_after_s=3"]
IN_STEP, IN_CHECKPOINT = "step 3: AllReduce of the gradients", "the end, after step 6: the checkpoint of step 6"


def silent(awaits: str, limit: str = "600") -> str:
    """The line that names rank 1, with its process in brackets; a rank may have been late before, on a loaded machine."""
    return (
        rf"^no sign of life for \d+ s from rank 1 \(process (\d+) on .+\); rank 0 waits in {awaits}\. The run goes on if it "
        rf"comes back, and ends where a wait lasts {limit} s; SIGTERM ends it now$"
    )


@pytest.fixture
def inputs(tmp_path: Path) -> list[str]:
    return [*write_inputs(tmp_path, small_plan(2)), "--steps", "6", "--learning-rate", "5"]


def run_folder(inputs: list[str]) -> Path:
    return Path(inputs[4])


def checkpoints(inputs: list[str]) -> list[str]:
    return sorted(path.name for path in (run_folder(inputs) / "checkpoints").iterdir())


def test_a_rank_that_hangs_is_named_and_the_wait_for_it_ends(inputs: list[str]) -> None:
    run = launch_ranks([*inputs, *QUICK, "--set", "recipe.timeout_s=20"], STAND_IN_HANGS="1:3")
    pid = run.matches(silent(IN_STEP, "20"))[1]
    assert int(pid) == pids_of(run_folder(inputs))[1]
    assert run.ended() == 4
    (error,) = [line for line in run.lines if line.startswith("error: ")]
    assert re.match(r"error: rank 0: step 3: AllReduce of the gradients failed after \d+ s \(.*Timed out", error)
    assert f"rank 1 (process {pid} on " in error
    assert error.endswith("there is no checkpoint yet")
    assert "Traceback" not in run.err


@pytest.mark.parametrize("where", ["step", "checkpoint"])
def test_a_run_that_waits_for_a_rank_that_hangs_can_be_stopped(inputs: list[str], where: str) -> None:
    """The wait may be in the main thread, or in the thread that writes a checkpoint while the main thread waits for it."""
    environment = {"STAND_IN_HANGS": "1:3"} if where == "step" else {"STAND_IN_HANGS_WRITING": "1"}
    every = ["--checkpoint-every", "1" if where == "step" else "6"]
    run = launch_ranks([*inputs, *QUICK, *every], **environment)
    pid = run.matches(silent(IN_STEP if where == "step" else IN_CHECKPOINT))[1]
    run.process.send_signal(signal.SIGTERM)
    assert run.ended() == 143
    stopped = run.says("stopped by SIGTERM while rank 0 waits in ")
    assert f"for rank 1 (process {pid} on " in stopped
    assert stopped.endswith(f"--out {run_folder(inputs)} --resume" if where == "step" else "there is no checkpoint yet")
    assert "Traceback" not in run.err
    assert rank_main([*inputs[:5], "--resume", "--device", "cpu"], parts()) == 2, "the plan is of two processes"
    again = launch_ranks([*inputs[:5], "--resume"])
    assert again.ended() == 0, again.err
    assert [record.step for record in read_log(run_folder(inputs) / "log.jsonl").steps] == list(range(1, 7))
    assert "step-00000006" in checkpoints(inputs)
    assert not [name for name in checkpoints(inputs) if name.startswith(".")], "the draft is removed"


def test_a_rank_that_was_stopped_comes_back(inputs: list[str], tmp_path: Path) -> None:
    go = tmp_path / "go"
    run = launch_ranks([*inputs, *QUICK], STAND_IN_IS_STOPPED="1:3", STAND_IN_WAITS="0:5", STAND_IN_GO=str(go))
    run.matches(silent(IN_STEP))
    os.kill(pids_of(run_folder(inputs))[1], signal.SIGCONT)
    run.says("rank 1 is back, after ")
    go.touch()
    assert run.ended() == 0
    assert [record.step for record in read_log(run_folder(inputs) / "log.jsonl").steps] == list(range(1, 7))


def test_a_stop_wakes_a_rank_that_was_stopped(inputs: list[str]) -> None:
    """SIGSTOP of a rank, then SIGTERM of the launcher: nothing is lost."""
    run = launch_ranks([*inputs, *QUICK], STAND_IN_IS_STOPPED="1:3")
    run.matches(silent(IN_STEP))
    run.process.send_signal(signal.SIGTERM)
    assert run.ended() == 143
    assert run.says("stopped by SIGTERM after step 3 of 6, with a checkpoint in ")
    assert checkpoints(inputs) == ["step-00000003"]


def test_ranks_end_with_their_launcher_and_keep_their_folder_until_then(
    inputs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    go = tmp_path / "go"
    run = launch_ranks(inputs, STAND_IN_WAITS="0:3", STAND_IN_GO=str(go))
    run.says("step 3: rank 0 waits")
    pids = pids_of(run_folder(inputs))
    run.process.kill()
    again = launch_ranks([*inputs[:5], "--resume"])
    assert again.ended() == 2
    assert re.fullmatch(
        rf"error: {run_folder(inputs)} is locked: a run goes on in it: rank 0 \(process {pids[0]} on .+\), rank 1 "
        rf"\(process {pids[1]} on .+\); wait for its end or stop it, or choose another --out",
        again.lines[-1],
    )
    dump_plan(small_plan(1), tmp_path / "one.json")
    assert rank_main([str(tmp_path / "one.json"), *inputs[1:5], "--steps", "9", "--force"], parts()) == 2
    assert "is locked: a run goes on in it" in capsys.readouterr().err
    go.touch()
    assert run.ended() == -signal.SIGKILL
    assert run.says("stopped by SIGTERM after step 3 of 6")
    assert checkpoints(inputs) == ["step-00000003"]
    again = launch_ranks([*inputs[:5], "--resume"])
    assert again.ended() == 0, again.err
    assert [record.step for record in read_log(run_folder(inputs) / "log.jsonl").steps] == list(range(1, 7))


def test_a_rank_that_is_killed_is_named_once(inputs: list[str], tmp_path: Path) -> None:
    go = tmp_path / "go"
    run = launch_ranks(inputs, STAND_IN_WAITS="0:3", STAND_IN_GO=str(go))
    run.says("step 3: rank 0 waits")
    os.kill(pids_of(run_folder(inputs))[1], signal.SIGKILL)
    go.touch()
    assert run.ended() == 1
    errors = [line for line in run.lines if not line.startswith(("gpt-2", "MFU", "6 steps", "step "))]
    assert errors == ["error: rank 1 ended with SIGKILL; the system may have run out of memory"]


@pytest.mark.parametrize("start", [launch_ranks, torchrun])
def test_an_error_of_one_rank_in_a_step_is_said_once(inputs: list[str], start: type) -> None:
    run = start(inputs, STAND_IN_FAILS="1:3")
    assert run.ended() == (2 if start is launch_ranks else 1)
    assert [line for line in run.lines if line.startswith("error: ")] == ["error: rank 1 fails"]


def test_a_full_disk_under_the_log_is_said_once(inputs: list[str]) -> None:
    run = launch_ranks(inputs, STAND_IN_IS_FULL="0:3")
    assert run.ended() == 2
    (error,) = [line for line in run.lines if "error" in line]
    assert error == (
        f"error: {run_folder(inputs) / 'log.jsonl'}: File too large; a place with room, and the permission to write there, are "
        "required; there is no checkpoint yet"
    )
    assert "Traceback" not in run.err
    again = launch_ranks([*inputs[:5], "--resume"])
    assert again.ended() == 0, again.err
    assert [record.step for record in read_log(run_folder(inputs) / "log.jsonl").steps] == list(range(1, 7))


def test_under_torchrun_a_rank_that_hangs_is_named_and_one_rank_says_why_all_end(inputs: list[str]) -> None:
    run = torchrun([*inputs, *QUICK, "--set", "recipe.timeout_s=20"], STAND_IN_HANGS="1:3")
    run.matches(silent(IN_STEP, "20"))
    error = run.says("error: ")
    assert "failed after" in error
    os.kill(pids_of(run_folder(inputs))[1], signal.SIGKILL)  # torchrun itself would, 30 s later
    assert run.ended() == 1
    assert [line for line in run.lines if line.startswith("error: ")] == [error]


def test_under_torchrun_what_all_ranks_find_is_said_once(inputs: list[str]) -> None:
    run = torchrun([*inputs, "--seed", "x"])
    assert run.ended() == 1
    (error,) = [line for line in run.lines if line.startswith("error: ")]
    assert error.startswith("error: --seed: found 'x'")


def test_a_lost_shard_of_the_data_is_named_and_the_run_goes_on_once_it_is_back(inputs: list[str]) -> None:
    assert launch_ranks(inputs).ended() == 0
    longer = [*inputs[:5], "--resume", "--steps", "8"]
    for name in ("train-00000.tokens", "train-00000.ends"):
        shard = Path(inputs[2]) / name
        content = shard.read_bytes()
        shard.unlink()
        run = launch_ranks(longer)
        assert run.ended() == 2
        (error,) = [line for line in run.lines if "error" in line]
        assert error.startswith(f"error: {shard}: cannot read: No such file or directory; ")
        assert error.endswith("tokenize again, with --force")
        shard.write_bytes(content)
    again = launch_ranks(longer)
    assert again.ended() == 0, again.err
    assert [record.step for record in read_log(run_folder(inputs) / "log.jsonl").steps] == list(range(1, 9))


def test_a_lost_shard_of_a_checkpoint_is_named_and_the_one_before_is_used(inputs: list[str]) -> None:
    assert launch_ranks([*inputs, "--checkpoint-every", "4"]).ended() == 0
    whole = read_log(run_folder(inputs) / "log.jsonl").steps
    lost = run_folder(inputs) / "checkpoints" / "step-00000006" / "rank-00000.bin"
    lost.unlink()
    run = launch_ranks([*inputs[:5], "--resume", "--steps", "8"])
    assert run.ended() == 0, run.err
    named, going_on = (line for line in run.lines if line.startswith("warning: "))
    assert named.startswith(f"warning: checkpoint: {lost} is missing; what was written is required")
    assert going_on.startswith(
        "warning: going on from the checkpoint of step 4; 2 steps (256 tokens) are lost and run again"
    )
    steps = read_log(run_folder(inputs) / "log.jsonl").steps
    assert [record.step for record in steps] == list(range(1, 9))
    assert [record.loss for record in steps[:5]] == [record.loss for record in whole[:5]]
