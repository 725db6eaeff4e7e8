"""Places where an experiment runs, by name, and their settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shardwise.measure.experiments.backends import Backend, LocalProcesses, num_cores
from shardwise.measure.experiments.grid_file import read_duration
from shardwise.measure.experiments.submission_files import FORM_SETTINGS, SLURM_HEAD_NODE, FilesBackend
from shardwise.measure.experiments.submitit_backend import SECONDS_PER_MINUTE, SubmititBackend
from shardwise.values import InputError, argument_label, describe_unknown
from shardwise.values.input_texts import parse_digits

Settings = Mapping[str, str]
TIME = "time"  # the most that a run may take: a setting of every place
DEFAULT_NODES, DEFAULT_CAP = 16, 16  # nodes of SLURM that run at a time, and jobs of an array: choices
# Settings of SLURM by the name of their parameter of submitit.
SLURM_TEXTS = ("partition", "account", "qos", "constraint", "exclude", "gres", "comment", "mem")
SLURM_COUNTS = ("cpus_per_task",)


def make_backend(place: str, settings: Settings, folder: Path) -> Backend:
    """Return where an experiment runs; `folder` is for files of the scheduler.

    Raises `InputError` for an unknown place, for settings that it does not have, and without the package that it needs.
    """
    if place not in PLACES:
        raise InputError(f"{argument_label('place')}: {describe_unknown(place, PLACES)}")
    names, make = PLACES[place]
    for name in settings:
        if name not in names:
            raise InputError(f"{argument_label('settings')}: {describe_unknown(name, names)}")
    return make(settings, folder)


def _local_processes(settings: Settings, folder: Path) -> Backend:
    num_gpus = read_count(settings, "gpus", 0)
    return LocalProcesses(capacity=read_count(settings, "devices", num_gpus or num_cores()), num_gpus=num_gpus)


def _submitit(cluster: str) -> Callable[[Settings, Path], Backend]:
    def make(settings: Settings, folder: Path) -> Backend:
        if find_spec("submitit") is None:
            raise InputError(
                f"{argument_label('place')}: submitit is not installed; `pip install 'shardwise[experiments]'`, or the place "
                "processes, is required"
            )
        num_gpus = read_count(settings, "gpus", 0)
        if cluster != "slurm":
            capacity = read_count(settings, "devices", num_gpus or num_cores())
            return SubmititBackend(cluster, folder, capacity, uses_gpus=num_gpus > 0)
        parameters: dict[str, Any] = {f"slurm_{name}": settings[name] for name in SLURM_TEXTS if name in settings}
        parameters |= {f"slurm_{name}": read_count(settings, name, 1) for name in SLURM_COUNTS if name in settings}
        parameters["slurm_setup"] = [SLURM_HEAD_NODE]
        parameters["slurm_array_parallelism"] = read_count(settings, "array_cap", DEFAULT_CAP)
        most_s = read_time(settings)
        return SubmititBackend(
            cluster, folder, read_count(settings, "nodes", DEFAULT_NODES), parameters,
            most_minutes=None if most_s is None else math.ceil(most_s / SECONDS_PER_MINUTE),
            uses_gpus=settings.get("gpus") != "0",
        )  # fmt: skip

    return make


def read_time(settings: Settings) -> float | None:
    """Return the most seconds that a run may take; None where the settings do not say. Raises `InputError`."""
    return read_duration(settings[TIME], f"{argument_label('settings')} {TIME}") if TIME in settings else None


def read_count(settings: Settings, name: str, default: int) -> int:
    """Return a setting that counts something, or its default. Raises `InputError`."""
    if name not in settings:
        return default
    number = parse_digits(settings[name])
    if number is None or not (number or name == "gpus"):
        raise InputError(
            f"{argument_label('settings')} {name}: found {settings[name]!r}; a whole number of at least 1 is required"
        )
    return number


def _files(form: str) -> Callable[[Settings, Path], Backend]:
    return lambda settings, folder: FilesBackend(form, folder, settings)


# Settings of each place, and what makes it.
PLACES: Mapping[str, tuple[tuple[str, ...], Callable[[Settings, Path], Backend]]] = {
    "processes": (("devices", "gpus", TIME), _local_processes),
    "submitit": (("devices", "gpus", TIME), _submitit("local")),
    "debug": (("devices", "gpus", TIME), _submitit("debug")),
    "slurm": ((*SLURM_TEXTS, *SLURM_COUNTS, "nodes", "array_cap", "gpus", TIME), _submitit("slurm")),
    **{form: ((*names, TIME), _files(form)) for form, names in FORM_SETTINGS.items()},
}
