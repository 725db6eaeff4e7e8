"""What a checkpoint keeps of moments: of those with scales, what they multiply and scales.

A block is of 256 elements in a row of what a process uses of a parameter (`dtypes.BLOCKS`), and flat arrays are cut between
blocks, so neither ZeRO nor pipelines change what a block is of. Tensor parallelism does not either, if its parts of the rows are
whole blocks: scales then have the place of their blocks in the parameter, and any layout reads them. Where it does cut blocks,
the scales are those of one degree, and their name has the parts. So has that of a moment with one scale for what a process uses
of a parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

from torch import Tensor

from shardwise.engine.torch.blocked import Blocked
from shardwise.engine.torch.optimizers import Moment
from shardwise.engine.torch.scaled import Scaled
from shardwise.lowering.groups import Member
from shardwise.train.box import Box, Shape
from shardwise.train.checkpoint.loading import OF_PARTS
from shardwise.train.parallel.flat import Interval

SCALES = "_scales"  # what the name of a moment is followed by, or `OF_PARTS` with the parts of each dim


def moment_pieces(name: str, interval: Interval, moment: Moment) -> Iterator[tuple[str, Interval, Tensor]]:
    """The tensors of a moment, each with its name and the part of the parameter's that it is."""
    if isinstance(moment, Blocked):
        yield name, interval, moment.codes
        suffix, scales = scales_interval(interval, moment.block)
        yield name + suffix, scales, moment.scales
    elif isinstance(moment, Scaled):
        yield name, interval, moment.elements
        suffix, scales = _of_parts(interval, None)
        yield name + suffix, scales, moment.scale
    else:
        yield name, interval, moment


def scales_interval(interval: Interval, block: int) -> tuple[str, Interval]:
    """Which of all blocks' scales those of an interval are, and what the name of the moment is followed by in theirs."""
    member, window = interval.member, interval.window
    split = [dim for dim, (own, whole) in enumerate(zip(member.shape, member.whole, strict=True)) if own < whole]
    inner = split[-1] if split else 0  # from here on blocks are counted; dims before it are as the parameter has them
    row = math.prod(member.whole[inner + 1 :])
    cuts = [member.shape[inner] * row] if split else []
    cuts += [member.whole[inner] * row] if math.prod(member.whole[:inner]) > 1 else []
    if any(length % block for length in cuts):
        return _of_parts(interval, block)

    def counted(sizes: Shape) -> Shape:
        return *sizes[:inner], -(-sizes[inner] * row // block)

    own = Box(counted(window.offsets), counted(window.lengths))
    return SCALES, _interval(interval, counted(member.whole), counted(member.shape), own, block)


def _of_parts(interval: Interval, block: int | None) -> tuple[str, Interval]:
    """Of a parameter whose parts have blocks of their own: those of one part behind those of another. None: a part is one."""
    member, own_size = interval.member, interval.window.volume
    assert block is not None or interval.size == own_size, "what has one scale is not split (planning.runnable)"
    counts = [-(-whole // own) for own, whole in zip(member.shape, member.whole, strict=True)]
    before, total = 0, 0
    for places in product(*map(range, counts)):
        starts = tuple(place * own for place, own in zip(places, member.shape, strict=True))
        volume = math.prod(
            min(own, whole - start) for own, whole, start in zip(member.shape, member.whole, starts, strict=True)
        )
        before = total if starts == interval.window.offsets else before
        total += -(-volume // (block or volume))
    blocks = -(-own_size // (block or own_size))
    own = Box((before,), (blocks,))
    return OF_PARTS + "x".join(map(str, counts)), _interval(interval, (total,), (blocks,), own, block or own_size)


def _interval(interval: Interval, whole: Shape, shape: Shape, window: Box, block: int) -> Interval:
    member = Member(interval.member.parameter, whole, shape, 0)
    return Interval(member, interval.offset // block, 0, -(-interval.size // block), window)
