"""Streams of a rank: lists of timed work played on one compute stream and on one stream for each axis.

The work of a rank is, in order and with seconds, its kernels, transfers where they start, and where they are waited
for. A kernel starts when the one before it has ended and its waits are over; a transfer when its list reaches it and
its stream is free. Nothing else decides when anything runs. Two lists are two passes that a rank runs together: each
keeps its own order, and the kernel that can start first is next.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from shardwise.price.simulation.contention import NO_CONTENTION
from shardwise.step import ACTIVATION, COMPUTE

HOST = "host"  # the axis of copies to and from the host


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedKernel:
    """A kernel of a unit on the compute stream; `results` are the tensors that it makes."""

    seconds: float
    unit: str
    phase: str
    name: str
    results: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Transfer:
    """A collective, or a copy to or from the host, charged to an axis. Compared by identity: each occurrence is its own
    object.

    `carries`: the tensors that it moves. `chunked_kernels_s`: seconds of the kernels beside which it runs in chunks.
    `waits_for_next`: it is waited for when the next one of its kind begins.
    """

    seconds: float
    axis: str
    unit: str
    name: str
    role: str = ACTIVATION
    carries: tuple[str, ...] = ()
    chunked_kernels_s: float = 0.0
    waits_for_next: bool = False

    @property
    def exposed_s(self) -> float:
        """Seconds beyond the kernels that it overlaps with."""
        return max(self.seconds - self.chunked_kernels_s, 0.0)


@dataclass(frozen=True, slots=True)
class StartTransfer:
    """Start a transfer once its stream is free and its payload is ready."""

    transfer: Transfer
    stream: str


@dataclass(frozen=True, slots=True)
class WaitTransfer:
    """Make later work on the compute stream wait for a transfer."""

    transfer: Transfer


TimedInstruction = TimedKernel | StartTransfer | WaitTransfer


def start_transfer(transfer: Transfer) -> StartTransfer:
    """Return the start of a transfer on the stream of its axis."""
    return StartTransfer(transfer, transfer.axis)


def started_transfers(works: Iterable[TimedInstruction]) -> Iterator[Transfer]:
    """Yield the transfers that start, in order."""
    return (work.transfer for work in works if isinstance(work, StartTransfer))


def copy_with_new_transfers(
    works: Iterable[TimedInstruction], share: float = 1.0, full_roles: Container[str] = ()
) -> list[TimedInstruction]:
    """Return the same work for another occurrence, with transfers of its own, in a share of the seconds; transfers of
    `full_roles` take all of theirs."""
    copies: dict[Transfer, Transfer] = {}
    copied: list[TimedInstruction] = []
    for work in works:
        match work:
            case TimedKernel():
                copied.append(replace(work, seconds=work.seconds * share) if share != 1.0 else work)
            case StartTransfer(transfer, stream):
                scale = 1.0 if transfer.role in full_roles else share
                copies[transfer] = replace(
                    transfer, seconds=transfer.seconds * scale, chunked_kernels_s=transfer.chunked_kernels_s * scale
                )
                copied.append(StartTransfer(copies[transfer], stream))
            case WaitTransfer():
                copied.append(WaitTransfer(copies[work.transfer]))
    return copied


PASS_START = -1  # in place of an event's index: the start of the pass


class StreamEvent(NamedTuple):
    """Work on a stream. `cause`: the index of the event at whose end it started."""

    work: TimedKernel | Transfer
    stream: str
    start: float
    end: float
    cause: int


@dataclass(frozen=True, kw_only=True, eq=False)
class StreamTimeline:
    """Timeline of the streams in a pass.

    `events` are in the order in which they were decided; `seconds` until all that is waited for is done; `exposed`
    seconds that the compute stream waited, by the axis that it waited for; `last`: the index of the event that ends it;
    `trailing`: those of transfers that nothing waits for.
    """

    events: tuple[StreamEvent, ...]
    seconds: float
    exposed: dict[str, float]
    last: int
    trailing: tuple[int, ...]

    @cached_property
    def computed(self) -> dict[str, float]:
        """Seconds of kernels by phase."""
        seconds_by_phase: dict[str, float] = {}
        for event in self.events:
            if isinstance(event.work, TimedKernel):
                phase = event.work.phase
                seconds_by_phase[phase] = seconds_by_phase.get(phase, 0.0) + event.end - event.start
        return seconds_by_phase

    def path(self, last: int | None = None) -> list[StreamEvent]:
        """Return the events that decide when it ends, or when the event `last` does, in order.

        Each starts when the one before it ends, the first one at the beginning.
        """
        events, index = [], self.last if last is None else last
        while index != PASS_START:
            events.append(self.events[index])
            index = events[-1].cause
        return events[::-1]


def play_streams(lists: Sequence[Sequence[TimedInstruction]], contention: float = NO_CONTENTION) -> StreamTimeline:
    """Play lists of work on the streams of one rank, from 0 on. `contention`: see `contention.py`.

    >>> send = Transfer(seconds=3.0, axis="tp", unit="block", name="all_gather")
    >>> kernels = [TimedKernel(seconds=s, unit="block", phase="forward", name="contract") for s in (2.0, 1.0)]
    >>> found = play_streams([[StartTransfer(send, "tp"), kernels[0], WaitTransfer(send), kernels[1]]])
    >>> found.seconds, found.exposed
    (4.0, {'tp': 1.0})
    """
    return _StreamPlayer(lists, contention).play()


@dataclass
class _StreamProgram:
    """State of one list: next item, time reached and the event that set it, and the waits since its last kernel."""

    works: Sequence[TimedInstruction]
    place: int = 0
    now: float = 0.0
    cause: int = PASS_START
    waits: list[tuple[str, float, float]] = field(default_factory=list)

    @property
    def left(self) -> bool:
        return self.place < len(self.works)


class _StreamPlayer:
    def __init__(self, lists: Iterable[Sequence[TimedInstruction]], contention: float) -> None:
        self.programs, self.contention = [_StreamProgram(works) for works in lists], contention
        self.events: list[StreamEvent] = []
        self.free: dict[str, tuple[float, int]] = {}  # by stream: when it is free, and its last event
        self.done: dict[Transfer, int] = {}
        self.awaited: set[int] = set()
        self.exposed: dict[str, float] = {}
        self.moving_until = 0.0  # transfers follow one another without a gap, so one runs at every moment until then

    def play(self) -> StreamTimeline:
        if len(self.programs) == 1:
            (program,) = self.programs
            while program.left:
                self.step(program)
        while going := [program for program in self.programs if program.left]:
            self.step(min(going, key=self.next_at))
        return self.finish()

    def next_at(self, program: _StreamProgram) -> float:
        """Return when the next item of a program takes effect."""
        work = program.works[program.place]
        if isinstance(work, WaitTransfer):
            return max(program.now, self.events[self.done[work.transfer]].end)
        return max(program.now, self.free.get(COMPUTE, (0.0, 0))[0]) if isinstance(work, TimedKernel) else program.now

    def step(self, program: _StreamProgram) -> None:
        work = program.works[program.place]
        program.place += 1
        match work:
            case TimedKernel():
                self.launch(program, work)
            case StartTransfer():
                self.begin(program, work)
            case WaitTransfer():
                self.wait(program, work.transfer)

    def launch(self, program: _StreamProgram, kernel: TimedKernel) -> None:
        free, last = self.free.get(COMPUTE, (0.0, PASS_START))
        start = max(program.now, free)
        self.charge(program, free, start)
        program.cause = self.put(
            kernel, COMPUTE, start, start + self.contended_s(start, kernel.seconds),
            program.cause if program.now >= free else last,
        )  # fmt: skip
        program.now = self.events[program.cause].end

    def contended_s(self, start: float, seconds: float) -> float:
        """Return the seconds of a kernel with the transfers that run concurrently."""
        overlap_s = min(max(self.moving_until - start, 0.0), seconds * self.contention)
        return seconds + overlap_s * (1.0 - 1.0 / self.contention)

    def begin(self, program: _StreamProgram, work: StartTransfer) -> None:
        free, last = self.free.get(work.stream, (0.0, PASS_START))
        start, cause = (free, last) if free > program.now else (program.now, program.cause)
        end = start + work.transfer.seconds
        self.done[work.transfer] = self.put(work.transfer, work.stream, start, end, cause)
        self.moving_until = max(self.moving_until, end)

    def wait(self, program: _StreamProgram, transfer: Transfer) -> None:
        number = self.done[transfer]
        self.awaited.add(number)
        end = self.events[number].end
        if end > program.now:
            program.waits.append((transfer.axis, program.now, end))
            program.now, program.cause = end, number

    def put(self, work: TimedKernel | Transfer, stream: str, start: float, end: float, cause: int) -> int:
        self.events.append(StreamEvent(work, stream, start, end, cause))
        self.free[stream] = end, len(self.events) - 1
        return len(self.events) - 1

    def charge(self, program: _StreamProgram, begin: float, end: float) -> None:
        """Charge the time in which the compute stream was idle to the axes that the program waited for meanwhile."""
        for axis, since, until in program.waits:
            seconds = min(until, end) - max(since, begin)
            if seconds > 0.0:
                self.exposed[axis] = self.exposed.get(axis, 0.0) + seconds
        program.waits.clear()

    def finish(self) -> StreamTimeline:
        latest = max(self.programs, key=lambda program: program.now)
        free, _ = self.free.get(COMPUTE, (0.0, PASS_START))
        self.charge(latest, free, latest.now)
        trailing = tuple(number for number in self.done.values() if number not in self.awaited)
        return StreamTimeline(
            events=tuple(self.events), seconds=latest.now, exposed=self.exposed, last=latest.cause, trailing=trailing
        )
