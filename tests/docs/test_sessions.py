"""Every session in the documents prints today what it says."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SPECIFICATION = importlib.util.spec_from_file_location("refresh", ROOT / "docs" / "refresh.py")
assert SPECIFICATION is not None
assert SPECIFICATION.loader is not None
refresh = importlib.util.module_from_spec(SPECIFICATION)
SPECIFICATION.loader.exec_module(refresh)

SESSIONS = [
    (document.name, *block.groups())
    for document in refresh.DOCUMENTS
    for block in refresh.SESSION.finditer(document.read_text(encoding="utf-8"))
]


@pytest.mark.parametrize(("document", "command", "output"), SESSIONS, ids=[f"{s[0]}:{s[1][10:60]}" for s in SESSIONS])
def test_session(document: str, command: str, output: str) -> None:
    now = refresh.timeless(refresh.printed(command))
    if output.endswith("\n..."):
        assert now.startswith(refresh.timeless(output.removesuffix("...")))
    else:
        assert now == refresh.timeless(output)


def test_there_are_sessions() -> None:
    assert {document for document, _, _ in SESSIONS} >= {"README.md", "worked-problems.md"}


def test_the_files_to_read_exist() -> None:
    named = re.findall(r"^\d\. `(src/[^`]+)`", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(named) == 6
    assert all((ROOT / name).is_file() for name in named)
