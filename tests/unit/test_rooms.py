"""Public names of rooms exist, and none hides a file of its room."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import pytest

import shardwise

PACKAGE = Path(shardwise.__file__).parent
ROOMS = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.pyi"))


def test_most_rooms_export_names() -> None:
    assert {"values", "sharding", "hardware", "model", "layout", "step", "price", "search"} <= set(ROOMS)


@pytest.mark.parametrize("name", ROOMS)
def test_public_names_exist_and_hide_no_file(name: str) -> None:
    room = import_module(f"shardwise.{name}")
    assert [public for public in room.__all__ if not hasattr(room, public)] == []
    assert set(room.__all__).isdisjoint(module.name for module in iter_modules([str(PACKAGE / name)]))
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = room.no_such_name
