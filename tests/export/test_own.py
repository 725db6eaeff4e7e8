"""Launches of our own engine under a cluster's scheduler."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path

import pytest
import yaml

from shardwise.hardware.cluster_loading import load_cluster
from shardwise.interop.frameworks.targets import get_target
from shardwise.interop.launches.export_launch import export
from shardwise.interop.launches.launch import COSTLESS_FIELDS, Machines
from shardwise.interop.read_launch import parse_launch, price_launch
from shardwise.interop.text_formats.option_tables import option_table
from shardwise.layout.layout import Layout
from shardwise.model.architecture import Architecture
from shardwise.model.job import Job
from shardwise.model.load import load_model
from shardwise.search.plan import Plan, plan_layout
from shardwise.search.plan_file import parse_plan, plan_payload
from shardwise.values.errors import InputError

JOB = Job(global_batch_tokens=2**20, seq_len=8192)


def plan(cluster: str = "h100:16", layout: str = "fsdp=8 tp=2 zero_stage=1") -> Plan:
    return plan_layout(load_model("llama-3-8b"), load_cluster(cluster), JOB, Layout.parse(layout))


def test_a_batch_script_starts_the_plan_on_each_node() -> None:
    exported = export(plan(), get_target("slurm"))
    assert list(exported.files) == ["plan.json", "launch.slurm", "README.md"]
    script = exported.files["launch.slurm"]
    for line in ("#SBATCH --nodes=2", "#SBATCH --gpus-per-node=8", "#SBATCH --ntasks-per-node=1"):
        assert line in script.splitlines()
    assert "--nnodes 2 --nproc-per-node 8" in script
    assert "-m shardwise.train plan.json" in script
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert (
        parse_launch(
            {"plan.json": exported.files["plan.json"]}, Machines(num_devices=16, devices_per_node=8)
        ).launch.layout
        == plan().layout
    )


def test_read_lists_faster_options_of_a_slow_plan() -> None:
    priced = price_launch(
        {"plan.json": json.dumps(plan_payload(plan(layout="fsdp=16 recompute=full")))}, load_cluster("h100:16")
    )
    assert priced.parsed.unknown == priced.parsed.unread == ()
    assert priced.better[0].options["layout.recompute"] == "none"
    assert priced.better[0].estimate.step_time_s < priced.plan.estimate.step_time_s


def test_a_refused_plan_names_the_nearest_runnable_layout() -> None:
    with pytest.raises(InputError, match="shardwise has no offload=both") as raised:
        export(plan(layout="fsdp=8 tp=2 recompute=full offload=both"), get_target("slurm"))
    assert "the nearest layout that it runs: fsdp=8 tp=2 " in raised.value.problems[-1]


def test_one_node_starts_standalone() -> None:
    script = export(plan("h100:8", "fsdp=8 zero_stage=1"), get_target("slurm")).files["launch.slurm"]
    assert "--standalone" in script


def test_a_task_of_skypilot() -> None:
    launch = export(plan(), get_target("skypilot"))
    assert list(launch.files) == ["plan.json", "task.yaml", "README.md"]
    assert launch.command.startswith("sky launch -c train-llama-3-8b --env DATA_URI=")
    assert "sky launch" in launch.files["README.md"]
    task = yaml.safe_load(launch.files["task.yaml"])
    assert (task["num_nodes"], task["resources"], task["workdir"]) == (2, {"accelerators": "H100:8"}, ".")
    assert set(task["envs"]) == {"DATA_URI", "OUT_URI", "STEPS", "SHARDWISE"}
    assert all(isinstance(value, str) and value for value in task["envs"].values())
    assert {mount["source"] for mount in task["file_mounts"].values()} == {"${DATA_URI}", "${OUT_URI}"}
    assert "-m shardwise.train plan.json" in task["run"]
    with pytest.raises(InputError, match="SkyPilot has no accelerator that is mi355x"):
        export(plan("mi355x:8", "fsdp=4 tp=2 zero_stage=1"), get_target("skypilot"))


FAKE_PYTHON = """#!/bin/bash
echo "python3 $*" >> "$LOG"
mkdir -p "$HOME/shardwise-venv/bin"
for program in python torchrun; do
  printf '#!/bin/bash\\necho "%s $*" >> "$LOG"\\nprintf "%%s " "$DATA" "$OUT" "$HEAD_NODE" >> "$LOG"\\nls >> "$LOG"\\n' \\
    "$program" > "$HOME/shardwise-venv/bin/$program"
  chmod +x "$HOME/shardwise-venv/bin/$program"
done
"""


def test_a_task_of_skypilot_has_all_that_it_needs_in_a_clean_folder(tmp_path: Path) -> None:
    """As SkyPilot runs it: the folder is copied to each node, `setup` and `run` see the variables and nothing else."""
    work, home, tools, log = (tmp_path / name for name in ("work", "home", "tools", "log"))
    for folder in (work, home, tools):
        folder.mkdir()
    for name, text in export(plan(), get_target("skypilot")).files.items():
        (work / name).write_text(text, encoding="utf-8")
    (tools / "python3").write_text(FAKE_PYTHON)
    (tools / "python3").chmod(0o755)
    task = yaml.safe_load((work / "task.yaml").read_text())
    environment = {**task["envs"], "DATA_URI": "s3://b/tokens", "OUT_URI": "s3://b/runs", "STEPS": "10"}
    environment |= {"PATH": f"{tools}:/usr/bin:/bin", "HOME": str(home), "LOG": str(log)}
    for rank in range(task["num_nodes"]):
        ranks = {
            "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
            "SKYPILOT_NODE_RANK": str(rank),
            "SKYPILOT_TASK_ID": "task-7",
        }
        for part in ("setup", "run"):
            subprocess.run(["bash", "-c", task[part]], cwd=work, env={**environment, **ranks}, check=True)
    text = log.read_text()
    assert text.count("python -m pip install --quiet shardwise[train]==") == 2
    started = [line for line in text.splitlines() if line.startswith("torchrun ")]
    assert len(started) == 2
    assert all("--rdzv-endpoint 10.0.0.1:29500" in line and "--steps 10" in line for line in started)
    assert all("--data /shardwise/data" in line and "--out /shardwise/out/task-7" in line for line in started)
    assert "plan.json" in text


def test_a_plan_with_a_pattern_of_layers_is_its_own_launch_and_no_other_framework_says_it() -> None:
    """What no written option says is refused with its value."""
    kinds = {"window": {"sliding_window": 512, "num_kv_heads": 4}}
    model = dataclasses.replace(load_model("llama-3-8b"), layer_kinds=kinds, layer_pattern=("window*3", "block"))
    patterned = plan_layout(model, load_cluster("h100:16"), JOB, Layout.parse("fsdp=8 tp=2 zero_stage=1"))
    files = export(patterned, get_target("slurm")).files
    assert parse_plan(json.loads(files["plan.json"])).model == model
    with pytest.raises(
        InputError, match=r"model\.layer_pattern is window\*3,block, which no option written for Megatron-LM says"
    ):
        export(patterned, get_target("megatron"))


def test_every_field_of_a_model_is_an_option_of_our_own_engine() -> None:
    """A field without one would refuse every launch."""
    missing = {field.name for field in dataclasses.fields(Architecture)} - {*COSTLESS_FIELDS}
    assert {f"model.{name}" for name in missing} <= {*option_table("own")}
