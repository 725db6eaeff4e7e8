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

from shardwise.model.optimizers.registry import DEFAULT_OPTIMIZER, get_optimizer
from shardwise.model.program import Role
from shardwise.run.checkpoints.reader import PARTIAL_SCALES
from shardwise.run.kernels.device_dispatch import at_least_fp32
from shardwise.run.kernels.optimizers import (
    BlockwiseMoment,
    MomentTensor,
    ScaledTensor,
    TorchOptimizer,
    build_torch_optimizer,
    step_optimizer,
)
from shardwise.run.parallel.collectives import MeshCollectives, PendingWork
from shardwise.run.parallel.factored_update import FactoredUpdate, FactoredWeight
from shardwise.run.parallel.flat_parameters import FlatParameterGroup, ParameterShard
from shardwise.run.parallel.whole_matrix_update import WholeMatrixUpdate
from shardwise.run.recipe import TrainingRecipe
from shardwise.sharding.spec import Axes
from shardwise.step.instructions import UnitCollective
from shardwise.step.parameters import GroupMember
from shardwise.values.boxes import Box, Shape

NORM_EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_ adds it
NORM_BLOCK = (
    2**8
)  # elements that are added up in float32, a few in each lane of a vector; blocks are added up in float64


@dataclass(frozen=True, slots=True)
class OptimizerSlot:
    """A parameter's part on this process as the optimizer has it."""

    interval: ParameterShard
    weight: nn.Parameter


class ElementwiseUpdate(NamedTuple):
    """Parts of parameters of a group that one optimizer updates element by element."""

    slots: Sequence[OptimizerSlot]
    optimizer: TorchOptimizer
    moments: Sequence[str]


class ShardedOptimizer:
    """The optimizer for the groups of a model, one for each group, so that weights can leave as soon as they are new.

    Clips as torch.nn.utils.clip_grad_norm_ does.
    """

    def __init__(
        self, groups: Sequence[FlatParameterGroup], exchange: MeshCollectives, recipe: TrainingRecipe, norm_axes: Axes,
        optimizer: str = DEFAULT_OPTIMIZER, traffic: Callable[[str], Iterable[UnitCollective]] = lambda unit: (),
    ) -> None:  # fmt: skip
        """`traffic`: the collectives of a kind of unit, of which the update issues those of means."""
        self.groups, self.exchange, self.recipe = groups, exchange, recipe
        self.norm_axes, self.name = norm_axes, optimizer
        self.means = self._means(traffic) if get_optimizer(optimizer).reduces_means else {}
        self.whole = [self._whole(group) for group in groups]
        self.by_element = [
            list(self._by_element(group, list(self._elementwise(group, whole))))
            for group, whole in zip(groups, self.whole, strict=True)
        ]

    def _means(self, traffic: Callable[[str], Iterable[UnitCollective]]) -> dict[str, FactoredUpdate]:
        """What updates the weights of each unit by an optimizer that takes means of them, by the unit's path."""
        one = get_optimizer(self.name)
        fields = one.resolve_hyperparameters(self.recipe.optimizer)
        weights: dict[str, list[FactoredWeight]] = {}
        for group in self.groups:
            for member in group.group.members:
                own = one.for_weight(is_matrix=member.parameter.matrix is not None)
                given = one.hyperparameters_for(fields, matrix=member.parameter.is_matrix)
                weights.setdefault(group.group.path, []).append(FactoredWeight(group, member, own, given))
        return {
            path: FactoredUpdate(
                every, (m for m in traffic(every[0].member.parameter.unit) if m.role is Role.MEAN), self.exchange
            )
            for path, every in weights.items()
        }

    def _elementwise(self, group: FlatParameterGroup, whole: WholeMatrixUpdate | None) -> Iterator[ParameterShard]:
        """The parameters of a group that are updated one element by itself."""
        for one in group.intervals() if group.group.path not in self.means else ():
            if whole is None or one not in whole.moments:
                yield one

    def _whole(self, group: FlatParameterGroup) -> WholeMatrixUpdate | None:
        """What updates matrices that the optimizer takes whole; None: all of the group's parameters are updated elementwise."""
        one = get_optimizer(self.name)
        if not one.updates_whole_matrices or not any(member.parameter.matrix for member in group.group.members):
            return None
        own = [interval for interval in group.intervals() if interval.member.parameter.matrix]
        fields = one.hyperparameters_for(one.resolve_hyperparameters(self.recipe.optimizer), matrix=True)
        return WholeMatrixUpdate(group, own, self.exchange, one, fields)

    def _by_element(
        self, group: FlatParameterGroup, intervals: Sequence[ParameterShard]
    ) -> Iterator[ElementwiseUpdate]:
        """What updates intervals of a group: matrices of products by themselves, where another one updates all else."""
        one = get_optimizer(self.name)
        for products in (False,) if one.fallback is None else (True, False):
            own = (i for i in intervals if one.fallback is None or (i.member.parameter.matrix is not None) is products)
            slots = [self._slot(group, interval) for interval in own]
            if slots:
                moments = tuple(one.for_weight(is_matrix=products).moments)
                yield ElementwiseUpdate(slots, self._optimizer(slots, products=products), moments)

    def _slot(self, group: FlatParameterGroup, one: ParameterShard) -> OptimizerSlot:
        return OptimizerSlot(one, nn.Parameter(group.state[one.start : one.start + one.size], requires_grad=True))

    def _optimizer(self, slots: Sequence[OptimizerSlot], *, products: bool) -> TorchOptimizer:
        matrices, others = ([slot.weight for slot in slots if _is_matrix(slot) is matrix] for matrix in (True, False))
        formats = self.groups[0].formats
        own = formats.moments, formats.squares
        return build_torch_optimizer(
            self.name, matrices, others, self.recipe.optimizer, own, scaled=formats.scales_moments, products=products
        )

    @torch.no_grad()
    def norm(self) -> Tensor:
        """The norm of all gradients together, each element counted once: of what several processes have each counts its share."""
        among = tuple(axis for axis in self.norm_axes if axis != "pp")  # stages have parameters of their own
        total = sum(
            sum_of_squares(group.gradient_shard[rows]) / group.copies(axes, among)
            for group in self.groups
            for axes, rows in group.local_runs()
        )
        assert isinstance(total, Tensor)
        # exchanged in the format of the realised list
        control = torch.promote_types(self.groups[0].gradient_shard.dtype, torch.float32)
        return self.exchange.sum_and_wait(total.to(control), self.norm_axes).sqrt()

    @torch.no_grad()
    def step(
        self, learning_rate: float, norm: Tensor, *, loss_scale: float = 1.0, is_update: bool = True
    ) -> list[PendingWork]:
        """Update every group; the new weights are then on their way to the other processes.

        Gradients are those of the loss times `loss_scale`, `norm` is that of the loss alone. Without `is_update` weights stay.
        """
        scale = self._scale(norm, loss_scale)
        pending: list[PendingWork] = []
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
        clipped = (limit / (norm + NORM_EPSILON)).clamp(max=1.0)
        return clipped if unscaled is None else clipped * unscaled

    @staticmethod
    def _gradients(group: FlatParameterGroup, scale: Tensor | float | None) -> Tensor:
        """This process's part of a group's gradients [shard] as the update takes them."""
        fine = at_least_fp32(group.state.dtype)
        gradients = group.gradient_shard.to(fine) if group.update is None else group.update.copy_(group.gradient_shard)
        return gradients if scale is None else gradients.mul_(scale)

    @staticmethod
    def _update(
        gradients: Tensor, slots: Sequence[OptimizerSlot], optimizer: TorchOptimizer, learning_rate: float
    ) -> None:
        for settings in optimizer.param_groups:
            settings["lr"] = learning_rate
        own = {one.weight: gradients[one.interval.start : one.interval.start + one.interval.size] for one in slots}
        step_optimizer(optimizer, own)

    def checkpoint_tensors(self) -> Iterator[tuple[str, ParameterShard, Tensor]]:
        """The moments by name, this process's part of each parameter's; of blocks their codes, and their scales."""
        for one in chain.from_iterable(self.by_element):
            for slot, moment in product(one.slots, one.moments):
                yield from moment_tensors(moment, slot.interval, one.optimizer.state[slot.weight][moment])
        for update in self.means.values():
            for weight in update.weights.values():
                yield from weight.checkpoint_tensors()
        for whole in self.whole:
            yield from whole.checkpoint_tensors() if whole is not None else ()

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


def _is_matrix(slot: OptimizerSlot) -> bool:
    return slot.interval.member.parameter.is_matrix


SCALES_SUFFIX = "_scales"  # what the name of a moment is followed by, or `PARTIAL_SCALES` with the parts of each dim


def moment_tensors(
    name: str, interval: ParameterShard, moment: MomentTensor
) -> Iterator[tuple[str, ParameterShard, Tensor]]:
    """The tensors of a moment, each with its name and the part of the parameter's that it is."""
    if isinstance(moment, BlockwiseMoment):
        yield name, interval, moment.codes
        suffix, scales = scales_shard(interval, moment.block)
        yield name + suffix, scales, moment.scales
    elif isinstance(moment, ScaledTensor):
        yield name, interval, moment.elements
        suffix, scales = _per_part_scales(interval, None)
        yield name + suffix, scales, moment.scale
    else:
        yield name, interval, moment


def scales_shard(interval: ParameterShard, block: int) -> tuple[str, ParameterShard]:
    """Which of all blocks' scales those of an interval are, and what the name of the moment is followed by in theirs."""
    member, window = interval.member, interval.window
    split = [dim for dim, (own, whole) in enumerate(zip(member.shape, member.global_shape, strict=True)) if own < whole]
    inner = split[-1] if split else 0  # from here on blocks are counted; dims before it are as the parameter has them
    row = math.prod(member.global_shape[inner + 1 :])
    cuts = [member.shape[inner] * row] if split else []
    cuts += [member.global_shape[inner] * row] if math.prod(member.global_shape[:inner]) > 1 else []
    if any(length % block for length in cuts):
        return _per_part_scales(interval, block)

    def counted(sizes: Shape) -> Shape:
        return *sizes[:inner], -(-sizes[inner] * row // block)

    own = Box(counted(window.offsets), counted(window.lengths))
    return SCALES_SUFFIX, _scales_of_shard(interval, counted(member.global_shape), counted(member.shape), own, block)


def _per_part_scales(interval: ParameterShard, block: int | None) -> tuple[str, ParameterShard]:
    """Of a parameter whose parts have blocks of their own: those of one part behind those of another. None: a part is one."""
    member, own_size = interval.member, interval.window.volume
    assert block is not None or interval.size == own_size, "what has one scale is not split (planning.runnable)"
    counts = [-(-whole // own) for own, whole in zip(member.shape, member.global_shape, strict=True)]
    before, total = 0, 0
    for places in product(*map(range, counts)):
        starts = tuple(place * own for place, own in zip(places, member.shape, strict=True))
        volume = math.prod(
            min(own, whole - start) for own, whole, start in zip(member.shape, member.global_shape, starts, strict=True)
        )
        before = total if starts == interval.window.offsets else before
        total += -(-volume // (block or volume))
    blocks = -(-own_size // (block or own_size))
    own = Box((before,), (blocks,))
    return PARTIAL_SCALES + "x".join(map(str, counts)), _scales_of_shard(
        interval, (total,), (blocks,), own, block or own_size
    )


def _scales_of_shard(interval: ParameterShard, whole: Shape, shape: Shape, window: Box, block: int) -> ParameterShard:
    member = GroupMember(interval.member.parameter, whole, shape, 0)
    return ParameterShard(member, interval.offset // block, 0, -(-interval.size // block), window)
