"""All of a unit that costs something, read from its instructions and its derivation once, and its largest sets of live tensors.

`unit_cost_inputs` has the kernels, collectives and flat arrays of a unit, `unit_live_sets` the live tensors of its backward
pass at the moments that may be the fullest: derived for an engine that runs the derived operations one after the other; other
engines take a share of the unit's activations (`unit_memory.py`). Both are expressions, cached in the process and on disk
(`derivation_cache.py`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from shardwise.derive.low_precision_products import ProductOperand, product_weights
from shardwise.derive.sharded_program import ComputeStep
from shardwise.derive.sharded_unit import ShardedUnit, routes_tokens, scheme_for_unit
from shardwise.derive.tensor_specs import state_resting_spec, weight_use_spec
from shardwise.layout.sharding_scheme import ShardingScheme
from shardwise.model.architecture import ModelStructure
from shardwise.model.operations import MatrixFunction
from shardwise.model.optimizer_program import owning_weight, weight_matrices
from shardwise.model.optimizers.registry import get_optimizer
from shardwise.model.program import Role
from shardwise.price.derivation_cache import CACHE, Interner
from shardwise.price.number_formats import (
    ProductOperands,
    SavedElements,
    SavedTensors,
    TensorFormats,
    read_products,
    weight_grad_inputs,
)
from shardwise.sharding.spec import Axes, Spec
from shardwise.step.collectives import CONTROL_UNIT
from shardwise.step.flat_arrays import FlatArrays, shard_fraction, weight_groups
from shardwise.step.instructions import Kernel, UnitCollective
from shardwise.step.liveness import LiveSet, live_sets
from shardwise.step.unit_instructions import UnitInstructions, lower_unit
from shardwise.values.elementwise import Value, maximum, minimum, where
from shardwise.values.issue_policy import IssuePolicy
from shardwise.values.symbolic import ZERO, Polynomial, SymbolValues, sum_polynomials

# Bytes of a score that the backward pass reads where attention is not fused: softmax's result and dropout's (2 each) and
# dropout's mask (1). Source: Korthikanti et al. 2022, 4.1. What was read last has a gradient (2) by then.
SAVED_SCORE_BYTES, SCORE_GRADIENT_BYTES = 5.0, 2.0


class ConditionalTensor(NamedTuple):
    """What is there only where the group of devices along `over` is more than one, and so are the `rows`, if any are named."""

    kept: SavedElements
    over: Axes
    rows: Polynomial | None

    def num_bytes(self, formats: TensorFormats, values: SymbolValues) -> Value:
        """With 0 where it is not there."""
        there = values.group_degree(self.over) > 1
        if self.rows is not None:
            there = there & (self.rows.evaluate(values) > 1)
        return formats.saved_bytes([self.kept], values) * there


class LiveSetSizes(NamedTuple):
    """Live tensors of a moment, some by their evaluated sizes; elements of weight gradients in flight and whether any were
    made by then, and bytes of each score where scores are written."""

    tensors: tuple[SavedElements, ...]
    conditional: tuple[ConditionalTensor, ...]
    gradients: Polynomial
    has_made_weight_grads: bool
    score_bytes: float


def maximal_live_sets(template: UnitInstructions, taken: Iterable[ProductOperand]) -> tuple[LiveSetSizes, ...]:
    """The moments of a unit's backward pass that may be the fullest: none of which another has all of and more."""
    keys = SavedTensors(template.unit, taken)
    fullest: list[LiveSetSizes] = []
    for moment in live_sets(template):
        one = _live_set_sizes(moment, keys)
        if not any(_dominates(other, one) for other in fullest):
            fullest = [other for other in fullest if not _dominates(one, other)] + [one]
    return tuple(fullest)


def _live_set_sizes(moment: LiveSet, keys: SavedTensors) -> LiveSetSizes:
    found: dict[tuple[Axes, Spec | None], list[tuple[str, Spec]]] = {}
    for part in moment.parts:
        found.setdefault((part.over, part.rows), []).append((part.name, part.spec))
    tensors = keys.saved(found.pop(((), None), []))
    some = tuple(
        ConditionalTensor(kept, over, rows.local_elements() if rows else None)
        for (over, rows), parts in found.items()
        for kept in keys.saved(parts)
    )
    gradients = sum_polynomials(spec.local_elements() for spec in moment.gradients)
    return LiveSetSizes(
        tensors,
        some,
        gradients,
        moment.has_made_weight_grads,
        SAVED_SCORE_BYTES * moment.scores + SCORE_GRADIENT_BYTES * moment.gradient_of_scores,
    )


def _dominates(more: LiveSetSizes, less: LiveSetSizes) -> bool:
    """Whether a moment holds as much as another of everything, at any sizes."""
    largest = _coefficients(more)
    return all(largest.get(key, 0.0) >= amount for key, amount in _coefficients(less).items())


def _coefficients(held: LiveSetSizes) -> Mapping[object, float]:
    """Coefficients, by what they are of."""
    found: dict[object, float] = {"scores": held.score_bytes, "makes": held.has_made_weight_grads}
    found |= {monomial.factors: monomial.coefficient for monomial in held.gradients.monomials}
    for kept, over, rows in (*((one, (), None) for one in held.tensors), *held.conditional):
        kind = kept._replace(elements=Polynomial()), over, rows
        found |= {(kind, monomial.factors): monomial.coefficient for monomial in kept.elements.monomials}
    return found


INTERNER = Interner()


class StateElements(NamedTuple):
    """Elements of a unit's weights on one device, numbers or expressions: as used and as they rest, those with gradients as used
    and as the optimizer has them, of these as used but for experts', and of those that are ready last the former and the latter.
    `apart`: of the shard what an optimizer of matrices leaves to another (`Optimizer.fallback`). `together`: of the largest array
    of matrices that are updated whole all of it, and one device's part. `factors`: what moments have for
    rows and columns. `cast`: of those at rest what products take in a narrow format, where a recipe has one.
    """

    used: Value
    resting: Value
    trained: Value
    shard: Value
    passing: Value
    last: Value
    apart: Value
    together: Value
    factors: Value
    cast: Value


class WeightArrays(NamedTuple):
    """Weights of a unit that move alike, as flat arrays. `elements`, those `passing`, those of the `matrices` among them, and
    those that block products take (`cast`) are without padding, and so are the `factors`, what moments of them have for rows and
    columns. `steps`: FLOPs of what an optimizer makes of each as a whole matrix, which only devices with a part of it do."""

    flat: FlatArrays
    elements: Polynomial
    passing: Polynomial
    trained: bool
    gathers: bool
    matrices: Polynomial
    factors: Polynomial
    cast: Polynomial
    steps: tuple[Polynomial, ...]


class ArraySizes(NamedTuple):
    """Elements of some arrays: all of them, one device's part, and those passing."""

    whole: Value
    part: Value
    passing: Value
    apart: Value
    factors: Value
    cast: Value


def weight_arrays(unit: ShardedUnit) -> tuple[WeightArrays, ...]:
    """Those of a unit's own weights, in the order in which the last of their gradients are ready."""
    dims, order = unit.weights, [*reversed(unit.forward.program.weights)]
    of_matrices = weight_matrices(unit.forward.program, tables=get_optimizer(unit.family.optimizer).covers_vocabulary)
    factors = unit.update.program.names_with_role(Role.FACTOR)
    flops = _whole_matrix_flops(unit)
    narrow = product_weights(unit.forward.steps, unit.tensors)
    found = [group for group in weight_groups(unit) if not dims.keys().isdisjoint(group.weights)]
    arrays = []
    for group in sorted(found, key=lambda one: max(map(order.index, one.weights))):
        used = {name: weight_use_spec(unit.family, dims[name]).local_elements() for name in group.weights}
        passing = sum_polynomials(elements for name, elements in used.items() if "E" not in dims[name])
        gathers = bool(group.sync.gather)
        own = sum_polynomials(elements for name, elements in used.items() if name in of_matrices)
        kept = sum_polynomials(
            state_resting_spec(unit.family, dims[owning_weight(name)], unit.update.program.dims(name)).local_elements()
            for name in factors
            if name in unit.update.program.inputs and owning_weight(name) in used
        )
        cast = sum_polynomials(elements for name, elements in used.items() if name in narrow)
        steps = tuple(flops.get(name, ZERO) for name in group.array_weights) if flops and group.trained else ()
        arrays.append(
            WeightArrays(
                group.arrays, sum_polynomials(used.values()), passing, group.trained, gathers, own, kept, cast, steps
            )
        )
    return tuple(arrays)


def _whole_matrix_flops(unit: ShardedUnit) -> dict[str, Polynomial]:
    """By weight the FLOPs of what is made of it as a whole matrix and not kept."""
    found: dict[str, Polynomial] = {}
    for step in unit.update.steps:
        if isinstance(step, ComputeStep) and isinstance(step.operation, MatrixFunction) and not step.operation.is_state:
            weight = owning_weight(step.operation.outputs[0])
            found[weight] = found.get(weight, ZERO) + step.operation.flops(step.placed)
    return found


def largest_update_share(arrays: Sequence[WeightArrays], values: SymbolValues) -> Value:
    """Of what is made of matrices as a whole and not kept the share of a device that has the most of it in each array."""
    found = [one.flat.largest_and_total(one.steps, values) for one in arrays if one.steps]
    return sum((most for most, _ in found), start=0.0) / maximum(sum((every for _, every in found), start=0.0), 1.0)


def state_expressions(arrays: Sequence[WeightArrays]) -> StateElements:
    """The state of a unit as expressions, without padding."""
    shares = [shard_fraction(one.flat.shard_axes) for one in arrays]
    sizes = (
        ArraySizes(
            one.elements,
            one.elements * share,
            one.passing,
            (one.elements + one.matrices * -1.0) * share,
            one.factors,
            one.cast * share if one.gathers else one.cast,
        )
        for one, share in zip(arrays, shares, strict=True)
    )
    every = list(zip(arrays, sizes, strict=True))
    ready_last = [size.whole + size.part for one, size in every if one.trained][-1:]
    together = [size.whole + size.part for one, size in every if one.trained and one.matrices]
    return _sum_state(every, sum_polynomials(ready_last), sum_polynomials(together), ZERO)


def state_elements(arrays: Sequence[WeightArrays], values: SymbolValues, most_elements: float) -> StateElements:
    """The same in numbers, padding included, where an array holds at most so many elements."""
    every, ready_last, together = [], 0.0, 0.0
    for one in arrays:
        whole = one.flat.evaluate(values, most_elements).elements
        part = whole / values.group_degree(one.flat.shard_axes)
        apart = (one.elements + one.matrices * -1.0).evaluate(values) / values.group_degree(one.flat.shard_axes)
        cast = one.cast.evaluate(values) / (values.group_degree(one.flat.shard_axes) if one.gathers else 1)
        factors = one.factors.evaluate(values)
        every.append((one, ArraySizes(whole, part, one.passing.evaluate(values), apart, factors, cast)))
        if one.trained:  # arrays that others have joined have no elements
            ready_last = where(whole > 0, whole + part, ready_last)
        if one.trained and one.matrices:
            largest = minimum(whole, most_elements) if one.flat.bucketed else whole  # one bucket at a time
            together = maximum(together, largest + minimum(part, largest))
    return _sum_state(every, ready_last, together, 0.0)


def _sum_state(
    every: Sequence[tuple[WeightArrays, ArraySizes]], ready_last: Value, together: Value, nothing: Value
) -> StateElements:
    trained = [size for one, size in every if one.trained]
    return StateElements(
        sum((size.whole for _, size in every), start=nothing),
        sum((size.part if one.gathers else size.whole for one, size in every), start=nothing),
        sum((size.whole for size in trained), start=nothing), sum((size.part for size in trained), start=nothing),
        sum((size.passing for size in trained), start=nothing), ready_last,
        sum((size.apart for size in trained), start=nothing), together,
        sum((size.factors for size in trained), start=nothing), sum((size.cast for _, size in every), start=nothing),
    )  # fmt: skip


class UnitCostInputs(NamedTuple):
    """Every part of a unit that costs something, taken from its derivation once, without a reference to it."""

    kernels: tuple[Kernel, ...]
    collectives: tuple[UnitCollective, ...]
    products: ProductOperands
    weight_grad_inputs: tuple[SavedElements, ...]
    routed: bool
    arrays: tuple[WeightArrays, ...]

    @property
    def state(self) -> StateElements:
        """Elements of its weights, as expressions."""
        return state_expressions(self.arrays)

    @property
    def state_collectives(self) -> tuple[UnitCollective, ...]:
        """Those that move weights and gradients, and control traffic."""
        return tuple(moved for moved in self.collectives if moved.moves_weights or moved.is_control)

    @property
    def state_key(self) -> Hashable:
        """Equal for two units whose state, update, weight and gradient traffic cost the same at any sizes."""
        update = tuple((kernel.flops, *kernel.elements.items()) for kernel in self.kernels if kernel.phase == "update")
        return self.state_collectives, update, self.products.narrow, self.arrays


def time_term(one: UnitCollective) -> str:
    """The time term that a collective counts in: those of weights are ZeRO's, over whichever axes, but for what replicas reduce
    once per step; and so is what routers counted, where it moves with every micro-batch."""
    group = one.stream
    if one.moves_weights or one.is_control:
        return group if one.scope == "step" and group in ("dp", "control") else "fsdp"
    return group


def priced_family(structure: ModelStructure, family: ShardingScheme, name: str) -> ShardingScheme:
    """What of a family a unit's parts depend on. The step's control traffic, which one of the units has, is that of all
    units."""
    own = scheme_for_unit(structure, family, name)
    if name != CONTROL_UNIT:
        return own
    return replace(own, whole_experts=family.whole_experts, shares_amax=family.shares_amax)


def unit_cost_inputs(
    structure: ModelStructure, family: ShardingScheme, name: str, policy: IssuePolicy
) -> UnitCostInputs:
    """The parts of a unit in a layout of this family under a policy."""
    return _cached_cost_inputs(structure, priced_family(structure, family, name), name, policy)


def unit_live_sets(
    structure: ModelStructure, family: ShardingScheme, name: str, policy: IssuePolicy
) -> tuple[LiveSetSizes, ...]:
    """The live tensors of a unit at the moments of its backward pass that may be the fullest."""
    return _cached_live_sets(structure, priced_family(structure, family, name), name, policy)


@lru_cache(maxsize=8192)
def _cached_cost_inputs(
    structure: ModelStructure, family: ShardingScheme, name: str, policy: IssuePolicy
) -> UnitCostInputs:
    return CACHE.get(
        structure,
        policy,
        ("parts", family, name),
        lambda: INTERNER.of(derive_cost_inputs(structure, family, name, policy)),
    )


def derive_cost_inputs(
    structure: ModelStructure, family: ShardingScheme, name: str, policy: IssuePolicy
) -> UnitCostInputs:
    """The parts of a unit, from its derivation."""
    template = lower_unit(structure, family, name, policy)
    unit, launched = template.unit, template.kernels
    return UnitCostInputs(
        tuple(replace(kernel, steps=()) for kernel in launched),
        tuple(replace(moved, derived=(), counts_rows_of=None) for moved in template.collectives),
        read_products(unit), weight_grad_inputs(unit, launched), routes_tokens(structure, name), weight_arrays(unit),
    )  # fmt: skip


@lru_cache(maxsize=8192)
def _cached_live_sets(
    structure: ModelStructure, family: ShardingScheme, name: str, policy: IssuePolicy
) -> tuple[LiveSetSizes, ...]:
    return CACHE.get(
        structure,
        policy,
        ("held", family, name),
        lambda: INTERNER.of(derive_live_sets(structure, family, name, policy)),
    )


def derive_live_sets(
    structure: ModelStructure, family: ShardingScheme, name: str, policy: IssuePolicy
) -> tuple[LiveSetSizes, ...]:
    """The live tensors of a unit at those moments, from its derivation."""
    template = lower_unit(structure, family, name, policy)
    return maximal_live_sets(template, read_products(template.unit).operands)
