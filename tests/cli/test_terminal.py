"""Output on a terminal, with its width and colours; output to a pipe; and the progress line of a verb."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from shardwise.present.charts.palette import TERM_COLOURS
from shardwise.present.command_line import main
from shardwise.present.rendering.plain_text import render_block
from shardwise.present.rendering.report import Preformatted, Row, Section, ShareBar, Status, Table
from shardwise.present.rendering.terminal import PLAIN_TERMINALS, open_console, render_terminal, split_columns
from shardwise.present.run_and_print import ProgressLine
from shardwise.values.progress import Progress, ignore_progress

ROOT = Path(__file__).parents[2]
HANG_S = 120  # a process that has not ended by then hangs
JOB = ["--batch-tokens", "64Ki", "--seq-len", "4096"]
ESTIMATE = ["estimate", "llama-3.2-1b", "h100:8", *JOB, "--layout", "fsdp=8"]
CODES = re.compile(r"\x1b\[[\d;?]*[a-zA-Z]")  # of colours and of the cursor
COLOUR = re.compile(r"\x1b\[(?:\d;)?[34]8;|\x1b\[(?:\d;)?3[0-7]m")
# As if it were not installed.
WITHOUT_RICH = (
    "import sys; sys.modules['rich'] = None; from shardwise.present.command_line import main; sys.exit(main())"
)


def run_on_terminal(arguments: Sequence[str], columns: int, **environment: str) -> str:
    """Return the output of a verb on a terminal of this width."""
    controller, terminal = pty.openpty()
    usual = {"COLUMNS": str(columns), "TERM": "xterm-256color", "COLORTERM": "truecolor"}
    with os.fdopen(controller, "rb", buffering=0) as reader:
        process = subprocess.Popen(
            [sys.executable, "-m", "shardwise", *arguments], stdin=terminal, stdout=terminal, stderr=subprocess.DEVNULL,
            env={**os.environ, **usual, **environment},
        )  # fmt: skip
        os.close(terminal)
        output = b""
        while True:
            try:
                read = reader.read(4096)
            except OSError:  # the other side was closed
                break
            if not read:
                break
            output += read
        assert process.wait(HANG_S) == 0
    return output.decode().replace("\r\n", "\n")


@cache
def run_in_pipe(*arguments: str, rich: bool) -> bytes:
    """Return the output of a verb to a pipe."""
    program = ["-m", "shardwise"] if rich else ["-c", WITHOUT_RICH]
    return subprocess.run([sys.executable, *program, *arguments], capture_output=True, check=True).stdout


SHOWN = [
    ["show", "models", "qwen2"],
    ["show", "precisions"],
    ["show", "chips", "h200"],
    [*ESTIMATE, "-v"],
    ["roofline", "llama-3.2-1b", "T=4096", "h100"],
]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("columns", [60, 100])
@pytest.mark.parametrize("arguments", SHOWN)
def test_lines_keep_to_the_width_of_a_terminal(
    arguments: list[str], columns: int, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = CODES.sub("", run_on_terminal(arguments, columns)).replace("█", "#").splitlines()
    assert max(map(len, lines)) <= columns
    assert main(arguments) == 0
    whole = capsys.readouterr().out
    assert max(map(len, whole.splitlines())) > 90  # what is no terminal gets every line whole
    assert Counter("".join(whole.split())) <= Counter("".join("".join(lines).split()))  # nothing is cut


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    "arguments", [*SHOWN, ["matmul", "A[I_X, J] -> B[I, J]", "--mesh", "X=2", "--size", "I=4,J=4"]]
)
def test_a_pipe_gets_the_same_bytes_with_rich_and_without(arguments: list[str]) -> None:
    text = run_in_pipe(*arguments, rich=True)
    assert text == run_in_pipe(*arguments, rich=False)
    assert b"\x1b" not in text


@pytest.mark.parametrize("term", PLAIN_TERMINALS)
def test_on_the_plainest_terminals_the_text_is_that_of_a_pipe(term: str) -> None:
    assert run_on_terminal(ESTIMATE, 60, TERM=term) == run_in_pipe(*ESTIMATE, rich=False).decode()


def test_colours_are_left_out_where_they_are_not_wanted() -> None:
    """On a terminal that does not say what colour its page has, it is taken to be dark."""
    usual, without = (run_on_terminal([*ESTIMATE, "-v"], 100, COLORFGBG="", **more) for more in ({}, {"NO_COLOR": "1"}))
    assert COLOUR.search(usual)
    assert not COLOUR.search(without)
    assert CODES.sub("", usual) == CODES.sub("", without)
    has_the_colours_of_pictures(usual, "dark")


@pytest.mark.parametrize(("page", "theme"), [("15;0", "dark"), ("0;15", "light")])
def test_a_term_has_the_colour_that_it_has_in_pictures(page: str, theme: str) -> None:
    has_the_colours_of_pictures(run_on_terminal([*ESTIMATE, "-v"], 100, COLORFGBG=page), theme)


def has_the_colours_of_pictures(text: str, theme: str) -> None:
    for term in ("forward", "backward", "fsdp", "parameters", "activations", "logits"):
        line = next(line for line in text.splitlines() if CODES.sub("", line).startswith(f"  {term} "))
        red, green, blue = (int(getattr(TERM_COLOURS[term], theme)[i : i + 2], 16) for i in (1, 3, 5))
        assert f"\x1b[38;2;{red};{green};{blue}m█" in line


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def console(monkeypatch: pytest.MonkeyPatch, columns: int) -> Any:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    return open_console(Terminal())


def test_a_pipe_has_no_console(monkeypatch: pytest.MonkeyPatch) -> None:
    assert console(monkeypatch, 72).width == 72
    assert open_console(io.StringIO()) is None
    assert open_console(None) is None


def test_a_report_is_folded_below_where_its_lines_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    drawing = Preformatted(lambda width: [f"{width} columns"])
    report = [Section(["  one two three four", drawing], title="head"), Section([Status("  bad [b] news", "bad")])]
    text = CODES.sub("", render_terminal(report, console(monkeypatch, 12)))
    assert [line.rstrip() for line in text.splitlines()] == [
        "head", "  one two", "  three four", "12 columns", "", "  bad [b]", "  news",
    ]  # fmt: skip


ROWS: tuple[Row, ...] = (
    ("name", "n", "size", "bar", "text"),
    ("first", "1", "20", ShareBar("##+-", "tp"), "some words that are long enough to be folded"),
)


@pytest.mark.parametrize("width", range(18, 80))
def test_a_table_keeps_every_cell_in_any_width(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(rows=ROWS, right=(1, 2))
    lines = CODES.sub("", render_terminal([Section([table])], console(monkeypatch, width))).splitlines()
    assert set(render_block(table).split()) == {
        word.replace("█", "#").replace("▓", "+").replace("░", "-") for line in lines for word in line.split()
    }
    assert max(map(len, lines)) <= width


def test_a_table_of_numbers_comes_in_parts_with_the_first_column_in_each() -> None:
    table = Table(rows=(("model", "layers", "heads", "width"), ("gpt-2", "12", "12", "768")), right=(1, 2, 3))
    assert [render_block(part) for part in split_columns(table, 22)] == [
        "model  layers  heads\ngpt-2      12     12", "model  width\ngpt-2    768",
    ]  # fmt: skip
    assert list(split_columns(table, 80)) == [table]


def test_a_name_is_not_broken_where_short_text_could_be_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(
        rows=(("kernel", "FLOPs", "bound by"), ("attention_norm.out (2 fused)", "34.4 GFLOP", "compute")), right=(1,)
    )
    for width in range(30, 60):
        text = CODES.sub("", render_terminal([Section([table])], console(monkeypatch, width)))
        assert "attention_norm.out" in text
        assert "bound by" in text


def test_a_row_with_a_format_of_its_own_has_it_in_files_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(
        rows=(("a token", "328 kB", ""), ("a sequence", "2.68 GB", "of 8,192")),
        right=(1,),
        head=False,
        line="{:<18}{:>9} {}",
    )
    assert render_block(table).splitlines() == ["a token              328 kB", "a sequence          2.68 GB of 8,192"]
    shown = CODES.sub("", render_terminal([Section([table])], console(monkeypatch, 60))).splitlines()
    assert [line.rstrip() for line in shown] == ["a token      328 kB", "a sequence  2.68 GB  of 8,192"]


def test_json_is_not_folded() -> None:
    product = ["matmul", "A[I_X, J] * B[J, K] -> C[I_X, K]", "--mesh", "X=2", "--size", "I=4,J=4,K=4"]
    wide = {
        " ".join(more): max(map(len, CODES.sub("", run_on_terminal([*product, *more], 50)).splitlines())) > 50
        for more in ([], ["--json"], ["--emit", "jax"])
    }
    assert wide == {"": False, "--json": True, "--emit jax": True}


class Shown(Terminal):
    """A terminal that says when something was written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def write(self, text: str) -> int:
        self.written.set()
        return super().write(text)


def test_progress_line_has_stage_and_share() -> None:
    line = ProgressLine("plan", None)
    progress: Progress = line
    assert line.description == "plan"
    progress("layouts priced", 1000, 4000)
    assert line.description == "plan: layouts priced 1,000 of 4,000"
    progress("runners-up")
    assert line.description == "plan: runners-up"
    assert ignore_progress("anything", 1, 2) is None  # type: ignore[func-returns-value]


def test_the_line_is_shown_while_nothing_is_reported_and_taken_away_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Shown()
    with ProgressLine("plan", stream, shown_after_s=0.01) as line:
        line("layouts priced", 1, 4)
        assert stream.written.wait(HANG_S)
    text = stream.getvalue()
    assert "plan: layouts priced 1 of 4" in CODES.sub("", text)
    assert text.rstrip().endswith("\x1b[2K")  # the line is cleared


def test_short_work_prints_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Shown()
    with ProgressLine("show", stream):
        pass
    assert stream.getvalue() == ""


@pytest.mark.parametrize("stream", [io.StringIO(), None])
def test_a_pipe_gets_no_progress(stream: io.StringIO | None) -> None:
    with ProgressLine("plan", stream, shown_after_s=0.0) as line:
        line("layouts priced", 1, 4)
    assert line.line is None
    assert not line.timer.is_alive()
    assert stream is None or stream.getvalue() == ""


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_ctrl_c_ends_a_verb_at_once(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*operands: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shardwise.search.planner.search_layouts", stopped)
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
def test_long_verbs_report_progress(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    fresh_searches: Callable[[], None],
) -> None:  # fmt: skip
    lines: list[ProgressLine] = []
    messages: list[str] = []

    class Kept(ProgressLine):
        def __init__(self, *operands: Any) -> None:
            super().__init__(*operands)
            lines.append(self)

        def __call__(self, message: str, done: int = 0, total: int = 0) -> None:
            messages.append(message)

    layout = ["--layout", "dp=8 zero_stage=0"]  # which does not fit: what would is searched for
    assert main(["estimate", "llama-3-8b", "h100:8", *JOB, *layout, "--json"]) == 0
    (tmp_path / "plan.json").write_text(capsys.readouterr().out, encoding="utf-8")
    fresh_searches()
    monkeypatch.setattr("shardwise.present.run_and_print.ProgressLine", Kept)
    assert main([word.format(folder=tmp_path) for word in LONG[name]]) == (3 if name == "deadline" else 0)
    assert [line.verb for line in lines] == [LONG[name][0]]
    assert any(SAID[name] in message for message in messages), messages
