"""Every part of a unit that costs something, read from its instructions and its derivation once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from shardwise.cost.formats import Products, Saved, products_of, waiting_of
from shardwise.cost.kept import KEPT
from shardwise.cost.shared import Shared
from shardwise.cost.workspace import Held, held_of
from shardwise.derive.derivation import Unit, own_family, routes
from shardwise.derive.products import weights_of_products
from shardwise.derive.shardings import state_rest, weight_use
from shardwise.derive.walk import Compute
from shardwise.issuing import IssuePolicy
from shardwise.layout.family import Family
from shardwise.lowering.control import CONTROL_UNIT
from shardwise.lowering.flat import FlatArrays, share_of
from shardwise.lowering.kernels import Kernel
from shardwise.lowering.template import unit_template
from shardwise.lowering.traffic import Traffic
from shardwise.lowering.weights import weight_groups
from shardwise.model.architecture import Structure
from shardwise.model.matrices import matrices
from shardwise.model.operations import OfMatrix
from shardwise.model.program import Role
from shardwise.model.update import weight_of
from shardwise.optimizer.table import optimizer_named
from shardwise.symbolic import ZERO, Polynomial, Value, Values, maximum, minimum, total, where

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
    return _held(structure, priced_family(structure, family, name), name, policy)


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
def _held(structure: Structure, family: Family, name: str, policy: IssuePolicy) -> tuple[Held, ...]:
    return KEPT.get(
        structure, policy, ("held", family, name), lambda: SHARED.of(derived_held(structure, family, name, policy))
    )


def derived_held(structure: Structure, family: Family, name: str, policy: IssuePolicy) -> tuple[Held, ...]:
    """The live tensors of a unit at those moments, from its derivation."""
    template = unit_template(structure, family, name, policy)
    return held_of(template, products_of(template.unit).operands)
