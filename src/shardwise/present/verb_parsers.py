"""Parsers of the command line: of all verbs, and of each verb, whose module is loaded when it is used."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from shardwise.present.verbs import GROUPS, OTHER_NAMES, VerbEntry
from shardwise.values import Parser


class RootParser(Parser):
    """Parser of all verbs; for a name that is no verb it suggests the command line that is meant."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.dest == "verb" and value in OTHER_NAMES:
            raise argparse.ArgumentError(
                action, f"found {value!r}, which is no verb; use shardwise {OTHER_NAMES[value]}"
            )
        super()._check_value(action, value)


class VerbParser(Parser):
    """Parser of a verb, whose arguments are declared when they are first used."""

    def __init__(self, *, entry: VerbEntry, **settings: Any) -> None:
        super().__init__(add_help=False, **settings)
        self.entry, self._is_loaded = entry, False

    def load_arguments(self) -> VerbParser:
        """Return the parser with all of its arguments."""
        if not self._is_loaded:
            self._is_loaded = True
            verb = self.entry.load()
            verb.declare_arguments(self)
            self.group("output").add_argument("-h", "--help", action="help", help="print this help and exit")
            self.set_defaults(run=verb.run, shows_progress=verb.shows_progress)
        return self

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        return super(VerbParser, self.load_arguments()).parse_known_args(args, namespace)

    def format_help(self) -> str:
        return super(VerbParser, self.load_arguments()).format_help()


def add_verbs(parser: Parser) -> dict[str, VerbParser]:
    """Add all verbs to a parser; return their own parsers by name."""
    verbs = parser.add_subparsers(
        dest="verb", metavar="VERB", required=True, parser_class=VerbParser, prog=parser.prog, help=argparse.SUPPRESS
    )
    return {entry.name: verbs.add_parser(entry.name, entry=entry) for group in GROUPS.values() for entry in group}


def format_verb_list() -> str:
    """Return the verbs in their groups, a line for each."""
    return "\n\n".join("\n".join(_group_lines(title, group)) for title, group in GROUPS.items())


def _group_lines(title: str, group: Sequence[VerbEntry]) -> Iterator[str]:
    yield f"{title}:"
    for entry in group:
        yield f"  {entry.name:<14}{entry.line}"
