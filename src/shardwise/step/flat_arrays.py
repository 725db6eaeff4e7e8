"""Flat arrays: which weights of a unit move together, the padded length of their array, and the collectives on it.

Each device along the axes that split a flat array has one even, padded part of it. Differs from the derivation, which splits
every weight along a dim: bytes are the same but for the padding. Sizes are numbers or arrays; the collectives are read off
the derived steps (`derive`). `parameters.group_parameters` fills the same arrays with the parameters of a model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import NamedTuple

from shardwise.derive import CollectiveStep, ShardedUnit, weight_use_spec
from shardwise.layout import ShardingScheme
from shardwise.model import Role, get_optimizer, whole_matrix_inputs
from shardwise.sharding import Axes, CollectiveKind
from shardwise.values import (
    Monomial,
    Polynomial,
    ShardingError,
    SymbolValues,
    Value,
    ceil_div,
    constant,
    maximum,
    sum_polynomials,
    where,
)

# Parameters and parts begin at a multiple of so many elements, 16 bytes in the narrowest format that weights rest in (bf16).
# Source: CUTLASS, functionality.md: operands of tensor core kernels are aligned to 128 bits.
ALIGNMENT = 8


def shard_alignment(optimizer: str) -> int:
    """Return the multiple, in elements, at which parameters and shards begin, for an optimizer by name.

    Quantized moments share a scale per block, and a block belongs to one parameter on one device.

    >>> shard_alignment("adamw"), shard_alignment("adamw_8bit")
    (8, 256)
    """
    return math.lcm(ALIGNMENT, get_optimizer(optimizer).block)


def align_up(elements: Value, alignment: int = ALIGNMENT) -> Value:
    """Return the next offset at which a parameter or a shard may begin.

    >>> align_up(17)
    24
    """
    return ceil_div(elements, alignment) * alignment


def shard_elements(elements: Value, num_shards: Value, alignment: int = ALIGNMENT) -> Value:
    """Return the elements of each device's part of a flat array, padding included.

    >>> shard_elements(560, 3)
    192
    """
    return align_up(ceil_div(elements, num_shards), alignment)


def starts_array(sizes: Iterable[Value], max_elements: float | None) -> Iterator[Value]:
    """Yield for each weight whether it begins a new flat array.

    The first weight does, and each that does not fit into the array before it; a weight without elements does not. With
    `max_elements` None all fit into one array.

    Source: Li et al. 2020, PyTorch Distributed, section 3.2.3.

    >>> list(starts_array([6, 0, 3, 2, 9], max_elements=8))
    [True, False, True, False, True]
    """
    # `sizes` must come in the order of `parameters.group_parameters`, or priced and issued bytes differ
    filled: Value = 0
    for size in sizes:
        begins = (filled == 0) if max_elements is None else (filled == 0) | (filled + size > max_elements)
        begins = begins & (size > 0)
        yield begins
        filled = where(begins, size, filled + size)


def largest_shard_amount(
    sizes: Sequence[Value], amounts: Sequence[Value], num_shards: Value, alignment: int = ALIGNMENT
) -> Value:
    """Return the largest sum of `amounts` on any device, when each weight's amount counts in full on every device with
    a part of it.

    It suffices to look at the devices that hold a weight's last element: no other device with a part of that weight has
    more weights after it.

    >>> largest_shard_amount([64, 64, 128], [1.0, 2.0, 4.0], num_shards=2)
    4.0
    >>> largest_shard_amount([64, 64, 128], [1.0, 2.0, 4.0], num_shards=3)
    6.0
    """
    starts: list[Value] = []
    stops: list[Value] = []
    for size in sizes:
        starts.append(align_up(stops[-1], alignment) if stops else 0)
        stops.append(where(size > 0, starts[-1] + size, stops[-1] if stops else 0))
    shard = maximum(shard_elements(stops[-1], num_shards, alignment), 1)
    largest: Value = 0.0
    for end in stops:
        device = (end - 1) // shard
        begin, total = device * shard, 0.0
        for start, stop, size, amount in zip(starts, stops, sizes, amounts, strict=True):
            total = total + where((start < begin + shard) & (stop > begin) & (size > 0), amount, 0.0)
        largest = maximum(largest, total)
    return largest


class ArrayExtent(NamedTuple):
    """Number of flat arrays, and their elements in all, padding included."""

    count: Value
    elements: Value


class FlatWeight(NamedTuple):
    """Elements of a weight where it is used, and when it belongs to an array.

    It counts only where the devices along `single_axes` are one, and those along `multiple_axes` more than one: weights
    whose collectives differ only in axes of one device share arrays (`can_share_arrays`).
    """

    elements: Polynomial
    single_axes: Axes = ()
    multiple_axes: Axes = ()

    def evaluate(self, values: SymbolValues) -> Value:
        size = self.elements.evaluate(values)
        if self.single_axes:
            size = where(values.group_degree(self.single_axes) == 1, size, 0)
        return where(values.group_degree(self.multiple_axes) > 1, size, 0) if self.multiple_axes else size


@dataclass(frozen=True, slots=True)
class FlatArrays:
    """Weights that move as flat arrays, in the order in which they fill them.

    `shard_axes`: the axes that split an array. `moves_shards`: the collective moves each device's part, not the whole
    array. `alignment`: see `shard_alignment`.
    """

    weights: tuple[FlatWeight, ...]
    shard_axes: Axes
    bucketed: bool
    moves_shards: bool = False
    alignment: int = ALIGNMENT

    @property
    def elements(self) -> Polynomial:
        """Elements without padding that move, if every group of axes has more than one device."""
        total = sum_polynomials(weight.elements for weight in self.weights if not weight.single_axes)
        return total * (shard_fraction(self.shard_axes) if self.moves_shards else constant(1.0))

    def evaluate(self, values: SymbolValues, max_elements: float) -> ArrayExtent:
        """Return count and elements of the arrays at these sizes and degrees; a bucket holds at most `max_elements`."""
        return values.compute_once((self,), partial(self._extent, values, max_elements), key=max_elements)

    def _extent(self, values: SymbolValues, max_elements: float) -> ArrayExtent:
        sizes = [weight.evaluate(values) for weight in self.weights]
        shards = values.group_degree(self.shard_axes)
        count, elements = array_extent(sizes, shards, max_elements if self.bucketed else None, self.alignment)
        return ArrayExtent(count, elements / shards if self.moves_shards else elements)

    def largest_and_total(self, amounts: Sequence[Polynomial], values: SymbolValues) -> tuple[Value, Value]:
        """Return the largest amount on any device (`largest_shard_amount`), and the sum of all, given each weight's amount."""
        sizes = [weight.evaluate(values) for weight in self.weights]
        pairs = zip(sizes, amounts, strict=True)
        used = [where(size > 0, amount.evaluate(values), 0.0) for size, amount in pairs]
        largest = largest_shard_amount(sizes, used, values.group_degree(self.shard_axes), self.alignment)
        return largest, sum(used, start=0.0)

    def array_sizes(self, values: SymbolValues, max_elements: float) -> list[int]:
        """Return the elements of each array, padding included; for numbers only."""
        sizes = [int(weight.evaluate(values)) for weight in self.weights]
        shards = int(values.group_degree(self.shard_axes))
        filled: list[list[int]] = []
        for size, begins in zip(sizes, starts_array(sizes, max_elements if self.bucketed else None), strict=True):
            if begins:
                filled.append([])
            if size:
                filled[-1].append(size)
        padded = [int(array_extent(array_weights, shards, None, self.alignment).elements) for array_weights in filled]
        return [elements // shards for elements in padded] if self.moves_shards else padded


def shard_fraction(axes: Axes) -> Polynomial:
    """Return 1 / (devices along `axes`) as a polynomial."""
    return Polynomial((Monomial(1.0, tuple((axis, -1) for axis in sorted(axes))),))


def array_extent(
    sizes: Sequence[Value], num_shards: Value, max_elements: float | None, alignment: int = ALIGNMENT
) -> ArrayExtent:
    """Return count and padded elements of the flat arrays of weights of these sizes.

    >>> array_extent([12, 96], num_shards=2, max_elements=None)
    ArrayExtent(count=1, elements=112)
    """
    count: Value = 0
    elements: Value = 0
    stop: Value = 0
    for size, begins in zip(sizes, starts_array(sizes, max_elements), strict=True):
        elements = elements + where(begins, shard_elements(stop, num_shards, alignment) * num_shards, 0)
        count = count + where(begins, 1, 0)
        stop = where(begins, size, align_up(stop, alignment) + size)
    return ArrayExtent(count, elements + shard_elements(stop, num_shards, alignment) * num_shards)


WEIGHT_ROLES = (Role.WEIGHT, Role.WEIGHT_GRADIENT)
# Matrices over the vocabulary fill arrays of their own: where a model ties them, one array serves both ends.
VOCABULARY = ("embedding", "head")


class WeightMove(NamedTuple):
    """A collective on a weight or its gradient, and its pass; what recomputation needs is gathered with the backward pass."""

    phase: str
    kind: CollectiveKind
    axes: Axes
    of_direction: bool = False  # it moves what the optimizer makes of the gradient


class WeightSync(NamedTuple):
    """Axes of the collectives that keep a weight and its gradient in step, by purpose.

    `gather`: an AllGather from where the weight rests to where it is used, at each use (ZeRO-3). `scatter`: a ReduceScatter
    of its gradient in each micro-batch (ZeRO-2, -3); `step_scatter`: once per step (ZeRO-1). `reduce`: an AllReduce per step.
    `step_gather`: an AllGather of the updated weight per step (ZeRO-1, -2). `whole_gather`: an AllGather per step of what an
    optimizer of whole matrices computes from the gradient (from ZeRO-1 on). A frozen weight has at most a `gather`.
    """

    gather: Axes = ()
    scatter: Axes = ()
    step_scatter: Axes = ()
    reduce: Axes = ()
    step_gather: Axes = ()
    whole_gather: Axes = ()

    @property
    def shard(self) -> Axes:
        """Axes over which the optimizer's state, or a frozen weight, is split."""
        return self.scatter or self.step_scatter or self.gather

    @property
    def summed(self) -> Axes:
        """Axes over which the gradient is a partial sum after a backward pass."""
        return (self.scatter or self.step_scatter) + self.reduce

    def within(self, replicas: Axes) -> Axes:
        """Return the summed axes along which ranks hold parts of the same sequences' gradient."""
        return tuple(axis for axis in self.summed if axis not in replicas)


# What a collective on a weight or its gradient is for: by whether it runs once per step, its kind, and whether it moves what the
# optimizer makes of a gradient.
PURPOSES: Mapping[tuple[bool, CollectiveKind, bool], str] = {
    (False, CollectiveKind.ALL_GATHER, False): "gather", (False, CollectiveKind.REDUCE_SCATTER, False): "scatter",
    (True, CollectiveKind.REDUCE_SCATTER, False): "step_scatter", (True, CollectiveKind.ALL_REDUCE, False): "reduce",
    (True, CollectiveKind.ALL_GATHER, False): "step_gather", (True, CollectiveKind.ALL_GATHER, True): "whole_gather",
}  # fmt: skip


def classify_moves(moves: Iterable[WeightMove]) -> WeightSync:
    """Sort the collectives of a weight by purpose.

    Raises `ShardingError` for a collective that flat arrays do not support, and for two of one purpose over different axes.
    """
    axes_by_purpose: dict[str, Axes] = {}
    for move in moves:
        purpose = PURPOSES.get((move.phase == "update", move.kind, move.of_direction))
        if purpose is None or axes_by_purpose.setdefault(purpose, move.axes) != move.axes:
            raise ShardingError(
                f"weights: found {move.kind} over {', '.join(move.axes)} in the {move.phase} pass; at most one gather, scatter "
                "and reduction of a flat array is required"
            )
    return WeightSync(**axes_by_purpose)


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """Weights of a unit that are gathered and reduced alike, in the order in which their gradients are ready.

    `array_weights`: these, and those that join them where axes have one device, as the arrays have them.
    """

    weights: tuple[str, ...]
    array_weights: tuple[str, ...]
    moves: tuple[WeightMove, ...]
    sync: WeightSync
    arrays: FlatArrays
    trained: bool
    derived: Mapping[tuple[str, WeightMove], CollectiveStep] = field(compare=False, repr=False, hash=False)

    def derived_as(self, move: WeightMove) -> tuple[CollectiveStep, ...]:
        """Return the derived collectives that a collective on the group's arrays stands for."""
        return tuple(self.derived[name, move] for name in self.weights if (name, move) in self.derived)

    @property
    def passes(self) -> tuple[str, ...]:
        """Passes ("forward", "backward") for which the weights are gathered: the whole array, where any weight needs it."""
        gathers = (move for move in self.moves if move.kind is CollectiveKind.ALL_GATHER)
        return tuple(move.phase for move in gathers if move.phase != "update")


def is_flat_move(step: CollectiveStep, scheme: ShardingScheme) -> bool:
    """Return True if a derived step moves a part of a flat array: weights, gradients, and of update directions what
    ZeRO splits.

    What tensor parallelism splits of update directions is gathered matrix by matrix.
    """
    if step.tensor.role is Role.DIRECTION:
        return set(step.collective.axes) <= set(scheme.zero_axes)
    return step.tensor.role in WEIGHT_ROLES


def find_weight_moves(unit: ShardedUnit) -> dict[tuple[str, WeightMove], CollectiveStep]:
    """Return every derived collective on each weight of a unit and on its gradient, borrowed weights included."""
    owners = {name: name for name in unit.forward.program.weights} | {f"{name}'": name for name in unit.gradients}
    owners |= {gradient: name for name, gradient in unit.gradients.items()}
    owners |= whole_matrix_inputs(unit.update.program)
    moves: dict[tuple[str, WeightMove], CollectiveStep] = {}
    for phase, steps in unit.phases().items():
        pass_name = "backward" if phase == "recompute" else phase
        for step in (step for step in steps if isinstance(step, CollectiveStep) and is_flat_move(step, unit.scheme)):
            kind, axes = step.collective.kind, step.collective.axes
            if kind is not CollectiveKind.SLICE:
                move = WeightMove(pass_name, kind, axes, of_direction=step.tensor.role is Role.DIRECTION)
                moves.setdefault((owners[step.tensor.name], move), step)
    return moves


def weight_groups(unit: ShardedUnit, single_device_axes: Set[str] = frozenset()) -> tuple[WeightGroup, ...]:
    """Return the weight groups of a unit.

    Groups that differ only in axes of one device move as one (`can_share_arrays`): here for axes among
    `single_device_axes`, else when the arrays are evaluated.
    """
    derived = find_weight_moves(unit)
    names_by_array: dict[tuple[bool, str], list[str]] = {}
    for name in reversed(unit.forward.program.weights):
        names_by_array.setdefault((name in unit.gradients, array_key(name)), []).append(name)
    groups = (_split_groups(unit, names, derived, single_device_axes) for names in names_by_array.values())
    return tuple(chain.from_iterable(groups))


def _split_groups(
    unit: ShardedUnit, names: Sequence[str], derived: Mapping[tuple[str, WeightMove], CollectiveStep],
    single_device_axes: Set[str],
) -> Iterator[WeightGroup]:  # fmt: skip
    """Yield the first weight's group, which others may join, and then the other groups; `names` are in gradient order."""
    program, scheme = unit.forward.program, unit.scheme
    moves = {name: [move for weight, move in derived if weight == name] for name in names}
    syncs = {name: classify_moves(moves[name]) for name in names}
    base = syncs[names[0]]
    differing = {name: differing_axes(syncs[name], base) for name in names}
    extra_axes = {name: tuple(a for a in differing[name] if a not in single_device_axes) for name in names}
    syncs = {name: syncs[name] if extra_axes[name] else base for name in names}
    for sync in dict.fromkeys(syncs.values()):
        members = tuple(name for name in names if syncs[name] == sync)
        array_names = tuple(names) if sync == base else members
        sizes = (weight_use_spec(scheme, program.dims(name)).local_elements() for name in array_names)
        conditions = ((extra_axes[name], ()) if sync == base else ((), extra_axes[name]) for name in array_names)
        weights = tuple(FlatWeight(size, *axes) for size, axes in zip(sizes, conditions, strict=True))
        group_moves = tuple(dict.fromkeys(move for name in members for move in moves[name] if move.axes in sync))
        arrays = FlatArrays(weights, sync.shard, is_bucketed(scheme, sync), alignment=shard_alignment(scheme.optimizer))
        yield WeightGroup(members, array_names, group_moves, sync, arrays, names[0] in unit.gradients, derived)


def array_key(weight: str) -> str:
    """Return the key of a weight's flat array: embedding and head get arrays of their own."""
    return weight if weight in VOCABULARY else ""


def differing_axes(sync: WeightSync, base: WeightSync) -> Axes:
    """Return the axes in which two syncs differ; an axis of one device makes no difference."""
    axes = {axis for sync_axes, base_axes in zip(sync, base, strict=True) for axis in {*sync_axes} ^ {*base_axes}}
    return tuple(sorted(axes))


def can_share_arrays(sync: WeightSync, base: WeightSync, degree: Callable[[Axes], int]) -> bool:
    """Return True if weights move with those of `base`; `degree` gives the number of devices along some axes."""
    return degree(differing_axes(sync, base)) == 1


def is_bucketed(scheme: ShardingScheme, sync: WeightSync) -> bool:
    """Return True if arrays have a limited size: where gradients rest whole.

    Not so for optimizers of whole matrices: with a unit's matrices in one array a device updates few of them.
    """
    return has_whole_gradients(scheme) and not sync.whole_gather


def has_whole_gradients(scheme: ShardingScheme) -> bool:
    """Return True if gradients rest whole between the micro-batches of a step (ZeRO-0 and -1)."""
    return scheme.zero_stage < 2
