"""Writing the checkpoints of a run: the tensors are copied, then a thread writes while the training goes on."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import InputError
from shardwise.train.checkpoint.folders import begin, draft, latest, publish
from shardwise.train.checkpoint.loading import load
from shardwise.train.checkpoint.manifest import Manifest, sums, write_manifest
from shardwise.train.checkpoint.piece import Piece, State, split
from shardwise.train.checkpoint.planners import write_pieces
from shardwise.train.checkpoint.ranks import Ranks


class Checkpointer:
    """The checkpoints of a run in `folder`, of which the `keep` newest are kept.

    All ranks of the job make one and call its methods together, in the same order; with no process group it is one process.
    One save at most is under way: every method waits for it first, and raises what it failed with, on all ranks.
    """

    def __init__(self, folder: str | Path, *, keep: int) -> None:
        if keep < 1:
            raise InputError(f"checkpoint: keep is {keep}; at least 1 is required")
        self.folder, self.keep, self.ranks = Path(folder), keep, Ranks.join()
        self._buffers: dict[str, Tensor] = {}  # used again by every save: memory is slow to pin
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._under_way: Future[None] | None = None

    def save(self, step: int, state: State) -> None:
        """Write the checkpoint of a step; it is complete on return.

        Raises `InputError` where the folder cannot be written, `ValueError` for a state that cannot be saved.
        """
        self.start(step, state)
        self.wait()

    def start(self, step: int, state: State) -> None:
        """Copy the state and write it in the background; tensors may change when this returns. Raises as `save` does."""
        self.wait()
        pieces, values = split(state)
        copied = self._copied(pieces)
        self._under_way = self._thread.submit(write, self.folder, step, copied, values, self.keep, self.ranks)

    def wait(self) -> None:
        """Until the save that is under way is complete; raises what it failed with."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def latest(self) -> Path | None:
        """The newest complete checkpoint, the same on all ranks: that which the first one sees."""
        self.wait()
        return self.ranks.agree(lambda: latest(self.folder))[0]

    def load(self, path: str | Path, state: State) -> dict[str, Any]:
        """Fill the pieces of `state` in place and give the plain values; see `loading.load`."""
        self.wait()
        return load(path, state, self.ranks)

    def close(self) -> None:
        """Wait for the save that is under way, and raise what it failed with."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._buffers.clear()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _copied(self, pieces: Mapping[str, Piece]) -> dict[str, Piece]:
        """The pieces in memory of the CPU, pinned for those of a GPU, so that their copies run beside one another."""
        copied = {}
        for name, piece in pieces.items():
            buffer = self._buffers.get(name)
            if buffer is None or (buffer.shape, buffer.dtype) != (piece.values.shape, piece.values.dtype):
                buffer = torch.empty(piece.values.shape, dtype=piece.values.dtype, pin_memory=piece.values.is_cuda)
            self._buffers[name] = buffer.copy_(piece.values.detach(), non_blocking=True)
            copied[name] = replace(piece, values=buffer)
        for device in {piece.values.device for piece in pieces.values() if piece.values.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return copied


def write(
    folder: Path, step: int, pieces: Mapping[str, Piece], values: dict[str, Any], keep: int, ranks: Ranks
) -> None:
    """Write the checkpoint of a step from all ranks, and give it its name when all have written."""
    common = _common(ranks.agree(lambda: (step, values)))
    ranks.on_first(lambda: begin(folder, step))
    part = draft(folder, step)
    ranks.agree(lambda: write_pieces(part, pieces, ranks.group))
    names = ranks.agree(lambda: {path.name for path in part.iterdir()})
    files = sums(part, set[str]().union(*names), ranks)

    def finish() -> None:
        write_manifest(part, Manifest(step, common, files))
        publish(folder, step, keep)

    ranks.on_first(finish)


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
