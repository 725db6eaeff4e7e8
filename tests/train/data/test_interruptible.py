"""Work that hears no Ctrl-C gets no further item after it."""

from __future__ import annotations

import _thread
from collections.abc import Iterator

import pytest

from shardwise.train.data.interruptible import fed


def test_all_items_are_handed_over() -> None:
    taken: list[int] = []
    fed(taken.extend, range(5))
    assert taken == list(range(5))


def test_what_the_work_raises_is_raised() -> None:
    def work(items: Iterator[int]) -> None:
        raise ValueError(f"stopped at {next(items)}")

    with pytest.raises(ValueError, match="stopped at 3"):
        fed(work, [3])


def test_what_the_items_raise_is_raised() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise OSError("unreadable")

    with pytest.raises(OSError, match="unreadable"):
        fed(list, items())


def test_after_ctrl_c_the_work_gets_no_further_item() -> None:
    taken: list[int] = []

    def endless() -> Iterator[int]:
        number = 0
        while True:  # ends only because nothing more is asked for
            yield number
            number += 1

    def work(items: Iterator[int]) -> None:
        for item in items:
            taken.append(item)
            if item == 3:
                _thread.interrupt_main()

    with pytest.raises(KeyboardInterrupt):
        fed(work, endless())
    assert taken[:4] == [0, 1, 2, 3]
