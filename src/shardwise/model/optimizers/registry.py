"""The table of optimizers by name: every file of this folder that has an `OPTIMIZER`, under the file's name."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from shardwise.model.optimizers.definition import Optimizer
from shardwise.values import lookup

DEFAULT_OPTIMIZER = "adamw"  # the one that a job has by default
PACKAGE, _, THIS_MODULE = __name__.rpartition(".")
FOLDERS = [str(Path(__file__).parent)]


def discover_optimizers() -> Iterator[tuple[str, Optimizer]]:
    """Yield the optimizers of this folder's files with their names, the default first."""
    names = {module.name for module in iter_modules(FOLDERS)} - {THIS_MODULE}
    for name in sorted(names, key=lambda name: (name != DEFAULT_OPTIMIZER, name)):
        optimizer = getattr(import_module(f"{PACKAGE}.{name}"), "OPTIMIZER", None)
        if isinstance(optimizer, Optimizer):
            yield name, optimizer


OPTIMIZERS: dict[str, Optimizer] = dict(discover_optimizers())


def optimizer_names() -> tuple[str, ...]:
    """Return the names that a job may give."""
    return tuple(OPTIMIZERS)


def get_optimizer(name: str) -> Optimizer:
    """Return an optimizer by name. Raises `InputError` that lists the names.

    >>> get_optimizer("lion").state
    ('master', 'exp_avg')
    """
    return lookup(OPTIMIZERS, name, "optimizer")


def optimizer_fields() -> dict[str, str]:
    """Return the help text of each field of all optimizers: the meaning, the optimizers that have it, their defaults."""
    defaults_by_field: dict[str, dict[str, list[str]]] = {}
    for optimizer, definition in OPTIMIZERS.items():
        for name, field in definition.fields.items():
            defaults_by_field.setdefault(name, {}).setdefault(field.help, []).append(f"{optimizer} {field.default:g}")
    return {
        name: "; ".join(f"{help_text} ({', '.join(defaults)})" for help_text, defaults in helps.items())
        for name, helps in defaults_by_field.items()
    }
