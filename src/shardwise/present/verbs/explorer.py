"""`explore`: a page on which degrees are dragged, and a plan's memory, time and timeline follow."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

from shardwise.present import explorer
from shardwise.present.arguments import PLAN_HELP, read_plan
from shardwise.present.verb import Argument, Mode, verb
from shardwise.values import Progress, ignore_progress

if TYPE_CHECKING:
    from shardwise.search import Plan

DEFAULT_PORT = 8631


def static_build(
    static: Annotated[
        str | os.PathLike[str],
        Argument(
            flag="--static", group="server", metavar="DIR",
            help="write a build of the page with answers to known examples into a folder, for any web host or a disk; serve "
            "nothing",
        ),
    ],
    progress: Progress = ignore_progress,
) -> explorer.StaticBuild:  # fmt: skip
    """Write a build of the page that needs no server; return its files. Raises `InputError` if the folder is not writable."""
    return explorer.StaticBuild(files=tuple(explorer.write_static_build(static, progress)))


@verb(
    modes=(Mode(function=static_build, applies=lambda arguments: "static" in arguments),),
    description="Serve a page on this machine: drag a degree, and see what it does to memory, time, bubble, timeline and "
    "roofline, compared with the best layout and the Pareto front. Opens a plan, or llama-3-8b on h100:64. With --run, "
    "measurements of a run are shown next to the predictions. Its address is the whole state of the page. Stop it with Ctrl-C.",
    examples=(
        "shardwise explore",
        "shardwise explore plan.json --run runs/a",
        'shardwise explore --at "model=llama-3-70b&cluster=h100:512&batch_tokens=4Mi&seq_len=8192&layout=tp=8+pp=4+fsdp=16"',
        "shardwise explore plan.json --json",
        "shardwise explore --static site/",
    ),
    group_order=("plan", "server", "output"),
    requires=("starlette", "uvicorn"),
    serve=lambda session: explorer.serve_session(session),  # the server loads for the page alone
    shows_progress=False,
)
def explore(
    plan: Annotated[
        str | os.PathLike[str] | Plan | None, Argument(group="plan", optional=True, metavar="PLAN", help=PLAN_HELP)
    ] = None,
    run_folder: Annotated[
        str | os.PathLike[str] | None,
        Argument(
            flag="--run", group="plan", metavar="FOLDER",
            help="the folder of a run of the plan, which `shardwise train --out` named",
        ),
    ] = None,
    query: Annotated[
        str | None,
        Argument(
            flag="--at", group="plan", metavar="QUERY",
            help="the state to open: the part of the page's address behind the question mark",
        ),
    ] = None,
    port: Annotated[
        int | str,
        Argument(
            flag="--port", group="server", metavar="N",
            help=f"where to listen (default: {DEFAULT_PORT}; 0: any that is free)",
        ),
    ] = DEFAULT_PORT,
    host: Annotated[
        str,
        Argument(
            flag="--host", group="server", metavar="ADDRESS",
            help="the address to listen on (default: this machine alone; on another one the page asks for a token)",
        ),
    ] = "127.0.0.1",
    no_browser: Annotated[
        bool, Argument(flag="--no-browser", group="server", help="print the address and open no browser")
    ] = False,
) -> explorer.ExplorerSession:  # fmt: skip
    """Return what the page opens: a plan with a run of it, the state of the page's address, and where it is served.

    Raises `InputError` for files that cannot be read, a run without its plan, and a query or a port that is none.
    """
    loaded = None if plan is None else read_plan(plan)
    return explorer.open_session(loaded, run_folder, query or "", host=host, port=port, opens_browser=not no_browser)
