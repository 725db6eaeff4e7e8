"""Models of torchtitan's registries: a flavour is a model by its name, and no option says a size.

Tables: `options/torchtitan_models.json` (0.3.0) and `options/torchtitan_toml_models.json` (0.2.2), from the registries of the two
wheels (models/*/__init__.py): parts of a launch (`launch.Launch.parts`) of each flavour whose weights, built without memory,
are as many as those parts have here; `attention`, `max_seq_len`, `pipelines` and `splits_sequence` are from its code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from shardwise.errors import InputError
from shardwise.export.field import Field, Given, Options
from shardwise.export.launch import UNSAID, Launch
from shardwise.export.target import Need
from shardwise.model.architecture import Architecture
from shardwise.names import unknown


class Flavor(NamedTuple):
    """A model of a registry: its parts, and the release's other facts about it (`facts`)."""

    name: str
    flavor: str
    parts: Mapping[str, Any]
    facts: Mapping[str, Any]


@cache
def flavors(table: str) -> tuple[Flavor, ...]:
    """All of a release."""
    text = resources.files("shardwise.export").joinpath("options", f"{table}.json").read_text(encoding="utf-8")
    return tuple(
        Flavor(name, flavor, {part: _hashable(value) for part, value in facts.pop("parts").items()}, facts)
        for name, every in json.loads(text).items()
        for flavor, facts in every.items()
    )


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@cache
def _shapes(table: str) -> Mapping[tuple[Any, ...], Flavor]:
    """Flavours by their sizes; of several with the same the first."""
    found: dict[tuple[Any, ...], Flavor] = {}
    for one in flavors(table):
        sizes = {part.removeprefix("model."): value for part, value in one.parts.items() if part.startswith("model.")}
        found.setdefault(_shape(Architecture(name="", **sizes)), one)
    return found


def _shape(model: Architecture) -> tuple[Any, ...]:
    """The sizes of a model, without modules of multi-token prediction, which are an argument of a registry."""
    names = [one.name for one in fields(model) if one.name not in (*UNSAID, "num_predict_layers")]
    return tuple(tuple(sorted(model.bias)) if name == "bias" else getattr(model, name) for name in names)


def flavor_of(table: str, model: Architecture) -> Flavor | None:
    """The flavour with the sizes of a model, if a release has one."""
    return _shapes(table).get(_shape(model))


def facts_of(table: str, model: Architecture) -> Mapping[str, Any]:
    """The facts of a release about a model beside its sizes; none for a model that it lacks."""
    found = flavor_of(table, model)
    return found.facts if found else {}


def attention_of(name: object, flavor: object) -> str | None:
    """The kind of attention that a flavour of 0.3.0 has unasked."""
    every = {(one.name, one.flavor): one.facts["attention"] for one in flavors("torchtitan_models")}
    return every.get((str(name), str(flavor)))


def flavor_field(table: str) -> Field:
    """`model.name` and `model.flavor` for the sizes of a model."""

    def say(launch: Launch) -> Options:
        found = flavor_of(table, launch.model)
        return {"model.name": found.name, "model.flavor": found.flavor} if found else {}

    return Field(say, lambda given: heard_flavor(table, given).parts)


def heard_flavor(table: str, given: Given) -> Flavor:
    """The flavour that options name. Raises `InputError` for one that the release lacks."""
    name, flavor = given.get("model.name", "llama3"), given.get("model.flavor", "debugmodel")
    known = {one.flavor: one for one in flavors(table) if one.name == name}
    if not known:
        raise InputError(f"model.name: {unknown(str(name), dict.fromkeys(one.name for one in flavors(table)))}")
    if flavor not in known:
        raise InputError(f"model.flavor: of {name}: {unknown(str(flavor), known)}")
    return known[flavor]


def known_model(table: str, title: str) -> Need:
    """That a model is one of a release's."""

    def says(launch: Launch) -> str:
        names = ", ".join(f"{one.name} {one.flavor}" for one in flavors(table) if "debug" not in one.flavor)
        return f"{launch.model.name} has not the sizes of any model in the registries of {title}; it has {names}"

    return Need(lambda launch: flavor_of(table, launch.model) is not None, says)
