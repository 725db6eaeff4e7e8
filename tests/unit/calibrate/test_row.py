"""A run of one's own as a row: read back, it is the run, or says what it is not."""

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


def own_row(text: str = "fsdp=64", model: str = "llama-3-8b", cluster: str = "h100:64", job: Job = JOB) -> RunAsRow:
    return run_to_row(Problem(load_model(model), load_cluster(cluster), job), Layout.parse(text), "megatron", 2.5)


def test_most_published_runs_come_back_as_they_are_priced() -> None:
    """Of every fifth, what a row cannot say is named; what it can is priced to the same second. What is left has another chip
    than the catalogue's: its memory's rate, its power limit, or attention that writes its scores."""
    same = total = 0
    for row in published_rows()[::5]:
        found = predict_cached(row.inputs)
        if not isinstance(found, RowPrediction):
            continue
        case, total = found.case, total + 1
        own = run_to_row(Problem(case.architecture, case.cluster, case.job), case.layout, case.software.stack.name, 1.0)
        again = predict_cached(own.row.inputs)
        assert isinstance(again, RowPrediction)
        exact = again.estimate.step_time_s == pytest.approx(found.estimate.step_time_s, rel=1e-9)
        same += exact
        unusual = not case.software.fused_attention or case.cluster.chip != load_chip(case.cluster.chip.name)
        assert exact or own.lost_fields or unusual, row.id
    assert same >= 0.8 * total
    assert total > 100


@pytest.mark.parametrize("name", stack_names())
def test_software_is_a_stack_by_its_name(name: str) -> None:
    assert match_stack(name).name == name


def test_what_a_row_cannot_say_is_named() -> None:
    own = own_row("fsdp=64 recompute=full recompute_layers=2")
    assert own.lost_fields == ("layout.recompute_layers = 2 (the row: None)",)
    assert own_row("fsdp=16 pp=4 layers_per_stage=8,8,8,8 recompute=full").lost_fields == ()
    uneven = own_row("fsdp=16 pp=4 layers_per_stage=7,9,9,7 recompute=full")
    assert uneven.lost_fields == ("layers of the stages, 7,9,9,7 (the row: 8,8,8,8)",)


def test_the_network_and_the_shape_of_a_machine_are_said() -> None:
    cluster = load_cluster("tpu-v5p:4x4x8")
    job = replace(JOB, loss="streamed")
    own = run_to_row(Problem(load_model("llama-3-8b"), cluster, job), Layout.parse("fsdp=128"), "maxtext", 2.5)
    assert (own.cells["chip"], own.cells["intra_node_link"], own.cells["n_devices"]) == ("tpu-v5p", "4x4x8", "128")
    assert own_row().cells["inter_node_link"] == "400 Gb/s per device"


def test_rows_are_added_to_a_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    append_row(path, own_row())
    path.write_text(path.read_text().rstrip("\n"))  # as editors leave it
    append_row(path, own_row("fsdp=8 tp=8 sequence_parallel=true"))
    first, second = read_rows(str(path))
    assert first.inputs == own_row().row.inputs
    assert (first.step_time_s, second.cell("tp")) == (2.5, "8")
    assert path.read_text().splitlines()[0] == ",".join(ROW_COLUMNS)


def test_a_file_with_other_columns(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("id,model\n")
    with pytest.raises(InputError, match=r"row: .*rows.csv has no column layers, d_model"):
        append_row(path, own_row())
    assert path.read_text() == "id,model\n"
    with pytest.raises(InputError, match="row: cannot write"):
        append_row(tmp_path, own_row())


def test_a_chip_that_the_catalogue_does_not_have() -> None:
    """A row names it, and is read back on its cluster; anywhere else it is of a chip that nobody knows."""
    mine = load_cluster("h100:64")
    mine = Cluster(name="mine", chip=replace(mine.chip, name="mine", base=None), topology=mine.topology)
    layout = Layout.parse("fsdp=64")
    found = run_to_row(Problem(load_model("llama-3-8b"), mine, JOB), layout, "megatron", 1.0)
    assert (found.cells["chip"], found.lost_fields) == ("mine", ())
    case = read_case(RowCells(dict(found.cells)), mine)
    assert (case.cluster.chip, case.cluster.topology, case.layout.fsdp) == (mine.chip, mine.topology, 64)
    with pytest.raises(SkippedRow, match="chip not in the catalogue"):
        read_case(RowCells(dict(found.cells)))
