"""A user's run as a row: read back, it equals the run, or names the lost fields."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.hardware.chips import load_chip
from shardwise.hardware.cluster import Cluster
from shardwise.hardware.cluster_loading import load_cluster
from shardwise.hardware.stacks import match_stack, stack_names
from shardwise.layout.layout import Layout
from shardwise.measure.calibrate.published_runs.prediction_from_row import RowPrediction, predict_cached, read_case
from shardwise.measure.calibrate.published_runs.run_table import RowCells, SkippedRow, published_rows, read_rows
from shardwise.measure.calibrate.user_runs import ROW_COLUMNS, RunAsRow, append_row, run_to_row
from shardwise.model.job import Job
from shardwise.model.load import load_model
from shardwise.price import Problem
from shardwise.values.errors import InputError

JOB = Job(global_batch_tokens=1 << 20, seq_len=8192, loss="fused")


def row_of_run(text: str = "fsdp=64", model: str = "llama-3-8b", cluster: str = "h100:64", job: Job = JOB) -> RunAsRow:
    return run_to_row(Problem(load_model(model), load_cluster(cluster), job), Layout.parse(text), "megatron", 2.5)


def test_most_published_runs_are_read_back_with_the_same_price() -> None:
    """Every fifth run: fields that a row cannot hold are named, all others give the same price. The remaining runs have another
    chip than the catalogue's (memory rate, power limit) or attention that writes its scores."""
    same = total = 0
    for row in published_rows()[::5]:
        prediction = predict_cached(row.inputs)
        if not isinstance(prediction, RowPrediction):
            continue
        case, total = prediction.case, total + 1
        run_row = run_to_row(
            Problem(case.architecture, case.cluster, case.job), case.layout, case.software.stack.name, 1.0
        )
        repeated = predict_cached(run_row.row.inputs)
        assert isinstance(repeated, RowPrediction)
        exact = repeated.estimate.step_time_s == pytest.approx(prediction.estimate.step_time_s, rel=1e-9)
        same += exact
        unusual = not case.software.fused_attention or case.cluster.chip != load_chip(case.cluster.chip.name)
        assert exact or run_row.lost_fields or unusual, row.id
    assert same >= 0.8 * total
    assert total > 100


@pytest.mark.parametrize("name", stack_names())
def test_software_is_the_name_of_a_stack(name: str) -> None:
    assert match_stack(name).name == name


def test_fields_that_a_row_cannot_hold_are_named() -> None:
    run_row = row_of_run("fsdp=64 recompute=full recompute_layers=2")
    assert run_row.lost_fields == ("layout.recompute_layers = 2 (the row: None)",)
    assert row_of_run("fsdp=16 pp=4 layers_per_stage=8,8,8,8 recompute=full").lost_fields == ()
    uneven = row_of_run("fsdp=16 pp=4 layers_per_stage=7,9,9,7 recompute=full")
    assert uneven.lost_fields == ("layers of the stages, 7,9,9,7 (the row: 8,8,8,8)",)


def test_a_row_has_the_network_and_the_shape_of_the_cluster() -> None:
    cluster = load_cluster("tpu-v5p:4x4x8")
    job = replace(JOB, loss="streamed")
    run_row = run_to_row(Problem(load_model("llama-3-8b"), cluster, job), Layout.parse("fsdp=128"), "maxtext", 2.5)
    assert (run_row.cells["chip"], run_row.cells["intra_node_link"], run_row.cells["n_devices"]) == (
        "tpu-v5p",
        "4x4x8",
        "128",
    )
    assert row_of_run().cells["inter_node_link"] == "400 Gb/s per device"


def test_rows_are_added_to_a_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    append_row(path, row_of_run())
    path.write_text(path.read_text().rstrip("\n"))  # as editors leave it
    append_row(path, row_of_run("fsdp=8 tp=8 sequence_parallel=true"))
    first, second = read_rows(str(path))
    assert first.inputs == row_of_run().row.inputs
    assert (first.step_time_s, second.cell("tp")) == (2.5, "8")
    assert path.read_text().splitlines()[0] == ",".join(ROW_COLUMNS)


def test_a_file_with_other_columns_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("id,model\n")
    with pytest.raises(InputError, match=r"row: .*rows.csv has no column layers, d_model"):
        append_row(path, row_of_run())
    assert path.read_text() == "id,model\n"
    with pytest.raises(InputError, match="row: cannot write"):
        append_row(tmp_path, row_of_run())


def test_a_row_of_a_custom_chip_is_read_back_on_its_cluster_only() -> None:
    """A row names the chip, and is read back on its cluster; without the cluster the chip is unknown."""
    custom = load_cluster("h100:64")
    custom = Cluster(name="mine", chip=replace(custom.chip, name="mine", base=None), topology=custom.topology)
    layout = Layout.parse("fsdp=64")
    run_row = run_to_row(Problem(load_model("llama-3-8b"), custom, JOB), layout, "megatron", 1.0)
    assert (run_row.cells["chip"], run_row.lost_fields) == ("mine", ())
    case = read_case(RowCells(dict(run_row.cells)), custom)
    assert (case.cluster.chip, case.cluster.topology, case.layout.fsdp) == (custom.chip, custom.topology, 64)
    with pytest.raises(SkippedRow, match="chip not in the catalogue"):
        read_case(RowCells(dict(run_row.cells)))
