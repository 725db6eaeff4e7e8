"""Random sharded products, the same ones for the same seed: every legal shape that the notation can write, in small sizes.

Two operands share any mix of summed and batch dims (matrix products, batches of them, elementwise, outer and inner
products); three form a chain, whose last operand may share a dim with both others. Meshes have one to three axes and
at most 64 devices; any dim may be split over several axes, in any order.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence

from shardwise.derive.sharded_einsum import ShardedExpression, shard_expression
from shardwise.sharding.notation import EinsumExpression, ParsedTensor
from shardwise.sharding.spec import Mesh, Spec
from shardwise.values.errors import InputError

AXIS_SIZES = (2, 2, 2, 3, 4, 4, 8)
LARGEST_MESH = 64
LARGEST_PRODUCT = 2**21  # elements of the index space of the whole product
LARGEST_TENSOR = 2**17
MULTIPLES = (1, 2, 2, 3, 4)
LETTERS = "IJKLMNOPQR"

Dims = tuple[str, ...]


def random_expressions(count: int, seed: int = 0) -> Iterator[ShardedExpression]:
    """`count` legal expressions; the n-th does not depend on how many are asked for."""
    for index in range(count):
        rng = random.Random(f"{seed}/{index}")
        expression = None
        while expression is None:
            expression = _attempt(rng)
        yield expression


def _attempt(rng: random.Random) -> ShardedExpression | None:
    """One draw, or none when it is too large or says something that the notation does not allow."""
    mesh = _mesh(rng)
    dims = _dims(rng)
    specs = [_spec(rng, tensor_dims, mesh) for tensor_dims in dims]
    if rng.random() < 0.1:
        specs[0] = _partial(rng, specs[0], mesh)
    tensors = [ParsedTensor(name, spec) for name, spec in zip("ABC", specs[:-1], strict=False)]
    result = None if rng.random() < 0.05 else ParsedTensor("Out", specs[-1])
    sizes = _sizes(rng, specs, mesh)
    if not _small(dims, sizes):
        return None
    try:
        expression = shard_expression(
            EinsumExpression(tuple(tensors), result), mesh, sizes, rng.choice(("bf16", "fp32"))
        )
    except InputError:
        return None
    return expression if _is_product(expression) else None


def _mesh(rng: random.Random) -> Mesh:
    while True:
        sizes = [rng.choice(AXIS_SIZES) for _ in range(rng.randint(1, 3))]
        if math.prod(sizes) <= LARGEST_MESH:
            return Mesh(tuple(zip("XYZ", sizes, strict=False)))


def _dims(rng: random.Random) -> list[Dims]:
    """Dims of the operands, and of the result behind them."""
    letters = iter(LETTERS)
    first, second, result = _pair(rng, letters)
    if rng.random() < 0.6:
        operands = [first, second]
    else:
        third, result = _third(rng, letters, first, result)
        operands = [first, second, third]
    if rng.random() < 0.3:
        operands = [_shuffled(rng, dims) for dims in operands]
        result = _shuffled(rng, result)
    return [*operands, result]


def _pair(rng: random.Random, letters: Iterator[str]) -> tuple[Dims, Dims, Dims]:
    batch, summed, left_only, right_only = (
        [next(letters) for _ in range(rng.choice(counts))] for counts in ((0, 0, 0, 1, 2), (0, 1, 1, 1, 2), (0, 1, 1), (0, 1, 1))
    )  # fmt: skip
    if not (batch or summed or (left_only and right_only)):
        return _pair(rng, letters)
    return (*batch, *left_only, *summed), (*batch, *summed, *right_only), (*batch, *left_only, *right_only)


def _third(rng: random.Random, letters: Iterator[str], first_dims: Dims, running: Dims) -> tuple[Dims, Dims]:
    """A third operand that sums some dims of the running product, or scales along them, and the new result."""
    summed = [dim for dim in running if rng.random() < 0.5]
    kept = [dim for dim in running if dim not in summed]
    scaled = [dim for dim in kept if rng.random() < 0.2]
    gone = [dim for dim in first_dims if dim not in running]
    new = [gone[0]] if gone and rng.random() < 0.3 else [next(letters)] if rng.random() < 0.8 else []
    return (*scaled, *summed, *new), (*kept, *new)


def _shuffled(rng: random.Random, dims: Sequence[str]) -> Dims:
    return tuple(rng.sample(dims, len(dims)))


def _spec(rng: random.Random, dims: Dims, mesh: Mesh) -> Spec:
    placed: dict[str, list[str]] = {}
    for axis in rng.sample(mesh.names, len(mesh.names)):
        if dims and rng.random() < 0.7:
            placed.setdefault(rng.choice(dims), []).append(axis)
    return Spec.of(dims, placed)


def _partial(rng: random.Random, spec: Spec, mesh: Mesh) -> Spec:
    unused = [axis for axis in mesh.names if axis not in spec.sharded_axes]
    return spec.with_partial(rng.sample(unused, 1)) if unused else spec


def _sizes(rng: random.Random, specs: Sequence[Spec], mesh: Mesh) -> dict[str, int]:
    """Sizes that divide over the axes asked for and, for half of the expressions, over the whole mesh."""
    generous = rng.random() < 0.5
    sizes = {}
    for dim in sorted({dim for spec in specs for dim in spec.dims}):
        degree = math.lcm(*(mesh.size(spec.axes_of(dim)) for spec in specs))
        base = math.lcm(degree, mesh.num_devices) if generous else degree
        sizes[dim] = max(2, base * rng.choice(MULTIPLES))
    return sizes


def _small(dims: Sequence[Dims], sizes: Mapping[str, int]) -> bool:
    product = math.prod(sizes[dim] for dim in {dim for tensor_dims in dims for dim in tensor_dims})
    return product <= LARGEST_PRODUCT and all(
        math.prod(sizes[dim] for dim in tensor_dims) <= LARGEST_TENSOR for tensor_dims in dims
    )


def _is_product(expression: ShardedExpression) -> bool:
    """Whether every dim that the result lacks is in two operands: a sum over one operand alone is no product."""
    operand_dims = [dim for spec in expression.operands for dim in spec.dims]
    return all(spec.dims for spec in expression.operands) and all(
        dim in expression.result_dims or operand_dims.count(dim) > 1 for dim in operand_dims
    )
