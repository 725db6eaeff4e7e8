"""Every example in a docstring gives what it says."""

from __future__ import annotations

import doctest
from importlib import import_module
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "src"
MODULES = sorted(
    ".".join(path.relative_to(SOURCES).with_suffix("").parts).removesuffix(".__init__")
    for path in (SOURCES / "shardwise").rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("module", MODULES)
def test_examples(module: str) -> None:
    found = doctest.testmod(import_module(module))
    assert found.attempted > 0
    assert found.failed == 0


def test_there_are_examples() -> None:
    assert {"shardwise.api.plans", "shardwise.api.costs", "shardwise.layout.layout"} <= set(MODULES)
