"""What is shown of each type of result: the function that makes its report, and the one that makes its payload.

Entries are names of functions, so that a result of one verb does not load the reports of the others; class names are unique in
the package.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from shardwise.present.rendering.report import Report


class ResultFunctions(NamedTuple):
    """Functions "module:name" below `shardwise`: result -> report, and result -> payload of `--json`."""

    report: str
    payload: str


RESULTS: Mapping[str, ResultFunctions] = {
    "MemoryComparison": ResultFunctions("present.reports.memory:memory_report", "search.layout_memory:memory_payload"),
    "KvCacheSizes": ResultFunctions("present.reports.memory:cache_report", "book_formulas.kv_cache:cache_payload"),
    "PricedLayout": ResultFunctions(
        "present.reports.plan:priced_layout_report", "search.plan_file:priced_layout_payload"
    ),
}


def report_of(result: Any) -> Report:
    """Return the report of a verb's result."""
    report: Report = _load(_find(result).report)(result)
    return report


def payload_of(result: Any) -> Mapping[str, Any]:
    """Return what `--json` prints of a verb's result."""
    payload: Mapping[str, Any] = _load(_find(result).payload)(result)
    return payload


def _find(result: Any) -> ResultFunctions:
    return RESULTS[type(result).__name__]


def _load(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(f"shardwise.{module}"), name)
