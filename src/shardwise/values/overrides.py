"""Values that are replaced by hand: what `--set ROOM.NAME=VALUE` says, and what its text stands for."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from shardwise.values.errors import InputError, did_you_mean
from shardwise.values.units import EXAMPLE_QUANTITIES, lacks_unit, parse_count, parse_quantity, unit_from_name


def parse_overrides(
    settings: Iterable[str], rooms: Sequence[str] = ("model", "job", "chip", "run")
) -> dict[str, dict[str, str]]:
    """The values that `--set` gives, as text, by what they are of. Raises `InputError` for what is no setting."""
    changes: dict[str, dict[str, str]] = {room: {} for room in rooms}
    for setting in settings:
        key, equals, value = setting.partition("=")
        room, dot, name = key.strip().partition(".")
        if not (equals and dot and room in changes and name):
            forms = [f"{one}.NAME=VALUE" for one in rooms]
            listed = " or ".join([", ".join(forms[:-1]), forms[-1]] if len(forms) > 1 else forms)
            raise InputError(
                f"--set: found {setting!r}{did_you_mean(room, rooms) if dot else ''}; {listed} is required"
            )
        changes[room][name] = value.strip()
    return changes


def apply_overrides(value: Any, changes: Mapping[str, str], what: str, further: Collection[str] = ()) -> Any:
    """The value with some of its fields replaced by what their texts say, all at once: they may need each other.

    Names in `further` are known and nothing is done about them. Raises `InputError` for others, and for texts of another kind.
    """
    given = {}
    for name, text in changes.items():
        known = [*(f.name for f in fields(value)), *further]
        if name not in known:
            raise InputError(f"--set: {what} has no {name!r}{did_you_mean(name, known)}; it has {', '.join(known)}")
        if name not in further:
            given[name] = parse_like(text, _example_value(value, name), f"--set {what}.{name}")
    return replace(value, **given) if given else value


def _example_value(value: Any, name: str) -> Any:
    """A field's value, or where it has none a value of its kind: a text where its type has texts."""
    like = getattr(value, name)
    kinds = get_args(get_type_hints(type(value))[name])
    is_text = any(kind is str or get_origin(kind) is Literal for kind in kinds)
    return "" if like is None and is_text else like


def parse_like(text: str, like: Any, what: str) -> Any:
    """The value that a text stands for where `like` shows the kind of value."""
    if isinstance(like, bool):
        if text.lower() not in ("true", "false"):
            raise InputError(f"{what}: found {text!r}; true or false is required")
        return text.lower() == "true"
    if isinstance(like, int):
        return parse_count(text, what=what) if text != "0" else 0
    if isinstance(like, float) or like is None:
        value, unit = parse_quantity(text, what=what, unit=unit_from_name(what)), unit_from_name(what)
        if lacks_unit(text, value, unit):
            raise InputError(
                f"{what}: found {text!r}, which is {value:g} {unit}; a unit is required, such as {EXAMPLE_QUANTITIES[unit]}"
            )
        return value
    if isinstance(like, str):
        return text
    if isinstance(like, tuple) and all(isinstance(part, str) for part in like):
        return tuple(word.strip() for word in text.split(",") if word.strip())
    raise InputError(f"{what}: this value has parts and cannot be set in one word")
