"""What a run measures beside its log: measured.json, which the first rank writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch

from shardwise.measurement.folder import RunFolder, write_json
from shardwise.measurement.inspection import Inspection, Measured, Memory, ProcessMemory, measured_payload
from shardwise.measurement.record import StepRecord
from shardwise.train.memory import process_memory
from shardwise.train.parts import World
from shardwise.train.together import everyones
from shardwise.units import counted


def machine_of(device: torch.device) -> str:
    """What a device is, in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {counted(torch.get_num_threads(), 'thread')}"


@dataclass
class Measuring:
    """Measures on all ranks. `probe` gives seconds of short work by name; it is run when this is made, and at the end."""

    world: World
    out: RunFolder
    probe: Callable[[], Mapping[str, float]]
    found: Measured = field(init=False)

    def __post_init__(self) -> None:
        device = self.world.device
        self.found = Measured(device=device.type, machine=machine_of(device), before=self.probe())

    def begin(self) -> None:
        """A run begins, or goes on: nothing is known of it yet."""
        self._keep(self.found)

    def step(self, record: StepRecord, seen: Inspection) -> None:
        """A step was watched; what the fullest rank held is kept."""
        process = process_memory(self.world.device)
        held = everyones(self.world, _Held.numbers(seen.memory, process), "memory of the watched step")
        ranks = [_Held(*numbers) for numbers in held]
        rank = max(range(len(ranks)), key=lambda one: ranks[one].peak_bytes)
        memory, process = ranks[rank].memory(seen.memory), ranks[rank].process(process)
        self._keep(
            replace(
                self.found, step=record.step, rank=rank, memory=memory, process=process, collectives=seen.collectives
            )
        )

    def end(self) -> None:
        """The run has ended."""
        self._keep(replace(self.found, after=self.probe()))

    def _keep(self, found: Measured) -> None:
        self.found = found
        if self.world.rank == 0:
            write_json(self.out.measured, measured_payload(found))


class _Held:
    """A rank's memory as a row of numbers, which ranks can hand around."""

    def __init__(self, peak_bytes: int, *numbers: int) -> None:
        self.peak_bytes, self._numbers = peak_bytes, numbers

    @staticmethod
    def numbers(memory: Memory, process: ProcessMemory) -> list[int]:
        known = [-1 if one is None else one for one in process]
        return [memory.peak_bytes, *memory.at_peak.values(), *memory.largest.values(), *known]

    def memory(self, like: Memory) -> Memory:
        """`like` has the terms, which are those of every rank."""
        count = len(like.at_peak)
        at_peak = dict(zip(like.at_peak, self._numbers[:count], strict=True))
        largest = dict(zip(like.largest, self._numbers[count : count + len(like.largest)], strict=True))
        return Memory(peak_bytes=self.peak_bytes, at_peak=at_peak, largest=largest)

    def process(self, like: ProcessMemory) -> ProcessMemory:
        known = self._numbers[-len(like) :]
        return ProcessMemory(known[0], *(None if one < 0 else one for one in known[1:]))
