"""Values of a catalogue, each with its source: what `shardwise show --json` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from typing_extensions import TypedDict

from shardwise.values import SourcedValue

SCHEMA = "shardwise.show/1"


class ValuePayload(TypedDict):
    """A value and its source; null and "" where there is no source for it."""

    value: Any
    source: str


class EntryPayload(TypedDict):
    """An entry of a catalogue."""

    name: str
    values: dict[str, ValuePayload]


class ShowPayload(TypedDict):
    """Entries of a catalogue, each value with its source."""

    schema: Literal["shardwise.show/1"]
    kind: str
    entries: list[EntryPayload]


def catalogue_payload(kind: str, entries: Mapping[str, Sequence[SourcedValue]]) -> dict[str, Any]:
    """Entries of one kind (chips, models, ...) by name, with their values.

    >>> catalogue_payload("chips", {"h100": [("power_w", 700.0, "data sheet")]})["entries"]
    [{'name': 'h100', 'values': {'power_w': {'value': 700.0, 'source': 'data sheet'}}}]
    """
    return {
        "schema": SCHEMA,
        "kind": kind,
        "entries": [
            {"name": name, "values": {key: {"value": value, "source": source} for key, value, source in values}}
            for name, values in entries.items()
        ],
    }
