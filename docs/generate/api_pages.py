"""Pages of the API reference: the names of `import shardwise as sw`, and a page for each room, lowest last.

They hold directives that mkdocstrings fills from the docstrings. Rooms and their order are those of the import rule.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "shardwise"

NAMES = """# Python

The names that `import shardwise as sw` gives. The code behind them is documented room by room in [Rooms](rooms/index.md).

::: shardwise.present.verbs
    options:
      members: false
      show_root_heading: false

"""
NAME = "::: shardwise.{name}\n    options:\n      heading_level: 2\n"
ROOMS = """# Rooms

A room is a module or package of `shardwise`. Each imports only rooms below it, which `make check` enforces
([Design](../../design.md)); the list begins at the top.

| room | what is in it |
|---|---|
"""
ROOM = "# {room}\n\n::: shardwise.{room}\n    options:\n      show_root_heading: false\n      show_submodules: true\n"


def names_page(names: list[str]) -> str:
    """The public names, functions first."""
    ordered = sorted((name for name in names if not name.startswith("_")), key=lambda name: (name[0].isupper(), name))
    return NAMES + "\n".join(NAME.format(name=name) for name in ordered)


def room_pages() -> dict[str, str]:
    """The pages of the rooms by their place in `reference/`."""
    room_names = list(rooms())
    rows = (f"| [{room}]({room}.md) | {_summary(room)} |" for room in room_names)
    return {
        "rooms/index.md": ROOMS + "\n".join(rows) + "\n",
        **{f"rooms/{room}.md": ROOM.format(room=room) for room in room_names},
    }


def rooms() -> Iterator[str]:
    """Rooms that exist, from the highest to the lowest."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for layer in settings["tool"]["importlinter"]["contracts"][0]["layers"]:
        yield from (room for room in re.findall(r"\((\w+)\)", layer) if _source(room).is_file())


def _source(room: str) -> Path:
    package = PACKAGE / room / "__init__.py"
    return package if package.is_file() else PACKAGE / f"{room}.py"


def _summary(room: str) -> str:
    """The first sentence of the room's docstring."""
    text = ast.get_docstring(ast.parse(_source(room).read_text(encoding="utf-8"))) or ""
    return " ".join(text.partition("\n\n")[0].split()).replace("|", "\\|")
