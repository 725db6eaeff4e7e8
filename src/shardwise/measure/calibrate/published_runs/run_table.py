"""The table of published runs, or a user's own file with the same columns: rows, cells, and the instruments that read memory.

A blank cell is None; a cell that is not a number where one is required skips the row. An estimate is what a device must hold,
with what the runtime takes. A counter of allocated bytes does not see the runtime; one of reserved bytes sees what the caching
allocator keeps besides; the driver sees all of a process. `instrument_reading` turns the terms of an estimate into
what an instrument reads.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from shardwise.model.architecture import MAX_SIZE
from shardwise.values.errors import InputError
from shardwise.values.loss_kernels import get_loss_kernel

# Columns that a prediction may read. What was measured is not among them.
INPUT_COLUMNS = (
    "software", "task", "model", "layers", "d_model", "n_heads", "n_kv_heads", "head_dim", "d_ff", "vocab", "gated_mlp",
    "tied_embeddings",
    "n_experts", "top_k", "moe_d_ff", "n_shared_experts", "shared_expert_d_ff", "n_dense_layers", "moe_every", "mla_q_lora",
    "mla_kv_lora", "mla_qk_nope", "mla_qk_rope", "mla_v_dim", "window", "window_layers", "chip", "chip_mem_gb",
    "chips_per_node", "intra_node_link", "inter_node_link", "n_devices", "seq_len", "micro_batch", "global_batch",
    "grad_accum", "dtype", "tp", "sp", "cp", "pp", "vpp", "pp_schedule", "ep", "etp", "dp", "zero_stage", "fsdp", "recompute",
    "recompute_detail", "dist_optimizer", "offload", "overlap_flags", "flash_attn", "notes",
)  # fmt: skip


class SkippedRow(Exception):
    """A row that cannot be priced: the kind of reason, by which rows are counted, and what was found."""

    def __init__(self, kind: str, found: str = "") -> None:
        super().__init__(f"{kind}: {found}" if found else kind)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class RowCells:
    """The cells of a row that a prediction may read, by column; a column that is not there is blank."""

    cells: Mapping[str, str]

    def text(self, column: str) -> str:
        """The cell without surrounding blanks; "" where the source does not say."""
        return self.cells.get(column, "").strip()

    def flag(self, column: str) -> bool | None:
        """Yes or no; None where the source does not say. Raises `SkippedRow` for anything else."""
        found = self.text(column).lower()
        if found in ("", "yes", "no"):
            return None if not found else found == "yes"
        raise SkippedRow("no yes or no", f"{column} is {found[:40]!r}")

    def number(self, column: str) -> float | None:
        """A finite number of at least 0; None where the source does not say. Raises `SkippedRow` for anything else."""
        found = self.text(column)
        if not found:
            return None
        try:
            value = float(found)
        except ValueError:
            value = math.nan
        if not 0 <= value <= 1e15:
            raise SkippedRow("no number", f"{column} is {found[:40]!r}")
        return value

    def count(self, column: str) -> int | None:
        """A whole number of at least 0, at most `MAX_SIZE`; None where the source does not say."""
        value = self.number(column)
        if value is None:
            return None
        if value != int(value) or value > MAX_SIZE:
            raise SkippedRow("no whole number", f"{column} is {self.text(column)[:40]}")
        return int(value)

    def size(self, column: str) -> int | None:
        """A whole number of at least 1; None for a blank."""
        value = self.count(column)
        if value == 0:
            raise SkippedRow("no whole number", f"{column} is 0")
        return value

    def require_size(self, column: str, what: str) -> int:
        """A size that nothing can be said without. Raises `SkippedRow` for a blank: `what` is not stated."""
        value = self.size(column)
        if value is None:
            raise SkippedRow(f"{what} not stated", column)
        return value


GIB = 2.0**30
# Where the measured time is taken from: as stated, from the tokens of each device, or from those that the stated FLOP/s give.
MEASURED_COLUMNS = ("step_time_s", "tokens_per_s_per_device", "implied_tokens_per_s_per_device")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
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
        stated, *rates = (_parse_positive(self.measured[column]) for column in MEASURED_COLUMNS)
        if stated is not None:
            return stated
        factors = [_parse_positive(self.cell(column)) for column in ("global_batch", "seq_len", "n_devices")]
        rate = next((found for found in rates if found is not None), None)
        if rate is None or None in factors:
            return None
        batch, seq_len, devices = (factor or 1.0 for factor in factors)
        return _parse_positive(str(batch * seq_len / (rate * devices)))

    @property
    def instrument(self) -> str:
        """The row's note about how its memory was measured."""
        return f"{self.measured['memory_kind']} {self.measured['memory_unit']}".strip()

    @property
    def peak_memory_gb(self) -> float | None:
        """Measured memory of the fullest device in decimal gigabytes."""
        stated = _parse_positive(self.measured["peak_memory_gb"])
        gib = self.measured["memory_unit"].lower().startswith("gib")
        return stated * (GIB / 1e9 if gib else 1.0) if stated is not None else None


def unreadable_cells(rows: Iterable[RunRow]) -> tuple[tuple[str, str, str], ...]:
    """Measured cells that are filled but no numbers above 0: the row, the column, what was found."""
    return tuple(
        (row.id, column, row.measured[column])
        for row in rows
        for column in (*MEASURED_COLUMNS, "peak_memory_gb")
        if row.measured[column] and _parse_positive(row.measured[column]) is None
    )


def _parse_positive(text: str) -> float | None:
    """A number above 0; None for anything else."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value < math.inf else None


def published_rows() -> tuple[RunRow, ...]:
    """The runs that come with the package."""
    return _read_packaged("runs.csv")


def layout_rows() -> tuple[RunRow, ...]:
    """Layouts of GPT models measured beside each other on A100s, with what the source leaves open as Megatron-LM has it.

    Source: VIA-Research/vTrain, data/ground_truth_{single,multi}.csv (MIT). Assumed: 80 GB, a vocabulary of 51,200.
    """
    return _read_packaged("layouts.csv")


def _read_packaged(name: str) -> tuple[RunRow, ...]:
    file = resources.files("shardwise.measure.calibrate.published_runs").joinpath(name)
    return _parse_rows(file.read_text(encoding="utf-8"), name)


def read_rows(path: str, flag: str = "--rows") -> tuple[RunRow, ...]:
    """The rows of a CSV file with the columns of the published ones, in any order; others are set aside.

    Raises `InputError`, which names the flag that gave the file, when it cannot be read as such.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(f"{flag}: cannot read {path}: {error.strerror}; the path of a CSV file is required") from None
    except ValueError:
        raise InputError(f"{flag}: {path} is not text; a CSV file in UTF-8 is required") from None
    return _parse_rows(text, f"{flag}: {path}")


def _parse_rows(text: str, where: str) -> tuple[RunRow, ...]:
    try:
        reader = csv.DictReader(io.StringIO(text, newline=""))
        known = set(reader.fieldnames or ()) & set(INPUT_COLUMNS)
        if len(known) < 3:
            raise InputError(
                f"{where} has {len(known)} of the columns that say what was trained; "
                f"a header such as id,{','.join(INPUT_COLUMNS[1:8])},... is required"
            )
        return tuple(build_row(number, cells) for number, cells in enumerate(reader, start=1))
    except csv.Error as error:
        raise InputError(f"{where} is not CSV: {error}") from None


def build_row(number: int, cells: Mapping[Any, object]) -> RunRow:
    """A row; cells that are missing are blank, cells beyond the header are set aside."""
    text = {column: value.strip() for column, value in cells.items() if column is not None and isinstance(value, str)}
    name = text.get("id") or f"row {number}"
    inputs = tuple((column, text[column]) for column in INPUT_COLUMNS if text.get(column))
    return RunRow(
        id=name, family=text.get("family", ""),  source=text.get("source", ""),
        quality=text.get("quality", ""), dup_group=text.get("dup_group") or repr(inputs),
        inputs=inputs,
        measured={column: text.get(column, "") for column in (*MEASURED_COLUMNS, "peak_memory_gb", "memory_unit", "memory_kind")},
    )  # fmt: skip


def duplicate_weights(rows: Iterable[RunRow]) -> dict[str, float]:
    """What a row of each group of duplicates counts: 1 over the rows of the group."""
    return {group: 1.0 / count for group, count in Counter(row.dup_group for row in rows).items()}


# Part of what tensors take that a caching allocator keeps besides, in segments that hold none. Source: PyTorch, CUDA memory
# management, says why; the part is that of torchtitan's reserved bytes (arXiv 2410.06511, tables 1 to 5) over what tensors take.
SLACK = 0.05
# A process beside its allocator: 1.6 GB of context and kernels (BigScience, chronicles-prequel.md: 1,573 MiB on an A100), and
# what NCCL takes for the rings and channels of the groups of a layout with tp, pp and dp, the rest of BigScience's readings.
PROCESS_BYTES = 7e9


class MemoryInstrument(NamedTuple):
    """What is read beside tensors: a part of them, and bytes in place of the runtime's (None: these)."""

    name: str
    words: str  # in a row's note about its memory column
    slack: float
    fixed_bytes: float | None


# In the order in which they are looked for. Liger's figures are ml-engineering's, of reserved bytes.
INSTRUMENTS = (
    MemoryInstrument("allocated", r"alloc", 0.0, 0.0),
    MemoryInstrument("reserved", r"reserved|liger", SLACK, 0.0),
    MemoryInstrument("nvidia-smi", r"nvidia-smi", SLACK, PROCESS_BYTES),
    MemoryInstrument("not stated", r"", 0.0, None),
)


def find_instrument(text: str) -> MemoryInstrument:
    """The instrument of a row, by its note about its memory column."""
    return next(one for one in INSTRUMENTS if re.search(one.words, text.lower()))


def instrument_reading(terms: Mapping[str, float], loss: str, text: str) -> float:
    """Bytes that a row's instrument reads where an estimate has these terms, priced with a kind of loss.

    A peak that was taken with another kind of loss than the step time says so.
    """
    found = find_instrument(text)
    held = sum(value for term, value in terms.items() if term != "runtime")
    if "with liger" in text.lower():
        held -= terms["logits"] * (
            1 - get_loss_kernel("chunked").bytes_per_logit / get_loss_kernel(loss).bytes_per_logit
        )
    fixed = terms["runtime"] if found.fixed_bytes is None else found.fixed_bytes
    return held * (1 + found.slack) + fixed
