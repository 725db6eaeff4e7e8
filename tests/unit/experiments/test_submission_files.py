"""Files to submit by hand: accepted by SLURM's rules and bash, and of the shape that SkyPilot, JobSet and NeMo-Run document."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import fake_slurm
import pytest
import yaml

from shardwise.measure import ExperimentRequest, run_experiment
from shardwise.measure.experiments.ledger import LedgerRow, read_ledger
from shardwise.measure.experiments.submission_files import FORMS

GRID = """
target = "command"
steps = 1
start = "1s"
time_limit = "20s"
[command]
line = 'if [ "${SLURM_NODEID:-0}" = 0 ]; then echo "step time: {n}.0 s"; fi'
pattern = 'step time: (?P<step_time_s>[0-9.]+) s'
num_nodes = 2
num_devices = 16
[command.values]
n = [1, 2, 3]
"""


def submit(tmp_path: Path, place: str, **settings: str) -> tuple[list[LedgerRow], list[str]]:
    grid, ledger, lines = tmp_path / "grid.toml", tmp_path / "ledger.jsonl", list[str]()
    grid.write_text(GRID, encoding="utf-8")
    run_experiment(ExperimentRequest(grid=grid, ledger=ledger, place=place, settings=settings), report=lines.append)
    return list(read_ledger(ledger).rows.values()), lines


def files(tmp_path: Path) -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "ledger.scheduler").iterdir()}


def test_a_batch_script_is_submitted_and_its_runs_are_collected_by_the_next_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, lines = submit(tmp_path, "sbatch", partition="gpu", array_cap="2", gpus="0", python=sys.executable)
    assert {row.state for row in rows} == {"pending"}
    assert lines == [f"submit: cd {tmp_path}/ledger.scheduler && sbatch array-0.sbatch"]
    script = tmp_path / "ledger.scheduler" / "array-0.sbatch"
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    for line in ("--array=0-2%2", "--nodes=2", "--requeue", "--partition=gpu"):
        assert f"#SBATCH {line}\n" in script.read_text(encoding="utf-8")
    assert submit(tmp_path, "sbatch", partition="gpu") == (rows, [])  # nothing is written twice
    environment = {**os.environ, **fake_slurm.install(tmp_path / "slurm")}
    subprocess.run(["sbatch", str(script)], env=environment, check=True, capture_output=True)
    deadline = time.monotonic() + 120
    while len(list(tmp_path.glob("ledger.runs/*/attempt-1/result-[01]-0.json"))) < 6:  # three runs on two nodes each
        assert time.monotonic() < deadline
        time.sleep(0.1)
    rows, _ = submit(tmp_path, "sbatch", partition="gpu")
    assert [(row.state, row.measurement and row.measurement.step_time_s) for row in rows] == [
        ("done", 1.0), ("done", 2.0), ("done", 3.0)
    ]  # fmt: skip


def test_a_skypilot_task_has_the_documented_shape(tmp_path: Path) -> None:
    submit(tmp_path, "skypilot", accelerator="H100", bucket="s3://mine/runs")
    texts = files(tmp_path)
    task = yaml.safe_load(texts["task-0.yaml"])
    assert (task["num_nodes"], task["resources"]) == (2, {"accelerators": "H100:8"})
    assert task["file_mounts"] == {str(tmp_path / "ledger.scheduler"): {"source": "s3://mine/runs", "mode": "MOUNT"}}
    launches = [line for line in texts["launch-0.sh"].splitlines() if line.startswith("sky jobs launch ")]
    attempts = texts["attempts-0.txt"].split()
    assert [line.split("ATTEMPT=")[1].split()[0] for line in launches] == attempts
    assert subprocess.run(["bash", "-n"], input=texts["launch-0.sh"], text=True, check=False).returncode == 0


# Fields of JobSet v1alpha2 and of the Job and Pod in it that Kueue's queue and this experiment need. Source: JobSet, the custom
# resource definition jobset.x-k8s.io_jobsets.yaml; Kubernetes, batch/v1 Job.
JOBSET_FIELDS = {"suspend", "failurePolicy", "replicatedJobs"}
JOB_FIELDS = {"parallelism", "completions", "completionMode", "backoffLimit", "activeDeadlineSeconds", "template"}


def test_each_attempt_has_a_jobset(tmp_path: Path) -> None:
    submit(tmp_path, "jobset", queue="team-a", image="registry/image:1", claim="disk")
    texts = files(tmp_path)
    jobsets: list[dict[str, Any]] = list(yaml.safe_load_all(texts["jobsets-0.yaml"]))
    assert len({jobset["metadata"]["name"] for jobset in jobsets}) == 3
    for jobset, attempt in zip(jobsets, texts["attempts-0.txt"].split(), strict=True):
        assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
        assert jobset["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "team-a"}
        assert set(jobset["spec"]) == JOBSET_FIELDS
        (nodes,) = jobset["spec"]["replicatedJobs"]
        job = nodes["template"]["spec"]
        assert set(job) == JOB_FIELDS
        assert (job["parallelism"], job["completions"], job["completionMode"]) == (2, 2, "Indexed")
        (container,) = job["template"]["spec"]["containers"]
        assert container["command"][-1] == attempt
        assert container["resources"] == {"limits": {"nvidia.com/gpu": "8"}}
        assert len(jobset["metadata"]["name"]) <= 63 - len(
            "-nodes-0-0-xxxxx"
        )  # a pod's host name has at most 63 characters


def test_a_nemo_run_script_has_the_documented_shape(tmp_path: Path) -> None:
    submit(tmp_path, "nemo-run", account="team", partition="gpu")
    tree = ast.parse(files(tmp_path)["submit-0.py"])
    calls = {ast.unparse(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    settings = {keyword.arg: keyword.value for keyword in calls["run.SlurmExecutor"].keywords}
    values = {name: value.value for name, value in settings.items() if isinstance(value, ast.Constant)}
    assert values == {
        "account": "team", "partition": "gpu", "nodes": 2, "ntasks_per_node": 1, "gpus_per_node": 8, "time": "00:04:00"
    }  # fmt: skip
    assert {"run.Script", "run.Experiment", "experiment.add", "experiment.run"} <= set(calls)


@pytest.mark.parametrize("form", FORMS)
def test_unknown_settings_are_refused(tmp_path: Path, form: str) -> None:
    with pytest.raises(Exception, match="found 'colour'"):
        submit(tmp_path, form, colour="red")
