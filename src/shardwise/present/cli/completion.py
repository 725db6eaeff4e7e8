"""`shardwise completion`: a shell completes verbs, flags, choices and the names of the catalogues.

The scripts ask this verb at each Tab, so that names are those of the installed version, also where they depend on the words
before them, and all three shells offer the same. No library is used: shtab has no fish, and writes all names into the script;
argcomplete has all three, but is loaded by every command, for the hundred lines of `candidates`.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence

from shardwise.present.cli.arguments import add_output_arguments
from shardwise.present.shell_completion import SCRIPTS
from shardwise.values import Parser

DESCRIPTION = """Print the script with which a shell completes verbs, flags, choices, and names of models, clusters, stacks,
targets and rules."""
EXAMPLES = (
    "shardwise completion bash",
    "shardwise completion zsh",
    "shardwise completion fish --json",
)
REMARK = """where it goes:
  ~/.bashrc                     source <(shardwise completion bash)
  ~/.zshrc, behind compinit     source <(shardwise completion zsh)
  ~/.config/fish/config.fish    shardwise completion fish | source"""
BREAKS = ":="  # what bash ends a word at


def configure(parser: Parser) -> None:
    """Declare the arguments."""
    shell = parser.group("shell")
    shell.add_argument("shell", choices=tuple(SCRIPTS), help="the shell")
    shell.add_argument("words", nargs="*", type=str, help=argparse.SUPPRESS)  # the command line, from the scripts alone
    add_output_arguments(parser)


def run(arguments: argparse.Namespace) -> str:
    """The script, or for a script what may stand at the end of a command line."""
    from shardwise.present.shell_completion import completion_payload

    found = _LINES[arguments.shell](arguments.words) if arguments.words else None
    payload = completion_payload(arguments.shell, found)
    if arguments.json:
        return json.dumps(payload, indent=2)
    return str(payload["script"]).rstrip() if found is None else "\n".join(found)


def bash_lines(words: Sequence[str]) -> list[str]:
    """What stands behind the last character at which bash ends a word.

    >>> bash_lines(["shardwise show clusters tpu-v5e:16x16"])
    ['16x16', '16x16*2']
    """
    from shardwise.present.shell_completion import complete

    line = words[0]
    try:
        split = shlex.split(line)[1:]
    except ValueError:  # a quotation mark that is not closed yet
        split = line.split()[1:]
    typed = "" if line[-1:].isspace() else split.pop()
    begun = max(map(typed.rfind, BREAKS)) + 1
    return [one.word[begun:] for one in complete([*split, typed])]


def zsh_lines(words: Sequence[str]) -> list[str]:
    """Words with what is said of them behind a colon, as `_describe` takes them."""
    from shardwise.present.shell_completion import complete

    return [one.word.replace(":", "\\:") + (f":{one.said}" if one.said else "") for one in complete(words)]


def fish_lines(words: Sequence[str]) -> list[str]:
    """Words with what is said of them behind a tab."""
    from shardwise.present.shell_completion import complete

    return ["\t".join(filter(None, one)) for one in complete(words)]


_LINES = {"bash": bash_lines, "zsh": zsh_lines, "fish": fish_lines}
