"""Shardwise's own engine on a cluster's scheduler: the plan, and the command that starts `shardwise train` on every node.

Sources: SLURM documentation, sbatch; SkyPilot documentation, distributed jobs, and names of accelerators (sky show-gpus).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from shardwise.interop.launches.launch import Launch, launch_from_plan
from shardwise.interop.launches.launch_scripts import skypilot_task, torchrun_command
from shardwise.interop.launches.target import LaunchFiles, OptionMapping, OptionReader, Requirement, Target
from shardwise.interop.text_formats.option_tables import Options
from shardwise.search import Plan, plan_payload
from shardwise.search.plan_file import parse_plan
from shardwise.values import InputError, parse_json
from shardwise.version import __version__

PLAN_FILE, TASK_FILE = "plan.json", "task.yaml"
ACCELERATORS: Mapping[str, str] = {
    "a100-40gb": "A100", "a100-80gb": "A100-80GB", "h100": "H100", "h200": "H200", "b200": "B200", "b300": "B300",
    "gb200": "GB200", "v100": "V100", "v100-32gb": "V100-32GB", "l4": "L4", "l40s": "L40S", "mi300x": "MI300X",
}  # fmt: skip
REQUIREMENT = f"shardwise[train]=={__version__}"
DEFAULT_STEPS = 100  # of a job without a number of tokens: a first run
TASK_VARIABLES: Mapping[str, str] = {"DATA_URI": "s3://BUCKET/tokens", "OUT_URI": "s3://BUCKET/runs", "STEPS": "N"}
_TRAIN_COMMAND = (
    f'-m shardwise.train {PLAN_FILE} --data "${{DATA:?a folder of tokens}}" '
    '--steps "${STEPS:?}" --out "${OUT:?a folder}"'
)


def _launch_options(launch: Launch) -> Options:
    """Return every field of a launch under its own name; without dropout, which the engine does not have, none for it."""
    fields = {field: value for field, value in launch.fields().items() if value is not None}
    return fields if launch.job.dropout else {field: value for field, value in fields.items() if field != "job.dropout"}


def _read_launch(reader: OptionReader) -> Mapping[str, Any]:
    return {name: reader.get(name) for name in reader.options}


def _read_files(files: LaunchFiles) -> Options:
    """Return the fields of the plan in the file."""
    if PLAN_FILE not in files:
        raise InputError(f"found {', '.join(files)}; {PLAN_FILE}, which `shardwise plan --out` writes, is required")
    payload = parse_json(files[PLAN_FILE], PLAN_FILE, finite=True)
    return _launch_options(launch_from_plan(parse_plan(payload)))


def _command(launch: Launch) -> str:
    return torchrun_command(launch.machines, _TRAIN_COMMAND)


def _require_plan(launch: Launch) -> Plan:
    if launch.plan is None:
        raise InputError(
            "export: a launch of our own engine is its plan; a file that `shardwise plan --out` wrote is required"
        )
    return launch.plan


def _write_plan(options: Options, launch: Launch) -> LaunchFiles:
    return {PLAN_FILE: json.dumps(plan_payload(_require_plan(launch)), indent=2)}


def _write_task(options: Options, launch: Launch) -> LaunchFiles:
    accelerator = ACCELERATORS[_require_plan(launch).cluster.chip.catalog_name]
    task = skypilot_task(
        launch.machines, name=_task_name(launch), accelerator=accelerator, requirement=REQUIREMENT,
        num_steps=launch.num_steps or DEFAULT_STEPS, command=_command(launch),
    )  # fmt: skip
    return {**_write_plan(options, launch), TASK_FILE: task}


def _task_name(launch: Launch) -> str:
    """Return a name that SkyPilot takes for a cluster: small letters, digits and dashes, a letter first."""
    return "train-" + re.sub("[^a-z0-9]+", "-", launch.model.name.lower()).strip("-")


def _sky_command(launch: Launch) -> str:
    variables = " ".join(f"--env {name}={value}" for name, value in TASK_VARIABLES.items())
    return f"sky launch -c {_task_name(launch)} {variables} {TASK_FILE}"


def _engine_target(name: str, title: str, source: str, note: str, **settings: Any) -> Target:
    return Target(
        name=name, title=title, version=__version__, source=source, stack="shardwise", options_file="own",
        mappings=(OptionMapping(_launch_options, _read_launch),), order=None,
        read=_read_files, notes=lambda launch: (note,), **settings,
    )  # fmt: skip


SLURM = _engine_target(
    "slurm", "Shardwise under SLURM", "https://slurm.schedmd.com/sbatch.html",
    "data, steps and the run's folder are yours: set DATA, STEPS and OUT", requirements=(), write=_write_plan, command=_command,
)  # fmt: skip
SKYPILOT = _engine_target(
    "skypilot", "Shardwise under SkyPilot", "https://docs.skypilot.co/en/latest/running-jobs/distributed-jobs.html",
    f"run it in this folder; buckets of data and for the run, and the number of steps, are yours: {', '.join(TASK_VARIABLES)}",
    slurm=False, command=_sky_command,
    requirements=(
        Requirement(
            lambda launch: launch.plan is None or launch.plan.cluster.chip.catalog_name in ACCELERATORS,
            lambda launch: f"SkyPilot has no accelerator that is {_require_plan(launch).cluster.chip.name}; one of "
            f"{', '.join(ACCELERATORS)} is required",
        ),
    ),
    write=_write_task,
)  # fmt: skip
