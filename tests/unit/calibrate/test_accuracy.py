"""Statistics by stratum, weights of duplicates, measured columns, and invalid files."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from shardwise.measure.calibrate.prediction_errors import (
    STRATA,
    count_skipped,
    error_statistics,
    error_tables,
    guess_error_cause,
    largest_errors,
    predict_rows,
)
from shardwise.measure.calibrate.published_runs.run_table import INPUT_COLUMNS, RunRow, published_rows, read_rows
from shardwise.values.errors import InputError

HEADER = (
    "id,family,model,layers,d_model,n_heads,d_ff,vocab,gated_mlp,chip,n_devices,seq_len,micro_batch,global_batch,tp,pp,dtype,"
    "step_time_s,tokens_per_s_per_device,quality,dup_group"
)
RUN = "llama,8,1024,8,4096,51200,yes,H100,8,2048,1,8,1,1,bf16"


def rows(tmp_path: Path, *lines: str) -> tuple[RunRow, ...]:
    file = tmp_path / "rows.csv"
    file.write_text("\n".join((HEADER, *lines)) + "\n", encoding="utf-8")
    return read_rows(str(file))


def test_statistics_are_weighted() -> None:
    statistics = error_statistics([(-0.1, 1.0), (0.3, 0.5), (0.3, 0.5), (-0.5, 2.0)])
    assert (statistics.num_rows, statistics.weight, statistics.worst) == (4, 4.0, 0.5)
    assert statistics.mean == pytest.approx((0.1 + 0.3 + 1.0) / 4)
    assert statistics.bias == pytest.approx((-0.1 + 0.3 - 1.0) / 4)
    assert (statistics.median, statistics.p90) == (0.3, 0.5)


def test_duplicates_share_a_weight_and_only_good_quality_counts(tmp_path: Path) -> None:
    runs = [(1, "A", "g"), (2, "A-", "g"), (3, "A", "h"), (4, "B", "i"), (5, "C", "j"), ("", "A", "k")]
    lines = (f"r{i},a,{RUN},{seconds},,{quality},{group}" for i, (seconds, quality, group) in enumerate(runs))
    evaluated = predict_rows(rows(tmp_path, *lines))
    assert [run.weight for run in evaluated[:3]] == [0.5, 0.5, 1.0]
    tables = error_tables(evaluated)
    assert tables["overall"]["all"].num_rows == 3
    assert tables["overall"]["all"].weight == 2.0
    assert tables["quality"].keys() == {"A", "A-"}
    assert tables.keys() == STRATA.keys()
    predicted = evaluated[0].prediction.estimate.step_time_s if evaluated[0].prediction else 0.0
    errors = [predicted / seconds - 1 for seconds in (1, 2, 3)]
    assert tables["overall"]["all"].bias == pytest.approx((errors[0] / 2 + errors[1] / 2 + errors[2]) / 2)


def test_measured_time_comes_from_the_time_or_the_tokens(tmp_path: Path) -> None:
    stated, rate, neither, odd = rows(
        tmp_path, f"a,x,{RUN},2.5,999,A,", f"b,x,{RUN},,1024,A,", f"c,x,{RUN},,,A,", f"d,x,{RUN},-1,soon,A,"
    )
    assert stated.step_time_s == 2.5
    assert rate.step_time_s == 8 * 2048 / (1024 * 8)
    assert neither.step_time_s is None
    assert odd.step_time_s is None
    assert neither.dup_group == repr(neither.inputs)  # rows that say the same are one configuration


def test_memory_is_compared_in_decimal_gigabytes() -> None:
    rows_by_id = {row.id: row for row in published_rows()}
    assert rows_by_id["simumax-b200-001"].peak_memory_gb == pytest.approx(44.7 * 2**30 / 1e9, rel=1e-6)
    assert rows_by_id["bigscience-bloom-a100-020"].peak_memory_gb == 69.0


def test_the_published_rows_all_get_a_prediction_or_a_reason() -> None:
    evaluated = predict_rows(published_rows())
    assert len(evaluated) == 1059
    assert all((run.prediction is None) != (run.skipped is None) for run in evaluated)
    assert len({run.row.id for run in evaluated}) == 1059
    assert all(run.row.source for run in evaluated)
    kinds = count_skipped(evaluated)
    assert sum(count for count, _ in kinds.values()) == sum(run.prediction is None for run in evaluated)
    families = {run.row.family for run in evaluated if run.prediction}
    assert {
        "mosaicml-mpt",
        "bigscience-bloom-a100",
        "dgxc-h100",
        "simumax-b200",
        "maxtext-tpu-v5e",
        "torchtitan",
    } <= families
    largest = list(largest_errors(evaluated, 10))
    assert len({run.row.dup_group for run in largest}) == 10
    assert all(guess_error_cause(run) for run in evaluated if run.prediction and run.error is not None)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 of the columns"),
        (b"name,value\n1,2\n", "0 of the columns"),
        (b"\xff\xfe\x00\x81", "is not text"),
        (b"model,layers,d_model,chip\n\"" + b"x" * 200_000 + b"\"\n", "not CSV"),
    ],
    ids=["empty", "other columns", "binary", "a field without end"],
)  # fmt: skip
def test_files_that_are_not_run_tables_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "rows.csv"
    file.write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_rows(str(file))


def test_a_missing_file_is_named() -> None:
    with pytest.raises(InputError, match=r"cannot read nowhere\.csv"):
        read_rows("nowhere.csv")


def test_rows_may_be_short_long_blank_or_in_another_order(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text(
        "chip,unknown,layers,model,id\nH100,,8\n,,,,\nH100,x,8,llama,last,more,cells\n", encoding="utf-8-sig"
    )
    evaluated = predict_rows(read_rows(str(file)))
    assert [run.row.id for run in evaluated] == ["row 1", "row 2", "last"]
    assert all(run.skipped is not None for run in evaluated)
    assert error_tables(evaluated)["overall"] == {}


def test_no_cell_can_break_a_row() -> None:
    """Cells of published rows are swapped with other rows and nonsense: each row gets a prediction or a reason."""
    draw = random.Random(0)
    sound_rows = [row for row in published_rows() if row.family != "simumax-b200"]
    odd = [
        "0",
        "1",
        "-1",
        "1e9",
        "1e308",
        "nan",
        "inf",
        "yes",
        "½",
        "x" * 300,
        "3.5",
        "999999999",
        "16x16",
        "between 0 slices",
    ]
    changed = []
    for number in range(400):
        cells = dict(draw.choice(sound_rows).inputs)
        for column in draw.sample(INPUT_COLUMNS, 3):
            cells[column] = draw.choice(odd) if draw.random() < 0.6 else draw.choice(sound_rows).cell(column)
        changed.append(RunRow(id=str(number), family="", source="", quality="", dup_group=str(number),
                           inputs=tuple(cells.items()), measured=sound_rows[0].measured))  # fmt: skip
    for run in predict_rows(changed):
        assert (run.prediction is None) != (run.skipped is None)
