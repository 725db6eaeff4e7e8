"""Report of an installation and its machine: versions, packages, and which verbs work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from shardwise.present.rendering.numbers import count, num_bytes
from shardwise.present.rendering.report import Block, Cell, Line, Report, Row, Section, Status, Table, facts_table
from shardwise.present.requirements import PACKAGES
from shardwise.values import pluralize

if TYPE_CHECKING:
    from shardwise.present.diagnosis import Diagnosis, VerbStatus
    from shardwise.run import Host, TorchSupport


def diagnosis_report(diagnosis: Diagnosis) -> Report:
    """Report the machine, the packages with what brings those that are missing, and the verbs with what makes them work."""
    title = f"shardwise {diagnosis.shardwise}, Python {diagnosis.python}"
    return [
        Section([facts_table(_machine_facts(diagnosis.machine))], title=title),
        Section([_package_table(diagnosis)], title="packages"),
        Section(list(_verb_blocks(diagnosis.verbs)), title="verbs"),
    ]


def _machine_facts(machine: Host) -> Iterator[tuple[str, Cell | Line]]:
    yield "machine", machine.system
    yield "CPU", Line((f"{machine.cpu}, ", count(machine.num_cores, "machine.num_cores"), _cores(machine)))
    yield "memory", num_bytes(machine.memory_bytes, "machine.memory_bytes")
    yield "disk", Line((num_bytes(machine.free_disk_bytes, "machine.free_disk_bytes"), f" free in {machine.folder}"))
    yield from _torch_facts(machine.torch)


def _cores(machine: Host) -> str:
    return " core" if machine.num_cores == 1 else " cores"


def _torch_facts(torch: TorchSupport | None) -> Iterator[tuple[str, Cell | Line]]:
    """Yield the GPUs, alike ones on one line, and the backends of `torch.distributed`."""
    if torch is None:
        yield "GPUs", "unknown: PyTorch, which is not installed, finds them"
        return
    if torch.problem:
        yield "GPUs", Status(f"unknown: PyTorch cannot be loaded: {torch.problem}", "bad")
        return
    if not torch.gpus:
        yield (
            "GPUs",
            f"none that PyTorch sees, which is built for {torch.platform}: train, verify and bench run on the CPU",
        )
    numbers = {gpu: index for index, gpu in reversed(list(enumerate(torch.gpus)))}
    for gpu in dict.fromkeys(torch.gpus):
        memory = num_bytes(gpu.memory_bytes, f"machine.torch.gpus.{numbers[gpu]}.memory_bytes")
        yield "GPUs", Line((f"{torch.gpus.count(gpu)} x {gpu.name}, ", memory, f" each ({torch.platform})"))
    backends = (f"{name} {'yes' if name in torch.backends else 'no'}" for name in ("gloo", "nccl"))
    yield "backends", f"{', '.join(backends)} (torch.distributed, between CPUs and between GPUs)"


def _package_table(diagnosis: Diagnosis) -> Table:
    rows: list[Row] = []
    for package in diagnosis.packages:
        version: Cell = Status("not installed", "note") if package.version is None else package.version
        rows.append((package.name, version, package.purpose, package.install if package.version is None else ""))
    return Table(rows=tuple(rows), head=False, indent=2)


def _verb_blocks(verbs: Sequence[VerbStatus]) -> Iterator[Block]:
    """Yield the verbs that do not work, or not wholly, with the command that changes it, and the names of the others."""
    rows: list[Row] = []
    for verb in verbs:
        if not verb.works:
            reason = verb.note or f"needs {_titles(verb.missing)}"
            rows.append((verb.name, Status("does not work", "bad"), reason, verb.fix or ""))
        elif verb.note:
            rows.append((verb.name, Status("works", "good"), verb.note, ""))
        for part in verb.parts:
            rows.append((verb.name, Status("in part", "note"), f"{part.part}: needs {_titles(part.missing)}", part.fix))
    listed = {row[0] for row in rows}
    working = [verb.name for verb in verbs if verb.name not in listed]
    if rows:
        yield Table(rows=tuple(rows), head=False, indent=2)
    yield f"  {pluralize(len(working), 'verb')} {'work' if len(working) != 1 else 'works'} fully: {', '.join(working)}"


def _titles(modules: Sequence[str]) -> str:
    return " and ".join(PACKAGES[module].title for module in modules)
