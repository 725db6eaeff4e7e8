"""One weight of ours and one tensor of a file: the same elements, their dims in another order and some of them joined."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.engine.torch.weights import on_one_device
from shardwise.errors import InputError
from shardwise.model.architecture import Architecture
from shardwise.train.box import Box, Shape
from shardwise.train.huggingface.names import StoredFamily


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor's name in the files, whose parameter it holds (of one expert, or all), and the groups of our dims in it."""

    name: str
    parameter: str
    expert: int | None
    dims: tuple[str, ...]
    groups: tuple[tuple[str, ...], ...]

    def part(self, parameter: Tensor) -> Tensor:
        """What of the parameter the tensor holds, with `dims`."""
        return parameter if self.expert is None else parameter[self.expert]

    @property
    def order(self) -> tuple[str, ...]:
        """Our dims in the order that they have in the file."""
        return tuple(dim for group in self.groups for dim in group)


def places(architecture: Architecture, family: StoredFamily) -> Iterator[Place]:
    """Where a family keeps each parameter. Raises `InputError` that names what it has no place for."""
    experts = architecture.num_experts
    for one in on_one_device(architecture).parameters:
        found = family.names.get(one.weight)
        if found is None:
            raise InputError(f"model: {one.weight} of the {one.unit} has no place in a {family.built_as}")
        layer = one.name.split(".")[1]
        single = "{expert}" not in found.name
        dims = one.use.dims if single else one.use.dims[1:]
        groups = (
            tuple(tuple(d for d in group.split() if d != "1") for group in found.layout.split(","))
            if found.layout
            else (dims,)
        )
        for expert in (None,) if single else range(experts):
            yield Place(found.name.format(layer=layer, expert=expert), one.name, expert, dims, groups)


def stored(part: Tensor, place: Place) -> Tensor:
    """A parameter's part as the file has it; memory of its own."""
    sizes = dict(zip(place.dims, part.shape, strict=True))
    turned = part.permute([place.dims.index(dim) for dim in place.order])
    return turned.reshape([math.prod(sizes[dim] for dim in group) for group in place.groups]).clone(
        memory_format=torch.contiguous_format
    )


def shape_of(place: Place, shape: Shape) -> Shape:
    """The shape of a tensor in the files, by that of the part of the parameter that it holds."""
    sizes = dict(zip(place.dims, shape, strict=True))
    return tuple(math.prod(sizes[dim] for dim in group) for group in place.groups)


def taken(read: Callable[[tuple[slice, ...]], Tensor], place: Place, shape: Shape, box: Box) -> Tensor:
    """A box of the part of a parameter, with our dims, out of what `read` gives of a file's tensor; nothing else is read.

    `shape` is that of the whole part. Of dims that are joined in the file the range is read from the box's first element to its
    last, which for an interval of a flattened parameter is no more than the box.
    """
    sizes, starts, lengths = (
        dict(zip(place.dims, numbers, strict=True)) for numbers in (shape, box.offsets, box.lengths)
    )
    inner = [Box(tuple(starts[dim] for dim in group), tuple(lengths[dim] for dim in group)) for group in place.groups]
    joined = [tuple(sizes[dim] for dim in group) for group in place.groups]
    spans = [part.span(whole) for part, whole in zip(inner, joined, strict=True)]
    found = read(tuple(slice(*span) for span in spans))
    for dim, (part, whole, (first, last)) in enumerate(zip(inner, joined, spans, strict=True)):
        if part.volume != last - first:
            numbers = torch.arange(math.prod(whole)).view(whole)[part.slices].flatten()
            found = found.index_select(dim, numbers - first)
    return found.reshape([lengths[dim] for dim in place.order]).permute([place.order.index(dim) for dim in place.dims])
