"""One weight of ours and one tensor of a file: the same elements, their dims in another order and some of them joined."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.errors import InputError
from shardwise.train.huggingface.names import StoredFamily
from shardwise.train.model.decoder import Decoder
from shardwise.train.model.weights import parameter_weights


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


def places(model: Decoder, family: StoredFamily) -> Iterator[Place]:
    """Where a family keeps each parameter. Raises `InputError` that names what it has no place for."""
    experts = model.architecture.num_experts
    for parameter, weight in parameter_weights(model).items():
        found = family.names.get(weight.name)
        if found is None:
            raise InputError(f"model: {weight.name} of the {weight.unit} has no place in a {family.built_as}")
        layer = parameter.split(".")[1]
        single = "{expert}" not in found.name
        dims = weight.dims if single else weight.dims[1:]
        groups = (
            tuple(tuple(d for d in group.split() if d != "1") for group in found.layout.split(","))
            if found.layout
            else (dims,)
        )
        for expert in (None,) if single else range(experts):
            yield Place(found.name.format(layer=layer, expert=expert), parameter, expert, dims, groups)


def stored(part: Tensor, place: Place) -> Tensor:
    """A parameter's part as the file has it; memory of its own."""
    sizes = dict(zip(place.dims, part.shape, strict=True))
    turned = part.permute([place.dims.index(dim) for dim in place.order])
    return turned.reshape([math.prod(sizes[dim] for dim in group) for group in place.groups]).clone(
        memory_format=torch.contiguous_format
    )


def taken(tensor: Tensor, place: Place, shape: tuple[int, ...]) -> Tensor:
    """A file's tensor with our dims. Raises `InputError` where it has another shape than the config says."""
    sizes = dict(zip(place.dims, shape, strict=True))
    wanted = tuple(math.prod(sizes[dim] for dim in group) for group in place.groups)
    if tuple(tensor.shape) != wanted:
        raise InputError(f"model: {place.name} has shape {tuple(tensor.shape)}; its config says {wanted}")
    return tensor.reshape([sizes[dim] for dim in place.order]).permute([place.order.index(dim) for dim in place.dims])
