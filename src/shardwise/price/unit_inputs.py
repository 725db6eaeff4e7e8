"""All of a unit that costs something, read once from its instructions and its derivation, and its largest sets of live
tensors.

`unit_cost_inputs` has the kernels, collectives and flat arrays of a unit, `unit_live_sets` the live tensors of its
backward pass at the nodes that may be the peak: derived for an engine that runs the derived operations one after the
other; other engines take a share of the unit's activations (`unit_memory.py`). Both are expressions, cached in the
process and on disk (`derivation_cache.py`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import NamedTuple

from shardwise.derive import ComputeStep, ShardedUnit, weight_use_spec
from shardwise.derive.low_precision_products import ProductOperand, product_weights
from shardwise.derive.producer_casts import ProducedOperand
from shardwise.derive.tensor_specs import state_resting_spec
from shardwise.layout import ShardingScheme
from shardwise.model import MatrixFunction, ModelStructure, Role, get_optimizer, owning_weight, weight_matrices
from shardwise.model.decoder import routes_tokens
from shardwise.model.layer_pattern import is_layer
from shardwise.price.derivation_cache import CACHE, Interner
from shardwise.price.tensor_formats import (
    ProductOperands,
    SavedElements,
    SavedTensors,
    TensorFormats,
    read_products,
    weight_grad_inputs,
)
from shardwise.sharding import Axes, Spec
from shardwise.step import Kernel, UnitCollective, UnitInstructions
from shardwise.step.collectives import CONTROL_UNIT
from shardwise.step.flat_arrays import FlatArrays, shard_fraction, weight_groups
from shardwise.step.liveness import LiveSet, live_sets
from shardwise.step.unit_instructions import lower_unit
from shardwise.values import (
    ZERO,
    IssuePolicy,
    Polynomial,
    SymbolValues,
    Value,
    maximum,
    minimum,
    sum_polynomials,
    where,
)

# Bytes of a score that the backward pass reads where attention is not fused: softmax's result (2) and, with dropout, its result
# (2) and its mask (1). Source: Korthikanti et al. 2022, 4.1. What was read last has a gradient (2) by then.
SAVED_SCORE_BYTES: Mapping[bool, float] = {False: 2.0, True: 5.0}  # by whether there is dropout
SCORE_GRADIENT_BYTES = 2.0


class ConditionalTensor(NamedTuple):
    """A tensor that is live only where the group of devices along `over`, and the number of `rows` if given, is more
    than one."""

    saved: SavedElements
    over: Axes
    rows: Polynomial | None

    def num_bytes(self, formats: TensorFormats, values: SymbolValues) -> Value:
        """Return its bytes; 0 where it is not live."""
        is_live = values.group_degree(self.over) > 1
        if self.rows is not None:
            is_live = is_live & (self.rows.evaluate(values) > 1)
        return formats.saved_bytes([self.saved], values) * is_live


class LiveSetSizes(NamedTuple):
    """Live tensors of a node, with sizes as expressions.

    `gradients` are elements of weight gradients in flight, `has_weight_grads`: some were made by then;
    `score_bytes`: bytes of each attention score, where scores are written to memory.
    """

    tensors: tuple[SavedElements, ...]
    conditional: tuple[ConditionalTensor, ...]
    gradients: Polynomial
    has_weight_grads: bool
    score_bytes: float


def maximal_live_sets(
    unit_instructions: UnitInstructions,
    operands: Iterable[ProductOperand],
    produced: Iterable[ProducedOperand] = (),
    *,
    dropout: bool = False,
) -> tuple[LiveSetSizes, ...]:
    """Return the live sets of a unit's backward pass that may be the peak: those that no other one contains."""
    keys = SavedTensors(unit_instructions.unit, operands, produced)
    fullest: list[LiveSetSizes] = []
    for moment in live_sets(unit_instructions):
        sizes = _live_set_sizes(moment, keys, dropout=dropout)
        if not any(_dominates(rival, sizes) for rival in fullest):
            fullest = [rival for rival in fullest if not _dominates(sizes, rival)] + [sizes]
    return tuple(fullest)


def _live_set_sizes(moment: LiveSet, keys: SavedTensors, *, dropout: bool) -> LiveSetSizes:
    tensors_by_condition: dict[tuple[Axes, Spec | None], list[tuple[str, Spec]]] = {}
    for tensor in moment.parts:
        tensors_by_condition.setdefault((tensor.over, tensor.rows), []).append((tensor.name, tensor.spec))
    tensors = keys.saved(tensors_by_condition.pop(((), None), []))
    conditional = tuple(
        ConditionalTensor(saved, over, rows.local_elements() if rows else None)
        for (over, rows), parts in tensors_by_condition.items()
        for saved in keys.saved(parts)
    )
    gradients = sum_polynomials(spec.local_elements() for spec in moment.gradients)
    return LiveSetSizes(
        tensors, conditional, gradients, moment.has_weight_grads,
        SAVED_SCORE_BYTES[dropout] * moment.scores + SCORE_GRADIENT_BYTES * moment.gradient_of_scores,
    )  # fmt: skip


def _dominates(larger: LiveSetSizes, smaller: LiveSetSizes) -> bool:
    """Return True if a live set holds at least as much as another of everything, at any sizes."""
    largest = _coefficients(larger)
    return all(largest.get(key, 0.0) >= amount for key, amount in _coefficients(smaller).items())


def _coefficients(sizes: LiveSetSizes) -> Mapping[object, float]:
    """Return the coefficients of a live set's sizes, by what they multiply."""
    coefficients: dict[object, float] = {"scores": sizes.score_bytes, "makes": sizes.has_weight_grads}
    coefficients |= {monomial.factors: monomial.coefficient for monomial in sizes.gradients.monomials}
    for saved, over, rows in (*((tensor, (), None) for tensor in sizes.tensors), *sizes.conditional):
        kind = saved._replace(elements=Polynomial()), over, rows
        coefficients |= {(kind, monomial.factors): monomial.coefficient for monomial in saved.elements.monomials}
    return coefficients


INTERNER = Interner()


class StateElements(NamedTuple):
    """Elements of a unit's weights on one device, numbers or expressions.

    `used` and `resting` are the weights as used and as they rest, `cast` of the latter what products read in a narrow format,
    where a recipe has one. Of trained weights: `trained` as used, `shard` as the optimizer has them, `passing` as used
    without experts', `last` both used and shard of the array whose gradients are ready last. `apart`: of the shard what an
    optimizer of matrices leaves to another (`Optimizer.fallback`). `together`: the largest array of matrices that are updated
    whole, and one device's part of it. `factors`: the numbers that moments have for rows and columns. `quantized` and
    `gathered_quantized`: of `resting` and of `used` the frozen weights that products read. `kept`: weights whose casts are kept
    during a step.
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
    quantized: Value
    gathered_quantized: Value
    kept: Value


class WeightArrays(NamedTuple):
    """Weights of a unit that move alike, as flat arrays.

    Elements without padding: all `elements`, those `passing` (no experts), those of `matrices`, those that block
    products read (`cast`) and those whose casts are `kept`, and the `factors`, what moments have for rows and columns.
    `steps`: FLOPs of what an optimizer computes from each as a whole matrix; only devices with a part of it do.
    """

    flat: FlatArrays
    elements: Polynomial
    passing: Polynomial
    trained: bool
    gathers: bool
    matrices: Polynomial
    factors: Polynomial
    cast: Polynomial
    kept: Polynomial
    steps: tuple[Polynomial, ...]


class ArraySizes(NamedTuple):
    """Elements of one group of arrays: all, one device's part, and the subsets of `WeightArrays`."""

    total: Value
    shard: Value
    passing: Value
    apart: Value
    factors: Value
    cast: Value
    gathered_cast: Value
    kept: Value


def weight_arrays(unit: ShardedUnit, policy: IssuePolicy) -> tuple[WeightArrays, ...]:
    """Return the arrays of a unit's own weights, in the order in which the last of their gradients are ready."""
    dims, order = unit.weights, [*reversed(unit.forward.program.weights)]
    matrices = weight_matrices(unit.forward.program, tables=get_optimizer(unit.scheme.optimizer).covers_vocabulary)
    update = unit.update.program
    factors = update.names_with_role(Role.FACTOR)
    flops = _whole_matrix_flops(unit)
    narrow = product_weights(unit.forward.steps, unit.tensors)
    groups = [group for group in weight_groups(unit) if not dims.keys().isdisjoint(group.weights)]
    arrays = []
    for group in sorted(groups, key=lambda candidate: max(map(order.index, candidate.weights))):
        used = {name: weight_use_spec(unit.scheme, dims[name]).local_elements() for name in group.weights}
        passing = sum_polynomials(elements for name, elements in used.items() if "E" not in dims[name])
        gathers = bool(group.sync.gather)
        matrix_elements = sum_polynomials(elements for name, elements in used.items() if name in matrices)
        used_factors = (name for name in factors if name in update.inputs and owning_weight(name) in used)
        specs = (state_resting_spec(unit.scheme, dims[owning_weight(name)], update.dims(name)) for name in used_factors)
        factor_elements = sum_polynomials(spec.local_elements() for spec in specs)
        cast = sum_polynomials(elements for name, elements in used.items() if name in narrow)
        kept_elements = cast if policy.weight_casts == "each_step" and not gathers else ZERO
        steps = tuple(flops.get(name, ZERO) for name in group.array_weights) if flops and group.trained else ()
        arrays.append(
            WeightArrays(
                group.arrays, sum_polynomials(used.values()), passing, group.trained, gathers, matrix_elements,
                factor_elements, cast, kept_elements, steps,
            )
        )  # fmt: skip
    return tuple(arrays)


def _lent_gradients(unit: ShardedUnit) -> Polynomial:
    """Return the elements of the gradients of weights that a unit borrows, before their owners reduce them."""
    program = unit.forward.program
    weights = (name for name in program.borrowed if not program.tensors[name].frozen)
    return sum_polynomials(weight_use_spec(unit.scheme, program.dims(name)).local_elements() for name in weights)


def _whole_matrix_flops(unit: ShardedUnit) -> dict[str, Polynomial]:
    """Return by weight the FLOPs of functions of the whole matrix whose results are not kept."""
    flops: dict[str, Polynomial] = {}
    for step in unit.update.steps:
        if isinstance(step, ComputeStep) and isinstance(step.operation, MatrixFunction) and not step.operation.is_state:
            weight = owning_weight(step.operation.outputs[0])
            flops[weight] = flops.get(weight, ZERO) + step.operation.flops(step.placed)
    return flops


def largest_update_share(arrays: Sequence[WeightArrays], values: SymbolValues) -> Value:
    """Return the largest share of whole-matrix update work (Muon) that any device does."""
    amounts = [array.flat.largest_and_total(array.steps, values) for array in arrays if array.steps]
    total = sum((total for _, total in amounts), start=0.0)
    return sum((largest for largest, _ in amounts), start=0.0) / maximum(total, 1.0)


def state_expressions(arrays: Sequence[WeightArrays]) -> StateElements:
    """Return the state of a unit as expressions, without padding."""
    shares = [shard_fraction(array.flat.shard_axes) for array in arrays]
    sizes = (
        ArraySizes(
            array.elements, array.elements * share, array.passing, (array.elements + array.matrices * -1.0) * share,
            array.factors, array.cast * share if array.gathers else array.cast, array.cast,
            array.kept,
        )
        for array, share in zip(arrays, shares, strict=True)
    )  # fmt: skip
    sized_arrays = list(zip(arrays, sizes, strict=True))
    ready_last = [size.total + size.shard for array, size in sized_arrays if array.trained][-1:]
    whole_arrays = [size.total + size.shard for array, size in sized_arrays if array.trained and array.matrices]
    return _sum_state(sized_arrays, sum_polynomials(ready_last), sum_polynomials(whole_arrays), ZERO)


def state_elements(arrays: Sequence[WeightArrays], values: SymbolValues, max_elements: float) -> StateElements:
    """Return the state of a unit in numbers, padding included; an array holds at most `max_elements`."""
    sized_arrays, ready_last, largest_array = [], 0.0, 0.0
    for array in arrays:
        padded = array.flat.evaluate(values, max_elements).elements
        shard = padded / values.group_degree(array.flat.shard_axes)
        apart = (array.elements + array.matrices * -1.0).evaluate(values) / values.group_degree(array.flat.shard_axes)
        gathered = array.cast.evaluate(values)
        cast = gathered / (values.group_degree(array.flat.shard_axes) if array.gathers else 1)
        kept_elements = array.kept.evaluate(values)
        factors, passing = array.factors.evaluate(values), array.passing.evaluate(values)
        sized_arrays.append((array, ArraySizes(padded, shard, passing, apart, factors, cast, gathered, kept_elements)))
        if array.trained:  # arrays that others have joined have no elements
            ready_last = where(padded > 0, padded + shard, ready_last)
        if array.trained and array.matrices:
            largest = minimum(padded, max_elements) if array.flat.bucketed else padded  # one bucket at a time
            largest_array = maximum(largest_array, largest + minimum(shard, largest))
    return _sum_state(sized_arrays, ready_last, largest_array, 0.0)


def _sum_state(
    sized_arrays: Sequence[tuple[WeightArrays, ArraySizes]], ready_last: Value, largest_array: Value, zero: Value
) -> StateElements:
    trained = [size for array, size in sized_arrays if array.trained]
    frozen = [size for array, size in sized_arrays if not array.trained]
    return StateElements(
        sum((size.total for _, size in sized_arrays), start=zero),
        sum((size.shard if array.gathers else size.total for array, size in sized_arrays), start=zero),
        sum((size.total for size in trained), start=zero), sum((size.shard for size in trained), start=zero),
        sum((size.passing for size in trained), start=zero), ready_last,
        sum((size.apart for size in trained), start=zero), largest_array,
        sum((size.factors for size in trained), start=zero), sum((size.cast for _, size in sized_arrays), start=zero),
        sum((size.cast for size in frozen), start=zero), sum((size.gathered_cast for size in frozen), start=zero),
        sum((size.kept for _, size in sized_arrays), start=zero),
    )  # fmt: skip


class UnitCostInputs(NamedTuple):
    """Everything in a unit that costs something, taken from its derivation once, without a reference to it."""

    kernels: tuple[Kernel, ...]
    collectives: tuple[UnitCollective, ...]
    products: ProductOperands
    weight_grad_inputs: tuple[SavedElements, ...]
    routed: bool
    arrays: tuple[WeightArrays, ...]
    lent_gradients: Polynomial  # elements, as used, of trained weights that other units own

    def is_routed(self, phase: str) -> bool:
        """Return True if a phase launches products of experts, whose sizes the host reads from the router's counts.

        The backward pass of a policy that only recomputes elementwise results has the counts of the forward pass.
        """
        return self.routed and any(
            kernel.phase == phase and kernel.kind == "contract" and Role.ROUTED in kernel.elements
            for kernel in self.kernels
        )

    @property
    def state(self) -> StateElements:
        """Elements of its weights, as expressions."""
        return state_expressions(self.arrays)

    @property
    def state_collectives(self) -> tuple[UnitCollective, ...]:
        """Collectives that move weights and gradients, and control collectives."""
        return tuple(collective for collective in self.collectives if collective.moves_weights or collective.is_control)

    @property
    def state_key(self) -> Hashable:
        """Key that is equal for two units whose state, update and weight communication cost the same at any sizes."""
        update = tuple((kernel.flops, *kernel.elements.items()) for kernel in self.kernels if kernel.phase == "update")
        return self.state_collectives, update, self.products.narrow, self.arrays, self.lent_gradients


def chunked_groups(
    collectives: Iterable[UnitCollective], kernels: Sequence[Kernel]
) -> Iterator[tuple[list[UnitCollective], list[Kernel]]]:
    """Yield the collectives that run in chunks beside the same kernels, with these kernels."""
    groups: dict[tuple[str, tuple[str, ...]], list[UnitCollective]] = {}
    for collective in collectives:
        if collective.chunked_with:
            groups.setdefault((collective.phase, collective.chunked_with), []).append(collective)
    for (phase, results), members in groups.items():
        yield members, [k for k in kernels if k.phase == phase and not set(k.outputs).isdisjoint(results)]


def first_alike(structure: ModelStructure, unit: str) -> str:
    """Return the first kind of layer of a model with the structure of a unit: derivations read no sizes and no windows.

    >>> from dataclasses import replace
    >>> from shardwise.model import load_model
    >>> kinds = {"window": {"sliding_window": 1024}, "mlp": {"mixer": "none"}}
    >>> model = replace(load_model("llama-3-8b"), layer_kinds=kinds, layer_pattern=("block", "window", "mlp", "block"))
    >>> [first_alike(model.structure, unit) for unit in ("block", "window", "mlp", "head")]
    ['window', 'window', 'mlp', 'head']
    """
    return _first_alike(structure, unit) if structure.kinds and is_layer(unit) else unit


@lru_cache(maxsize=1024)
def _first_alike(structure: ModelStructure, unit: str) -> str:
    layer = _without_kinds(structure.unit_structure(unit))
    return next(kind for kind in structure.layer_units if _without_kinds(structure.unit_structure(kind)) == layer)


def _without_kinds(structure: ModelStructure) -> ModelStructure:
    """Return what a layer's program depends on: neither the model's other kinds nor what follows the layers."""
    return replace(structure, kinds=(), predict=False)


def priced_scheme(scheme: ShardingScheme, name: str) -> ShardingScheme:
    """Return the scheme with only what a unit's cost depends on: the memo key of its inputs.

    The step's control collectives, which one unit carries, depend on all units.
    """
    unit_scheme = scheme.for_unit(name)
    if name != CONTROL_UNIT:
        return unit_scheme
    return replace(unit_scheme, whole_experts=scheme.whole_experts, shares_amax=scheme.shares_amax)


def unit_cost_inputs(scheme: ShardingScheme, name: str, policy: IssuePolicy) -> UnitCostInputs:
    """Return the cost inputs of a unit in a layout of this scheme under a policy; kinds of layers that differ in sizes alone
    share those of the first of them."""
    return _cached_cost_inputs(priced_scheme(scheme, name), first_alike(scheme.structure, name), policy)


def unit_live_sets(scheme: ShardingScheme, name: str, policy: IssuePolicy) -> tuple[LiveSetSizes, ...]:
    """Return the live sets of a unit's backward pass that may be the peak."""
    return _cached_live_sets(priced_scheme(scheme, name), first_alike(scheme.structure, name), policy)


# Three memo levels: `lru_cache` in the process, `CACHE` on disk, and `INTERNER`, which makes equal parts one object, so that
# prices can be cached by identity. `priced_scheme` is the key of all three: a field that it drops, but that a cost depends on,
# is a wrong price, not a miss.
@lru_cache(maxsize=8192)
def _cached_cost_inputs(scheme: ShardingScheme, name: str, policy: IssuePolicy) -> UnitCostInputs:
    derive = partial(derive_cost_inputs, scheme, name, policy)
    return CACHE.get(scheme.structure, policy, ("parts", scheme, name), lambda: INTERNER.of(derive()))


def derive_cost_inputs(scheme: ShardingScheme, name: str, policy: IssuePolicy) -> UnitCostInputs:
    """Derive the cost inputs of a unit."""
    unit_instructions = lower_unit(scheme, name, policy)
    unit, kernels = unit_instructions.unit, unit_instructions.kernels
    products = read_products(unit, policy)
    return UnitCostInputs(
        tuple(replace(kernel, steps=()) for kernel in kernels),
        tuple(replace(collective, derived=(), counts_rows_of=None) for collective in unit_instructions.collectives),
        products._replace(kept=_kept_weights(unit, policy)), weight_grad_inputs(unit, kernels, products.produced),
        routes_tokens(scheme.structure, name), weight_arrays(unit, policy), _lent_gradients(unit),
    )  # fmt: skip


def _kept_weights(unit: ShardedUnit, policy: IssuePolicy) -> frozenset[str]:
    """Return the weights of products that rest whole, where their casts are kept during a step."""
    if policy.weight_casts == "each_use":
        return frozenset()
    ungathered = (name for group in weight_groups(unit) if not group.sync.gather for name in group.weights)
    return product_weights(unit.forward.steps, unit.tensors) & frozenset(ungathered)


@lru_cache(maxsize=8192)
def _cached_live_sets(scheme: ShardingScheme, name: str, policy: IssuePolicy) -> tuple[LiveSetSizes, ...]:
    derive = partial(derive_live_sets, scheme, name, policy)
    return CACHE.get(scheme.structure, policy, ("held", scheme, name), lambda: INTERNER.of(derive()))


def derive_live_sets(scheme: ShardingScheme, name: str, policy: IssuePolicy) -> tuple[LiveSetSizes, ...]:
    """Derive the live sets of a unit that may be the peak."""
    unit_instructions = lower_unit(scheme, name, policy)
    products = read_products(unit_instructions.unit, policy)
    return maximal_live_sets(unit_instructions, products.operands, products.produced, dropout=policy.dropout)
