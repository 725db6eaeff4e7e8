"""Inspect a step at PyTorch's dispatcher: the bytes it holds by memory term, and every collective it issues.

Every operation is seen as it is dispatched, in the forward and in the backward pass, and every storage is followed
until it is freed. So bytes are those of tensors, on any device and however many views share a storage. What an
allocator rounds up or caches, and what a kernel allocates for itself while it runs, is not seen; `process_memory`
includes it. Collectives are observed in the transport.
"""

from __future__ import annotations

import resource
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise.records import MeasuredMemory, StepInspection
from shardwise.records.step_inspection import MemorySample, ProcessMemory
from shardwise.run.dispatch_mode import DispatchMode
from shardwise.run.engine.unit_passes import SlotCall
from shardwise.run.machine_resources import RSS_UNIT
from shardwise.run.mixed_precision import DTYPES
from shardwise.run.parallel.world import World
from shardwise.run.trainer.training_engine import TrainingEngine
from shardwise.run.transport.interface import CollectiveGroup
from shardwise.sharding import CollectiveKind, IssuedCollective
from shardwise.step import PIPELINE
from shardwise.step.instructions import InstructionId
from shardwise.values.estimate_term_names import ACTIVATIONS, GATHERED, INPUTS, LOGITS, MEASURED_MEMORY_TERMS, WORKSPACE

SAMPLES = 400  # points of a step's memory curve: as many as a chart shows


class _Storage:
    """A live storage: `term` is its memory term, None while unknown."""

    __slots__ = ("num_bytes", "reference", "term")

    def __init__(self, num_bytes: int, term: str | None) -> None:
        self.num_bytes, self.term = num_bytes, term
        self.reference: weakref.ref[torch.UntypedStorage] | None = None


class MemoryTracker(DispatchMode):
    """Follows all storages while it is entered; one step is to run within.

    Assign known tensors with `name`, at any time before or after they appear; call `forward_ended` between each forward
    pass and its backward pass. An unnamed tensor whose last dim is `vocab_size` counts as logits while `in_logits`, which is
    always, unless kernels are followed by `timed_calls`: other dims of a small model may be equal to its vocabulary.
    """

    def __init__(self, vocab_size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.vocab_size, self.in_logits = vocab_size, True
        self.undeclared_bytes = 0
        self._watched: dict[int, tuple[Sequence[SlotCall], tuple[SlotCall, ...]]] = {}
        self._alive: dict[int, _Storage] = {}
        # Bytes added or freed, and the time in ns, when a storage is allocated, resized or freed.
        self._changes: list[tuple[_Storage, int, int]] = []
        self._forwards: list[int] = []  # number of changes at the end of each forward pass

    def name(self, term: str, tensors: Iterable[Tensor]) -> None:
        """Assign a memory term to tensors."""
        for tensor in tensors:
            self._track(tensor, term).term = term

    def count_undeclared(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Count storages that were there before, but for those that have a name by now, among the inputs."""
        for storage in storages:
            if id(storage) not in self._alive:
                self._track_storage(storage, INPUTS)
                self.undeclared_bytes += storage.nbytes()

    def timed_calls(self, path: str, unit: str, steps: Sequence[SlotCall]) -> Sequence[SlotCall]:
        """Return the calls of a unit (`run.engine.model.KernelRecorder`), of which those on logits are marked as they run."""
        self.in_logits = False
        if id(steps) not in self._watched:
            marked = (
                step._replace(kernel=partial(self._on_logits, step.kernel)) if _is_on_logits(step.identity) else step
                for step in steps
            )
            self._watched[id(steps)] = steps, tuple(marked)
        return self._watched[id(steps)][1]

    def _on_logits(self, kernel: Callable[..., Any], *operands: Any) -> Any:
        self.in_logits = True
        try:
            return kernel(*operands)
        finally:
            self.in_logits = False

    def name_inputs(self, part: Any) -> None:
        """Assign a part of the batch that units read: ids, targets, angles, or the documents of a mask."""
        self.name(INPUTS, _tensors((part, getattr(part, "documents", None))))

    def forward_ended(self) -> None:
        """Count all live storages without a term as activations: they were saved for the backward pass."""
        for storage in list(self._alive.values()):
            storage.term = storage.term or ACTIVATIONS
        self._forwards.append(len(self._changes))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _tensors((args, kwargs)):
            self._track(tensor, INPUTS)
        out = func(*args, **(kwargs or {}))
        for tensor in _tensors(out):
            self._track(tensor, LOGITS if self.in_logits and tensor.shape[-1:] == (self.vocab_size,) else None)
        return out

    def _track(self, tensor: Tensor, term: str | None) -> _Storage:
        """Return the storage of a tensor with its present size; `term` is that of a storage not seen before."""
        return self._track_storage(tensor.untyped_storage(), term)

    def _track_storage(self, storage: torch.UntypedStorage, term: str | None) -> _Storage:
        key, num_bytes = id(storage), storage.nbytes()
        tracked = self._alive.get(key)
        if tracked is None:
            tracked = self._alive[key] = _Storage(0, term)
            tracked.reference = weakref.ref(storage, partial(_storage_freed, weakref.ref(self), key))
        if num_bytes != tracked.num_bytes:
            self._changes.append((tracked, num_bytes - tracked.num_bytes, time.perf_counter_ns()))
            tracked.num_bytes = num_bytes
        return tracked

    def _freed(self, key: int) -> None:
        storage = self._alive.pop(key)
        self._changes.append((storage, -storage.num_bytes, time.perf_counter_ns()))

    def memory(self) -> MeasuredMemory:
        """Return the peak and the largest bytes of each term, by the terms that storages have by now."""
        current, largest = dict.fromkeys(MEASURED_MEMORY_TERMS, 0), dict.fromkeys(MEASURED_MEMORY_TERMS, 0)
        total, peak, at_peak = 0, 0, dict(current)
        ends = set(self._forwards)
        for index, (storage, change, _) in enumerate(self._changes, start=1):
            term = storage.term or WORKSPACE
            current[term] += change
            total += change
            if total > peak:
                peak, at_peak = total, dict(current)
            if term != ACTIVATIONS or index in ends:
                largest[term] = max(largest[term], current[term])
            if index in ends:
                largest[ACTIVATIONS] = max(largest[ACTIVATIONS], current[ACTIVATIONS])
        return MeasuredMemory(peak_bytes=peak, at_peak=at_peak, largest=largest, undeclared_bytes=self.undeclared_bytes)

    def curve(self) -> tuple[MemorySample, ...]:
        """Return the bytes held over time by term: the fullest moment of each of `SAMPLES` intervals."""
        if not self._changes:
            return ()
        current, samples = dict.fromkeys(MEASURED_MEMORY_TERMS, 0), dict[int, MemorySample]()
        begin, end = self._changes[0][2], self._changes[-1][2]
        for storage, change, time_ns in self._changes:
            current[storage.term or WORKSPACE] += change
            sample = MemorySample((time_ns - begin) / 1e9, tuple(current.values()))
            span = (time_ns - begin) * SAMPLES // (end - begin + 1)
            if span not in samples or sum(sample.bytes_by_term) > sum(samples[span].bytes_by_term):
                samples[span] = sample
        return tuple(samples.values())


# Results of kernels on logits but the logits themselves: the statistics of each token's loss.
LOSS_STATISTICS = frozenset({"largest", "sum_exp", "target_logit", "token_loss"})


def _is_on_logits(identity: InstructionId) -> bool:
    """Return whether a call makes logits or the loss of them, or their gradient."""
    names = {name.removeprefix("d.").partition("#")[0] for name in identity.results}
    return "logits" in names or not names.isdisjoint(LOSS_STATISTICS)


def _storage_freed(tracker: weakref.ref[MemoryTracker], key: int, _: weakref.ref[torch.UntypedStorage]) -> None:
    live_tracker = tracker()
    if live_tracker is not None:
        live_tracker._freed(key)


class StorageRecorder(DispatchMode):
    """Records the storages that operations make while it is entered, and does not keep them alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in _tensors(out):
            storage = tensor.untyped_storage()
            self._references[id(storage)] = weakref.ref(storage)
        return out

    def alive(self) -> list[torch.UntypedStorage]:
        """Return the recorded storages that have not been freed."""
        storages = (reference() for reference in self._references.values())
        return [storage for storage in storages if storage is not None]


def _tensors(arguments: Any) -> Iterator[Tensor]:
    """Yield the tensors in an operation's arguments or results."""
    if isinstance(arguments, Tensor):
        yield arguments
    elif isinstance(arguments, (tuple, list)):
        for argument in arguments:
            yield from _tensors(argument)
    elif isinstance(arguments, dict):
        yield from _tensors(tuple(arguments.values()))


def process_memory(device: torch.device) -> ProcessMemory:
    """Return the memory peaks of this process so far."""
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT
    if device.type != "cuda":
        return ProcessMemory(resident, None, None)
    return ProcessMemory(resident, torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device))


NAMES = {dtype: name for name, dtype in DTYPES.items()}


class CollectiveCapture:
    """Captures collectives over mesh axes (kind, axes, dtype, bytes), in the order in which they are issued while it is
    entered.

    What they carry is "": only the engine knows. Exchanges of `run.faults.agreement` are over no mesh axes and not
    included.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.sequence: list[IssuedCollective] = []
        self._observed: AbstractContextManager[object] | None = None

    @property
    def counts(self) -> Counter[IssuedCollective]:
        """The number of collectives of each kind, axes, dtype and size."""
        return Counter(self.sequence)

    def __enter__(self) -> CollectiveCapture:
        self._observed = self.world.transport.observed(self._record)
        self._observed.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        assert self._observed is not None
        self._observed.__exit__(*raised)

    def _record(self, kind: CollectiveKind, payload: Sequence[Tensor], group: CollectiveGroup) -> None:
        axes = self.world.axes_of(group)
        if axes != PIPELINE and kind is CollectiveKind.RECEIVE:
            return  # a permute is counted once, at its sender
        if axes != PIPELINE and kind is CollectiveKind.SEND:
            kind = CollectiveKind.PERMUTE
        for tensor in payload:
            num_bytes = tensor.numel() * tensor.element_size()
            self.sequence.append(IssuedCollective(kind, axes, NAMES[tensor.dtype], num_bytes, ""))


@dataclass(frozen=True, slots=True)
class StepInspector:
    """The two observers of a step: of storages, and of collectives."""

    tracker: MemoryTracker
    capture: CollectiveCapture

    @property
    def inspection(self) -> StepInspection:
        """The inspection so far."""
        return StepInspection(self.tracker.memory(), self.capture.counts, self.tracker.curve())


@contextmanager
def inspect_step(engine: TrainingEngine, constructed: StorageRecorder) -> Iterator[StepInspector]:
    """Inspect the one step that is run within the context, which slows it down. `constructed` recorded the storages of the
    engine's construction."""
    inspector = StepInspector(MemoryTracker(engine.instance.local_vocab_size), CollectiveCapture(engine.world))
    for term, tensor in engine.stored_tensors():
        inspector.tracker.name(term, [tensor])
    name = inspector.tracker.name
    name(INPUTS, engine.unplanned_tensors())
    inspector.tracker.count_undeclared(constructed.alive())
    engine.observe(
        inspector.tracker.forward_ended,
        lambda gathered: name(GATHERED, [gathered]),
        lambda values: name(WORKSPACE, [values]),
    )
    engine.model.recorder, engine.model.on_input = inspector.tracker, inspector.tracker.name_inputs
    try:
        with inspector.tracker, inspector.capture:
            yield inspector
    finally:
        engine.observe(lambda: None, lambda gathered: None)
        engine.model.recorder, engine.model.on_input = None, None
