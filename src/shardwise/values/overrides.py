"""Fields replaced from the command line: parse `--set ROOM.NAME=VALUE` and apply it to dataclasses."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from shardwise.values.errors import InputError, argument_label, did_you_mean, join_words
from shardwise.values.units import EXAMPLE_QUANTITIES, lacks_unit, parse_count, parse_quantity, unit_from_name


def parse_overrides(
    settings: Iterable[str], rooms: Sequence[str] = ("model", "job", "chip", "run")
) -> dict[str, dict[str, str]]:
    """Parse `--set` settings into texts by room and field name. Raises `InputError` for any other form."""
    overrides: dict[str, dict[str, str]] = {room: {} for room in rooms}
    for setting in settings:
        key, equals, value = setting.partition("=")
        room, dot, name = key.strip().partition(".")
        if not (equals and dot and room in overrides and name):
            alternatives = join_words([f"{prefix}.NAME=VALUE" for prefix in rooms], "or")
            guess = did_you_mean(room, rooms) if dot else ""
            raise InputError(
                f"{argument_label('overrides', '--set')}: found {setting!r}{guess}; {alternatives} is required"
            )
        overrides[room][name] = value.strip()
    return overrides


def apply_overrides(target: Any, overrides: Mapping[str, str], label: str, ignored_names: Collection[str] = ()) -> Any:
    """Return a dataclass value with some fields replaced by parsed texts, all at once, as they may depend on each other.

    A field that is a mapping of names to fields is set part by part: `layer_kinds.sliding.num_heads`. Names in `ignored_names`
    are accepted and skipped. Raises `InputError` for unknown names and for texts of another type.
    """
    replacements: dict[str, Any] = {}
    flag, names = argument_label("overrides", "--set"), [*(f.name for f in fields(target)), *ignored_names]
    for name, text in overrides.items():
        root, _, path = name.partition(".")
        if path and isinstance(parts := getattr(target, root, None), Mapping):
            part, _, name = path.partition(".")
            changed = replacements.setdefault(root, {key: dict(values) for key, values in parts.items()})
            values, label_of = changed.setdefault(part, {}), f"{label}.{root}.{part}"
        else:
            values, label_of = replacements, label
        if name not in names:
            raise InputError(
                f"{flag}: {label_of} has no {name!r}{did_you_mean(name, names)}; it has {', '.join(names)}"
            )
        if name not in ignored_names:
            values[name] = parse_like(text, _example_value(target, name), f"{flag} {label_of}.{name}")
    return replace(target, **replacements) if replacements else target


def _example_value(target: Any, name: str) -> Any:
    """Return a field's value; for None in a field that takes texts or whole numbers, an empty text or 0."""
    example = getattr(target, name)
    kinds = get_args(get_type_hints(type(target))[name])
    if example is not None:
        return example
    if any(kind is str or get_origin(kind) is Literal for kind in kinds):
        return ""
    return 0 if int in kinds and float not in kinds else None


def parse_like(text: str, example: Any, label: str) -> Any:
    """Parse a text into a value of the type of `example`. Raises `InputError` that begins with `label`."""
    if isinstance(example, bool):
        if text.lower() not in ("true", "false"):
            raise InputError(f"{label}: found {text!r}; true or false is required")
        return text.lower() == "true"
    if isinstance(example, int):
        return parse_count(text, label=label) if text != "0" else 0
    if isinstance(example, float) or example is None:
        quantity, unit = parse_quantity(text, label=label, unit=unit_from_name(label)), unit_from_name(label)
        if lacks_unit(text, quantity, unit):
            raise InputError(
                f"{label}: found {text!r}, which is {quantity:g} {unit}; a unit is required, such as {EXAMPLE_QUANTITIES[unit]}"
            )
        return quantity
    if isinstance(example, str):
        return text
    if isinstance(example, tuple) and all(isinstance(part, str) for part in example):
        return tuple(word.strip() for word in text.split(",") if word.strip())
    raise InputError(f"{label}: this value has parts and cannot be set in one word")
