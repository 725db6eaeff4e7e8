"""A listing as JAX source: `jax.shard_map` over a mesh, one `jax.lax` collective or one einsum per step."""

from __future__ import annotations

import json
from collections.abc import Iterable

from shardwise.sharding import Axes, CollectiveKind, Spec
from shardwise.verify.product_listing import CollectiveLine, EinsumLine, ProductListing, fill_template, tuple_text

_HEADER = '''\
"""{title}

in JAX, on a mesh with {mesh}. `product` works on the shards of one device, inside `jax.shard_map`.

    python product.py [seed]     # compares it with the unsharded product, on {count} devices of this host
"""

import json
import os
import sys

if __name__ == "__main__":  # set before JAX is imported: the host's CPU stands in for {count} accelerators
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count={count}"

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
'''

_LOCAL_PART = '''\
def own_part(x: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
    """The part of `x` along `dim` that belongs to this device's place on the axes, the first axis the slowest."""
    size = x.shape[dim] // lax.axis_size(axes)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * size, size, axis=dim)
'''

_PART_TO_SEND = '''\
def part_to_send(x: jax.Array, axes: tuple[str, ...], counts: tuple[int, ...], parts: list[int]) -> jax.Array:
    """Cut `x` into `counts` parts along each dim; the i-th device along the axes takes the `parts[i]`-th."""
    sizes = [size // count for size, count in zip(x.shape, counts, strict=True)]
    part = jnp.unravel_index(jnp.array(parts)[lax.axis_index(axes)], counts)
    return lax.dynamic_slice(x, [index * size for index, size in zip(part, sizes, strict=True)], sizes)
'''

_PRODUCT = '''\
def product({parameters}) -> jax.Array:
    """{text} from {operands}."""
{steps}
    return {result}
'''

_MAIN = '''\
def main(seed: int = 0) -> None:
    """Compare every device's shard of the result with the unsharded product, and print the error as one line of JSON."""
    jax.config.update("jax_default_matmul_precision", "highest")
    mesh = jax.make_mesh(
        {shape},
        {names},
        axis_types=(jax.sharding.AxisType.Auto,) * {rank},
        devices=jax.devices()[:{count}],
    )
    rng = np.random.default_rng(seed)
{inputs}
    expected = np.einsum(
        "{equation}",
{wholes}
        optimize=True,
    )
    sharded = jax.shard_map(
        {function},
        mesh=mesh,
        in_specs=(
{specs}
        ),
        out_specs={out},  # {text}
        check_vma=False,
    )
    result = jax.jit(sharded)({arguments})
    error = max(np.abs(np.asarray(shard.data) - expected[shard.index]).max() for shard in result.addressable_shards)
    print(json.dumps({{"max_relative_error": float(error / np.abs(expected).max()), "num_devices": mesh.size}}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
'''


def write_jax_source(listing: ProductListing) -> str:
    """Return the text of the file."""
    header = _HEADER.format(title=listing.title, mesh=listing.mesh_text, count=listing.mesh.num_devices)
    helpers = [_LOCAL_PART] if CollectiveKind.SLICE in listing.kinds else []
    helpers += [_PART_TO_SEND] if any(step.sends_part for step in listing.collectives) else []
    return "\n\n".join([header, *helpers, fill_template(_PRODUCT, listing, "jax.Array", _call), _main(listing)])


def _call(step: CollectiveLine | EinsumLine) -> str:
    if isinstance(step, EinsumLine):
        return f'jnp.einsum("{step.equation}", {", ".join(step.sources)})'
    x, axes = step.source, _axes(step.axes)
    if step.kind is CollectiveKind.ALL_GATHER:
        return f"lax.all_gather({x}, {axes}, axis={step.gathered}, tiled=True)"
    if step.kind is CollectiveKind.REDUCE_SCATTER:
        return f"lax.psum_scatter({x}, {axes}, scatter_dimension={step.split}, tiled=True)"
    if step.kind is CollectiveKind.ALL_REDUCE:
        return f"lax.psum({x}, {axes})"
    if step.kind is CollectiveKind.ALL_TO_ALL:
        return f"lax.all_to_all({x}, {axes}, split_axis={step.split}, concat_axis={step.gathered}, tiled=True)"
    if step.kind is CollectiveKind.PERMUTE:
        return f"lax.ppermute({step.target if step.sends_part else x}, {axes}, perm=list(enumerate({list(step.destinations)})))"
    return f"own_part({x}, {tuple_text(step.axes)}, dim={step.split})"


def _main(listing: ProductListing) -> str:
    mesh = listing.mesh
    return _MAIN.format(
        shape=tuple(size for _, size in mesh.axes),
        names=tuple_text(mesh.names),
        rank=len(mesh.axes),
        count=mesh.num_devices,
        inputs="\n".join(f"    {operand.random_line}" for operand in listing.operands),
        equation=listing.equation,
        wholes="\n".join(f"        {operand.unsharded_text}," for operand in listing.operands),
        function=_function(listing),
        specs="\n".join(
            f"            {_operand_spec(operand.spec)},  # {operand.text}" for operand in listing.operands
        ),
        out=_partition(listing.spec.axes),
        text=listing.text,
        arguments=", ".join(operand.variable for operand in listing.operands),
    )


def _function(listing: ProductListing) -> str:
    """Return `product`, or a wrapper that selects the device's summand of operands that are partial sums."""
    if not any(operand.spec.partial for operand in listing.operands):
        return "product"
    summands = [f"{operand.variable}[0]" if operand.spec.partial else operand.variable for operand in listing.operands]
    return f"lambda {', '.join(operand.variable for operand in listing.operands)}: product({', '.join(summands)})"


def _operand_spec(spec: Spec) -> str:
    return _partition((spec.partial, *spec.axes) if spec.partial else spec.axes)


def _partition(groups: Iterable[Axes]) -> str:
    return f"PartitionSpec({', '.join(_axes(axes) if axes else 'None' for axes in groups)})"


def _axes(axes: Axes) -> str:
    return json.dumps(axes[0]) if len(axes) == 1 else tuple_text(axes)
