"""A user's runs as observations on the user's own cluster, and a user's run as a row of the table of published runs.

`select_runs` keeps the runs that a cluster can be fitted to, with the reasons for which others are skipped. `run_to_row` writes
the cells of a run, with what of the run no cell says.
"""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from shardwise.hardware.catalog_networks import build_torus, resize_tiers
from shardwise.hardware.chips import Chip, get_catalog_entry, load_chip, relative_clock
from shardwise.hardware.cluster import Cluster
from shardwise.hardware.cluster_files import MeasuredCluster
from shardwise.hardware.network.pods import Pods
from shardwise.hardware.network.switches import Switched
from shardwise.hardware.network.topology import Topology
from shardwise.hardware.network.torus import Torus
from shardwise.hardware.published_constants import without_calibration
from shardwise.hardware.stacks import Stack
from shardwise.layout.layers_per_stage import layers_by_stage
from shardwise.layout.layout import Layout, get_offload_targets
from shardwise.layout.rules.stack_abilities import layout_as_run
from shardwise.measure.calibrate.observations import Observation, run_observation
from shardwise.measure.calibrate.prediction_errors import SCORED_QUALITIES
from shardwise.measure.calibrate.published_runs.cluster_from_row import RowSoftware, catalogue_name
from shardwise.measure.calibrate.published_runs.layout_from_row import read_loss, read_recipe
from shardwise.measure.calibrate.published_runs.prediction_from_row import (
    Prediction,
    RunCase,
    predict_cached,
    read_case,
    try_predict,
)
from shardwise.measure.calibrate.published_runs.run_table import (
    INPUT_COLUMNS,
    MEASURED_COLUMNS,
    RowCells,
    RunRow,
    SkippedRow,
    build_row,
    duplicate_weights,
)
from shardwise.model.architecture import IS_GATED, Architecture
from shardwise.model.job import Job
from shardwise.values.errors import InputError
from shardwise.values.precision import get_precision
from shardwise.values.units import parse_quantity


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRun:
    """A run that counts: its name, its kind of model ("dense", "moe"), and what was observed."""

    id: str
    kind: str
    observation: Observation


class PricedRun(NamedTuple):
    """A row that can be priced, its time in seconds, and its case."""

    row: RunRow
    measured_s: float
    case: RunCase


class CalibrationRuns(NamedTuple):
    """The runs, the stack of all of them (None without runs), and how many rows were set aside for which reason."""

    runs: tuple[CalibrationRun, ...]
    stack: Stack | None
    skipped: Counter[str]


def run_from_log(
    name: str, model: Architecture, cluster: Cluster, job: Job, layout: Layout, stack: Stack, step_time_s: float
) -> PricedRun:
    """A run by its launch and its log, of which nothing has to be guessed."""
    software = RowSoftware(stack=stack, fused_attention=not stack.unfused_attention, synchronises=True, clock=1.0)
    case = RunCase(
        architecture=model, cluster=without_calibration(cluster), job=job, layout=layout_as_run(stack, layout), software=software,
        recomputes=(layout.recompute,), approximations=(),
    )  # fmt: skip
    return PricedRun(build_row(1, {"id": name, "dup_group": name}), step_time_s, case)


def select_runs(
    rows: Sequence[RunRow], own: MeasuredCluster, stack: Stack | None, logged: Sequence[PricedRun] = ()
) -> CalibrationRuns:
    """The rows, and the runs by their logs, that say something about a cluster. `stack`: what all ran with; None: what most of
    them say."""
    usable: list[PricedRun] = []
    aside: Counter[str] = Counter()
    for found in (*logged, *(_price_row(row, own) for row in rows)):
        if isinstance(found, PricedRun) and found.case.cluster.chip.catalog_name != own.nominal.chip.catalog_name:
            found = f"of another chip, {found.case.cluster.chip.name}"
        if isinstance(found, PricedRun):
            usable.append(found)
        else:
            aside[found] += 1
    if stack is None and usable:
        name = Counter(one.case.software.stack.name for one in usable).most_common(1)[0][0]
        stack = next(one.case.software.stack for one in usable if one.case.software.stack.name == name)
        others = [one for one in usable if one.case.software.stack != stack]
        aside.update(f"of another stack, {one.case.software.stack.name}" for one in others)
        usable = [one for one in usable if one not in others]
    counted = duplicate_weights(one.row for one in usable)
    runs = tuple(_to_run(one, own, stack, counted[one.row.dup_group]) for one in usable if stack)
    return CalibrationRuns(runs, stack, aside)


def _price_row(row: RunRow, own: MeasuredCluster) -> PricedRun | str:
    """The row and its case, or why it is set aside."""
    mine = own.nominal if own.nominal.chip.base is None else None
    try:
        chip = row.cell("chip") if mine and row.cell("chip") else catalogue_name(row.cell("chip"))
    except SkippedRow as skipped:
        return skipped.kind
    if chip.lower() != own.nominal.chip.catalog_name.lower():
        return f"of another chip, {chip}"
    if row.step_time_s is None:
        return "without a measured step time"
    if row.quality not in SCORED_QUALITIES:
        return f"of quality {row.quality}: it does not say all that its time depends on"
    found = predict_cached(row.inputs) if mine is None else try_predict(RowCells(dict(row.inputs)), mine)
    return PricedRun(row, row.step_time_s, found.case) if isinstance(found, Prediction) else found.kind


def _to_run(one: PricedRun, own: MeasuredCluster, stack: Stack, weight: float) -> CalibrationRun:
    stated = RowCells(dict(one.row.inputs)).flag("flash_attn")
    software = replace(
        one.case.software, stack=stack, fused_attention=not stack.unfused_attention if stated is None else stated,
        clock=relative_clock(own.nominal.chip) if one.case.software.clock == 1.0 else one.case.software.clock,
    )  # fmt: skip
    case = replace(one.case, software=software, cluster=replace(
        one.case.cluster, chip=_user_chip(one.case.cluster.chip, own), topology=_user_network(one.case.cluster.topology, own)
    ))  # fmt: skip
    kind = "moe" if case.architecture.num_experts else "dense"
    return CalibrationRun(id=one.row.id, kind=kind, observation=run_observation(case, one.measured_s, weight))


def _user_chip(stated: Chip, own: MeasuredCluster) -> Chip:
    """The chip of the cluster, but for what a row states otherwise than the catalogue, where that has the chip."""
    if own.nominal.chip.base is None:
        return own.nominal.chip
    usual = load_chip(own.nominal.chip.catalog_name)
    differs = {one.name: getattr(stated, one.name) for one in fields(Chip)}
    differs = {name: value for name, value in differs.items() if value != getattr(usual, name)}
    return replace(own.nominal.chip, **differs)


def _user_network(stated: Topology, own: MeasuredCluster) -> Topology:
    """The network of a row at the cluster's rates, but for a rate that the row states otherwise than the catalogue, where that
    has the chip: of another chip it is a network that the cluster, a plan or the row says."""
    if own.nominal.chip.base is None:
        return stated
    topology, entry = own.nominal.topology, get_catalog_entry(own.nominal.chip.catalog_name)
    if isinstance(stated, Switched) and isinstance(topology, Switched):
        return _user_tiers(stated, topology, own.nominal.chip, parse_quantity(entry["tiers"][-1]["bytes_per_s"]))
    if isinstance(stated, Switched) or isinstance(topology, Switched):
        return stated
    torus = topology.torus if isinstance(topology, Pods) else topology
    usual = build_torus(entry["torus"], torus.shape)
    if isinstance(stated, Pods):
        rate = topology.bytes_per_s if isinstance(topology, Pods) else stated.bytes_per_s
        return replace(stated, torus=_user_links(stated.torus, torus, usual), bytes_per_s=rate)
    return _user_links(stated, torus, usual)


def _user_links(stated: Torus, own: Torus, usual: Torus) -> Torus:
    if stated.bytes_per_s != usual.bytes_per_s:
        return stated
    return replace(stated, bytes_per_s=own.bytes_per_s, hop_latency_s=own.hop_latency_s)


def _user_tiers(stated: Switched, own: Switched, chip: Chip, usual_bytes_per_s: float) -> Switched:
    """The cluster's tiers over the row's devices, or the row's own where these do not come out even."""
    network = resize_tiers(own, chip, math.prod(tier.size for tier in stated.tiers))
    if network is None or len(own.tiers) == 1 < len(stated.tiers):
        return stated
    if stated.tiers[-1].bytes_per_s != usual_bytes_per_s:
        outermost = replace(network.tiers[-1], bytes_per_s=stated.tiers[-1].bytes_per_s)
        return Switched(tiers=(*network.tiers[:-1], outermost))
    return network


ROW_COLUMNS = ("id", "source", *INPUT_COLUMNS, *MEASURED_COLUMNS, "peak_memory_gb", "memory_unit", "memory_kind")
# What a cell may say about a number format, and words of a note that say more: the first pair that is read as the job's is taken.
CELL_DTYPES = ("bf16", "fp16", "fp32", "fp8", "fp8-rowwise", "mxfp8", "nvfp4", "int8")
CELL_NOTES = ("", "fp32 gradients", "mixed precision", "fused loss", "liger", "the loss as maxtext's")
FIELDS_WITHOUT_COST = (
    "name",
    "source",
    "nominal_num_params",
    "numerics",
    "max_positions",
)  # of a model what decides no cost


@dataclass(frozen=True, slots=True)
class RunAsRow:
    """The cells of a run by column, and what of the run is read back from them otherwise, in words."""

    cells: Mapping[str, str]
    lost_fields: tuple[str, ...]

    @property
    def row(self) -> RunRow:
        """The row that a file with these cells has."""
        return build_row(1, {**self.cells})


def run_to_row(
    model: Architecture, cluster: Cluster, job: Job, layout: Layout, software: str, step_time_s: float, *,
    name: str = "", memory_bytes: float | None = None, memory_kind: str = "",
) -> RunAsRow:  # fmt: skip
    """A run as a row. `software` is the name of a stack. Raises `InputError` for a run that rows cannot say at all."""
    cells = _model_cells(model) | _machine_cells(cluster) | _layout_cells(layout) | _job_cells(job, model)
    cells |= _format_cells({**cells, "software": software}, job)
    measured = {"id": name or f"{model.name} {layout}", "source": "own run", "step_time_s": f"{step_time_s:.9g}"}
    if memory_bytes is not None:
        measured |= {"peak_memory_gb": f"{memory_bytes / 1e9:.6g}", "memory_unit": "GB", "memory_kind": memory_kind}
    texts = {column: text for column, text in (cells | {"software": software} | measured).items() if text}
    return RunAsRow(texts, tuple(_lost_fields(_read_back(texts, cluster), model, job, layout)))


def _cell_text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else str(value)


def _model_cells(model: Architecture) -> dict[str, str]:
    cells: dict[str, Any] = {
        "model": model.name, "layers": model.num_layers, "d_model": model.d_model, "n_heads": model.num_heads,
        "n_kv_heads": model.num_kv_heads, "head_dim": model.head_dim, "d_ff": model.d_ff, "vocab": model.vocab_size,
        "gated_mlp": IS_GATED[model.mlp], "tied_embeddings": model.tied_embeddings,
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
    return {column: _cell_text(value) for column, value in cells.items()}


def _machine_cells(cluster: Cluster) -> dict[str, str]:
    topology, chip = cluster.topology, cluster.chip
    cells: dict[str, Any] = {
        "chip": chip.catalog_name,
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
    return {column: _cell_text(value) for column, value in cells.items()}


def _layout_cells(layout: Layout) -> dict[str, str]:
    cells: dict[str, Any] = {
        "tp": layout.tp, "cp": layout.cp, "pp": layout.pp, "ep": layout.ep, "dp": layout.num_replicas,
        "sp": layout.sequence_parallel if layout.tp > 1 else "", "zero_stage": layout.zero_stage,
        "fsdp": layout.zero_stage == 3, "micro_batch": layout.micro_batch_seqs, "recompute": layout.recompute,
        "offload": " and ".join(name for name, rests in get_offload_targets(layout.offload)._asdict().items() if rests),
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
    return {column: _cell_text(value) for column, value in cells.items()}


def _job_cells(job: Job, model: Architecture) -> dict[str, str]:
    task = "lora" if model.lora_rank else "sft" if job.document_tokens else ""
    return {"seq_len": str(job.seq_len), "global_batch": str(job.num_seqs), "task": task}


def _format_cells(cells: Mapping[str, str], job: Job) -> dict[str, str]:
    """The number format, and a note, that are read as the job's recipe and loss, or as what is nearest with the same formats."""
    mine, best = get_precision(job.precision), (False, False, False)
    found: dict[str, str] = {}
    for dtype, note in product(CELL_DTYPES, CELL_NOTES):
        said = {"dtype": dtype, "notes": "; ".join(filter(None, (cells.get("notes", ""), note)))}
        facts = RowCells({**cells, **said})
        try:
            recipe = get_precision(read_recipe(facts))
        except SkippedRow:
            continue
        alike = (recipe.matmul_format, recipe.activations) == (mine.matmul_format, mine.activations)
        score = (alike, recipe == mine, read_loss(facts) == job.loss)
        if alike and score > best:
            best, found = score, said
    if not found:
        raise InputError(f"row: no row of a run says the precision {job.precision}; calibrate with runs of another")
    return found


def _read_back(cells: Mapping[str, str], cluster: Cluster) -> RunCase:
    """The case of a row, which names a chip of the catalogue, or that of the cluster."""
    try:
        return read_case(RowCells(dict(cells)), cluster if cluster.chip.base is None else None)
    except SkippedRow as skipped:
        raise InputError(f"row: a row cannot say this run: {skipped}") from None


def _lost_fields(case: RunCase, model: Architecture, job: Job, layout: Layout) -> Iterator[str]:
    """What a case says otherwise than the run that it was made of."""
    held, its_held = layers_by_stage(model, layout), layers_by_stage(case.architecture, case.layout)
    if held != its_held:
        yield f"layers of the stages, {','.join(map(str, held))} (the row: {','.join(map(str, its_held))})"
    for what, mine, its in (
        ("model", model, case.architecture),
        ("job", job, case.job),
        ("layout", layout, case.layout),
    ):
        for one in fields(mine):
            own, read = getattr(mine, one.name), getattr(its, one.name)
            if own != read and one.name not in (
                *FIELDS_WITHOUT_COST,
                "tokens",
                "overlap",
                "placement",
                "layers_per_stage",
                "etp",
            ):
                yield f"{what}.{one.name} = {own} (the row: {read})"


def append_row(path: Path, found: RunAsRow) -> None:
    """Append a row to a CSV file, which is made with all columns where there is none.

    Raises `InputError` for a file that cannot be written or read, and for one that lacks a column of the row.
    """
    try:
        new = not path.exists() or not path.stat().st_size
        columns = list(ROW_COLUMNS) if new else _read_header(path)
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


def _read_header(path: Path) -> list[str]:
    """The columns of a file, whose last line ends before another one comes."""
    with path.open("rb+") as file:
        file.seek(-1, 2)
        if file.read(1) != b"\n":
            file.write(b"\n")
    with path.open(encoding="utf-8-sig", newline="") as file:
        return next(csv.reader(file), [])
