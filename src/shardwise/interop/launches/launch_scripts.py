"""Scripts that start a training: torchrun, SLURM and SkyPilot, and the arguments of a user's own training script.

DeepSpeed and Accelerate do not know the sequence length: the training script does. It is assumed to take the arguments of
transformers' `TrainingArguments`, and `--block_size` for the length as in its examples; other names of the length are read
too.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardwise.interop.launches.launch import Launch, Machines
from shardwise.interop.launches.target import LaunchFiles, OptionMapping, OptionReader
from shardwise.interop.text_formats.command_flags import format_flags, parse_flags
from shardwise.interop.text_formats.option_tables import FrameworkOption, Options, option_table
from shardwise.interop.text_formats.shell_script import training_command
from shardwise.values import InputError, argument_label, describe_unknown, raise_problems

PORT = 29500  # torchrun's default rendezvous port. Source: PyTorch documentation, torchrun (Elastic Launch)
# (option of nodes, option of processes per node, default nodes) of torchrun and of deepspeed, which takes nodes from its hostfile
# by default. Sources: PyTorch documentation, torchrun; DeepSpeed 0.19.8, launcher/runner.py.
PROCESS_OPTIONS = (("nnodes", "nproc-per-node", 1), ("num-nodes", "num-gpus", None))
COUNT_OPTIONS = {name: FrameworkOption(name, "int") for *names, _ in PROCESS_OPTIONS for name in names}
NON_SCRIPT_ENDINGS = (".json", ".yaml", ".yml", ".toml", ".py", ".md")


def torchrun_command(machines: Machines, module: str) -> str:
    """Return the torchrun command of one node; several nodes meet at `$HEAD_NODE`."""
    rendezvous = "--standalone"
    if machines.num_nodes != 1:
        endpoint = f'"${{HEAD_NODE:?the first node}}:{PORT}"'
        rendezvous = f'--rdzv-id "${{JOB_ID:-shardwise}}" --rdzv-backend c10d --rdzv-endpoint {endpoint}'
    return f"torchrun --nnodes {machines.num_nodes} --nproc-per-node {machines.devices_per_node} {rendezvous} {module}"


def slurm_script(machines: Machines, name: str, command: str) -> str:
    """Return a batch script with one task per node, which runs `command`. Source: SLURM documentation, sbatch and srun."""
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


def skypilot_task(
    machines: Machines, *, name: str, accelerator: str, requirement: str, num_steps: int, command: str
) -> str:
    """Return a SkyPilot task that runs `command` in the folder it is launched from, once `requirement` is installed.

    Data and the run's folder are buckets that are mounted, which the user names at the launch. Source: SkyPilot documentation,
    task YAML and distributed jobs.
    """
    return f"""name: {name}
num_nodes: {machines.num_nodes}
resources:
  accelerators: {accelerator}:{machines.devices_per_node}
workdir: .
envs:
  DATA_URI: s3://your-bucket/tokens  # a bucket or a folder in it with token shards
  OUT_URI: s3://your-bucket/runs  # a bucket or a folder in it for the run
  STEPS: "{num_steps}"
  SHARDWISE: "{requirement}"  # what pip installs: a release, or git+https://...
file_mounts:
  /shardwise/data:
    source: ${{DATA_URI}}
    mode: MOUNT
  /shardwise/out:
    source: ${{OUT_URI}}
    mode: MOUNT
setup: |
  set -eu
  python3 -m venv "$HOME/shardwise-venv"
  "$HOME/shardwise-venv/bin/python" -m pip install --quiet "$SHARDWISE"
run: |
  set -eu
  export PATH="$HOME/shardwise-venv/bin:$PATH"
  export DATA=/shardwise/data OUT="/shardwise/out/${{SKYPILOT_TASK_ID:?}}"
  export HEAD_NODE="$(echo "$SKYPILOT_NODE_IPS" | head -n1)"
  export JOB_ID="$SKYPILOT_TASK_ID"
  {command}
"""


def process_count_notes(files: LaunchFiles, machines: Machines) -> Iterator[str]:
    """Yield a note for each script that starts more or fewer processes than there are devices."""
    for name in (name for name in files if not name.lower().endswith(NON_SCRIPT_ENDINGS)):
        process_counts = _started_processes(files[name], name)
        if process_counts and process_counts[0] * process_counts[1] != machines.num_devices:
            nodes, processes = process_counts
            started = f"{nodes} × {processes} = {nodes * processes} processes"
            yield f"{name} starts {started}; this is priced on {machines.num_devices} devices"


def script_argument_notes(files: LaunchFiles) -> Iterator[str]:
    """Yield a note for each script that takes arguments and is read without any."""
    for name, text in files.items():
        is_script = not name.lower().endswith(NON_SCRIPT_ENDINGS)
        if (
            is_script
            and _SCRIPT_ARGUMENT.search(_QUOTED.sub("", text))
            and not re.search(r"^set -- ", text, re.MULTILINE)
        ):
            yield f"{name} takes arguments ($1 and further), and is read as started without any; --arg gives them"


def _started_processes(text: str, name: str) -> tuple[int, int] | None:
    """Return (nodes, processes per node) as the launcher's options before the program say, or None."""
    try:
        options = parse_flags(training_command(text, name).launcher[:-1], COUNT_OPTIONS)
    except InputError:
        return None
    for nodes_option, processes_option, default_nodes in PROCESS_OPTIONS:
        num_nodes, num_processes = options.get(nodes_option, default_nodes), options.get(processes_option)
        if isinstance(num_nodes, int) and isinstance(num_processes, int):
            return num_nodes, num_processes
    return None


_SCRIPT_ARGUMENT = re.compile(r"\$\{?[1-9]")
_QUOTED = re.compile(r"'[^'\n]*'")  # text that bash does not expand: awk '{print $1}'
_ENVIRONMENT_NAME = re.compile(r"[A-Za-z_]\w*")


def with_script_context(files: LaunchFiles, arguments: Sequence[str], environment: Sequence[str]) -> LaunchFiles:
    """Return the files with the arguments and the environment (NAME=VALUE) that scripts are started with set in them.

    Raises `InputError` for an environment that is none, and if none of the files is a script.
    """
    if not arguments and not environment:
        return files
    pairs = [entry.partition("=") for entry in environment]
    wrong = [name for name, equals, _ in pairs if not equals or not _ENVIRONMENT_NAME.fullmatch(name)]
    label = argument_label("environment")
    raise_problems([f"{label}: found {name[:60]!r}; NAME=VALUE is required" for name in wrong])
    scripts = [name for name in files if not name.lower().endswith(NON_SCRIPT_ENDINGS)]
    if not scripts:
        raise InputError(f"read: found arguments for a script, and no script in {', '.join(files)}; leave them out")
    lines = [f"{name}={shlex.quote(value)}" for name, _, value in pairs]
    lines += [shlex.join(["set", "--", *arguments])] if arguments else []
    head = "".join(f"{line}\n" for line in lines)
    return {name: head + text if name in scripts else text for name, text in files.items()}


SCRIPT_PREFIX = "script."
# Names of the sequence length; the first is written. Sources: transformers' run_clm.py; TRL's SFTConfig, now and before;
# LLaMA-Factory; FastChat's train.py.
LENGTH_OPTIONS = (
    "block_size", "max_length", "max_seq_length", "max_seq_len", "seq_length", "seq_len", "sequence_length", "cutoff_len",
    "model_max_length",
)  # fmt: skip
# Values of `--optim` by optimizer; the first is written. Source: transformers 5.23.0, OptimizerNames.
OPTIMIZERS = {
    "adamw": ("adamw_torch_fused", "adamw_torch", "adamw_apex_fused", "adamw_hf", "paged_adamw_32bit", "paged_adamw"),
    # torchao's, bitsandbytes', an alias of that, and paged to the host where memory runs out
    "adamw_8bit": ("adamw_torch_8bit", "adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit"),
    "lion": ("lion_32bit", "paged_lion_32bit"),
    "sgd": ("sgd",),
    "adafactor": ("adafactor",),
}
TRAINING_SCRIPT = '"${TRAIN_DIR:?the folder of your training script}/train.py"'
CONFIG_ENDINGS = (".json", ".yaml", ".yml")


def _read_length(reader: OptionReader) -> Mapping[str, Any]:
    names = [name for name in LENGTH_OPTIONS if SCRIPT_PREFIX + name in reader]
    lengths = {name: reader.get_count(SCRIPT_PREFIX + name) for name in names}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"--{name} {value}" for name, value in lengths.items())
        raise InputError(f"sequences: found {listed}; one length is required")
    return {"job.seq_len": next(iter(lengths.values()))} if lengths else {}


def _step_options(launch: Launch) -> Options:
    tokens = launch.job.tokens
    return {f"{SCRIPT_PREFIX}max_steps": round(tokens / launch.job.global_batch_tokens)} if tokens else {}


def read_tokens(reader: OptionReader, seqs: int | None, seq_len: int | None) -> Mapping[str, Any]:
    """Return `job.tokens` from the script's number of steps, if it and both sizes are known."""
    if reader.get(f"{SCRIPT_PREFIX}max_steps", -1) == -1 or not seqs or not seq_len:
        return {}
    steps = reader.get_count(f"{SCRIPT_PREFIX}max_steps")
    return {"job.tokens": float((steps or 0) * seqs * seq_len)}


def read_optimizer(reader: OptionReader) -> Mapping[str, Any]:
    """Return the optimizer of the training script (default: AdamW of PyTorch). Raises `InputError` for an unknown one."""
    optimizer_by_alias = {alias: optimizer for optimizer, aliases in OPTIMIZERS.items() for alias in aliases}
    name = reader.get(f"{SCRIPT_PREFIX}optim", OPTIMIZERS["adamw"][0])
    if name not in optimizer_by_alias:
        raise InputError(f"--optim: {describe_unknown(str(name), optimizer_by_alias)}")
    return {"job.optimizer": optimizer_by_alias[name]}


def _optimizer_options(launch: Launch) -> Options:
    aliases = OPTIMIZERS.get(launch.job.optimizer)
    return {f"{SCRIPT_PREFIX}optim": aliases[0]} if aliases else {}


def is_true(value: object) -> bool:
    """Return whether a value means true: True, or one of true, 1, yes, y, on, t."""
    return str(value).lower() in ("true", "1", "yes", "y", "on", "t")


LENGTH_MAPPING = OptionMapping(lambda launch: {SCRIPT_PREFIX + LENGTH_OPTIONS[0]: launch.job.seq_len}, _read_length)
OPTIMIZER_MAPPING = OptionMapping(_optimizer_options, read_optimizer)
STEPS_MAPPING = OptionMapping(_step_options, lambda reader: {})  # read with the batch, which tokens depend on


def argument_lines(options: Options, *first: str) -> str:
    """Return the script's arguments as a bash array, after some of the framework's own."""
    arguments = {
        name.removeprefix(SCRIPT_PREFIX): value for name, value in options.items() if name.startswith(SCRIPT_PREFIX)
    }
    lines = "\n".join(f"  {argument}" for argument in (*first, *(" ".join(flag) for flag in format_flags(arguments))))
    return f"ARGS=(\n{lines}\n)"


def drop_script_options(options: Options) -> dict[str, Any]:
    """Return the options without those of the training script."""
    return {name: value for name, value in options.items() if not name.startswith(SCRIPT_PREFIX)}


def config_files(files: LaunchFiles) -> dict[str, str]:
    """Return the files that are configurations by their ending; the others are scripts."""
    return {name: text for name, text in files.items() if name.lower().endswith(CONFIG_ENDINGS)}


def read_launcher_and_script_options(files: LaunchFiles, table: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of the launcher, and those of the training script (with `SCRIPT_PREFIX`), in the scripts of `files`."""
    launcher: dict[str, Any] = {}
    arguments: dict[str, Any] = {}
    flag_table = {name.rpartition(".")[2].replace("_", "-"): option for name, option in option_table(table).items()}
    for name in files.keys() - config_files(files).keys():
        command = training_command(files[name], name)
        launcher |= _with_underscores(parse_flags(command.launcher[:-1], flag_table))  # the last word is the program
        script_options = _with_underscores(parse_flags(command.arguments, flag_table))
        arguments |= {SCRIPT_PREFIX + key: value for key, value in script_options.items()}
    return launcher, arguments


def _with_underscores(options: Options) -> dict[str, Any]:
    return {name.replace("-", "_"): value for name, value in options.items()}
