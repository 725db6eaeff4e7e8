"""The mesh, a logical grid of devices with named axes, and the sharding of one tensor on it: which axes split each dim, and over
which axes the tensor is a partial sum.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from shardwise.values import LocalDim, Polynomial, ShardingError, multiply_symbols


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


Axes = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Spec:
    """Sharding: `dims[i]` is split over `axes[i]`, the first axis the major one; `partial` are the `{U_...}` axes.

    A mesh axis may occur once only: on one dim, or among the partial axes. `reduction` is how partial values combine.
    """

    dims: tuple[str, ...]
    axes: tuple[Axes, ...]
    partial: Axes = field(default=())
    reduction: str = "sum"

    def __post_init__(self) -> None:
        if len(self.dims) != len(self.axes):
            raise ShardingError(f"sharding: {len(self.dims)} dims but {len(self.axes)} groups of axes")
        used = [axis for group in (*self.axes, self.partial) for axis in group]
        if len(set(used)) < len(used):
            repeated = min(axis for axis in used if used.count(axis) > 1)
            raise ShardingError(f"{self}: mesh axis {repeated} is used twice; an array may use each axis once")
        if self.partial:
            object.__setattr__(self, "partial", tuple(sorted(self.partial)))
        else:
            object.__setattr__(self, "reduction", "sum")

    @classmethod
    def of(
        cls, dims: Iterable[str], sharded: Mapping[str, Iterable[str]] | None = None, partial: Iterable[str] = ()
    ) -> Spec:
        """Build a spec over `dims` from a mapping of the split dims to their axes."""
        dims, sharded = tuple(dims), sharded or {}
        unknown = [dim for dim in sharded if dim not in dims]
        if unknown:
            raise ShardingError(f"sharding: no dim {unknown[0]!r} among {', '.join(dims)}")
        return cls(dims, tuple(tuple(sharded.get(dim, ())) for dim in dims), tuple(partial))

    def axes_of(self, dim: str) -> Axes:
        """Return the axes that split `dim`; none if the tensor lacks the dim."""
        return self.axes[self.dims.index(dim)] if dim in self.dims else ()

    @property
    def sharded_axes(self) -> frozenset[str]:
        return frozenset(axis for group in self.axes for axis in group)

    def dim_of(self, axis: str) -> str | None:
        """Return the dim that `axis` splits, if any."""
        return next((dim for dim, group in zip(self.dims, self.axes, strict=True) if axis in group), None)

    def with_axes(self, dim: str, axes: Iterable[str]) -> Spec:
        """Return the spec with `dim` split over `axes`."""
        new_axes = tuple(tuple(axes) if d == dim else group for d, group in zip(self.dims, self.axes, strict=True))
        return Spec(self.dims, new_axes, self.partial, self.reduction)

    def with_partial(self, partial: Iterable[str], reduction: str | None = None) -> Spec:
        """Return the spec with other partial axes."""
        return Spec(self.dims, self.axes, tuple(partial), reduction or self.reduction)

    def gather_axes(self, axes: Iterable[str]) -> Spec:
        """Return the spec with these axes gathered on every dim."""
        gathered = frozenset(axes)
        remaining = tuple(tuple(axis for axis in group if axis not in gathered) for group in self.axes)
        return Spec(self.dims, remaining, self.partial, self.reduction)

    def gather_axis(self, axis: str) -> Spec:
        """Return the spec with `axis` gathered, and with it the axes minor to it on its dim, so that shards stay contiguous."""
        dim = self.dim_of(axis)
        if dim is None:
            return self
        axes = self.axes_of(dim)
        return self.with_axes(dim, axes[: axes.index(axis)])

    def rename_dims(self, names: Mapping[str, str]) -> Spec:
        """Return the spec with dims renamed."""
        return Spec(tuple(names.get(dim, dim) for dim in self.dims), self.axes, self.partial, self.reduction)

    def local_elements(self) -> Polynomial:
        """Return the elements on the fullest device, in symbols."""
        return _elements(self.dims, self.axes)

    def local_shape(self, mesh: Mesh, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape of each device's shard. Raises `ShardingError` where an axis does not divide its dim."""
        shape = []
        for dim, axes in zip(self.dims, self.axes, strict=True):
            degree = mesh.size(axes)
            if sizes[dim] % degree:
                raise ShardingError(
                    f"{self}: dim {dim} = {sizes[dim]} does not divide over {'·'.join(axes)} = {degree}; "
                    f"the nearest sizes that do are {sizes[dim] // degree * degree} and {-(-sizes[dim] // degree) * degree}"
                )
            shape.append(sizes[dim] // degree)
        return tuple(shape)

    def shard_index(self, mesh: Mesh, coordinate: Mapping[str, int]) -> tuple[int, ...]:
        """Return which block of the array a device holds: its index along each dim."""
        return tuple(mesh.position(coordinate, axes) for axes in self.axes)

    def replication(self, mesh: Mesh) -> int:
        """Return how many devices hold the same shard (devices along partial axes hold different summands, and do not count)."""
        return mesh.num_devices // mesh.size((*self.sharded_axes, *self.partial))

    def __str__(self) -> str:
        inner = ", ".join(dim + _subscript(axes) for dim, axes in zip(self.dims, self.axes, strict=True))
        return f"[{inner}]" + ("{U" + _subscript(self.partial) + "}" if self.partial else "")


def num_shared_axes(first: Axes, second: Axes) -> int:
    """Return the length of the longest common prefix of two groups of axes."""
    length = 0
    while length < min(len(first), len(second)) and first[length] == second[length]:
        length += 1
    return length


@lru_cache(maxsize=2**12)
def _elements(dims: tuple[str, ...], axes: tuple[Axes, ...]) -> Polynomial:
    return multiply_symbols(itertools.starmap(LocalDim, zip(dims, axes, strict=True)))


def _subscript(axes: Axes) -> str:
    """Format axes in the notation: `_XY` for single letters, `_{dp,fsdp}` for names."""
    if not axes:
        return ""
    if all(len(axis) == 1 for axis in axes):
        return "_" + "".join(axes)
    return "_" + (axes[0] if len(axes) == 1 else "{" + ",".join(axes) + "}")
