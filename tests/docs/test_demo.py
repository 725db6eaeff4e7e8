"""The commands of `make demo`: the command line takes each, and each finds the files that those before it write."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path

import pytest

from shardwise.present.command_line import build_parser

ROOT = Path(__file__).parents[2]
DEMO = runpy.run_path(str(ROOT / "examples" / "demo.py"))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_commands_are_taken_and_name_the_device(device: str) -> None:
    for command in DEMO["commands"](device):
        words = shlex.split(command)
        arguments = build_parser().parse_args(words)
        assert arguments.verb == words[0]
        assert getattr(arguments, "device", device) == device


@pytest.mark.parametrize(("has_gpu", "device"), [(True, "cuda"), (False, "cpu")])
def test_a_gpu_is_used_where_there_is_one(has_gpu: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    assert DEMO["choose_device"]() == device


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_commands_read_existing_or_written_files(device: str) -> None:
    written: set[str] = set()
    for command in DEMO["commands"](device):
        outputs = set(re.findall(r"--(?:out|plot) (\S+)", command))
        read = {word for word in shlex.split(command) if "/" in word} - outputs
        assert all(word in written or (ROOT / word).exists() for word in read), command
        written |= outputs
