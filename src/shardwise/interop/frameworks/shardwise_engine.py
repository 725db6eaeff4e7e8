"""Our own engine on a cluster's scheduler: the plan itself, and what starts `shardwise train` on every node.

Sources: SLURM documentation, sbatch; SkyPilot documentation, distributed jobs, and names of accelerators (sky show-gpus).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from shardwise.interop.launches.launch import Launch, launch_of
from shardwise.interop.launches.launch_scripts import skypilot, torchrun
from shardwise.interop.launches.target import Field, Files, Given, Need, Options, Target
from shardwise.search.plan import Plan
from shardwise.search.plan_file import parse_plan, plan_payload
from shardwise.values.errors import InputError
from shardwise.version import __version__

PLAN, TASK = "plan.json", "task.yaml"
ACCELERATORS: Mapping[str, str] = {
    "a100-40gb": "A100", "a100-80gb": "A100-80GB", "h100": "H100", "h200": "H200", "b200": "B200", "b300": "B300",
    "gb200": "GB200", "v100": "V100", "v100-32gb": "V100-32GB", "l4": "L4", "l40s": "L40S", "mi300x": "MI300X",
}  # fmt: skip
_TRAIN = f'-m shardwise.train {PLAN} --data "${{DATA:?a folder of tokens}}" --steps "${{STEPS:?}}" --out "${{OUT:?a folder}}"'


def _say(launch: Launch) -> Options:
    """Every part of a launch, by its own name."""
    return {part: value for part, value in launch.parts().items() if value is not None}


def _hear(given: Given) -> Mapping[str, Any]:
    return {name: given.get(name) for name in given.options}


def _read(files: Files) -> Options:
    """What the plan in the file says."""
    if PLAN not in files:
        raise InputError(f"found {', '.join(files)}; {PLAN}, which `shardwise plan --out` writes, is required")
    try:
        payload = json.loads(files[PLAN])
    except (ValueError, RecursionError) as error:
        raise InputError(f"{PLAN}: not valid JSON: {error}") from None
    return _say(launch_of(parse_plan(payload)))


def _command(launch: Launch) -> str:
    return torchrun(launch.machines, _TRAIN)


def _plan(launch: Launch) -> Plan:
    if launch.plan is None:
        raise InputError(
            "export: a launch of our own engine is its plan; a file that `shardwise plan --out` wrote is required"
        )
    return launch.plan


def _write(options: Options, launch: Launch) -> Files:
    return {PLAN: json.dumps(plan_payload(_plan(launch)), indent=2)}


def _write_task(options: Options, launch: Launch) -> Files:
    accelerator = ACCELERATORS[_plan(launch).cluster.chip.catalogued]
    return {**_write(options, launch), TASK: skypilot(launch.machines, accelerator, _command(launch))}


def _notes(launch: Launch) -> tuple[str, ...]:
    return ("data, steps and the run's folder are yours: set DATA, STEPS and OUT",)


def _own(name: str, title: str, source: str, **others: Any) -> Target:
    return Target(
        name=name, title=title, version=__version__, source=source, stack="shardwise", table="own",
        fields=(Field(_say, _hear),), order=None, read=_read, command=_command, notes=_notes, **others,
    )  # fmt: skip


SLURM = _own("slurm", "Shardwise under SLURM", "https://slurm.schedmd.com/sbatch.html", needs=(), write=_write)
SKYPILOT = _own(
    "skypilot", "Shardwise under SkyPilot", "https://docs.skypilot.co/en/latest/running-jobs/distributed-jobs.html",
    needs=(
        Need(
            lambda launch: launch.plan is None or launch.plan.cluster.chip.catalogued in ACCELERATORS,
            lambda launch: f"SkyPilot has no accelerator that is {_plan(launch).cluster.chip.name}; one of "
            f"{', '.join(ACCELERATORS)} is required",
        ),
    ),
    write=_write_task,
)  # fmt: skip
