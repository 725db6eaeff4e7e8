"""`--help`: verbs and arguments in groups, and examples that are valid command lines."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

import shardwise.present.verbs
from shardwise.present.command_line import build_parser, main, verb_parsers
from shardwise.present.verbs import GROUPS
from shardwise.run.trainer.flags import build_parser as rank_parser

VERBS = {verb.name: verb.line for group in GROUPS.values() for verb in group}
WIDTH = 80
MOST_S = 0.15  # of --help, on a machine that has nothing else to do
# Their examples need logs, published runs, PyTorch or minutes; they are parsed, not run.
PARSED = (
    "mfu", "calibrate", "validate", "bench", "tokenize", "verify", "rehearse", "train", "reconcile", "trace", "explore",
    "convert", "batch", "experiments", "mcp",
)  # fmt: skip


def test_the_verbs_stand_in_groups_with_a_line_each() -> None:
    text = build_parser().format_help()
    for title, group in GROUPS.items():
        lines = text.split(f"\n{title}:\n")[1].split("\n\n")[0].splitlines()
        assert [tuple(line.split(maxsplit=1)) for line in lines] == [entry[:2] for entry in group]
    assert all(len(line) <= WIDTH for line in text.splitlines())


def test_every_verb_is_a_function_and_every_decorated_function_is_a_verb() -> None:
    folder = Path(shardwise.present.verbs.__file__).parent
    functions = [entry.function for group in GROUPS.values() for entry in group]
    decorated = sum(file.read_text(encoding="utf-8").count("\n@verb(") for file in folder.glob("*.py"))
    assert decorated == len(set(functions)) == len(VERBS)


@pytest.mark.parametrize("name", VERBS)
def test_arguments_stand_in_groups_and_say_what_they_are(name: str) -> None:
    parser = verb_parsers()[name]
    titles = [group.title for group in parser._action_groups if group._group_actions]
    assert "output" in titles
    assert not {"positional arguments", "options"} & set(titles)
    for action in parser._actions:
        assert action.help, action
    assert 2 <= len(parser.examples) <= 5
    for example in parser.examples:
        assert f"  {example}\n" in parser.format_help()


def words_of(example: str) -> list[str]:
    """The words behind the program's name: `shardwise`, or what torchrun starts."""
    words = shlex.split(example)
    start = words.index("shardwise.train") if words[0] == "torchrun" else 0
    return words[start + 1 :]


@pytest.mark.parametrize("name", VERBS)
def test_every_example_is_a_command_line(name: str) -> None:
    """Of the verb itself, or of one whose file it takes."""
    parser, num_examples = build_parser(), 0
    for example in verb_parsers()[name].examples:
        if example.startswith("torchrun "):
            rank_parser().parse_args(words_of(example))
        else:
            num_examples += parser.parse_args(words_of(example)).verb == name
    assert num_examples > 0


SLOW = ("shardwise plan llama-3-8b h100:64,128,256,512 --noise-scale 1.2Mi",)  # a session of docs/batch.md


@pytest.mark.parametrize("name", [name for name in VERBS if name not in PARSED])
def test_examples_run_one_after_the_other(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for example in verb_parsers()[name].examples:
        if example in SLOW:
            continue
        assert main(words_of(example)) == 0, capsys.readouterr().err
        assert capsys.readouterr().out


def test_the_help_folds_paragraphs_and_keeps_what_is_indented(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    text = verb_parsers()["roofline"].format_help()
    head, table = text.split("\n\n")[1:3]
    assert max(map(len, head.splitlines())) <= 58
    assert (
        "\n  attention    Q [B, T, N, H], K and V [B, S, K, H]  T,N,H [B=1] [S=T] [K=N]; T=1 decodes\n" in table + "\n"
    )


def find_loaded_modules() -> Iterator[str]:
    """Modules of Shardwise that `--help` loads."""
    code = (
        "import sys\nfrom shardwise.present.command_line import main\ntry:\n    main(['--help'])\n"
        "except SystemExit:\n    print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    yield from re.findall(r"shardwise[.\w]*", done.stdout.splitlines()[-1])


def test_the_help_of_all_verbs_loads_none_of_them() -> None:
    assert set(find_loaded_modules()) == {
        "shardwise", "shardwise.present",
        "shardwise.present.command_line", "shardwise.present.verbs", "shardwise.values",
        "shardwise.values.argument_parser", "shardwise.values.displayable", "shardwise.values.errors",
    }  # fmt: skip


def test_no_verb_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err.strip()) == ("", build_parser().format_help().strip())


def test_the_help_takes_little_time() -> None:
    """CPU time, so that other processes of a busy machine do not count."""
    seconds = []
    for _ in range(5):
        before = os.times()
        subprocess.run([sys.executable, "-m", "shardwise", "--help"], capture_output=True, check=True)
        after = os.times()
        seconds.append(after.children_user + after.children_system - before.children_user - before.children_system)
    assert median(seconds) < MOST_S
