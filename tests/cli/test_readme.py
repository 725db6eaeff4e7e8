"""The README's session is what the command prints today."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from shardwise.cli import main

README = Path(__file__).parents[2] / "README.md"


def timeless(text: str) -> str:
    """Without the CPU time, which no two runs share."""
    return re.sub(r"in [\d.]+ s of CPU time", "in some CPU time", text).strip()


def test_the_session_is_reproduced(capsys: pytest.CaptureFixture[str]) -> None:
    block = re.search(r"```\n\$ shardwise (.+?)\n\n(.+?)\n```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    command, printed = block.groups()
    assert main(shlex.split(command)) == 0
    assert timeless(capsys.readouterr().out) == timeless(printed)


def test_the_files_to_read_exist() -> None:
    named = re.findall(r"^\d\. `(src/[^`]+)`", README.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(named) == 6
    assert all((README.parent / name).is_file() for name in named)
