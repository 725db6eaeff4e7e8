"""What was read off derivations, cached on disk for the next process: `XDG_CACHE_HOME`/shardwise, or ~/.cache/shardwise.

A file holds the units of one structure of model under one policy, lowered to sums of products: a coefficient and exponents
each, equal ones once (`Interner` makes equal parts one object). It is valid for these sources of the package and this version of
Python, so nothing is ever out of date. It is not needed: where it cannot be read or written, everything is derived. Files are
put in place whole, so that several processes may write at once; the last one wins. They are read only where no other user can
write them: reading pickled data can run code.
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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from shardwise.values.symbolic import LocalDim, Monomial

if TYPE_CHECKING:
    from shardwise.model.architecture import ModelStructure
    from shardwise.values.issue_policy import IssuePolicy


MAX_AGE_S = 30 * 86400.0  # seconds for which files of other sources stay
DerivedValue = TypeVar("DerivedValue")


@dataclass
class _CacheFile:
    """One structure's units under one policy: `known` by what they depend on; `new` if some are not yet on disk."""

    path: Path
    known: dict[Hashable, Any]
    new: bool = False


@dataclass
class DerivationCache:
    """The files of one process; without a folder nothing is stored."""

    folder: Path | None = None
    files: dict[tuple[ModelStructure, IssuePolicy], _CacheFile] = field(default_factory=dict)

    def get(
        self, structure: ModelStructure, policy: IssuePolicy, key: Hashable, derive: Callable[[], DerivedValue]
    ) -> DerivedValue:
        """The value stored under a key, or else that of `derive`."""
        if self.folder is None:
            return derive()
        if (structure, policy) not in self.files:
            path = self.folder / f"{_digest(structure, policy)}.pickle"
            self.files[structure, policy] = _CacheFile(path, _read(path))
        file = self.files[structure, policy]
        if key not in file.known:
            file.known[key], file.new = derive(), True
        found: DerivedValue = file.known[key]
        return found

    def write(self) -> None:
        """Write new values to disk, if possible."""
        for file in self.files.values():
            if file.new and self.folder is not None:
                with suppress(OSError):
                    self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                    _write(file.path, pickle.dumps(file.known, pickle.HIGHEST_PROTOCOL))
                    _remove_old(self.folder)
                file.new = False


CACHE = DerivationCache()


@contextmanager
def use_derivation_cache() -> Iterator[None]:
    """Derivations of this process are read from disk, and written there at the end."""
    CACHE.folder = _cache_folder()
    try:
        yield
        CACHE.write()
    finally:
        CACHE.folder = None
        CACHE.files.clear()


def _cache_folder() -> Path | None:
    """The folder of the files; None for a user without a home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardwise"
    except RuntimeError:
        return None


def _digest(structure: ModelStructure, policy: IssuePolicy) -> str:
    what = json.dumps([asdict(structure), asdict(policy)], default=sorted)
    return hashlib.sha256(f"{sys.version} {_sources()} {what}".encode()).hexdigest()[:32]


def _sources() -> list[tuple[str, int, int]]:
    """Name, size and time of change of every module of the package."""
    root = Path(__file__).parents[1]
    found = []
    for folder, _, names in os.walk(root):
        for name in names:
            if name.endswith(".py"):
                stat = os.stat(os.path.join(folder, name))
                found.append((os.path.relpath(os.path.join(folder, name), root), stat.st_size, stat.st_mtime_ns))
    return sorted(found)


def _read(path: Path) -> dict[Hashable, Any]:
    """Contents of a file; nothing if it cannot be read, or if another user could have written it."""
    try:
        with path.open("rb") as file:
            stat = os.fstat(file.fileno())
            if stat.st_uid != os.getuid() or stat.st_mode & 0o022:
                return {}
            known: dict[Hashable, Any] = pickle.load(file)
    except (OSError, pickle.PickleError, EOFError, AttributeError, ImportError, ValueError, TypeError, IndexError):
        return {}
    return known


def _write(path: Path, data: bytes) -> None:
    own = path.with_suffix(f".{os.getpid()}")
    try:
        own.touch(mode=0o600)
        own.write_bytes(data)
        own.replace(path)
    finally:
        own.unlink(missing_ok=True)


def _remove_old(folder: Path) -> None:
    """Remove files that have not been written for long: other sources wrote them."""
    for path in folder.glob("*.pickle"):
        if time.time() - path.stat().st_mtime > MAX_AGE_S:
            path.unlink(missing_ok=True)


# What hashes and compares fast, and comes most often: equal ones are known before their parts are looked at.
BY_VALUE = (LocalDim, Monomial)
T = TypeVar("T")


class Interner:
    """Makes values of parts of which equal ones are one object: it is evaluated, and a pickle writes it, once."""

    def __init__(self) -> None:
        self.known: dict[Hashable, Any] = {}
        self.names: dict[type, tuple[str, ...] | None] = {}  # the fields of a kind of dataclass; None: of another type

    def of(self, value: T) -> T:
        """The value with shared parts."""
        found: T = self._of(value, {})
        return found

    def _of(self, value: Any, seen: dict[int, Any]) -> Any:
        """`seen`: what was made of a part, by its identity, which is its own while the whole is there."""
        if id(value) in seen:
            return seen[id(value)]
        kind = type(value)
        if kind in BY_VALUE and (kind, value) in self.known:
            return self.known[kind, value]
        if kind not in self.names:
            self.names[kind] = tuple(getattr(kind, "__dataclass_fields__", ())) or None
        names = self.names[kind]
        if names is not None:
            parts = [self._of(getattr(value, name), seen) for name in names]
        elif isinstance(value, tuple):
            parts = [self._of(part, seen) for part in value]
        elif isinstance(value, dict):
            parts = [self._of(part, seen) for item in value.items() for part in item]
        else:
            return self.known.setdefault((kind, value), value)
        # parts are shared already, so that their identities tell whether the whole is
        key = (kind, *map(id, parts))
        found = self.known.get(key)
        if found is None:
            found = self.known[key] = _rebuild(kind, names, parts)
        if kind in BY_VALUE:
            self.known[kind, found] = found
        seen[id(value)] = found
        return found


def _rebuild(kind: type, names: tuple[str, ...] | None, parts: list[Any]) -> Any:
    if names is not None:
        return kind(**dict(zip(names, parts, strict=True)))
    if issubclass(kind, dict):
        return dict(zip(parts[::2], parts[1::2], strict=True))
    return kind(*parts) if hasattr(kind, "_fields") else tuple(parts)
