"""Ranks of the small trainer, started the way torchrun starts them."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from train.launching import FOREVER_S, launch_ranks
from train.stand_in import parts, small_plan, write_inputs

from shardwise.records.run_folder import read_json
from shardwise.records.step_log import read_log
from shardwise.run import launcher
from shardwise.run.faults import stop_request
from shardwise.run.machine_resources import set_threads
from shardwise.train import rank_main


def run_launch(flags: Sequence[str], ranks: int = 2, **environment: str) -> tuple[int, str, str]:
    """Exit code, output and errors of a run."""
    run = launch_ranks(flags, ranks, **environment)
    return run.ended(), run.out, run.err + "\n" if run.lines else ""


@pytest.fixture
def inputs(tmp_path: Path) -> list[str]:
    return [*write_inputs(tmp_path, small_plan(2)), "--steps", "6", "--learning-rate", "5"]


def test_two_ranks_train_as_one_process(inputs: list[str], tmp_path: Path) -> None:
    code, out, err = run_launch(inputs)
    assert (code, out) == (0, ""), err
    assert "Traceback" not in err
    (tmp_path / "one").mkdir()
    single = [*write_inputs(tmp_path / "one"), *inputs[5:]]
    assert rank_main(single, parts()) == 0
    losses = [[record.loss for record in read_log(Path(flags[4]) / "log.jsonl").steps] for flags in (inputs, single)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    fullest = read_json(Path(inputs[4]) / "measured.json")
    assert (fullest["rank"], fullest["memory"]["peak_bytes"]) == (1, 1001)
    # a run goes on with another number of ranks
    assert rank_main([*single[:1], *inputs[1:5], "--resume", "--steps", "8"], parts()) == 0
    log = read_log(Path(inputs[4]) / "log.jsonl")
    assert [header["num_devices"] for header in log.headers] == [2, 1]
    assert [record.step for record in log.steps] == list(range(1, 9))


@pytest.mark.parametrize("rank", ["0", "1"])
def test_an_error_of_one_rank_ends_all(inputs: list[str], rank: str) -> None:
    code, out, err = run_launch(inputs, STAND_IN_REFUSES=rank)
    assert (code, out, err) == (2, "", f"error: rank {rank} refuses\n")
    assert not Path(inputs[4]).exists()


def test_an_error_of_all_ranks_is_printed_once(inputs: list[str]) -> None:
    code, _, err = run_launch(inputs, 3)
    assert code == 2
    assert err.count("error:") == 1
    assert re.fullmatch(r"error: world size: found 3 processes; the plan .* is of 2 devices: .*\n", err)
    code, _, err = run_launch([*inputs, "--seed", "x"])
    assert (code, err.count("error:"), err.count("\n")) == (2, 1, 1)
    assert err.startswith("error: --seed: found 'x'")


@pytest.mark.parametrize(
    ("environment", "code", "problem"),
    [
        ({"STAND_IN_REFUSES": "1"}, 2, "rank 1 refuses"),
        ({"STAND_IN_PAUSE_S": "no number"}, 1, "rank [01] ended with .*"),
    ],
)
def test_with_json_an_error_is_one_line_of_it(
    inputs: list[str], environment: dict[str, str], code: int, problem: str
) -> None:
    """Said by a rank, or by the launcher of ranks that could not."""
    exit_code, out, err = run_launch([*inputs, "--json"], **environment)
    payload = json.loads(next(line for line in err.splitlines() if line.startswith("{")))
    assert (exit_code, out, payload["schema"]) == (code, "", "shardwise.error/1")
    assert payload["error"]["exit_code"] == code
    assert re.fullmatch(problem, payload["error"]["problems"][0])
    assert "error: " not in err.replace("Error: ", "")  # a traceback of what nobody expects stays


@pytest.mark.parametrize(
    ("send", "number", "code"),
    [
        (os.kill, signal.SIGTERM, 143),
        (os.kill, signal.SIGINT, 130),
        (os.killpg, signal.SIGINT, 130),  # Ctrl-C: a terminal sends it to the launcher and to all ranks
    ],
)
def test_a_launcher_that_is_asked_to_stop_ends_its_ranks_with_a_checkpoint(
    inputs: list[str], send: Callable[[int, int], None], number: int, code: int
) -> None:
    run = launch_ranks([*inputs, "--steps", "400"], STAND_IN_PAUSE_S="0.1")
    log = Path(inputs[4]) / "log.jsonl"
    run.says("step 1/400")
    send(run.process.pid, number)
    assert (run.ended(), run.out) == (code, ""), run.err
    assert "Traceback" not in run.err
    done = read_log(log).steps[-1].step
    assert f"stopped by {signal.Signals(number).name} after step {done} of 400" in run.err
    assert [path.name for path in (Path(inputs[4]) / "checkpoints").iterdir()] == [f"step-{done:08d}"]


@pytest.mark.parametrize(("ends", "in_order", "codes"), [(True, False, [143]), (True, True, []), (False, False, [])])
def test_a_request_before_the_first_step_ends_the_process_of_a_rank_alone(
    ends: bool, in_order: bool, codes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one that nothing else ends yet; SIGTERM comes through the pipe that the system writes signals into."""
    exits: list[int] = []
    monkeypatch.setattr(os, "_exit", exits.append)
    monkeypatch.setattr(stop_request, "BEFORE_STEPS_S", 0.0)
    request = stop_request.StopRequest(ends_process=ends)
    if in_order:
        request.in_order()
    read, write = os.pipe()
    os.write(write, bytes([signal.SIGUSR1, signal.SIGTERM]))
    os.close(write)
    request._listen(read)
    assert (request.signal, exits) == (signal.SIGTERM, codes)


def test_a_rank_that_dies_is_named(inputs: list[str]) -> None:
    code, _, err = run_launch(inputs, STAND_IN_PAUSE_S="no number")
    assert code == 1
    assert re.search(r"^error: rank [01] ended with exit code 1$", err, re.MULTILINE)


def test_every_process_gets_its_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    for processes, threads in ((3, "2"), (16, "1")):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        set_threads(processes)
        assert os.environ["OMP_NUM_THREADS"] == threads
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    set_threads(2)
    assert os.environ["OMP_NUM_THREADS"] == "5"


def ranks_of(*programs: str) -> launcher._RankProcesses:
    """Ranks that run a line of Python each."""
    processes = launcher._RankProcesses()
    for program in programs:
        processes.start([sys.executable, "-c", program], {**os.environ})
    return processes


KILLED = "import os, time; time.sleep(1); os.kill(os.getpid(), 9)"
STUCK = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(900)"


def test_before_the_first_step_ranks_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """They hang in a library, such as where processes connect, and have nothing to write; none of them counts as lost."""
    monkeypatch.setattr(launcher, "LEAVE_S", 800.0)
    monkeypatch.setattr(launcher, "LEAVE_BEFORE_STEPS_S", 0.2)
    processes = ranks_of(STUCK, KILLED, STUCK)
    codes = processes.wait(lambda: False)
    outcome = launcher.RunOutcome(codes, processes.killed)
    assert (codes[1], {codes[0], codes[2]}) == (-signal.SIGKILL, {128 + signal.SIGTERM})
    assert (outcome.lost, outcome.can_restart) == ((1,), True)
    with pytest.raises(launcher.RunEndedError, match=r"^rank 1 ended with SIGKILL"):
        outcome.code()


def test_in_the_steps_ranks_that_hang_are_killed_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "LEAVE_S", 0.2)
    monkeypatch.setattr(launcher, "LEAVE_BEFORE_STEPS_S", 800.0)
    processes = ranks_of(STUCK, KILLED)
    assert processes.wait(lambda: True) == {0: -signal.SIGKILL, 1: -signal.SIGKILL}
    assert processes.killed == {0}


def test_a_rank_that_reports_its_error_gives_the_others_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "LEAVE_BEFORE_STEPS_S", 0.0)
    on_request = "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.6), sys.exit(2)))"
    reports = f"import signal, sys, time; {on_request}; time.sleep(900)"
    assert ranks_of(reports, "import sys, time; time.sleep(1); sys.exit(2)").wait(lambda: False) == {0: 2, 1: 2}


class SlowToLoad:
    """A module whose names come only when it is let go, as PyTorch's do seconds after they are asked for."""

    __spec__ = None

    def __init__(self) -> None:
        self.asked, self.let_go = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> object:
        self.asked.set()
        self.let_go.wait(FOREVER_S)
        raise AttributeError(name)


@pytest.fixture
def loading(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowToLoad]:
    module = SlowToLoad()
    monkeypatch.setitem(sys.modules, "shardwise.run.faults.torch_stores", module)
    yield module
    module.let_go.set()


def test_a_rank_killed_before_pytorch_is_loaded_is_named_at_once(
    loading: SlowToLoad, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It was named once the launcher had loaded PyTorch, which takes as long as a rank does: here, it never has."""
    program = "import os, time\nif os.environ['RANK'] == '1':\n    os.kill(os.getpid(), 9)\ntime.sleep(900)\n"
    (tmp_path / "dies_in_start.py").write_text(program, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    outcome = launcher.launch_and_wait([], 2, {}, "dies_in_start")
    assert loading.asked.wait(FOREVER_S)
    assert not loading.let_go.is_set()
    assert outcome.lost == (1,)
    with pytest.raises(launcher.RunEndedError, match=r"^rank 1 ended with SIGKILL"):
        outcome.code()


def test_a_store_that_cannot_be_served_ends_the_ranks(
    loading: SlowToLoad, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "waits.py").write_text("import time\ntime.sleep(900)\n", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    loading.let_go.set()
    with pytest.raises(ImportError, match="TCPStore"):
        launcher.launch_and_wait([], 2, {}, "waits")


def test_a_rank_killed_in_the_start_is_named(inputs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As `shardwise train` does: the other rank waits for it where all meet, for minutes."""
    run = launch_ranks(inputs, STAND_IN_DIES_IN_START="1")
    assert run.ended() == 1
    assert "error: rank 1 ended with SIGKILL; the system may have run out of memory" in run.lines
