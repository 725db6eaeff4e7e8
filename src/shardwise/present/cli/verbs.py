"""The verbs by what they are for, each with its line in the help; a verb's module is loaded when the verb is used."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from shardwise.values import Parser


class Verb(NamedTuple):
    """A verb, and what it does."""

    name: str
    line: str


GROUPS: Mapping[str, tuple[Verb, ...]] = {
    "plan a run": (
        Verb("plan", "search all layouts and choose the fastest that fits"),
        Verb("estimate", "price one layout"),
        Verb("memory", "what fills the devices under given layouts"),
        Verb("kv-cache", "size a model's key-value cache"),
    ),
    "understand": (
        Verb("explain", "why a plan is what it is, and how another layout compares"),
        Verb("instructions", "what each device of a plan does, in order"),
        Verb("simulate", "play a plan's step on streams of compute and traffic"),
        Verb("schedule", "play, check and draw a schedule of pipeline stages"),
        Verb("roofline", "what bounds a kernel or a model's block on one chip"),
        Verb("rule", "work out one of the books' rules, with its formula and source"),
        Verb("precision", "floating-point formats: bits, range, resolution"),
        Verb("explore", "drag a layout's degrees on a page, and see what changes"),
    ),
    "notation and network": (
        Verb("matmul", "price a sharded product and find the cheapest way to it"),
        Verb("reshard", "the cheapest way from one sharding to another"),
        Verb("collective", "time one collective on a chip's network"),
    ),
    "run and measure": (
        Verb("tokenize", "write text as token shards to train on"),
        Verb("verify", "check that a plan's layout trains as one process does"),
        Verb("rehearse", "run one rank of a plan without the others"),
        Verb("train", "train the model of a plan as it says, and measure it"),
        Verb("batch", "how large a batch pays, from runs at several batches"),
        Verb("reconcile", "compare a run with its plan, term by term"),
        Verb("trace", "compare a measured step with the plan, find bottlenecks"),
        Verb("mfu", "MFU of a measured run, and where the rest of its time goes"),
        Verb("bench", "measure what this machine reaches"),
        Verb("calibrate", "fit predictions to runs and micro-benchmarks of your own"),
        Verb("validate", "compare predictions with published training runs"),
    ),
    "hand over": (
        Verb("export", "write a plan as the launch of a framework"),
        Verb("read", "what a framework's launch costs, and what would be faster"),
        Verb("convert", "a model's weights as another framework reads them"),
    ),
    "catalogue": (
        Verb("show", "models, chips, stacks, rules, ...: every value and its source"),
        Verb("figures", "draw the figures of the books"),
        Verb("completion", "let bash, zsh or fish complete this command line"),
    ),
}  # fmt: skip


# What one may look for under a name that is no verb, and the command line that does it.
MEANT: Mapping[str, str] = {
    **dict.fromkeys(("search", "optimize", "optimise", "tune", "shard"), "plan MODEL CLUSTER"),
    "sweep": "plan MODEL CLUSTER --sweep NAME=VALUES",
    "compare": "plan MODEL CLUSTER CLUSTER, or of layouts explain PLAN --against LAYOUT",
    **dict.fromkeys(("cost", "price", "predict"), "estimate MODEL CLUSTER --layout LAYOUT"),
    **dict.fromkeys(("benchmark", "measure"), "bench machine"),
    **dict.fromkeys(("profile", "analyze", "analyse"), "trace"),
    **dict.fromkeys(("import", "parse"), "read FILE"),
    **dict.fromkeys(("run", "launch"), "train PLAN"),
    "fit": "calibrate",
    **dict.fromkeys(("list", "ls"), "show"),
}


class CommandLine(Parser):
    """The parser of all verbs, which says what one of its verbs does that is looked for under another name."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.dest == "verb" and value in MEANT:
            raise argparse.ArgumentError(action, f"found {value!r}, which is no verb; use shardwise {MEANT[value]}")
        super()._check_value(action, value)


class VerbParser(Parser):
    """The parser of a verb, whose module declares the arguments when they are first asked for.

    The module has a `DESCRIPTION`, `EXAMPLES`, if there is more to say behind them a `REMARK`, `configure` and `run`.
    """

    def __init__(self, *, module: str, **settings: Any) -> None:
        super().__init__(add_help=False, **settings)
        self.module, self._is_declared = module, False

    def declared(self) -> VerbParser:
        """The parser with all of its arguments."""
        if not self._is_declared:
            self._is_declared = True
            verb = import_module(self.module)
            self.describe(verb.DESCRIPTION, verb.EXAMPLES, getattr(verb, "REMARK", ""))
            verb.configure(self)
            self.group("output").add_argument("-h", "--help", action="help", help="print this help and exit")
            self.set_defaults(run=verb.run)
        return self

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        return super(VerbParser, self.declared()).parse_known_args(args, namespace)

    def format_help(self) -> str:
        return super(VerbParser, self.declared()).format_help()


def add_verbs(parser: Parser) -> dict[str, VerbParser]:
    """Give a parser all verbs; their own parsers by name."""
    verbs = parser.add_subparsers(
        dest="verb", metavar="VERB", required=True, parser_class=VerbParser, prog=parser.prog, help=argparse.SUPPRESS
    )
    names = [verb.name for group in GROUPS.values() for verb in group]
    return {name: verbs.add_parser(name, module=f"shardwise.present.cli.{name.replace('-', '_')}") for name in names}


def listed() -> str:
    """The verbs in their groups, a line for each."""
    return "\n\n".join("\n".join(_lines(title, group)) for title, group in GROUPS.items())


def _lines(title: str, group: Sequence[Verb]) -> Iterator[str]:
    yield f"{title}:"
    for verb in group:
        yield f"  {verb.name:<14}{verb.line}"
