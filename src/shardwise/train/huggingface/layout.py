"""One weight of ours and one tensor of a file: the same elements, their dims in another order and some of them joined."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

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

    A `copy` of what another tensor holds is written, and not read.
    """

    name: str
    parameter: str
    expert: int | None
    dims: tuple[str, ...]
    groups: tuple[tuple[str, ...], ...]
    copy: bool = False

    def box(self, shape: Shape) -> Box:
        """What the tensor holds of a parameter of this shape."""
        inner = self.part(shape)
        if self.expert is None:
            return Box((0,) * len(inner), inner)
        return Box((self.expert, *(0 for _ in inner)), (1, *inner))

    def part(self, shape: Shape) -> Shape:
        """The sizes of `dims`, by the shape of the parameter."""
        return shape if self.expert is None else shape[1:]

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
                yield from _places(one, found, layer, architecture.num_experts, copy=lent)
            elif not lent:
                raise InputError(f"model: {one.weight} of the {one.unit} has no place in a {family.built_as}")
        if path in biases and family.balance_bias:
            yield Place(family.balance_bias.format(layer=layer), biases[path], None, ("E",), (("E",),))


def _places(one: Parameter, found: Stored, layer: int, num_experts: int, *, copy: bool) -> Iterator[Place]:
    """The tensors of one parameter."""
    single = "{expert}" not in found.name
    dims = one.use.dims if single else one.use.dims[1:]
    layout = found.layout.split(",") if found.layout else [" ".join(dims)]
    groups = tuple(tuple(dim for dim in group.split() if dim != "1") for group in layout)
    for expert in (None,) if single else range(num_experts):
        yield Place(found.name.format(layer=layer, expert=expert), one.name, expert, dims, groups, copy)


def stored(part: Tensor, place: Place) -> Tensor:
    """A parameter's part [`dims`] as the file has it, contiguous."""
    turned = part.permute([place.dims.index(dim) for dim in place.order])
    return turned.reshape(shape_of(place, tuple(part.shape))).contiguous()


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
