"""Weights of a unit that move together, as flat arrays: which fill one, its length with padding, and the collectives on it.

Over the axes that split it each device has one even part of a flat array, padded. Differs from the derivation, which splits
every weight along a dim: bytes are the same but for the padding. Sizes are numbers or arrays; the collectives are read off the
derived steps (`derive`). `groups_of` in `parameters.py` fills the same arrays with the parameters of a model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from shardwise.derive.sharded_program import CollectiveStep
from shardwise.derive.sharded_unit import ShardedUnit
from shardwise.derive.tensor_specs import weight_use_spec
from shardwise.layout.sharding_scheme import ShardingScheme
from shardwise.model.optimizer_program import whole_matrix_inputs
from shardwise.model.optimizers.registry import get_optimizer
from shardwise.model.program import Role
from shardwise.sharding.collectives import CollectiveKind
from shardwise.sharding.spec import Axes
from shardwise.values.elementwise import Value, ceil_div, maximum, where
from shardwise.values.errors import ShardingError
from shardwise.values.symbolic import Monomial, Polynomial, SymbolValues, constant, sum_polynomials

# Parameters and parts begin at a multiple of so many elements, 16 bytes in the narrowest format that weights rest in (bf16).
# Source: CUTLASS, functionality.md: operands of tensor core kernels are aligned to 128 bits.
ALIGNMENT = 8


def shard_alignment(optimizer: str) -> int:
    """Of how many elements parameters and parts begin at a multiple, with an optimizer by name: blocks of its moments that share
    a scale are those of one parameter on one device.

    >>> shard_alignment("adamw"), shard_alignment("adamw_8bit")
    (8, 256)
    """
    return math.lcm(ALIGNMENT, get_optimizer(optimizer).block)


def align_up(elements: Value, alignment: int = ALIGNMENT) -> Value:
    """The next place where a parameter or a part may begin.

    >>> align_up(17)
    24
    """
    return ceil_div(elements, alignment) * alignment


def shard_elements(elements: Value, num_shards: Value, alignment: int = ALIGNMENT) -> Value:
    """Elements of each device's part of a flat array, padding included.

    >>> shard_elements(560, 3)
    192
    """
    return align_up(ceil_div(elements, num_shards), alignment)


def starts_array(sizes: Iterable[Value], most_elements: float | None) -> Iterator[Value]:
    """Whether each weight begins a flat array: the first does, and what does not fit into the one before; one without elements
    does not. `most_elements` of None: all fit into one.

    Source: Li et al. 2020, PyTorch Distributed, section 3.2.3.

    >>> list(starts_array([6, 0, 3, 2, 9], most_elements=8))
    [True, False, True, False, True]
    """
    filled: Value = 0
    for size in sizes:
        begins = (filled == 0) if most_elements is None else (filled == 0) | (filled + size > most_elements)
        begins = begins & (size > 0)
        yield begins
        filled = where(begins, size, filled + size)


def largest_shard_amount(
    sizes: Sequence[Value], amounts: Sequence[Value], num_shards: Value, alignment: int = ALIGNMENT
) -> Value:
    """The most that any device has of amounts that weights of these sizes have whole: each counts where there is a part of it.

    Of the devices with a part of a weight none has more weights behind it than that with its end.

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
    part = maximum(shard_elements(stops[-1], num_shards, alignment), 1)
    most: Value = 0.0
    for end in stops:
        device = (end - 1) // part
        begin, has = device * part, 0.0
        for start, stop, size, amount in zip(starts, stops, sizes, amounts, strict=True):
            has = has + where((start < begin + part) & (stop > begin) & (size > 0), amount, 0.0)
        most = maximum(most, has)
    return most


class ArrayExtent(NamedTuple):
    """How many flat arrays there are, and their elements together, padding included."""

    count: Value
    elements: Value


class FlatWeight(NamedTuple):
    """Elements of a weight where it is used. It is among those of its arrays only where the group of devices along `single` is
    one device, and that along `several` is more."""

    elements: Polynomial
    single: Axes = ()
    several: Axes = ()

    def evaluate(self, values: SymbolValues) -> Value:
        size = self.elements.evaluate(values)
        if self.single:
            size = where(values.group_degree(self.single) == 1, size, 0)
        return where(values.group_degree(self.several) > 1, size, 0) if self.several else size


@dataclass(frozen=True, slots=True)
class FlatArrays:
    """Weights that move as flat arrays, in the order in which they fill them. `shard_axes`: the axes of the parts.

    `moves_shards`: what moves is each device's part. `alignment`: see `shard_alignment`.
    """

    weights: tuple[FlatWeight, ...]
    shard_axes: Axes
    bucketed: bool
    moves_shards: bool = False
    alignment: int = ALIGNMENT

    @property
    def elements(self) -> Polynomial:
        """Elements without padding of what moves, where no group of devices is one device."""
        whole = sum_polynomials(weight.elements for weight in self.weights if not weight.single)
        return whole * (shard_fraction(self.shard_axes) if self.moves_shards else constant(1.0))

    def evaluate(self, values: SymbolValues, most_elements: float) -> ArrayExtent:
        """The arrays at these sizes and degrees; buckets hold at most so many elements."""
        return values.compute_once((self,), partial(self._extent, values, most_elements), at=most_elements)

    def _extent(self, values: SymbolValues, most_elements: float) -> ArrayExtent:
        sizes = [weight.evaluate(values) for weight in self.weights]
        shards = values.group_degree(self.shard_axes)
        count, elements = array_extent(sizes, shards, most_elements if self.bucketed else None, self.alignment)
        return ArrayExtent(count, elements / shards if self.moves_shards else elements)

    def largest_and_total(self, amounts: Sequence[Polynomial], values: SymbolValues) -> tuple[Value, Value]:
        """Of amounts that weights of one array have whole what the device with the most has (`largest_shard_amount`), and all."""
        sizes = [weight.evaluate(values) for weight in self.weights]
        found = [where(size > 0, one.evaluate(values), 0.0) for size, one in zip(sizes, amounts, strict=True)]
        return largest_shard_amount(sizes, found, values.group_degree(self.shard_axes), self.alignment), sum(
            found, start=0.0
        )

    def array_sizes(self, values: SymbolValues, most_elements: float) -> list[int]:
        """The elements of each array, padding included; of numbers only."""
        sizes = [int(weight.evaluate(values)) for weight in self.weights]
        shards = int(values.group_degree(self.shard_axes))
        filled: list[list[int]] = []
        for size, begins in zip(sizes, starts_array(sizes, most_elements if self.bucketed else None), strict=True):
            if begins:
                filled.append([])
            if size:
                filled[-1].append(size)
        whole = [int(array_extent(each, shards, None, self.alignment).elements) for each in filled]
        return [elements // shards for elements in whole] if self.moves_shards else whole


def shard_fraction(axes: Axes) -> Polynomial:
    """One device's share of what is split evenly over some axes."""
    return Polynomial((Monomial(1.0, tuple((axis, -1) for axis in sorted(axes))),))


def array_extent(
    sizes: Sequence[Value], num_shards: Value, most_elements: float | None, alignment: int = ALIGNMENT
) -> ArrayExtent:
    """Flat arrays of weights of these sizes, each padded to even parts.

    >>> array_extent([12, 96], num_shards=2, most_elements=None)
    ArrayExtent(count=1, elements=112)
    """
    count: Value = 0
    elements: Value = 0
    stop: Value = 0
    for size, begins in zip(sizes, starts_array(sizes, most_elements), strict=True):
        elements = elements + where(begins, shard_elements(stop, num_shards, alignment) * num_shards, 0)
        count = count + where(begins, 1, 0)
        stop = where(begins, size, align_up(stop, alignment) + size)
    return ArrayExtent(count, elements + shard_elements(stop, num_shards, alignment) * num_shards)


WEIGHT_ROLES = (Role.WEIGHT, Role.WEIGHT_GRADIENT)
# Matrices over the vocabulary fill arrays of their own: where a model ties them, one array serves both ends.
VOCABULARY = ("embedding", "head")


class WeightMove(NamedTuple):
    """A collective on a weight or its gradient, and the pass that it belongs to; what the recomputed slice needs comes with the
    backward pass."""

    phase: str
    kind: CollectiveKind
    axes: Axes
    of_direction: bool = False  # it moves what the optimizer makes of the gradient


class WeightSync(NamedTuple):
    """What keeps a weight and its gradient in step, by the axes that it goes over.

    `gather`: an AllGather from where the weight rests to where it is used, at each use (ZeRO-3). `scatter`: a ReduceScatter of
    its gradient in each micro-batch (ZeRO-2, -3); `step_scatter`: in each step (ZeRO-1). `reduce`: an AllReduce in each step.
    `step_gather`: an AllGather of the updated weight in each step (ZeRO-1, -2). `whole_gather`: in each step an AllGather of what
    an optimizer of whole matrices makes of the gradient (from ZeRO-1 on). A frozen weight has no more than a `gather`.
    """

    gather: Axes = ()
    scatter: Axes = ()
    step_scatter: Axes = ()
    reduce: Axes = ()
    step_gather: Axes = ()
    whole_gather: Axes = ()

    @property
    def shard(self) -> Axes:
        """The axes over which the optimizer's state, or a frozen weight, is split."""
        return self.scatter or self.step_scatter or self.gather

    @property
    def summed(self) -> Axes:
        """The axes over which its gradient is a partial sum when a backward pass has made it."""
        return (self.scatter or self.step_scatter) + self.reduce

    def within(self, replicas: Axes) -> Axes:
        """Of these the axes along which ranks have parts of the same sequences' gradient."""
        return tuple(axis for axis in self.summed if axis not in replicas)


# What a collective on a weight or its gradient is for: by whether it runs once per step, its kind, and whether it moves what the
# optimizer makes of a gradient.
PURPOSES: Mapping[tuple[bool, CollectiveKind, bool], str] = {
    (False, CollectiveKind.ALL_GATHER, False): "gather", (False, CollectiveKind.REDUCE_SCATTER, False): "scatter",
    (True, CollectiveKind.REDUCE_SCATTER, False): "step_scatter", (True, CollectiveKind.ALL_REDUCE, False): "reduce",
    (True, CollectiveKind.ALL_GATHER, False): "step_gather", (True, CollectiveKind.ALL_GATHER, True): "whole_gather",
}  # fmt: skip


def classify_moves(moves: Iterable[WeightMove]) -> WeightSync:
    """The same collectives by what they are for.

    Raises `ShardingError` for one that flat arrays have not, and for two for one purpose over different axes.
    """
    found: dict[str, Axes] = {}
    for move in moves:
        purpose = PURPOSES.get((move.phase == "update", move.kind, move.of_direction))
        if purpose is None or found.setdefault(purpose, move.axes) != move.axes:
            raise ShardingError(
                f"weights: found {move.kind} over {', '.join(move.axes)} in the {move.phase} pass; at most one gather, scatter "
                "and reduction of a flat array is required"
            )
    return WeightSync(**found)


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """Weights of a unit that are gathered and reduced alike, in the order in which their gradients are ready.

    `array_weights`: these, and those that may join them, as the arrays have them.
    """

    weights: tuple[str, ...]
    array_weights: tuple[str, ...]
    moves: tuple[WeightMove, ...]
    sync: WeightSync
    arrays: FlatArrays
    trained: bool
    derived: Mapping[tuple[str, WeightMove], CollectiveStep] = field(compare=False, repr=False, hash=False)

    def derived_as(self, move: WeightMove) -> tuple[CollectiveStep, ...]:
        """The derived collectives that one on the group's arrays stands for."""
        return tuple(self.derived[name, move] for name in self.weights if (name, move) in self.derived)

    @property
    def passes(self) -> tuple[str, ...]:
        """The passes ("forward", "backward") for which the weights are gathered: of all of them, where one needs it."""
        return tuple(
            move.phase for move in self.moves if move.kind is CollectiveKind.ALL_GATHER and move.phase != "update"
        )


def is_flat_move(step: CollectiveStep, family: ShardingScheme) -> bool:
    """Whether what a derived step moves is a part of a flat array: weights, their gradients, and of what the optimizer makes of
    these what ZeRO's axes split. What tensor parallelism splits of that comes together matrix by matrix."""
    if step.tensor.role is Role.DIRECTION:
        return set(step.collective.axes) <= set(family.zero_axes)
    return step.tensor.role in WEIGHT_ROLES


def find_weight_moves(unit: ShardedUnit) -> dict[tuple[str, WeightMove], CollectiveStep]:
    """Every collective on each weight of a unit, borrowed ones too, and on its gradient, as derived."""
    owners = {name: name for name in unit.forward.program.weights} | {f"{name}'": name for name in unit.gradients}
    owners |= {gradient: name for name, gradient in unit.gradients.items()}
    owners |= whole_matrix_inputs(unit.update.program)
    found: dict[tuple[str, WeightMove], CollectiveStep] = {}
    for phase, steps in unit.phases().items():
        for step in steps:
            if (
                isinstance(step, CollectiveStep)
                and is_flat_move(step, unit.family)
                and step.collective.kind is not CollectiveKind.SLICE
            ):
                during = "backward" if phase == "recompute" else phase
                of_direction = step.tensor.role is Role.DIRECTION
                move = WeightMove(during, step.collective.kind, step.collective.axes, of_direction)
                found.setdefault((owners[step.tensor.name], move), step)
    return found


def weight_groups(unit: ShardedUnit, single: Set[str] = frozenset()) -> tuple[WeightGroup, ...]:
    """The groups of a unit. Those that differ in axes of one device alone travel as one (`can_share_arrays`): at once where these
    are among `single`, otherwise as the degrees turn out."""
    derived = find_weight_moves(unit)
    together: dict[tuple[bool, str], list[str]] = {}
    for name in reversed(unit.forward.program.weights):
        together.setdefault((name in unit.gradients, array_key(name)), []).append(name)
    return tuple(group for names in together.values() for group in _split_groups(unit, names, derived, single))


def _split_groups(
    unit: ShardedUnit, names: Sequence[str], derived: Mapping[tuple[str, WeightMove], CollectiveStep], single: Set[str]
) -> Iterator[WeightGroup]:
    """Of weights in the order in which gradients are ready: the first one's group, which others may join, and the others."""
    program, family = unit.forward.program, unit.family
    moves = {name: [move for weight, move in derived if weight == name] for name in names}
    own_syncs = {name: classify_moves(moves[name]) for name in names}
    base = own_syncs[names[0]]
    apart = {
        name: tuple(axis for axis in differing_axes(own_syncs[name], base) if axis not in single) for name in names
    }
    syncs = {name: own_syncs[name] if apart[name] else base for name in names}
    for sync in dict.fromkeys(syncs.values()):
        own = tuple(name for name in names if syncs[name] == sync)
        filling = tuple(names) if sync == base else own
        weights = tuple(
            FlatWeight(
                weight_use_spec(family, program.dims(name)).local_elements(), single=apart[name] if sync == base else (),
                several=apart[name] if sync != base else (),
            )
            for name in filling
        )  # fmt: skip
        yield WeightGroup(
            own, filling, tuple(dict.fromkeys(move for name in own for move in moves[name] if _runs_over(move, sync))), sync,
            FlatArrays(weights, sync.shard, is_bucketed(family, sync), alignment=shard_alignment(family.optimizer)),
            names[0] in unit.gradients, derived,
        )  # fmt: skip


def _runs_over(move: WeightMove, sync: WeightSync) -> bool:
    """Whether a collective is one of those of a group, whose axes of more than one device are its own."""
    return move.axes in sync


def array_key(weight: str) -> str:
    """What weights must share to fill an array together."""
    return weight if weight in VOCABULARY else ""


def differing_axes(sync: WeightSync, other: WeightSync) -> Axes:
    """The axes by which two ways of keeping weights in step differ: none matters where it has one device."""
    axes = {axis for one, two in zip(sync, other, strict=True) for axis in {*one} ^ {*two}}
    return tuple(sorted(axes))


def can_share_arrays(sync: WeightSync, base: WeightSync, degree: Callable[[Axes], int]) -> bool:
    """Whether weights travel with those of `base`, in groups of so many devices."""
    return degree(differing_axes(sync, base)) == 1


def is_bucketed(family: ShardingScheme, sync: WeightSync) -> bool:
    """Whether weights fill arrays of limited size: where gradients rest whole, but for matrices that an optimizer takes whole. Of
    those of a unit in one array a device has a part of few, and works out no others."""
    return has_whole_gradients(family) and not sync.whole_gather


def has_whole_gradients(family: ShardingScheme) -> bool:
    """Whether gradients rest whole between the micro-batches of a step."""
    return family.zero_stage < 2
