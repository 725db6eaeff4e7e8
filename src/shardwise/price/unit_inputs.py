"""All of a unit that costs something, read from its instructions and its derivation once, and its largest sets of live tensors.

`parts_of` has the kernels, collectives and flat arrays of a unit, `held_in` the live tensors of its backward pass at the
moments that may be the fullest: derived for an engine that runs the derived operations one after the other; other engines take
a share of the unit's activations (`unit_memory.py`). Both are expressions, cached in the process and on disk
(`derivation_cache.py`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from shardwise.derive.low_precision_products import Operand, weights_of_products
from shardwise.derive.sharded_program import Compute
from shardwise.derive.sharded_unit import Unit, own_family, routes
from shardwise.derive.tensor_specs import state_rest, weight_use
from shardwise.layout.sharding_scheme import Family
from shardwise.model.architecture import Structure
from shardwise.model.operations import OfMatrix
from shardwise.model.optimizer_program import matrices, weight_of
from shardwise.model.optimizers.registry import optimizer_named
from shardwise.model.program import Role
from shardwise.price.derivation_cache import KEPT, Shared
from shardwise.price.number_formats import Formats, Keys, Products, Saved, products_of, waiting_of
from shardwise.sharding.spec import Axes, Spec
from shardwise.step.collectives import CONTROL_UNIT
from shardwise.step.flat_arrays import FlatArrays, share_of, weight_groups
from shardwise.step.instructions import Kernel, Traffic
from shardwise.step.liveness import Moment, moments
from shardwise.step.unit_instructions import Template, unit_template
from shardwise.values.elementwise import Value, maximum, minimum, where
from shardwise.values.issue_policy import IssuePolicy
from shardwise.values.symbolic import ZERO, Polynomial, Values, total

# Bytes of a score that the backward pass reads where attention is not fused: softmax's result and dropout's (2 each) and
# dropout's mask (1). Source: Korthikanti et al. 2022, 4.1. What was read last has a gradient (2) by then.
SCORES, THEIR_GRADIENT = 5.0, 2.0


class Some(NamedTuple):
    """What is there only where the group of devices along `over` is more than one, and so are the `rows`, if any are named."""

    kept: Saved
    over: Axes
    rows: Polynomial | None

    def num_bytes(self, formats: Formats, values: Values) -> Value:
        """With 0 where it is not there."""
        there = values.degree(self.over) > 1
        if self.rows is not None:
            there = there & (self.rows.evaluate(values) > 1)
        return formats.saved_bytes([self.kept], values) * there


class Held(NamedTuple):
    """Live tensors of a moment, some by their evaluated sizes; elements of weight gradients in flight and whether any were
    made by then, and bytes of each score where scores are written."""

    tensors: tuple[Saved, ...]
    some: tuple[Some, ...]
    gradients: Polynomial
    makes: bool
    score_bytes: float


def held_of(template: Template, taken: Iterable[Operand]) -> tuple[Held, ...]:
    """The moments of a unit's backward pass that may be the fullest: none of which another has all of and more."""
    keys = Keys(template.unit, taken)
    fullest: list[Held] = []
    for moment in moments(template):
        one = _live_set_sizes(moment, keys)
        if not any(_covers(other, one) for other in fullest):
            fullest = [other for other in fullest if not _covers(one, other)] + [one]
    return tuple(fullest)


def _live_set_sizes(moment: Moment, keys: Keys) -> Held:
    found: dict[tuple[Axes, Spec | None], list[tuple[str, Spec]]] = {}
    for part in moment.parts:
        found.setdefault((part.over, part.rows), []).append((part.name, part.spec))
    tensors = keys.saved(found.pop(((), None), []))
    some = tuple(
        Some(kept, over, rows.local_elements() if rows else None)
        for (over, rows), parts in found.items()
        for kept in keys.saved(parts)
    )
    gradients = total(spec.local_elements() for spec in moment.gradients)
    return Held(
        tensors, some, gradients, moment.makes, SCORES * moment.scores + THEIR_GRADIENT * moment.gradient_of_scores
    )


def _covers(more: Held, less: Held) -> bool:
    """Whether a moment holds as much as another of everything, at any sizes."""
    largest = _amounts(more)
    return all(largest.get(key, 0.0) >= amount for key, amount in _amounts(less).items())


def _amounts(held: Held) -> Mapping[object, float]:
    """Coefficients, by what they are of."""
    found: dict[object, float] = {"scores": held.score_bytes, "makes": held.makes}
    found |= {monomial.factors: monomial.coefficient for monomial in held.gradients.monomials}
    for kept, over, rows in (*((one, (), None) for one in held.tensors), *held.some):
        kind = kept._replace(elements=Polynomial()), over, rows
        found |= {(kind, monomial.factors): monomial.coefficient for monomial in kept.elements.monomials}
    return found


SHARED = Shared()


class State(NamedTuple):
    """Elements of a unit's weights on one device, numbers or expressions: as used and as they rest, those with gradients as used
    and as the optimizer has them, of these as used but for experts', and of those that are ready last the former and the latter.
    `apart`: of the shard what an optimizer of matrices leaves to another (`Optimizer.others`). `together`: of the largest array
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


class Arrays(NamedTuple):
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


class Sizes(NamedTuple):
    """Elements of some arrays: all of them, one device's part, and those passing."""

    whole: Value
    part: Value
    passing: Value
    apart: Value
    factors: Value
    cast: Value


def arrays_of(unit: Unit) -> tuple[Arrays, ...]:
    """Those of a unit's own weights, in the order in which the last of their gradients are ready."""
    dims, order = unit.weights, [*reversed(unit.forward.program.weights)]
    of_matrices = matrices(unit.forward.program, tables=optimizer_named(unit.family.optimizer).tables)
    factors = unit.update.program.named(Role.FACTOR)
    flops = _steps(unit)
    narrow = weights_of_products(unit.forward.steps, unit.tensors)
    found = [group for group in weight_groups(unit) if not dims.keys().isdisjoint(group.weights)]
    arrays = []
    for group in sorted(found, key=lambda one: max(map(order.index, one.weights))):
        used = {name: weight_use(unit.family, dims[name]).local_elements() for name in group.weights}
        passing = total(elements for name, elements in used.items() if "E" not in dims[name])
        gathers = bool(group.sync.gather)
        own = total(elements for name, elements in used.items() if name in of_matrices)
        kept = total(
            state_rest(unit.family, dims[weight_of(name)], unit.update.program.dims(name)).local_elements()
            for name in factors
            if name in unit.update.program.inputs and weight_of(name) in used
        )
        cast = total(elements for name, elements in used.items() if name in narrow)
        steps = tuple(flops.get(name, ZERO) for name in group.filling) if flops and group.trained else ()
        arrays.append(
            Arrays(group.arrays, total(used.values()), passing, group.trained, gathers, own, kept, cast, steps)
        )
    return tuple(arrays)


def _steps(unit: Unit) -> dict[str, Polynomial]:
    """By weight the FLOPs of what is made of it as a whole matrix and not kept."""
    found: dict[str, Polynomial] = {}
    for step in unit.update.steps:
        if isinstance(step, Compute) and isinstance(step.operation, OfMatrix) and not step.operation.kept:
            weight = weight_of(step.operation.outputs[0])
            found[weight] = found.get(weight, ZERO) + step.operation.flops(step.placed)
    return found


def fullest_share(arrays: Sequence[Arrays], values: Values) -> Value:
    """Of what is made of matrices as a whole and not kept the share of a device that has the most of it in each array."""
    found = [one.flat.shared(one.steps, values) for one in arrays if one.steps]
    return sum((most for most, _ in found), start=0.0) / maximum(sum((every for _, every in found), start=0.0), 1.0)


def expressions_of(arrays: Sequence[Arrays]) -> State:
    """The state of a unit as expressions, without padding."""
    shares = [share_of(one.flat.split) for one in arrays]
    sizes = (
        Sizes(
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
    return _state(every, total(ready_last), total(together), ZERO)


def elements_at(arrays: Sequence[Arrays], values: Values, most_elements: float) -> State:
    """The same in numbers, padding included, where an array holds at most so many elements."""
    every, ready_last, together = [], 0.0, 0.0
    for one in arrays:
        whole = one.flat.evaluate(values, most_elements).elements
        part = whole / values.degree(one.flat.split)
        apart = (one.elements + one.matrices * -1.0).evaluate(values) / values.degree(one.flat.split)
        cast = one.cast.evaluate(values) / (values.degree(one.flat.split) if one.gathers else 1)
        factors = one.factors.evaluate(values)
        every.append((one, Sizes(whole, part, one.passing.evaluate(values), apart, factors, cast)))
        if one.trained:  # arrays that others have joined have no elements
            ready_last = where(whole > 0, whole + part, ready_last)
        if one.trained and one.matrices:
            largest = minimum(whole, most_elements) if one.flat.bucketed else whole  # one bucket at a time
            together = maximum(together, largest + minimum(part, largest))
    return _state(every, ready_last, together, 0.0)


def _state(every: Sequence[tuple[Arrays, Sizes]], ready_last: Value, together: Value, nothing: Value) -> State:
    trained = [size for one, size in every if one.trained]
    return State(
        sum((size.whole for _, size in every), start=nothing),
        sum((size.part if one.gathers else size.whole for one, size in every), start=nothing),
        sum((size.whole for size in trained), start=nothing), sum((size.part for size in trained), start=nothing),
        sum((size.passing for size in trained), start=nothing), ready_last,
        sum((size.apart for size in trained), start=nothing), together,
        sum((size.factors for size in trained), start=nothing), sum((size.cast for _, size in every), start=nothing),
    )  # fmt: skip


class Parts(NamedTuple):
    """Every part of a unit that costs something, taken from its derivation once, without a reference to it."""

    kernels: tuple[Kernel, ...]
    collectives: tuple[Traffic, ...]
    products: Products
    waiting: tuple[Saved, ...]
    routed: bool
    arrays: tuple[Arrays, ...]

    @property
    def state(self) -> State:
        """Elements of its weights, as expressions."""
        return expressions_of(self.arrays)

    @property
    def state_collectives(self) -> tuple[Traffic, ...]:
        """Those that move weights and gradients, and control traffic."""
        return tuple(moved for moved in self.collectives if moved.carries_weights or moved.is_control)

    @property
    def state_key(self) -> Hashable:
        """Equal for two units whose state, update, weight and gradient traffic cost the same at any sizes."""
        update = tuple((kernel.flops, *kernel.elements.items()) for kernel in self.kernels if kernel.phase == "update")
        return self.state_collectives, update, self.products.narrow, self.arrays


def charged_to(one: Traffic) -> str:
    """The time term that a collective counts in: those of weights are ZeRO's, over whichever axes, but for what replicas reduce
    once per step; and so is what routers counted, where it moves with every micro-batch."""
    group = one.group
    if one.carries_weights or one.is_control:
        return group if one.scope == "step" and group in ("dp", "control") else "fsdp"
    return group


def priced_family(structure: Structure, family: Family, name: str) -> Family:
    """What of a family a unit's parts depend on. The step's control traffic, which one of the units has, is that of all
    units."""
    own = own_family(structure, family, name)
    if name != CONTROL_UNIT:
        return own
    return replace(own, whole_experts=family.whole_experts, shares_amax=family.shares_amax)


def parts_of(structure: Structure, family: Family, name: str, policy: IssuePolicy) -> Parts:
    """The parts of a unit in a layout of this family under a policy."""
    return _parts(structure, priced_family(structure, family, name), name, policy)


def held_in(structure: Structure, family: Family, name: str, policy: IssuePolicy) -> tuple[Held, ...]:
    """The live tensors of a unit at the moments of its backward pass that may be the fullest."""
    return _cached_live_sets(structure, priced_family(structure, family, name), name, policy)


@lru_cache(maxsize=8192)
def _parts(structure: Structure, family: Family, name: str, policy: IssuePolicy) -> Parts:
    return KEPT.get(
        structure, policy, ("parts", family, name), lambda: SHARED.of(derived_parts(structure, family, name, policy))
    )


def derived_parts(structure: Structure, family: Family, name: str, policy: IssuePolicy) -> Parts:
    """The parts of a unit, from its derivation."""
    template = unit_template(structure, family, name, policy)
    unit, launched = template.unit, template.kernels
    return Parts(
        tuple(replace(kernel, steps=()) for kernel in launched),
        tuple(replace(moved, derived=(), tells=None) for moved in template.traffic),
        products_of(unit), waiting_of(unit, launched), routes(structure, name), arrays_of(unit),
    )  # fmt: skip


@lru_cache(maxsize=8192)
def _cached_live_sets(structure: Structure, family: Family, name: str, policy: IssuePolicy) -> tuple[Held, ...]:
    return KEPT.get(
        structure, policy, ("held", family, name), lambda: SHARED.of(derived_held(structure, family, name, policy))
    )


def derived_held(structure: Structure, family: Family, name: str, policy: IssuePolicy) -> tuple[Held, ...]:
    """The live tensors of a unit at those moments, from its derivation."""
    template = unit_template(structure, family, name, policy)
    return held_of(template, products_of(template.unit).operands)
