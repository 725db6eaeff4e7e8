"""Bytes that a step holds, by what they are for: measured, to lie beside a plan's memory by term.

Every operation is seen as it is dispatched, in the forward and in the backward pass, and every storage that it makes is
followed until it is freed. So what counts is what tensors hold, on any device and however many views share a storage. What an
allocator rounds up or keeps, and what a kernel takes for itself while it runs, is not seen; `process_memory` has it.
"""

from __future__ import annotations

import resource
import time
import weakref
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise.measurement.inspection import Memory, MemorySample, ProcessMemory
from shardwise.train.device_memory import RSS_UNIT
from shardwise.train.dispatch import DispatchMode

# The terms of a plan's memory that storages have here; `inputs` are unnamed tensors that existed before.
PARAMETERS, GRADIENTS, MASTER, OPTIMIZER, GATHERED = "parameters", "gradients", "master", "optimizer", "gathered"
ACTIVATIONS, LOGITS, WORKSPACE, INPUTS = "activations", "logits", "workspace", "inputs"
SAMPLES = 400  # of a step: what a picture shows
TERMS = (PARAMETERS, GRADIENTS, MASTER, OPTIMIZER, GATHERED, ACTIVATIONS, LOGITS, WORKSPACE, INPUTS)


class _Storage:
    """One storage while it lives: `term` is what it is for, None while unknown."""

    __slots__ = ("num_bytes", "reference", "term")

    def __init__(self, num_bytes: int, term: str | None) -> None:
        self.num_bytes, self.term = num_bytes, term
        self.reference: weakref.ref[torch.UntypedStorage] | None = None


class MemoryTracker(DispatchMode):
    """Follows all storages while it is entered; one step is to run within.

    Name what is known with `name`, as early or late as it is at hand; call `forward_ended` between each forward pass and its
    backward pass. An unnamed tensor whose last dim is `vocab_size` belongs to the logits.
    """

    def __init__(self, vocab_size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.vocab_size = vocab_size
        self._alive: dict[int, _Storage] = {}
        self._changes: list[
            tuple[_Storage, int, int]
        ] = []  # each storage as it comes, is resized and goes: bytes, and when
        self._forwards: list[int] = []  # how many changes there were when each forward pass ended

    def name(self, term: str, tensors: Iterable[Tensor]) -> None:
        """Say what tensors are for."""
        for tensor in tensors:
            self._seen(tensor, term).term = term

    def forward_ended(self) -> None:
        """All that is alive and has no name was saved for the backward pass."""
        for storage in list(self._alive.values()):
            storage.term = storage.term or ACTIVATIONS
        self._forwards.append(len(self._changes))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _tensors((args, kwargs)):
            self._seen(tensor, INPUTS)
        out = func(*args, **(kwargs or {}))
        for tensor in _tensors(out):
            self._seen(tensor, LOGITS if tensor.shape[-1:] == (self.vocab_size,) else None)
        return out

    def _seen(self, tensor: Tensor, term: str | None) -> _Storage:
        """The storage of a tensor, with as many bytes as it now has; `term` is that of one not seen before."""
        storage = tensor.untyped_storage()
        key, num_bytes = id(storage), storage.nbytes()
        found = self._alive.get(key)
        if found is None:
            found = self._alive[key] = _Storage(0, term)
            found.reference = weakref.ref(storage, partial(_gone, weakref.ref(self), key))
        if num_bytes != found.num_bytes:
            self._changes.append((found, num_bytes - found.num_bytes, time.perf_counter_ns()))
            found.num_bytes = num_bytes
        return found

    def _freed(self, key: int) -> None:
        storage = self._alive.pop(key)
        self._changes.append((storage, -storage.num_bytes, time.perf_counter_ns()))

    def memory(self) -> Memory:
        """What the step held, by the names that storages have by now."""
        now, largest = dict.fromkeys(TERMS, 0), dict.fromkeys(TERMS, 0)
        total, peak, at_peak = 0, 0, dict(now)
        ends = set(self._forwards)
        for place, (storage, change, _) in enumerate(self._changes, start=1):
            term = storage.term or WORKSPACE
            now[term] += change
            total += change
            if total > peak:
                peak, at_peak = total, dict(now)
            if term != ACTIVATIONS or place in ends:
                largest[term] = max(largest[term], now[term])
            if place in ends:
                largest[ACTIVATIONS] = max(largest[ACTIVATIONS], now[ACTIVATIONS])
        return Memory(peak_bytes=peak, at_peak=at_peak, largest=largest)

    def curve(self) -> tuple[MemorySample, ...]:
        """What was held over time, by the names that storages have by now: the fullest moment of each of `SAMPLES` spans."""
        if not self._changes:
            return ()
        now, found = dict.fromkeys(TERMS, 0), dict[int, MemorySample]()
        begin, end = self._changes[0][2], self._changes[-1][2]
        for storage, change, when in self._changes:
            now[storage.term or WORKSPACE] += change
            sample = MemorySample((when - begin) / 1e9, tuple(now.values()))
            span = (when - begin) * SAMPLES // (end - begin + 1)
            if span not in found or sum(sample.held) > sum(found[span].held):
                found[span] = sample
        return tuple(found.values())


def _gone(tracker: weakref.ref[MemoryTracker], key: int, _: weakref.ref[torch.UntypedStorage]) -> None:
    found = tracker()
    if found is not None:
        found._freed(key)


def _tensors(found: Any) -> Iterator[Tensor]:
    """The tensors of an operation's arguments or results."""
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, (tuple, list)):
        for one in found:
            yield from _tensors(one)
    elif isinstance(found, dict):
        yield from _tensors(tuple(found.values()))


def process_memory(device: torch.device) -> ProcessMemory:
    """The peaks so far."""
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT
    if device.type != "cuda":
        return ProcessMemory(resident, None, None)
    return ProcessMemory(resident, torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device))
