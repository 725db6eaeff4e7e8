"""A run that loses ranks continues on the remaining ones: a new plan, a resharded checkpoint, the same batches."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from train import in_float64
from train.float64 import DENSE, SAME, make_plan
from train.float64 import host as cluster_of
from train.launching import Launched, launch_copy, parent_of, pids_of, started_by_torchrun
from train.stand_in import small_plan, write_inputs

from shardwise.hardware.cluster_loading import load_cluster, resize_cluster
from shardwise.layout.layout import Layout
from shardwise.layout.rules.table import violations
from shardwise.records.run_folder import RunFolder, read_json
from shardwise.records.step_log import StepLog, read_log
from shardwise.run import launcher
from shardwise.run.faults.rank_status import RESTART_REASON
from shardwise.run.launcher import (
    INPUT_ERROR_CODES,
    LOST_CODE,
    RunEndedError,
    RunOutcome,
    launch_elastic,
    replan_for_at_most,
)
from shardwise.run.trainer.flags import build_parser, parse_settings
from shardwise.run.trainer.preflight import replan_for
from shardwise.train import rank_main
from shardwise.values.errors import InputError, NothingFitsError

STEPS = 40
USUAL = ["--device", "cpu", "--steps", str(STEPS), "--learning-rate", "1e-3"]
ELASTIC = ["--checkpoint-every", "5", "--elastic"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> StepLog:
    """Return the same run on one process without interruptions."""
    place = tmp_path_factory.mktemp("alone")
    assert rank_main([*write_inputs(place, make_plan(DENSE, Layout(micro_batch_seqs=8), 8)), *USUAL]) == 0
    return read_log(place / "run" / "log.jsonl")


def require_same(log: StepLog, reference: StepLog) -> None:
    """Require each step once, with the loss and norm of the uninterrupted run."""
    assert [record.step for record in log.steps] == list(range(1, STEPS + 1))
    for name in ("loss", "grad_norm"):
        expected = [getattr(record, name) for record in reference.steps]
        assert [getattr(record, name) for record in log.steps] == pytest.approx(expected, rel=SAME)


def until_step(run: Launched, out: RunFolder, step: int) -> None:
    """Until the log has the step; the run goes on."""
    while not (out.log.exists() and any(record.step >= step for record in read_log(out.log).steps)):
        assert run.process.poll() is None, run.err
        time.sleep(0.01)


def test_a_run_goes_on_with_the_ranks_that_are_left(tmp_path: Path, uninterrupted: StepLog) -> None:
    flags = [*write_inputs(tmp_path, make_plan(DENSE, Layout(dp=2, tp=2, micro_batch_seqs=2), 8)), *USUAL, *ELASTIC]
    out = RunFolder(Path(flags[4]))
    run = launch_copy(in_float64.main, flags)
    until_step(run, out, 8)
    os.kill(pids_of(out.path)[1], signal.SIGKILL)
    assert run.ended() == 0, run.err
    reason = "rank 1 ended with SIGKILL; the system may have run out of memory"
    assert run.says("restart 1 of at most 3: ") == f"restart 1 of at most 3: {reason}; 3 of 4 ranks can go on"
    log = read_log(out.log)
    assert [(header["num_devices"], header["after"]) for header in log.headers] == [(4, ""), (3, reason)]
    assert log.headers[1]["first_step"] >= 5, "it goes on from a checkpoint"
    assert out.read_inputs().plan["cluster"]["name"] == "local:3"
    require_same(log, uninterrupted)
    _, start = read_json(out.summary)["starts"]
    assert (start["num_devices"], start["after"]) == (3, reason)
    restarted = f"  restarted  after step {start['first_step']}: {start['layout_text']} on 3 devices; {reason}\n"
    assert restarted in run.out


def host(port: int, flags: Sequence[str], *, first: bool) -> Launched:
    """torchrun's agent on one of at most two hosts, each with two processes.

    The first round waits for the second host, and a live host is not taken for a lost one, however loaded the machine.
    """
    meeting = f"is_host={int(first)},last_call_timeout=20,keep_alive_interval=2,keep_alive_max_attempt=10"
    return started_by_torchrun(
        ["--nnodes", "1:2", "--nproc-per-node", "2", "--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-endpoint",
         f"localhost:{port}", "--rdzv-id", "run", "--rdzv-conf", meeting, "--local-addr", "localhost", "-m", "train.in_float64",
         *flags]
    )  # fmt: skip


def free_port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.matrix  # two minutes, most of them torchrun's waits
def test_under_torchrun_of_two_hosts_one_is_left(tmp_path: Path, uninterrupted: StepLog) -> None:
    flags = [
        *write_inputs(tmp_path, make_plan(DENSE, Layout(fsdp=4, zero_stage=3, micro_batch_seqs=1), 8)),
        *USUAL,
        *ELASTIC,
    ]
    out, port = RunFolder(Path(flags[4])), free_port()
    stays, goes = (host(port, flags, first=first) for first in (True, False))
    until_step(stays, out, 8)
    for pid in [pid for pid in pids_of(out.path) if parent_of(pid) == goes.process.pid]:
        os.kill(pid, signal.SIGKILL)
    goes.kill()
    assert stays.ended() == 0, stays.err
    log = read_log(out.log)
    assert (log.headers[0]["num_devices"], log.headers[-1]["num_devices"]) == (4, 2)
    assert log.headers[-1]["first_step"] >= 5, "it goes on from a checkpoint"
    assert log.headers[-1]["after"].endswith(" of torchrun")
    assert out.read_inputs().plan["cluster"]["name"] == "local:2"
    require_same(log, uninterrupted)


def test_the_plan_is_searched_for_the_same_batch() -> None:
    plan = small_plan(4)
    replanned = replan_for(plan, 2)
    assert (replanned.layout.num_devices, replanned.cluster.name, replanned.job) == (2, "local:2", plan.job)
    assert replanned.model == plan.model
    assert not violations(replanned.model, replanned.job, 2, replanned.layout)
    assert replan_for(plan, 4) is plan


def test_replanning_takes_the_next_smaller_number_with_a_plan() -> None:
    """Of three hosts and a part of another the part is left out; where nothing fits on fewer either, that is said."""
    plan = small_plan(8, batch_seqs=48)
    plan = replace(plan, cluster=load_cluster("h100:32"), job=replace(plan.job, precision="bf16"))
    assert replan_for_at_most(plan, 27).layout.num_devices == 24
    tight = replace(small_plan(2), cluster=cluster_of(2))
    tight = replace(tight, cluster=replace(tight.cluster, chip=replace(tight.cluster.chip, memory_bytes=1000)))
    with pytest.raises(NothingFitsError, match="no legal layout fits: the leanest"):
        replan_for_at_most(tight, 1)


@pytest.mark.parametrize(("name", "count"), [("h100:64", 12), ("tpu-v5p:4x4x4", 32)])
def test_a_cluster_has_no_part_of_any_number(name: str, count: int) -> None:
    with pytest.raises(
        InputError, match=f"{name} has no part of {count} devices; whole hosts and leaves of a switched network"
    ):
        resize_cluster(load_cluster(name), count)


def test_resized_cluster_keeps_its_calibration() -> None:
    cluster = load_cluster("h100:64", stack="nemo-25")
    resized = resize_cluster(cluster, 32)
    assert (resized.num_devices, resized.calibration) == (32, cluster.calibration)
    assert resized.topology == load_cluster("h100:32").topology


KILLED, WAITED = -signal.SIGKILL, LOST_CODE


@pytest.mark.parametrize(
    ("outcome", "lost"),
    [
        (RunOutcome({0: WAITED, 1: KILLED, 2: WAITED}), (1,)),
        (RunOutcome({0: WAITED, 1: KILLED}, killed={1}), (1,)),  # it hung
        (RunOutcome({0: WAITED, 1: WAITED}), ()),  # the network was gone for a while
        (RunOutcome({0: 1, 1: KILLED}), (1,)),  # a traceback of what the loss brought about
    ],
)
def test_runs_with_lost_ranks_can_restart(outcome: RunOutcome, lost: tuple[int, ...]) -> None:
    assert (outcome.lost, outcome.can_restart) == (lost, True)


@pytest.mark.parametrize(
    "outcome",
    [
        RunOutcome({0: 0, 1: 0}),
        RunOutcome({0: INPUT_ERROR_CODES[0], 1: KILLED}),
        RunOutcome({0: 1, 1: 1}),
        RunOutcome({0: KILLED, 1: KILLED}),
        RunOutcome({0: WAITED, 1: KILLED}, stop_signal=signal.SIGTERM),
        RunOutcome({0: 128 + signal.SIGTERM, 1: 128 + signal.SIGTERM}, stop_signal=signal.SIGTERM),
    ],
)
def test_runs_that_end_otherwise_are_not_restarted(outcome: RunOutcome) -> None:
    assert not outcome.can_restart


def test_restarts_are_limited(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """And what was lost is not used again, for it may be a GPU."""
    begun: list[tuple[int, dict[str, str]]] = []

    def lose_the_second(arguments: Sequence[str], processes: int, more: dict[str, str]) -> RunOutcome:
        begun.append((processes, more))
        return RunOutcome({0: WAITED, 1: KILLED, **dict.fromkeys(range(2, processes), WAITED)})

    monkeypatch.setattr(launcher, "launch_and_wait", lose_the_second)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    reason = "rank 1 ended with SIGKILL; the system may have run out of memory"
    with pytest.raises(RunEndedError) as caught:
        launch_elastic(["plan.json"], small_plan(4), 2)
    assert caught.value.problems == (f"{reason}; recipe.max_restarts allows 2 restarts, and there were as many",)
    assert [processes for processes, _ in begun] == [4, 3, 2]
    assert [more.get("CUDA_VISIBLE_DEVICES") for _, more in begun] == [None, "4,6,7", "4,7"]
    assert [more.get(RESTART_REASON) for _, more in begun] == [None, reason, reason]
    assert capsys.readouterr().err.splitlines() == [
        f"restart 1 of at most 2: {reason}; 3 of 4 ranks can go on",
        f"restart 2 of at most 2: {reason}; 2 of 3 ranks can go on",
    ]


def test_elastic_resumes_an_existing_run(tmp_path: Path) -> None:
    flags = [*write_inputs(tmp_path), "--device", "cpu", "--elastic"]
    assert not parse_settings(build_parser().parse_args([*flags, "--steps", "3"])).resume
    assert rank_main([*flags, "--steps", "3"]) == 0
    assert parse_settings(build_parser().parse_args(flags)).resume
    assert rank_main([*flags, "--steps", "5"]) == 0
    assert [record.step for record in read_log(Path(flags[4]) / "log.jsonl").steps] == [1, 2, 3, 4, 5]
    with pytest.raises(InputError, match="--force: found with --elastic"):
        parse_settings(build_parser().parse_args([*flags, "--force"]))
