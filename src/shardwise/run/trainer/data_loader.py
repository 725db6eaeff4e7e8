"""This process's micro-batches: read ahead of the steps that take them, and copied to its device beside what runs there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.layout.layout import Layout
from shardwise.run.data.batches import Batches
from shardwise.run.data.read_ahead import ReadAhead
from shardwise.run.data.sample_order import Int64s
from shardwise.run.engine.micro_batch import MicroBatch
from shardwise.run.kernels.attention_mask import PositionRange

SpanTimer = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class HostBatch:
    """A micro-batch on the host: ids and targets [B, T] of the `runs` of places that this process reads (None: all) of `length`.

    Documents are where the next ones begin, `begins_BN` of a `Batch`: a few numbers for each sequence, out of which a device
    makes the document of every place.
    """

    ids_BT: Tensor
    targets_BT: Tensor
    begins_BN: Tensor | None
    runs: tuple[PositionRange, ...] | None
    length: int

    def to(self, device: torch.device) -> MicroBatch:
        """The micro-batch on a device; from pinned memory the copy runs beside what the host does next."""
        ids, targets = (tensor.to(device, non_blocking=True) for tensor in (self.ids_BT, self.targets_BT))
        documents = None
        if self.begins_BN is not None:
            positions = torch.arange(self.length, device=device).expand(len(ids), -1).contiguous()
            documents = torch.searchsorted(self.begins_BN.to(device, non_blocking=True), positions, right=True)
        return MicroBatch(ids, targets, documents, self.runs, self.length)


def _all_positions(seq_len: int) -> None:
    """Every place."""


@dataclass(frozen=True, slots=True)
class MicroBatchLoader:
    """The micro-batches of one replica, of whose sequences this process reads the `places` alone. With `documents` attention
    keeps to them.

    Of a GPU they wait in pinned memory, from which a copy runs beside the kernels; PyTorch keeps such memory until the copy is
    done (CachingHostAllocator).
    """

    layout: Layout
    replica: int
    device: torch.device
    documents: bool
    places: Callable[[int], tuple[PositionRange, ...] | None] = _all_positions

    def prefetch(self, batches: Batches, stop: int) -> ReadAhead[HostBatch]:
        """Those of the steps up to `stop`, on the host, as a thread reads them."""
        return ReadAhead(lambda step: self.on_host(batches, step), stop)

    def on_host(self, batches: Batches, step: int) -> Iterator[HostBatch]:
        """Those of a step, read now."""
        layout, runs = self.layout, self.places(batches.seq_len)
        share = self.replica, layout.num_replicas, layout.micro_batch_seqs
        with torch.cuda.device(self.device) if self._pins else nullcontext():
            for batch in batches.sequences(step, *share, runs):
                begins = self._tensor(batch.begins_BN) if self.documents else None
                ids, targets = map(self._tensor, (batch.inputs_BT, batch.targets_BT))
                yield HostBatch(ids, targets, begins, runs, batches.seq_len)

    def on_device(self, batches: Iterator[HostBatch], span: SpanTimer) -> Iterator[MicroBatch]:
        """The same on the device, with a span around the wait for each."""
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
