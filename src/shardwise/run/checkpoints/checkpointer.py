"""Save the checkpoints of a run in the background, and restore a run from the newest one that is undamaged.

`Checkpointer` copies the tensors to the CPU and returns; a thread writes them while training continues.
"""

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

from shardwise.run.checkpoints.manifest import CheckpointState, TensorShard, split_state
from shardwise.run.checkpoints.process_group import CheckpointGroup
from shardwise.run.checkpoints.reader import load
from shardwise.run.checkpoints.step_folders import Retention, latest, list_newest_first, set_damaged_aside
from shardwise.run.checkpoints.writer import write_checkpoint
from shardwise.run.faults.rank_status import LostRankError, wait_for_ranks
from shardwise.run.transport.interface import TIMEOUT
from shardwise.values import DamagedFileError, InputError


@dataclass(frozen=True, slots=True)
class RestoreResult:
    """The source of a restored state: the checkpoint of `step`, and its plain values. `damaged`: later checkpoints that
    could not be read, as step and problem."""

    step: int
    values: Mapping[str, Any]
    damaged: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SaveResult:
    """A completed save: its step, the seconds that training waited for it, the seconds until it was on disk, and the
    bytes of all files. `num_bytes` is 0 on all ranks but the first."""

    step: int
    stall_s: float
    write_s: float
    num_bytes: int


class Checkpointer:
    """The checkpoints of a run in `folder`: the `keep` newest, and those whose step is a multiple of `keep_every` (0:
    no others).

    All ranks of the job create one and call its methods together, in the same order; without a process group it is one
    process. At most one save is in progress: every method waits for it first, and raises its failure on all ranks. No
    wait for another rank is longer than `timeout`.
    """

    def __init__(self, folder: str | Path, *, keep: int, keep_every: int = 0, timeout: timedelta = TIMEOUT) -> None:
        for name, number, minimum in (("keep", keep, 1), ("keep_every", keep_every, 0)):
            if number < minimum:
                raise InputError(f"checkpoint: {name} is {number}; at least {minimum} is required")
        self.folder, self.retention, self.ranks = (
            Path(folder),
            Retention(keep, keep_every),
            CheckpointGroup.join(timeout),
        )
        self._stall_s: dict[int, float] = {}  # seconds, by step, that training waited for a save
        self._completed: list[tuple[int, float, int]] = []  # step, seconds and bytes of completed saves
        # By position in the state, reused by every save since pinning is slow: shards must keep their order.
        self._buffers: dict[int, Tensor] = {}
        self._pending: tuple[int, Future[None]] | None = None

    def save(self, step: int, state: CheckpointState) -> None:
        """Write the checkpoint of a step; it is complete on return. Raises `InputError` if the folder cannot be
        written, `ValueError` for a state that cannot be saved."""
        started = time.perf_counter()
        self.start(step, state)
        self.wait()
        self._stall_s[step] = time.perf_counter() - started

    def start(self, step: int, state: CheckpointState) -> None:
        """Copy the state and write it in the background; tensors may change when this returns. Raises as `save` does."""
        started = time.perf_counter()
        self.wait()
        shards, values = split_state(state)
        host_shards, future = self._copy_to_host(shards), Future[None]()

        def run() -> None:
            try:
                num_bytes = write_checkpoint(self.folder, step, host_shards, values, self.retention, self.ranks)
                self._completed.append((step, time.perf_counter() - started, num_bytes))
                future.set_result(None)
            except BaseException as error:
                future.set_exception(error)

        self._pending = (step, future)
        # A daemon, so that the process can end without it.
        threading.Thread(target=run, name="checkpoint", daemon=True).start()
        self._stall_s[step] = time.perf_counter() - started

    def finished(self) -> list[SaveResult]:
        """Return the saves that this rank completed since the last call."""
        written, self._completed = self._completed, []
        return [SaveResult(step, self._stall_s.pop(step), write_s, num_bytes) for step, write_s, num_bytes in written]

    def wait(self) -> None:
        """Wait for the save in progress; raise its failure."""
        pending, self._pending = self._pending, None
        if pending is not None:
            step, future = pending
            with wait_for_ranks(f"the checkpoint of step {step}"):
                future.exception()
            future.result()

    def latest(self) -> Path | None:
        """Return the newest complete checkpoint that the first rank sees."""
        self.wait()
        newest = self.ranks.broadcast_from_first(lambda: str(latest(self.folder) or ""))
        return Path(newest) if newest else None

    def load(self, path: str | Path, state: CheckpointState) -> dict[str, Any]:
        """Fill the shards of `state` in place and return the plain values; see `reader.load`."""
        self.wait()
        return load(path, state, self.ranks)

    def restore(self, state: CheckpointState) -> RestoreResult | None:
        """Fill the shards of `state` from the newest undamaged checkpoint; return None if there is no checkpoint at
        all. Damaged ones are renamed. Raises `DamagedFileError` if all are damaged, and `InputError` as `load` does."""
        self.wait()
        checkpoints = self.ranks.broadcast_from_first(
            lambda: [(step, str(path)) for step, path in list_newest_first(self.folder)]
        )
        damaged: dict[int, str] = {}
        for step, path in checkpoints:
            try:
                values = load(path, state, self.ranks)
            except DamagedFileError as error:
                damaged[step] = error.problems[0]
                continue
            self.ranks.run_on_first(
                lambda: [
                    set_damaged_aside(Path(damaged_path))
                    for damaged_step, damaged_path in checkpoints
                    if damaged_step in damaged
                ]
            )
            return RestoreResult(step, values, damaged)
        if damaged:
            raise DamagedFileError(
                *damaged.values(), "no checkpoint of the run can be read: begin it again with --force"
            )
        return None

    def close(self) -> None:
        """Wait for the save in progress, and raise its failure."""
        try:
            self.wait()
        finally:
            self._buffers.clear()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, LostRankError):  # the save would wait for the lost rank too
            self.close()

    def _copy_to_host(self, shards: Sequence[tuple[str, TensorShard]]) -> list[tuple[str, TensorShard]]:
        """Copy shards into CPU buffers, pinned for those of a GPU so that their copies overlap."""
        copies = []
        for index, (name, shard) in enumerate(shards):
            buffer = self._buffers.get(index)
            if buffer is None or (buffer.shape, buffer.dtype) != (shard.values.shape, shard.values.dtype):
                buffer = torch.empty(shard.values.shape, dtype=shard.values.dtype, pin_memory=shard.values.is_cuda)
            self._buffers[index] = buffer.copy_(shard.values.detach(), non_blocking=True)
            copies.append((name, replace(shard, values=buffer)))
        for device in {shard.values.device for _, shard in shards if shard.values.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return copies
