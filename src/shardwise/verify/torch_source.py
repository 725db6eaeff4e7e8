"""A listing as PyTorch source: collectives of `torch.distributed`, each in a small function of the emitted file.

PyTorch's collectives work on the leading dim, and its process groups sort their members by rank; the functions restore
the order of dims and members, so that the steps of `product` read like the notation.
"""

from __future__ import annotations

from shardwise.sharding import CollectiveKind, Spec
from shardwise.verify.product_listing import CollectiveLine, EinsumLine, ProductListing, fill_template, tuple_text

_HEADER = '''\
"""{title}

in PyTorch, on a mesh with {mesh}. `product` works on the shards of one rank.

    torchrun --standalone --nproc-per-node {count} product.py [seed]     # compares it with the unsharded product

Runs on gloo, or on NCCL where each process has a GPU. Needs PyTorch 2.13 or later.
"""

import json
import math
import os
import sys

import numpy as np
import torch
import torch.distributed as dist

MESH = {sizes}  # axes and their sizes, the first axis the slowest over ranks
GROUPS = {{}}  # for each group of axes that a collective runs over: its process group, and its ranks in the order of the axes


def make_groups() -> None:
    """Make the process groups; every rank calls it once, after `init_process_group`."""
    ranks = np.arange({count}).reshape({shape})
    for axes in ({groups}):
        last = [list(MESH).index(axis) for axis in axes]
        rows = np.moveaxis(ranks, last, range(-len(axes), 0))
        rows = rows.reshape(-1, math.prod(MESH[axis] for axis in axes)).tolist()
        group, _ = dist.new_subgroups_by_enumeration(rows)
        GROUPS[axes] = group, next(row for row in rows if dist.get_rank() in row)


def own_part(x: torch.Tensor, axes: tuple[str, ...], dim: int) -> torch.Tensor:
    """The part of `x` along `dim` that belongs to this rank's place on the axes, the first axis the slowest."""
    place = dict(zip(MESH, np.unravel_index(dist.get_rank(), tuple(MESH.values())), strict=True))
    part = 0
    for axis in axes:
        part = part * MESH[axis] + int(place[axis])
    return x.chunk(math.prod(MESH[axis] for axis in axes), dim)[part]


def shard(whole: np.ndarray, *axes_of_dims: tuple[str, ...]) -> torch.Tensor:
    """This rank's shard of a whole array, each dim split over its axes."""
    x = torch.from_numpy(whole)
    for dim, axes in enumerate(axes_of_dims):
        x = own_part(x, axes, dim)
    return x
'''

_ORDER = '''\
def slots(axes: tuple[str, ...]) -> list[int]:
    """For each rank in the order of the axes, its place in the process group, which sorts its members."""
    group, ranks = GROUPS[axes]
    return [dist.get_group_rank(group, rank) for rank in ranks]


def in_group_order(x: torch.Tensor, axes: tuple[str, ...], dim: int) -> torch.Tensor:
    """The parts of `x` along `dim`, one for each member of the group and in its order, one behind the other on dim 0."""
    order = slots(axes)
    parts = x.chunk(len(order), dim)
    return torch.cat([parts[order.index(slot)] for slot in range(len(order))])


def in_axes_order(parts: torch.Tensor, axes: tuple[str, ...], dim: int) -> torch.Tensor:
    """The parts from each member of the group, which stand one behind the other on dim 0, put together along `dim`."""
    order = slots(axes)
    chunks = parts.chunk(len(order))
    return torch.cat([chunks[slot] for slot in order], dim)
'''

_PART_TO_SEND = '''\
def part_to_send(x: torch.Tensor, axes: tuple[str, ...], counts: tuple[int, ...], parts: list[int]) -> torch.Tensor:
    """Cut `x` into `counts` parts along each dim; the i-th rank along the axes takes the `parts[i]`-th."""
    _, ranks = GROUPS[axes]
    for dim, part in enumerate(np.unravel_index(parts[ranks.index(dist.get_rank())], counts)):
        x = x.chunk(counts[dim], dim)[part]
    return x
'''

_HELPERS = {
    CollectiveKind.ALL_GATHER: '''\
def all_gather(x: torch.Tensor, axes: tuple[str, ...], dim: int) -> torch.Tensor:
    """The shards of the whole group, one behind the other along `dim`."""
    shards = x.new_empty((len(slots(axes)) * x.shape[0], *x.shape[1:]))
    dist.all_gather_single(shards, x.contiguous(), group=GROUPS[axes][0])
    return in_axes_order(shards, axes, dim)
''',
    CollectiveKind.REDUCE_SCATTER: '''\
def reduce_scatter(x: torch.Tensor, axes: tuple[str, ...], dim: int) -> torch.Tensor:
    """This rank's part along `dim` of the sum over the group."""
    parts = in_group_order(x, axes, dim)
    own = torch.empty_like(parts.chunk(len(slots(axes)))[0])
    dist.reduce_scatter_single(own, parts, group=GROUPS[axes][0])
    return own
''',
    CollectiveKind.ALL_REDUCE: '''\
def all_reduce(x: torch.Tensor, axes: tuple[str, ...]) -> torch.Tensor:
    """The sum over the group."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=GROUPS[axes][0])
    return total
''',
    CollectiveKind.ALL_TO_ALL: '''\
def all_to_all(x: torch.Tensor, axes: tuple[str, ...], split_dim: int, concat_dim: int) -> torch.Tensor:
    """Keep one part along `split_dim` only, and get that part of every member's shard, put together along `concat_dim`."""
    parts = in_group_order(x, axes, split_dim)
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=GROUPS[axes][0])
    return in_axes_order(received, axes, concat_dim)
''',
    CollectiveKind.PERMUTE: '''\
def permute(x: torch.Tensor, axes: tuple[str, ...], destinations: list[int]) -> torch.Tensor:
    """Hand over `x`: the i-th rank along the axes sends to the `destinations[i]`-th."""
    _, ranks = GROUPS[axes]
    here = ranks.index(dist.get_rank())
    if destinations[here] == here:
        return x
    received = torch.empty_like(x, memory_format=torch.contiguous_format)
    send = dist.P2POp(dist.isend, x.contiguous(), ranks[destinations[here]])
    receive = dist.P2POp(dist.irecv, received, ranks[destinations.index(here)])
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()
    return received
''',
}

_PRODUCT = '''\
def product({parameters}) -> torch.Tensor:
    """{text} from {operands}."""
{steps}
    return {result}
'''

_MAIN = '''\
def main(seed: int = 0) -> None:
    """Compare every rank's shard of the result with the unsharded product, and print the error as one line of JSON."""
    cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    make_groups()
    rng = np.random.default_rng(seed)
{inputs}
    expected = np.einsum(
        "{equation}",
{wholes}
        optimize=True,
    )
    result = product(
{shards}
    )
    error = (result.double() - {expected}).abs().max()  # {text}
    dist.all_reduce(error, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        relative = error.item() / np.abs(expected).max()
        print(json.dumps({{"max_relative_error": float(relative), "num_devices": dist.get_world_size()}}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
'''


def write_torch_source(listing: ProductListing) -> str:
    """Return the text of the file."""
    helpers = [_HELPERS[kind] for kind in _HELPERS if kind in listing.kinds]
    if listing.kinds & {CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_TO_ALL}:
        helpers.insert(0, _ORDER)
    if any(step.sends_part for step in listing.collectives):
        helpers.append(_PART_TO_SEND)
    return "\n\n".join(
        [_header(listing), *helpers, fill_template(_PRODUCT, listing, "torch.Tensor", _call), _main(listing)]
    )


def _header(listing: ProductListing) -> str:
    mesh = listing.mesh
    axes_used = dict.fromkeys(step.axes for step in listing.collectives if step.kind is not CollectiveKind.SLICE)
    groups = [tuple_text(axes) for axes in axes_used]
    return _HEADER.format(
        title=listing.title, mesh=listing.mesh_text, count=mesh.num_devices,
        sizes="{" + ", ".join(f'"{axis}": {size}' for axis, size in mesh.axes) + "}",
        shape=tuple(size for _, size in mesh.axes), groups=", ".join(groups) + ("," if len(groups) == 1 else ""),
    )  # fmt: skip


def _call(step: CollectiveLine | EinsumLine) -> str:
    if isinstance(step, EinsumLine):
        return f'torch.einsum("{step.equation}", {", ".join(step.sources)})'
    x, axes = step.target if step.sends_part else step.source, tuple_text(step.axes)
    arguments = {
        CollectiveKind.ALL_GATHER: f", dim={step.gathered}",
        CollectiveKind.REDUCE_SCATTER: f", dim={step.split}",
        CollectiveKind.ALL_REDUCE: "",
        CollectiveKind.ALL_TO_ALL: f", split_dim={step.split}, concat_dim={step.gathered}",
        CollectiveKind.PERMUTE: f", destinations={list(step.destinations)}",
        CollectiveKind.SLICE: f", dim={step.split}",
    }
    name = "own_part" if step.kind is CollectiveKind.SLICE else step.kind.value
    return f"{name}({x}, {axes}{arguments[step.kind]})"


def _main(listing: ProductListing) -> str:
    return _MAIN.format(
        inputs="\n".join(f"    {operand.random_line}" for operand in listing.operands),
        equation=listing.equation,
        wholes="\n".join(f"        {operand.unsharded_text}," for operand in listing.operands),
        shards="\n".join(
            f"        {_shard(operand.variable, operand.spec)},  # {operand.text}" for operand in listing.operands
        ),
        expected=_shard("np.asarray(expected)", listing.spec),
        text=listing.text,
    )


def _shard(array: str, spec: Spec) -> str:
    """Return the rank's shard of an unsharded array, its summand if the array is a partial sum, as source."""
    groups = (spec.partial, *spec.axes) if spec.partial else spec.axes
    arguments = ", ".join([array, *map(tuple_text, groups)])
    return f"shard({arguments}){'[0]' if spec.partial else ''}.to(device)"
