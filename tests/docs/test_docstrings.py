"""Every example in a docstring gives what it says, and every public name has one."""

from __future__ import annotations

import doctest
import functools
import inspect
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import shardwise as sw

SOURCES = Path(__file__).parents[2] / "src"
MODULES = sorted(
    ".".join(path.relative_to(SOURCES).with_suffix("").parts).removesuffix(".__init__")
    for path in (SOURCES / "shardwise").rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8")
)
PUBLIC = sorted(name for name in sw.__all__ if not name.startswith("_"))


@pytest.mark.parametrize("module", MODULES)
def test_examples_of_docstrings_pass(module: str) -> None:
    result = doctest.testmod(import_module(module))
    assert result.attempted > 0
    assert result.failed == 0


def test_the_package_has_examples() -> None:
    assert {"shardwise.present.verbs.planning", "shardwise.present.verbs.memory", "shardwise.layout.layout"} <= set(
        MODULES
    )


def find_lacking(value: Any) -> Iterator[str]:
    """What the docstring of a public function or class lacks."""
    text = (vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__) or ""
    if len(text.strip().splitlines()) < 3:
        yield "several lines"
    if not doctest.DocTestParser().get_examples(text):
        yield "an example"
    if may_raise(value) and "Raises `" not in " ".join(text.split()):
        yield "the errors that it raises"


def may_raise(value: Any) -> bool:
    """Whether it checks what it takes: a class when it is made, a function by its body or because people write its arguments."""
    if inspect.isclass(value):
        return "__post_init__" in vars(value)
    annotations = [str(parameter.annotation) for parameter in inspect.signature(value).parameters.values()]
    return "raise " in inspect.getsource(value) or any("str" in annotation for annotation in annotations)


def members(value: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties that a class defines itself."""
    for name, member in vars(value).items():
        if name.startswith("_"):
            continue
        if isinstance(member, (classmethod, staticmethod)):
            yield name, member.__func__
        elif isinstance(member, property):
            yield name, member.fget
        elif isinstance(member, functools.cached_property):
            yield name, member.func
        elif inspect.isfunction(member):
            yield name, member


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_has_an_example_and_names_its_errors(name: str) -> None:
    assert list(find_lacking(getattr(sw, name))) == []


@pytest.mark.parametrize("name", [name for name in PUBLIC if inspect.isclass(getattr(sw, name))])
def test_a_public_member_has_a_docstring_and_names_its_errors(name: str) -> None:
    wrong = [
        member
        for member, function in members(getattr(sw, name))
        if not function.__doc__
        or (
            any(word in inspect.getsource(function) for word in ("raise ", "require("))
            and "Raise" not in function.__doc__
        )
    ]
    assert wrong == []


def test_missing_parts_of_a_docstring_are_found() -> None:
    def bare(name: str) -> None:
        """One line."""

    def quiet(count: int) -> int:
        """One line.

        >>> 1
        1
        """
        return count

    assert list(find_lacking(bare)) == ["several lines", "an example", "the errors that it raises"]
    assert list(find_lacking(quiet)) == []
    assert dict(members(type("Public", (), {"bare": bare, "_quiet": quiet}))) == {"bare": bare}
