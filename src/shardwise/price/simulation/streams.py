"""The streams of a rank: lists of timed work played on one compute stream and on one stream for each axis.

The work of a rank is, in order and with seconds, its kernels, transfers where they start, and where they are waited for. A
kernel starts when the one before it has ended and what its list waits for is there; a transfer when its list has come to it
and its stream is free. Nothing else decides when anything runs. Several lists are two passes that a rank runs together: each
goes on in its own order, and the kernel that can start first is next.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from shardwise.step.instructions import ACTIVATION, COMPUTE

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
    """A collective, or a copy to or from the host, charged to an axis; each is one of its own.

    `carries`: the tensors that it moves. `chunked_kernels_s`: of one that runs in pieces beside kernels, the seconds of these.
    `waits_one_behind`: it is waited for when the next one of its kind begins.
    """

    seconds: float
    axis: str
    unit: str
    name: str
    role: str = ACTIVATION
    carries: tuple[str, ...] = ()
    chunked_kernels_s: float = 0.0
    waits_one_behind: bool = False

    @property
    def exposed_s(self) -> float:
        """The rest of it after the kernels that it overlaps with."""
        return max(self.seconds - self.chunked_kernels_s, 0.0)


@dataclass(frozen=True, slots=True)
class StartTransfer:
    """A transfer starts when its stream is free and its payload is ready."""

    transfer: Transfer
    stream: str


@dataclass(frozen=True, slots=True)
class WaitTransfer:
    """Later work on the compute stream waits for a transfer."""

    transfer: Transfer


TimedInstruction = TimedKernel | StartTransfer | WaitTransfer


def start_transfer(transfer: Transfer) -> StartTransfer:
    """Its start, on the stream of its axis."""
    return StartTransfer(transfer, transfer.axis)


def started_transfers(works: Iterable[TimedInstruction]) -> Iterator[Transfer]:
    """Those that begin, in order."""
    return (one.transfer for one in works if isinstance(one, StartTransfer))


def copy_with_new_transfers(works: Iterable[TimedInstruction]) -> list[TimedInstruction]:
    """The same once more, with transfers of its own."""
    own: dict[Transfer, Transfer] = {}
    found: list[TimedInstruction] = []
    for one in works:
        match one:
            case TimedKernel():
                found.append(one)
            case StartTransfer():
                own[one.transfer] = replace(one.transfer)
                found.append(StartTransfer(own[one.transfer], one.stream))
            case WaitTransfer():
                found.append(WaitTransfer(own[one.transfer]))
    return found


# How many times as long a kernel takes while a transfer runs beside it: they share the memory's bandwidth and multiprocessors.
# Source: none that holds for the chips of the catalogue, and no calibration of a stack has it: what published steps show is
# traffic that is exposed and kernels that are slowed together (`exposed`). So it is 1, no contention; a caller may set another.
CONTENTION = 1.0
PASS_START = -1  # in place of an event's index: the start of the pass


class StreamEvent(NamedTuple):
    """A piece of work on a stream. `cause`: the index of the event at whose end it started."""

    what: TimedKernel | Transfer
    stream: str
    start: float
    end: float
    cause: int


@dataclass(frozen=True, kw_only=True, eq=False)
class StreamTimeline:
    """What streams did: events in the order in which they were decided, seconds until all that is waited for is done, and the
    seconds that the compute stream waited, by the axis that it waited for. `last`: the number of the event that ends it,
    `trailing` those of transfers that nothing waits for."""

    events: tuple[StreamEvent, ...]
    seconds: float
    exposed: dict[str, float]
    last: int
    trailing: tuple[int, ...]

    @cached_property
    def computed(self) -> dict[str, float]:
        """Seconds of kernels by phase."""
        found: dict[str, float] = {}
        for one in self.events:
            if isinstance(one.what, TimedKernel):
                found[one.what.phase] = found.get(one.what.phase, 0.0) + one.end - one.start
        return found

    def path(self, last: int | None = None) -> list[StreamEvent]:
        """The events that decide when it ends, or when the event `last` does, in order.

        Each starts when the one before it ends, the first one at the beginning.
        """
        found, place = [], self.last if last is None else last
        while place != PASS_START:
            found.append(self.events[place])
            place = found[-1].cause
        return found[::-1]


def play_streams(lists: Sequence[Sequence[TimedInstruction]], contention: float = CONTENTION) -> StreamTimeline:
    """Lists of work on the streams of one rank, from 0 on. `contention`: see `CONTENTION`.

    >>> send = Transfer(seconds=3.0, axis="tp", unit="block", name="all_gather")
    >>> kernels = [TimedKernel(seconds=s, unit="block", phase="forward", name="contract") for s in (2.0, 1.0)]
    >>> found = play_streams([[StartTransfer(send, "tp"), kernels[0], WaitTransfer(send), kernels[1]]])
    >>> found.seconds, found.exposed
    (4.0, {'tp': 1.0})
    """
    return _StreamPlayer(lists, contention).play()


@dataclass
class _StreamProgram:
    """A list, how far it has come, when, and which event that is the end of; what it has waited for since its last kernel."""

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
        while going := [one for one in self.programs if one.left]:
            self.step(min(going, key=self.next_at))
        return self.finish()

    def next_at(self, program: _StreamProgram) -> float:
        """When the next item of a program takes effect."""
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
            kernel,
            COMPUTE,
            start,
            start + self.contended_s(start, kernel.seconds),
            program.cause if program.now >= free else last,
        )
        program.now = self.events[program.cause].end

    def contended_s(self, start: float, seconds: float) -> float:
        """Seconds of a kernel with the transfers that run concurrently."""
        beside = min(max(self.moving_until - start, 0.0), seconds * self.contention)
        return seconds + beside * (1.0 - 1.0 / self.contention)

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

    def put(self, what: TimedKernel | Transfer, stream: str, start: float, end: float, cause: int) -> int:
        self.events.append(StreamEvent(what, stream, start, end, cause))
        self.free[stream] = end, len(self.events) - 1
        return len(self.events) - 1

    def charge(self, program: _StreamProgram, begin: float, end: float) -> None:
        """The time in which the compute stream had nothing to do, to the axes that the program waited for meanwhile."""
        for axis, since, until in program.waits:
            seconds = min(until, end) - max(since, begin)
            if seconds > 0.0:
                self.exposed[axis] = self.exposed.get(axis, 0.0) + seconds
        program.waits.clear()

    def finish(self) -> StreamTimeline:
        latest = max(self.programs, key=lambda one: one.now)
        free, _ = self.free.get(COMPUTE, (0.0, PASS_START))
        self.charge(latest, free, latest.now)
        left = tuple(number for number in self.done.values() if number not in self.awaited)
        return StreamTimeline(
            events=tuple(self.events), seconds=latest.now, exposed=self.exposed, last=latest.cause, trailing=left
        )
