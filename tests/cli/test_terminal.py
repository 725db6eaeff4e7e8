"""What a terminal gets: lines and tables of its width, and a line that says how far a verb is."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli import main
from shardwise.cli.table import table
from shardwise.cli.terminal import SHOWN_AFTER_S, ProgressLine, folded, terminal_width
from shardwise.progress import Progress, silent

ROOT = Path(__file__).parents[2]
HANG_S = 120  # a process that has not ended by then hangs
JOB = ["--batch-tokens", "64Ki", "--seq-len", "4096"]


def on_a_terminal(arguments: Sequence[str], columns: int) -> str:
    """What a verb writes to a terminal that is so wide."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(columns)}
    with os.fdopen(ours, "rb", buffering=0) as reader:
        process = subprocess.Popen(
            [sys.executable, "-m", "shardwise", *arguments], stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL,
            env=environment,
        )  # fmt: skip
        os.close(theirs)
        found = b""
        while True:
            try:
                read = reader.read(4096)
            except OSError:  # the other side was closed
                break
            if not read:
                break
            found += read
        assert process.wait(HANG_S) == 0
    return found.decode().replace("\r\n", "\n")


@pytest.mark.parametrize("columns", [60, 100])
@pytest.mark.parametrize(
    "arguments",
    [
        ["show", "models", "qwen2"],
        ["show", "precisions"],
        ["show", "chips", "h200"],
        ["estimate", "llama-3.2-1b", "h100:8", *JOB, "--layout", "fsdp=8"],
    ],
)
def test_lines_keep_to_the_width_of_a_terminal(
    arguments: list[str], columns: int, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = on_a_terminal(arguments, columns).splitlines()
    assert max(map(len, lines)) <= columns
    assert main(arguments) == 0
    whole = capsys.readouterr().out
    assert max(map(len, whole.splitlines())) > 90  # what is no terminal gets every line whole
    assert Counter("".join(whole.split())) <= Counter("".join("".join(lines).split()))  # nothing is cut


def test_what_programs_read_is_not_folded(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("shardwise.cli.answer.terminal_width", lambda: 40)
    product = ["matmul", "A[I_X, J] * B[J, K] -> C[I_X, K]", "--mesh", "X=2", "--size", "I=4,J=4,K=4"]
    wide = {}
    for more in ([], ["--json"], ["--emit", "jax"]):
        assert main([*product, *more]) == 0
        wide[" ".join(more)] = max(map(len, capsys.readouterr().out.splitlines())) > 40
    assert wide == {"": False, "--json": True, "--emit jax": True}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_width_is_that_of_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "72")
    assert terminal_width(Terminal()) == 72
    assert terminal_width(io.StringIO()) is None
    monkeypatch.setenv("COLUMNS", "12")  # nothing can be folded into that
    assert terminal_width(Terminal()) is None


def test_a_long_line_goes_on_below_its_last_column_or_indented() -> None:
    assert folded("a  bb  one two three four", 16) == "a  bb  one two\n       three\n       four"
    assert folded("  note: one two three four five", 20) == "  note: one two\n      three four\n      five"
    assert folded("short\n\nlines", 20) == "short\n\nlines"
    assert folded("any line at all", None) == "any line at all"


ROWS: list[tuple[str, ...]] = [
    ("name", "n", "size", "text"),
    ("first", "1", "20", "some words that are long enough to be folded"),
]


@pytest.mark.parametrize("width", range(14, 70))
def test_a_table_keeps_every_cell_in_any_width(width: int) -> None:
    lines = table(ROWS, right=(1, 2), width=width).splitlines()
    assert {word for row in ROWS for cell in row for word in cell.split()} == {
        w for line in lines for w in line.split()
    }
    assert max(map(len, lines)) <= max(width, len("first  enough"))


def test_a_table_of_numbers_comes_in_parts_with_the_first_column_in_each() -> None:
    rows = [("model", "layers", "heads", "width"), ("gpt-2", "12", "12", "768")]
    assert (
        table(rows, right=(1, 2, 3), width=22)
        == "model  layers  heads\ngpt-2      12     12\n\nmodel  width\ngpt-2    768"
    )


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_line_says_what_is_being_done_and_for_how_long() -> None:
    clock = Clock()
    line = ProgressLine("plan", Terminal(), clock)
    progress: Progress = line
    progress("layouts priced", 1, 4)
    assert line.line() == ""  # not at once
    clock.now = SHOWN_AFTER_S + 1.5
    assert line.line() == "plan: layouts priced 25% (1 of 4), 2 s"
    progress("runners-up")
    assert line.line() == "plan: runners-up, 2 s"
    assert silent("anything", 1, 2) is None  # type: ignore[func-returns-value]


class Shown(Terminal):
    """A terminal that says when something was written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def write(self, text: str) -> int:
        self.written.set()
        return super().write(text)


def test_the_line_is_shown_while_nothing_is_reported_and_taken_away_at_the_end() -> None:
    clock, stream = Clock(), Shown()
    with ProgressLine("plan", stream, clock):
        clock.now = 3.0
        assert stream.written.wait(HANG_S)
    assert stream.getvalue().startswith("\r\x1b[Kplan, 3 s")
    assert stream.getvalue().endswith("\r\x1b[K")


def test_what_is_no_terminal_gets_no_line() -> None:
    for stream in (io.StringIO(), None):
        clock = Clock()
        with ProgressLine("plan", stream, clock) as line:
            clock.now = 9.0
        assert not line.thread.is_alive()
        assert not line.shown
        assert stream is None or stream.getvalue() == ""


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_ctrl_c_ends_a_verb_at_once(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*given: Any, **named: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shardwise.search.plan.search", stopped)
    assert main(["plan", "llama-3.2-1b", "h100:8", *JOB, *words]) == 130
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        '{"schema": "shardwise.error/1", "error": {"problems": ["stopped"], "exit_code": 130}}\n'
        if words
        else "stopped\n"
    )


LONG = {
    "plan": ["plan", "llama-3.2-1b", "h100:8", *JOB],
    "several": ["plan", "llama-3.2-1b", "h100:8", "h200:8", *JOB],
    "deadline": [
        "plan",
        "gpt-2",
        "h100:8",
        "--batch-tokens",
        "64Ki",
        "--seq-len",
        "1024",
        "--tokens",
        "1T",
        "--deadline",
        "4d",  # which more devices of the kind would do: they are searched for
    ],
    "estimate": ["estimate", "llama-3-8b", "h100:8", *JOB, "--layout", "dp=8"],
    "explain": ["explain", "{folder}/plan.json"],
    "validate": ["validate", "--source", "internevo", "--chip", "a100"],
    "calibrate": ["calibrate", "h100:8", "--runs", str(ROOT / "examples" / "calibrate" / "runs.csv")],
    "tokenize": ["tokenize", "--python-library", "100kB", "--vocab-size", "300", "--out", "{folder}/data"],
    "matmul": [
        "matmul",
        "A[I_X, J] * B[J, K] -> C[I_X, K]",
        "--mesh",
        "X=2",
        "--size",
        "I=4,J=4,K=4",
        "--run",
        "numpy",
    ],
}
SAID = {
    "plan": "layouts priced", "several": "h200:8: layouts priced", "deadline": "h100:", "estimate": "layouts priced",
    "explain": "layouts priced", "validate": "runs predicted", "calibrate": "fitting constants to 3 runs",
    "tokenize": "documents encoded", "matmul": "running with numpy",
}  # fmt: skip


@pytest.mark.parametrize("name", LONG)
def test_every_verb_that_may_take_long_says_what_it_does(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines: list[ProgressLine] = []
    told: list[str] = []

    class Kept(ProgressLine):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            lines.append(self)

        def __call__(self, what: str, done: int = 0, total: int = 0) -> None:
            told.append(what)

    layout = ["--layout", "dp=8 zero_stage=0"]  # which does not fit: what would is searched for
    assert main(["estimate", "llama-3-8b", "h100:8", *JOB, *layout, "--json"]) == 0
    (tmp_path / "plan.json").write_text(capsys.readouterr().out, encoding="utf-8")
    monkeypatch.setattr("shardwise.cli.answer.ProgressLine", Kept)
    assert main([word.format(folder=tmp_path) for word in LONG[name]]) == (3 if name == "deadline" else 0)
    assert [line.verb for line in lines] == [LONG[name][0]]
    assert any(SAID[name] in what for what in told), told
