"""The short form of reports, and what `--verbose` adds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

import shardwise.present
from shardwise.present.command_line import main
from shardwise.present.rendering.plain_text import render_text
from shardwise.present.rendering.report import Section, Table, short_form

JOB = ["llama-3.2-1b", "h100:16", "--batch-tokens", "1Mi", "--seq-len", "4096"]
SECTIONS = [
    Section(["first"], title="head"),
    Section([Table(rows=(("n",), ("1",), ("2",), ("3",)), brief=1)], name="numbers"),
    Section(["hidden"], title="more", detail=True),
    Section([Table(rows=(("a",), ("b",)), head=False, brief=2)], title="all of it"),
]


def run_lines(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(arguments) == 0
    return capsys.readouterr().out.splitlines()


def test_the_short_form_leaves_out_details_and_rows_and_names_them() -> None:
    assert render_text(short_form(SECTIONS)) == "head\nfirst\n\nn\n1\n\nall of it\na\nb\n\nwith -v: numbers, more"
    assert render_text(SECTIONS) == "head\nfirst\n\nn\n1\n2\n3\n\nmore\nhidden\n\nall of it\na\nb"
    assert short_form(SECTIONS[:1]) == SECTIONS[:1]


def test_short_plan_has_at_most_fifteen_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """Whether it fits and with how much to spare, the layout, the step with its interval, what bounds it, and what next."""
    lines = run_lines(capsys, "plan", *JOB, "--tokens", "1T")
    assert 11 <= len(lines) <= 15
    text = "\n".join(lines)
    for pattern in (
        r"^llama-3\.2-1b \(1\.24B parameters\) on h100:16 \(16 devices\)",
        r"^  layout +\w+=\d+ .*recompute=\w+$",
        r"^ +DP \d+, .*, no recomputation$",
        r"^  memory +[\d.]+ GB of 84\.9 GB \(fits, \d+% free\)$",
        r"^  step +[\d.]+ m?s \(90% prediction interval [\d.]+ m?s to [\d.]+ m?s\) predicted for fused$",
        r"^  bound by +compute \(\d+% of the step\); \d+% of communication exposed, [\d.]+ m?s$",
        r"^  run +1T tokens in [\d.]+ days \([\d.]+ days to [\d.]+ days\), .*\$.+ \(\$.+ to \$.+\); in paren.* 90% intervals$",
        r"^next, with --out plan\.json: shardwise explain plan\.json",
        r"^with -v: .*time of a step, memory of a device, other shapes",
    ):
        assert re.search(pattern, text, re.MULTILINE), pattern


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("short") / "plan.json"
    assert main(["plan", *JOB, "--stack", "megatron", "--pin", "pp=2", "--out", str(path)]) == 0
    return path


LAYOUT = ["--layout", "fsdp=8 pp=2 recompute=full"]
WITH_DETAILS = {
    "plan": ["plan", *JOB],
    "several": ["plan", "llama-3.2-1b", "h100:16", "h200:16", *JOB[2:]],
    "estimate": ["estimate", *JOB, *LAYOUT],
    "memory": ["memory", *JOB, *LAYOUT],
    "explain": ["explain", "{plan}"],
    "simulate": ["simulate", "{plan}"],
    "read": ["read", "{launch}", "--cluster", "h100:16"],
}


@pytest.mark.parametrize("name", WITH_DETAILS)
def test_verbose_adds_to_the_short_form_what_that_names(
    name: str, plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launch = plan.parent / "launch.sh"
    assert main(["export", str(plan), "--to", "megatron", "--out", str(plan.parent)]) == 0
    capsys.readouterr()
    words = [word.format(plan=plan, launch=launch) for word in WITH_DETAILS[name]]
    *short, hint = run_lines(capsys, *words)
    whole = run_lines(capsys, *words, "-v")
    assert hint.startswith("with -v: ")
    assert squeeze_columns(short) <= squeeze_columns(whole)
    assert len(whole) > len(short)
    assert any("notes" in line or "fitted to 916" in line for line in whole) == (name not in ("memory", "simulate"))


def squeeze_columns(lines: Sequence[str]) -> set[str]:
    """Return lines without the widths of their columns."""
    return {" ".join(line.split()) for line in lines}


def test_a_warning_stays_in_the_short_form(capsys: pytest.CaptureFixture[str]) -> None:
    text = "\n".join(run_lines(capsys, "estimate", "llama-3-8b", "h800:8", *JOB[2:], "--layout", "dp=8"))
    assert "DOES NOT FIT" in text
    assert "smallest change that fits: " in text
    assert "no published run is of h800, which is taken to be as h100" in text
    assert "fitted to 916 published runs" not in text


def test_only_the_printer_and_the_server_read_verbose() -> None:
    """No verb reads the flag: a report says what a detail is, the command line or the server of tools which form is shown."""
    modules = sorted(Path(shardwise.present.__file__).parent.rglob("*.py"))
    asking = [
        module.name
        for module in modules
        if re.search(r'arguments\.verbose|"verbose"', module.read_text(encoding="utf-8"))
    ]
    assert asking == ["mcp_server.py", "run_and_print.py"]  # of an agent and of a terminal
