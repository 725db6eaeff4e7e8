"""Diagnosis of an installation: its packages, its machine, and for every verb whether it works and what would make it work."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

from shardwise.present.requirements import PACKAGES, install_commands, is_installed, missing_packages
from shardwise.present.verbs import GROUPS, VerbEntry
from shardwise.run import Host, describe_host
from shardwise.values import Payload
from shardwise.version import __version__


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageStatus:
    """A package by import name and title; `version` is None if it is not installed. `install` is the command that brings it."""

    module: str
    name: str
    version: str | None
    extra: str | None
    purpose: str
    install: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingPart:
    """A part of a verb that does not work here: packages that are missing, by import name, and the command that brings them."""

    part: str
    missing: tuple[str, ...]
    fix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VerbStatus:
    """A verb, the packages without which it does nothing and that are missing, and the command that brings them.

    `parts` of a verb that works may still lack a package. `note` says what is wrong with PyTorch, though it is installed.
    """

    name: str
    works: bool
    missing: tuple[str, ...] = ()
    fix: str | None = None
    note: str = ""
    parts: tuple[MissingPart, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis(Payload):
    """Diagnosis of an installation: its packages, its machine, and the state of every verb."""

    SCHEMA = "shardwise.doctor/1"

    shardwise: str
    python: str
    machine: Host
    packages: tuple[PackageStatus, ...]
    verbs: tuple[VerbStatus, ...]


def diagnose(folder: str = ".") -> Diagnosis:
    """Examine this installation and this machine. No package is loaded but PyTorch, which knows the GPUs."""
    machine = describe_host(folder)
    return Diagnosis(
        shardwise=__version__, python=platform.python_version(), machine=machine, packages=tuple(_package_statuses()),
        verbs=tuple(_verb_status(entry, machine) for group in GROUPS.values() for entry in group),
    )  # fmt: skip


def _package_statuses() -> Iterator[PackageStatus]:
    for module, package in PACKAGES.items():
        yield PackageStatus(
            module=module, name=package.title, version=_installed_version(module, package.distribution),
            extra=package.extra, purpose=package.purpose, install=package.install_command,
        )  # fmt: skip


def _installed_version(module: str, distribution: str) -> str | None:
    if not is_installed(module):
        return None
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:  # a folder on the path
        return "unknown version"


def _verb_status(entry: VerbEntry, machine: Host) -> VerbStatus:
    verb = entry.load()
    missing, note = missing_packages(verb.requires), _torch_note(machine) if "torch" in verb.requires else ""
    is_broken = "torch" in verb.requires and machine.torch is not None and machine.torch.problem
    parts = tuple(
        MissingPart(part=part, missing=lacking, fix=install_commands(lacking))
        for part, modules in verb.requires_for.items()
        if (lacking := missing_packages(modules))
    )
    return VerbStatus(
        name=entry.name, works=not missing and not is_broken, missing=missing,
        fix=install_commands(missing or ("torch",)) if missing or is_broken else None, note=note, parts=parts,
    )  # fmt: skip


def _torch_note(machine: Host) -> str:
    """Return what keeps verbs that compute with PyTorch from working, though it is installed."""
    torch = machine.torch
    if torch is None:
        return ""
    if torch.problem:
        return f"PyTorch cannot be loaded: {torch.problem}"
    backend = "nccl" if torch.gpus else "gloo"
    return "" if backend in torch.backends else f"one process alone: this PyTorch has no {backend}"
