"""Sources that name a file of the package, in a docstring, a printed source or a document: the file exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "src/shardwise"
ROOMS = sorted(path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file())
PATH_IN_ROOM = re.compile(rf"(?<![\w/.-])((?:{'|'.join(ROOMS)})/(?:[a-z_0-9]+/)*[a-z_0-9]+\.py)\b")
TEXTS = [
    *PACKAGE.rglob("*.py"), *(REPOSITORY / "docs").rglob("*.md"), REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md",
]  # fmt: skip


def missing_files(text: str) -> set[str]:
    return {name for name in PATH_IN_ROOM.findall(text) if not (PACKAGE / name).is_file()}


def test_a_path_into_a_room_names_a_file() -> None:
    missing = {
        path.relative_to(REPOSITORY).as_posix(): missing_files(path.read_text(encoding="utf-8")) for path in TEXTS
    }
    assert {path: names for path, names in missing.items() if names} == {}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("`price/overlap.py`", set()),
        ("see `price/underlap.py`.", {"price/underlap.py"}),
        ("megatron/core/model/gpt.py of Megatron-LM", set()),
    ],
)
def test_paths_into_rooms_are_recognised(text: str, expected: set[str]) -> None:
    assert missing_files(text) == expected
