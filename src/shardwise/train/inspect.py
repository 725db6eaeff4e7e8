"""An engine's steps watched from below: bytes by term, and every collective."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from shardwise.measurement.inspection import Inspection
from shardwise.train.capture import Capture
from shardwise.train.engine import Engine
from shardwise.train.memory import GATHERED, WORKSPACE, MemoryTracker


@dataclass(frozen=True, slots=True)
class Watch:
    """What watches: the storages, and the process groups."""

    tracker: MemoryTracker
    capture: Capture

    @property
    def found(self) -> Inspection:
        """What was seen by now."""
        return Inspection(self.tracker.memory(), self.capture.found, self.tracker.curve())


@contextmanager
def watched(engine: Engine) -> Iterator[Watch]:
    """Watch the one step that is run within. It is slower for it."""
    watch = Watch(MemoryTracker(engine.instance.words_of_rank), Capture(engine.world))
    held = list(engine.held())
    for term, tensor in held:
        watch.tracker.name(term, [tensor])
    name = watch.tracker.name
    engine.watch(
        watch.tracker.forward_ended, lambda whole: name(GATHERED, [whole]), lambda values: name(WORKSPACE, [values])
    )
    try:
        with watch.tracker, watch.capture:
            yield watch
    finally:
        engine.watch(lambda: None, lambda whole: None)
