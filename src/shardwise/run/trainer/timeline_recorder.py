"""Records the timeline of a step on this rank, under the names of the planned step.

Kernels are timed by taking the place of their units' steps: an engine without a recorder runs what it always runs. The compute
stream does one thing at a time, so that a wait inside a kernel's call, such as for the gradients that were sent before, cuts the
kernel in two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from shardwise.pipeline.actions import Action
from shardwise.records.step_trace import COLLECTIVE, KERNEL, PASS, PASSES, WAIT, TraceEvent, TraceEventKind
from shardwise.run.engine.unit_passes import SlotCall
from shardwise.run.parallel.collectives import TrafficLabel
from shardwise.run.step_clock import DeviceTimer, Timestamp
from shardwise.sharding.spec import Axes
from shardwise.step.instructions import ACTIVATION, COMPUTE, CONTROL, START, UPDATE, InstructionId, charged_axis
from shardwise.step.instructions import KERNEL as LAUNCH

# Spans of the clock that are work of the compute stream and no unit's, and their phases; waits are recorded by themselves.
SPANS = {"optimizer": UPDATE, "data": "data"}
NAMES = {
    "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter",
    "AllReduce": "all_reduce",
    "AllToAll": "all_to_all",
}


class StreamActivity(NamedTuple):
    """What the compute stream does, and where."""

    kind: TraceEventKind
    name: str
    phase: str
    path: str
    unit: str
    action: str
    results: tuple[str, ...] = ()
    moved: RecordedCollective | None = None


@dataclass(slots=True, eq=False)
class RecordedCollective:
    """A collective on its way: `number` is that of those over the same axes before it. `done`: when all of its `left` parts had
    arrived, as its transport says, and `waited_for` when it had been waited for; None as long as it was not."""

    recorder: TimelineRecorder
    name: str
    role: str
    path: str
    phase: str
    axes: Axes
    num_bytes: int
    number: int
    begun: Timestamp
    left: int = 0
    done: Timestamp | None = None
    waited_for: Timestamp | None = None

    def follow(self, works: Sequence[Any]) -> None:
        """It has been issued, and goes on as these."""
        self.left = len(works)
        for work in works:
            future = _future(work)
            if future is not None:
                future.add_done_callback(self.arrived)

    def record_wait(self) -> AbstractContextManager[None]:
        """Around the wait for it."""
        return self.recorder.waiting(self)

    def arrived(self, _: torch.futures.Future[Any]) -> None:
        """One of its parts is there. The transport's own thread calls this."""
        self.left -= 1
        if self.left == 0:
            self.done = self.recorder.marks.now()

    @property
    def stream(self) -> str:
        """The axis that it is charged to."""
        return CONTROL if self.role == CONTROL else charged_axis(self.axes)

    @property
    def end(self) -> Timestamp | None:
        """When it was done at the latest."""
        return self.done or self.waited_for


class TimelineRecorder:
    """Records from when it is made until `events` is asked for. `units` has the kind of the unit at each path."""

    def __init__(self, device: torch.device, units: Mapping[str, str]) -> None:
        self.units, self.path, self.action = units, "", ""
        self.spans: list[tuple[StreamActivity, Timestamp, Timestamp]] = []
        self.moved: list[RecordedCollective] = []
        self._open: list[StreamActivity] = []
        self._issued: Counter[Axes] = Counter()
        self._watched: dict[int, tuple[Sequence[SlotCall], tuple[SlotCall, ...]]] = {}
        self.marks = DeviceTimer(device)
        self._since = self.marks.origin

    def timed_calls(self, path: str, unit: str, steps: Sequence[SlotCall]) -> Sequence[SlotCall]:
        """The steps of a unit, about to run, with kernels that are timed."""
        self.path = path
        if id(steps) not in self._watched:
            timed = (step._replace(kernel=partial(self._timed, step.kernel, step.identity)) for step in steps)
            self._watched[id(steps)] = steps, tuple(timed)
        return self._watched[id(steps)][1]

    def _timed(self, kernel: Callable[..., Any], identity: InstructionId, *operands: Any) -> Any:
        kind, name, phase, results = identity
        label = name if kind == LAUNCH else f"{kind} {name}"
        with self._span(self._here(KERNEL, label, phase, results)):
            return kernel(*operands)

    def _here(
        self,
        kind: TraceEventKind,
        name: str,
        phase: str,
        results: tuple[str, ...] = (),
        collective: RecordedCollective | None = None,
    ) -> StreamActivity:
        """At the unit that runs."""
        return StreamActivity(
            kind, name, phase, self.path, self.units.get(self.path, ""), self.action, results, collective
        )

    @contextmanager
    def _span(self, activity: StreamActivity) -> Iterator[None]:
        """The compute stream does this now, and goes on afterwards with what it did."""
        now = self.marks.now()
        self._close(now)
        self._open.append(activity)
        self._since = now
        try:
            yield
        finally:
            now = self.marks.now()
            self._close(now)
            self._open.pop()
            self._since = now

    def _close(self, now: Timestamp) -> None:
        if self._open:
            self.spans.append((self._open[-1], self._since, now))

    def begins(self, kind: str, num_bytes: int, axes: Axes, carries: TrafficLabel | None) -> RecordedCollective:
        """A collective is about to be issued; one of activations is that of the call that runs."""
        activity = self._open[-1] if self._open else self._here(KERNEL, "", "")
        name, (role, path) = NAMES.get(kind, kind.lower()), carries or (ACTIVATION, self.path)
        result_name = activity.name.removeprefix(f"{START} ")
        label = (
            f"{name} {role}"
            if carries
            else result_name
            if result_name != activity.name
            else f"{name} {activity.name}".strip()
        )
        collective = RecordedCollective(
            self, label, role, path, activity.phase, axes, num_bytes, self._issued[axes], self.marks.now()
        )
        self._issued[axes] += 1
        self.moved.append(collective)
        return collective

    @contextmanager
    def waiting(self, collective: RecordedCollective) -> Iterator[None]:
        """The compute stream waits for a collective."""
        with self._span(self._here(WAIT, collective.name, collective.phase, collective=collective)):
            yield
        collective.waited_for = self._since

    @contextmanager
    def record_pass(self, action: Action) -> Iterator[None]:
        """A pass of a micro-batch."""
        self.action, begun = str(action), self.marks.now()
        try:
            yield
        finally:
            activity = self._here(PASS, self.action, action.kind)._replace(path="", unit="")
            self.spans.append((activity, begun, self.marks.now()))
            self.path = self.action = ""

    def span(self, term: str) -> AbstractContextManager[None]:
        """Work that is no unit's, by the term of the clock that it counts for."""
        return self._span(self._here(KERNEL, term, SPANS[term])) if term in SPANS else nullcontext()

    def events(self) -> tuple[TraceEvent, ...]:
        """What was recorded, in the order in which it began. All work of the device must be done."""
        events = [
            *map(self._of_span, self.spans),
            *(self._of_moved(collective) for collective in self.moved if collective.end is not None),
        ]
        return tuple(sorted(events, key=lambda event: (event.start_ns, -event.end_ns)))

    def _of_span(self, span: tuple[StreamActivity, Timestamp, Timestamp]) -> TraceEvent:
        activity, start, end = span
        collective = activity.moved
        event = TraceEvent(
            kind=activity.kind, name=activity.name, stream=PASSES if activity.kind == PASS else COMPUTE, start_ns=self.marks.ns(start),
            end_ns=self.marks.ns(end), path=activity.path, unit=activity.unit, phase=activity.phase, action=activity.action,
            results=activity.results, issued_ns=start.host_ns - self.marks.origin.host_ns,
            cpu_ns=end.cpu_ns - start.cpu_ns if activity.kind == KERNEL else 0,
        )  # fmt: skip
        if collective is None:
            return event
        return replace(
            event, role=collective.role, axes=collective.axes, num_bytes=collective.num_bytes, number=collective.number
        )

    def _of_moved(self, collective: RecordedCollective) -> TraceEvent:
        assert collective.end is not None
        start = self.marks.ns(collective.begun)
        return TraceEvent(
            kind=COLLECTIVE, name=collective.name, stream=collective.stream, start_ns=start, end_ns=max(self.marks.ns(collective.end), start),
            path=collective.path, unit=self.units.get(collective.path, ""), phase=collective.phase, role=collective.role, axes=collective.axes,
            num_bytes=collective.num_bytes, number=collective.number, issued_ns=collective.begun.host_ns - self.marks.origin.host_ns,
        )  # fmt: skip


def _future(work: Any) -> torch.futures.Future[Any] | None:
    """What says when a collective is done; messages of gloo have none."""
    try:
        future: torch.futures.Future[Any] = work.get_future()
    except RuntimeError:  # "not implemented"
        return None
    return future
