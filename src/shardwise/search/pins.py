"""Pins and maxima as people write them: the limits of a search."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from shardwise.changes import convert
from shardwise.errors import InputError
from shardwise.planning.runnable import runnable_pins
from shardwise.search.choices import FLAGS, NUMERIC, Choices


def parse_pins(words: Iterable[str], what: str) -> dict[str, Any]:
    """The values of KEY=VALUE words by key; `what` names the argument in an error.

    An unknown key keeps its text, and `Choices.narrowed` reports it. Raises `InputError`.

    >>> parse_pins(["tp=8", "recompute=full"], "--pin")
    {'tp': 8, 'recompute': 'full'}
    """
    found: dict[str, Any] = {}
    for word in words:
        key, equals, value = (part.strip() for part in word.partition("="))
        if not (key and equals and value):
            raise InputError(f"{what}: found {word!r}; KEY=VALUE is required, such as {what} pp=4")
        if key in found:
            raise InputError(f"{what}: {key} is given twice")
        found[key] = convert(value, pinned_like(key), f"{what} {key}")
    return found


def pinned_like(name: str) -> Any:
    """A value of the kind that a pin of this name has: a count, a flag, or else a name."""
    return 1 if name in (*NUMERIC, "recompute_layers") else True if name in FLAGS else ""


def narrowed(
    pins: Mapping[str, Any], maxima: Mapping[str, Any], choices: Choices | None = None, *, runnable: bool = False,
    divisible: bool = False,
) -> Choices | None:  # fmt: skip
    """The choices (all by default) that pins and maxima leave, limited to those that the engine runs or that split the batch
    evenly; None where nothing is limited."""
    pins = runnable_pins(pins) if runnable else pins
    kept = (choices or Choices()).narrowed(pins, maxima) if pins or maxima else choices
    return replace(kept or Choices(), divisible=divisible, runnable=runnable) if divisible or runnable else kept
