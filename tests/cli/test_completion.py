"""Shell completions: by the completion function, and in real shells when Tab is pressed."""

from __future__ import annotations

import json
import os
import pty
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from answers import answer
from json_schemas import require_valid

from shardwise.hardware.stacks import stack_names
from shardwise.interop.frameworks.targets import TARGETS
from shardwise.model.load import model_names
from shardwise.present.shell_completion import SCRIPTS, bash_lines, complete, complete_for_shell, fish_lines, zsh_lines
from shardwise.present.verbs import GROUPS
from shardwise.values.errors import InputError

HANG_S = 60  # a shell that has not answered by then hangs


def words(*line: str) -> list[str]:
    return [completion.word for completion in complete(line)]


def test_every_verb_is_offered_with_its_line() -> None:
    assert complete([""]) == [entry[:2] for group in GROUPS.values() for entry in group]
    assert words("sch") == ["schedule"]
    assert words("--") == ["--help", "--version"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (["plan", ""], model_names()),
        (["plan", "llama-3-8b", "mi300x:"], ["mi300x:8", "mi300x:64"]),
        (["plan", "llama-3-8b", "h100:8", "--stack", ""], stack_names()),
        (["plan", "llama-3-8b", "h100:8", "--batch-tokens", "4Mi", "--stack=nemo-26"],
         [f"--stack={name}" for name in stack_names() if name.startswith("nemo-26")]),
        (["export", "plan.json", "--to", ""], tuple(TARGETS)),
        (["show", "st"], ["stacks"]),
        (["show", "precisions", "fp8_del"], ["fp8_delayed"]),
        (["show", "optimizers", "mu"], ["muon"]),
        (["show", "optimizers", "--precision", "fp8_del"], ["fp8_delayed"]),
        (["simulate", "plan.json", "--overlap", "p"], ["per_axis"]),
        (["rule", "tp_max_b"], ["tp_max_by_heads"]),
        (["rule", "tp_max_degree", "alpha=3", ""], ["d_ff=", "num_axes="]),
        (["rule", "nothing", ""], []),
        (["completion", ""], ["bash", "zsh", "fish"]),
        (["completion", "bash", "--j"], ["--json"]),
        (["explain", ""], []),  # a file
        (["nothing", ""], []),
        (["plan", "llama-3-8b", "h100:8", "--batch-tokens", ""], []),
    ],
)  # fmt: skip
def test_completions_of_a_partial_line(line: list[str], expected: Sequence[str]) -> None:
    assert words(*line) == list(expected)


def test_flags_have_the_line_of_their_help() -> None:
    completions = dict(complete(["kv-cache", "llama-3-8b", "--"]))
    assert completions["--context"] == "tokens of each sequence, such as 8Ki"
    assert all(completions.values())


def test_each_shell_quotes_the_words_in_its_syntax() -> None:
    assert bash_lines(["shardwise show clusters h200:6"]) == ["64"]
    assert bash_lines(["shardwise export 'a plan.json' --to=megatron-"]) == ["megatron-bridge"]
    assert bash_lines(["shardwise explain 'not closed"]) == []
    assert zsh_lines(["show", "clusters", "h200:6"]) == [r"h200\:64"]
    assert zsh_lines(["resha"]) == ["reshard:the cheapest way from one sharding to another"]
    assert fish_lines(["resha"]) == ["reshard\tthe cheapest way from one sharding to another"]


@pytest.mark.parametrize("shell", SCRIPTS)
def test_the_script_is_printed_and_is_in_the_payload(shell: str) -> None:
    assert answer("completion", shell) + "\n" == SCRIPTS[shell]
    payload = json.loads(answer("completion", shell, "--json"))
    require_valid(payload)
    assert (payload["script"], payload["candidates"]) == (SCRIPTS[shell], None)


@pytest.fixture
def shell_of(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[str, dict[str, str]]:
    """Return an installed shell, and an environment in which it finds the command."""
    shell = str(request.param)
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    command = tmp_path / "bin" / "shardwise"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m shardwise "$@"\n', encoding="utf-8")
    command.chmod(0o755)
    home = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path), "TERM": "xterm", "COLUMNS": "200", "LINES": "50"}
    return shell, {**os.environ, **home, "PATH": f"{command.parent}:{os.environ['PATH']}"}


START = {
    "bash": (
        ["--norc", "--noprofile", "-i"],
        "bind 'set enable-bracketed-paste off'; source <(shardwise completion bash)",
    ),
    "zsh": (["-f", "-i"], "autoload -Uz compinit; compinit -D -u; source <(shardwise completion zsh)"),
    "fish": (["--no-config", "-i"], "shardwise completion fish | source"),
}


def complete_in_shell(shell: str, environment: dict[str, str], typed: str, expected: str, folder: Path) -> str:
    """Type a line into an interactive shell, complete it, and return its output once it has the expected text."""
    arguments, start = START[shell]
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [shell, *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
        cwd=folder,
        start_new_session=True,
    )
    os.close(theirs)
    try:
        os.write(ours, f"{start}; echo rea''dy\n".encode())
        read_until(ours, "ready")
        os.write(ours, f"{typed}\t".encode())
        return read_until(ours, expected)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def read_until(terminal: int, expected: str) -> str:
    output, deadline = "", time.monotonic() + HANG_S
    while expected not in output and time.monotonic() < deadline:
        if select.select([terminal], [], [], 1)[0]:
            output += os.read(terminal, 4096).decode(errors="replace").replace("\r", "")
    assert expected in output, output
    return output


@pytest.mark.parametrize("shell_of", ["bash", "zsh"], indirect=True)
@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("shardwise kv-ca", "kv-cache"),
        ("shardwise plan llama-3.3", "llama-3.3-70b"),
        ("shardwise plan llama-3-8b mi300x:6", "mi300x:64"),
        ("shardwise export plan.json --to=megatron-", "--to=megatron-bridge"),
        ("shardwise rule tp_max_degree d_", "d_ff="),
        ("shardwise explain my-p", "my-plan.json"),
    ],
)
def test_a_shell_completes_at_a_tab(
    shell_of: tuple[str, dict[str, str]], typed: str, expected: str, tmp_path: Path
) -> None:
    (tmp_path / "my-plan.json").write_text("{}", encoding="utf-8")
    assert expected in complete_in_shell(*shell_of, typed, expected, tmp_path)


@pytest.mark.parametrize("shell_of", ["fish"], indirect=True)
@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("shardwise kv-ca", ["kv-cache\tsize a model's key-value cache"]),
        ("shardwise plan llama-3.3", ["llama-3.3-70b"]),
        ("shardwise plan llama-3-8b mi300x:", ["mi300x:64", "mi300x:8"]),
        ("shardwise export plan.json --to=megatron-", ["--to=megatron-bridge"]),
        ("shardwise kv-cache llama-3-8b --cont", ["--context\ttokens of each sequence, such as 8Ki"]),
        ("shardwise rule tp_max_degree ", ["alpha=", "d_ff=", "num_axes="]),
        ("shardwise explain my-p", ["my-plan.json"]),
    ],
)
def test_fish_completes(shell_of: tuple[str, dict[str, str]], typed: str, expected: list[str], tmp_path: Path) -> None:
    (tmp_path / "my-plan.json").write_text("{}", encoding="utf-8")
    shell, environment = shell_of
    script = f"shardwise completion fish | source; complete -C '{typed}'"
    done = subprocess.run(
        [shell, "--no-config", "-c", script], capture_output=True, text=True, check=True, env=environment, cwd=tmp_path
    )
    assert sorted(done.stdout.splitlines()) == sorted(expected)


@pytest.mark.parametrize("shell_of", ["bash"], indirect=True)
def test_bash_offers_several(shell_of: tuple[str, dict[str, str]]) -> None:
    line = "shardwise show mo"
    script = (
        f'source <(shardwise completion bash); COMP_LINE="{line}"; COMP_POINT={len(line)}; _shardwise shardwise; '
        "printf '%s\\n' \"${COMPREPLY[@]}\"; complete -p shardwise"
    )
    done = subprocess.run([shell_of[0], "-c", script], capture_output=True, text=True, check=True, env=shell_of[1])
    assert done.stdout.splitlines() == ["models", "complete -o default -F _shardwise shardwise"]


def test_bash_completion_takes_the_line_as_one_argument() -> None:
    with pytest.raises(InputError, match="found 2; bash hands over its line as one word"):
        complete_for_shell("bash", ["shardwise", "plan"])
