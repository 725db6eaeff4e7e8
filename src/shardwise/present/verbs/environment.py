"""Verbs around the others: `doctor`, for this machine; `completion`, for shells; `mcp`, for agents."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Annotated

from shardwise import present
from shardwise.present.shell_completion import SCRIPTS, ShellCompletion, complete_for_shell
from shardwise.present.verb import Argument, verb

TOOLS = ("plan", "estimate", "memory", "explain", "read", "export")


@verb(
    description="Say what is installed and which extra of shardwise brings what is missing, what this machine is (processor, "
    "memory, disk, GPUs, communication backends), and for every verb whether it works here, or the command that makes it work.",
    examples=("shardwise doctor", "shardwise doctor --json"),
    group_order=("output",),
)
def doctor() -> present.Diagnosis:
    """Return the packages that are installed, what this machine is, and which verbs work here.

    >>> import shardwise as sw
    >>> [verb.works for verb in sw.doctor().verbs if verb.name == "plan"]
    [True]
    """
    return present.diagnose()


@verb(
    description="Print the script with which a shell completes verbs, flags, choices, and names of models, clusters, stacks, "
    "targets and rules.",
    examples=(
        "shardwise completion bash",
        "shardwise completion zsh",
        "shardwise completion fish --json",
    ),
    remark="""where it goes:
  ~/.bashrc                     source <(shardwise completion bash)
  ~/.zshrc, behind compinit     source <(shardwise completion zsh)
  ~/.config/fish/config.fish    shardwise completion fish | source""",
    group_order=("shell", "output"),
)
def completion(
    shell: Annotated[str, Argument(group="shell", choices=tuple(SCRIPTS), help="the shell")],
    command_words: Annotated[
        Sequence[str], Argument(group="shell", variadic=True, optional=True, parse=str, help=argparse.SUPPRESS)
    ] = (),
) -> ShellCompletion:
    """Return the script of a shell, and for the words of a command line, which only the scripts give, what may end it."""
    return complete_for_shell(shell, command_words)


@verb(
    description="Serve verbs to agents as tools of the Model Context Protocol, on standard input and output. A client starts "
    "this command itself; on a terminal it shows nothing and waits until its input is closed.",
    examples=("shardwise mcp", "shardwise mcp --tool plan --tool explain"),
    requires=("mcp",),
    group_order=("tools", "output"),
    shows_progress=False,
)  # fmt: skip
def mcp(
    tools: Annotated[
        Sequence[str],
        Argument(
            flag="--tool", group="tools", metavar="VERB", choices=TOOLS, repeat=True,
            help=f"offer only this verb, one of {', '.join(TOOLS)}; may be repeated (default: all)",
        ),
    ] = TOOLS,
) -> None:  # fmt: skip
    """Serve verbs as tools of the Model Context Protocol until the client closes standard input."""
    present.serve_stdio(tools)
