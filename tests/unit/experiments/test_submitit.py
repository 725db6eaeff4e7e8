"""Experiments by submitit: its local and debug executors, and arrays of a SLURM that enforces its rules."""

from __future__ import annotations

from pathlib import Path

import fake_slurm
import pytest

from shardwise.measure import ExperimentRequest, run_experiment
from shardwise.measure.experiments import submitit_backend
from shardwise.measure.experiments.attempt_files import AttemptFolder
from shardwise.measure.experiments.backends import Submission
from shardwise.measure.experiments.ledger import LedgerRow, read_ledger
from shardwise.measure.experiments.places import make_backend
from shardwise.measure.experiments.submitit_backend import SubmititBackend, arrays_of, split_arrays
from shardwise.values import InputError

submitit = pytest.importorskip("submitit")
LINE = (
    "case {run} in fails) exit 3;; slow) sleep 600;; *) sleep 0.1; esac; "
    'if [ "${SLURM_NODEID:-0}" = 0 ]; then echo "step time: 0.5 s"; fi'
)
GRID = """
target = "command"
steps = 1
start = "1s"
time_limit = "{time_limit}"
retries = 0
[command]
line = '''{line}'''
pattern = 'step time: (?P<step_time_s>[0-9.]+) s'
num_nodes = {num_nodes}
num_devices = {num_nodes}
[command.values]
run = {runs}
"""


def write_grid(tmp_path: Path, runs: list[str], num_nodes: int = 1, time_limit: str = "120s") -> Path:
    path = tmp_path / "grid.toml"
    text = GRID.replace("{line}", LINE).replace("{runs}", str(runs).replace("'", '"'))
    text = text.replace("{num_nodes}", str(num_nodes)).replace("{time_limit}", time_limit)
    path.write_text(text, encoding="utf-8")
    return path


def run(grid: Path, place: str, **settings: str) -> dict[object, LedgerRow]:
    ledger = grid.parent / "ledger.jsonl"
    request = ExperimentRequest(grid=grid, ledger=ledger, place=place, settings=settings)
    run_experiment(request, report=lambda text: None)
    return {row.configuration.settings["run"]: row for row in read_ledger(ledger).rows.values()}


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # logs that submitit's debug executor leaves open
@pytest.mark.parametrize("place", ["submitit", "debug"])
def test_local_and_debug_executors_run_attempts(tmp_path: Path, place: str) -> None:
    rows = run(write_grid(tmp_path, ["a", "fails", "b"]), place, devices="2")
    assert {name: row.state for name, row in rows.items()} == {"a": "done", "fails": "failed", "b": "done"}
    assert rows["a"].measurement is not None
    assert rows["a"].measurement.step_time_s == 0.5


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The programs of a cluster, whose minutes take 30 s; task 1 of an array is preempted once."""
    folder = tmp_path / "slurm"
    for name, value in fake_slurm.install(folder, preempt=[1]).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(submitit_backend, "SLURM_TICK_S", 0.3)
    submitit.slurm.slurm.SlurmJob.watcher.clear()
    return folder


def test_arrays_are_capped_time_out_and_preempted_jobs_are_requeued(tmp_path: Path, slurm: Path) -> None:
    runs = ["a", "slow", "fails", "b", "c"]
    # Longer than a shell takes to start on a loaded machine; only the slow run reaches it.
    rows = run(write_grid(tmp_path, runs, time_limit="20s"), "slurm", partition="gpu", array_cap="2", gpus="0")
    assert {name: row.state for name, row in rows.items()} == {
        "a": "done", "slow": "timeout", "fails": "failed", "b": "done", "c": "done"
    }  # fmt: skip
    (script,) = (tmp_path / "ledger.scheduler").glob("*_submission.sh")
    text = script.read_text(encoding="utf-8")
    for line in ("#SBATCH --array=0-4%2", "#SBATCH --requeue", "#SBATCH --partition=gpu", "#SBATCH --nodes=1"):
        assert line in text
    assert (slurm / "most-1000").read_text(encoding="utf-8") == "2"
    slow = tmp_path / rows["slow"].attempts[1].logs
    assert sorted(path.name for path in slow.glob("claim-*")) == [
        "claim-0-0",
        "claim-0-1",
    ]  # requeued, in the same attempt
    assert len(rows["slow"].attempts) == 1


def test_every_node_of_a_job_runs_its_command(tmp_path: Path, slurm: Path) -> None:
    rows = run(write_grid(tmp_path, ["a"], num_nodes=2), "slurm", partition="gpu", gpus="0")
    assert rows["a"].state == "done"
    logs = tmp_path / rows["a"].attempts[1].logs
    assert sorted(path.name for path in logs.glob("result-*")) == ["result-0-0.json", "result-1-0.json"]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"partition": "cpu"}, "slurm: "), ({"partition": "gpu", "colour": "3"}, "found 'colour'"),
        ({"nodes": "none"}, "nodes: found 'none'; a whole number of at least 1"),
    ],
)  # fmt: skip
def test_refusals_of_slurm_are_input_errors(
    tmp_path: Path, slurm: Path, settings: dict[str, str], problem: str
) -> None:
    with pytest.raises(InputError) as raised:
        run(write_grid(tmp_path, ["a"]), "slurm", **settings)
    assert problem in str(raised.value)


def test_a_job_of_another_driver_is_polled_by_its_id(tmp_path: Path, slurm: Path) -> None:
    (slurm / "state-77_3").write_text("RUNNING", encoding="utf-8")
    backend = make_backend("slurm", {}, tmp_path / "scheduler")
    job = submitit_backend.SubmittedJob(folder=AttemptFolder(tmp_path / "none"), attempt="a-1", job="77_3")
    unnamed = submitit_backend.SubmittedJob(folder=AttemptFolder(tmp_path / "none"), attempt="b-1", job="")
    assert backend.poll([job, unnamed]) == ["RUNNING", "NOT STARTED"]


def submission(num_nodes: int, time_limit_s: float) -> Submission:
    return Submission(
        folder=AttemptFolder(Path("a")),
        attempt="a",
        num_nodes=num_nodes,
        num_devices=8 * num_nodes,
        time_limit_s=time_limit_s,
    )


def test_jobs_of_an_array_have_the_same_shape_and_enough_time() -> None:
    submissions = [submission(nodes, seconds) for nodes in (1, 2) for seconds in (60.0, 65.0, 3600.0)]
    arrays = arrays_of(submissions)
    assert [(shape.num_nodes, shape.devices_per_node, len(members)) for shape, members in arrays.items()] == [
        (1, 8, 2), (1, 8, 1), (2, 8, 2), (2, 8, 1)
    ]  # fmt: skip
    assert all(
        60 * shape.minutes >= member.time_limit_s + 120 for shape, members in arrays.items() for member in members
    )
    assert {shape.minutes for shape in arrays_of([submission(1, 1e5)], most_minutes=30)} == {30}
    parts = list(split_arrays(arrays_of([submission(1, 60.0)] * 2500)))
    assert [len(members) for _, members in parts] == [1000, 1000, 500]


def test_without_the_package_the_error_states_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("shardwise.measure.experiments.places.find_spec", lambda name: None)
    with pytest.raises(InputError, match="pip install 'shardwise\\[experiments\\]'"):
        make_backend("slurm", {}, tmp_path)
    assert SubmititBackend("slurm", tmp_path, 4).outlive_stop
