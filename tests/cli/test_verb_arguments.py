"""Command-line arguments from signatures: the order of positional arguments, switches, modes and exports."""

from __future__ import annotations

import argparse
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

import pytest

import shardwise
from shardwise.present import registry
from shardwise.present.rendering.plain_text import render_text
from shardwise.present.rendering.report import Report, Section
from shardwise.present.verb import Argument, Export, Mode, Verb, verb
from shardwise.values import InputError, Parser


@dataclass(frozen=True)
class Ride:
    wheels: Sequence[str]
    bike: str
    locked: bool
    stage: int


def refuse_paint(arguments: Mapping[str, Any]) -> None:
    if "paint" in arguments:
        raise InputError("--paint: of one bike")


def all_bikes(bike: Annotated[str, Argument(help="")]) -> Ride:
    return Ride((), f"all {bike}", True, 0)


def write_paint(result: Ride, target: str) -> Report:
    return [Section([f"painted {result.bike} {target}"])]


@verb(
    examples=(),
    exports=(Export(flag="--paint", help="", write=write_paint),),
    modes=(Mode(function=all_bikes, applies=lambda written: written["bike"] == "all", check=refuse_paint),),
)
def ride(
    bike: Annotated[str, Argument(position=1, help="")],
    *,
    wheels: Annotated[Sequence[str], Argument(variadic=True, help="")] = (),
    locked: Annotated[bool, Argument(flag="--unlocked", switch_value=False, help="")] = True,
    stage: Annotated[int, Argument(flag="--stage", parse=int, help="")] = 7,
    **extras: int | str,
) -> Ride:
    """Ride a bike."""
    return Ride(tuple(wheels), bike, locked, stage)


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> Any:
    results: list[Ride] = []

    def report(result: Ride) -> Report:
        results.append(result)
        return [Section([str(result.wheels)])]

    monkeypatch.setattr("shardwise.present.verb.report_of", report)
    monkeypatch.setattr("shardwise.present.verb.has_payload", lambda result: False)
    parser = Parser()
    declared: Verb = ride.verb  # type: ignore[attr-defined]
    declared.declare_arguments(parser)
    arguments: argparse.Namespace = parser.parse_args(words)
    return results, render_text(declared.run(arguments))


def test_positional_arguments_may_be_in_another_order_than_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    results, _ = run(monkeypatch, "front", "back", "tandem")
    assert results == [Ride(("front", "back"), "tandem", True, 7)]


def test_a_switch_sets_its_value_and_zero_is_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    results, _ = run(monkeypatch, "front", "tandem", "--unlocked", "--stage", "0")
    assert (results[0].locked, results[0].stage) == (False, 0)


def test_report_ends_with_the_lines_of_the_export(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, "front", "tandem", "--paint", "red")[1] == "('front',)\n\npainted tandem red"
    assert run(monkeypatch, "front", "tandem", "--json")[1] == "('front',)", "a result without a payload is a text"


def test_a_mode_refuses_files_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, "front", "all")[0][0].bike == "all all"
    with pytest.raises(InputError, match="--paint: of one bike"):
        run(monkeypatch, "front", "all", "--paint", "red")


@functools.cache
def classes() -> list[str]:
    """The names of all classes of the package, as often as they are defined."""
    sources = (path.read_text(encoding="utf-8") for path in Path(shardwise.__file__).parent.rglob("*.py"))
    return [name for source in sources for name in re.findall(r"^class (\w+)", source, re.MULTILINE)]


@pytest.mark.parametrize("kind", registry.RESULTS)
def test_a_result_has_its_functions_and_is_one_class_of_the_package(kind: str) -> None:
    functions = registry.RESULTS[kind]
    for place in filter(None, (functions.report, functions.payload)):
        module, _, name = place.partition(":")
        assert callable(attrgetter(name)(import_module(f"shardwise.{module}")))
    assert classes().count(kind) == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: shardwise.serve_plan("gpt-2", "h100:8", isl=9, osl=9, rate_per="4/s"),
            r"rate_per: .*mean 'rate_per_s'",
        ),
        (lambda: shardwise.serve_estimate("gpt-2", "h100:8", osl=9), "isl: missing; it is required"),
        (lambda: shardwise.reshard("A[I_X] -> A[I]", mesh="X=4", size="I=8"), r"size: .*did you mean 'sizes'"),
    ],
)
def test_keywords_that_a_function_lacks_are_refused(call: Callable[[], object], message: str) -> None:
    """They were ignored: the plan was for another load than the requested one."""
    with pytest.raises(InputError, match=message):
        call()
