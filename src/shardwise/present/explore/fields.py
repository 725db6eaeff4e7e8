"""Where the numbers of a payload are from: for each place in it the formula, its inputs, the source and the kind of number.

A view puts these beside its numbers under the key `fields`. The page shows them for the number that is asked about, with the
values that are in the same payload, so what it shows is what `--json` prints.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

EXACT = "exact: a count that follows from sizes and degrees"
MEASURED = "measured"
OWN = "the opened plan"  # the source of what it has in place of the catalogue's


class Field(NamedTuple):
    """What a number is in words and in symbols, its unit, the source of the formula, and whether it is a bound, a prediction or
    measured. `inputs` are other numbers of the formula, each at its place in the payload."""

    words: str
    formula: str
    unit: str
    source: str
    kind: str
    inputs: Mapping[str, str] = MappingProxyType({})


# By the place of a number: keys and indices from the payload's root, with dots; `*` is any one, the same in the places of inputs.
Fields = Mapping[str, Field]


def fields_payload(fields: Fields) -> dict[str, dict[str, Any]]:
    """As plain data, by place.

    >>> fields_payload({"area": Field("of a square", "side²", "m²", "Euclid", EXACT, {"side": "side"})})["area"]["inputs"]
    {'side': 'side'}
    """
    return {place: {**one._asdict(), "inputs": dict(one.inputs)} for place, one in fields.items()}
