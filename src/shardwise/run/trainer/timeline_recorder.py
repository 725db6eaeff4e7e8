"""Record the timeline of a step on this rank, under the names of the planned step.

Kernels are timed by replacing their units' calls: an engine without a recorder is unchanged. The compute stream does
one thing at a time, so that a wait inside a kernel's call, such as for gradients sent before, cuts the kernel in two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from shardwise.pipeline import Action
from shardwise.records import COLLECTIVE, KERNEL, WAIT, TraceEvent
from shardwise.records.step_inspection import PASS, PASSES, TraceEventKind
from shardwise.run.engine.unit_passes import SlotCall
from shardwise.run.parallel.mesh_collectives import TrafficLabel
from shardwise.run.step_clock import DeviceTimer, Timestamp
from shardwise.sharding import Axes
from shardwise.step import ACTIVATION, COMPUTE, CONTROL, START, UPDATE, charged_axis
from shardwise.step.instructions import KERNEL as LAUNCH
from shardwise.step.instructions import InstructionId

# Clock terms that are work on the compute stream outside units, and their phases; waits are recorded as such.
SPANS = {"optimizer": UPDATE, "data": "data"}
NAMES = {
    "AllGather": "all_gather", "ReduceScatter": "reduce_scatter", "AllReduce": "all_reduce", "AllToAll": "all_to_all",
}  # fmt: skip


class StreamActivity(NamedTuple):
    """Activity of the compute stream, with its unit and action."""

    kind: TraceEventKind
    name: str
    phase: str
    path: str
    unit: str
    action: str
    results: tuple[str, ...] = ()
    collective: RecordedCollective | None = None


@dataclass(slots=True, eq=False)
class RecordedCollective:
    """A collective in flight: `number` counts those over the same axes before it.

    `num_pending`: its parts that have not arrived; `done`: when the last one arrived, as its transport says; `waited_for`:
    when the wait for it ended. Both are None until then.
    """

    recorder: TimelineRecorder
    name: str
    role: str
    path: str
    phase: str
    axes: Axes
    num_bytes: int
    number: int
    started: Timestamp
    num_pending: int = 0
    done: Timestamp | None = None
    waited_for: Timestamp | None = None

    def follow(self, works: Sequence[Any]) -> None:
        """Follow the works of the issued collective."""
        self.num_pending = len(works)
        for work in works:
            future = _future(work)
            if future is not None:
                future.add_done_callback(self.arrived)

    def record_wait(self) -> AbstractContextManager[None]:
        """Return a context to enter around the wait for it."""
        return self.recorder.waiting(self)

    def arrived(self, _: torch.futures.Future[Any]) -> None:
        """Count an arrived part. The transport's own thread calls this."""
        self.num_pending -= 1
        if self.num_pending == 0:
            self.done = self.recorder.timer.now()

    @property
    def stream(self) -> str:
        """The axis that it is charged to."""
        return CONTROL if self.role == CONTROL else charged_axis(self.axes)

    @property
    def end(self) -> Timestamp | None:
        """Seconds at which it was done at the latest."""
        return self.done or self.waited_for


class TimelineRecorder:
    """Records from its creation until `events` is called. `units` has the kind of the unit at each path."""

    def __init__(self, device: torch.device, units: Mapping[str, str]) -> None:
        self.units, self.path, self.action = units, "", ""
        self.spans: list[tuple[StreamActivity, Timestamp, Timestamp]] = []
        self.collectives: list[RecordedCollective] = []
        self._open: list[StreamActivity] = []
        self._issued: Counter[Axes] = Counter()
        self._watched: dict[int, tuple[Sequence[SlotCall], tuple[SlotCall, ...]]] = {}
        self.timer = DeviceTimer(device)
        self._since = self.timer.origin

    def timed_calls(self, path: str, unit: str, steps: Sequence[SlotCall]) -> Sequence[SlotCall]:
        """Return the calls of a unit, which is about to run, with timed kernels."""
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
        self, kind: TraceEventKind, name: str, phase: str, results: tuple[str, ...] = (),
        collective: RecordedCollective | None = None,
    ) -> StreamActivity:  # fmt: skip
        """Return an activity of the unit that runs."""
        unit = self.units.get(self.path, "")
        return StreamActivity(kind, name, phase, self.path, unit, self.action, results, collective)

    @contextmanager
    def _span(self, activity: StreamActivity) -> Iterator[None]:
        """Record that the compute stream does this within the context; what it did before continues afterwards."""
        now = self.timer.now()
        self._close(now)
        self._open.append(activity)
        self._since = now
        try:
            yield
        finally:
            now = self.timer.now()
            self._close(now)
            self._open.pop()
            self._since = now

    def _close(self, now: Timestamp) -> None:
        if self._open:
            self.spans.append((self._open[-1], self._since, now))

    def begins(self, kind: str, num_bytes: int, axes: Axes, carries: TrafficLabel | None) -> RecordedCollective:
        """Record a collective that is about to be issued; without a label it belongs to the call that runs."""
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
        number, now = self._issued[axes], self.timer.now()
        collective = RecordedCollective(self, label, role, path, activity.phase, axes, num_bytes, number, now)
        self._issued[axes] += 1
        self.collectives.append(collective)
        return collective

    @contextmanager
    def waiting(self, collective: RecordedCollective) -> Iterator[None]:
        """Record that the compute stream waits for a collective."""
        with self._span(self._here(WAIT, collective.name, collective.phase, collective=collective)):
            yield
        collective.waited_for = self._since

    @contextmanager
    def record_pass(self, action: Action) -> Iterator[None]:
        """Record a pass of a micro-batch."""
        self.action, started = str(action), self.timer.now()
        try:
            yield
        finally:
            activity = self._here(PASS, self.action, action.kind)._replace(path="", unit="")
            self.spans.append((activity, started, self.timer.now()))
            self.path = self.action = ""

    def span(self, term: str) -> AbstractContextManager[None]:
        """Record work of no unit, by its term of the clock."""
        return self._span(self._here(KERNEL, term, SPANS[term])) if term in SPANS else nullcontext()

    def events(self) -> tuple[TraceEvent, ...]:
        """Return the events in order of their start. All work of the device must be done."""
        events = [
            *map(self._span_event, self.spans),
            *(self._collective_event(collective) for collective in self.collectives if collective.end is not None),
        ]
        return tuple(sorted(events, key=lambda event: (event.start_ns, -event.end_ns)))

    def _span_event(self, span: tuple[StreamActivity, Timestamp, Timestamp]) -> TraceEvent:
        activity, start, end = span
        collective = activity.collective
        event = TraceEvent(
            kind=activity.kind, name=activity.name, stream=PASSES if activity.kind == PASS else COMPUTE,
            start_ns=self.timer.ns(start), end_ns=self.timer.ns(end), path=activity.path,
            unit=activity.unit, phase=activity.phase, action=activity.action, results=activity.results,
            issued_ns=start.host_ns - self.timer.origin.host_ns,
            cpu_ns=end.cpu_ns - start.cpu_ns if activity.kind == KERNEL else 0,
        )  # fmt: skip
        if collective is None:
            return event
        return replace(
            event, role=collective.role, axes=collective.axes, num_bytes=collective.num_bytes, number=collective.number
        )

    def _collective_event(self, collective: RecordedCollective) -> TraceEvent:
        assert collective.end is not None
        start = self.timer.ns(collective.started)
        return TraceEvent(
            kind=COLLECTIVE, name=collective.name, stream=collective.stream, start_ns=start,
            end_ns=max(self.timer.ns(collective.end), start), path=collective.path, unit=self.units.get(collective.path, ""),
            phase=collective.phase, role=collective.role, axes=collective.axes, num_bytes=collective.num_bytes,
            number=collective.number, issued_ns=collective.started.host_ns - self.timer.origin.host_ns,
        )  # fmt: skip


def _future(work: Any) -> torch.futures.Future[Any] | None:
    """Return the future of a collective; messages of gloo have none."""
    try:
        future: torch.futures.Future[Any] = work.get_future()
    except RuntimeError:  # "not implemented"
        return None
    return future
