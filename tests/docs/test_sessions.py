"""Every session in the documents prints today what it says."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from thinned import covering

ROOT = Path(__file__).parents[2]
SPECIFICATION = importlib.util.spec_from_file_location("refresh", ROOT / "docs" / "refresh.py")
assert SPECIFICATION is not None
assert SPECIFICATION.loader is not None
refresh = importlib.util.module_from_spec(SPECIFICATION)
SPECIFICATION.loader.exec_module(refresh)

SESSIONS = [
    (str(document.relative_to(ROOT)), *block.groups())
    for document in refresh.DOCUMENTS
    for block in refresh.SESSION.finditer(document.read_text(encoding="utf-8"))
]
# They take long; tests/unit/calibrate/ has the same at hand (test_groups.py, and by `make accuracy` test_published_fit.py).
ELSEWHERE = ("shardwise validate --folds", "shardwise validate --groups")
LONG = ("shardwise validate",)  # by `make matrix` alone
LONG_CALLS = ("of_a_layer(",)  # in Python, likewise: it rehearses six layouts
REPLAYS = [
    (str(document.relative_to(ROOT)), block.group(1))
    for document in refresh.DOCUMENTS
    for block in refresh.PYTHON.finditer(document.read_text(encoding="utf-8"))
]


PRINTED = [session for session in SESSIONS if session[1] not in ELSEWHERE]
SUITE_SHARE = 1 / 3  # of the sessions; the others run in `make matrix`


def subjects(document: str, command: str) -> set[str]:
    """The page that a session is on, and the verbs that it runs."""
    return {document, *re.findall(r"shardwise ([a-z-]+)", command)}


SHORT = [number for number, (_, command, _) in enumerate(PRINTED) if command not in LONG]
IN_SUITE = {SHORT[place] for place in covering([subjects(*PRINTED[number][:2]) for number in SHORT], SUITE_SHARE)}


@pytest.mark.parametrize(
    ("document", "command", "output"),
    [
        pytest.param(
            *session, id=f"{session[0]}:{session[1][10:60]}", marks=[] if number in IN_SUITE else pytest.mark.matrix
        )
        for number, session in enumerate(PRINTED)
    ],
)
def test_shell_sessions_print_what_the_documents_show(document: str, command: str, output: str) -> None:
    now = refresh.timeless(refresh.printed(command))
    if output.endswith("\n..."):
        assert now.startswith(refresh.timeless(output.removesuffix("...")))
    else:
        assert now == refresh.timeless(output)


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("document", "session"),
    [
        pytest.param(document, session, id=f"{document}:{session[4:60]}", marks=[pytest.mark.matrix] if long else [])
        for document, session in REPLAYS
        for long in [any(call in session for call in LONG_CALLS)]
    ],
)
def test_python_sessions_print_what_the_documents_show(document: str, session: str) -> None:
    assert refresh.replayed(session) == session


def test_a_stale_python_session_is_renewed() -> None:
    stale = ">>> x = 1\n>>> for i in range(2):\n...     print(i + x)\n...\n7\n>>> x\n1"
    assert refresh.replayed(stale) == stale.replace("\n7\n", "\n1\n2\n")


PICTURES = [
    (document.parent / name, command)
    for document in refresh.DOCUMENTS
    for name, command in refresh.PICTURE.findall(document.read_text(encoding="utf-8"))
]


SLOW = ("batch-to-loss",)  # a session beside it prints what the same command finds


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("picture", "command"),
    [
        pytest.param(*entry, id=entry[0].stem, marks=[pytest.mark.matrix] if entry[0].stem in SLOW else [])
        for entry in PICTURES
    ],
)
def test_pictures_equal_their_commands(picture: Path, command: str) -> None:
    assert picture.read_text(encoding="utf-8") == refresh.drawn(command)


def test_commands_of_a_session_find_the_files_of_those_before() -> None:
    plan = "shardwise plan gpt-2 h100:8 --batch-tokens 64Ki --seq-len 1024 --stack megatron --out plan.json"
    block = f"```\n$ {plan}\n$ shardwise export plan.json --to megatron --out run\n\nan old output\n```"
    (session,) = refresh.SESSION.finditer(block)
    assert session.group(1).split(refresh.NEXT)[0] == plan
    assert "wrote run/launch.sh" in refresh.printed(session.group(1))
    assert "wrote run/launch.sh" in refresh.SESSION.sub(refresh.renewed, block)
    assert not Path("run").exists()


def test_a_stale_picture_is_drawn_again(tmp_path: Path) -> None:
    page, picture = tmp_path / "page.md", tmp_path / "a.svg"
    command = "shardwise schedule 1f1b --stages 2 --micro-batches 2"
    page.write_text(f"![A pipeline](a.svg)\n<!-- {command} -->\n", encoding="utf-8")
    assert refresh.redraw(page, write=False)
    assert not picture.exists()
    assert refresh.redraw(page, write=True)
    assert picture.read_text(encoding="utf-8") == refresh.drawn(command)
    assert not refresh.redraw(page, write=True)


def test_the_suite_has_every_page_and_every_verb() -> None:
    every = {subject for number in SHORT for subject in subjects(*PRINTED[number][:2])}
    assert {subject for number in IN_SUITE for subject in subjects(*PRINTED[number][:2])} == every
    assert len(IN_SUITE) <= 0.4 * len(PRINTED)


def test_documents_have_sessions() -> None:
    problems = {f"docs/worked-problems/{path.name}" for path in (ROOT / "docs" / "worked-problems").glob("[!R]*.md")}
    assert len(problems) == 8
    assert {document for document, _, _ in SESSIONS} >= {"README.md", *problems}


def test_the_files_to_read_exist() -> None:
    named = re.findall(r"^\d\. `(src/[^`]+)`", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(named) == 6
    assert all((ROOT / name).is_file() for name in named)
