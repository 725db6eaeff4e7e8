"""Checkpoints of several ranks: other ranks read them bit for bit, training continues meanwhile, and none is half
written.
"""

from __future__ import annotations

import math
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_processes
from thinned import part_of
from torch import Tensor

from shardwise.run.checkpoints import Checkpointer, CheckpointState, TensorShard, latest, load_tensors, step_folders
from shardwise.run.checkpoints import writer as writer_module
from shardwise.values.errors import InputError

SIZES = {
    "model.layers.0.wq": (96, torch.bfloat16), "model.head": (7, torch.bfloat16), "master.layers.0.wq": (96, torch.float32),
    "exp_avg.layers.0.wq": (96, torch.float64), "counts": (5, torch.int64), "scaled": (33, torch.float8_e4m3fn),
}  # fmt: skip
VALUES = {"step": 200, "loss": 2.5, "seed": None, "order": {"epoch": 1, "next": [3, 4]}}
LAYOUTS: dict[str, Callable[[int, int, int], tuple[int, int]]] = {  # rank, ranks, elements: the interval of a rank
    "even": lambda rank, ranks, size: (min(rank * -(-size // ranks), size), min((rank + 1) * -(-size // ranks), size)),
    "uneven": lambda rank, ranks, size: (rank**2 * size // ranks**2, (rank + 1) ** 2 * size // ranks**2),
    "hybrid": lambda rank, ranks, size: (rank // 2 * size // (ranks // 2), (rank // 2 + 1) * size // (ranks // 2)),
    "replicated": lambda rank, ranks, size: (0, size),
    "on the last": lambda rank, ranks, size: (0, size) if rank == ranks - 1 else (size, size),
}


def reference(name: str) -> Tensor:
    """A tensor's bits, different for each name and element."""
    size, dtype = SIZES[name]
    start = 1000 * list(SIZES).index(name)
    return (torch.arange(start, start + size, dtype=torch.float64) / 7).sin().mul(300).to(dtype)


def rank_state(layout: str, filled: bool = True) -> dict[str, Any]:
    """This rank's state; of one process alone, all of it."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    pieces: dict[str, Any] = {}
    for name, (size, _) in SIZES.items():
        start, stop = LAYOUTS[layout](rank, ranks, size)
        values = reference(name)[start:stop]
        pieces[name] = TensorShard((size,), (start,), values if filled else torch.zeros_like(values))
    return pieces | VALUES


def bits(state: CheckpointState) -> dict[str, Tensor]:
    return {name: piece.values.view(torch.uint8) for name, piece in state.items() if isinstance(piece, TensorShard)}


def same(first: CheckpointState, second: CheckpointState) -> bool:
    theirs = bits(second)
    return all(torch.equal(values, theirs[name]) for name, values in bits(first).items())


def save_state(folder: Path, layout: str, step: int = 200, keep: int = 2) -> None:
    with Checkpointer(folder, keep=keep) as writer:
        writer.save(step, rank_state(layout))


def loads_state(folder: Path, layout: str) -> bool:
    state = rank_state(layout, filled=False)
    with Checkpointer(folder, keep=2) as reader:
        path = reader.latest()
        assert path is not None
        values = reader.load(path, state)
    return values == VALUES and same(state, rank_state(layout))


READERS = ((2, "replicated"), (3, "uneven"), (4, "even"))
WRITERS = [(1, "even"), (2, "uneven"), (3, "on the last"), (4, "hybrid"), (4, "even"), (3, "replicated")]


@pytest.mark.parametrize(("ranks", "layout"), WRITERS)
def test_saved_state_loads_bit_for_bit_on_other_ranks(tmp_path: Path, ranks: int, layout: str) -> None:
    """One process reads what all of them save; the suite has the three groups of ranks that read take turns."""
    run_processes(save_state, ranks, tmp_path, layout)
    assert loads_state(tmp_path, "even")
    first = WRITERS.index((ranks, layout)) % len(READERS)
    for readers, theirs in part_of([*READERS[first:], *READERS[:first]]):
        assert run_processes(loads_state, readers, tmp_path, theirs) == [True] * readers, (readers, theirs)
    tensors = load_tensors(tmp_path / "step-00000200")
    assert {name: tensors[name].view(torch.uint8).tolist() for name in tensors} == {
        name.removeprefix("model."): reference(name).view(torch.uint8).tolist()
        for name in SIZES
        if name.startswith("model.")
    }


SHAPE = (4, 6, 2)
MATRIX = torch.arange(math.prod(SHAPE), dtype=torch.float32).view(SHAPE)
BOXES: dict[str, Callable[[int], tuple[tuple[int, ...], tuple[int, ...]]]] = {  # rank of 4: offsets and lengths
    "rows": lambda rank: ((rank, 0, 0), (1, 6, 2)),
    "columns": lambda rank: ((0, (0, 1, 4, 4)[rank], 0), (4, (1, 3, 0, 2)[rank], 2)),
    "grid": lambda rank: ((2 * (rank // 2), 3 * (rank % 2), 0), (2, 3, 2)),
    "grid of replicas": lambda rank: ((0, 3 * (rank % 2), 0), (4, 3, 2)),
    "intervals": lambda rank: (((0, 5, 19, 40)[rank],), ((5, 14, 21, 8)[rank],)),
    "whole": lambda rank: ((0, 0, 0), SHAPE),
}


def box_of(boxes: str) -> tuple[TensorShard, Tensor]:
    """This rank's piece, empty, and what is to be in it."""
    offsets, lengths = BOXES[boxes](dist.get_rank())
    of = MATRIX if len(offsets) == len(SHAPE) else MATRIX.flatten()
    expected = of[tuple(slice(start, start + length) for start, length in zip(offsets, lengths, strict=True))]
    return TensorShard(SHAPE, offsets, torch.full(lengths, -1.0)), expected


def find_wrong_boxes(folder: Path) -> list[tuple[str, str]]:
    """Pairs of boxes of which what is saved in the first is not what is read in the second."""
    wrong = []
    with Checkpointer(folder, keep=len(BOXES)) as checkpoints:
        for step, boxes in enumerate(BOXES):
            piece, values = box_of(boxes)
            checkpoints.save(step, {"a": replace(piece, values=values)})
            for read_boxes in BOXES:
                target, expected = box_of(read_boxes)
                checkpoints.load(folder / f"step-{step:08d}", {"a": target})
                wrong += [] if torch.equal(target.values, expected) else [(boxes, read_boxes)]
    return wrong


def test_boxes_of_n_dims_are_read_in_any_other_boxes(tmp_path: Path) -> None:
    assert run_processes(find_wrong_boxes, 4, tmp_path) == [[]] * 4
    for step, boxes in enumerate(BOXES):
        assert torch.equal(load_tensors(tmp_path / f"step-{step:08d}", "")["a"], MATRIX), boxes


def test_replicated_state_is_written_once_by_all_ranks(tmp_path: Path) -> None:
    save_state(tmp_path / "one", "replicated")
    run_processes(save_state, 3, tmp_path / "three", "replicated")
    single, three = (
        [file.stat().st_size for file in (tmp_path / name / "step-00000200").glob("*.bin")] for name in ("one", "three")
    )
    assert sum(three) == sum(single)
    assert len(three) == 3
    assert max(three) < 0.6 * sum(single)


def overwritten(folder: Path) -> tuple[bool, bool]:
    """Whether nothing is there before the writer may write, and whether what is then there is what was handed over."""
    state, may_write, write_pieces = rank_state("uneven"), threading.Event(), writer_module.write_shards

    def late(*arguments: Any) -> Any:
        may_write.wait()
        return write_pieces(*arguments)

    writer_module.write_shards = late
    with Checkpointer(folder, keep=2) as writer:
        writer.start(200, state)
        for values in bits(state).values():
            values.fill_(255)
        early = latest(folder)
        may_write.set()
        for _ in range(20):  # the training's own collectives, beside those of the writer
            total = torch.ones(1)
            dist.all_reduce(total)
            assert total.item() == dist.get_world_size()
        writer.wait()
    return early is None, loads_state(folder, "uneven")


def test_tensors_may_change_while_the_background_writes(tmp_path: Path) -> None:
    assert run_processes(overwritten, 3, tmp_path) == [(True, True)] * 3


@contextmanager
def no_room(where: bool) -> Iterator[None]:
    """Limit the files of this process to a few bytes: the system refuses to write, as on a full disk."""
    _, hard = before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16 if where else before[0], hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def fail_background_save(folder: Path, close: bool, where: int) -> tuple[str, str]:
    """Return the error raised after a background save for which a rank had no room, and the latest checkpoint's name."""
    writer = Checkpointer(folder, keep=2)
    writer.save(100, rank_state("even"))
    with no_room(dist.get_rank() == where):
        writer.start(200, rank_state("even"))
        with pytest.raises(InputError, match="a folder with room") as error:
            writer.close() if close else writer.start(300, rank_state("even"))
    last = latest(folder)
    assert last is not None
    dist.barrier()
    if not close:
        writer.save(400, rank_state("even"))
        writer.close()
    return str(error.value), last.name


@pytest.mark.parametrize(("close", "where"), [(True, 0), (True, 1), (False, 1)])
def test_a_failure_of_one_rank_is_raised_on_all_by_the_next_call(tmp_path: Path, close: bool, where: int) -> None:
    text = (
        f"checkpoint: {tmp_path / '.step-00000200.writing'}: File too large; a folder with room, and the permission to write in "
        "it, are required: the latest checkpoint is step-00000100"
    )
    assert run_processes(fail_background_save, 2, tmp_path, close, where) == [(text, "step-00000100")] * 2
    names = {"step-00000100"} if close else {"step-00000100", "step-00000400"}
    assert {path.name for path in tmp_path.iterdir()} == names, "the draft takes no room"


def die_in_save(folder: Path, point: str, before: bool, rank: int) -> None:
    """Save step 100, then die at `point` of the save of step 200; at `sync_folder`, of another one of step 100."""
    module: Any = {"rmtree": step_folders.shutil, "sync_folder": step_folders, "_write_rank_file": writer_module}.get(
        point, writer_module
    )
    function = getattr(module, point)

    def dying(*arguments: Any, **more: Any) -> Any:
        result = None if before else function(*arguments, **more)
        os.kill(os.getpid(), signal.SIGKILL)
        return result

    with Checkpointer(folder, keep=1) as writer:
        writer.save(100, rank_state("even"))
        if dist.get_rank() == rank:
            setattr(module, point, dying)
        writer.save(100 if point == "sync_folder" else 200, rank_state("even"))


@pytest.mark.parametrize(
    ("ranks", "point", "before", "rank", "step"),
    [
        (2, "_write_rank_file", True, 1, 100),
        (2, "_write_rank_file", False, 0, 100),
        (2, "write_shards", False, 1, 200),  # all have written: the first one completes it
        (1, "create_draft", False, 0, 100),
        (1, "write_manifest", False, 0, 100),
        (1, "sync_folder", True, 0, 100),
        (1, "rmtree", True, 0, 200),  # the older one is being removed
        (2, "publish_draft", False, 0, 200),
    ],
)
def test_a_killed_process_leaves_the_last_complete_checkpoint(
    tmp_path: Path, ranks: int, point: str, before: bool, rank: int, step: int
) -> None:
    with pytest.raises(AssertionError):
        run_processes(
            die_in_save, ranks, tmp_path, point, before, rank, grace_s=30.0
        )  # the other one goes on as far as it can
    newest = latest(tmp_path)
    assert newest is not None
    assert newest.name == (".step-00000100.replaced" if point == "sync_folder" else f"step-{step:08d}")
    assert loads_state(tmp_path, "even")
    save_state(tmp_path, "even", 300, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000300"]


def save_with_problems(folder: Path) -> list[str]:
    """Return this rank's errors for a hole, overlapping pieces, plain values and steps that differ, and names."""
    rank, half = dist.get_rank(), torch.zeros(4)
    states: list[tuple[int, CheckpointState]] = [
        (1, {"a": TensorShard((9,), (5 * rank,), half)}),
        (1, {"a": TensorShard((8,), (3 * rank,), half)}),
        (1, {"a": TensorShard((8,), (4 * rank,), half), "step": rank}),
        (rank, {"a": TensorShard((8,), (4 * rank,), half)}),
    ]
    texts = []
    with Checkpointer(folder, keep=2) as writer:
        for step, state in states:
            with pytest.raises(ValueError, match=r"the ranks together hold|on another|save steps") as error:
                writer.save(step, state)
            texts.append(str(error.value))
        assert latest(folder) is None
        writer.save(5, {"a": TensorShard((8,), (4 * rank,), half), "step": 5})
        state_to_load: CheckpointState = (
            {"a": TensorShard((8,), (0,), torch.zeros(8)), "step": 5} if rank else {"b": TensorShard((8,), (0,), half)}
        )
        with pytest.raises(InputError) as problem:
            writer.load(folder / "step-00000005", state_to_load)
    return [*texts, str(problem.value)]


def without_a_folder(path: Path) -> str:
    with Checkpointer(path, keep=2) as writer, pytest.raises(InputError) as error:
        writer.save(1, rank_state("even"))
    return str(error.value)


def test_what_only_the_first_rank_does_fails_on_all(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    first, second = run_processes(without_a_folder, 2, tmp_path / "file")
    assert first == second
    assert first.startswith(f"checkpoint: {tmp_path / 'file'}: File exists; a folder with room")


def test_all_ranks_say_what_is_wrong_with_one(tmp_path: Path) -> None:
    first, second = run_processes(save_with_problems, 2, tmp_path)
    assert first == second
    hole, overlap, values, steps, names = first
    assert hole == "a of shape [9]: the ranks together hold 8 of 9 elements; each element once is required"
    assert overlap == "a of shape [8]: the ranks together hold boxes that overlap; each element once is required"
    assert values == "step is 0 on one rank and 1 on another; the same is required"
    assert steps == "the ranks save steps 0, 1 together; the same step is required"
    assert "lacks 1 tensors: b;" in names
