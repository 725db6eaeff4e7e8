"""One weight of ours and one tensor of a file: the same elements, their dims in another order and some of them joined."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardwise.engine.torch.build import balance_biases
from shardwise.engine.torch.weights import on_one_device
from shardwise.errors import InputError
from shardwise.lowering.parameters import Parameter, unit_paths
from shardwise.model.architecture import Architecture
from shardwise.model.decoder import PREDICTS
from shardwise.train.box import Box, Shape
from shardwise.train.huggingface.names import COPIES, Stored, StoredFamily


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor's name in the files, whose parameter it holds (of one expert, or all; or the bias of a router's choice), and the
    groups of our dims in it.

    A `copy` of what another tensor holds is written, and not read. Of dims `within` a longer one of the tensor it is said where
    in it they begin, and how long it is.
    """

    name: str
    parameter: str
    expert: int | None
    dims: tuple[str, ...]
    groups: tuple[tuple[str, ...], ...]
    copy: bool = False
    within: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def box(self, shape: Shape) -> Box:
        """What the tensor holds of a parameter of this shape."""
        inner = self.part(shape)
        if self.expert is None:
            return Box((0,) * len(inner), inner)
        return Box((self.expert, *(0 for _ in inner)), (1, *inner))

    def part(self, shape: Shape) -> Shape:
        """The sizes of `dims`, by the shape of the parameter."""
        return shape if self.expert is None else shape[1:]

    def sizes(self, part: Shape) -> dict[str, int]:
        """Those of the tensor by our dims, by the shape of the part of the parameter that it holds."""
        own = dict(zip(self.dims, part, strict=True))
        return own | {dim: whole for dim, (_, whole) in self.within.items()}

    def is_around(self, dim: str) -> bool:
        """Whether what is of other weights lies between two places of a dim."""
        return any(dim in group[: group.index(one)] for group in self.groups for one in self.within if one in group)

    @property
    def order(self) -> tuple[str, ...]:
        """Our dims in the order that they have in the file."""
        return tuple(dim for group in self.groups for dim in group)


def places(architecture: Architecture, family: StoredFamily) -> Iterator[Place]:
    """Where a family keeps each parameter. Raises `InputError` that names what it has no place for."""
    instance, biases = on_one_device(architecture), balance_biases(architecture)
    for layer, (path, unit) in enumerate(unit_paths(architecture), start=-1):  # behind the embedding
        copies = COPIES if unit in PREDICTS else {}
        for weight, one in instance.used[path].items():
            lent = one.path != path
            found = copies.get(weight) if lent else family.stored(one)
            if found is not None:
                yield from _places(one, found, layer, architecture.dims, copy=lent)
            elif not lent:
                raise InputError(f"model: {one.weight} of the {one.unit} has no place in a {family.built_as}")
        if path in biases and family.balance_bias:
            yield Place(family.balance_bias.format(layer=layer), biases[path], None, ("E",), (("E",),))


def _places(one: Parameter, found: Stored, layer: int, sizes: Mapping[str, int], *, copy: bool) -> Iterator[Place]:
    """The tensors of one parameter."""
    single = "{expert}" not in found.name
    dims = one.use.dims if single else one.use.dims[1:]
    layout = found.layout.split(",") if found.layout else [" ".join(dims)]
    groups, within = [], {}
    for group in layout:
        joined = [token.split("+") for token in group.split() if token != "1"]
        own = [next(dim for dim in parts if len(parts) == 1 or dim in dims) for parts in joined]
        groups.append(tuple(own))
        for dim, parts in zip(own, joined, strict=True):
            if len(parts) > 1:
                before, whole = parts[: parts.index(dim)], sum(sizes[part] for part in parts)
                within[dim] = sum(sizes[part] for part in before), whole
    for expert in (None,) if single else range(sizes["E"]):
        name = found.name.format(layer=layer, expert=expert)
        yield Place(name, one.name, expert, dims, tuple(groups), copy, within)


def put(part: Tensor, place: Place, into: Tensor) -> None:
    """Write a parameter's part [`dims`] where a file's tensor has it, in the tensor's format."""
    sizes = place.sizes(tuple(part.shape))
    target = into.view([sizes[dim] for dim in place.order])
    for dim, (begin, _) in place.within.items():
        target = target.narrow(place.order.index(dim), begin, part.shape[place.dims.index(dim)])
    target.copy_(part.permute([place.dims.index(dim) for dim in place.order]))


def shape_of(place: Place, shape: Shape) -> Shape:
    """The shape of a tensor in the files, by that of the part of the parameter that it holds."""
    sizes = place.sizes(shape)
    return tuple(math.prod(sizes[dim] for dim in group) for group in place.groups)


def taken(read: Callable[[tuple[slice, ...]], Tensor], place: Place, shape: Shape, box: Box) -> Tensor:
    """A box of the part of a parameter, with our dims, out of what `read` gives of a file's tensor; nothing else is read.

    `shape` is that of the whole part. Of dims that are joined in the file the range is read from the box's first element to its
    last, which for an interval of a flattened parameter is no more than the box; one that lies within others is read run by run.
    """
    for outer, own in enumerate(place.dims):
        if box.lengths[outer] > 1 and place.is_around(own):
            return torch.cat([taken(read, place, shape, one) for one in box.along(outer)], dim=outer)
    sizes, lengths = place.sizes(shape), dict(zip(place.dims, box.lengths, strict=True))
    starts = {dim: place.within.get(dim, (0, 0))[0] + start for dim, start in zip(place.dims, box.offsets, strict=True)}
    inner = [Box(tuple(starts[dim] for dim in group), tuple(lengths[dim] for dim in group)) for group in place.groups]
    joined = [tuple(sizes[dim] for dim in group) for group in place.groups]
    spans = [part.span(whole) for part, whole in zip(inner, joined, strict=True)]
    found = read(tuple(slice(*span) for span in spans))
    for dim, (part, whole, (first, last)) in enumerate(zip(inner, joined, spans, strict=True)):
        if part.volume != last - first:
            numbers = torch.arange(math.prod(whole)).view(whole)[part.slices].flatten()
            found = found.index_select(dim, numbers - first)
    return found.reshape([lengths[dim] for dim in place.order]).permute([place.order.index(dim) for dim in place.dims])
