"""The reference of the command line, derived from its parser: nothing of it is written by hand."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator

from shardwise.present.command_line import build_parser, verb_parsers
from shardwise.present.verbs import GROUPS

WIDTH = 100  # of a usage, in characters
HEAD = """# Command line

Made from the parsers of `shardwise` {version}. [Using the command line](conventions.md) explains what all verbs have in common;
[JSON schemas](schemas.md) have the keys of what `--json` prints.
"""


def cli_reference(version: str) -> str:
    """One page: the verbs in the order of `shardwise --help`, each with its usage, arguments and examples."""
    parts = [HEAD.format(version=version)]
    for title, group in GROUPS.items():
        rows = [f"| [`{verb.name}`](#{verb.name}) | {_cell(verb.line)} |" for verb in group]
        parts.append("\n".join([f"| {title} | |", "|---|---|", *rows]))
    parts += [_escaped(build_parser().epilog or "")]
    return "\n\n".join([*parts, *("\n\n".join(_verb(name, verb)) for name, verb in verb_parsers().items())]) + "\n"


def _verb(name: str, verb: argparse.ArgumentParser) -> Iterator[str]:
    yield f"## {name}"
    if verb.description:
        yield _escaped(verb.description)
    yield f"```text\n{_usage(verb)}\n```"
    for group in verb._action_groups:
        rows = [row for action in group._group_actions for row in _rows(action)]
        if rows:
            yield "\n".join([f"| {group.title} | |", "|---|---|", *rows])
    if verb.epilog:
        yield f"```text\n{verb.epilog}\n```"


def _usage(verb: argparse.ArgumentParser) -> str:
    formatter = argparse.HelpFormatter(verb.prog, width=WIDTH)
    formatter.add_usage(verb.usage, verb._actions, verb._mutually_exclusive_groups, prefix="")
    return formatter.format_help().rstrip()


def _rows(action: argparse.Action) -> Iterator[str]:
    """The row of an argument; none of what help leaves out."""
    if action.help == argparse.SUPPRESS or isinstance(action, argparse._HelpAction):
        return
    value = value_of(action)
    names = [f"{name} {value}".strip() for name in action.option_strings] or [value]
    text = action.help % {**vars(action), "prog": ""} if action.help else ""
    yield f"| {', '.join(f'`{_cell(name)}`' for name in names)} | {_cell(text)} |"


def value_of(action: argparse.Action) -> str:
    """What stands for an argument's value in the usage; nothing for a flag."""
    if action.nargs == 0:
        return ""
    if isinstance(action.metavar, tuple):
        return " ".join(action.metavar)
    return action.metavar or ("{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest)


def _cell(text: str | None) -> str:
    """A text as a cell of a table."""
    return _escaped(" ".join((text or "").split()))


def _escaped(text: str) -> str:
    """A text whose characters mean themselves in Markdown; words in backticks stay code."""
    return re.sub(r"[|\[\]*]", r"\\\g<0>", text).replace("<", "&lt;")
