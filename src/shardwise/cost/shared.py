"""Equal parts of values made one object."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, TypeVar

from shardwise.symbolic import Local, Monomial

# What hashes and compares fast, and comes most often: equal ones are known before their parts are looked at.
BY_VALUE = (Local, Monomial)
T = TypeVar("T")


class Shared:
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
            found = self.known[key] = _made(kind, names, parts)
        if kind in BY_VALUE:
            self.known[kind, found] = found
        seen[id(value)] = found
        return found


def _made(kind: type, names: tuple[str, ...] | None, parts: list[Any]) -> Any:
    if names is not None:
        return kind(**dict(zip(names, parts, strict=True)))
    if issubclass(kind, dict):
        return dict(zip(parts[::2], parts[1::2], strict=True))
    return kind(*parts) if hasattr(kind, "_fields") else tuple(parts)
