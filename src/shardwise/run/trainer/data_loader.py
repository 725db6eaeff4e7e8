"""The micro-batches of this process: read ahead of their use, and copied to the device while it computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.layout import Layout
from shardwise.run.data.batches import Batches, ReadAhead
from shardwise.run.data.sample_order import Int64s
from shardwise.run.engine.micro_batch import MicroBatch
from shardwise.run.kernels.positions_and_masks import PositionRange

SpanTimer = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class HostBatch:
    """A micro-batch on the host: ids and targets [B, T] of the positions `runs` (None: all) of sequences of `length`.

    `begins_BN`, as in `Batch`: the positions at which documents begin, a few numbers for each sequence, from which the
    device computes the document of every position; None if attention ignores documents.
    """

    ids_BT: Tensor
    targets_BT: Tensor
    begins_BN: Tensor | None
    runs: tuple[PositionRange, ...] | None
    length: int

    def to(self, device: torch.device) -> MicroBatch:
        """Copy the micro-batch to a device; from pinned memory the copy is asynchronous."""
        ids, targets = (tensor.to(device, non_blocking=True) for tensor in (self.ids_BT, self.targets_BT))
        documents = None
        if self.begins_BN is not None:
            positions = torch.arange(self.length, device=device).expand(len(ids), -1).contiguous()
            documents = torch.searchsorted(self.begins_BN.to(device, non_blocking=True), positions, right=True)
        return MicroBatch(ids, targets, documents, self.runs, self.length)


def _all_positions(seq_len: int) -> None:
    """Return None: all positions."""


@dataclass(frozen=True, slots=True)
class MicroBatchLoader:
    """Loads the micro-batches of one replica; this process reads only the positions `places` of each sequence.

    `documents`: attention keeps to its document. For a GPU batches wait in pinned memory, from which copies overlap
    kernels; PyTorch keeps such memory until the copy is done (CachingHostAllocator).
    """

    layout: Layout
    replica: int
    device: torch.device
    documents: bool
    places: Callable[[int], tuple[PositionRange, ...] | None] = _all_positions

    def prefetch(self, batches: Batches, stop: int) -> ReadAhead[HostBatch]:
        """Read the batches of the steps up to `stop` onto the host, in a thread."""
        return ReadAhead(lambda step: self.on_host(batches, step), stop)

    def on_host(self, batches: Batches, step: int) -> Iterator[HostBatch]:
        """Yield the host batches of a step, read now."""
        layout, runs = self.layout, self.places(batches.seq_len)
        share = self.replica, layout.num_replicas, layout.micro_batch_seqs
        with torch.cuda.device(self.device) if self._pins else nullcontext():
            for batch in batches.sequences(step, *share, runs):
                begins = self._tensor(batch.begins_BN) if self.documents else None
                ids, targets = map(self._tensor, (batch.inputs_BT, batch.targets_BT))
                yield HostBatch(ids, targets, begins, runs, batches.seq_len)

    def on_device(self, batches: Iterator[HostBatch], span: SpanTimer) -> Iterator[MicroBatch]:
        """Yield host batches as device batches; the wait for each is a span "data"."""
        while True:
            with span("data"):
                host_batch = next(batches, None)
                batch = None if host_batch is None else host_batch.to(self.device)
            if batch is None:
                return
            yield batch

    @property
    def _pins(self) -> bool:
        return self.device.type == "cuda"

    def _tensor(self, array: Int64s) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory() if self._pins else tensor
