"""Attempts: each runs once, ends at its limits and leaves nothing behind; its state follows from files and processes."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from shardwise.measure.experiments.attempt_files import AttemptFolder, AttemptJob, AttemptResult
from shardwise.measure.experiments.backends import (
    GONE,
    NOT_STARTED,
    RUNNING,
    LocalProcesses,
    Submission,
    SubmittedJob,
    job_command,
)
from shardwise.measure.experiments.job_process import run_attempt
from shardwise.measure.experiments.process_cleanup import processes_of
from shardwise.measure.experiments.run_endings import AttemptEnding, judge_attempt, judge_scheduler

NUMBERS = itertools.count()


def write_attempt(tmp_path: Path, line: str, **limits: Any) -> tuple[AttemptFolder, AttemptJob]:
    folder = AttemptFolder(tmp_path / "attempt-1")
    values = {"time_limit_s": 60.0, "hang_after_s": 60.0, "grace_s": 0.3, **limits}
    job = AttemptJob(attempt=f"test-{os.getpid()}-{next(NUMBERS)}", command=["bash", "-c", line], **values)
    folder.write_job(job)
    return folder, job


def run_to_end(tmp_path: Path, line: str, **limits: Any) -> tuple[AttemptResult, AttemptEnding, AttemptFolder]:
    folder, job = write_attempt(tmp_path, line, **limits)
    run_attempt(folder.path)
    result = folder.read_result()
    assert result is not None
    assert processes_of(job.attempt) == {}
    assert not folder.scratch.exists()
    output = folder.output.read_text(encoding="utf-8")
    return result, judge_attempt([result], output, limit_s=job.time_limit_s, hang_s=job.hang_after_s), folder


@pytest.mark.parametrize(
    ("line", "limits", "ending"),
    [
        ("echo fine; touch $TMPDIR/file", {}, AttemptEnding("done")),
        (
            "sleep 60",
            {"time_limit_s": 1.0},
            AttemptEnding("timeout", "not done after 1 s, its limit of 1 s", "time limit"),
        ),
        ("echo x; sleep 60", {"hang_after_s": 0.4}, None),
        ("echo 'RuntimeError: CUDA out of memory. Tried'; exit 1", {}, None),
        ("echo x > /dev/full", {}, None),
        ("echo 'OSError: [Errno 98] Address already in use'; exit 1", {}, None),
        ("kill -9 $$", {}, AttemptEnding("failed", "ended by SIGKILL", "killed")),
        ("echo 'error: found 3'; exit 2", {}, AttemptEnding("failed", "found 3", "exit code 2")),
    ],
)
def test_states_follow_from_results_and_signs_of_life(
    tmp_path: Path, line: str, limits: dict[str, float], ending: AttemptEnding | None
) -> None:
    _, judged, folder = run_to_end(tmp_path, line, **limits)
    causes = {"hang_after_s": ("hung", "no heartbeat"), "CUDA": ("out of memory", "out of memory")}
    causes |= {"/dev/full": ("failed", "disk full"), "Address": ("failed", "port in use")}
    if ending is not None:
        assert judged == ending
    else:
        expected = next(pair for key, pair in causes.items() if key in line or key in limits)
        assert (judged.state, judged.cause) == expected
    assert {path.name for path in folder.path.iterdir()} == {"job.json", "claim-0-0", "output-0.txt", "result-0-0.json"}


def test_a_change_of_a_heartbeat_file_is_a_sign_of_life(tmp_path: Path) -> None:
    """A file with a modification time in the future keeps a run alive that would otherwise count as hung."""
    line = f"while [ ! -e {tmp_path}/looked ]; do sleep 0.05; done"
    folder, job = write_attempt(tmp_path, line, hang_after_s=0.2, heartbeats=("run/*",))
    heartbeat = folder.path / "run" / "log.jsonl"
    heartbeat.parent.mkdir()
    heartbeat.touch()
    os.utime(heartbeat, (time.time() + 3600,) * 2)
    watch = threading.Thread(target=run_attempt, args=(folder.path,))
    watch.start()
    time.sleep(1.5)  # longer than it may be silent: two looks at the heartbeats
    (tmp_path / "looked").touch()
    watch.join()
    result = folder.read_result()
    assert result is not None
    assert (result.ending, processes_of(job.attempt)) == ("exit", {})


def test_a_command_that_cannot_be_started_is_a_result(tmp_path: Path) -> None:
    folder = AttemptFolder(tmp_path / "a")
    folder.write_job(AttemptJob(attempt="none", command=["/no/such"], time_limit_s=9.0, hang_after_s=9.0))
    run_attempt(folder.path)
    result = folder.read_result()
    assert result is not None
    assert result.ending == "not started"
    assert "No such file" in judge_attempt([result], "", limit_s=9.0, hang_s=9.0).reason


SERVER = """
import mmap, os, signal, socket, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
server = socket.create_server(("localhost", 0))
name = f"shardwise-test-{os.getpid()}"
with open(f"/dev/shm/{name}", "w+b") as file:
    file.truncate(4096)
    memory = mmap.mmap(file.fileno(), 4096)
open("left", "w").write(f"{server.getsockname()[1]} {name}")
time.sleep(600)
"""


def test_processes_ports_and_shared_memory_that_outlive_a_command_are_removed(tmp_path: Path) -> None:
    script = tmp_path / "server.py"
    script.write_text(SERVER, encoding="utf-8")
    line = f"setsid {sys.executable} -S {script} & while [ ! -s left ]; do sleep 0.05; done; exit 0"
    result, judged, folder = run_to_end(tmp_path, line)
    port, memory = (folder.path / "left").read_text(encoding="utf-8").split()
    assert judged.state == "done"
    assert len(result.clean_up.killed) >= 1
    assert result.clean_up.removed_files == [f"/dev/shm/{memory}"]
    assert (result.clean_up.open_ports, result.clean_up.remaining) == ([], [])
    assert not Path("/dev/shm", memory).exists()
    with socket.socket() as client:
        assert client.connect_ex(("localhost", int(port))) != 0


def test_an_attempt_runs_once_for_any_number_of_starters(tmp_path: Path) -> None:
    folder, _ = write_attempt(tmp_path, "echo ran >> ran; sleep 0.3")
    starts = [subprocess.Popen(job_command(folder.path)) for _ in range(4)]
    assert [start.wait(60) for start in starts] == [0, 0, 0, 0]
    run_attempt(folder.path)
    assert (folder.path / "ran").read_text(encoding="utf-8") == "ran\n"


def test_a_requeued_job_runs_again_in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = write_attempt(tmp_path, "echo ran >> ran")
    run_attempt(folder.path)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    run_attempt(folder.path)
    assert (folder.path / "ran").read_text(encoding="utf-8") == "ran\nran\n"
    assert AttemptFolder(folder.path, 0, 1).read_result() is not None


def test_each_node_has_separate_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = write_attempt(tmp_path, "echo node $SLURM_NODEID; exit $SLURM_NODEID", num_nodes=2)
    for node in ("0", "1"):
        monkeypatch.setenv("SLURM_NODEID", node)
        run_attempt(folder.path)
    results = [AttemptFolder(folder.path, node).read_result() for node in (0, 1)]
    assert [result.exit_code for result in results if result] == [0, 1]
    assert judge_attempt(results, "", limit_s=1, hang_s=1).cause == "exit code 1"
    assert judge_attempt([results[0], None], "", limit_s=1, hang_s=1).cause == "lost"


def wait_until(backend: LocalProcesses, job: SubmittedJob, state: str) -> None:
    deadline = time.monotonic() + 30
    while backend.poll([job]) != [state]:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def submission_of(folder: AttemptFolder, job: AttemptJob) -> Submission:
    return Submission(folder=folder, attempt=job.attempt, num_nodes=1, num_devices=1, time_limit_s=60.0)


def test_another_driver_identifies_a_process_and_cancels_it(tmp_path: Path) -> None:
    folder, job = write_attempt(tmp_path, "sleep 60")
    first, second = LocalProcesses(2), LocalProcesses(2)
    (name,) = first.submit([submission_of(folder, job)])
    submitted = SubmittedJob(folder=folder, attempt=job.attempt, job=name)
    wait_until(second, submitted, RUNNING)
    second.cancel([submitted])
    wait_until(first, submitted, GONE)
    assert second.poll([submitted]) == [GONE]
    result = folder.read_result()
    assert result is not None
    assert result.ending == "cancelled"


def test_a_process_terminated_while_it_claims_an_attempt_writes_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver identifies the process by its claim: from then on the process has to write a result."""
    folder, _ = write_attempt(tmp_path, "sleep 60")
    make_claim = AttemptFolder.make_claim

    def claim_and_cancel(attempt: AttemptFolder) -> int:
        claim = make_claim(attempt)
        assert attempt.watcher == os.getpid()
        os.kill(os.getpid(), signal.SIGTERM)
        return claim

    monkeypatch.setattr(AttemptFolder, "make_claim", claim_and_cancel)
    run_attempt(folder.path)
    result = folder.read_result()
    assert result is not None
    assert result.ending == "cancelled"


def test_a_killed_watcher_ends_its_command_and_is_lost(tmp_path: Path) -> None:
    folder, job = write_attempt(tmp_path, "setsid sleep 600 & sleep 600")
    backend = LocalProcesses(2)
    (name,) = backend.submit([submission_of(folder, job)])
    submitted = SubmittedJob(folder=folder, attempt=job.attempt, job=name)
    deadline = time.monotonic() + 30
    while len(processes_of(job.attempt)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(int(name), signal.SIGKILL)
    wait_until(backend, submitted, GONE)
    assert folder.read_result() is None
    assert processes_of(job.attempt) == {}


def test_attempts_never_started_and_lost_are_distinguished(tmp_path: Path) -> None:
    folder, job = write_attempt(tmp_path, "true")
    submitted = SubmittedJob(folder=folder, attempt=job.attempt, job="")
    assert LocalProcesses(1).poll([submitted]) == [NOT_STARTED]
    run_attempt(folder.path)
    assert LocalProcesses(1).poll([submitted]) == [GONE]


def test_gpus_of_attempts_are_disjoint(tmp_path: Path) -> None:
    backend = LocalProcesses(capacity=4, num_gpus=4)
    folders = []
    for name in "ab":
        folder, job = write_attempt(tmp_path / name, "echo $CUDA_VISIBLE_DEVICES; sleep 1")
        submission = Submission(folder=folder, attempt=job.attempt, num_nodes=1, num_devices=2, time_limit_s=60.0)
        (pid,) = backend.submit([submission])
        folders.append((folder, SubmittedJob(folder=folder, attempt=job.attempt, job=pid)))
    for _, submitted in folders:
        wait_until(backend, submitted, GONE)
    texts = [folder.output.read_text(encoding="utf-8") for folder, _ in folders]
    assert texts == ["0,1\n", "2,3\n"]


@pytest.mark.parametrize(
    ("word", "state", "transient"),
    [
        ("TIMEOUT", "timeout", True), ("OUT_OF_MEMORY", "out of memory", False), ("NODE_FAIL", "failed", True),
        ("CANCELLED by 1000", "failed", False), ("FAILED", "failed", True), ("COMPLETED", "failed", True),
    ],
)  # fmt: skip
def test_a_job_without_a_result_has_the_state_of_its_scheduler(word: str, state: str, transient: bool) -> None:
    ending = judge_scheduler(word)
    assert ending is not None
    assert (ending.state, ending.is_transient) == (state, transient)


@pytest.mark.parametrize("word", ["PENDING", "RUNNING", "REQUEUED", "COMPLETING", "UNKNOWN", ""])
def test_scheduler_states_of_a_continuing_job(word: str) -> None:
    assert judge_scheduler(word) is None
