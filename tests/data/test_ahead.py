"""Micro-batches that a thread reads ahead: in order, no further than there is room, and gone with who asked for them."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from shardwise.layout.layout import Layout
from shardwise.run.data.batches import DEPTH, Batches, ReadAhead
from shardwise.run.data.token_shard_reader import TokenShards
from shardwise.run.trainer.data_loader import MicroBatchLoader
from shardwise.values.errors import InputError

FOREVER_S = 600.0  # that what is sure to happen may take: nothing is measured by it


class Reader:
    """Two items for each step; says when each was read."""

    def __init__(self) -> None:
        self.read: list[str] = []
        self.news = threading.Condition()

    def __call__(self, step: int) -> Iterator[str]:
        for number in range(2):
            with self.news:
                self.read.append(f"{step}.{number}")
                self.news.notify_all()
            yield f"{step}.{number}"

    def wait_for(self, item: str) -> None:
        with self.news:
            assert self.news.wait_for(lambda: item in self.read, FOREVER_S), self.read


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "data"]


def test_the_next_steps_are_read_while_one_is_in_use() -> None:
    reader = Reader()
    ahead = ReadAhead(reader, stop=10)
    first = next(ahead.step(0))
    reader.wait_for("1.0")  # nobody has asked for it
    assert first == "0.0"
    assert len(reader.read) <= 1 + DEPTH + 1, "no further than there is room: in hand, waiting, and being handed over"


def test_waits_for_the_thread_are_counted() -> None:
    """The thread reads an item only when the one before is there to be taken, so that this one is not waited for."""
    reader, tick = Reader(), threading.Event()

    def read(step: int) -> Iterator[str]:
        for _ in range(int(FOREVER_S / 1e-3)):
            if ahead.num_waits:  # the first item has been asked for
                break
            tick.wait(1e-3)
        return reader(step)

    ahead = ReadAhead(read, stop=100)
    items = ahead.step(0)
    assert next(items) == "0.0"
    assert (ahead.num_taken, ahead.num_waits) == (1, 1), "nothing can be read before it is asked for"
    for step in range(20):
        for number in range(2 if step else 1):
            reader.wait_for(f"{step}.1" if number == 0 and step else f"{step + 1}.0")
            assert next(items) == f"{step}.{number if step else 1}"
        reader.wait_for(f"{step + 1}.0")
        assert list(items) == []
        items = ahead.step(step + 1)
    assert (ahead.num_taken, ahead.num_waits) == (3 * 20, 1)


def test_the_last_step_ends_the_reading() -> None:
    before = set(threads())
    ahead = ReadAhead(Reader(), stop=3)
    assert [list(ahead.step(step)) for step in range(3)] == [[f"{step}.0", f"{step}.1"] for step in range(3)]
    for thread in set(threads()) - before:
        thread.join(FOREVER_S)
        assert not thread.is_alive()
    assert list(ahead.step(3)) == ["3.0", "3.1"], "a step beyond is read when it is asked for"


def test_an_unexpected_step_restarts_the_reader() -> None:
    ahead = ReadAhead(Reader(), stop=100)
    assert list(ahead.step(0)) == ["0.0", "0.1"]
    assert list(ahead.step(40)) == ["40.0", "40.1"]
    assert next(ahead.step(41)) == "41.0"
    assert list(ahead.step(41)) == ["41.0", "41.1"], "a step that was not taken whole"


def test_errors_of_the_reader_are_raised_by_next() -> None:
    def read(step: int) -> Iterator[int]:
        yield step
        if step == 1:
            raise InputError("damaged")

    ahead = ReadAhead(read, stop=5)
    assert list(ahead.step(0)) == [0]
    items = ahead.step(1)
    assert next(items) == 1
    with pytest.raises(InputError, match="damaged"):
        next(items)


def test_reader_thread_ends_with_its_owner() -> None:
    gc.collect()
    before = set(threads())
    ahead = ReadAhead(Reader(), stop=1000)
    next(ahead.step(0))
    (reader_thread,) = set(threads()) - before
    del ahead
    gc.collect()
    reader_thread.join(FOREVER_S)
    assert not reader_thread.is_alive()


def test_readers_of_steps_that_were_left_are_freed() -> None:
    """Each would otherwise be kept until the end of the run, with its queue."""
    ahead = ReadAhead(Reader(), stop=1000)
    for step in range(0, 40, 2):
        assert next(ahead.step(step)) == f"{step}.0"
    reader = ahead._reader
    assert reader is not None
    gc.collect()
    live_readers = [item for item in gc.get_objects() if type(item) is type(reader) and item.steps.stop == 1000]
    assert len(live_readers) <= 2, "the last one, and the one before whose thread may be ending"


def test_a_read_that_is_under_way_is_waited_for() -> None:
    """As the interpreter ends it would otherwise be in the middle of one."""
    begun, may_end = threading.Event(), threading.Event()

    def read(step: int) -> Iterator[int]:
        if step:
            begun.set()
            may_end.wait(FOREVER_S)
        yield step

    gc.collect()
    before = set(threads())
    ahead = ReadAhead(read, stop=1000)
    assert list(ahead.step(0)) == [0]
    assert begun.wait(FOREVER_S)
    (reader_thread,) = set(threads()) - before
    threading.Timer(0.2, may_end.set).start()
    del ahead
    gc.collect()
    assert not reader_thread.is_alive()


def test_for_a_gpu_tensors_are_pinned_by_the_thread_that_reads(shards_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[str] = []

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(threading.current_thread().name)
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    shards: TokenShards = shards_of([[1, 2, 3, 4, 5, 6, 7, 8, 0]])
    batches = Batches(shards, seq_len=2, batch=2)
    for device, expected in (("cuda", ["data"] * 4), ("cpu", [])):
        pinned.clear()
        feed = MicroBatchLoader(Layout(), 0, torch.device(device), documents=False)
        prefetched = list(feed.prefetch(batches, stop=1).step(0))
        assert [batch.ids_BT.shape for batch in prefetched] == [(1, 2), (1, 2)]
        assert pinned == expected
        assert torch.cat([batch.ids_BT for batch in prefetched]).tolist() == batches.batch(0).inputs_BT.tolist()
