"""`shardwise batch`: how large a batch pays. What each of its kinds takes and does is in a module of its own."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

from shardwise.present.cli.arguments import add_output_arguments
from shardwise.present.cli.pictures import picture_name
from shardwise.present.rendering.report import Report
from shardwise.values import InputError, Parser, raise_problems

DESCRIPTION = """How large a batch pays. `noise` gives the gradient noise scale that a run measured. `sweep` trains a plan's model
at several batches to one loss. `branch` goes on from a run's checkpoint at several batches, over the same samples, and finds the
largest that loses nothing. `fit` finds the fewest steps and the fewest tokens to a loss, and between them the critical batch,
from runs at several batches: the folder of a sweep with its runs.jsonl, or a CSV file with the columns batch_tokens, steps and
seed."""
EXAMPLES = (
    "shardwise batch noise runs/a --plot noise.svg",
    "shardwise batch sweep plan.json --data data --batches 4Ki:256Ki:x2 --to-loss 4.2 --out sweep/",
    "shardwise batch fit sweep/ --plot pareto.svg",
    "shardwise batch branch runs/a --batches 64Ki:1Mi:x2 --tokens 100M --out branches/ --plot branches.svg",
    "shardwise batch fit runs.csv --json",
)
# Each has `run`, and may have `FLAGS`, which others may have too; one that draws says what as its `PICTURE`.
KINDS: Mapping[str, str] = {
    "noise": "shardwise.present.cli.batch_noise",
    "sweep": "shardwise.present.cli.batch_sweep",
    "branch": "shardwise.present.cli.batch_branch",
    "fit": "shardwise.present.cli.batch_fit",
}


def configure(parser: Parser) -> None:
    """Declare the arguments; flags stand under the names of the kinds that have them."""
    batch = parser.group("batch")
    batch.add_argument("what", choices=tuple(KINDS), metavar="WHAT", help=" or ".join(KINDS))
    batch.add_argument("source", metavar="PATH", help="; ".join(f"of {name}: {_module(name).SOURCE}" for name in KINDS))
    for flag, (kinds, settings) in _flags().items():
        parser.group(f"of {' and '.join(kinds)}").add_argument(flag, **settings)
    parser.group("output").add_argument(
        "--plot", type=picture_name, metavar="FILE", help=f"draw {'; '.join(_pictures())}"
    )
    add_output_arguments(parser)


def run(arguments: argparse.Namespace) -> str | Report:
    """What the kind answers. Raises `InputError` for flags of another kind."""
    _require_own(arguments)
    if arguments.plot and not _picture(arguments.what):
        raise InputError(f"--plot: `batch {arguments.what}` draws nothing; leave it out")
    found: str | Report = _module(arguments.what).run(arguments)
    return found


def _picture(name: str) -> str:
    return getattr(_module(name), "PICTURE", "")


def _pictures() -> Iterator[str]:
    yield from (f"of {name}: {_picture(name)}" for name in KINDS if _picture(name))


def _module(name: str) -> ModuleType:
    return import_module(KINDS[name])


def _flags() -> dict[str, tuple[list[str], Mapping[str, Any]]]:
    """Every flag, with the kinds that have it and its settings."""
    flags: dict[str, tuple[list[str], Mapping[str, Any]]] = {}
    for name in KINDS:
        for flag, settings in getattr(_module(name), "FLAGS", {}).items():
            flags.setdefault(flag, ([], settings))[0].append(name)
    return flags


def _require_own(arguments: argparse.Namespace) -> None:
    """Raise `InputError` for flags, other than by default, that the kind does not have."""
    wrong: dict[str, list[str]] = {}
    for flag, (kinds, settings) in _flags().items():
        if arguments.what not in kinds and getattr(arguments, flag[2:].replace("-", "_")) != settings.get("default"):
            wrong.setdefault(" or ".join(f"`shardwise batch {name}`" for name in kinds), []).append(flag)
    raise_problems(
        [
            f"{', '.join(flags)}: not of `batch {arguments.what}`; leave out, or {verbs} is required"
            for verbs, flags in wrong.items()
        ]
    )
