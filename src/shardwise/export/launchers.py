"""Scripts that start one process for each device on every node: torchrun, SLURM and SkyPilot."""

from __future__ import annotations

from shardwise.export.launch import Machines

PORT = 29500  # torchrun's usual rendezvous port. Source: PyTorch documentation, torchrun (Elastic Launch)


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
