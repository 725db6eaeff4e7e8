"""The optimizer's step on this rank's part of each group, with gradient clipping; and moments as checkpoints keep them.

A checkpoint keeps quantized moments as codes and scales. A scale block is 256 consecutive elements of what a rank uses
of a parameter, and flat arrays are cut between blocks, so neither ZeRO nor pipelines change the blocks. Tensor
parallelism does not either, if its parts of the rows are whole blocks: scales then have the place of their blocks in
the parameter, and any layout reads them. Where it does cut blocks, the scales belong to one degree, and their name has
the number of parts. The same holds for a moment with one scale for what a rank uses of a parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shardwise.model import DEFAULT_OPTIMIZER, Role, get_optimizer
from shardwise.run.checkpoints.reader import PARTIAL_SCALES
from shardwise.run.kernels.device_dispatch import at_least_fp32, has_triton
from shardwise.run.kernels.optimizers import (
    BlockwiseMoment,
    MomentDtypes,
    MomentTensor,
    ScaledTensor,
    TorchOptimizer,
    TritonAdamW,
    WeightState,
    build_torch_optimizer,
    step_optimizer,
)
from shardwise.run.parallel.factored_update import FactoredUpdate, FactoredWeight
from shardwise.run.parallel.flat_parameters import FlatParameterGroup, ParameterShard
from shardwise.run.parallel.mesh_collectives import MeshCollectives, PendingWork
from shardwise.run.parallel.whole_matrix_update import WholeMatrixUpdate
from shardwise.run.recipe import TrainingRecipe
from shardwise.sharding import Axes
from shardwise.step import GroupMember, UnitCollective
from shardwise.values import Box, Shape

NORM_EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_ adds it
NORM_BLOCK = 2**8  # elements summed in float32, a few in each vector lane; block sums are added in float64


@dataclass(frozen=True, slots=True)
class OptimizerSlot:
    """A parameter's part on this rank, as the optimizer has it."""

    interval: ParameterShard
    weight: nn.Parameter


class ElementwiseUpdate(NamedTuple):
    """Parts of parameters of a group that one optimizer updates element by element."""

    slots: Sequence[OptimizerSlot]
    optimizer: TorchOptimizer
    moments: Sequence[str]


class ShardedOptimizer:
    """The optimizers of a model's groups, one for each group, so that weights can be sent as soon as they are updated.

    Clips as torch.nn.utils.clip_grad_norm_ does.
    """

    def __init__(
        self, groups: Sequence[FlatParameterGroup], exchange: MeshCollectives, recipe: TrainingRecipe, norm_axes: Axes,
        optimizer: str = DEFAULT_OPTIMIZER, traffic: Callable[[str], Iterable[UnitCollective]] = lambda unit: (),
    ) -> None:  # fmt: skip
        """`traffic`: the collectives of a kind of unit, of which the update issues those of means."""
        self.groups, self.exchange, self.recipe = groups, exchange, recipe
        self.norm_axes, self.name = norm_axes, optimizer
        self.factored_updates = self._factored_updates(traffic) if get_optimizer(optimizer).reduces_means else {}
        self.matrix_updates = [self._matrix_update(group) for group in groups]
        self.by_element = [
            list(self._by_element(group, list(self._elementwise(group, matrix_update))))
            for group, matrix_update in zip(groups, self.matrix_updates, strict=True)
        ]

    def _factored_updates(self, traffic: Callable[[str], Iterable[UnitCollective]]) -> dict[str, FactoredUpdate]:
        """Return the updates of units' weights by an optimizer that takes means of them, by the unit's path."""
        optimizer = get_optimizer(self.name)
        fields = optimizer.resolve_hyperparameters(self.recipe.optimizer)
        weights: dict[str, list[FactoredWeight]] = {}
        for group in self.groups:
            for member in group.group.members:
                weight_optimizer = optimizer.for_weight(is_matrix=member.parameter.matrix is not None)
                hyperparameters = optimizer.hyperparameters_for(fields, matrix=member.parameter.is_matrix)
                weight = FactoredWeight(group, member, weight_optimizer, hyperparameters)
                weights.setdefault(group.group.path, []).append(weight)
        updates = {}
        for path, unit_weights in weights.items():
            collectives = traffic(unit_weights[0].member.parameter.unit)
            means = [collective for collective in collectives if collective.role is Role.MEAN]
            updates[path] = FactoredUpdate(unit_weights, means, self.exchange)
        return updates

    def _elementwise(
        self, group: FlatParameterGroup, matrix_update: WholeMatrixUpdate | None
    ) -> Iterator[ParameterShard]:
        """Yield the parameters of a group that are updated element by element."""
        for shard in group.intervals() if group.group.path not in self.factored_updates else ():
            if matrix_update is None or shard not in matrix_update.moments:
                yield shard

    def _matrix_update(self, group: FlatParameterGroup) -> WholeMatrixUpdate | None:
        """Return the update of matrices that the optimizer takes whole; None: the group has no such matrix."""
        optimizer = get_optimizer(self.name)
        if not optimizer.updates_whole_matrices or not any(member.parameter.matrix for member in group.group.members):
            return None
        shards = [shard for shard in group.intervals() if shard.member.parameter.matrix]
        fields = optimizer.hyperparameters_for(optimizer.resolve_hyperparameters(self.recipe.optimizer), matrix=True)
        return WholeMatrixUpdate(group, shards, self.exchange, optimizer, fields)

    def _by_element(
        self, group: FlatParameterGroup, all_shards: Sequence[ParameterShard]
    ) -> Iterator[ElementwiseUpdate]:
        """Yield the elementwise updates of a group: matrices apart, where another optimizer updates all else."""
        optimizer = get_optimizer(self.name)
        for products in (False,) if optimizer.fallback is None else (True, False):
            slots = []
            for shard in all_shards:
                if optimizer.fallback is None or (shard.member.parameter.matrix is not None) is products:
                    slots.append(OptimizerSlot(shard, nn.Parameter(group.state[shard.rows], requires_grad=True)))
            if slots:
                moments = tuple(optimizer.for_weight(is_matrix=products).moments)
                yield ElementwiseUpdate(slots, self._optimizer(slots, products=products), moments)

    def _optimizer(self, slots: Sequence[OptimizerSlot], *, products: bool) -> TorchOptimizer:
        matrices, non_matrices = (
            [slot.weight for slot in slots if slot.interval.member.parameter.is_matrix is matrix]
            for matrix in (True, False)
        )
        formats = self.groups[0].formats
        dtypes = MomentDtypes(formats.moments, formats.squares, formats.scales_moments)
        return build_torch_optimizer(
            self.name, matrices, non_matrices, self.recipe.optimizer, dtypes, products=products
        )

    @torch.no_grad()
    def norm(self) -> Tensor:
        """Return the norm of all gradients; copies of an element on several ranks count once together."""
        reduced_axes = tuple(axis for axis in self.norm_axes if axis != "pp")  # stages have parameters of their own
        # a rank may have nothing but padding of every group
        total = torch.zeros((), dtype=torch.float64, device=self.groups[0].gradient_shard.device)
        for group in self.groups:
            for axes, rows in group.local_runs():
                total = total + sum_of_squares(group.gradient_shard[rows]) / group.copies(axes, reduced_axes)
        # in the control dtype of the instruction list (`RankProgram.control_dtype`)
        control = torch.promote_types(self.groups[0].gradient_shard.dtype, torch.float32)
        return self.exchange.sum_and_wait(total.to(control), self.norm_axes).sqrt()

    @torch.no_grad()
    def step(
        self, learning_rate: float, norm: Tensor, *, loss_scale: float = 1.0, allows: Tensor | None = None
    ) -> list[PendingWork]:
        """Update every group, and start to send the new weights to the other ranks.

        Gradients are those of the loss times `loss_scale`, `norm` is that of the loss alone. Where the scalar `allows`
        is false, weights, moments and gradients stay; it is on their device, and the host does not read it.
        """
        scale = self._scale(norm, loss_scale, allows)
        pending: list[PendingWork] = []
        for path, update in self.factored_updates.items():
            unit_groups = [group for group in self.groups if group.group.path == path]
            update.step({group: self._gradients(group, scale) for group in unit_groups}, learning_rate, allows)
        for group, elementwise_updates, matrix_update in zip(
            self.groups, self.by_element, self.matrix_updates, strict=True
        ):
            takes_stored = self._takes_stored_gradients(group, elementwise_updates, matrix_update)
            if takes_stored:
                control = control_numbers(norm, scale, allows)
                for elementwise in elementwise_updates:
                    self._update_from_stored_gradients(group, elementwise, learning_rate, control)
            elif elementwise_updates or matrix_update is not None:
                gradients = self._gradients(group, scale)
                for elementwise in elementwise_updates:
                    self._update(gradients, elementwise, learning_rate, allows)
                if matrix_update is not None:
                    matrix_update.step(gradients, learning_rate, allows)
            if not (takes_stored and group.has_plain_copy):
                group.publish()
            if group.sync.step_gather:
                part = group.shard.clone() if group.shard.device.type == "cpu" else group.shard
                pending.append(
                    self.exchange.all_gather(group.weights, part, group.sync.step_gather, group.weights_carried)
                )
        return pending

    def _scale(self, norm: Tensor, loss_scale: float, allows: Tensor | None) -> Tensor | float | None:
        """Return the factor of the gradients; None: 1."""
        limit = self.recipe.clip_norm
        if limit is None:
            scale: Tensor | float | None = None if loss_scale == 1.0 else 1.0 / loss_scale
        else:
            clipped = (limit / (norm + NORM_EPSILON)).clamp(max=1.0)
            scale = clipped if loss_scale == 1.0 else clipped * (1.0 / loss_scale)
        # Gradients of a step that is left out stay as they are, so that the tensor that spoils them can be named.
        return scale if scale is None or allows is None else torch.where(allows, scale, 1.0)

    @staticmethod
    def _gradients(group: FlatParameterGroup, scale: Tensor | float | None) -> Tensor:
        """Return this rank's part of a group's gradients [shard] in the dtype of the update."""
        dtype = at_least_fp32(group.state.dtype)
        gradients = group.gradient_shard.to(dtype) if group.update is None else group.update.copy_(group.gradient_shard)
        return gradients if scale is None else gradients.mul_(scale)

    @staticmethod
    def _takes_stored_gradients(
        group: FlatParameterGroup, updates: Sequence[ElementwiseUpdate], matrix_update: WholeMatrixUpdate | None
    ) -> bool:
        """Return whether kernels take all of a group's gradients as they are stored."""
        by_triton = all(isinstance(elementwise.optimizer, TritonAdamW) for elementwise in updates)
        return by_triton and bool(updates) and matrix_update is None and has_triton(group.gradient_shard)

    @staticmethod
    def _update_from_stored_gradients(
        group: FlatParameterGroup, elementwise: ElementwiseUpdate, learning_rate: float, control: Tensor
    ) -> None:
        """Update weights from the stored gradients, and what the model uses of a master copy with them."""
        optimizer = elementwise.optimizer
        assert isinstance(optimizer, TritonAdamW)
        for settings in optimizer.param_groups:
            settings["lr"] = learning_rate
        rows = {slot.weight: slot.interval.rows for slot in elementwise.slots}
        optimizer.control = control
        optimizer.gradients = {weight: group.gradient_shard[part] for weight, part in rows.items()}
        if group.has_plain_copy:
            optimizer.copies = {weight: group.shard[part] for weight, part in rows.items()}
        optimizer.step()
        optimizer.gradients, optimizer.copies = {}, {}

    @staticmethod
    def _update(gradients: Tensor, elementwise: ElementwiseUpdate, learning_rate: float, allows: Tensor | None) -> None:
        for settings in elementwise.optimizer.param_groups:
            settings["lr"] = learning_rate
        parts = {slot.weight: gradients[slot.interval.rows] for slot in elementwise.slots}
        step_optimizer(elementwise.optimizer, parts, allows)

    def checkpoint_tensors(self) -> Iterator[tuple[str, ParameterShard, Tensor]]:
        """Yield the moments by name, with this rank's part of each parameter; codes and scales of quantized ones."""
        for elementwise in chain.from_iterable(self.by_element):
            for slot, moment in product(elementwise.slots, elementwise.moments):
                yield from moment_tensors(moment, slot.interval, elementwise.optimizer.state[slot.weight][moment])
        for update in self.factored_updates.values():
            for weight in update.weights.values():
                yield from weight.checkpoint_tensors()
        for matrix_update in self.matrix_updates:
            yield from matrix_update.checkpoint_tensors() if matrix_update is not None else ()

    def step_counts(self) -> Iterator[Tensor]:
        """Yield the number of steps of each weight's moments, where it is on the device."""
        for state in self._elementwise_states():
            if isinstance(state["step"], Tensor):
                yield state["step"]

    def set_steps(self, steps: int) -> None:
        """Set the number of steps of the moments."""
        for state in self._elementwise_states():
            if isinstance(state["step"], Tensor):
                state["step"].fill_(float(steps))
            else:
                state["step"] = steps
        for update in self._updates_of_matrices():
            update.steps = steps

    def undo_step_count(self) -> None:
        """Take the last step, which was not allowed, off the counts on the host; those on the device have not counted it."""
        for state in self._elementwise_states():
            if not isinstance(state["step"], Tensor):
                state["step"] -= 1
        for update in self._updates_of_matrices():
            update.steps -= 1

    def _elementwise_states(self) -> Iterator[WeightState]:
        for elementwise in chain.from_iterable(self.by_element):
            yield from (elementwise.optimizer.state[slot.weight] for slot in elementwise.slots)

    def _updates_of_matrices(self) -> Iterator[FactoredUpdate | WholeMatrixUpdate]:
        yield from self.factored_updates.values()
        yield from (update for update in self.matrix_updates if update is not None)


def control_numbers(norm: Tensor, scale: Tensor | float | None, allows: Tensor | None) -> Tensor:
    """Return the factor of the gradients, and 1.0 or 0.0 for an update or none, [2] in float32 on the norm's device."""
    factor = torch.ones_like(norm) * (1.0 if scale is None else scale)
    return torch.stack((factor, torch.ones_like(norm) if allows is None else allows.to(norm.dtype))).float()


def sum_of_squares(tensor: Tensor) -> Tensor:
    """Return the sum of the squares of `tensor` [n], a scalar in float64, whatever the dtype.

    In blocks because PyTorch's norms of float32 accumulate in float32: over 10^8 equal elements the norm on a CPU is
    5.6% off. All in float64 would take five times as long.

    >>> sum_of_squares(torch.full((4,), 2.0)).item()
    16.0
    """
    num_in_blocks = len(tensor) // NORM_BLOCK * NORM_BLOCK
    block_dtype = torch.promote_types(tensor.dtype, torch.float32)
    norms = torch.linalg.vector_norm(tensor[:num_in_blocks].view(-1, NORM_BLOCK), dim=1, dtype=block_dtype)
    rest = torch.linalg.vector_norm(tensor[num_in_blocks:], dtype=torch.float64)
    total: Tensor = norms.to(torch.float64).square().sum() + rest.square()
    return total


SCALES_SUFFIX = "_scales"  # follows the name of a moment; or `PARTIAL_SCALES` with the number of parts of each dim


def moment_tensors(
    name: str, interval: ParameterShard, moment: MomentTensor
) -> Iterator[tuple[str, ParameterShard, Tensor]]:
    """Yield the tensors of a moment, each with its name and the part of the parameter's that it is."""
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
    """Return the name suffix of a moment's scales, and the part of all scales that those of a parameter shard are."""
    member, window = interval.member, interval.window
    sizes = zip(member.shape, member.global_shape, strict=True)
    split = [dim for dim, (local_size, full_size) in enumerate(sizes) if local_size < full_size]
    inner = split[-1] if split else 0  # blocks are counted from this dim on; earlier dims keep their coordinates
    row = math.prod(member.global_shape[inner + 1 :])
    cuts = [member.shape[inner] * row] if split else []
    cuts += [member.global_shape[inner] * row] if math.prod(member.global_shape[:inner]) > 1 else []
    if any(length % block for length in cuts):
        return _per_part_scales(interval, block)

    def counted(sizes: Shape) -> Shape:
        return *sizes[:inner], -(-sizes[inner] * row // block)

    scale_window = Box(counted(window.offsets), counted(window.lengths))
    shapes = counted(member.global_shape), counted(member.shape)
    return SCALES_SUFFIX, _scales_of_shard(interval, *shapes, scale_window, block)


def _per_part_scales(interval: ParameterShard, block: int | None) -> tuple[str, ParameterShard]:
    """Return name suffix and shard of scales of a parameter whose parts have blocks of their own (None: one)."""
    member, local_size = interval.member, interval.window.volume
    assert block is not None or interval.size == local_size, "what has one scale is not split (layout.rules.engine)"
    sizes = list(zip(member.shape, member.global_shape, strict=True))
    counts = [-(-full_size // part_size) for part_size, full_size in sizes]
    before, total = 0, 0
    for part_index in product(*map(range, counts)):
        starts = tuple(index * part_size for index, part_size in zip(part_index, member.shape, strict=True))
        volume = math.prod(min(part, full - start) for (part, full), start in zip(sizes, starts, strict=True))
        before = total if starts == interval.window.offsets else before
        total += -(-volume // (block or volume))
    blocks = -(-local_size // (block or local_size))
    window = Box((before,), (blocks,))
    return PARTIAL_SCALES + "x".join(map(str, counts)), _scales_of_shard(
        interval, (total,), (blocks,), window, block or local_size
    )


def _scales_of_shard(
    interval: ParameterShard, global_shape: Shape, shape: Shape, window: Box, block: int
) -> ParameterShard:
    member = GroupMember(interval.member.parameter, global_shape, shape, 0)
    return ParameterShard(member, interval.offset // block, 0, -(-interval.size // block), window)
