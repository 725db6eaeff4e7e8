"""TensorBoard's event files: the scalars of some tags.

Source: TensorFlow, core/util/event.proto, core/framework/summary.proto and tensor.proto, by field numbers.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Collection, Iterator
from pathlib import Path

from shardwise.errors import InputError
from shardwise.measurement.logs.points import Point
from shardwise.measurement.logs.tfrecord import HEAD, records, starts_record
from shardwise.measurement.logs.wire import fields

NAMED = "tfevents"  # in the name of each event file
WALL_TIME, STEP, SUMMARY = 1, 2, 5  # of Event
VALUE = 1  # of Summary
TAG, SIMPLE_VALUE, TENSOR = 1, 2, 8  # of Summary.Value
DTYPE, CONTENT = 1, 4  # of TensorProto
# A tensor of one element, by its type (DT_FLOAT, DT_DOUBLE): how it is packed, and the field that it stands in without CONTENT.
ELEMENT = {1: ("<f", 5), 2: ("<d", 6)}


def is_events(path: Path) -> bool:
    """Whether a file is one of events, by its first record, or of a run that has written none by its name."""
    with path.open("rb") as file:
        head = file.read(HEAD.size)
    return starts_record(head) or NAMED in path.name


def event_points(path: Path, tags: Collection[str]) -> Iterator[Point | None]:
    """What some tags have in a file, an event each; None at last where the file ends within one.

    Raises `InputError` for a file that is damaged.
    """
    said = re.compile(b"|".join(re.escape(tag.encode()) for tag in sorted(tags)))
    for record in records(path):
        if record is None:
            yield None
        elif said.search(record):
            try:
                point = _point(record, tags)
            except ValueError as error:
                raise InputError(
                    f"log: {path} has a record that is not an event: {error}; an event file is required"
                ) from None
            if point.values:
                yield point


def _point(event: bytes, tags: Collection[str]) -> Point:
    clock: float | None = None
    step = 0
    values: dict[str, float] = {}
    for number, value in fields(event):
        if number == WALL_TIME:
            clock = _unpacked("<d", value)
        elif number == STEP and isinstance(value, int):
            step = value
        elif number == SUMMARY and isinstance(value, bytes):
            values |= dict(_scalars(value, tags))
    return Point(step, values, clock)


def _scalars(summary: bytes, tags: Collection[str]) -> Iterator[tuple[str, float]]:
    """The finite ones; what is not was as good as not logged."""
    for number, message in fields(summary):
        if number != VALUE or not isinstance(message, bytes):
            continue
        found = dict(fields(message))
        tag = found.get(TAG)
        name = tag.decode("utf-8", errors="replace") if isinstance(tag, bytes) else ""
        scalar = _unpacked("<f", found.get(SIMPLE_VALUE)) if SIMPLE_VALUE in found else _element(found.get(TENSOR))
        if name in tags and scalar is not None and math.isfinite(scalar):
            yield name, scalar


def _element(tensor: int | bytes | None) -> float | None:
    """The element of a tensor that has one."""
    found = dict(fields(tensor)) if isinstance(tensor, bytes) else {}
    dtype = found.get(DTYPE)
    if not isinstance(dtype, int) or dtype not in ELEMENT:
        return None
    form, field = ELEMENT[dtype]
    return _unpacked(form, found.get(CONTENT) or found.get(field))


def _unpacked(form: str, value: int | bytes | None) -> float | None:
    if not isinstance(value, bytes) or len(value) != struct.calcsize(form):
        return None
    return float(struct.unpack(form, value)[0])
