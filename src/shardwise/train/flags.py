"""The flags of a run, shared by `shardwise train` and `python -m shardwise.train`, and what they stand for."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from shardwise.changes import convert, parse_changes, replaced
from shardwise.errors import InputError, collect
from shardwise.issuing import REDUCTIONS
from shardwise.measurement.folder import RunFolder
from shardwise.optimizer.table import optimizer_fields
from shardwise.parser import Parser
from shardwise.train.policy import POLICIES
from shardwise.train.recipe import SCHEDULES, Recipe, parse_recipe
from shardwise.train.sources import Source, parse_source, require_distinct, source_words
from shardwise.units import parse_count, parse_quantity

Device = Literal["auto", "cpu", "cuda"]
DEVICES: tuple[Device, ...] = ("auto", "cpu", "cuda")
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
        "--resume": {"action": "store_true", "help": "go on with the run in --out from its latest checkpoint"},
        "--from": {
            "metavar": "DIR",
            "help": "begin with the weights of a folder of Hugging Face, torchtitan or Megatron-LM (default: from the seed)",
        },
        "--force": {"action": "store_true", "help": "replace the run that is in --out"},
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
        "--schedule": {"choices": SCHEDULES, "help": "how the learning rate falls after the warm-up (default: cosine)"},
        "--warmup": {"metavar": "N", "help": "steps in which the learning rate rises (default: none)"},
        "--decay": {"metavar": "N", "help": "of wsd, the last steps, in which it falls (default: none)"},
        "--seed": {"metavar": "N", "help": "of the parameters and of the order of the data (default: 0)"},
        "--clip": {"metavar": "X", "help": "the largest norm of the gradients, or none (default: 1)"},
        "--reduce": {"choices": REDUCTIONS, "help": "when gradients that rest whole are reduced (default: bucketed)"},
        "--compile": {"action": "store_true", "help": "hand each block to torch.compile"},
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
class Settings:
    """A run as it was asked for."""

    plan: Path
    out: RunFolder
    recipe: Recipe
    resume: bool = False
    force: bool = False
    tensorboard: bool = False
    device: Device = "auto"
    profile: range = range(0)  # steps, counted from 1

    @property
    def resume_command(self) -> str:
        """What goes on with this run."""
        words = ["shardwise", "train", self.plan, *source_words(self.recipe.data), "--out", self.out.path, "--resume"]
        words += [] if self.device == "auto" else ["--device", self.device]
        return shlex.join(map(str, words))


def add_train_arguments(parser: Parser) -> None:
    """Declare the plan and the flags, and what the fields of the optimizers are."""
    parser.group("run").add_argument("plan", metavar="PLAN", help="a file that `shardwise plan --out` wrote")
    for title, flags in GROUPS.items():
        for flag, settings in flags.items():
            parser.group(title).add_argument(flag, **settings)
    fields = "\n".join(f"  {name}: {words}" for name, words in optimizer_fields().items())
    parser.add_argument_group(
        "fields of the plan's optimizer for --set recipe.NAME=VALUE, with the default of each", fields
    )


def words_of(arguments: argparse.Namespace) -> list[str]:
    """The command line that says the same."""
    words = []
    for flag, settings in FLAGS.items():
        value = getattr(arguments, flag[2:].replace("-", "_"))
        if settings.get("action") == "store_true":
            words += [flag] if value else []
        else:
            values = value if isinstance(value, list) else [] if value is None else [value]
            words += [f"{flag}={one}" for one in values]
    return [*words, "--", arguments.plan]


def settings_of(arguments: argparse.Namespace) -> Settings:
    """What the flags stand for. Raises `InputError` with all that is wrong with them."""
    out = RunFolder(Path(arguments.out))
    if arguments.resume and arguments.force:
        raise InputError("--force: found with --resume; one goes on with a run, the other replaces it: leave one out")
    if arguments.resume:
        out.require_run()
    recipe = _recipe(arguments, out)
    return Settings(
        plan=Path(arguments.plan), out=out, recipe=recipe,
        resume=arguments.resume, force=arguments.force, tensorboard=arguments.tensorboard, device=arguments.device,
        profile=_profile(arguments.profile, recipe.steps),
    )  # fmt: skip


def _profile(text: str | None, steps: int) -> range:
    """The steps that are recorded. Raises `InputError` for those that the run does not have.

    >>> _profile("10:13", 200)
    range(10, 14)
    """
    if text is None:
        return range(0)
    first, colon, last = text.partition(":")
    found = range(whole(first, "--profile"), whole(last, "--profile") + 1) if colon else range(0)
    if not (found and found[0] >= 1 and found[-1] <= steps):
        raise InputError(
            f"--profile: found {text!r}; the first and the last of the steps to record, of 1 to {steps}, are required, such as "
            f"{min(10, steps)}:{min(13, steps)}"
        )
    return found


def _recipe(arguments: argparse.Namespace, out: RunFolder) -> Recipe:
    given, changes = collect(
        lambda: _given(arguments) | _policies(arguments.policy),
        lambda: parse_changes(arguments.set, rooms=("recipe",))["recipe"],
    )
    given |= {"batch_ramp": _ramp(changes.pop("batch_ramp"))} if "batch_ramp" in changes else {}
    if arguments.resume:
        return replace(changed(parse_recipe(out.read().recipe, str(out.recipe)), changes), **given)
    if "steps" not in given:
        raise InputError("--steps: found none; the length of the run is required, such as --steps 200")
    return changed(Recipe(**given), changes)


def changed(recipe: Recipe, changes: Mapping[str, str]) -> Recipe:
    """The recipe with values of its own and of the optimizer's fields replaced by what their texts say."""
    fields = optimizer_fields()
    made: Recipe = replaced(recipe, changes, "recipe", fields)
    values = {name: convert(text, 0.0, f"--set recipe.{name}") for name, text in changes.items() if name in fields}
    return replace(made, optimizer={**recipe.optimizer, **values})


def _given(arguments: argparse.Namespace) -> dict[str, Any]:
    """The fields of the recipe that flags of their own give."""
    parsers = {
        "data": (arguments.data, _sources),
        "steps": (arguments.steps, lambda text: parse_count(text, what="--steps")),
        "learning_rate": (arguments.learning_rate, lambda text: parse_quantity(text, what="--learning-rate", unit="")),
        "schedule": (arguments.schedule, str),
        "warmup_steps": (arguments.warmup, lambda text: whole(text, "--warmup")),
        "decay_steps": (arguments.decay, lambda text: whole(text, "--decay")),
        "seed": (arguments.seed, lambda text: whole(text, "--seed")),
        "clip_norm": (
            arguments.clip,
            lambda text: None if text.strip() == "none" else parse_quantity(text, what="--clip", unit=""),
        ),
        "reduction": (arguments.reduce, str),
        "initial": (getattr(arguments, "from"), lambda text: str(Path(text).resolve())),
        "noise_scale_every": (arguments.noise_scale_every, lambda text: whole(text, "--noise-scale-every")),
        "validate_every": (arguments.validate_every, lambda text: whole(text, "--validate-every")),
        "checkpoint_every": (arguments.checkpoint_every, lambda text: whole(text, "--checkpoint-every")),
        "keep_checkpoints": (arguments.keep_last, lambda text: parse_count(text, what="--keep-last")),
        "keep_every": (arguments.keep_every, lambda text: whole(text, "--keep-every")),
        "compile": (arguments.compile or None, bool),
    }
    given = {name: (text, make) for name, (text, make) in parsers.items() if text is not None}
    made = collect(*((lambda make=make, text=text: make(text)) for text, make in given.values()))
    return dict(zip(given, made, strict=True))


def _sources(texts: Sequence[str]) -> tuple[Source, ...]:
    sources = tuple(collect(*(partial(parse_source, text) for text in texts)))
    require_distinct(sources)
    return sources


def _policies(texts: Sequence[str]) -> dict[str, Any]:
    """What each policy does: "loss-spike=rewind"."""
    found = {}
    for text in texts:
        name, equals, action = text.partition("=")
        field = name.strip().replace("-", "_")
        if not equals or field not in POLICIES:
            names = ", ".join(one.replace("_", "-") for one in POLICIES)
            raise InputError(f"--policy: found {text!r}; NAME=ACTION is required, with one of {names}")
        found[field] = action.strip()
    return found


def whole(text: str, what: str) -> int:
    """A whole number of at least 0. Raises `InputError` for other text."""
    if text.strip().startswith("-"):
        raise InputError(f"{what}: found {text!r}; a whole number of at least 0 is required")
    return 0 if text.strip() == "0" else parse_count(text, what=what)


def _ramp(text: str) -> tuple[tuple[int, int], ...]:
    """Steps and the sequences of the batch from each on: "0:64,1000:128"."""
    what = "--set recipe.batch_ramp"
    pairs: Sequence[tuple[str, str, str]] = [part.partition(":") for part in text.split(",") if part.strip()]
    if not all(colon for _, colon, _ in pairs):
        raise InputError(f"{what}: found {text!r}; STEP:SEQUENCES,... is required, such as 0:64,1000:128")
    return tuple((whole(step, what), parse_count(sequences, what=what)) for step, _, sequences in pairs)
