"""One save by all ranks together: the choice of who writes which shard, each rank's file with its checksum, and the
manifest.

Of shards that several ranks hold (replicas) one is written. `write_checkpoint` writes a complete checkpoint,
`write_shards` its tensors.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shardwise.run.checkpoints.manifest import (
    ALIGNMENT_BYTES,
    Manifest,
    StoredTensor,
    TensorChunk,
    TensorShard,
    dtype_name,
    tensor_problem,
    write_manifest,
)
from shardwise.run.checkpoints.process_group import CheckpointGroup
from shardwise.run.checkpoints.step_folders import (
    Retention,
    create_draft,
    draft_folder,
    latest,
    publish_draft,
    remove_draft,
)
from shardwise.run.faults.rank_status import LostRankError
from shardwise.values import FileChecksum, InputError, Shape, flush_to_disk, name_path_in_errors
from shardwise.values.durable_files import READ_BYTES

WrittenTensors = tuple[dict[str, StoredTensor], dict[str, FileChecksum]]  # the tensors, and the checksums of the files


class ShardOffer(NamedTuple):
    """A shard that a rank could write."""

    name: str
    dtype: str
    shape: Shape
    offsets: Shape
    lengths: Shape
    num_bytes: int


class RankFile(NamedTuple):
    """The file of a rank: its size in bytes, its CRC-32, and the byte at which each of its shards starts."""

    num_bytes: int
    crc32: int
    starts: Sequence[int]


def write_shards(
    folder: Path, shards: Sequence[tuple[str, TensorShard]], ranks: CheckpointGroup
) -> WrittenTensors | None:
    """Write every rank's shards into `folder`; all ranks call this. Return the tensors and file checksums on the first
    rank.

    Raises on all ranks what fails on any, and `ValueError` if the shards of a tensor differ, overlap or leave a hole.
    """
    gathered = ranks.gather_to_first(lambda: [_offer_shard(name, shard) for name, shard in shards])
    offers = [[_offer_from_row(*row) for row in rows] for rows in gathered or ()]
    assignments: list[list[int]] = []  # for each rank, the indices of its shards that it writes

    def shared() -> list[list[int]]:
        _require_complete(offers)
        assignments.extend(_share_writes(offers))
        return assignments

    local_indices, values = ranks.scatter_from_first(shared), [shard for _, shard in shards]
    written = ranks.gather_to_first(
        lambda: _write_rank_file(folder / rank_file_name(ranks.rank), [values[index] for index in local_indices])
    )
    if written is None:
        return None
    return _stored_tensors(offers, assignments, [RankFile(*rank_row) if rank_row else None for rank_row in written])


def rank_file_name(rank: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"rank-{rank:05d}.bin"


def _offer_shard(name: str, shard: TensorShard) -> ShardOffer:
    box, dtype = shard.box, shard.values.dtype
    return ShardOffer(name, dtype_name(dtype), shard.shape, box.offsets, box.lengths, box.volume * dtype.itemsize)


def _offer_from_row(name: str, dtype: str, *numbers: Any) -> ShardOffer:
    """Return an offer from the JSON row that was sent."""
    shape, offsets, lengths, num_bytes = numbers
    return ShardOffer(name, dtype, tuple(shape), tuple(offsets), tuple(lengths), num_bytes)


def _require_complete(offers: Sequence[Sequence[ShardOffer]]) -> None:
    """Raise `ValueError` if the shards of a tensor differ in shape or dtype, overlap, or leave a hole."""
    kinds: dict[str, tuple[str, Shape]] = {}
    chunks: dict[str, dict[tuple[Shape, Shape], TensorChunk]] = {}
    for offer in (offer for rank in offers for offer in rank):
        kind = (offer.dtype, offer.shape)
        if kinds.setdefault(offer.name, kind) != kind:
            raise ValueError(f"{offer.name} is {kinds[offer.name]} on one rank and {kind} on another; one is required")
        chunk = TensorChunk(offer.offsets, offer.lengths, "", 0)
        chunks.setdefault(offer.name, {}).setdefault((offer.offsets, offer.lengths), chunk)
    for name, (dtype, shape) in kinds.items():
        if fault := tensor_problem(StoredTensor(shape, dtype, tuple(chunks[name].values()))):
            raise ValueError(
                f"{name} of shape {list(shape)}: the ranks together hold {fault}; each element once is required"
            )


def _share_writes(offers: Sequence[Sequence[ShardOffer]]) -> list[list[int]]:
    """Return the shards that each rank writes: one of each set of replicas, by the rank with the fewest bytes so far."""
    holders: dict[tuple[str, Shape, Shape], list[tuple[int, int]]] = {}
    for rank, rank_offers in enumerate(offers):
        for index, offer in enumerate(rank_offers):
            if offer.num_bytes:
                holders.setdefault((offer.name, offer.offsets, offer.lengths), []).append((rank, index))
    assignments: list[list[int]] = [[] for _ in offers]
    load_bytes = [0] * len(offers)
    for replicas in holders.values():
        rank, index = min(replicas, key=lambda holder: load_bytes[holder[0]])
        load_bytes[rank] += offers[rank][index].num_bytes
        assignments[rank].append(index)
    return assignments


def _write_rank_file(path: Path, shards: Sequence[TensorShard]) -> RankFile | None:
    """Write shards one after the other into a file and flush it to disk; no file for no shards."""
    if not shards:
        return None
    crc = position = 0
    starts = []
    with name_path_in_errors(path.parent), path.open("wb") as file:
        for shard in shards:
            padding = -position % ALIGNMENT_BYTES
            starts.append(position + padding)
            for block in chain([bytes(padding)], _byte_blocks(shard)):
                file.write(block)
                crc, position = zlib.crc32(block, crc), position + len(block)
        flush_to_disk(file)
    return RankFile(position, crc, starts)


def _byte_blocks(shard: TensorShard) -> Iterator[bytes]:
    """Yield the bytes of a shard, row-major."""
    content = shard.values.contiguous().reshape(-1).view(torch.uint8).numpy()
    yield from (content[start : start + READ_BYTES].tobytes() for start in range(0, len(content), READ_BYTES))


def _stored_tensors(
    offers: Sequence[Sequence[ShardOffer]], assignments: Sequence[Sequence[int]], written: Sequence[RankFile | None]
) -> WrittenTensors:
    """Return the tensors and the files that were written."""
    tensors = {offer.name: StoredTensor(offer.shape, offer.dtype, ()) for rank in offers for offer in rank}
    chunks: dict[str, list[TensorChunk]] = {name: [] for name in tensors}
    files = {}
    for rank, (assignment, rank_file) in enumerate(zip(assignments, written, strict=True)):
        if rank_file is not None:
            files[rank_file_name(rank)] = FileChecksum(rank_file.num_bytes, rank_file.crc32)
            for index, start in zip(assignment, rank_file.starts, strict=True):
                offer = offers[rank][index]
                chunks[offer.name].append(TensorChunk(offer.offsets, offer.lengths, rank_file_name(rank), start))
    complete = {name: StoredTensor(tensor.shape, tensor.dtype, tuple(chunks[name])) for name, tensor in tensors.items()}
    return complete, files


def write_checkpoint(
    folder: Path, step: int, shards: Sequence[tuple[str, TensorShard]], values: dict[str, Any], retention: Retention,
    ranks: CheckpointGroup,
) -> int:  # fmt: skip
    """Write the checkpoint of a step from all ranks; publish it when all have written, or remove its draft. Return the
    bytes of its files on the first rank, elsewhere 0."""
    common = _agreed_values(ranks.all_gather(lambda: (step, values)))
    try:
        ranks.run_on_first(lambda: _create_draft(folder, step))
        written = write_shards(draft_folder(folder, step), shards, ranks)
        ranks.run_on_first(lambda: _publish_manifest(folder, step, common, written, retention))
        return sum(file.bytes for file in written[1].values()) if written else 0
    except LostRankError:
        raise  # without a rank nothing can be agreed on
    except Exception as error:
        ranks.run_on_first(lambda: remove_draft(folder, step))
        newest = ranks.broadcast_from_first(lambda: (latest(folder) or Path("none")).name)
        if isinstance(error, InputError):
            raise InputError(*(f"{problem}: the latest checkpoint is {newest}" for problem in error.problems)) from None
        raise


def _create_draft(folder: Path, step: int) -> None:
    with name_path_in_errors(folder):
        create_draft(folder, step)


def _publish_manifest(
    folder: Path, step: int, values: dict[str, Any], written: WrittenTensors | None, retention: Retention
) -> None:
    """Write the manifest and publish the draft, on the first rank when all have written."""
    assert written is not None
    tensors, files = written
    draft = draft_folder(folder, step)
    with name_path_in_errors(folder):
        write_manifest(draft, Manifest(step, values, tensors, files))
        publish_draft(folder, step, retention)


def _agreed_values(by_rank: list[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
    """Return the plain values of all ranks. Raises `ValueError` if they differ: only one of them could be restored."""
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
