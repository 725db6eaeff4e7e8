"""Payloads: the printed fields of a dataclass, and a JSON schema of the same shape."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

import jsonschema
import pytest
from json_schemas import closed

from shardwise.present.json_schemas import json_schema
from shardwise.values import Flat, Hidden, Key, OmitEmpty, Payload, printed, to_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """A value that is no payload."""

    axis: str
    sizes: tuple[int, ...] = (2, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate(Payload):
    """A payload within another."""

    seconds: float
    num_bytes: Annotated[float, Key("bytes")]

    @property
    @printed
    def bytes_per_s(self) -> float | None:
        """Bytes of a second."""
        return self.num_bytes / self.seconds if self.seconds else None

    @property
    def milliseconds(self) -> float:
        return self.seconds * 1e3


@dataclass(frozen=True, kw_only=True)
class TransferRecord(Payload):
    """A transfer."""

    SCHEMA = "example.transfer/1"
    source: Annotated[str, Key("from")]
    ring: Annotated[Ring, Flat]
    rate: Annotated[Rate, Flat]
    axis: str
    rates: Mapping[str, Rate]
    rings: Sequence[Ring] | None
    plan: Annotated[Any, Hidden]
    notes: Annotated[tuple[str, ...], OmitEmpty] = ()
    error: Annotated[float | None, OmitEmpty] = None

    @cached_property
    @printed
    def num_rates(self) -> int:
        return len(self.rates)


def record(**changes: Any) -> TransferRecord:
    """A transfer with some fields replaced."""
    values: dict[str, Any] = {
        "source": "rank 0", "ring": Ring(axis="tp"), "rate": Rate(seconds=2.0, num_bytes=6.0), "axis": "both",
        "rates": {"pp": Rate(seconds=0.0, num_bytes=1.0)}, "rings": [Ring(axis="dp", sizes=())], "plan": object(),
    }  # fmt: skip
    return TransferRecord(**{**values, **changes})


def test_keys_are_those_of_fields_and_printed_properties() -> None:
    assert list(to_json(record()).items()) == [
        ("schema", "example.transfer/1"), ("from", "rank 0"), ("axis", "both"), ("sizes", [2, 4]), ("seconds", 2.0),
        ("bytes", 6.0), ("bytes_per_s", 3.0), ("rates", {"pp": {"seconds": 0.0, "bytes": 1.0, "bytes_per_s": None}}),
        ("rings", [{"axis": "dp", "sizes": []}]), ("num_rates", 1),
    ]  # fmt: skip
    assert list(to_json(record(notes=("late",), error=0.0)).items())[-3:] == [
        ("notes", ["late"]), ("error", 0.0), ("num_rates", 1),
    ]  # fmt: skip


@pytest.mark.parametrize("changes", [{}, {"notes": ("late",), "error": 0.0}, {"rings": None, "rates": {}}])
def test_the_schema_has_the_shape_of_the_payload(changes: dict[str, Any]) -> None:
    schema = json_schema(TransferRecord)
    payload = json.loads(json.dumps(to_json(record(**changes))))
    jsonschema.Draft202012Validator(closed(schema)).validate(payload)
    assert [key for key in schema["properties"] if key in payload] == list(payload)
    assert set(schema["properties"]) - set(schema["required"]) == {"notes", "error"}
    assert schema["properties"]["error"]["type"] == "number"
    for key in schema["required"]:
        incomplete = {name: value for name, value in payload.items() if name != key}
        assert not jsonschema.Draft202012Validator(schema).is_valid(incomplete)
    assert schema["title"] == "example.transfer/1"
    assert schema["description"] == "A transfer.\n\nA value that is no payload.\n\nA payload within another."
    assert schema["$defs"].keys() == {"Rate", "Ring"}


def test_fields_are_attributes_of_sources() -> None:
    rate = Rate.from_attributes(Rate(seconds=2.0, num_bytes=6.0), num_bytes=8.0)
    assert (rate.seconds, rate.num_bytes) == (2.0, 8.0)
    assert Rate.from_attributes(Ring(axis="tp"), None, num_bytes=1.0).seconds is None
    with pytest.raises(AttributeError, match=r"Rate\.seconds: no source has it"):
        Rate.from_attributes(Ring(axis="tp"), num_bytes=1.0)
