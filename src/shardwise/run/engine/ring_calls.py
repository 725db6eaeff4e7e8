"""Computations that run around a ring in place of the collectives that the derivation has beside them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from shardwise.derive.ring_attention_and_matmul import RING
from shardwise.derive.sharded_program import Communicate, Compute
from shardwise.model.operations import Scan
from shardwise.run.engine.call_builder import SIGHTS, Call, Calls
from shardwise.run.engine.collective_matmul import BlockProduct, Blocks, Gathering, Scattering
from shardwise.run.engine.ring_attention import RingAttention
from shardwise.run.kernels.attention import Attention
from shardwise.run.kernels.matmul import product_or_einsum
from shardwise.step.collective_matmul import InPieces, operands_of, with_rings
from shardwise.step.instructions import Held, Instruction, Launch, Start, Traffic, Wait


class Ring(NamedTuple):
    """An attention, or its gradient, and the collectives that it takes the place of."""

    step: Compute
    moved: tuple[Communicate, ...]


Around = Ring | InPieces


def rings(calls: Calls, instructions: Iterable[Instruction]) -> Iterator[Instruction | Around]:
    """Instructions, with rings in place of the kernels and collectives that they stand for."""
    found = list(with_rings(instructions))
    moved: dict[str, list[Communicate]] = {}
    replaced: set[int] = set()
    for traffic in _around(calls, found):
        replaced.add(id(traffic))
        for result in traffic.beside:
            moved.setdefault(result, []).extend(traffic.derived)
    for one in found:
        if isinstance(one, Launch) and (around := moved.get(one.kernel.outputs[0])):
            (step,) = one.kernel.steps
            yield Ring(step, tuple(around))
        elif not (isinstance(one, Start | Wait) and id(one.traffic) in replaced):
            yield one


def _around(calls: Calls, instructions: Iterable[Instruction | InPieces]) -> Iterator[Traffic]:
    """The collectives that run around a ring of several ranks."""
    if calls.unit.family.ring and calls.rank.several(RING):
        for one in instructions:
            if isinstance(one, Start) and one.traffic.axes == RING and one.traffic.beside:
                yield one.traffic


def made_around(ring: Around) -> tuple[str, ...]:
    """The results of the computations of a ring."""
    steps = (ring.step,) if isinstance(ring, Ring) else ring.products
    return tuple(name for step in steps for name in step.operation.outputs)


def ring_call(calls: Calls, ring: Around, phase: str) -> Call:
    """The call of a ring."""
    return _attention(calls, ring, phase) if isinstance(ring, Ring) else _products(calls, ring, phase)


def _attention(calls: Calls, ring: Ring, phase: str) -> Call:
    """Keys and values are taken, and their gradients given, as they rest."""
    operation, placed = ring.step.operation, ring.step.placed
    exchange = calls.rank.exchange
    assert exchange is not None, "a rank of several has an exchange"
    attention = RingAttention(Attention.of(calls.numerics, calls.sizes["H"]), exchange, RING, calls.rank.position(RING))
    resting = {one.tensor.name: one.collective for one in ring.moved}
    operands = zip(operation.operands, placed.inputs, strict=False)
    keys = {name: calls.key(name, resting[name].before if name in resting else spec) for name, spec in operands}
    outputs = zip(operation.outputs, placed.outputs, strict=True)
    writes = tuple(calls.key(name, resting[name].after if name in resting else spec) for name, spec in outputs)
    q, k, v, _, _, *others = operation.operands
    reads = (*(keys[name] for name in (q, k, v)), calls.cut(SIGHTS, RING), *(keys[name] for name in others))
    kernel = attention.forward if isinstance(operation, Scan) else attention.backward
    return Call(kernel, reads, writes, phase, alone=True)


def _products(calls: Calls, ring: InPieces, phase: str) -> Call:
    """Of what is gathered a product takes the blocks as they come; of a sum this rank's block is made."""
    exchange, axes = calls.rank.exchange, calls.rank.several(ring.traffic.axes)
    assert exchange is not None, "a rank of several has an exchange"
    dim = ring.dim
    place, count = calls.rank.position(axes), calls.rank.mesh.size(axes)
    around = Blocks(exchange, axes, place, count, ring.block.spec.dims.index(dim))
    products = [_in_blocks(calls, step, dim) for step in ring.products]
    writes = tuple(calls.key(*held) for held in ring.writes)
    if not ring.gathers:
        reads = (*(held for step in ring.products for held in operands_of(step)), *ring.terms)
        return Call(Scattering(around, products), _keys(calls, reads), writes, phase, alone=True)
    pairs = [operands_of(step) for step in ring.products]
    sides = [pair.index(ring.ends[1]) for pair in pairs]
    others = (pair[1 - side] for pair, side in zip(pairs, sides, strict=True))
    kernel = Gathering(around, products, sides, ring.keeps)
    one = len(writes) == 1
    return Call(
        (lambda *tensors: kernel(*tensors)[0]) if one else kernel, _keys(calls, (ring.block, *others)), writes, phase,
        into_each=kernel.into, alone=True,
    )  # fmt: skip


def _keys(calls: Calls, held: Iterable[Held]) -> tuple[str, ...]:
    return tuple(calls.key(*one) for one in held)


def _in_blocks(calls: Calls, step: Compute, dim: str) -> BlockProduct:
    """A product of what lies in blocks along a dim."""
    (left, right), result = (spec.dims for spec in step.placed.inputs), step.placed.outputs[0].dims
    cuts = tuple(dims.index(dim) if dim in dims else None for dims in (left, right))
    product = product_or_einsum(left, right, result, calls.local_sizes(step))
    return BlockProduct(product, cuts, result.index(dim) if dim in result else None)
