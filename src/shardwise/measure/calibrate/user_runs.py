"""A user's runs as observations on the user's cluster, and a run as a row of the table of published runs.

`select_runs` keeps the runs that a cluster can be fitted to, with the reasons for which others are skipped.
`run_to_row` writes the cells of a run, and lists what no cell can say.
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

from shardwise.hardware import (
    Chip,
    Cluster,
    MeasuredCluster,
    Pods,
    Stack,
    Switched,
    Topology,
    Torus,
    get_catalog_entry,
    load_chip,
    relative_clock,
    without_calibration,
)
from shardwise.hardware.cluster import build_torus, resize_tiers
from shardwise.layout import Layout, layers_by_stage, layout_as_run
from shardwise.layout.layout import get_offload_targets
from shardwise.measure.calibrate.observations import Observation, run_observation
from shardwise.measure.calibrate.prediction_errors import SCORED_QUALITIES
from shardwise.measure.calibrate.published_runs.layout_from_row import read_loss, read_recipe
from shardwise.measure.calibrate.published_runs.model_and_cluster_from_row import RowSoftware, catalogue_name
from shardwise.measure.calibrate.published_runs.prediction_from_row import (
    RowPrediction,
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
from shardwise.model import Architecture, Job
from shardwise.model.architecture import LABEL_FIELDS
from shardwise.model.structure import IS_GATED
from shardwise.price import Problem
from shardwise.values import (
    InputError,
    argument_label,
    get_precision,
    parse_csv,
    parse_quantity,
    read_text,
    require_regular,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRun:
    """A run that counts: its name, its kind of model ("dense", "moe"), and its observation."""

    id: str
    kind: str
    observation: Observation


class PricedRun(NamedTuple):
    """A row that can be priced, its measured seconds, and its case."""

    row: RunRow
    measured_s: float
    case: RunCase


class CalibrationRuns(NamedTuple):
    """The runs, their stack (None without runs), and the number of skipped rows by reason."""

    runs: tuple[CalibrationRun, ...]
    stack: Stack | None
    skipped: Counter[str]


def run_from_log(name: str, problem: Problem, layout: Layout, stack: Stack, step_time_s: float) -> PricedRun:
    """Return a run from its launch and its log, which leave nothing to guess."""
    software = RowSoftware(stack=stack, fused_attention=not stack.unfused_attention, has_capacity=False, clock=1.0)
    case = RunCase(
        architecture=problem.architecture, cluster=without_calibration(problem.cluster), job=problem.job,
        layout=layout_as_run(stack, layout), software=software, recomputes=(layout.recompute,), approximations=(),
    )  # fmt: skip
    return PricedRun(build_row(1, {"id": name, "dup_group": name}), step_time_s, case)


def select_runs(
    rows: Sequence[RunRow],
    user_cluster: MeasuredCluster,
    stack: Stack | None,
    logged: Sequence[PricedRun] = (),
    *,
    is_limited: bool = True,
) -> CalibrationRuns:
    """Select the rows, and the runs read from logs, that measure a cluster. `stack` is that of all runs; None takes the
    stack of most of them and skips the others. `is_limited`: no rate exceeds the best published micro-benchmark."""
    usable: list[PricedRun] = []
    skipped: Counter[str] = Counter()
    for candidate in (*logged, *(_price_row(row, user_cluster) for row in rows)):
        if isinstance(candidate, str):
            skipped[candidate] += 1
        elif candidate.case.cluster.chip.catalog_name != user_cluster.nominal.chip.catalog_name:
            skipped[f"of another chip, {candidate.case.cluster.chip.name}"] += 1
        else:
            usable.append(candidate)
    if stack is None and usable:
        name = Counter(run.case.software.stack.name for run in usable).most_common(1)[0][0]
        stack = next(run.case.software.stack for run in usable if run.case.software.stack.name == name)
        other_stack_runs = [run for run in usable if run.case.software.stack != stack]
        skipped.update(f"of another stack, {run.case.software.stack.name}" for run in other_stack_runs)
        usable = [run for run in usable if run not in other_stack_runs]
    weights = duplicate_weights(run.row for run in usable)
    runs = tuple(
        _to_run(run, user_cluster, stack, weights[run.row.dup_group], is_limited=is_limited) for run in usable if stack
    )
    return CalibrationRuns(runs, stack, skipped)


def _price_row(row: RunRow, user_cluster: MeasuredCluster) -> PricedRun | str:
    """Return the row with its case, or the reason to skip it."""
    uncatalogued_cluster = user_cluster.nominal if user_cluster.nominal.chip.base is None else None
    try:
        chip = row.cell("chip") if uncatalogued_cluster and row.cell("chip") else catalogue_name(row.cell("chip"))
    except SkippedRow as skipped:
        return skipped.kind
    if chip.lower() != user_cluster.nominal.chip.catalog_name.lower():
        return f"of another chip, {chip}"
    if row.step_time_s is None:
        return "without a measured step time"
    if row.quality not in SCORED_QUALITIES:
        return f"of quality {row.quality}: it does not say all that its time depends on"
    prediction = (
        predict_cached(row.inputs) if uncatalogued_cluster is None else try_predict(row.cells, uncatalogued_cluster)
    )
    return (
        PricedRun(row, row.step_time_s, prediction.case) if isinstance(prediction, RowPrediction) else prediction.kind
    )


def _to_run(
    run: PricedRun, user_cluster: MeasuredCluster, stack: Stack, weight: float, *, is_limited: bool
) -> CalibrationRun:
    flash_attention = run.row.cells.flag("flash_attn")
    software = replace(
        run.case.software, stack=stack,
        fused_attention=not stack.unfused_attention if flash_attention is None else flash_attention,
        clock=relative_clock(user_cluster.nominal.chip) if run.case.software.clock == 1.0 else run.case.software.clock,
    )  # fmt: skip
    case = replace(run.case, software=software, cluster=replace(
        run.case.cluster, chip=_user_chip(run.case.cluster.chip, user_cluster),
        topology=_user_network(run.case.cluster.topology, user_cluster)
    ))  # fmt: skip
    kind = "moe" if case.architecture.num_experts else "dense"
    return CalibrationRun(
        id=run.row.id, kind=kind, observation=run_observation(case, run.measured_s, weight, is_limited=is_limited)
    )


def _user_chip(stated: Chip, user_cluster: MeasuredCluster) -> Chip:
    """Return the cluster's chip, with what the row states otherwise than the catalogue, if that has the chip."""
    if user_cluster.nominal.chip.base is None:
        return user_cluster.nominal.chip
    catalog_chip = load_chip(user_cluster.nominal.chip.catalog_name)
    differing = {field.name: getattr(stated, field.name) for field in fields(Chip)}
    differing = {name: value for name, value in differing.items() if value != getattr(catalog_chip, name)}
    return replace(user_cluster.nominal.chip, **differing)


def _user_network(stated: Topology, user_cluster: MeasuredCluster) -> Topology:
    """Return the row's network at the cluster's rates, but for a rate that the row states unlike the catalogue. A chip
    that the catalogue does not have keeps the row's network, which comes from the cluster, a plan or the row."""
    if user_cluster.nominal.chip.base is None:
        return stated
    topology, catalog_entry = user_cluster.nominal.topology, get_catalog_entry(user_cluster.nominal.chip.catalog_name)
    if isinstance(stated, Switched) and isinstance(topology, Switched):
        return _user_tiers(
            stated, topology, user_cluster.nominal.chip, parse_quantity(catalog_entry["tiers"][-1]["bytes_per_s"])
        )
    if isinstance(stated, Switched) or isinstance(topology, Switched):
        return stated
    torus = topology.torus if isinstance(topology, Pods) else topology
    catalog_torus = build_torus(catalog_entry["torus"], torus.shape)
    if isinstance(stated, Pods):
        rate = topology.bytes_per_s if isinstance(topology, Pods) else stated.bytes_per_s
        return replace(stated, torus=_user_links(stated.torus, torus, catalog_torus), bytes_per_s=rate)
    return _user_links(stated, torus, catalog_torus)


def _user_links(stated: Torus, user_torus: Torus, catalog_torus: Torus) -> Torus:
    if stated.bytes_per_s != catalog_torus.bytes_per_s:
        return stated
    return replace(stated, bytes_per_s=user_torus.bytes_per_s, hop_latency_s=user_torus.hop_latency_s)


def _user_tiers(stated: Switched, user_network: Switched, chip: Chip, catalog_bytes_per_s: float) -> Switched:
    """Return the cluster's tiers over the row's devices, or the row's tiers if the sizes do not divide."""
    network = resize_tiers(user_network, chip, math.prod(tier.size for tier in stated.tiers))
    if network is None or len(user_network.tiers) == 1 < len(stated.tiers):
        return stated
    if stated.tiers[-1].bytes_per_s != catalog_bytes_per_s:
        outermost = replace(network.tiers[-1], bytes_per_s=stated.tiers[-1].bytes_per_s)
        return Switched(tiers=(*network.tiers[:-1], outermost))
    return network


ROW_COLUMNS = ("id", "source", *INPUT_COLUMNS, *MEASURED_COLUMNS, "peak_memory_gb", "memory_unit", "memory_kind")
# Values of the dtype cell, and notes that qualify it; the first pair that is read as the job's format is taken.
CELL_DTYPES = ("bf16", "fp16", "fp32", "fp8", "fp8-rowwise", "mxfp8", "nvfp4", "int8")
CELL_NOTES = ("", "fp32 gradients", "mixed precision", "fused loss", "liger", "the loss as maxtext's")
# Fields that cost nothing, or that another field already says (layers of the stages are compared as such).
FIELDS_WITHOUT_COST = (
    *LABEL_FIELDS, "numerics", "max_positions", "tokens", "overlap", "placement", "layers_per_stage", "etp",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RunAsRow:
    """Cells of a run by column, and texts of the fields that are read back from them with other values."""

    cells: Mapping[str, str]
    lost_fields: tuple[str, ...]

    @property
    def row(self) -> RunRow:
        """Row of a file with these cells."""
        return build_row(1, {**self.cells})


class MeasuredPeak(NamedTuple):
    """Peak memory of a device, and how it was measured, as a row's cell says it."""

    num_bytes: float
    kind: str


def run_to_row(
    problem: Problem, layout: Layout, software: str, step_time_s: float, *, name: str = "", peak: MeasuredPeak | None = None
) -> RunAsRow:  # fmt: skip
    """Return a run as a row. `software` is the name of a stack. Raises `InputError` for a run that no row can
    express."""
    architecture, cluster, job = problem.architecture, problem.cluster, problem.job
    cells = _model_cells(architecture) | _machine_cells(cluster) | _layout_cells(layout) | _job_cells(job, architecture)
    cells |= _format_cells({**cells, "software": software}, job)
    measured = {"id": name or f"{architecture.name} {layout}", "source": "own run", "step_time_s": f"{step_time_s:.9g}"}
    if peak is not None:
        measured |= {"peak_memory_gb": f"{peak.num_bytes / 1e9:.6g}", "memory_unit": "GB", "memory_kind": peak.kind}
    texts = {column: text for column, text in (cells | {"software": software} | measured).items() if text}
    return RunAsRow(texts, tuple(_lost_fields(_read_back(texts, cluster), architecture, job, layout)))


def _cell_text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else str(value)


def _model_cells(architecture: Architecture) -> dict[str, str]:
    cells: dict[str, Any] = {
        "model": architecture.name, "layers": architecture.num_layers, "d_model": architecture.d_model,
        "n_heads": architecture.num_heads, "n_kv_heads": architecture.num_kv_heads, "head_dim": architecture.head_dim,
        "d_ff": architecture.d_ff, "vocab": architecture.vocab_size, "gated_mlp": IS_GATED[architecture.mlp],
        "tied_embeddings": architecture.tied_embeddings,
    }  # fmt: skip
    if architecture.num_experts:
        cells |= {
            "n_experts": architecture.num_experts, "top_k": architecture.experts_per_token,
            "moe_d_ff": architecture.d_ff, "shared_expert_d_ff": architecture.shared_expert_width,
            "n_dense_layers": architecture.num_dense_layers,
            "d_ff": architecture.dense_d_ff if architecture.num_dense_layers else architecture.d_ff,
        }  # fmt: skip
    if architecture.kv_lora_rank:
        cells |= {
            "mla_q_lora": architecture.q_lora_rank, "mla_kv_lora": architecture.kv_lora_rank,
            "mla_qk_rope": architecture.rope_head_dim,
            "mla_qk_nope": architecture.head_dim - architecture.rope_head_dim, "mla_v_dim": architecture.v_head_dim,
        }  # fmt: skip
    if architecture.sliding_window:
        num_global_layers = architecture.num_layers // architecture.global_every if architecture.global_every else 0
        cells |= {"window": architecture.sliding_window, "window_layers": architecture.num_layers - num_global_layers}
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
        "offload": " and ".join(
            name for name, is_offloaded in get_offload_targets(layout.offload)._asdict().items() if is_offloaded
        ),
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


def _job_cells(job: Job, architecture: Architecture) -> dict[str, str]:
    task = "lora" if architecture.lora_rank else "sft" if job.document_tokens else ""
    return {"seq_len": str(job.seq_len), "global_batch": str(job.num_seqs), "task": task}


def _format_cells(cells: Mapping[str, str], job: Job) -> dict[str, str]:
    """Return the dtype and notes that are read as the job's precision and loss, or as the closest of the same formats."""
    precision, best_score = get_precision(job.precision), (False, False, False)
    best_cells: dict[str, str] = {}
    for dtype, note in product(CELL_DTYPES, CELL_NOTES):
        format_cells = {"dtype": dtype, "notes": "; ".join(filter(None, (cells.get("notes", ""), note)))}
        row_cells = RowCells({**cells, **format_cells})
        try:
            recipe = get_precision(read_recipe(row_cells))
        except SkippedRow:
            continue
        same_formats = (recipe.matmul_format, recipe.activations) == (precision.matmul_format, precision.activations)
        score = (same_formats, recipe == precision, read_loss(row_cells) == job.loss)
        if same_formats and score > best_score:
            best_score, best_cells = score, format_cells
    if not best_cells:
        raise InputError(f"row: no row of a run says the precision {job.precision}; calibrate with runs of another")
    return best_cells


def _read_back(cells: Mapping[str, str], cluster: Cluster) -> RunCase:
    try:
        return read_case(RowCells(dict(cells)), cluster if cluster.chip.base is None else None)
    except SkippedRow as skipped:
        raise InputError(f"row: a row cannot say this run: {skipped}") from None


def _lost_fields(case: RunCase, architecture: Architecture, job: Job, layout: Layout) -> Iterator[str]:
    """Yield the fields in which a case differs from the run that its row was written from."""
    stage_layers = layers_by_stage(architecture, layout)
    row_stage_layers = layers_by_stage(case.architecture, case.layout)
    if stage_layers != row_stage_layers:
        planned, read = (",".join(map(str, layers)) for layers in (stage_layers, row_stage_layers))
        yield f"layers of the stages, {planned} (the row: {read})"
    pairs: dict[str, tuple[Any, Any]] = {
        "model": (architecture, case.architecture),
        "job": (job, case.job),
        "layout": (layout, case.layout),
    }
    for kind, (expected, read_back) in pairs.items():
        for field in fields(expected):
            run_value, row_value = getattr(expected, field.name), getattr(read_back, field.name)
            if run_value != row_value and field.name not in FIELDS_WITHOUT_COST:
                yield f"{kind}.{field.name} = {run_value} (the row: {row_value})"


def append_row(path: Path, run: RunAsRow) -> None:
    """Append a row to a CSV file; a new file gets all columns. Raises `InputError` for a file that cannot be written or
    read, or that lacks a column of the row."""
    try:
        is_new = not path.exists() or not path.stat().st_size
        if not is_new:
            require_regular(path)
        columns = list(ROW_COLUMNS) if is_new else _read_header(path)
        missing = [column for column in run.cells if column not in columns]
        if missing:
            raise InputError(
                f"{argument_label('row')}: {path} has no column {', '.join(missing)}; add them, or name another file"
            )
        with path.open("a", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
            if is_new:
                writer.writeheader()
            writer.writerow(dict(run.cells))
    except (OSError, ValueError) as error:
        raise InputError(
            f"{argument_label('row')}: cannot write {path}: {getattr(error, 'strerror', None) or error}"
        ) from None


def _read_header(path: Path) -> list[str]:
    """Return the columns of a file, after completing its last line."""
    with path.open("rb+") as file:
        file.seek(-1, 2)
        if file.read(1) != b"\n":
            file.write(b"\n")
    return next(parse_csv(read_text(path, encoding="utf-8-sig").splitlines(), str(path)), (0, []))[1]
