"""Check what `torch.save` wrote before it is read: the checksums of a zip file's records, and what its pickle would cost.

`torch.load` checks no checksum of a zip file, and does not bound what a pickle builds. Sources: PyTorch 2.13,
caffe2/serialize/inline_container.cc; APPNOTE.TXT of PKWARE, 4.3 (records of a zip file); pickletools of Python (opcodes).
"""

from __future__ import annotations

import pickle
import pickletools
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from typing import IO, Any, BinaryIO

READ_BYTES = 1 << 22


def verify_records(file: IO[bytes]) -> None:
    """Raise `ValueError` if a record of a zip file is not as its writer left it (CRC-32), or may be another one's."""
    try:
        with zipfile.ZipFile(file) as archive:
            records = archive.infolist()
            if len({record.filename for record in records}) < len(records):
                raise ValueError("two of its records have one name")
            for record in records:
                _verify_record(archive, record)
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, zlib.error) as error:
        raise ValueError(f"it is damaged: {error}") from None


def _verify_record(archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> None:
    if record.compress_type != zipfile.ZIP_STORED or record.compress_size != record.file_size:
        raise ValueError(f"record {record.filename!r} is compressed, which `torch.save` never does")
    if record.CRC == 0 and record.file_size:
        # A CRC-32 of 0 is one in 2³² by chance; `set_crc32_options(False)` writes it everywhere.
        with archive.open(_without_crc(record)) as content:
            crc = 0
            while block := content.read(READ_BYTES):
                crc = zlib.crc32(block, crc)
        if crc:
            raise ValueError(
                f"record {record.filename!r} has no checksum, or a damaged one; write it again with "
                "torch.serialization.set_crc32_options(True)"
            )
        return
    with archive.open(record) as content:  # raises `BadZipFile` at the end if the checksum is another
        while content.read(READ_BYTES):
            pass


def _without_crc(record: zipfile.ZipInfo) -> zipfile.ZipInfo:
    unchecked = zipfile.ZipInfo(record.filename)
    for name in (
        "orig_filename",
        "compress_size",
        "file_size",
        "header_offset",
        "compress_type",
        "flag_bits",
        "create_system",
    ):
        setattr(unchecked, name, getattr(record, name))
    return unchecked


# Layout of a zip file: bytes of a header and places of its fields.
LOCAL_BYTES, LOCAL_LENGTHS = 30, 26
CENTRAL_BYTES, CENTRAL_CRC, CENTRAL_LENGTHS = 46, 16, 28
DESCRIPTOR_MARK, DESCRIPTOR_CRC = b"PK\x07\x08", 4


def data_offsets(file: BinaryIO) -> dict[int, int]:
    """Return the byte at which each tensor's elements start, by its number: records `data/NUMBER`, which are not compressed."""
    return {number: offset for number, record, offset in _data_records(file)}


def _data_records(file: BinaryIO) -> Iterator[tuple[int, zipfile.ZipInfo, int]]:
    with zipfile.ZipFile(file) as archive:
        records = archive.infolist()
    for record in records:
        _, _, number = record.filename.rpartition("/data/")
        if number.isdigit():
            # The last four of a local header's 30 bytes are the lengths of name and extra field, which follow it. The
            # central directory also has them, but there the extra field may have another length.
            file.seek(record.header_offset + LOCAL_LENGTHS)
            lengths = file.read(4)
            num_name_bytes = int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
            yield int(number), record, record.header_offset + LOCAL_BYTES + num_name_bytes


def write_checksums(file: BinaryIO, crcs: Mapping[int, int]) -> None:
    """Put the checksums of tensors, by number, into a file whose elements were written after its records."""
    places: dict[str, int] = {}
    for number, record, offset in list(_data_records(file)):
        crc = crcs[number].to_bytes(4, "little")
        places[record.filename] = number
        file.seek(offset + record.file_size)
        if file.read(4) == DESCRIPTOR_MARK:
            file.seek(offset + record.file_size + DESCRIPTOR_CRC)
            file.write(crc)
    with zipfile.ZipFile(file) as archive:
        position, records = archive.start_dir, archive.infolist()
    for record in records:
        file.seek(position + CENTRAL_LENGTHS)
        lengths = file.read(6)
        if record.filename in places:
            file.seek(position + CENTRAL_CRC)
            file.write(crcs[places[record.filename]].to_bytes(4, "little"))
        position += CENTRAL_BYTES + sum(int.from_bytes(lengths[start : start + 2], "little") for start in (0, 2, 4))


MAX_TUPLE_VALUES = 2_000  # of a tuple with all that it holds: paths and sizes have up to 30, a state of `random` 630


def require_cheap_pickle(content: bytes) -> None:
    """Raise `pickle.UnpicklingError` for a pickle with tuples of tuples that stand for more than `MAX_TUPLE_VALUES` values.

    A tuple can hold another one twice by reference, which can hold another one twice: 200 bytes stand for 2³⁰ values, all of
    which are visited when the tuple is hashed, compared or printed. So its size is found from the opcodes alone.
    """
    stack: list[int] = []  # of each value the number of values that it stands for as (part of) a tuple
    marks: list[int] = []
    memo: dict[int, int] = {}
    try:
        for opcode, argument, _ in pickletools.genops(content):
            _step(opcode.name, argument, stack, marks, memo)
            if stack and stack[-1] > MAX_TUPLE_VALUES:
                raise pickle.UnpicklingError(f"it has a tuple of more than {MAX_TUPLE_VALUES:,} values")
    except (IndexError, KeyError, ValueError, TypeError, OverflowError):
        raise pickle.UnpicklingError("its opcodes do not fit one another") from None


MAX_SKIPPED_PLACES = 10_000  # of a pickle's memory; picklers skip none


# What an opcode takes from the stack, and what it leaves (a number of flat values), for those that make no tuple.
_POPS = {
    "APPEND": 1,
    "SETITEM": 2,
    "BUILD": 1,
    "POP": 1,
    "REDUCE": 2,
    "NEWOBJ": 2,
    "NEWOBJ_EX": 3,
    "STACK_GLOBAL": 2,
    "BINPERSID": 1,
}
_REPLACES = {"REDUCE", "NEWOBJ", "NEWOBJ_EX", "STACK_GLOBAL", "BINPERSID", "LIST", "DICT", "OBJ", "INST"}
_POPS_TO_MARK = {"APPENDS", "SETITEMS", "ADDITEMS", "POP_MARK", "LIST", "DICT", "OBJ", "INST"}
_NO_EFFECT = {"PROTO", "FRAME", "STOP", "READONLY_BUFFER"}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def _step(name: str, argument: Any, stack: list[int], marks: list[int], memo: dict[int, int]) -> None:
    """Apply one opcode to the stack of sizes."""
    if name in _TUPLES:
        count = _TUPLES[name]
        stack[-count:] = [1 + sum(stack[-count:])]
    elif name in ("TUPLE", "FROZENSET"):
        start = marks.pop()
        stack[start:] = [1 + sum(stack[start:])]
    elif name == "MARK":
        marks.append(len(stack))
    elif name in ("MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT"):
        place = len(memo) if name == "MEMOIZE" else argument
        if place > 2 * len(memo) + MAX_SKIPPED_PLACES:  # Python makes room for as many places at once, up to 64 GB
            raise pickle.UnpicklingError(f"it remembers a value in place {place:,} after {len(memo):,} others")
        memo[place] = stack[-1]
    elif name in ("BINGET", "LONG_BINGET", "GET"):
        stack.append(memo[argument])
    elif name == "DUP":
        stack.append(stack[-1])
    elif name in _POPS_TO_MARK:
        del stack[marks.pop() :]
        stack += [1] if name in _REPLACES else []
    elif name in _POPS:
        del stack[len(stack) - _POPS[name] :]
        stack += [1] if name in _REPLACES else []
    elif name not in _NO_EFFECT:
        stack.append(1)
