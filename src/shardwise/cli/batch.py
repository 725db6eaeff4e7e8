"""`shardwise batch`: how large a batch pays. What each of its kinds takes and does is in a module of its own."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from importlib import import_module
from types import ModuleType

from shardwise.cli.arguments import add_output_arguments
from shardwise.cli.pictures import picture_name
from shardwise.cli.section import Report
from shardwise.errors import InputError
from shardwise.parser import Parser

DESCRIPTION = """How large a batch pays. `noise` gives the gradient noise scale that a run measured. `sweep` trains a plan's model
at several batches to one loss. `fit` finds the fewest steps and the fewest tokens to a loss, and between them the critical batch,
from runs at several batches: the folder of a sweep with its runs.jsonl, or a CSV file with the columns batch_tokens, steps and
seed."""
EXAMPLES = (
    "shardwise batch noise runs/a --plot noise.svg",
    "shardwise batch sweep plan.json --data data --batches 4Ki:256Ki:x2 --to-loss 4.2 --out sweep/",
    "shardwise batch fit sweep/ --plot pareto.svg",
    "shardwise batch fit runs.csv --json",
)
# Each has `add_arguments` for the flags of its own, and `run`; one that draws says what as its `PICTURE`.
KINDS: Mapping[str, str] = {
    "noise": "shardwise.cli.batch_noise",
    "sweep": "shardwise.cli.batch_sweep",
    "fit": "shardwise.cli.batch_fit",
}


def configure(parser: Parser) -> None:
    """Declare the arguments; the flags of a kind stand under its name."""
    batch = parser.group("batch")
    batch.add_argument("what", choices=tuple(KINDS), metavar="WHAT", help=" or ".join(KINDS))
    batch.add_argument("source", metavar="PATH", help="; ".join(f"of {name}: {_module(name).SOURCE}" for name in KINDS))
    for name in KINDS:
        _module(name).add_arguments(parser.group(f"of {name}"))
    parser.group("output").add_argument(
        "--plot", type=picture_name, metavar="FILE", help=f"draw {'; '.join(_pictures())}"
    )
    add_output_arguments(parser)


def run(arguments: argparse.Namespace) -> str | Report:
    """What the kind answers. Raises `InputError` for flags of another kind."""
    for name in KINDS:
        given = [] if name == arguments.what else _given(arguments, name)
        if given:
            raise InputError(
                f"{', '.join(given)}: of `batch {name}`; leave out, or `shardwise batch {name}` is required"
            )
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


def _given(arguments: argparse.Namespace, name: str) -> list[str]:
    """Flags of a kind that do not have their default."""
    own = Parser(add_help=False)
    _module(name).add_arguments(own.group(name))
    return [one.option_strings[-1] for one in own._actions if getattr(arguments, one.dest) != one.default]
