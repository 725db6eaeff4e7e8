"""The `.metadata` of a folder that torch.distributed.checkpoint reads: which chunks of which tensors lie where.

Source: torch.distributed.checkpoint, metadata.py and filesystem.py of PyTorch 2.13.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import cast

from torch import Size
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from shardwise.interop.weights.stored_slices import OutputChunk


class DcpMetadata:
    """The metadata of a folder, to which each chunk and object is added as it is written."""

    def __init__(self) -> None:
        self.metadata = Metadata({}, planner_data={}, storage_data={}, version="1.0.0")

    def add_tensor(self, chunk: OutputChunk, file: str, start: int, num_bytes: int) -> None:
        """Add a chunk of a tensor, which has `num_bytes` of a file from `start` on."""
        empty = TensorStorageMetadata(TensorProperties(dtype=chunk.dtype), Size(chunk.tensor_shape), [])
        tensor = cast(TensorStorageMetadata, self.metadata.state_dict_metadata.setdefault(chunk.name, empty))
        chunk_metadata = ChunkStorageMetadata(Size(chunk.box.offsets), Size(chunk.box.lengths))
        tensor.chunks.append(chunk_metadata)
        self.metadata.planner_data[chunk.name] = (chunk.name,)
        key = MetadataIndex(chunk.name, chunk_metadata.offsets)
        self.metadata.storage_data[key] = _StorageInfo(file, start, num_bytes)

    def add_objects(self, objects: Mapping[str, bytes], file: str) -> None:
        """Add objects that lie one behind the other in a file."""
        start = 0
        for name, content in objects.items():
            self.metadata.state_dict_metadata[name] = BytesStorageMetadata()
            self.metadata.planner_data[name] = (name,)
            self.metadata.storage_data[MetadataIndex(name)] = _StorageInfo(file, start, len(content))
            start += len(content)

    def dump(self) -> bytes:
        """Return the content of `.metadata`."""
        return pickle.dumps(self.metadata)
