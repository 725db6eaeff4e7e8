"""The published rows, or a user's own file with the same columns."""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from shardwise.calibrate.published_runs.facts import INPUTS
from shardwise.errors import InputError

GIB = 2.0**30
# Where the measured time is taken from: as stated, from the tokens of each device, or from those that the stated FLOP/s give.
MEASURED = ("step_time_s", "tokens_per_s_per_device", "implied_tokens_per_s_per_device")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One published run: its place, what a prediction may read of it, and what was measured (None where it was not)."""

    id: str
    family: str
    source: str
    quality: str
    dup_group: str
    inputs: tuple[tuple[str, str], ...]
    measured: Mapping[str, str]

    def cell(self, column: str) -> str:
        """A cell that a prediction may read too."""
        return dict(self.inputs).get(column, "")

    @property
    def step_time_s(self) -> float | None:
        """Measured seconds of a step: as stated, or tokens of the batch over the rate of all devices."""
        stated, *rates = (_positive(self.measured[column]) for column in MEASURED)
        if stated is not None:
            return stated
        factors = [_positive(self.cell(column)) for column in ("global_batch", "seq_len", "n_devices")]
        rate = next((found for found in rates if found is not None), None)
        if rate is None or None in factors:
            return None
        batch, seq_len, devices = (factor or 1.0 for factor in factors)
        return _positive(str(batch * seq_len / (rate * devices)))

    @property
    def instrument(self) -> str:
        """The row's note about how its memory was measured."""
        return f"{self.measured['memory_kind']} {self.measured['memory_unit']}".strip()

    @property
    def peak_memory_gb(self) -> float | None:
        """Measured memory of the fullest device in decimal gigabytes."""
        stated = _positive(self.measured["peak_memory_gb"])
        gib = self.measured["memory_unit"].lower().startswith("gib")
        return stated * (GIB / 1e9 if gib else 1.0) if stated is not None else None


def unreadable(rows: Iterable[Row]) -> tuple[tuple[str, str, str], ...]:
    """Measured cells that are filled but no numbers above 0: the row, the column, what was found."""
    return tuple(
        (row.id, column, row.measured[column])
        for row in rows
        for column in (*MEASURED, "peak_memory_gb")
        if row.measured[column] and _positive(row.measured[column]) is None
    )


def _positive(text: str) -> float | None:
    """A number above 0; None for anything else."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value < math.inf else None


def published_rows() -> tuple[Row, ...]:
    """The runs that come with the package."""
    return _packaged("runs.csv")


def layout_rows() -> tuple[Row, ...]:
    """Layouts of GPT models measured beside each other on A100s, with what the source leaves open as Megatron-LM has it.

    Source: VIA-Research/vTrain, data/ground_truth_{single,multi}.csv (MIT). Assumed: 80 GB, a vocabulary of 51,200.
    """
    return _packaged("layouts.csv")


def _packaged(name: str) -> tuple[Row, ...]:
    file = resources.files("shardwise.calibrate.published_runs").joinpath(name)
    return _rows(file.read_text(encoding="utf-8"), name)


def read_rows(path: str, flag: str = "--rows") -> tuple[Row, ...]:
    """The rows of a CSV file with the columns of the published ones, in any order; others are set aside.

    Raises `InputError`, which names the flag that gave the file, when it cannot be read as such.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(f"{flag}: cannot read {path}: {error.strerror}; the path of a CSV file is required") from None
    except ValueError:
        raise InputError(f"{flag}: {path} is not text; a CSV file in UTF-8 is required") from None
    return _rows(text, f"{flag}: {path}")


def _rows(text: str, where: str) -> tuple[Row, ...]:
    try:
        reader = csv.DictReader(io.StringIO(text, newline=""))
        known = set(reader.fieldnames or ()) & set(INPUTS)
        if len(known) < 3:
            raise InputError(
                f"{where} has {len(known)} of the columns that say what was trained; "
                f"a header such as id,{','.join(INPUTS[1:8])},... is required"
            )
        return tuple(row_from(number, cells) for number, cells in enumerate(reader, start=1))
    except csv.Error as error:
        raise InputError(f"{where} is not CSV: {error}") from None


def row_from(number: int, cells: Mapping[Any, object]) -> Row:
    """A row; cells that are missing are blank, cells beyond the header are set aside."""
    text = {column: value.strip() for column, value in cells.items() if column is not None and isinstance(value, str)}
    name = text.get("id") or f"row {number}"
    inputs = tuple((column, text[column]) for column in INPUTS if text.get(column))
    return Row(
        id=name, family=text.get("family", ""),  source=text.get("source", ""),
        quality=text.get("quality", ""), dup_group=text.get("dup_group") or repr(inputs),
        inputs=inputs,
        measured={column: text.get(column, "") for column in (*MEASURED, "peak_memory_gb", "memory_unit", "memory_kind")},
    )  # fmt: skip


def weights(rows: Iterable[Row]) -> dict[str, float]:
    """What a row of each group of duplicates counts: 1 over the rows of the group."""
    return {group: 1.0 / count for group, count in Counter(row.dup_group for row in rows).items()}
