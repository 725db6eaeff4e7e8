"""The facts of a row, cell by cell: numbers, names, yes and no. A blank is None; a cell that is not a number skips the row."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.model.architecture import MOST

# Columns that a prediction may read. What was measured is not among them.
INPUTS = (
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
class Facts:
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
        """A whole number of at least 0, at most `MOST`; None where the source does not say."""
        value = self.number(column)
        if value is None:
            return None
        if value != int(value) or value > MOST:
            raise SkippedRow("no whole number", f"{column} is {self.text(column)[:40]}")
        return int(value)

    def size(self, column: str) -> int | None:
        """A whole number of at least 1; None for a blank."""
        value = self.count(column)
        if value == 0:
            raise SkippedRow("no whole number", f"{column} is 0")
        return value

    def needed(self, column: str, what: str) -> int:
        """A size that nothing can be said without. Raises `SkippedRow` for a blank: `what` is not stated."""
        value = self.size(column)
        if value is None:
            raise SkippedRow(f"{what} not stated", column)
        return value
