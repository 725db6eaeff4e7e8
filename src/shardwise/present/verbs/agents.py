"""`mcp`: the verbs as tools of an agent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from shardwise import present
from shardwise.present.verb import Argument, verb

TOOLS = ("plan", "estimate", "memory", "explain", "read", "export")


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
