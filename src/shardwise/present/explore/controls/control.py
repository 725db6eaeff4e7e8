"""A choice and its options, as values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["slider", "select", "checkbox"]
Edit = Mapping[str, str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A value, what of the address it changes (None: the key goes), why it cannot be taken ("": it can), and where it is from."""

    value: str
    edit: Edit
    problem: str = ""
    note: str = ""

    def payload(self) -> dict[str, Any]:
        """As plain data; most options have no note."""
        return {
            "value": self.value,
            "edit": self.edit,
            "problem": self.problem,
            **({"note": self.note} if self.note else {}),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """A choice of a group: `value` is the one taken. A slider's options have an order, a checkbox's are false and true."""

    name: str
    label: str
    group: str
    value: str
    kind: Kind
    options: tuple[Option, ...]

    def payload(self) -> dict[str, Any]:
        """As plain data; `dataclasses.asdict` copies every edit, which takes longer than pricing a layout."""
        return {
            "name": self.name, "label": self.label, "group": self.group, "value": self.value, "kind": self.kind,
            "options": [one.payload() for one in self.options],
        }  # fmt: skip


def slider(name: str, label: str, group: str, value: object, options: Iterable[Option]) -> Control:
    """A choice whose options have an order."""
    return Control(name=name, label=label, group=group, value=shown(value), kind="slider", options=tuple(options))


def select(name: str, label: str, group: str, value: object, options: Iterable[Option]) -> Control:
    """A choice among names."""
    return Control(name=name, label=label, group=group, value=shown(value), kind="select", options=tuple(options))


def checkbox(name: str, label: str, group: str, value: bool, options: Iterable[Option]) -> Control:
    """A choice between no and yes."""
    return Control(name=name, label=label, group=group, value=shown(value), kind="checkbox", options=tuple(options))


def shown(value: object) -> str:
    """A value as an address has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
