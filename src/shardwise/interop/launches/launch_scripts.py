"""Scripts that start a training: torchrun, SLURM and SkyPilot, and the arguments of a user's own training script.

Neither DeepSpeed nor Accelerate knows the length of a sequence: the training script does. It is taken to have the arguments of
transformers' `TrainingArguments`, with `--block_size` for the length as its examples have; other names of it are understood.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shardwise.interop.launches.launch import Launch, Machines
from shardwise.interop.launches.target import (
    FrameworkOption,
    LaunchFiles,
    OptionMapping,
    OptionReader,
    Options,
    option_table,
)
from shardwise.interop.text_formats.command_flags import format_flags, parse_flags
from shardwise.interop.text_formats.shell_script import training_command
from shardwise.values.errors import InputError, describe_unknown

PORT = 29500  # torchrun's usual rendezvous port. Source: PyTorch documentation, torchrun (Elastic Launch)
# Options for the nodes and for the processes of each, and the nodes where none are said: torchrun's, and deepspeed's, which has
# those of its hostfile. Sources: PyTorch documentation, torchrun; DeepSpeed 0.19.8, launcher/runner.py.
PROCESS_OPTIONS = (("nnodes", "nproc-per-node", 1), ("num-nodes", "num-gpus", None))
COUNT_OPTIONS = {name: FrameworkOption(name, "int") for *names, _ in PROCESS_OPTIONS for name in names}
NON_SCRIPT_ENDINGS = (".json", ".yaml", ".yml", ".toml", ".py", ".md")


def torchrun_command(machines: Machines, module: str) -> str:
    """The words of a shell that start a module or a script on a node; several nodes meet where the environment says."""
    where = (
        "--standalone"
        if machines.num_nodes == 1
        else f'--rdzv-id "${{JOB_ID:-shardwise}}" --rdzv-backend c10d --rdzv-endpoint "${{HEAD_NODE:?the first node}}:{PORT}"'
    )
    return f"torchrun --nnodes {machines.num_nodes} --nproc-per-node {machines.devices_per_node} {where} {module}"


def slurm_script(machines: Machines, name: str, command: str) -> str:
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


def skypilot_task(machines: Machines, accelerator: str, command: str) -> str:
    """A task of SkyPilot: its variables name the nodes. Source: SkyPilot documentation, distributed jobs."""
    return f"""num_nodes: {machines.num_nodes}
resources:
  accelerators: {accelerator}:{machines.devices_per_node}
run: |
  export HEAD_NODE=$(echo "$SKYPILOT_NODE_IPS" | head -n1)
  export JOB_ID=$SKYPILOT_TASK_ID
  {command}
"""


def process_count_notes(files: LaunchFiles, machines: Machines) -> Iterator[str]:
    """A note for each script that starts more or fewer processes than there are devices."""
    for name in (name for name in files if not name.lower().endswith(NON_SCRIPT_ENDINGS)):
        started = _started_processes(files[name], name)
        if started and started[0] * started[1] != machines.num_devices:
            nodes, processes = started
            yield (
                f"{name} starts {nodes} × {processes} = {nodes * processes} processes; this is priced on {machines.num_devices} "
                "devices"
            )


def _started_processes(text: str, name: str) -> tuple[int, int] | None:
    """Nodes, and processes on each, as the words before a script's program say them; None where they do not."""
    try:
        said = parse_flags(training_command(text, name).launcher[:-1], COUNT_OPTIONS)
    except InputError:
        return None
    for nodes, processes, usual in PROCESS_OPTIONS:
        num_nodes, num_processes = said.get(nodes, usual), said.get(processes)
        if isinstance(num_nodes, int) and isinstance(num_processes, int):
            return num_nodes, num_processes
    return None


SCRIPT_PREFIX = "script."
MAX_COUNT = 10**12  # of steps, sequences, tokens or devices: far above any launch
# Tokens of a sequence. The first is written. Sources: transformers' run_clm.py; TRL's SFTConfig, now and before; LLaMA-Factory.
LENGTH_OPTIONS = (
    "block_size",
    "max_length",
    "max_seq_length",
    "max_seq_len",
    "seq_length",
    "seq_len",
    "sequence_length",
    "cutoff_len",
)
# `--optim` by what each keeps; the first is written. Source: transformers 5.23.0, OptimizerNames.
OPTIMIZERS = {
    "adamw": ("adamw_torch_fused", "adamw_torch", "adamw_apex_fused"),
    "adamw_8bit": ("adamw_torch_8bit", "adamw_bnb_8bit", "adamw_8bit"),  # torchao's, bitsandbytes', an alias of that
    "lion": ("lion_32bit",),
}
TRAINING_SCRIPT = '"${TRAIN_DIR:?the folder of your training script}/train.py"'
CONFIG_ENDINGS = (".json", ".yaml", ".yml")


def _read_length(given: OptionReader) -> Mapping[str, Any]:
    lengths = {name: get_count(given, SCRIPT_PREFIX + name) for name in LENGTH_OPTIONS if SCRIPT_PREFIX + name in given}
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"--{name} {value}" for name, value in lengths.items())
        raise InputError(f"sequences: found {found}; one length is required")
    return {"job.seq_len": next(iter(lengths.values()))} if lengths else {}


def _step_options(launch: Launch) -> Options:
    tokens = launch.job.tokens
    return {f"{SCRIPT_PREFIX}max_steps": round(tokens / launch.job.global_batch_tokens)} if tokens else {}


def get_count(given: OptionReader, option: str, default: int | None = None) -> int | None:
    """A number of things. Raises `InputError` for what is none."""
    value = given.get(option, default)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_COUNT:
        raise InputError(f"{option}: found {str(value)[:80]!r}; a whole number from 1 to {MAX_COUNT:,} is required")
    return value


def read_tokens(given: OptionReader, seqs: int | None, seq_len: int | None) -> Mapping[str, Any]:
    """Tokens of a run of so many steps."""
    if given.get(f"{SCRIPT_PREFIX}max_steps", -1) == -1 or not seqs or not seq_len:
        return {}
    steps = get_count(given, f"{SCRIPT_PREFIX}max_steps")
    return {"job.tokens": float((steps or 0) * seqs * seq_len)}


def read_optimizer(given: OptionReader) -> Mapping[str, Any]:
    """The script's own optimizer; torch's AdamW where it says none."""
    names = {theirs: ours for ours, several in OPTIMIZERS.items() for theirs in several}
    name = given.get(f"{SCRIPT_PREFIX}optim", OPTIMIZERS["adamw"][0])
    if name not in names:
        raise InputError(f"--optim: {describe_unknown(str(name), names)}")
    return {"job.optimizer": names[name]}


def _optimizer_options(launch: Launch) -> Options:
    named = OPTIMIZERS.get(launch.job.optimizer)
    return {f"{SCRIPT_PREFIX}optim": named[0]} if named else {}


def is_true(value: object) -> bool:
    """Whether an option says yes: true, or a word for it."""
    return str(value).lower() in ("true", "1", "yes", "y", "on", "t")


LENGTH_MAPPING = OptionMapping(lambda launch: {SCRIPT_PREFIX + LENGTH_OPTIONS[0]: launch.job.seq_len}, _read_length)
OPTIMIZER_MAPPING = OptionMapping(_optimizer_options, read_optimizer)
STEPS_MAPPING = OptionMapping(_step_options, lambda given: {})  # read where the batch is


def argument_lines(options: Options, *first: str) -> str:
    """The script's arguments as a bash array, after some of the framework's own."""
    own = {name.removeprefix(SCRIPT_PREFIX): value for name, value in options.items() if name.startswith(SCRIPT_PREFIX)}
    lines = "\n".join(f"  {one}" for one in (*first, *(" ".join(words) for words in format_flags(own))))
    return f"ARGS=(\n{lines}\n)"


def drop_script_options(options: Options) -> dict[str, Any]:
    """The options of the framework's own files."""
    return {name: value for name, value in options.items() if not name.startswith(SCRIPT_PREFIX)}


def config_files(files: LaunchFiles) -> dict[str, str]:
    """Those of some files that are configurations, by their endings; others are scripts."""
    return {name: text for name, text in files.items() if name.lower().endswith(CONFIG_ENDINGS)}


def read_script_options(files: LaunchFiles, table: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What launch scripts among the files say: options of the launcher, and those of the training script with their prefix."""
    launcher: dict[str, Any] = {}
    arguments: dict[str, Any] = {}
    kinds = {name.rpartition(".")[2].replace("_", "-"): option for name, option in option_table(table).items()}
    for name in files.keys() - config_files(files).keys():
        command = training_command(files[name], name)
        launcher |= _with_underscores(parse_flags(command.launcher[:-1], kinds))  # the last word is the program
        arguments |= {
            SCRIPT_PREFIX + key: value
            for key, value in _with_underscores(parse_flags(command.arguments, kinds)).items()
        }
    return launcher, arguments


def _with_underscores(options: Options) -> dict[str, Any]:
    return {name.replace("-", "_"): value for name, value in options.items()}
