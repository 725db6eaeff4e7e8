"""Disk cache of what was read off derivations: `XDG_CACHE_HOME`/shardwise, or ~/.cache/shardwise; and interning of
equal parts.

A file holds the units of one model structure under one policy, as sums of products, equal parts once (`Interner`). Its
name is a digest of the structure, the policy, the version of Python and all sources of the package, so nothing in it is
ever out of date. It begins with a digest of its content, so that a damaged file is derived again. The cache is optional:
where it cannot be read or written, everything is derived. Files are put in place whole, so that several processes may
write at once; the last one wins.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import sys
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from shardwise.values import LocalDim, Monomial, open_input

# Types only: a command that finds its file here must start without loading the model's modules.
if TYPE_CHECKING:
    from shardwise.model import ModelStructure
    from shardwise.values import IssuePolicy


MAX_AGE_S = 30 * 86400.0  # seconds for which files of other sources stay
DerivedValue = TypeVar("DerivedValue")


@dataclass
class _CacheFile:
    """Units of one structure under one policy: `entries` by what they depend on; `new` if some are not yet on disk."""

    path: Path
    entries: dict[Hashable, Any]
    new: bool = False


@dataclass
class DerivationCache:
    """The files of one process; without a folder nothing is stored."""

    folder: Path | None = None
    files: dict[tuple[ModelStructure, IssuePolicy], _CacheFile] = field(default_factory=dict)

    def get(
        self, structure: ModelStructure, policy: IssuePolicy, key: Hashable, derive: Callable[[], DerivedValue]
    ) -> DerivedValue:
        """Return the value stored under a key, or else that of `derive`."""
        if self.folder is None:
            return derive()
        if (structure, policy) not in self.files:
            path = self.folder / f"{_digest(structure, policy)}.pickle"
            self.files[structure, policy] = _CacheFile(path, _read(path))
        file = self.files[structure, policy]
        if key not in file.entries:
            file.entries[key], file.new = derive(), True
        derived: DerivedValue = file.entries[key]
        return derived

    def write(self) -> None:
        """Write new values to disk, if possible."""
        for file in self.files.values():
            if file.new and self.folder is not None:
                with suppress(OSError):
                    self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                    _write(file.path, pickle.dumps(file.entries, pickle.HIGHEST_PROTOCOL))
                    _remove_old(self.folder)
                file.new = False


CACHE = DerivationCache()


@contextmanager
def use_derivation_cache() -> Iterator[None]:
    """Read derivations of this process from disk, and write new ones there at the end."""
    CACHE.folder = _cache_folder()
    try:
        yield
        CACHE.write()
    finally:
        CACHE.folder = None
        CACHE.files.clear()


def _cache_folder() -> Path | None:
    """Return the folder of the files; None for a user without a home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardwise"
    except RuntimeError:
        return None


def _digest(structure: ModelStructure, policy: IssuePolicy) -> str:
    # the sources are part of the digest, so a changed formula never reads an old file
    key_text = json.dumps([asdict(structure), asdict(policy)], default=sorted)
    return hashlib.sha256(f"{sys.version} {_sources()} {key_text}".encode()).hexdigest()[:32]


def _sources() -> list[tuple[str, int, int]]:
    """Return name, size and time of change of every module of the package."""
    root = Path(__file__).parents[1]
    modules = []
    for folder, _, names in os.walk(root):
        for name in names:
            if name.endswith(".py"):
                stat = os.stat(os.path.join(folder, name))
                modules.append((os.path.relpath(os.path.join(folder, name), root), stat.st_size, stat.st_mtime_ns))
    return sorted(modules)


DIGEST_BYTES = hashlib.sha256().digest_size


def _read(path: Path) -> dict[Hashable, Any]:
    """Return the contents of a file; nothing if it cannot be read, is damaged, or if another user could have written it."""
    try:
        with open_input(path) as file:
            stat = os.fstat(file.fileno())
            # unpickling can run code: accept only what no other user can have written
            if stat.st_uid != os.getuid() or stat.st_mode & 0o022:
                return {}
            digest, pickled = file.read(DIGEST_BYTES), file.read()
        # A flipped bit of a coefficient would unpickle as well, and give a wrong price.
        if digest != hashlib.sha256(path.name.encode() + pickled).digest():
            return {}
        contents: dict[Hashable, Any] = pickle.loads(pickled)
    except Exception:  # a file of another version may raise anything; whatever it is, all is derived again
        return {}
    return contents


def _write(path: Path, pickled: bytes) -> None:
    """Put a file in place: the SHA-256 of its name and its pickle, and the pickle."""
    temporary = path.with_suffix(f".{os.getpid()}")
    try:
        temporary.touch(mode=0o600)
        temporary.write_bytes(hashlib.sha256(path.name.encode() + pickled).digest() + pickled)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _remove_old(folder: Path) -> None:
    """Remove files that have not been written for long: other sources wrote them."""
    for path in folder.glob("*.pickle"):
        if time.time() - path.stat().st_mtime > MAX_AGE_S:
            path.unlink(missing_ok=True)


# What hashes and compares fast, and comes most often: equal ones are known before their parts are looked at.
BY_VALUE = (LocalDim, Monomial)
T = TypeVar("T")


class Interner:
    """Makes equal parts of values one object: evaluated once, compared by identity, and written to a pickle once."""

    def __init__(self) -> None:
        self.cache: dict[Hashable, Any] = {}
        self.names: dict[type, tuple[str, ...] | None] = {}  # the fields of a kind of dataclass; None: of another type

    def of(self, value: T) -> T:
        """Return the value with shared parts."""
        interned: T = self._of(value, {})
        return interned

    def _of(self, value: Any, interned_by_id: dict[int, Any]) -> Any:
        """Return a part's shared object; `interned_by_id` has those of this value by identity, valid while the value is
        alive."""
        if id(value) in interned_by_id:
            return interned_by_id[id(value)]
        kind = type(value)
        if kind in BY_VALUE and (kind, value) in self.cache:
            return self.cache[kind, value]
        if kind not in self.names:
            self.names[kind] = tuple(part.name for part in fields(kind)) if is_dataclass(kind) else None
        names = self.names[kind]
        if names is not None:
            parts = [self._of(getattr(value, name), interned_by_id) for name in names]
        elif isinstance(value, tuple):
            parts = [self._of(part, interned_by_id) for part in value]
        elif isinstance(value, dict):
            parts = [self._of(part, interned_by_id) for item in value.items() for part in item]
        else:
            return self.cache.setdefault((kind, value), value)
        # parts are shared already, so that their identities tell whether the whole is
        key = (kind, *map(id, parts))
        interned = self.cache.get(key)
        if interned is None:
            interned = self.cache[key] = _rebuild(kind, names, parts)
        if kind in BY_VALUE:
            self.cache[kind, interned] = interned
        interned_by_id[id(value)] = interned
        return interned


def _rebuild(kind: type, names: tuple[str, ...] | None, parts: list[Any]) -> Any:
    if names is not None:
        return kind(**dict(zip(names, parts, strict=True)))
    if issubclass(kind, dict):
        return dict(zip(parts[::2], parts[1::2], strict=True))
    return kind(*parts) if hasattr(kind, "_fields") else tuple(parts)
