"""The commands of `make demo`: the command line takes each, and each finds the files that those before it write."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path

import pytest

from shardwise.present.command_line import build_parser

ROOT = Path(__file__).parents[2]
RUNS: tuple[str, ...] = runpy.run_path(str(ROOT / "examples" / "demo.py"))["RUNS"]


@pytest.mark.parametrize("command", RUNS, ids=[command.split()[0] for command in RUNS])
def test_a_command_is_taken(command: str) -> None:
    words = shlex.split(command)
    assert build_parser().parse_args(words).verb == words[0]


def test_each_reads_what_is_there_or_was_written() -> None:
    written: set[str] = set()
    for command in RUNS:
        outputs = set(re.findall(r"--(?:out|plot) (\S+)", command))
        read = {word for word in shlex.split(command) if "/" in word} - outputs
        assert all(word in written or (ROOT / word).exists() for word in read), command
        written |= outputs
