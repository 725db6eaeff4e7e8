"""One save by all ranks together: who writes which shard, the file of each rank with its checksum, and the manifest.

Of shards that several ranks hold (replicas) one is written. `write_checkpoint` writes a complete checkpoint, `write_shards` its
tensors.
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
    tensor_problem,
    write_manifest,
)
from shardwise.run.checkpoints.process_group import CheckpointGroup
from shardwise.run.checkpoints.step_folders import create_draft, draft_folder, latest, publish_draft, remove_draft
from shardwise.run.checkpoints.tensor_shards import TensorShard
from shardwise.run.faults.rank_status import LostRankError
from shardwise.values.atomic_files import name_path_in_errors
from shardwise.values.boxes import Shape
from shardwise.values.checksums import READ_BYTES, FileChecksum, flush_to_disk
from shardwise.values.errors import InputError

WrittenTensors = tuple[dict[str, StoredTensor], dict[str, FileChecksum]]  # the tensors, and the sums of the files


class ShardOffer(NamedTuple):
    """A piece that a rank could write."""

    name: str
    dtype: str
    shape: Shape
    offsets: Shape
    lengths: Shape
    num_bytes: int


class RankFile(NamedTuple):
    """The file of a rank: its size and CRC-32, and where each of its pieces begins."""

    num_bytes: int
    crc32: int
    starts: Sequence[int]


def write_shards(
    folder: Path, pieces: Sequence[tuple[str, TensorShard]], ranks: CheckpointGroup
) -> WrittenTensors | None:
    """Write every rank's pieces into `folder`; all ranks call this. On the first rank: the tensors, and the sums of the files.

    Raises on all ranks what fails on any, and `ValueError` where the pieces of a tensor differ, overlap or leave a hole.
    """
    gathered = ranks.gather_to_first(lambda: [_offer_shard(name, piece) for name, piece in pieces])
    offers = [[_offer_from_row(*row) for row in rows] for rows in gathered or ()]
    shares: list[list[int]] = []  # of each rank, the numbers of its pieces that it writes

    def shared() -> list[list[int]]:
        _require_complete(offers)
        shares.extend(_share_writes(offers))
        return shares

    mine, values = ranks.scatter_from_first(shared), [piece for _, piece in pieces]
    written = ranks.gather_to_first(
        lambda: _write_rank_file(folder / rank_file_name(ranks.rank), [values[number] for number in mine])
    )
    if written is None:
        return None
    return _stored_tensors(offers, shares, [RankFile(*found) if found else None for found in written])


def rank_file_name(rank: int) -> str:
    """The file that a rank writes."""
    return f"rank-{rank:05d}.bin"


def _offer_shard(name: str, piece: TensorShard) -> ShardOffer:
    box, dtype = piece.box, piece.values.dtype
    text = str(dtype).removeprefix("torch.")
    return ShardOffer(name, text, piece.shape, box.offsets, box.lengths, box.volume * dtype.itemsize)


def _offer_from_row(name: str, dtype: str, *numbers: Any) -> ShardOffer:
    """An offer as it was before it travelled."""
    shape, offsets, lengths, num_bytes = numbers
    return ShardOffer(name, dtype, tuple(shape), tuple(offsets), tuple(lengths), num_bytes)


def _require_complete(offers: Sequence[Sequence[ShardOffer]]) -> None:
    """Raise `ValueError` where the pieces of a tensor differ in kind, overlap or leave a hole."""
    kinds: dict[str, tuple[str, Shape]] = {}
    parts: dict[str, dict[tuple[Shape, Shape], TensorChunk]] = {}
    for offer in (offer for rank in offers for offer in rank):
        kind = (offer.dtype, offer.shape)
        if kinds.setdefault(offer.name, kind) != kind:
            raise ValueError(f"{offer.name} is {kinds[offer.name]} on one rank and {kind} on another; one is required")
        part = TensorChunk(offer.offsets, offer.lengths, "", 0)
        parts.setdefault(offer.name, {}).setdefault((offer.offsets, offer.lengths), part)
    for name, (dtype, shape) in kinds.items():
        if fault := tensor_problem(StoredTensor(shape, dtype, tuple(parts[name].values()))):
            raise ValueError(
                f"{name} of shape {list(shape)}: the ranks together hold {fault}; each element once is required"
            )


def _share_writes(offers: Sequence[Sequence[ShardOffer]]) -> list[list[int]]:
    """Which of its pieces each rank writes: of replicas one, by whoever has the fewest bytes to write until then."""
    holders: dict[tuple[str, Shape, Shape], list[tuple[int, int]]] = {}
    for rank, own in enumerate(offers):
        for number, offer in enumerate(own):
            if offer.num_bytes:
                holders.setdefault((offer.name, offer.offsets, offer.lengths), []).append((rank, number))
    shares: list[list[int]] = [[] for _ in offers]
    load = [0] * len(offers)
    for held in holders.values():
        rank, number = min(held, key=lambda holder: load[holder[0]])
        load[rank] += offers[rank][number].num_bytes
        shares[rank].append(number)
    return shares


def _write_rank_file(path: Path, pieces: Sequence[TensorShard]) -> RankFile | None:
    """Write pieces one behind the other into a file, and have the system write it to the disk. No file for none."""
    if not pieces:
        return None
    crc = position = 0
    starts = []
    with name_path_in_errors(path.parent), path.open("wb") as file:
        for piece in pieces:
            padding = -position % ALIGNMENT_BYTES
            starts.append(position + padding)
            for block in chain([bytes(padding)], _byte_blocks(piece)):
                file.write(block)
                crc, position = zlib.crc32(block, crc), position + len(block)
        flush_to_disk(file)
    return RankFile(position, crc, starts)


def _byte_blocks(piece: TensorShard) -> Iterator[bytes]:
    """The bytes of a piece, row-major."""
    whole = piece.values.contiguous().reshape(-1).view(torch.uint8).numpy()
    yield from (whole[start : start + READ_BYTES].tobytes() for start in range(0, len(whole), READ_BYTES))


def _stored_tensors(
    offers: Sequence[Sequence[ShardOffer]], shares: Sequence[Sequence[int]], written: Sequence[RankFile | None]
) -> WrittenTensors:
    """The tensors and the files that were written."""
    tensors = {offer.name: StoredTensor(offer.shape, offer.dtype, ()) for rank in offers for offer in rank}
    parts: dict[str, list[TensorChunk]] = {name: [] for name in tensors}
    files = {}
    for rank, (share, found) in enumerate(zip(shares, written, strict=True)):
        if found is not None:
            files[rank_file_name(rank)] = FileChecksum(found.num_bytes, found.crc32)
            for number, start in zip(share, found.starts, strict=True):
                offer = offers[rank][number]
                parts[offer.name].append(TensorChunk(offer.offsets, offer.lengths, rank_file_name(rank), start))
    whole = {name: StoredTensor(one.shape, one.dtype, tuple(parts[name])) for name, one in tensors.items()}
    return whole, files


def write_checkpoint(
    folder: Path, step: int, pieces: Sequence[tuple[str, TensorShard]], values: dict[str, Any], kept: tuple[int, int],
    ranks: CheckpointGroup,
) -> int:  # fmt: skip
    """Write the checkpoint of a step from all ranks, and give it its name when all have written; else remove its draft.

    `kept`: how many of the newest are kept, and of which steps all. On the first rank: the bytes of its files; elsewhere 0.
    """
    common = _agreed_values(ranks.all_gather(lambda: (step, values)))
    try:
        ranks.run_on_first(lambda: _create_draft(folder, step))
        written = write_shards(draft_folder(folder, step), pieces, ranks)
        ranks.run_on_first(lambda: _publish_manifest(folder, step, common, written, kept))
        return sum(file.bytes for file in written[1].values()) if written else 0
    except LostRankError:
        raise  # nothing can be agreed any more
    except Exception as error:
        ranks.run_on_first(lambda: remove_draft(folder, step))
        newest = ranks.broadcast_from_first(lambda: _checkpoint_name(latest(folder)))
        if isinstance(error, InputError):
            raise InputError(*(f"{problem}: the latest checkpoint is {newest}" for problem in error.problems)) from None
        raise


def _create_draft(folder: Path, step: int) -> None:
    with name_path_in_errors(folder):
        create_draft(folder, step)


def _publish_manifest(
    folder: Path, step: int, values: dict[str, Any], written: WrittenTensors | None, kept: tuple[int, int]
) -> None:
    """On the first rank, when all have written."""
    assert written is not None
    tensors, files = written
    part = draft_folder(folder, step)
    with name_path_in_errors(folder):
        write_manifest(part, Manifest(step, values, tensors, files))
        publish_draft(folder, step, *kept)


def _checkpoint_name(checkpoint: Path | None) -> str:
    return "none" if checkpoint is None else checkpoint.name


def _agreed_values(by_rank: list[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
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
