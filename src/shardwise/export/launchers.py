"""Scripts that start one process for each device on every node: torchrun, SLURM and SkyPilot."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.errors import InputError
from shardwise.export.formats.flags import options_in
from shardwise.export.formats.shell import training_command
from shardwise.export.launch import Machines
from shardwise.export.target import Files, Option

PORT = 29500  # torchrun's usual rendezvous port. Source: PyTorch documentation, torchrun (Elastic Launch)
# Options for the nodes and for the processes of each, and the nodes where none are said: torchrun's, and deepspeed's, which has
# those of its hostfile. Sources: PyTorch documentation, torchrun; DeepSpeed 0.19.8, launcher/runner.py.
STARTED = (("nnodes", "nproc-per-node", 1), ("num-nodes", "num-gpus", None))
COUNTS = {name: Option(name, "int") for *names, _ in STARTED for name in names}
NO_SCRIPTS = (".json", ".yaml", ".yml", ".toml", ".py", ".md")


def torchrun(machines: Machines, module: str) -> str:
    """The words of a shell that start a module or a script on a node; several nodes meet where the environment says."""
    where = (
        "--standalone"
        if machines.num_nodes == 1
        else f'--rdzv-id "${{JOB_ID:-shardwise}}" --rdzv-backend c10d --rdzv-endpoint "${{HEAD_NODE:?the first node}}:{PORT}"'
    )
    return f"torchrun --nnodes {machines.num_nodes} --nproc-per-node {machines.devices_per_node} {where} {module}"


def slurm(machines: Machines, name: str, command: str) -> str:
    """A batch script: one task for each node, which starts `command`. Source: SLURM documentation, sbatch and srun."""
    return f"""#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={machines.num_nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={machines.devices_per_node}
#SBATCH --exclusive
set -euo pipefail
export HEAD_NODE=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1)
export JOB_ID=$SLURM_JOB_ID
srun {command}
"""


def skypilot(machines: Machines, accelerator: str, command: str) -> str:
    """A task of SkyPilot: its variables name the nodes. Source: SkyPilot documentation, distributed jobs."""
    return f"""num_nodes: {machines.num_nodes}
resources:
  accelerators: {accelerator}:{machines.devices_per_node}
run: |
  export HEAD_NODE=$(echo "$SKYPILOT_NODE_IPS" | head -n1)
  export JOB_ID=$SKYPILOT_TASK_ID
  {command}
"""


def differing_machines(files: Files, machines: Machines) -> Iterator[str]:
    """A note for each script that starts more or fewer processes than there are devices."""
    for name in (name for name in files if not name.lower().endswith(NO_SCRIPTS)):
        started = _started(files[name], name)
        if started and started[0] * started[1] != machines.num_devices:
            nodes, processes = started
            yield (
                f"{name} starts {nodes} × {processes} = {nodes * processes} processes; this is priced on {machines.num_devices} "
                "devices"
            )


def _started(text: str, name: str) -> tuple[int, int] | None:
    """Nodes, and processes on each, as the words before a script's program say them; None where they do not."""
    try:
        said = options_in(training_command(text, name).launcher[:-1], COUNTS)
    except InputError:
        return None
    for nodes, processes, usual in STARTED:
        num_nodes, num_processes = said.get(nodes, usual), said.get(processes)
        if isinstance(num_nodes, int) and isinstance(num_processes, int):
            return num_nodes, num_processes
    return None
