"""The arguments of a training script, beside the configuration of the framework that it runs under.

Neither DeepSpeed nor Accelerate knows the length of a sequence: the script does. It is taken to have the arguments of
transformers' `TrainingArguments`, with `--block_size` for the length as its examples have; other names of it are understood.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.errors import InputError
from shardwise.export.field import Field, Given, Options
from shardwise.export.formats.flags import flag_words, options_in
from shardwise.export.formats.shell import training_command
from shardwise.export.launch import Launch
from shardwise.export.target import Files, option_table
from shardwise.names import unknown

PREFIX = "script."
MOST = 10**12  # of steps, sequences, tokens or devices: far above any launch
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
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST:
        raise InputError(f"{option}: found {str(value)[:80]!r}; a whole number from 1 to {MOST:,} is required")
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
