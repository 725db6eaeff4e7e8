"""A user's own run as a row of the published ones: its cells, and what of the run no cell says."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path
from typing import Any

from shardwise.calibrate.published_runs.case import Case, case_of
from shardwise.calibrate.published_runs.facts import INPUTS, Facts, SkippedRow
from shardwise.calibrate.published_runs.rows import MEASURED, Row, row_from
from shardwise.calibrate.published_runs.training import loss_of, recipe_of
from shardwise.cluster.cluster import Cluster
from shardwise.errors import InputError
from shardwise.job import Job, precision_named
from shardwise.layout.layout import Layout, offloaded_by
from shardwise.layout.stages import held_layers
from shardwise.model.architecture import GATED, Architecture
from shardwise.network.topology import Pods, Switched

COLUMNS = ("id", "source", *INPUTS, *MEASURED, "peak_memory_gb", "memory_unit", "memory_kind")
# What a cell may say about a number format, and words of a note that say more: the first pair that is read as the job's is taken.
DTYPES = ("bf16", "fp16", "fp32", "fp8", "fp8-rowwise", "mxfp8", "nvfp4", "int8")
NOTES = ("", "fp32 gradients", "mixed precision", "fused loss", "liger", "the loss as maxtext's")
NAMES = ("name", "source", "nominal_num_params", "numerics", "max_positions")  # of a model what decides no cost


@dataclass(frozen=True, slots=True)
class OwnRow:
    """The cells of a run by column, and what of the run is read back from them otherwise, in words."""

    cells: Mapping[str, str]
    otherwise: tuple[str, ...]

    @property
    def row(self) -> Row:
        """The row that a file with these cells has."""
        return row_from(1, {**self.cells})


def row_of(
    model: Architecture, cluster: Cluster, job: Job, layout: Layout, software: str, step_time_s: float, *,
    name: str = "", memory_bytes: float | None = None, memory_kind: str = "",
) -> OwnRow:  # fmt: skip
    """A run as a row. `software` is the name of a stack. Raises `InputError` for a run that rows cannot say at all."""
    cells = _model_cells(model) | _machine_cells(cluster) | _layout_cells(layout) | _job_cells(job, model)
    cells |= _formats({**cells, "software": software}, job)
    measured = {"id": name or f"{model.name} {layout}", "source": "own run", "step_time_s": f"{step_time_s:.9g}"}
    if memory_bytes is not None:
        measured |= {"peak_memory_gb": f"{memory_bytes / 1e9:.6g}", "memory_unit": "GB", "memory_kind": memory_kind}
    texts = {column: text for column, text in (cells | {"software": software} | measured).items() if text}
    return OwnRow(texts, tuple(_otherwise(_read_back(texts, cluster), model, job, layout)))


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else str(value)


def _model_cells(model: Architecture) -> dict[str, str]:
    cells: dict[str, Any] = {
        "model": model.name, "layers": model.num_layers, "d_model": model.d_model, "n_heads": model.num_heads,
        "n_kv_heads": model.num_kv_heads, "head_dim": model.head_dim, "d_ff": model.d_ff, "vocab": model.vocab_size,
        "gated_mlp": GATED[model.mlp], "tied_embeddings": model.tied_embeddings,
    }  # fmt: skip
    if model.num_experts:
        cells |= {
            "n_experts": model.num_experts, "top_k": model.experts_per_token, "moe_d_ff": model.d_ff,
            "shared_expert_d_ff": model.shared_expert_width, "n_dense_layers": model.num_dense_layers,
            "d_ff": model.dense_d_ff if model.num_dense_layers else model.d_ff,
        }  # fmt: skip
    if model.kv_lora_rank:
        cells |= {
            "mla_q_lora": model.q_lora_rank, "mla_kv_lora": model.kv_lora_rank, "mla_qk_rope": model.rope_head_dim,
            "mla_qk_nope": model.head_dim - model.rope_head_dim, "mla_v_dim": model.v_head_dim,
        }  # fmt: skip
    if model.sliding_window:
        whole = model.num_layers // model.global_every if model.global_every else 0
        cells |= {"window": model.sliding_window, "window_layers": model.num_layers - whole}
    return {column: _text(value) for column, value in cells.items()}


def _machine_cells(cluster: Cluster) -> dict[str, str]:
    topology, chip = cluster.topology, cluster.chip
    cells: dict[str, Any] = {
        "chip": chip.catalogued,
        "n_devices": cluster.num_devices,
        "chips_per_node": chip.devices_per_host,
    }
    if not isinstance(topology, Switched):
        torus = topology.torus if isinstance(topology, Pods) else topology
        cells["intra_node_link"] = "x".join(map(str, torus.shape))
    elif len(topology.tiers) > 1:
        cells["inter_node_link"] = f"{topology.tiers[-1].bytes_per_s * 8 / 1e9:.0f} Gb/s per device"
    if isinstance(topology, Pods):
        cells["inter_node_link"] = f"between {topology.num_pods} slices"
    return {column: _text(value) for column, value in cells.items()}


def _layout_cells(layout: Layout) -> dict[str, str]:
    cells: dict[str, Any] = {
        "tp": layout.tp, "cp": layout.cp, "pp": layout.pp, "ep": layout.ep, "dp": layout.num_replicas,
        "sp": layout.sequence_parallel if layout.tp > 1 else "", "zero_stage": layout.zero_stage,
        "fsdp": layout.zero_stage == 3, "micro_batch": layout.micro_batch_seqs, "recompute": layout.recompute,
        "offload": " and ".join(name for name, rests in offloaded_by(layout.offload)._asdict().items() if rests),
        "overlap_flags": "async tp" if layout.async_tp else "",
    }  # fmt: skip
    if layout.recompute == "alternate":
        cells |= {"recompute": "selective", "recompute_detail": "per-op"}
    if layout.ep > 1 and layout.tp > 1:
        cells["etp"] = layout.expert_tp
    if layout.pp > 1:
        cells |= {"vpp": layout.num_virtual_stages, "pp_schedule": layout.schedule}
    if layout.zero_stage and 1 < layout.fsdp < layout.num_replicas:
        cells["notes"] = f"shard group: {layout.fsdp}"
    return {column: _text(value) for column, value in cells.items()}


def _job_cells(job: Job, model: Architecture) -> dict[str, str]:
    task = "lora" if model.lora_rank else "sft" if job.document_tokens else ""
    return {"seq_len": str(job.seq_len), "global_batch": str(job.num_seqs), "task": task}


def _formats(cells: Mapping[str, str], job: Job) -> dict[str, str]:
    """The number format, and a note, that are read as the job's recipe and loss, or as what is nearest with the same formats."""
    mine, best = precision_named(job.precision), (False, False, False)
    found: dict[str, str] = {}
    for dtype, note in product(DTYPES, NOTES):
        said = {"dtype": dtype, "notes": "; ".join(filter(None, (cells.get("notes", ""), note)))}
        facts = Facts({**cells, **said})
        try:
            recipe = precision_named(recipe_of(facts))
        except SkippedRow:
            continue
        alike = (recipe.product_format, recipe.activations) == (mine.product_format, mine.activations)
        score = (alike, recipe == mine, loss_of(facts) == job.loss)
        if alike and score > best:
            best, found = score, said
    if not found:
        raise InputError(f"row: no row of a run says the precision {job.precision}; calibrate with runs of another")
    return found


def _read_back(cells: Mapping[str, str], cluster: Cluster) -> Case:
    """The case of a row, which names a chip of the catalogue, or that of the cluster."""
    try:
        return case_of(Facts(dict(cells)), cluster if cluster.chip.base is None else None)
    except SkippedRow as skipped:
        raise InputError(f"row: a row cannot say this run: {skipped}") from None


def _otherwise(case: Case, model: Architecture, job: Job, layout: Layout) -> Iterator[str]:
    """What a case says otherwise than the run that it was made of."""
    held, its_held = held_layers(model, layout), held_layers(case.architecture, case.layout)
    if held != its_held:
        yield f"layers of the stages, {','.join(map(str, held))} (the row: {','.join(map(str, its_held))})"
    for what, mine, its in (
        ("model", model, case.architecture),
        ("job", job, case.job),
        ("layout", layout, case.layout),
    ):
        for one in fields(mine):
            own, read = getattr(mine, one.name), getattr(its, one.name)
            if own != read and one.name not in (*NAMES, "tokens", "overlap", "placement", "layers_per_stage", "etp"):
                yield f"{what}.{one.name} = {own} (the row: {read})"


def append(path: Path, found: OwnRow) -> None:
    """Append a row to a CSV file, which is made with all columns where there is none.

    Raises `InputError` for a file that cannot be written or read, and for one that lacks a column of the row.
    """
    try:
        new = not path.exists() or not path.stat().st_size
        columns = list(COLUMNS) if new else _header(path)
        missing = [column for column in found.cells if column not in columns]
        if missing:
            raise InputError(f"--row: {path} has no column {', '.join(missing)}; add them, or name another file")
        with path.open("a", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
            if new:
                writer.writeheader()
            writer.writerow(dict(found.cells))
    except (OSError, ValueError, csv.Error) as error:
        raise InputError(f"--row: cannot write {path}: {getattr(error, 'strerror', None) or error}") from None


def _header(path: Path) -> list[str]:
    """The columns of a file, whose last line ends before another one comes."""
    with path.open("rb+") as file:
        file.seek(-1, 2)
        if file.read(1) != b"\n":
            file.write(b"\n")
    with path.open(encoding="utf-8-sig", newline="") as file:
        return next(csv.reader(file), [])
