"""Session of `shardwise explore`: the opened plan and the page's address, served until Ctrl-C."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.present.explorer.background_search import Searches
from shardwise.present.explorer.explorer import Explorer, explore_payload
from shardwise.present.explorer.opened_plan import NameResolver, resolver_of_plan
from shardwise.present.explorer.state import parse_query
from shardwise.present.rendering.report import Report, Section
from shardwise.search import Plan
from shardwise.values import InputError, parse_count, write_text
from shardwise.values.errors import argument_label

MAX_PORT = 65535


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplorerSession:
    """The plan that is opened, if any, the state of the page's address, and where the page is served.

    A `port` of 0 is any that is free.
    """

    resolver: NameResolver = field(default_factory=NameResolver)
    query: str = ""
    host: str = "127.0.0.1"
    port: int = 0
    opens_browser: bool = True


def open_session(
    plan: Plan | None,
    run_folder: str | os.PathLike[str] | None,
    query: str,
    *,
    host: str,
    port: int | str,
    opens_browser: bool,
) -> ExplorerSession:
    """Return the session of a plan and a run of it. Raises `InputError` for a run without a plan, a wrong query, a wrong port."""
    if plan is None and run_folder is not None:
        raise InputError(
            f"{argument_label('run_folder')}: found without a plan; the plan that was run is required, such as explore plan.json "
            "--run runs/a"
        )
    resolver = (
        NameResolver() if plan is None else resolver_of_plan(plan, None if run_folder is None else Path(run_folder))
    )
    query = _query_of(query)
    if query:
        parse_query(query)  # report its problems here, not on the page
    number = parse_count(port, label=argument_label("port"), minimum=0)
    if number > MAX_PORT:
        raise InputError(f"{argument_label('port')}: found {number}; 0 to {MAX_PORT} is required")
    return ExplorerSession(resolver=resolver, query=query, host=host, port=number, opens_browser=opens_browser)


def _query_of(text: str) -> str:
    """Return the query of an address of the page: a text that has none is the query itself."""
    query = text.partition("?")[2] if "?" in text else text
    return "&".join(pair for pair in query.partition("#")[0].split("&") if pair.partition("=")[0] != "token")


def session_payload(session: ExplorerSession) -> dict[str, Any]:
    """Return what `shardwise explore --json` prints: what the page would get."""
    return explore_payload(Explorer(session.resolver), session.query)


def serve_session(session: ExplorerSession) -> None:
    """Print the address of the page, open it in a browser, and answer its questions until Ctrl-C."""
    from shardwise.present.explorer.answer_workers import AnswerWorkers
    from shardwise.present.explorer.web_server import bind_address, serve  # of an extra, which `--json` does without

    address = bind_address(session.host, session.port)
    query = ("&" if address.token else "?") + session.query if session.query else ""
    url = address.url + query
    write_text(f"{url}\nthe explorer is at this address; stop it with Ctrl-C\n", sys.stdout)
    if session.opens_browser:
        import webbrowser  # loaded for a browser alone

        webbrowser.open(url)
    searches = Searches()
    workers = AnswerWorkers(session.resolver, searches)
    try:
        serve(workers, address, session.query)
    finally:
        workers.close()
        searches.close()


def session_report(session: ExplorerSession) -> Report:
    """Return the report after Ctrl-C."""
    return [Section(["stopped"])]
