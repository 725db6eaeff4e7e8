"""Launches of our own engine under a cluster's scheduler."""

from __future__ import annotations

import json
import subprocess

import pytest
import yaml

from shardwise.hardware.cluster_loading import load_cluster
from shardwise.interop.frameworks.targets import get_target
from shardwise.interop.launches.export_launch import export
from shardwise.interop.launches.launch import Machines
from shardwise.interop.read_launch import parse_launch, price_launch
from shardwise.layout.layout import Layout
from shardwise.model.job import Job
from shardwise.model.load import load_model
from shardwise.search.plan import Plan, plan_layout
from shardwise.search.plan_file import plan_payload
from shardwise.values.errors import InputError

JOB = Job(global_batch_tokens=2**20, seq_len=8192)


def plan(cluster: str = "h100:16", layout: str = "fsdp=8 tp=2 zero_stage=1") -> Plan:
    return plan_layout(load_model("llama-3-8b"), load_cluster(cluster), JOB, Layout.parse(layout))


def test_a_batch_script_starts_the_plan_on_each_node() -> None:
    found = export(plan(), get_target("slurm"))
    assert list(found.files) == ["plan.json", "launch.slurm", "README.md"]
    script = found.files["launch.slurm"]
    for line in ("#SBATCH --nodes=2", "#SBATCH --gpus-per-node=8", "#SBATCH --ntasks-per-node=1"):
        assert line in script.splitlines()
    assert "--nnodes 2 --nproc-per-node 8" in script
    assert "-m shardwise.train plan.json" in script
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert (
        parse_launch(
            {"plan.json": found.files["plan.json"]}, Machines(num_devices=16, devices_per_node=8)
        ).launch.layout
        == plan().layout
    )


def test_a_plan_that_loses_time_is_told_what_to_change() -> None:
    found = price_launch(
        {"plan.json": json.dumps(plan_payload(plan(layout="fsdp=16 recompute=full")))}, load_cluster("h100:16")
    )
    assert found.parsed.unknown == found.parsed.unread == ()
    assert found.better[0].options["layout.recompute"] == "none"
    assert found.better[0].estimate.step_time_s < found.plan.estimate.step_time_s


def test_the_nearest_of_a_plan_that_our_engine_does_not_run() -> None:
    with pytest.raises(InputError, match="shardwise has no offload=both") as told:
        export(plan(layout="fsdp=8 tp=2 recompute=full offload=both"), get_target("slurm"))
    assert "the nearest layout that it runs: fsdp=8 tp=2 " in told.value.problems[-1]


def test_one_node_needs_no_other() -> None:
    script = export(plan("h100:8", "fsdp=8 zero_stage=1"), get_target("slurm")).files["launch.slurm"]
    assert "--standalone" in script


def test_a_task_of_skypilot() -> None:
    task = yaml.safe_load(export(plan(), get_target("skypilot")).files["task.yaml"])
    assert (task["num_nodes"], task["resources"]) == (2, {"accelerators": "H100:8"})
    assert "-m shardwise.train plan.json" in task["run"]
    with pytest.raises(InputError, match="SkyPilot has no accelerator that is mi355x"):
        export(plan("mi355x:8", "fsdp=4 tp=2 zero_stage=1"), get_target("skypilot"))
