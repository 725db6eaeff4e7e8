"""`shardwise explore`: a page on which degrees are dragged, and a plan's memory, time and timeline follow."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from shardwise.present.cli.arguments import PLAN, add_output_arguments
from shardwise.present.rendering.report import Report, Section
from shardwise.values import InputError, Parser, write_text

if TYPE_CHECKING:
    from shardwise.present.explorer.opened_plan import Known

PORT = 8631
MOST_PORT = 65535
DESCRIPTION = """Serve a page on this machine: drag a degree, and see what it does to memory, time, bubble, timeline and roofline,
compared with the best layout and the Pareto front. Opens a plan, or llama-3-8b on h100:64. With --run, measurements of a run
are shown next to the predictions. Its address is the whole state of the page. Stop it with Ctrl-C."""
EXAMPLES = (
    "shardwise explore",
    "shardwise explore plan.json --run runs/a",
    'shardwise explore --at "model=llama-3-70b&cluster=h100:512&batch_tokens=4Mi&seq_len=8192&layout=tp=8+pp=4+fsdp=16"',
    "shardwise explore plan.json --json",
)


def configure(parser: Parser) -> None:
    """Declare the arguments."""
    plan, server = parser.groups("plan", "server")
    plan.add_argument("plan", nargs="?", metavar="PLAN", help=PLAN)
    plan.add_argument(
        "--run",
        dest="of_run",
        metavar="FOLDER",
        help="the folder of a run of the plan, which `shardwise train --out` named",
    )
    plan.add_argument(
        "--at", metavar="QUERY", help="the state to open: the part of the page's address behind the question mark"
    )
    server.add_argument(
        "--port", default=str(PORT), metavar="N", help=f"where to listen (default: {PORT}; 0: any that is free)"
    )
    server.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS",
        help="the address to listen on (default: this machine alone; on another one the page asks for a token)",
    )  # fmt: skip
    server.add_argument("--no-browser", action="store_true", help="print the address and open no browser")
    add_output_arguments(parser)


def run(arguments: argparse.Namespace) -> str | Report:
    """The payload as JSON; otherwise serve until Ctrl-C, which is how the verb ends."""
    from shardwise.present.explorer.explorer import Explorer, explore_payload
    from shardwise.present.explorer.state import parse_query

    known, query = _known(arguments), arguments.at or ""
    if arguments.json:
        return json.dumps(explore_payload(Explorer(known), query), indent=2)
    if query:
        parse_query(query)  # what is wrong with it is said here, not on the page
    return _serve(arguments, known, query)


def _known(arguments: argparse.Namespace) -> Known:
    from pathlib import Path

    from shardwise.present.explorer.opened_plan import Known, known_of
    from shardwise.search import load_plan

    if arguments.plan is None:
        if arguments.of_run is not None:
            raise InputError(
                "--run: found without a plan; the plan that was run is required, such as explore plan.json --run runs/a"
            )
        return Known()
    return known_of(load_plan(arguments.plan), None if arguments.of_run is None else Path(arguments.of_run))


def _serve(arguments: argparse.Namespace, known: Known, query: str) -> Report:
    from shardwise.values import parse_count

    try:
        from shardwise.present.explorer.web_server import bound, serve
    except ModuleNotFoundError as error:
        raise InputError(f"explore: {error.name} is not installed; pip install 'shardwise[explore]'") from None
    from shardwise.present.explorer.background_search import Searches
    from shardwise.present.explorer.explorer import Explorer

    port = parse_count(arguments.port, label="--port", minimum=0)
    if port > MOST_PORT:
        raise InputError(f"--port: found {port}; 0 to {MOST_PORT} is required")
    address = bound(arguments.host, port)
    url = address.url + (("&" if address.token else "?") + query if query else "")
    write_text(f"{url}\nthe explorer is at this address; stop it with Ctrl-C\n", sys.stdout)
    if not arguments.no_browser:
        import webbrowser

        webbrowser.open(url)
    searches = Searches()
    try:
        serve(Explorer(known, searches), address)
    finally:
        searches.close()
    return [Section(["stopped"])]
