"""The table of optimizers by name: every file of this room that has an `OPTIMIZER`, under the file's name."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from shardwise.model.optimizers.definition import Optimizer
from shardwise.values.errors import chosen

DEFAULT = "adamw"  # the one that a job has by default
ROOM, _, OWN = __name__.rpartition(".")
FOLDERS = [str(Path(__file__).parent)]


def found() -> Iterator[tuple[str, Optimizer]]:
    """Those of the room's files with their names, the default first."""
    names = {one.name for one in iter_modules(FOLDERS)} - {OWN}
    for name in sorted(names, key=lambda name: (name != DEFAULT, name)):
        value = getattr(import_module(f"{ROOM}.{name}"), "OPTIMIZER", None)
        if isinstance(value, Optimizer):
            yield name, value


OPTIMIZERS: dict[str, Optimizer] = dict(found())


def optimizer_names() -> tuple[str, ...]:
    """All that a job may name."""
    return tuple(OPTIMIZERS)


def optimizer_named(name: str) -> Optimizer:
    """An optimizer by name. Raises `InputError` that lists the names.

    >>> optimizer_named("lion").state
    ('master', 'exp_avg')
    """
    return chosen(OPTIMIZERS, name, "optimizer")


def optimizer_fields() -> dict[str, str]:
    """The fields of all optimizers by name, with their text for help: the meaning, the optimizers that have it, the defaults."""
    found: dict[str, dict[str, list[str]]] = {}
    for optimizer, one in OPTIMIZERS.items():
        for name, field in one.fields.items():
            found.setdefault(name, {}).setdefault(field.help, []).append(f"{optimizer} {field.default:g}")
    return {
        name: "; ".join(f"{words} ({', '.join(defaults)})" for words, defaults in helps.items())
        for name, helps in found.items()
    }
