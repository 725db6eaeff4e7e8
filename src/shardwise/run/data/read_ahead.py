"""A thread that reads items of coming steps ahead of their consumer."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from queue import Empty, Queue
from typing import Generic, TypeVar

Item = TypeVar("Item")
END_S = 10.0  # seconds that the end of a process waits for a read of a file system that may hang
DEPTH = 2  # items in the queue: one ready while the next is read


class _StepEnd:
    """The end of a step's items in the queue, with the error that ended it, if any."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class _ReaderThread(Generic[Item]):
    """A thread that reads step by step, as far ahead as the queue has room."""

    def __init__(self, read: Callable[[int], Iterable[Item]], steps: range) -> None:
        self.items: Queue[Item | _StepEnd] = Queue(DEPTH)
        self.steps, self.closed = steps, False
        self._thread = threading.Thread(target=self._run, args=(read, steps), name="data", daemon=True)
        self._thread.start()

    def _run(self, read: Callable[[int], Iterable[Item]], steps: range) -> None:
        for step in steps:
            error: BaseException | None = None
            try:
                for item in read(step):
                    self.items.put(item)
                    if self.closed:
                        return
            except BaseException as caught:
                error = caught
            self.items.put(_StepEnd(error))
            if error or self.closed:
                return

    def close(self) -> None:
        """Have the thread end, and wake it if it waits for room."""
        self.closed = True
        with suppress(Empty):
            while True:
                self.items.get_nowait()

    def end(self) -> None:
        """Close, and wait until the thread has ended: one that frees a tensor while the interpreter ends aborts the
        process."""
        self.close()
        self._thread.join(END_S)


class ReadAhead(Generic[Item]):
    """The items that `read` returns for each of the steps up to `stop`, read by a thread ahead of their use.

    Steps are requested in order; after any other step reading starts again from there. An error of `read` is raised
    where the step's next item is requested. `num_taken` counts requests, the end of each step included, and `num_waits`
    those that had to wait for the thread.

    >>> ahead = ReadAhead(lambda step: (f"{step}.{number}" for number in range(2)), stop=10)
    >>> list(ahead.step(0)), list(ahead.step(1)), list(ahead.step(7))
    (['0.0', '0.1'], ['1.0', '1.1'], ['7.0', '7.1'])
    """

    def __init__(self, read: Callable[[int], Iterable[Item]], stop: int) -> None:
        self.read, self.stop = read, stop
        self._reader: _ReaderThread[Item] | None = None
        self._next = 0
        self.num_taken = self.num_waits = 0

    def step(self, step: int) -> Iterator[Item]:
        """Yield the items of a step; all of the step before must have been taken."""
        if self._reader is None or step != self._next or step not in self._reader.steps:
            self._begin(step)
        reader, self._next = self._reader, -1
        assert reader is not None
        while not isinstance(item := self._take(reader.items), _StepEnd):
            yield item
        if item.error is not None:
            raise item.error
        self._next = step + 1

    def restart(self) -> None:
        """Discard what was read ahead: the next step is read when it is requested."""
        self._next = -1

    def _take(self, items: Queue[Item | _StepEnd]) -> Item | _StepEnd:
        """Return the next item, counting it and whether it had to be waited for."""
        self.num_waits += items.empty()
        self.num_taken += 1
        return items.get()

    def _begin(self, step: int) -> None:
        if self._reader is not None:
            self._reader.close()
        self._reader = _ReaderThread(self.read, range(step, max(self.stop, step + 1)))
        weakref.finalize(self, self._reader.end)
