"""Places where an experiment runs, by name, and their settings."""

from __future__ import annotations

import os
from collections.abc import Mapping

from shardwise.measure.experiments.backends import Backend, LocalProcesses
from shardwise.values import InputError, argument_label, describe_unknown
from shardwise.values.input_texts import parse_digits

PLACES = ("processes",)
LOCAL_SETTINGS = ("devices", "gpus")


def make_backend(place: str, settings: Mapping[str, str]) -> Backend:
    """Return where an experiment runs. Raises `InputError` for an unknown place, and for settings that it does not have."""
    if place not in PLACES:
        raise InputError(f"{argument_label('place')}: {describe_unknown(place, PLACES)}")
    for name in settings:
        if name not in LOCAL_SETTINGS:
            raise InputError(f"{argument_label('settings')}: {describe_unknown(name, LOCAL_SETTINGS)}")
    num_gpus = _count(settings, "gpus", 0)
    return LocalProcesses(capacity=_count(settings, "devices", num_gpus or _num_cores()), num_gpus=num_gpus)


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _count(settings: Mapping[str, str], name: str, default: int) -> int:
    if name not in settings:
        return default
    number = parse_digits(settings[name])
    if not number:
        raise InputError(
            f"{argument_label('settings')} {name}: found {settings[name]!r}; a whole number of at least 1 is required"
        )
    return number
