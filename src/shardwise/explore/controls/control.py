"""A choice and its options, as values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Edit = Mapping[str, str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A value, what of the address it changes (None: the key goes), and why it cannot be taken ("": it can)."""

    value: str
    edit: Edit
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """A choice of a group: `value` is the one taken, `ordered` whether the options are steps of a slider."""

    name: str
    label: str
    group: str
    value: str
    ordered: bool
    options: tuple[Option, ...]

    def payload(self) -> dict[str, Any]:
        """As plain data; `dataclasses.asdict` copies every edit, which takes longer than pricing a layout."""
        options = [{"value": one.value, "edit": one.edit, "problem": one.problem} for one in self.options]
        return {
            "name": self.name, "label": self.label, "group": self.group, "value": self.value, "ordered": self.ordered,
            "options": options,
        }  # fmt: skip


def slider(name: str, label: str, group: str, value: object, options: Iterable[Option]) -> Control:
    """A choice whose options have an order."""
    return Control(name=name, label=label, group=group, value=shown(value), ordered=True, options=tuple(options))


def select(name: str, label: str, group: str, value: object, options: Iterable[Option]) -> Control:
    """A choice among names."""
    return Control(name=name, label=label, group=group, value=shown(value), ordered=False, options=tuple(options))


def shown(value: object) -> str:
    """A value as an address has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
