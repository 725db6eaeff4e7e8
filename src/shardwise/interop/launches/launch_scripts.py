"""Scripts that start a training: torchrun, SLURM and SkyPilot, and the arguments of a user's own training script.

Neither DeepSpeed nor Accelerate knows the length of a sequence: the training script does. It is taken to have the arguments of
transformers' `TrainingArguments`, with `--block_size` for the length as its examples have; other names of it are understood.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shardwise.interop.launches.launch import Launch, Machines
from shardwise.interop.launches.target import Field, Files, Given, Option, Options, option_table
from shardwise.interop.text_formats.command_flags import flag_words, options_in
from shardwise.interop.text_formats.shell_script import training_command
from shardwise.values.errors import InputError, unknown

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


PREFIX = "script."
MAX_COUNT = 10**12  # of steps, sequences, tokens or devices: far above any launch
# Tokens of a sequence. The first is written. Sources: transformers' run_clm.py; TRL's SFTConfig, now and before; LLaMA-Factory.
LENGTHS = (
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
TRAIN = '"${TRAIN_DIR:?the folder of your training script}/train.py"'
CONFIGURATIONS = (".json", ".yaml", ".yml")


def _heard_length(given: Given) -> Mapping[str, Any]:
    lengths = {name: whole(given, PREFIX + name) for name in LENGTHS if PREFIX + name in given}
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"--{name} {value}" for name, value in lengths.items())
        raise InputError(f"sequences: found {found}; one length is required")
    return {"job.seq_len": next(iter(lengths.values()))} if lengths else {}


def _steps(launch: Launch) -> Options:
    tokens = launch.job.tokens
    return {f"{PREFIX}max_steps": round(tokens / launch.job.global_batch_tokens)} if tokens else {}


def whole(given: Given, option: str, default: int | None = None) -> int | None:
    """A number of things. Raises `InputError` for what is none."""
    value = given.get(option, default)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_COUNT:
        raise InputError(f"{option}: found {str(value)[:80]!r}; a whole number from 1 to {MAX_COUNT:,} is required")
    return value


def heard_tokens(given: Given, seqs: int | None, seq_len: int | None) -> Mapping[str, Any]:
    """Tokens of a run of so many steps."""
    if given.get(f"{PREFIX}max_steps", -1) == -1 or not seqs or not seq_len:
        return {}
    steps = whole(given, f"{PREFIX}max_steps")
    return {"job.tokens": float((steps or 0) * seqs * seq_len)}


def heard_optimizer(given: Given) -> Mapping[str, Any]:
    """The script's own optimizer; torch's AdamW where it says none."""
    names = {theirs: ours for ours, several in OPTIMIZERS.items() for theirs in several}
    name = given.get(f"{PREFIX}optim", OPTIMIZERS["adamw"][0])
    if name not in names:
        raise InputError(f"--optim: {unknown(str(name), names)}")
    return {"job.optimizer": names[name]}


def _optimizer(launch: Launch) -> Options:
    named = OPTIMIZERS.get(launch.job.optimizer)
    return {f"{PREFIX}optim": named[0]} if named else {}


def is_true(value: object) -> bool:
    """Whether an option says yes: true, or a word for it."""
    return str(value).lower() in ("true", "1", "yes", "y", "on", "t")


LENGTH = Field(lambda launch: {PREFIX + LENGTHS[0]: launch.job.seq_len}, _heard_length)
OPTIMIZER = Field(_optimizer, heard_optimizer)
STEPS = Field(_steps, lambda given: {})  # read where the batch is


def argument_lines(options: Options, *first: str) -> str:
    """The script's arguments as a bash array, after some of the framework's own."""
    own = {name.removeprefix(PREFIX): value for name, value in options.items() if name.startswith(PREFIX)}
    lines = "\n".join(f"  {one}" for one in (*first, *(" ".join(words) for words in flag_words(own))))
    return f"ARGS=(\n{lines}\n)"


def without_arguments(options: Options) -> dict[str, Any]:
    """The options of the framework's own files."""
    return {name: value for name, value in options.items() if not name.startswith(PREFIX)}


def configurations(files: Files) -> dict[str, str]:
    """Those of some files that are configurations, by their endings; others are scripts."""
    return {name: text for name, text in files.items() if name.lower().endswith(CONFIGURATIONS)}


def script_options(files: Files, table: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What launch scripts among the files say: options of the launcher, and those of the training script with their prefix."""
    launcher: dict[str, Any] = {}
    arguments: dict[str, Any] = {}
    kinds = {name.rpartition(".")[2].replace("_", "-"): option for name, option in option_table(table).items()}
    for name in files.keys() - configurations(files).keys():
        command = training_command(files[name], name)
        launcher |= _underscored(options_in(command.launcher[:-1], kinds))  # the last word is the program
        arguments |= {PREFIX + key: value for key, value in _underscored(options_in(command.arguments, kinds)).items()}
    return launcher, arguments


def _underscored(options: Options) -> dict[str, Any]:
    return {name.replace("-", "_"): value for name, value in options.items()}
