"""The flags of a run, shared by `shardwise train` and `python -m shardwise.train`, and the settings and recipe they
give."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from shardwise.batch_size import parse_batch_schedule
from shardwise.batch_size.batch_schedule import parse_batch_ramp
from shardwise.model.optimizers.definition import optimizer_fields
from shardwise.records import RunFolder
from shardwise.run.recipe import (
    BATCH_LR_RULES,
    DEVICES,
    LR_SCHEDULES,
    POLICIES,
    Device,
    TrainingRecipe,
    WeightedSource,
    parse_recipe,
    parse_source,
    require_distinct_sources,
    source_flags,
)
from shardwise.values import (
    InputError,
    Parser,
    apply_overrides,
    parse_count,
    parse_like,
    parse_overrides,
    parse_quantity,
    run_all,
)
from shardwise.values.engine_policies import GRADIENT_REDUCTIONS

DESCRIPTION = """Train the model of a plan exactly as the plan says, on this machine or, under torchrun, on many, and measure it.

With --resume what is left out is as the run has it."""
EXAMPLES = (
    "shardwise train plan.json --data data --steps 200 --out runs/a",
    "shardwise train plan.json --data data --out runs/a --resume",
    "torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m shardwise.train plan.json "
    "--data data --steps 200 --out runs/a",
)

GROUPS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "run": {
        "--data": {
            "required": True, "action": "append", "metavar": "DIR[=WEIGHT]",
            "help": "token shards that `shardwise tokenize` wrote; may be repeated: sources are drawn by their weights "
            "(default: 1)",
        },
        "--out": {"required": True, "metavar": "DIR", "help": "the run's folder: log, checkpoints and what is run"},
        "--steps": {"metavar": "N", "help": "optimizer steps of the whole run"},
        "--to-loss": {"metavar": "X", "help": "end once the smoothed training loss is X nats (default: at the last step)"},
        "--resume": {"action": "store_true", "help": "go on with the run in --out from its latest checkpoint"},
        "--elastic": {
            "action": "store_true",
            "help": "where ranks are lost, go on with those that are left: the plan is searched for them, and the run in --out, "
            "if there is one, goes on from its latest checkpoint",
        },
        "--from": {
            "metavar": "DIR",
            "help": "begin with the weights of a folder of Hugging Face, torchtitan or Megatron-LM (default: from the seed)",
        },
        "--force": {
            "action": "store_true",
            "help": "replace the run that is in --out; with --resume, go on though that run, or its checkpoint, is another one",
        },
        "--device": {"choices": DEVICES, "default": "auto", "help": "default: GPUs if there are any"},
        "--checkpoint-every": {"metavar": "N", "help": "steps between checkpoints (default: at the end only)"},
        "--keep-last": {"metavar": "N", "help": "the newest checkpoints that are kept (default: 2)"},
        "--keep-every": {"metavar": "M", "help": "keep those of every M-th step too (default: no others)"},
        "--policy": {
            "action": "append", "default": [], "metavar": "NAME=ACTION",
            "help": "what non-finite (default: stop), loss-spike, norm-spike do: stop, skip, rewind or ignore; may be repeated",
        },
        "--noise-scale-every": {"metavar": "N", "help": "steps between measurements of the gradient noise scale (default: none)"},
        "--validate-every": {"metavar": "N", "help": "steps between losses of the held-out text (default: at the end only)"},
    },
    "training": {
        "--learning-rate": {"metavar": "X", "help": "the highest one (default: 3e-4)"},
        "--schedule": {"choices": LR_SCHEDULES, "help": "how the learning rate falls after the warm-up (default: cosine)"},
        "--warmup": {"metavar": "N", "help": "steps in which the learning rate rises (default: none)"},
        "--decay": {"metavar": "N", "help": "of wsd, the last steps, in which it falls (default: none)"},
        "--seed": {"metavar": "N", "help": "of the parameters and of the order of the data (default: 0)"},
        "--clip": {"metavar": "X", "help": "the largest norm of the gradients, or none (default: 1)"},
        "--reduce": {"choices": GRADIENT_REDUCTIONS, "help": "when gradients that rest whole are reduced (default: bucketed)"},
        "--batch-schedule": {
            "metavar": "TEXT",
            "help": "how the global batch changes, in tokens: 0:64Ki,200M:128Ki, linear:from=64Ki,by=64Ki,over=200M or "
            "noise:lambda=2Mi (default: the plan's batch)",
        },
        "--batch-lr": {
            "choices": tuple(BATCH_LR_RULES), "help": "how the learning rate, that of the plan's batch, follows (default: none)",
        },
        "--set": {
            "action": "append", "default": [], "metavar": "KEY=VALUE",
            "help": "another value of the recipe, such as recipe.beta2=0.99 or recipe.batch_ramp=0:64,1000:128; may be repeated",
        },
    },
    "output": {
        "--tensorboard": {"action": "store_true", "help": "write the metrics for TensorBoard too, which must be installed"},
        "--profile": {
            "metavar": "A:B",
            "help": "record the timelines of steps A to B, both included, for `shardwise trace`",
        },
        "--json": {"action": "store_true", "help": "print the run's summary as JSON"},
    },
}  # fmt: skip
FLAGS: Mapping[str, Mapping[str, Any]] = {
    flag: settings for group in GROUPS.values() for flag, settings in group.items()
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """The settings of a run."""

    plan: Path
    out: RunFolder
    recipe: TrainingRecipe
    resume: bool = False
    elastic: bool = False
    force: bool = False
    tensorboard: bool = False
    device: Device = "auto"
    profile: range = range(0)  # steps, counted from 1

    @property
    def resume_command(self) -> str:
        """The command that continues this run."""
        arguments = ["shardwise", "train", self.plan, *source_flags(self.recipe.data), "--out", self.out.path]
        arguments += ["--resume", "--elastic"] if self.elastic else ["--resume"]
        arguments += [] if self.device == "auto" else ["--device", self.device]
        return shlex.join(map(str, arguments))


def add_train_arguments(parser: Parser) -> None:
    """Declare the plan and the flags; the help lists the fields of each optimizer."""
    parser.group("run").add_argument("plan", metavar="PLAN", help="a file that `shardwise plan --out` wrote")
    for title, flags in GROUPS.items():
        for flag, settings in flags.items():
            parser.group(title).add_argument(flag, **settings)
    parser.add_argument_group(OPTIMIZER_FIELDS_TITLE, optimizer_fields_text())


OPTIMIZER_FIELDS_TITLE = "fields of the plan's optimizer for --set recipe.NAME=VALUE, with the default of each"


def optimizer_fields_text() -> str:
    """Return a line for each field of an optimizer."""
    return "\n".join(f"  {name}: {description}" for name, description in optimizer_fields().items())


def make_arguments(plan: str, values: Mapping[str, Any]) -> argparse.Namespace:
    """Return the parsed arguments of a run, from a plan's file and values of flags by name; numbers become texts.

    Flags that are left out have their defaults. The weights to begin with (`--from`) are named "initial".

    >>> arguments = make_arguments("plan.json", {"data": ["data"], "out": "runs/a", "steps": 200})
    >>> arguments.steps, arguments.device, arguments.resume
    ('200', 'auto', False)
    """
    arguments = argparse.Namespace(plan=plan)
    for flag, settings in FLAGS.items():
        name = flag[2:].replace("-", "_")
        default = False if settings.get("action") == "store_true" else settings.get("default")
        value = values.get("initial" if name == "from" else name, default)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        setattr(arguments, name, str(value) if is_number else value)
    return arguments


def to_command_line(arguments: argparse.Namespace) -> list[str]:
    """Return the command line of parsed arguments."""
    command = []
    for flag, settings in FLAGS.items():
        value = getattr(arguments, flag[2:].replace("-", "_"))
        if settings.get("action") == "store_true":
            command += [flag] if value else []
        else:
            values = value if isinstance(value, list) else [] if value is None else [value]
            command += [f"{flag}={flag_value}" for flag_value in values]
    return [*command, "--", arguments.plan]


def parse_settings(arguments: argparse.Namespace) -> RunSettings:
    """Return the settings that the flags give. Raises `InputError` with all problems."""
    out = RunFolder(Path(arguments.out))
    if arguments.force and arguments.elastic:
        raise InputError("--force: found with --elastic; one goes on with a run, the other replaces it: leave one out")
    if arguments.resume:
        out.require_run()
    resume = arguments.resume or (arguments.elastic and out.contains_run)
    recipe = parse_recipe_flags(arguments, out, resume=resume)
    return RunSettings(
        plan=Path(arguments.plan), out=out, recipe=recipe, resume=resume, elastic=arguments.elastic, force=arguments.force,
        tensorboard=arguments.tensorboard, device=arguments.device, profile=_parse_profile(arguments.profile, recipe.steps),
    )  # fmt: skip


def _parse_profile(text: str | None, steps: int) -> range:
    """Return the steps to record. Raises `InputError` for steps that the run does not have.

    >>> _parse_profile("10:13", 200)
    range(10, 14)
    """
    if text is None:
        return range(0)
    first, colon, last = text.partition(":")
    profiled = (
        range(parse_whole_number(first, "--profile"), parse_whole_number(last, "--profile") + 1) if colon else range(0)
    )
    if not (profiled and profiled[0] >= 1 and profiled[-1] <= steps):
        raise InputError(
            f"--profile: found {text!r}; the first and the last of the steps to record, of 1 to {steps}, are required, such as "
            f"{min(10, steps)}:{min(13, steps)}"
        )
    return profiled


BATCH_RAMP_FLAG = "--set recipe.batch_ramp"
NOISE_SCALE_EVERY = 10  # default if batches follow the noise scale: several measurements for each decision


def parse_recipe_flags(arguments: argparse.Namespace, out: RunFolder, *, resume: bool) -> TrainingRecipe:
    """Return the recipe that the flags give; when a run goes on, its folder has the rest. Raises `InputError`."""
    flag_values, changes = run_all(
        lambda: _flag_values(arguments) | _parse_policies(arguments.policy),
        lambda: parse_overrides(arguments.set, rooms=("recipe",))["recipe"],
    )
    if "batch_ramp" in changes:
        flag_values["batch_ramp"] = parse_batch_ramp(changes.pop("batch_ramp"), BATCH_RAMP_FLAG)
    if flag_values.get("batch_schedule", "").startswith("noise") and "noise_scale_every" not in flag_values:
        flag_values["noise_scale_every"] = NOISE_SCALE_EVERY
    if resume:
        return replace(apply_changes(parse_recipe(out.read_inputs().recipe, str(out.recipe)), changes), **flag_values)
    if "steps" not in flag_values:
        raise InputError("--steps: found none; the length of the run is required, such as --steps 200")
    return apply_changes(TrainingRecipe(**flag_values), changes)


def apply_changes(recipe: TrainingRecipe, changes: Mapping[str, str]) -> TrainingRecipe:
    """Return the recipe with fields of its own and of the optimizer replaced by `--set` texts."""
    fields = optimizer_fields()
    changed: TrainingRecipe = apply_overrides(recipe, changes, "recipe", fields)
    values = {name: parse_like(text, 0.0, f"--set recipe.{name}") for name, text in changes.items() if name in fields}
    return replace(changed, optimizer={**recipe.optimizer, **values})


def _flag_values(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the recipe fields that have flags of their own."""
    parsers = {
        "data": (arguments.data, _parse_sources),
        "steps": (arguments.steps, lambda text: parse_count(text, label="--steps")),
        "learning_rate": (arguments.learning_rate, lambda text: parse_quantity(text, label="--learning-rate", unit="")),
        "schedule": (arguments.schedule, str),
        "warmup_steps": (arguments.warmup, lambda text: parse_whole_number(text, "--warmup")),
        "decay_steps": (arguments.decay, lambda text: parse_whole_number(text, "--decay")),
        "seed": (arguments.seed, lambda text: parse_whole_number(text, "--seed")),
        "to_loss": (arguments.to_loss, lambda text: parse_quantity(text, label="--to-loss", unit="")),
        "batch_schedule": (arguments.batch_schedule, _parse_batch_schedule),
        "batch_lr": (arguments.batch_lr, str),
        "clip_norm": (
            arguments.clip,
            lambda text: None if text.strip() == "none" else parse_quantity(text, label="--clip", unit=""),
        ),
        "reduction": (arguments.reduce, str),
        "initial": (getattr(arguments, "from"), lambda text: str(Path(text).resolve())),
        "noise_scale_every": (
            arguments.noise_scale_every,
            lambda text: parse_whole_number(text, "--noise-scale-every"),
        ),
        "validate_every": (arguments.validate_every, lambda text: parse_whole_number(text, "--validate-every")),
        "checkpoint_every": (arguments.checkpoint_every, lambda text: parse_whole_number(text, "--checkpoint-every")),
        "keep_checkpoints": (arguments.keep_last, lambda text: parse_count(text, label="--keep-last")),
        "keep_every": (arguments.keep_every, lambda text: parse_whole_number(text, "--keep-every")),
    }
    present = {name: (text, make) for name, (text, make) in parsers.items() if text is not None}
    parsed = run_all(*((lambda make=make, text=text: make(text)) for text, make in present.values()))
    return dict(zip(present, parsed, strict=True))


def _parse_batch_schedule(text: str) -> str:
    """Check that a schedule's text can be parsed; what it leaves open follows from the plan."""
    parse_batch_schedule(text)
    return text.strip()


def _parse_sources(texts: Sequence[str]) -> tuple[WeightedSource, ...]:
    sources = tuple(run_all(*(partial(parse_source, text) for text in texts)))
    require_distinct_sources(sources)
    return sources


def _parse_policies(texts: Sequence[str]) -> dict[str, Any]:
    """Return the action of each policy named in texts such as "loss-spike=rewind"."""
    actions = {}
    for text in texts:
        name, equals, action = text.partition("=")
        field = name.strip().replace("-", "_")
        if not equals or field not in POLICIES:
            names = ", ".join(policy.replace("_", "-") for policy in POLICIES)
            raise InputError(f"--policy: found {text!r}; NAME=ACTION is required, with one of {names}")
        actions[field] = action.strip()
    return actions


def parse_whole_number(text: str, label: str) -> int:
    """Return a whole number of at least 0. Raises `InputError` for other text."""
    if text.strip().startswith("-"):
        raise InputError(f"{label}: found {text!r}; a whole number of at least 0 is required")
    return 0 if text.strip() == "0" else parse_count(text, label=label)


def build_parser() -> Parser:
    """Return the parser of a rank: that of `shardwise train`."""
    parser = Parser(prog="python -m shardwise.train")
    parser.describe(DESCRIPTION, EXAMPLES)
    add_train_arguments(parser)
    return parser
