"""What `shardwise explore --json` prints: the answer that the page draws of a state."""

from __future__ import annotations

from typing import Any, Literal

from typing_extensions import TypedDict

from shardwise.present.explore.explorer import Explorer
from shardwise.present.explore.state import write_query

SCHEMA = "shardwise.explore/1"


class ExplorePayload(TypedDict):
    schema: Literal["shardwise.explore/1"]
    view: str
    query: str
    problems: list[str]
    answer: dict[str, Any]


ExplorePayload.__doc__ = (
    "A view of a state, which `query` is the address of: why it cannot be shown, if so, and what the page draws. Where a command "
    "prints the same numbers, `answer` has that command's payload under the command's name."
)


def explore_payload(explorer: Explorer, query: str) -> dict[str, Any]:
    """The versioned payload of a state's view. Raises `ShardwiseError` for a state that cannot be."""
    state = explorer.state(query)
    answer = explorer.answer(state.view, write_query(state))
    return {
        "schema": SCHEMA, "view": state.view, "query": answer["query"], "problems": answer["problems"], "answer": answer,
    }  # fmt: skip
