"""This process's micro-batches: read ahead of the steps that take them, and copied to its device beside what runs there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from shardwise.data.ahead import ReadAhead
from shardwise.data.batches import Batch, Batches
from shardwise.data.order import Int64s
from shardwise.layout.layout import Layout
from shardwise.train.engine import MicroBatch

Span = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class Feed:
    """The micro-batches of one replica. With `documents` attention keeps to them.

    Of a GPU they wait in pinned memory, from which a copy runs beside the kernels; PyTorch keeps such memory until the copy is
    done (CachingHostAllocator).
    """

    layout: Layout
    replica: int
    device: torch.device
    documents: bool

    def ahead(self, batches: Batches, stop: int) -> ReadAhead[MicroBatch]:
        """Those of the steps up to `stop`, on the host, as a thread reads them."""
        return ReadAhead(lambda step: self.on_host(batches, step), stop)

    def on_host(self, batches: Batches, step: int) -> Iterator[MicroBatch]:
        """Those of a step, read now."""
        layout = self.layout
        with torch.cuda.device(self.device) if self._pins else nullcontext():
            for batch in batches.sequences(step, self.replica, layout.num_replicas, layout.micro_batch_seqs):
                yield self._tensors(batch)

    def on_device(self, batches: Iterator[MicroBatch], span: Span) -> Iterator[MicroBatch]:
        """The same on the device, with a span around the wait for each."""
        while True:
            with span("data"):
                batch = next(batches, None)
                batch = batch and batch.to(self.device)
            if batch is None:
                return
            yield batch

    @property
    def _pins(self) -> bool:
        return self.device.type == "cuda"

    def _tensors(self, batch: Batch) -> MicroBatch:
        return MicroBatch(
            self._tensor(batch.inputs_BT),
            self._tensor(batch.targets_BT),
            self._tensor(batch.documents_BT) if self.documents else None,
        )

    def _tensor(self, array: Int64s) -> torch.Tensor:
        found = torch.from_numpy(array)
        return found.pin_memory() if self._pins else found
