"""Work that hears no Ctrl-C gets no further item after it."""

from __future__ import annotations

import _thread
import signal
import threading
from collections.abc import Iterator

import pytest

from shardwise.run.data.tokenizer import run_interruptibly


@pytest.fixture(autouse=True)
def hears_ctrl_c() -> Iterator[None]:
    """Also where the tests run in the background of a shell, whose processes ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_all_items_are_handed_over() -> None:
    taken: list[int] = []
    run_interruptibly(taken.extend, range(5))
    assert taken == list(range(5))


def test_errors_of_the_work_are_raised() -> None:
    def work(items: Iterator[int]) -> None:
        raise ValueError(f"stopped at {next(items)}")

    with pytest.raises(ValueError, match="stopped at 3"):
        run_interruptibly(work, [3])


def test_errors_of_the_items_are_raised() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise OSError("unreadable")

    with pytest.raises(OSError, match="unreadable"):
        run_interruptibly(list, items())


def test_ctrl_c_while_the_work_is_being_started_ends_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before `start` has returned; left running, the work of a test took 20 GB."""
    many, counted, started = 10**7, list[int](), list[threading.Thread]()
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        started.append(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_interruptibly(lambda items: counted.append(sum(1 for _ in items)), range(many))
    started[0].join()
    assert counted[0] < many


def test_after_ctrl_c_the_work_gets_no_further_item() -> None:
    taken: list[int] = []

    def long() -> Iterator[int]:
        yield from range(10**7)  # not endless: without Ctrl-C the test would take all memory

    def work(items: Iterator[int]) -> None:
        for item in items:
            taken.append(item)
            if item == 3:
                _thread.interrupt_main()

    with pytest.raises(KeyboardInterrupt):
        run_interruptibly(work, long())
    assert taken[:4] == [0, 1, 2, 3]
    assert len(taken) < 10**7
