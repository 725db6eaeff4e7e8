"""The table of published runs, or a user's file with the same columns: rows, cells, and instruments that read memory.

A blank cell is None; a cell that is not a number where one is required skips the row. An estimate is what a device must
hold, with the runtime. A counter of allocated bytes does not see the runtime, one of reserved bytes also sees what the
caching allocator keeps, and the driver sees all of a process: `instrument_reading` converts the terms of an estimate.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from typing import Any, NamedTuple

from shardwise.model.architecture import MAX_SIZE
from shardwise.values import FileMessages, InputError, get_loss_kernel, parse_csv_records, read_text
from shardwise.values.input_texts import parse_number

# Columns that a prediction may read. What was measured is not among them.
INPUT_COLUMNS = (
    "software", "task", "model", "layers", "d_model", "n_heads", "n_kv_heads", "head_dim", "d_ff", "vocab", "gated_mlp",
    "tied_embeddings",
    "n_experts", "top_k", "moe_d_ff", "n_shared_experts", "shared_expert_d_ff", "n_dense_layers", "moe_every",
    "mla_q_lora", "mla_kv_lora", "mla_qk_nope", "mla_qk_rope", "mla_v_dim", "window", "window_layers", "chip",
    "chip_mem_gb", "chips_per_node", "intra_node_link", "inter_node_link", "n_devices", "seq_len", "micro_batch",
    "global_batch", "grad_accum", "dtype", "tp", "sp", "cp", "pp", "vpp", "pp_schedule", "ep", "etp", "dp",
    "zero_stage", "fsdp", "recompute", "recompute_detail", "dist_optimizer", "offload", "overlap_flags", "flash_attn", "compile",
    "notes",
)  # fmt: skip


class SkippedRow(Exception):
    """A row that cannot be priced: the kind of reason, by which rows are counted, and the detail."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class RowCells:
    """Cells of a row that a prediction may read, by column; a missing column is blank."""

    cells: Mapping[str, str]

    def text(self, column: str) -> str:
        """Return the cell without surrounding blanks; "" if the source does not state it."""
        return self.cells.get(column, "").strip()

    def flag(self, column: str) -> bool | None:
        """Return yes as True and no as False; None for a blank. Raises `SkippedRow` for anything else."""
        text = self.text(column).lower()
        if text in ("", "yes", "no"):
            return None if not text else text == "yes"
        raise SkippedRow("no yes or no", f"{column} is {text[:40]!r}")

    def number(self, column: str) -> float | None:
        """Return a finite number of at least 0; None for a blank. Raises `SkippedRow` for anything else."""
        text = self.text(column)
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 <= value <= 1e15:
            raise SkippedRow("no number", f"{column} is {text[:40]!r}")
        return value

    def count(self, column: str) -> int | None:
        """Return a whole number from 0 to `MAX_SIZE`; None for a blank."""
        value = self.number(column)
        if value is None:
            return None
        if value != int(value) or value > MAX_SIZE:
            raise SkippedRow("no whole number", f"{column} is {self.text(column)[:40]}")
        return int(value)

    def size(self, column: str) -> int | None:
        """Return a whole number of at least 1; None for a blank."""
        value = self.count(column)
        if value == 0:
            raise SkippedRow("no whole number", f"{column} is 0")
        return value

    def require_size(self, column: str, name: str) -> int:
        """Return a size that is required. Raises `SkippedRow` for a blank: `name` is not stated."""
        value = self.size(column)
        if value is None:
            raise SkippedRow(f"{name} not stated", column)
        return value


GIB = 2.0**30
# Where the measured time is taken from: as stated, from the tokens of each device, or from those that the stated FLOP/s give.
MEASURED_COLUMNS = ("step_time_s", "tokens_per_s_per_device", "implied_tokens_per_s_per_device")


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """One published run: its identity, the cells that a prediction may read, and the measured cells ("" if blank)."""

    id: str
    family: str
    source: str
    quality: str
    dup_group: str
    inputs: tuple[tuple[str, str], ...]
    measured: Mapping[str, str]

    @cached_property
    def cells(self) -> RowCells:
        """Cells that a prediction may read."""
        return RowCells(dict(self.inputs))

    def cell(self, column: str) -> str:
        """Return a cell that a prediction may read."""
        return self.cells.cells.get(column, "")

    @property
    def step_time_s(self) -> float | None:
        """Measured seconds of a step: as stated, or tokens of the batch over the rate of all devices."""
        stated, *rates = (_parse_positive(self.measured[column]) for column in MEASURED_COLUMNS)
        if stated is not None:
            return stated
        factors = [_parse_positive(self.cell(column)) for column in ("global_batch", "seq_len", "n_devices")]
        rate = next((positive_rate for positive_rate in rates if positive_rate is not None), None)
        if rate is None or None in factors:
            return None
        batch, seq_len, devices = (factor or 1.0 for factor in factors)
        return _parse_positive(str(batch * seq_len / (rate * devices)))

    @property
    def instrument(self) -> str:
        """Note on how the memory was measured."""
        return f"{self.measured['memory_kind']} {self.measured['memory_unit']}".strip()

    @property
    def peak_memory_gb(self) -> float | None:
        """Measured memory of the fullest device in decimal gigabytes."""
        stated = _parse_positive(self.measured["peak_memory_gb"])
        in_gib = self.measured["memory_unit"].lower().startswith("gib")
        return stated * (GIB / 1e9 if in_gib else 1.0) if stated is not None else None


def unreadable_cells(rows: Iterable[RunRow]) -> tuple[tuple[str, str, str], ...]:
    """Return row, column and text of the measured cells that are filled but no numbers above 0."""
    return tuple(
        (row.id, column, row.measured[column])
        for row in rows
        for column in (*MEASURED_COLUMNS, "peak_memory_gb")
        if row.measured[column] and _parse_positive(row.measured[column]) is None
    )


def _parse_positive(text: str) -> float | None:
    try:
        value = parse_number(text)
    except ValueError:
        return None
    return value if 0 < value < math.inf else None


def published_rows() -> tuple[RunRow, ...]:
    """Return the runs that the package ships."""
    return _read_packaged("runs.csv")


def layout_rows() -> tuple[RunRow, ...]:
    """Return layouts of GPT models measured on A100s; what the source leaves open is as in Megatron-LM. Source:
    VIA-Research/vTrain, data/ground_truth_{single,multi}.csv (MIT). Assumed: 80 GB, a vocabulary of 51,200."""
    return _read_packaged("layouts.csv")


def engine_rows() -> tuple[RunRow, ...]:
    """Return runs of this package's `train` on a GPU. A batch of 65,536 tokens is assumed where only the rate was noted."""
    return _read_packaged("engine_runs.csv")


def _read_packaged(name: str) -> tuple[RunRow, ...]:
    file = resources.files("shardwise.measure.calibrate.published_runs").joinpath(name)
    return _parse_rows(file.read_text(encoding="utf-8"), name)


def read_rows(path: str, label: str = "rows") -> tuple[RunRow, ...]:
    """Return the rows of a CSV file with the columns of the published ones, in any order; other columns are ignored.
    Raises `InputError`, which names the argument that gave the file, if it cannot be read."""
    messages = FileMessages(f"{label}: ", "the path of a CSV file is required")
    return _parse_rows(read_text(path, messages, encoding="utf-8-sig"), f"{label}: {path}")


def _parse_rows(text: str, where: str) -> tuple[RunRow, ...]:
    columns, rows = parse_csv_records(text, where)
    known_columns = set(columns) & set(INPUT_COLUMNS)
    if len(known_columns) < 3:
        raise InputError(
            f"{where} has {len(known_columns)} of the columns that say what was trained; "
            f"a header such as id,{','.join(INPUT_COLUMNS[1:8])},... is required"
        )
    return tuple(build_row(number, cells) for number, (_, cells) in enumerate(rows, start=1))


def build_row(number: int, cells: Mapping[Any, object]) -> RunRow:
    """Return a row; missing cells are blank, cells beyond the header are ignored."""
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
    """Return by group of duplicates the weight of its rows: 1 over their number."""
    return {group: 1.0 / count for group, count in Counter(row.dup_group for row in rows).items()}


# Part of what tensors take that a caching allocator keeps besides, in segments that hold none. Source: PyTorch, CUDA memory
# management, says why; the part is that of torchtitan's reserved bytes (arXiv 2410.06511, tables 1 to 5) over what tensors take.
SLACK = 0.05
# A process beside its allocator: 1.6 GB of context and kernels (BigScience, chronicles-prequel.md: 1,573 MiB on an A100), and
# what NCCL takes for the rings and channels of the groups of a layout with tp, pp and dp, the rest of BigScience's readings.
PROCESS_BYTES = 7e9


class MemoryInstrument(NamedTuple):
    """Memory instrument, with what it reads besides tensors: a share of them (`slack`), and fixed bytes (None: the runtime's)."""

    name: str
    pattern: str  # of a row's note on its memory column
    slack: float
    fixed_bytes: float | None


# The first whose pattern matches. Liger's figures are ml-engineering's, of reserved bytes.
INSTRUMENTS = (
    MemoryInstrument("allocated", r"alloc", 0.0, 0.0),
    MemoryInstrument("reserved", r"reserved|liger", SLACK, 0.0),
    MemoryInstrument("nvidia-smi", r"nvidia-smi", SLACK, PROCESS_BYTES),
    MemoryInstrument("not stated", r"", 0.0, None),
)


def find_instrument(text: str) -> MemoryInstrument:
    """Return the instrument of a row, by its note on the memory column."""
    return next(instrument for instrument in INSTRUMENTS if re.search(instrument.pattern, text.lower()))


def instrument_reading(terms: Mapping[str, float], loss: str, text: str) -> float:
    """Return the bytes that a row's instrument reads for the terms of an estimate priced with a kind of loss. A note
    "with liger" says that the peak was measured with another kind of loss than the step time."""
    instrument = find_instrument(text)
    tensor_bytes = sum(value for term, value in terms.items() if term != "runtime")
    if "with liger" in text.lower():
        tensor_bytes -= terms["logits"] * (
            1 - get_loss_kernel("chunked").bytes_per_logit / get_loss_kernel(loss).bytes_per_logit
        )
    fixed_bytes = terms["runtime"] if instrument.fixed_bytes is None else instrument.fixed_bytes
    return tensor_bytes * (1 + instrument.slack) + fixed_bytes
