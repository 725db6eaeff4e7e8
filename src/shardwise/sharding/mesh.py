"""The logical grid of devices: an ordered product of named axes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from shardwise.values import ShardingError


@dataclass(frozen=True, slots=True)
class Mesh:
    """Named axes with their sizes; device numbers vary slowest along the first one."""

    axes: tuple[tuple[str, int], ...]
    _sizes: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        names = [name for name, _ in self.axes]
        repeated = sorted({name for name in names if names.count(name) > 1})
        problems = [f"mesh: axis {name!r} is given twice; each axis needs a name of its own" for name in repeated]
        problems += [
            f"mesh: axis {name} has size {size!r}; a whole number of at least 1 is required"
            for name, size in self.axes
            if not isinstance(size, int) or isinstance(size, bool) or size < 1
        ]
        if problems:
            raise ShardingError(*problems)
        object.__setattr__(self, "_sizes", dict(self.axes))

    @classmethod
    def of(cls, sizes: Mapping[str, int]) -> Mesh:
        """Build a mesh from a mapping of axis names to sizes, in its order."""
        return cls(tuple(sizes.items()))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @property
    def num_devices(self) -> int:
        return math.prod(size for _, size in self.axes)

    def size(self, axes: str | Iterable[str]) -> int:
        """Return the product of the sizes of one axis or several. Raises `ShardingError` for an axis that the mesh lacks."""
        axis_names = (axes,) if isinstance(axes, str) else tuple(axes)
        try:
            return math.prod([self._sizes[axis] for axis in axis_names])
        except KeyError as missing:
            mesh_axes = ", ".join(self.names) or "no axes"
            raise ShardingError(f"mesh: no axis {missing.args[0]!r}; the mesh has {mesh_axes}") from None

    def coordinates(self) -> Iterator[dict[str, int]]:
        """Yield the coordinate of every device, in device order."""
        for indices in itertools.product(*(range(size) for _, size in self.axes)):
            yield dict(zip(self.names, indices, strict=True))

    def position(self, coordinate: Mapping[str, int], axes: Iterable[str]) -> int:
        """Return the index of a device along an ordered group of axes, the first one the major one (so XY differs from YX)."""
        index = 0
        for axis in axes:
            index = index * self.size(axis) + coordinate[axis]
        return index
