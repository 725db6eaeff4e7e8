"""Records of steps, their rates, the log that keeps them, and the folder of a run."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.records.run_folder import RunFolder, RunInputs
from shardwise.records.run_summary import DataSummary, SourceUsage, summarise_run, summary_text
from shardwise.records.step_log import (
    MEASURED_TERMS,
    LogWriter,
    MfuFormula,
    StepRecord,
    format_step_line,
    read_log,
    truncate_log,
)
from shardwise.values.errors import InputError

RATES = MfuFormula(
    num_devices=4, chip="chip", flops_per_token=6e9, hardware_ratio=4 / 3, peak_format="bf16", peak_flops_per_s=1e15
)


def record(step: int = 1, **changes: object) -> StepRecord:
    first = StepRecord(
        step=step, loss=10.0 / step, grad_norm=1.5, learning_rate=1e-3, num_tokens=2**20, num_targets=2**20 - 7,
        step_time_s=4.0, seconds={"forward": 1.0, "fsdp": 0.25, "data": 0.5, "other": 0.125},
    )  # fmt: skip
    return replace(first, **changes)


def test_rates_are_those_of_palm() -> None:
    step_record = record()
    assert RATES.tokens_per_s(step_record) == 2**18
    assert RATES.mfu(step_record) == pytest.approx(6e9 * 2**18 / (4 * 1e15))
    assert RATES.hfu(step_record) == pytest.approx(4 / 3 * 6e9 * 2**18 / (4 * 1e15))
    assert RATES.formula() == (
        "MFU = 6 GFLOP/token x tokens/s / (4 x 1 PFLOP/s), the dense bf16 peak of chip; HFU = 1.333 x MFU"
    )


def test_without_a_sourced_peak_there_is_no_mfu() -> None:
    rates = replace(RATES, peak_flops_per_s=None)
    assert (rates.mfu(record()), rates.hfu(record())) == (None, None)
    assert rates.formula() == "MFU n/a: chip has no sourced bf16 peak"
    assert not {"mfu(%)", "hfu(%)"} & format_step_line(record(), rates, {}).keys()
    assert "tflops" in format_step_line(record(), rates, {})


def test_a_record_has_terms_of_the_estimate_and_times_that_can_be() -> None:
    assert {"forward", "fsdp", "bubble", "data", "other"} <= set(MEASURED_TERMS)
    with pytest.raises(InputError, match=r"seconds of 'sleep'; one of forward, .*, data, other is required"):
        record(seconds={"sleep": 1.0})
    for wrong in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(InputError, match="a time above 0 is required"):
            record(step_time_s=wrong)
    with pytest.raises(InputError, match="step 0; at least 1"):
        replace(record(), step=0)


@pytest.mark.parametrize(
    "step_record",
    [
        record(),
        record(auxiliary_loss=0.25, expert_imbalance=1.5),
        record(loss=math.inf, grad_norm=-math.inf),
        record(seconds={}),
    ],
)
def test_logged_records_are_read_back_equal(tmp_path: Path, step_record: StepRecord) -> None:
    path = tmp_path / "log.jsonl"
    with LogWriter(path) as log:
        log.write({"schema": "shardwise.log/1"})
        log.write(format_step_line(step_record, RATES, {"memory/max_rss(GiB)": 1.0}))
        assert len(path.read_text().splitlines()) == 2, "a line is there as soon as it is written"
        log.write({"step": 1, "validation_metrics/loss": 9.5})
    run_log = read_log(path)
    assert run_log.steps == (step_record,)
    assert run_log.validation == {1: 9.5}
    assert len(run_log.headers) == 1


def test_a_loss_that_is_no_number_is_valid_json_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with LogWriter(path) as log:
        log.write(format_step_line(record(loss=math.nan), RATES, {}))
    assert math.isnan(read_log(path).steps[0].loss)
    json.loads(path.read_text(), parse_constant=lambda text: pytest.fail(f"{text} is not JSON"))


def write(path: Path, steps: int) -> None:
    with LogWriter(path) as log:
        log.write({"schema": "shardwise.log/1"})
        for step in range(1, steps + 1):
            log.write(format_step_line(record(step), RATES, {}))
            log.write({"step": step, "validation_metrics/loss": 1.0})


def test_a_torn_last_line_is_not_read_and_steps_are_cut(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    write(path, 5)
    whole = path.read_bytes()
    for torn in range(1, 40):  # wherever the run was killed
        path.write_bytes(whole[:-torn])
        assert len(read_log(path).steps) == 5 if torn < len(whole.splitlines()[-1]) else 4
    path.write_bytes(whole + b'{"step": 6, "lo\xc3')
    truncate_log(path, 3)
    run_log = read_log(path)
    assert [logged.step for logged in run_log.steps] == [1, 2, 3]
    assert list(run_log.validation) == [1, 2, 3]
    assert len(run_log.headers) == 1
    with LogWriter(path) as log:
        log.write(format_step_line(record(4), RATES, {}))
    assert [logged.step for logged in read_log(path).steps] == [1, 2, 3, 4]


def test_damage_before_the_last_line_is_reported_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    write(path, 2)
    for damage in ("{", "[1]", '{"loss": 1}'):
        path.write_text('{"schema": "shardwise.log/1"}\n' + damage + "\n" + '{"schema": "x"}\n')
        with pytest.raises(InputError, match=r"line 2: .*a log that a run wrote is required"):
            read_log(path)
    with pytest.raises(InputError, match="none: cannot read"):
        read_log(tmp_path / "none")


def test_the_summary_is_of_the_whole_run(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with LogWriter(path) as log:
        for step, seconds in enumerate((9.0, 2.0, 1.0), start=1):
            log.write(format_step_line(record(step, step_time_s=seconds), RATES, {}))
    data = DataSummary(5.0, None, {"data": SourceUsage(1.0, 0.5, None)})
    summary = summarise_run(read_log(path), RATES, data, log_path="log.jsonl", planned=(1e6, 0.5))
    assert (summary["steps"], summary["first_loss"], summary["last_loss"]) == (3, 10.0, 10.0 / 3)
    assert (summary["step_time_s"], summary["tokens_per_s"], summary["seconds"]) == (2.0, 2**19, 12.0)
    text = summary_text(summary)
    assert "held out" not in text
    assert "held out   4.2500 nats per token, 0.7500 below how" in summary_text(summary | {"held_out_loss": 4.25})
    assert "held out   5.2500 nats per token, 0.2500 above how" in summary_text(summary | {"held_out_loss": 5.25})
    assert "3 steps, 3,145,728 tokens in 12 s" in text
    assert summary["sources"] == {"data": {"share": 1.0, "epochs": 0.5, "held_out_loss": None}}
    code = {"share": 0.3, "epochs": 1.25, "held_out_loss": 4.5}
    lines = summary_text(summary | {"sources": summary["sources"] | {"code": code}}).splitlines()
    assert "  code       30% of the sequences, 1.25 epochs, held out 4.5000 nats per token" in lines
    text = summary_text(summary | {"held_out_loss": "nan", "mfu": None})
    assert "nan nats per token, nan below how often each token comes alone: 5.0000 nats per token" in text
    assert "MFU" not in text


def test_the_summary_has_the_checkpoints_beside_the_plan(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with LogWriter(path) as log:
        for step, write_s, stall_s in ((1, 0.5, 0.25), (2, 0.75, 0.125), (3, 2.0, 0.625)):
            log.write(format_step_line(record(step, step_time_s=1.0), RATES, {}))
            log.write(
                {"event": "checkpoint", "step": step, "write_s": write_s, "stall_s": stall_s, "num_bytes": 3_000_000}
            )
    data = DataSummary(5.0, None, {})
    summary = summarise_run(read_log(path), RATES, data, log_path="log.jsonl", planned=(2.5e6, 0.5))
    assert summary["checkpoints"] == {
        "number": 3, "num_bytes": 3e6, "write_s": 0.75, "stall_s": 0.25, "stalled": 0.25, "planned_bytes": 2.5e6,
        "planned_write_s": 0.5,
    }  # fmt: skip
    assert (
        "saved      3 checkpoints of 3 MB, planned 2.5 MB; 750 ms to write, planned 500 ms; training waited 250 ms for each, 25% "
        "of its time"
    ) in summary_text(summary)


def test_a_folder_is_read_back_and_refused_where_there_is_none(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "runs" / "a")
    of = RunInputs(plan={"schema": "plan"}, recipe={"steps": 3}, data_fingerprint="ab", versions={"shardwise": "1"})
    folder.require_output_folder(resume=False, force=False)
    assert not folder.path.exists(), "a check touches nothing"
    folder.create(of)
    assert folder.read_inputs() == of
    folder.require_output_folder(resume=True, force=False)
    folder.require_output_folder(resume=False, force=True)
    with pytest.raises(InputError, match="holds a run"):
        folder.require_output_folder(resume=False, force=False)
    (folder.path / "recipe.json").write_text("{")
    with pytest.raises(InputError, match=r"recipe\.json is not JSON"):
        folder.read_inputs()
    with pytest.raises(InputError, match="holds no run"):
        RunFolder(tmp_path / "runs").require_output_folder(resume=True, force=False)
