"""Runs as TensorBoard and W&B keep them: files by their own writers, exports, broken and hostile ones."""

from __future__ import annotations

import csv
import json
import struct
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from measurement.tracked_of import (
    BATCH_SEQS,
    DEVICES,
    FOLDER,
    GIB,
    LOGGED,
    OF_TENSORBOARD,
    SECONDS,
    SEQ_LEN,
    START_S,
    loss_of,
    tokens_per_s,
)

from shardwise.records.logs.frameworks import FORMATS
from shardwise.records.logs.tensorboard_events import LONGEST_RECORD, TAIL, crc32c, masked_crc32c, read_scalars
from shardwise.records.logs.training_log import (
    ALL_TAGS,
    EVENTS,
    HISTORY,
    TABLE,
    TrainingLog,
    measure_steady_state,
    read_training_log,
)
from shardwise.records.logs.wandb_history import LONGEST_ROW as LONGEST_ROW
from shardwise.records.logs.wandb_history import read_wandb_file
from shardwise.values.errors import InputError

STEPS = list(SECONDS)
FILES = {path.parent.name: path for path in sorted(FOLDER.rglob("*.*")) if path.is_file()}
MEMORY = {"torchtitan": 47.5 * GIB, "megatron": 60e9, "nemo": 60e9, "nanotron": 60e9, "automodel": 47.5 * GIB}
Row = dict[str, object]


def frame_record(data: bytes) -> bytes:
    """A record with its checksums."""
    length = struct.pack("<Q", len(data))
    return length + TAIL.pack(masked_crc32c(length)) + data + TAIL.pack(masked_crc32c(data))


def rows(name: str, more: Callable[[int], Row] = lambda step: {}) -> list[Row]:
    return [{"_step": step, "_timestamp": START_S + 2.5 * step, **LOGGED[name](step), **more(step)} for step in STEPS]


def table(path: Path, lines: Iterable[Row]) -> Path:
    """As `pandas.DataFrame(...).to_csv` writes it: with a column of numbers that has no name."""
    lines = list(lines)
    columns = list(dict.fromkeys(name for line in lines for name in line))
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["", *columns])
        writer.writerows([number, *(line.get(name, "") for name in columns)] for number, line in enumerate(lines))
    return path


def assert_is_of(log: TrainingLog, name: str, medium: str) -> None:
    """Every step has what was logged."""
    assert (log.format.name, log.medium, log.torn, log.by_clock) == (name, medium, 0, False)
    assert [(step.step, step.loss) for step in log.steps] == [(step, loss_of(step)) for step in STEPS]
    for step in log.steps[3:]:
        assert step.step_time_s == (None if name == "automodel" else SECONDS[step.step])
        assert step.tokens_per_s in (None, pytest.approx(tokens_per_s(step.step), rel=1e-7))
    assert (log.memory_bytes or 0) == pytest.approx(MEMORY.get(name, 0), rel=1e-7)
    pace = measure_steady_state(log, DEVICES, SEQ_LEN, BATCH_SEQS * SEQ_LEN).device_s_per_token
    middle = sorted(SECONDS[step] for step in STEPS[3:])[8]
    assert pace == pytest.approx(middle * DEVICES / (BATCH_SEQS * SEQ_LEN), rel=1e-6)


@pytest.mark.parametrize("name", OF_TENSORBOARD)
def test_event_files_as_their_writers_left_them(name: str) -> None:
    assert_is_of(read_training_log([FOLDER / name]), name, EVENTS)
    assert_is_of(read_training_log([FILES[name]]), name, EVENTS)


def test_scalars_that_are_tensors() -> None:
    log = read_training_log([FOLDER / "tensors"])
    assert [(step.loss, step.step_time_s) for step in log.steps] == [(loss_of(step), SECONDS[step]) for step in STEPS]


def test_a_file_of_wandb_that_was_never_uploaded() -> None:
    assert_is_of(read_training_log([FOLDER / "wandb"]), "nanotron", HISTORY)


@pytest.mark.parametrize("name", LOGGED)
def test_an_exported_history(tmp_path: Path, name: str) -> None:
    assert_is_of(read_training_log([table(tmp_path / "history.csv", rows(name))]), name, TABLE)
    lines = tmp_path / "wandb-history.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows(name)))
    assert_is_of(read_training_log([lines]), name, "a log")


def test_an_exported_chart(tmp_path: Path) -> None:
    """What the page of a run exports: the name of the run before that of the tag, and the range of what is between."""
    path = tmp_path / "chart.csv"
    head = '"Step","llama - a - iteration-time","llama - a - iteration-time__MIN","llama - a - iteration-time__MAX"\n'
    path.write_text(head + "".join(f'"{step}","{SECONDS[step]}","1","99"\n' for step in STEPS))
    log = read_training_log([path])
    assert [(step.step, step.step_time_s) for step in log.steps] == list(SECONDS.items())
    assert log.format.name == "megatron"
    path.write_text('"Step","b - iteration-time","llama - a - iteration-time"\n1,2,3\n')
    with pytest.raises(InputError, match=r"chart.csv is of 2 runs \(b, llama - a\); an export of one"):
        read_training_log([path])


def test_the_steps_of_lightning_are_its_own(tmp_path: Path) -> None:
    """Its logger counts calls in _step."""
    lines = [{**row, "_step": 50 * step, "trainer/global_step": step} for step, row in enumerate(rows("nemo"), start=1)]
    assert [step.step for step in read_training_log([table(tmp_path / "history.csv", lines)]).steps] == STEPS


def test_values_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    def broken(step: int) -> Row:
        return {"iteration-time": ["NaN", "Infinity", "-1", "0", ""][step % 5], "lm loss": "NaN"} if step > 10 else {}

    log = read_training_log([table(tmp_path / "history.csv", rows("megatron", broken))])
    assert [step.step_time_s for step in log.steps] == [SECONDS[step] if step <= 10 else None for step in STEPS]
    assert [step.loss for step in log.steps][10:] == [None] * 10


def test_times_by_the_clock_where_no_step_says_its_own(tmp_path: Path) -> None:
    """Megatron-LM logs none without --log-timers-to-tensorboard. Every fifth step is logged, the last one twice."""
    lines = [row for row in rows("megatron", lambda step: {"iteration-time": ""}) if row["_step"] in (5, 10, 15, 20)]
    log = read_training_log([table(tmp_path / "history.csv", [*lines, lines[-1]])])
    assert log.by_clock
    assert [(step.step, step.step_time_s) for step in log.steps] == [(5, None), (10, 2.5), (15, 2.5), (20, 2.5)]
    (step,) = read_training_log([table(tmp_path / "history.csv", lines[:1])]).steps
    assert step.step_time_s is None


def test_a_run_that_was_started_again(tmp_path: Path) -> None:
    """Two event files in one folder, the first of a run that was killed as it wrote."""
    whole = FILES["megatron"].read_bytes()
    (tmp_path / "events.out.tfevents.1.host").write_bytes(whole[: len(whole) * 2 // 3])
    (tmp_path / "events.out.tfevents.2.host").write_bytes(whole)
    log = read_training_log([tmp_path])
    assert ([step.step for step in log.steps], log.torn) == (STEPS, 1)


def test_folders_of_trackers(tmp_path: Path) -> None:
    for name in ("tb/a", "tb/b"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / FILES["megatron"].name).write_bytes(FILES["megatron"].read_bytes())
    (tmp_path / "run-1.wandb").write_bytes(FILES["wandb"].read_bytes())
    with pytest.raises(InputError, match=r"has the files of runs in 2 folders \(.*tb/a, .*tb/b\); one of them is"):
        read_training_log([tmp_path])
    assert len(read_training_log([tmp_path / "tb" / "a"]).steps) == 20
    assert len(read_training_log([tmp_path / "tb" / "a", tmp_path / "tb" / "b"]).steps) == 20


def test_checksums_equal_the_published_values() -> None:
    """RFC 3720, appendix B.4."""
    vectors = {bytes(32): 0x8A9136AA, b"\xff" * 32: 0x62A8AB43, bytes(range(32)): 0x46DD794E, b"": 0}
    assert {data: crc32c(data) for data in vectors} == vectors


READERS = {"megatron": read_scalars, "wandb": read_wandb_file}


@pytest.mark.parametrize("name", READERS)
def test_a_file_that_is_cut_off_has_the_steps_before(tmp_path: Path, name: str) -> None:
    whole, points, path = FILES[name].read_bytes(), READERS[name], tmp_path / FILES[name].name
    full = list(points(FILES[name], ALL_TAGS))
    for length in range(0, len(whole), len(whole) // 150):
        path.write_bytes(whole[:length])
        read_points = [point for point in points(path, ALL_TAGS) if point]
        assert read_points == full[: len(read_points)]
    path.write_bytes(whole[: len(whole) - 5])
    assert list(points(path, ALL_TAGS))[-1] is None
    path.write_bytes(whole[:100])
    with pytest.raises(InputError, match="log: found no step in"):
        read_training_log([path])


@pytest.mark.parametrize("name", READERS)
def test_a_changed_byte_is_found(tmp_path: Path, name: str) -> None:
    whole, points, path = FILES[name].read_bytes(), READERS[name], tmp_path / FILES[name].name
    for at in range(8, len(whole), len(whole) // 150):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        assert is_refused_or_cut(points, path), at


def is_refused_or_cut(points: Callable[..., Iterable[object]], path: Path) -> bool:
    """Whether a file is refused as damaged, or ends within a record: a length may go beyond it."""
    try:
        return None in list(points(path, ALL_TAGS))
    except InputError as error:
        return "is damaged at byte" in str(error)


def scalar(tag: bytes, value: float, step: bytes = b"\x01") -> bytes:
    """An event: its time, its step, and a summary of one value."""
    named = b"\x0a" + bytes([len(tag)]) + tag + b"\x15" + struct.pack("<f", value)
    summary = b"\x0a" + bytes([len(named)]) + named
    return b"\x09" + bytes(8) + b"\x10" + step + b"\x2a" + bytes([len(summary)]) + summary


HUGE = struct.pack("<Q", 2**63)
HOSTILE = {
    "a length beyond all": HUGE + TAIL.pack(masked_crc32c(HUGE)),
    "a length beyond the file": frame_record(scalar(b"lm loss", 1.0))[:30],
    "no message": frame_record(b"lm loss" + b"\xff" * 99), "a long varint": frame_record(b"\x10" + b"\xff" * 20 + b"lm loss"),
    "a field beyond its message": frame_record(b"\x2a\x7flm loss"), "a group": frame_record(b"\x0blm loss"),
    "not a number": frame_record(scalar(b"lm loss", float("nan"))) + frame_record(scalar(b"iteration-time", float("inf"))),
    "a negative step": frame_record(scalar(b"lm loss", 1.0, b"\xff" * 9 + b"\x01")),
    "a late step": frame_record(scalar(b"lm loss", 1.0, b"\xff" * 8 + b"\x01")),
    "another tag": frame_record(scalar(b"lm loss vs samples", 1.0)), "long records": frame_record(bytes(LONGEST_RECORD + 1)) * 3,
}  # fmt: skip


def test_an_event_of_these_tests_is_read(tmp_path: Path) -> None:
    path = tmp_path / "events.out.tfevents.1.host"
    path.write_bytes(HOSTILE["long records"] + frame_record(scalar(b"iteration-time", 2.5)))
    assert [(step.step, step.step_time_s) for step in read_training_log([path]).steps] == [(1, 2.5)]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_event_file_is_refused_in_one_line_and_soon(tmp_path: Path, name: str) -> None:
    path = tmp_path / "events.out.tfevents.1.host"
    path.write_bytes(HOSTILE[name])
    start = time.process_time()
    with pytest.raises(InputError, match=r"log: .*(found no step in|not an event)") as caught:
        read_training_log([path])
    assert "\n" not in str(caught.value)
    assert time.process_time() - start < 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,b,c\n1,2,3\n", r"has the columns a, b, c; one of steps \(.*_step.*scan_history"),
        ("", "has the columns of nothing"),
        ("_step,loss\n1,2\n", "found no step in"),
        ("_step,lm loss\n1,2,3\n", "found no step in"),
        ("_step,lm loss\n" + "9" * (LONGEST_ROW + 5), "a line of more than"),
        ('_step,lm loss\n1,"' + "9" * 200_000, "field larger than field limit"),
        ("_step,lm loss\n1e999,2\nnan,2\n-4,2\n", "found no step in"),
    ],
    ids=["columns", "empty", "tags", "cells", "line", "field", "steps"],
)
def test_invalid_tables_are_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "history.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=words) as caught:
        read_training_log([path])
    assert "\n" not in str(caught.value)


def test_a_row_that_was_cut_off_is_counted(tmp_path: Path) -> None:
    path = table(tmp_path / "history.csv", rows("megatron"))
    path.write_text(path.read_text()[:-60])
    log = read_training_log([path])
    assert (len(log.steps), log.torn) == (19, 1)


def test_a_kind_of_file_after_another(tmp_path: Path) -> None:
    """Event files of a framework and its exported history are of one run; those of two frameworks are not."""
    log = read_training_log([FOLDER / "megatron", table(tmp_path / "history.csv", rows("megatron"))])
    assert len(log.steps) == 20
    with pytest.raises(InputError, match=r"found no step in .*nemo; a step of Megatron-LM, as the file before it"):
        read_training_log([FOLDER / "megatron", FOLDER / "nemo"])


def test_the_documents_name_every_tag_that_is_read() -> None:
    text = (Path(__file__).parents[2] / "docs" / "calibrating.md").read_text(encoding="utf-8")
    assert [tag for log_format in FORMATS.values() for tag in log_format.tags if f"`{tag}`" not in text] == []
