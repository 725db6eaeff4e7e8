"""Streams that are not UTF-8, full disks and closed pipes: no traceback, and the right exit code."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from shardwise.present.command_line import READER_LEFT, main
from shardwise.values.argument_parser import SUBSTITUTES, substitute_unencodable, write_error, write_text
from shardwise.values.errors import OutputError, ShardwiseError, format_problems

FULL = Path("/dev/full")
HANG_S = 120
ESTIMATE = ["estimate", "llama-3.2-1b", "h100:8", "--batch-tokens", "64Ki", "--seq-len", "4096", "--layout", "fsdp=8"]
WRONG = [*ESTIMATE[:-1], "tp=3"]


def ran(
    arguments: Sequence[str], *, stdout: int | io.IOBase = subprocess.PIPE, stderr: int | io.IOBase = subprocess.PIPE,
    **environment: str,
) -> subprocess.CompletedProcess[bytes]:  # fmt: skip
    command = [sys.executable, "-m", "shardwise", *arguments]
    return subprocess.run(
        command, stdout=stdout, stderr=stderr, env={**os.environ, **environment}, check=False, timeout=HANG_S
    )


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8", "latin-1"])
@pytest.mark.parametrize(
    "arguments", [ESTIMATE, ["roofline", "--help"], ["show", "chips", "h100"], ["roofline", "gpt-2", "T=64", "h100"]]
)
def test_reports_are_written_in_any_encoding(arguments: list[str], encoding: str) -> None:
    done = ran(arguments, PYTHONIOENCODING=encoding, PYTHONUTF8="0")
    assert (done.returncode, done.stderr) == (0, b"")
    text = done.stdout.decode(encoding)
    assert "?" not in text
    assert "\\u" not in text


def test_errors_are_written_in_any_encoding() -> None:
    done = ran(["show", "models", "h≥100"], PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.startswith(b"error: model: found 'h>=100'")


def test_characters_outside_an_encoding_are_replaced() -> None:
    assert substitute_unencodable("5 µs ≥ 3 → α", "ascii") == "5 us >= 3 -> alpha"
    assert substitute_unencodable("5 µs ≥ 3 → α", "cp1252") == "5 µs >= 3 -> alpha"
    assert substitute_unencodable("\udcff 漢", "utf-8") == "\\udcff 漢"
    assert substitute_unencodable("漢", "ascii") == "\\u6f22"
    assert all(text.isascii() for text in SUBSTITUTES.values())


@pytest.mark.parametrize("arguments", [ESTIMATE, [*ESTIMATE, "--json"], ["--help"], ["--version"], ["plan", "--help"]])
def test_a_full_disk_is_reported_in_one_line(arguments: list[str]) -> None:
    with FULL.open("wb") as full:
        done = ran(arguments, stdout=full)
    assert done.returncode == 1
    message = "the output cannot be written: No space left on device"
    as_json = "--json" in arguments
    assert done.stderr.decode() == format_problems([message], 1, as_json=as_json) + "\n"


def test_where_errors_cannot_be_written_the_exit_code_says_it() -> None:
    with FULL.open("wb") as full:
        assert ran(WRONG, stderr=full).returncode == 2
        assert ran(["plann"], stderr=full).returncode == 2
        assert ran(ESTIMATE, stdout=full, stderr=full).returncode == 1


@pytest.mark.parametrize("arguments", [ESTIMATE, [*ESTIMATE, "--json"], ["roofline", "--help"], ["--version"]])
def test_a_closed_pipe_is_no_error(arguments: list[str]) -> None:
    ours, theirs = os.pipe()
    os.close(ours)  # nobody reads
    with os.fdopen(theirs, "wb") as pipe:
        done = ran(arguments, stdout=pipe)
    assert (done.returncode, done.stderr) == (READER_LEFT, b"")


def test_a_stream_that_was_closed_takes_nothing() -> None:
    done = subprocess.run(
        ["sh", "-c", f'"{sys.executable}" -m shardwise show models qwen >&- 2>&-'], check=False, timeout=HANG_S
    )
    assert done.returncode == 0
    write_text("text", None)


class Broken(io.StringIO):
    """A stream of no file that cannot be written."""

    def __init__(self, error: OSError) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        raise self.error


def test_a_stream_of_no_file_that_cannot_be_written() -> None:
    with pytest.raises(OutputError, match=r"^the output cannot be written: Input/output error$"):
        write_text("text", Broken(OSError(5, "Input/output error")))
    with pytest.raises(BrokenPipeError):
        write_text("text", Broken(BrokenPipeError()))
    write_error("text", Broken(OSError(5, "Input/output error")))
    write_error("text", Broken(BrokenPipeError()))


@pytest.mark.parametrize(
    ("arguments", "code", "parts"),
    [
        ([*WRONG, "--json"], 2, ["layout: devices:", "layout: heads_by_tp:"]),
        (["plan", "llama-9", "h900:8", *ESTIMATE[3:-2], "--json"], 2, ["model: found 'llama-9'", "chip: found 'h900'"]),
        (["plan", "llama-3-405b", "h100:8", *ESTIMATE[3:-2], "--json"], 3, ["no legal layout fits"]),
        (["matmul", "A[I, J", "--mesh", "X=2", "--json"], 2, ["A[I, J\n"]),
        (["explain", "nowhere.json", "--json"], 2, ["plan file: cannot read nowhere.json"]),
    ],
)
def test_with_json_an_error_is_json(
    arguments: list[str], code: int, parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """One line on the error stream, with a sentence for each thing that is wrong; without `--json` the same sentences."""
    assert main(arguments) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    payload = json.loads(err)
    assert payload.keys() == {"schema", "error"}
    assert (payload["schema"], payload["error"]["exit_code"]) == ("shardwise.error/1", code)
    problems = payload["error"]["problems"]
    assert len(problems) >= len(parts)
    assert all(any(part in problem for problem in problems) for part in parts)
    assert main([word for word in arguments if word != "--json"]) == code
    assert capsys.readouterr().err == "error: " + "\n".join(problems) + "\n"


@pytest.mark.parametrize(
    "arguments",
    [["plann", "--json"], ["plan", "--json"], ["show", "modls", "--json"], ["show", "chips", "--wat", "--json"]],
)
def test_with_json_a_wrong_command_line_is_json(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    (problem,) = json.loads(err)["error"]["problems"]
    assert problem.startswith(
        ("argument VERB:", "the following arguments are required:", "argument kind:", "unrecognized")
    )


def test_words_after_two_dashes_are_no_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "--", "models", "--json"]) == 2
    assert capsys.readouterr().err.startswith("error: model: found '--json'")


def test_every_error_has_its_sentences() -> None:
    assert ShardwiseError("one").problems == ("one",)
