"""Writing the checkpoints of a run: the tensors are copied, then a thread writes while the training goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import InputError
from shardwise.files import DamagedError
from shardwise.measurement.folder import named
from shardwise.train.checkpoint.folders import begin, draft, give_up, latest, newest_first, publish, set_aside
from shardwise.train.checkpoint.loading import load
from shardwise.train.checkpoint.manifest import Manifest, write_manifest
from shardwise.train.checkpoint.piece import Piece, State, split
from shardwise.train.checkpoint.ranks import Ranks
from shardwise.train.checkpoint.writing import Written, write_pieces
from shardwise.train.transport.interface import TIMEOUT
from shardwise.train.waits import LostRankError, waits_for


@dataclass(frozen=True, slots=True)
class Restored:
    """What a state was filled from: the checkpoint of `step`, and its plain values. `damaged` are later ones that could not be
    read: the step of each, and what is wrong with it."""

    step: int
    values: Mapping[str, Any]
    damaged: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Saved:
    """A save that is complete: its step, the seconds in which the training waited for it, those until it was on the disk, and on
    the first rank the bytes of all its files."""

    step: int
    stall_s: float
    write_s: float
    num_bytes: int


class Checkpointer:
    """The checkpoints of a run in `folder`, of which the `keep` newest are kept, and those whose step is a multiple of
    `keep_every` (0: no others).

    All ranks of the job make one and call its methods together, in the same order; with no process group it is one process.
    One save at most is under way: every method waits for it first, and raises what it failed with, on all ranks. No wait for
    another rank is longer than `timeout`.
    """

    def __init__(self, folder: str | Path, *, keep: int, keep_every: int = 0, timeout: timedelta = TIMEOUT) -> None:
        for name, number, least in (("keep", keep, 1), ("keep_every", keep_every, 0)):
            if number < least:
                raise InputError(f"checkpoint: {name} is {number}; at least {least} is required")
        self.folder, self.keep, self.keep_every, self.ranks = Path(folder), keep, keep_every, Ranks.join(timeout)
        self._stall_s: dict[int, float] = {}  # of saves that were begun
        self._written: list[tuple[int, float, int]] = []  # those that are complete
        self._buffers: dict[int, Tensor] = {}  # used again by every save: memory is slow to pin
        self._under_way: tuple[int, Future[None]] | None = None

    def save(self, step: int, state: State) -> None:
        """Write the checkpoint of a step; it is complete on return.

        Raises `InputError` where the folder cannot be written, `ValueError` for a state that cannot be saved.
        """
        begun = time.perf_counter()
        self.start(step, state)
        self.wait()
        self._stall_s[step] = time.perf_counter() - begun

    def start(self, step: int, state: State) -> None:
        """Copy the state and write it in the background; tensors may change when this returns. Raises as `save` does."""
        begun = time.perf_counter()
        self.wait()
        pieces, values = split(state)
        copied, done = self._copied(pieces), Future[None]()

        def run() -> None:
            try:
                num_bytes = write(self.folder, step, copied, values, (self.keep, self.keep_every), self.ranks)
                self._written.append((step, time.perf_counter() - begun, num_bytes))
                done.set_result(None)
            except BaseException as error:
                done.set_exception(error)

        self._under_way = (step, done)
        threading.Thread(target=run, name="checkpoint", daemon=True).start()  # a daemon: a process may end without it
        self._stall_s[step] = time.perf_counter() - begun

    def finished(self) -> list[Saved]:
        """The saves that were completed since this was last asked, on this rank."""
        written, self._written = self._written, []
        return [Saved(step, self._stall_s.pop(step), write_s, num_bytes) for step, write_s, num_bytes in written]

    def wait(self) -> None:
        """Until the save that is under way is complete; raises what it failed with."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            step, done = under_way
            with waits_for(f"the checkpoint of step {step}"):
                done.exception()
            done.result()

    def latest(self) -> Path | None:
        """The newest complete checkpoint, the same on all ranks: the one that the first rank sees."""
        self.wait()
        found = self.ranks.from_first(lambda: _text(latest(self.folder)))
        return None if found is None else Path(found)

    def load(self, path: str | Path, state: State) -> dict[str, Any]:
        """Fill the pieces of `state` in place and give the plain values; see `loading.load`."""
        self.wait()
        return load(path, state, self.ranks)

    def restore(self, state: State) -> Restored | None:
        """Fill the pieces of `state` from the newest checkpoint that is as it was written; None where there is none at all.

        Damaged ones are set aside. Raises `DamagedError` where all are damaged, and `InputError` as `load` does.
        """
        self.wait()
        found = self.ranks.from_first(lambda: [(step, str(path)) for step, path in newest_first(self.folder)])
        damaged: dict[int, str] = {}
        for step, path in found:
            try:
                values = load(path, state, self.ranks)
            except DamagedError as error:
                damaged[step] = error.problems[0]
                continue
            self.ranks.on_first(lambda: [set_aside(Path(other)) for number, other in found if number in damaged])
            return Restored(step, values, damaged)
        if damaged:
            raise DamagedError(*damaged.values(), "no checkpoint of the run can be read: begin it again with --force")
        return None

    def close(self) -> None:
        """Wait for the save that is under way, and raise what it failed with."""
        try:
            self.wait()
        finally:
            self._buffers.clear()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, LostRankError):  # a save waits for the lost rank too
            self.close()

    def _copied(self, pieces: Sequence[tuple[str, Piece]]) -> list[tuple[str, Piece]]:
        """The pieces in memory of the CPU, pinned for those of a GPU, so that their copies run beside one another."""
        copied = []
        for number, (name, piece) in enumerate(pieces):
            buffer = self._buffers.get(number)
            if buffer is None or (buffer.shape, buffer.dtype) != (piece.values.shape, piece.values.dtype):
                buffer = torch.empty(piece.values.shape, dtype=piece.values.dtype, pin_memory=piece.values.is_cuda)
            self._buffers[number] = buffer.copy_(piece.values.detach(), non_blocking=True)
            copied.append((name, replace(piece, values=buffer)))
        for device in {piece.values.device for _, piece in pieces if piece.values.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return copied


def write(
    folder: Path, step: int, pieces: Sequence[tuple[str, Piece]], values: dict[str, Any], kept: tuple[int, int],
    ranks: Ranks,
) -> int:  # fmt: skip
    """Write the checkpoint of a step from all ranks, and give it its name when all have written; else remove its draft.

    `kept`: how many of the newest are kept, and of which steps all. On the first rank: the bytes of its files; elsewhere 0.
    """
    common = _common(ranks.agree(lambda: (step, values)))
    try:
        ranks.on_first(lambda: _begin(folder, step))
        written = write_pieces(draft(folder, step), pieces, ranks)
        ranks.on_first(lambda: _finish(folder, step, common, written, kept))
        return sum(file.bytes for file in written[1].values()) if written else 0
    except LostRankError:
        raise  # nothing can be agreed any more
    except Exception as error:
        ranks.on_first(lambda: give_up(folder, step))
        newest = ranks.from_first(lambda: _name(latest(folder)))
        if isinstance(error, InputError):
            raise InputError(*(f"{problem}: the latest checkpoint is {newest}" for problem in error.problems)) from None
        raise


def _begin(folder: Path, step: int) -> None:
    with named(folder):
        begin(folder, step)


def _finish(folder: Path, step: int, values: dict[str, Any], written: Written | None, kept: tuple[int, int]) -> None:
    """On the first rank, when all have written."""
    assert written is not None
    tensors, files = written
    part = draft(folder, step)
    with named(folder):
        write_manifest(part, Manifest(step, values, tensors, files))
        publish(folder, step, *kept)


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _name(checkpoint: Path | None) -> str:
    return "none" if checkpoint is None else checkpoint.name


def _common(by_rank: list[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
    """The plain values of all ranks. Raises `ValueError` where they differ: one of them could not be given back."""
    steps = sorted({step for step, _ in by_rank})
    if len(steps) > 1:
        raise ValueError(f"the ranks save steps {', '.join(map(str, steps))} together; the same step is required")
    common: dict[str, Any] = {}
    for _, values in by_rank:
        for name, value in values.items():
            if common.setdefault(name, value) != value:
                raise ValueError(
                    f"{name} is {common[name]!r} on one rank and {value!r} on another; the same is required"
                )
    return common
