"""The optimizer's step on this rank's part of each group, with gradients clipped to a norm; and moments as checkpoints
keep them.

Of moments with scales a checkpoint keeps what they multiply and the scales. A block is of 256 elements in a row of
what a rank uses of a parameter (`dtypes.BLOCKS`), and flat arrays are cut between blocks, so neither ZeRO nor
pipelines change what a block is of. Tensor parallelism does not either, if its parts of the rows are whole blocks:
scales then have the place of their blocks in the parameter, and any layout reads them. Where it does cut blocks, the
scales are those of one degree, and their name has the parts. So has that of a moment with one scale for what a rank
uses of a parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shardwise.model.optimizers.registry import DEFAULT, optimizer_named
from shardwise.model.program import Role
from shardwise.run.checkpoints.reader import OF_PARTS
from shardwise.run.kernels.device_dispatch import at_least_fp32
from shardwise.run.kernels.optimizers import Blocked, Moment, Scaled, TorchOptimizer, step_with, torch_optimizer
from shardwise.run.parallel.collectives import Exchange, Pending
from shardwise.run.parallel.factored_update import MeansOfWeight, MeansUpdate
from shardwise.run.parallel.flat_parameters import FlatGroup, Interval
from shardwise.run.parallel.whole_matrix_update import WholeUpdate
from shardwise.run.recipe import Recipe
from shardwise.sharding.spec import Axes
from shardwise.step.instructions import Traffic
from shardwise.step.parameters import Member
from shardwise.values.boxes import Box, Shape

SMALLEST_NORM = 1e-6  # torch.nn.utils.clip_grad_norm_ adds it
NORM_BLOCK = (
    2**8
)  # elements that are added up in float32, a few in each lane of a vector; blocks are added up in float64


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter's part on this process as the optimizer has it."""

    interval: Interval
    weight: nn.Parameter


class ByElement(NamedTuple):
    """Parts of parameters of a group that one optimizer updates element by element."""

    slots: Sequence[Slot]
    optimizer: TorchOptimizer
    moments: Sequence[str]


class Updater:
    """The optimizer for the groups of a model, one for each group, so that weights can leave as soon as they are new.

    Clips as torch.nn.utils.clip_grad_norm_ does.
    """

    def __init__(
        self, groups: Sequence[FlatGroup], exchange: Exchange, recipe: Recipe, norm_axes: Axes,
        optimizer: str = DEFAULT, traffic: Callable[[str], Iterable[Traffic]] = lambda unit: (),
    ) -> None:  # fmt: skip
        """`traffic`: the collectives of a kind of unit, of which the update issues those of means."""
        self.groups, self.exchange, self.recipe = groups, exchange, recipe
        self.norm_axes, self.name = norm_axes, optimizer
        self.means = self._means(traffic) if optimizer_named(optimizer).takes_means else {}
        self.whole = [self._whole(group) for group in groups]
        self.by_element = [
            list(self._by_element(group, list(self._elementwise(group, whole))))
            for group, whole in zip(groups, self.whole, strict=True)
        ]

    def _means(self, traffic: Callable[[str], Iterable[Traffic]]) -> dict[str, MeansUpdate]:
        """What updates the weights of each unit by an optimizer that takes means of them, by the unit's path."""
        one = optimizer_named(self.name)
        fields = one.given(self.recipe.optimizer)
        weights: dict[str, list[MeansOfWeight]] = {}
        for group in self.groups:
            for member in group.group.members:
                own = one.of(matrix=member.parameter.matrix is not None)
                given = one.of_kind(fields, matrix=member.parameter.is_matrix)
                weights.setdefault(group.group.path, []).append(MeansOfWeight(group, member, own, given))
        return {
            path: MeansUpdate(
                every, (m for m in traffic(every[0].member.parameter.unit) if m.role is Role.MEAN), self.exchange
            )
            for path, every in weights.items()
        }

    def _elementwise(self, group: FlatGroup, whole: WholeUpdate | None) -> Iterator[Interval]:
        """The parameters of a group that are updated one element by itself."""
        for one in group.intervals() if group.group.path not in self.means else ():
            if whole is None or one not in whole.moments:
                yield one

    def _whole(self, group: FlatGroup) -> WholeUpdate | None:
        """What updates matrices that the optimizer takes whole; None: all of the group's parameters are updated elementwise."""
        one = optimizer_named(self.name)
        if not one.takes_whole or not any(member.parameter.matrix for member in group.group.members):
            return None
        own = [interval for interval in group.intervals() if interval.member.parameter.matrix]
        fields = one.of_kind(one.given(self.recipe.optimizer), matrix=True)
        return WholeUpdate(group, own, self.exchange, one, fields)

    def _by_element(self, group: FlatGroup, intervals: Sequence[Interval]) -> Iterator[ByElement]:
        """What updates intervals of a group: matrices of products by themselves, where another one updates all else."""
        one = optimizer_named(self.name)
        for products in (False,) if one.others is None else (True, False):
            own = (i for i in intervals if one.others is None or (i.member.parameter.matrix is not None) is products)
            slots = [self._slot(group, interval) for interval in own]
            if slots:
                moments = tuple(one.of(matrix=products).moments)
                yield ByElement(slots, self._optimizer(slots, products=products), moments)

    def _slot(self, group: FlatGroup, one: Interval) -> Slot:
        return Slot(one, nn.Parameter(group.state[one.start : one.start + one.size], requires_grad=True))

    def _optimizer(self, slots: Sequence[Slot], *, products: bool) -> TorchOptimizer:
        matrices, others = ([slot.weight for slot in slots if _is_matrix(slot) is matrix] for matrix in (True, False))
        formats = self.groups[0].formats
        own = formats.moments, formats.squares
        return torch_optimizer(
            self.name, matrices, others, self.recipe.optimizer, own, scaled=formats.scales_moments, products=products
        )

    @torch.no_grad()
    def norm(self) -> Tensor:
        """The norm of all gradients together, each element counted once: of what several processes have each counts its share."""
        among = tuple(axis for axis in self.norm_axes if axis != "pp")  # stages have parameters of their own
        total = sum(
            sum_of_squares(group.gradient_shard[rows]) / group.copies(axes, among)
            for group in self.groups
            for axes, rows in group.alike()
        )
        assert isinstance(total, Tensor)
        # exchanged in the format of the realised list
        control = torch.promote_types(self.groups[0].gradient_shard.dtype, torch.float32)
        return self.exchange.sum_now(total.to(control), self.norm_axes).sqrt()

    @torch.no_grad()
    def step(
        self, learning_rate: float, norm: Tensor, *, loss_scale: float = 1.0, is_update: bool = True
    ) -> list[Pending]:
        """Update every group; the new weights are then on their way to the other processes.

        Gradients are those of the loss times `loss_scale`, `norm` is that of the loss alone. Without `is_update` weights stay.
        """
        scale = self._scale(norm, loss_scale)
        pending: list[Pending] = []
        for path, update in self.means.items() if is_update else ():
            own = [group for group in self.groups if group.group.path == path]
            update.step({group: self._gradients(group, scale) for group in own}, learning_rate)
        for group, by_element, whole in zip(self.groups, self.by_element, self.whole, strict=True):
            if is_update and (by_element or whole is not None):
                gradients = self._gradients(group, scale)
                for one in by_element:
                    self._update(gradients, one.slots, one.optimizer, learning_rate)
                if whole is not None:
                    whole.step(gradients, learning_rate)
            group.publish()
            if group.sync.step_gather:
                part = group.shard.clone() if group.shard.device.type == "cpu" else group.shard
                pending.append(
                    self.exchange.all_gather(group.weights, part, group.sync.step_gather, group.weights_carried)
                )
        return pending

    def _scale(self, norm: Tensor, loss_scale: float) -> Tensor | float | None:
        """By what gradients are multiplied; None: by nothing."""
        limit, unscaled = self.recipe.clip_norm, None if loss_scale == 1.0 else 1.0 / loss_scale
        if limit is None:
            return unscaled
        clipped = (limit / (norm + SMALLEST_NORM)).clamp(max=1.0)
        return clipped if unscaled is None else clipped * unscaled

    @staticmethod
    def _gradients(group: FlatGroup, scale: Tensor | float | None) -> Tensor:
        """This process's part of a group's gradients [shard] as the update takes them."""
        fine = at_least_fp32(group.state.dtype)
        gradients = group.gradient_shard.to(fine) if group.update is None else group.update.copy_(group.gradient_shard)
        return gradients if scale is None else gradients.mul_(scale)

    @staticmethod
    def _update(gradients: Tensor, slots: Sequence[Slot], optimizer: TorchOptimizer, learning_rate: float) -> None:
        for settings in optimizer.param_groups:
            settings["lr"] = learning_rate
        own = {one.weight: gradients[one.interval.start : one.interval.start + one.interval.size] for one in slots}
        step_with(optimizer, own)

    def pieces(self) -> Iterator[tuple[str, Interval, Tensor]]:
        """The moments by name, this process's part of each parameter's; of blocks their codes, and their scales."""
        for one in chain.from_iterable(self.by_element):
            for slot, moment in product(one.slots, one.moments):
                yield from moment_pieces(moment, slot.interval, one.optimizer.state[slot.weight][moment])
        for update in self.means.values():
            for weight in update.weights.values():
                yield from weight.pieces()
        for whole in self.whole:
            yield from whole.pieces() if whole is not None else ()

    def set_steps(self, steps: int) -> None:
        """How many steps the moments have seen."""
        for one in chain.from_iterable(self.by_element):
            for slot in one.slots:
                one.optimizer.state[slot.weight]["step"].fill_(float(steps))
        for update in (*self.means.values(), *self.whole):
            if update is not None:
                update.steps = steps


def sum_of_squares(values: Tensor) -> Tensor:
    """The sum of the squares of `values` [n], a scalar in float64, whatever their format.

    In blocks because PyTorch's norms of float32 add up in float32: over 10^8 equal elements the norm of a CPU is 5.6% off. All in
    float64 they would take five times as long.

    >>> sum_of_squares(torch.full((4,), 2.0)).item()
    16.0
    """
    whole = len(values) // NORM_BLOCK * NORM_BLOCK
    fine = torch.promote_types(values.dtype, torch.float32)
    norms = torch.linalg.vector_norm(values[:whole].view(-1, NORM_BLOCK), dim=1, dtype=fine)
    rest = torch.linalg.vector_norm(values[whole:], dtype=torch.float64)
    found: Tensor = norms.to(torch.float64).square().sum() + rest.square()
    return found


def _is_matrix(slot: Slot) -> bool:
    return slot.interval.member.parameter.is_matrix


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
