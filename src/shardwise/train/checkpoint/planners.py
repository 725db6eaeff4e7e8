"""How torch.distributed.checkpoint writes and reads pieces.

Its planners are extended and not its protocol of shards (`__create_write_items__` and the rest): `find_state_dict_object`
of PyTorch 2.13 asks an object for its shard only where that is a `torch.Tensor`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from shardwise.train.checkpoint.piece import Piece


def write_pieces(folder: Path, pieces: Mapping[str, Piece], group: dist.ProcessGroup | None) -> None:
    """Write every rank's pieces into `folder`, of replicas one; all ranks of `group` call this.

    Raises what failed first on any rank, and `ValueError` where the pieces of a tensor overlap or leave a hole.
    """
    _expect_one_process(group)
    # Nothing is copied ahead: the pieces are on the CPU, and a stream of the GPU would be made in this thread.
    writer = FileSystemWriter(folder, per_thread_copy_ahead=0)
    try:
        save(dict(pieces), storage_writer=writer, planner=PieceSaver(), process_group=group, no_dist=group is None)
    except CheckpointException as failed:  # no `Exception`, so that few would catch it
        raise _first(failed) from failed


def read_pieces(folder: Path, pieces: Mapping[str, Piece]) -> None:
    """Fill this process's pieces from `folder`; no other rank is asked. Raises what failed."""
    _expect_one_process(None)
    try:
        load(dict(pieces), storage_reader=FileSystemReader(folder), planner=PieceLoader(), no_dist=True)
    except CheckpointException as failed:
        raise _first(failed) from failed


def stored_tensors(folder: Path) -> dict[str, TensorStorageMetadata]:
    """The tensors that `folder` holds: their sizes, formats and intervals."""
    metadata = FileSystemReader(folder).read_metadata()
    return {
        name: found for name, found in metadata.state_dict_metadata.items() if isinstance(found, TensorStorageMetadata)
    }


class PieceSaver(DefaultSavePlanner):
    """Plans the writing of pieces by their interval; PyTorch's planner leaves one of the replicas."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_write_item(name, piece) for name, piece in self.state_dict.items() if len(piece.values)])
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """As PyTorch's, which looks for holes only where several ranks write."""
        plans, metadata = super().create_global_plan(all_plans)
        stored: Mapping[str, Any] = metadata.state_dict_metadata
        for name, found in stored.items():
            held = sum(chunk.sizes[0] for chunk in found.chunks)
            if held != found.size[0]:
                raise ValueError(f"{name} has {found.size[0]} elements; the ranks together hold {held}")
        return plans, metadata

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        values: Tensor = self.state_dict[index.fqn].values
        return values


class PieceLoader(DefaultLoadPlanner):
    """Plans the reading of pieces: of every saved interval what lies in theirs."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        stored: Mapping[str, Any] = self.metadata.state_dict_metadata
        return LoadPlan(
            [
                item
                for name, piece in self.state_dict.items()
                if len(piece.values)
                for item in create_read_items_for_chunk_list(name, stored[name], [_chunk(piece)])
            ]
        )

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        values: Tensor = self.state_dict[index.fqn].values
        return values


def _chunk(piece: Piece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size([piece.offset]), sizes=piece.values.shape)


def _write_item(name: str, piece: Piece) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(name, [piece.offset]),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=_chunk(piece), properties=TensorProperties(dtype=piece.values.dtype), size=torch.Size([piece.size])
        ),
    )


def _first(failed: CheckpointException) -> BaseException:
    error, _ = next(iter(failed.failures.values()))
    return error


def _expect_one_process(group: dist.ProcessGroup | None) -> None:
    """Not warned of: that there is one process is meant. For good, as `catch_warnings` is not safe beside a thread."""
    if group is None:
        warnings.filterwarnings("ignore", "torch.distributed is (disabled|unavailable)", UserWarning)
