"""Training logs of each framework, by its own format strings; whose a log is; broken and hostile ones."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
from measurement.logs_of import (
    automodel,
    maxtext,
    megatron,
    megatron_memory,
    nanotron,
    nemo,
    torchtitan,
    torchtitan_validation,
    transformers,
)

from shardwise.records.logs.frameworks import FORMATS
from shardwise.records.logs.logged_steps import LoggedStep
from shardwise.records.logs.training_log import (
    BLOCK_BYTES,
    LONGEST_LINE,
    MOST_STEPS,
    TrainingLog,
    read_lines,
    read_training_log,
)
from shardwise.records.step_log import INSPECTED, MfuFormula, StepRecord, format_step_line
from shardwise.values.errors import InputError

GIB, MIB = 2**30, 2**20


def write_log(folder: Path, lines: Iterable[str], name: str = "train.log", end: str = "\n") -> Path:
    path = folder / name
    path.write_text(end.join(lines) + end, encoding="utf-8", newline="")
    return path


def read(folder: Path, *lines: str) -> TrainingLog:
    return read_training_log([write_log(folder, lines)])


def test_torchtitan_log_is_read(tmp_path: Path) -> None:
    log = read(
        tmp_path, "a banner", torchtitan(1, 2345.6, 12.25), torchtitan_validation(5), torchtitan(10, 6500.2, mfu=None)
    )
    assert log.format.name == "torchtitan"
    assert log.steps[0] == LoggedStep(
        step=1, tokens_per_s=2346, loss=12.25, tflops=1376.2, mfu=0.3804, memory_bytes=47.31 * GIB
    )  # fmt: skip
    assert (log.steps[1].tokens_per_s, log.steps[1].mfu, len(log.steps), log.torn) == (6500, None, 2, 0)


def test_ranks_in_front_of_the_last_stage_print_no_loss(tmp_path: Path) -> None:
    (step,) = read(tmp_path, torchtitan(10, 6500, -1.0, memory=60.0), torchtitan(10, 6500, 3.5, memory=50.0)).steps
    assert (step.loss, step.memory_bytes) == (3.5, 60.0 * GIB)


def test_megatron_log_is_read(tmp_path: Path) -> None:
    log = read(
        tmp_path,
        megatron(10, 1780.25, 9.5),
        megatron_memory(0, 63020.0),
        megatron_memory(3, 63500.5),
        megatron(20, 1700),
    )
    assert log.format.name == "megatron"
    assert log.steps[0] == LoggedStep(step=10, step_time_s=1.7802, tflops=498.2, loss=9.5, batch_seqs=128)
    assert log.memory_bytes == 63500.5 * MIB
    assert read(tmp_path, megatron(10, 1780.0, throughput=False)).steps[0].tflops is None


@pytest.mark.parametrize("name", ["elapsed_time_per_iteration_ms", "time_per_iteration_ms"])
def test_nanotron_log_is_read(tmp_path: Path, name: str) -> None:
    log = read(
        tmp_path,
        nanotron(3, 1232.4, 850_812.3, time=name),
        " Memory usage: 5.00MiB. Peak allocated 6.00MiB. Peak reserved: 61234.50MiB",
    )
    assert log.format.name == "nanotron"
    assert log.steps[0] == LoggedStep(
        step=3, step_time_s=pytest.approx(1.23), tokens_per_s=pytest.approx(106e3), loss=pytest.approx(7.12),
        tflops=pytest.approx(346), memory_bytes=pytest.approx(60.2e9),
    )  # fmt: skip
    assert log.memory_bytes == 61234.5 * MIB


def test_nemo_log_is_read(tmp_path: Path) -> None:
    log = read(tmp_path, nemo(0, 30.0), nemo(7, 8.7684, 11.25, memory=64286097408), nemo(8, 8.5))
    assert log.format.name == "nemo"
    assert log.steps[1] == LoggedStep(
        step=7, step_time_s=8.768, loss=11.25, tflops=865.7, batch_seqs=128, memory_bytes=64286097408
    )
    assert (log.steps[0].step_time_s, log.memory_bytes, log.torn) == (30.0, 64286097408, 0)


def test_automodel_log_is_read(tmp_path: Path) -> None:
    """The lines of its training.jsonl: what is held is what is allocated."""
    log = read(tmp_path, automodel(7, 3276.75), automodel(8, 3276.5))
    assert (log.format.name, log.format.memory_kind) == ("automodel", "allocated")
    assert log.steps[0] == LoggedStep(
        step=7, tokens_per_s=3276.75, batch_tokens=1 << 20, loss=8.0, mfu=0.405, memory_bytes=47.5 * GIB
    )


def test_the_summary_of_transformers(tmp_path: Path) -> None:
    """Numbers of a real run of 8 steps on two processes; releases before 5 printed them without quotes."""
    lines = transformers(2.606, 8, 64)
    for text in ("\n".join(lines), "\n".join(lines).replace("'2.606'", "2.606").replace("'3.07'", "3.07")):
        log = read(tmp_path, text)
        assert log.format.name == "transformers"
        (step,) = log.steps
        assert (step.step, step.step_time_s, step.loss) == (8, pytest.approx(2.606 / 8), 5.555)
    assert read(tmp_path, *lines, "{'train_runtime': '2.6', 'train_steps_per_second': '0'}").torn == 1


def test_maxtext_log_is_read(tmp_path: Path) -> None:
    memory = f"Total estimated memory size: {29.4:.1f} GB, estimated output size: {11.0:.1f} GB, "
    log = read(tmp_path, memory, maxtext(0, 9.0, 1, ramp=True), maxtext(3, 5.1234, 3198.125, 7.25))
    assert log.format.name == "maxtext"
    assert (log.steps[0].step_time_s, log.steps[0].loss) == (None, 8.0)  # of a smaller batch
    assert log.steps[1] == LoggedStep(step=3, step_time_s=5.123, tokens_per_s=3198.125, tflops=412.346, loss=7.25)
    assert log.memory_bytes == pytest.approx(29.4 * GIB)


def test_the_metrics_file_of_maxtext(tmp_path: Path) -> None:
    """MaxText e591f30c, metric_logger.py, write_metrics_locally."""
    line = {
        "learning/loss": 7.5, "perf/step_time_seconds": 2.5, "perf/per_device_tflops_per_sec": 400.5,
        "perf/per_device_tokens_per_sec": 3276.8, "step": 7.0, "run_name": "a",
    }  # fmt: skip
    (step,) = read(tmp_path, json.dumps(line)).steps
    assert step == LoggedStep(step=7, step_time_s=2.5, tokens_per_s=3276.8, tflops=400.5, loss=7.5)


def own_line(step: int, seconds: float, **more: object) -> str:
    record = StepRecord(
        step=step, loss=7.0, grad_norm=1.0, learning_rate=1e-3, num_tokens=4096, num_targets=4096, step_time_s=seconds
    )
    rates = MfuFormula(
        num_devices=2, chip="a", flops_per_token=1e6, hardware_ratio=1.1, peak_format="fp32", peak_flops_per_s=1e10
    )
    return json.dumps(format_step_line(record, rates, more))


def test_log_of_our_trainer_is_read(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    lines = ['{"schema": "shardwise.log/1"}', own_line(1, 0.5), own_line(2, 9.0, **{INSPECTED: True})]
    write_log(tmp_path / "run", [*lines, '{"step": 2, "validation_metrics/loss": 6.5}'], "log.jsonl")
    log = read_training_log([tmp_path / "run"])  # the folder of a run
    assert log.format.name == "shardwise"
    assert log.steps[0] == LoggedStep(
        step=1, step_time_s=0.5, tokens_per_s=4096.0, loss=7.0, tflops=pytest.approx(0.004096), mfu=pytest.approx(0.4096),
        batch_tokens=4096,
    )  # fmt: skip
    assert (log.steps[1].step_time_s, log.steps[1].loss, log.torn) == (None, 7.0, 0)  # one that was watched


CUT = {
    "torchtitan": torchtitan(20, 6543), "megatron": megatron(20, 1780.5), "nanotron": nanotron(20, 1230, 850e3),
    "maxtext": maxtext(20, 5.123, 3198.125), "transformers": transformers(2.606, 8, 64)[1],
    "shardwise": own_line(20, 0.512345), "nemo": nemo(20, 8.7684),
    "automodel": automodel(20, 3276.75),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_a_line_that_was_cut_off_is_never_another_number(tmp_path: Path, name: str) -> None:
    whole = CUT[name]
    (full,) = read(tmp_path, whole).steps
    for length in range(len(whole)):
        path = write_log(tmp_path, [whole.replace("20", "10", 1) if whole[0] == "{" else whole, whole[:length]])
        for step in read_training_log([path]).steps:
            if step.step == 20:
                assert step.step_time_s in (None, full.step_time_s)
                assert step.tokens_per_s in (None, full.tokens_per_s)


def test_torn_lines_are_counted(tmp_path: Path) -> None:
    whole = megatron(20, 1780.0)
    log = read(tmp_path, megatron(10, 1780.0), whole[: whole.index("1780") + 2], megatron(30, 1780.0))
    assert ([step.step for step in log.steps], log.torn) == ([10, 30], 1)


def test_lines_of_ranks_that_ran_into_each_other(tmp_path: Path) -> None:
    log = read(
        tmp_path, torchtitan(10, 6500) + torchtitan(20, 9999), torchtitan(30, 6400)[:150] + torchtitan(30, 6400)[100:]
    )
    assert [(step.step, step.tokens_per_s) for step in log.steps] == [(10, 6500.0), (30, 6400.0)]


def test_steps_of_several_ranks_and_of_a_restart_count_once(tmp_path: Path) -> None:
    log = read(tmp_path, *(torchtitan(step, 6000 + step) for step in (10, 10, 20, 30, 20, 30, 40)))
    assert [step.step for step in log.steps] == [10, 20, 30, 40]
    again = read_training_log(
        [write_log(tmp_path, [torchtitan(10, 6000)], "a"), write_log(tmp_path, [torchtitan(20, 6001)], "b")]
    )
    assert [step.step for step in again.steps] == [10, 20]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_any_line_ending_is_read(tmp_path: Path, end: str) -> None:
    bar = "\rloading:  50%|#####     |" * 3
    path = write_log(tmp_path, [bar, torchtitan(10, 6500), torchtitan(20, 6500)], end=end)
    assert len(read_training_log([path]).steps) == 2


@pytest.mark.parametrize("escape", ["^[[31m", "#033[31m", "\\x1b[31m", "\\u001b[0;31m"])
def test_colours_as_pagers_and_daemons_write_them(tmp_path: Path, escape: str) -> None:
    (step,) = read(tmp_path, torchtitan(10, 6500).replace("\033[34m", escape)).steps
    assert step.tokens_per_s == 6500


HOSTILE = {
    "nothing": b"", "binary": bytes(range(256)) * 999, "no lines": b"x" * (3 * BLOCK_BYTES),
    "words": b"tps: tps: step: loss:\n" * 2000, "zero": megatron(1, 0.0).encode(),
    "long digits": b"step: " + b"9" * 60000 + b" loss: 1 tps: " + b"9" * 4000,
    "nested": b'{"time_metrics/end_to_end(s)": ' + b"[" * 60000,
    "nan": torchtitan(1, 1).replace("tps: 1 ", "tps: nan ").encode(),
    "fields": b"memory: 1" * 7000 + b"tps: ", "letters": b"tokens_per_sec_per_gpu:" + b"a" * 60000,
    "dots": b"iteration: 1 / 2 | tokens_per_sec_per_gpu: 1.2.3 | time_per_iteration_ms: ..e9 |",
    "not a number": b'{"step": null, "time_metrics/end_to_end(s)": "x"}',
    "huge": b'{"step": 1e999, "time_metrics/end_to_end(s)": 1e999}',
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_without_a_step_is_refused_in_one_line_and_soon(tmp_path: Path, name: str) -> None:
    path = tmp_path / "train.log"
    path.write_bytes(HOSTILE[name])
    start = time.process_time()
    with pytest.raises(InputError, match=r"log: found no step in .*a log of torchtitan, Megatron-LM, NeMo"):
        read_training_log([path])
    assert time.process_time() - start < 5


def test_other_invalid_input_is_refused(tmp_path: Path) -> None:
    titan_log, megatron_log = write_log(tmp_path, [torchtitan(1, 2)], "a"), write_log(tmp_path, [megatron(1, 2)], "b")
    for paths, words in (
        ([], "none given"), ([tmp_path / "missing.log"], "cannot read .*missing.log"), ([tmp_path], "a folder without log.jsonl"),
        ([titan_log, megatron_log], "found no step in .*b; a step of torchtitan"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=words):
            read_training_log(paths)


def test_a_large_log_is_read_line_by_line(tmp_path: Path) -> None:
    noise, path = b"y" * 999 + b"\n", tmp_path / "train.log"
    path.write_bytes(noise * 20_000 + torchtitan(10, 6500).encode() + b"\n" + b"z" * (4 * BLOCK_BYTES) + b"\n")
    assert max(map(len, read_lines(path))) <= BLOCK_BYTES + LONGEST_LINE
    assert len(read_training_log([path]).steps) == 1


def test_a_pipe_is_read(tmp_path: Path) -> None:
    """As of `shardwise mfu <(zcat train.log.gz)`."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_text(torchtitan(10, 6500) + "\n" + torchtitan(20, 6500)))
    writer.start()
    assert len(read_training_log([pipe]).steps) == 2
    writer.join()


def test_the_last_steps_of_too_many_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MOST_STEPS >= 100_000
    monkeypatch.setattr("shardwise.records.logs.training_log.MOST_STEPS", 10)
    log = read(tmp_path, *(torchtitan(step, 6500, 9 - step / 100) for step in range(1, 31)))
    assert [step.step for step in log.steps] == list(range(21, 31))
    assert (log.first.step, log.first.loss) == (1, 8.99)


def test_formats_are_told_apart(tmp_path: Path) -> None:
    """A line of one framework is never taken for another's, and neither are its tags."""
    assert CUT.keys() == FORMATS.keys()
    for name, line in CUT.items():
        assert [log_format.name for log_format in FORMATS.values() if log_format.has_step(line.encode())] == [name] * (
            line[0] != "{"
        )
        assert read(tmp_path, line).format.name == name
    without_tokens = {name: value for name, value in json.loads(CUT["shardwise"]).items() if name != "num_tokens"}
    assert read(tmp_path, json.dumps(without_tokens)).format.name == "torchtitan"  # which has the other names too
