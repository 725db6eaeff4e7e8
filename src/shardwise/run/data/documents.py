"""Documents: text files, lines of .jsonl files, and the source of Python's standard library, always in the same order."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from shardwise.values import InputError, open_input, parse_json_line, raise_problems

GLOBS = ("*.txt", "*.md", "*.rst", "*.py", "*.jsonl")
# Installed packages (PEP 370, Debian's Python policy), tests and caches.
EXCLUDED_FOLDERS = ("site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__")
MAX_NAMED = 3  # keys in an error


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A text and its name, which says where it comes from and is the same on every machine."""

    name: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFile:
    """A file to read, and the name of its documents: its path below the folder that was given."""

    path: Path
    name: str


def find_text_files(paths: Sequence[str | Path], globs: Sequence[str] = GLOBS) -> tuple[TextFile, ...]:
    """Return the given files, and the files in the given folders whose name matches one of `globs`; hidden ones are
    skipped.

    A pattern with "/" is matched with the end of the path below the folder ("docs/*.md"). Files of a folder are sorted
    by path. Raises `InputError` that lists every path that is missing, or holds nothing that matches.
    """
    problems: list[str] = []
    files: list[TextFile] = []
    for path in map(Path, paths):
        if path.is_dir():
            matching = tuple(_walk(path, globs))
            if not matching:
                problems.append(
                    f"{path}: no file matches {', '.join(globs)}; give a folder that has one, or another --glob"
                )
            files += matching
        elif path.is_file():
            files.append(TextFile(path=path, name=path.name))
        else:
            problems.append(f"{path}: no such file or folder; text is required")
    raise_problems(problems)
    return tuple(_number_duplicates(files))


def _number_duplicates(sources: Iterable[TextFile]) -> Iterator[TextFile]:
    """Number names that occur twice, so that each document has its own hash."""
    times: Counter[str] = Counter()
    for source in sources:
        times[source.name] += 1
        yield replace(source, name=f"{source.name}#{times[source.name]}") if times[source.name] > 1 else source


def _walk(folder: Path, globs: Sequence[str], excluded: Iterable[str] = ()) -> Iterator[TextFile]:
    names = []
    for directory, subfolders, files in os.walk(folder, onerror=_cannot_list):
        subfolders[:] = [name for name in subfolders if not name.startswith(".") and name not in excluded]
        relative = Path(directory).relative_to(folder)
        names += [(relative / name).as_posix() for name in files if not name.startswith(".")]
    for name in sorted(names):
        if any(PurePosixPath(name).match(pattern) for pattern in globs):
            yield TextFile(path=folder / name, name=name)


def _cannot_list(error: OSError) -> None:
    raise InputError(f"{error.filename}: cannot read: {error.strerror}; a readable folder is required") from None


def python_library(max_bytes: int | None = None) -> tuple[TextFile, ...]:
    """Return the source files of this Python's standard library without its tests: text that every installation has.

    They are sorted by a hash of their names, so that the first `max_bytes` of them (at least one file) are a random
    sample. Raises `InputError` for a size below 1, and if the library is not a folder of source files.
    """
    if max_bytes is not None and max_bytes < 1:
        raise InputError(f"python-library: found {max_bytes} bytes; a size above 0 is required, such as 4MB")
    folder = Path(os.__file__).parent
    files = sorted(_walk(folder, ["*.py"], EXCLUDED_FOLDERS), key=lambda source: name_hash(source.name, "sample"))
    if not files:
        raise InputError(f"{folder}: Python's library has no source files here; give files or folders of text instead")
    num_kept, total = 1, files[0].path.stat().st_size
    for source in files[1:]:
        total += source.path.stat().st_size
        if max_bytes is not None and total > max_bytes:
            break
        num_kept += 1
    return tuple(files[:num_kept])


def read_documents(sources: Iterable[TextFile]) -> Iterator[Document]:
    """Yield the documents of files: one for each file, or for each line's "text" of a .jsonl file. Empty ones are
    skipped. Raises `InputError` for a file that cannot be read, is not UTF-8, or has a line without a text."""
    for source in sources:
        documents = _lines(source) if source.path.suffix == ".jsonl" else _whole_file(source)
        try:
            yield from (document for document in documents if document.text)
        except OSError as error:
            raise InputError(f"{source.path}: cannot read: {error.strerror}; a readable file is required") from None
        except UnicodeDecodeError as error:
            raise InputError(
                f"{source.path}: byte {error.object[error.start]:#04x} is not UTF-8; text in UTF-8 is required: convert the "
                "file, or leave it out with --glob"
            ) from None


def _whole_file(source: TextFile) -> Iterator[Document]:
    with open_input(source.path) as file:
        yield Document(name=source.name, text=file.read().decode("utf-8"))


def _lines(source: TextFile) -> Iterator[Document]:
    with open_input(source.path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield Document(name=f"{source.name}:{number}", text=_text_of(line, f"{source.path}:{number}"))


def _text_of(line: bytes, location: str) -> str:
    required = 'an object with a "text" is required on each line, such as {"text": "Once upon a time"}'
    text = line.decode("utf-8")
    try:
        record = parse_json_line(text)
    except ValueError:
        raise InputError(f"{location}: not valid JSON; {required}") from None
    document_text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(document_text, str):
        keys = (
            f"keys {', '.join(map(repr, list(record)[:MAX_NAMED]))}"
            if isinstance(record, dict)
            else type(record).__name__
        )
        raise InputError(f"{location}: found {keys}; {required}")
    try:
        document_text.encode("utf-8")
    except UnicodeEncodeError:  # JSON can escape half of a surrogate pair
        raise InputError(
            f"{location}: the text has half a surrogate pair; text that UTF-8 can write is required"
        ) from None
    return document_text


def name_hash(name: str, purpose: str) -> int:
    """Return a hash of a document's name in [0, 2^64); hashes for two purposes are independent."""
    return int.from_bytes(hashlib.sha256(os.fsencode(f"{purpose}:{name}")).digest()[:8], "big")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutSplit:
    """The held-out documents: those whose hash is in the lowest `fraction` of all hashes, or the one with the lowest
    hash."""

    fraction: float
    lowest: int  # the lowest hash of the corpus

    def __contains__(self, document: object) -> bool:
        if not isinstance(document, Document) or self.fraction == 0:
            return False
        document_hash = name_hash(document.name, "held_out")
        return document_hash < self.fraction * 2**64 or document_hash == self.lowest


def held_out_documents(documents: Iterable[Document], fraction: float) -> tuple[HeldOutSplit, int]:
    """Return the held-out split of a corpus, and the number of its documents.

    Whether a document is held out depends on its name alone: adding a document moves no other, except the single one of
    an otherwise empty split. Raises `InputError` for a fraction outside [0, 1), no documents, or none left to train on.
    """
    if not 0 <= fraction < 1:
        raise InputError(
            f"held-out: found {fraction:g}; a fraction of at least 0 and below 1 is required, such as 0.01"
        )
    count, num_below, lowest = 0, 0, 2**64
    for document in documents:
        document_hash = name_hash(document.name, "held_out")
        count, num_below, lowest = count + 1, num_below + (document_hash < fraction * 2**64), min(lowest, document_hash)
    if not count:
        raise InputError("text: found no document that is not empty; text is required")
    if fraction and max(num_below, 1) == count:
        raise InputError(
            f"held-out: a fraction of {fraction:g} holds out every document of {count:,}; one for training is required: "
            "give more documents, a smaller --held-out, or none with --held-out 0"
        )
    return HeldOutSplit(fraction=fraction, lowest=lowest), count
