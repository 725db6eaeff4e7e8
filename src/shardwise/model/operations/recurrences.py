"""Recurrences over the sequence: linear attention, the gated delta rule, state space models, gated linear recurrences.

A head has a state S [N, X]; a token decays it, adds its key's and value's outer product, and reads it with its query:

    S' = exp(decay_t) S          additive: S = S' + k_t v_t^T          delta: S = S' + k_t beta_t (v_t - S'^T k_t)^T
    output_t = S^T q_t

An elementwise recurrence has no keys: its state is as wide as a value, S = S' + v_t with a decay for each element, and is the
output itself.

Devices that split the sequence have a segment of it each. Each computes what its segment makes of a state (`SegmentState`): the
state that it leaves when it starts from zero, and the transition that a state before it goes through. These are gathered, and
each device starts from the state that the segments before its own leave (`Recurrence`). In the backward pass each computes the
gradient of the state before its segment (`SegmentAdjoint`); these are gathered too, and each device starts from the gradient of
its last state by the segments after its own (`RecurrenceGradient`).

Sources: Katharopoulos et al. 2020 (linear attention); De et al. 2024 (RG-LRU, arXiv 2402.19427); Dao and Gu 2024 (Mamba-2,
arXiv 2405.21060); Yang et al. 2024 (Gated DeltaNet, arXiv 2412.06464); Kimi Team 2025 (Kimi Linear, arXiv 2510.26692); Sun et
al. 2025 (LASP-2, arXiv 2502.07563), which gathers the states of the segments; flash-linear-attention, ops/cp, which does so for
the delta rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from shardwise.model.operations.base import Dims, Operation, OperationKind, OperationSharding
from shardwise.sharding import Axes, Spec
from shardwise.values import LocalDim, Polynomial, SegmentDim, multiply_symbols, sum_polynomials
from shardwise.values.symbolic import FewestElements, Symbol

UpdateRule = Literal["additive", "delta", "elementwise"]
HAS_KEYS: Mapping[UpdateRule, bool] = {"additive": True, "delta": True, "elementwise": False}
MISSING_KERNELS: Mapping[UpdateRule, str] = {
    "additive": "a state space recurrence", "delta": "the delta rule of linear attention",
    "elementwise": "a gated linear recurrence",
}  # fmt: skip
SEGMENT_AXES: Axes = ("cp",)  # axes over which a sequence is split in segments; over all others it is gathered
SEGMENTS = SegmentDim(SEGMENT_AXES)
# Tokens of a chunk, within which products take the place of the recurrence.
CHUNK = FewestElements(("c",), ("T",))
# Products of a gradient, over those of its forward operation: two for each, and once more for states and scores, which are
# computed again (as in flash-linear-attention and mamba_ssm).
GRADIENT_PRODUCTS = 3.0


class ProductCounts(NamedTuple):
    """Products of a chunked recurrence, for each token and head: C is the tokens of a chunk.

    `over_keys` (C N elements) and `over_values` (C X) are those within a chunk, `over_state` (N X) those that read or write a
    state, `over_transition` (N N) those with a segment's matrix. `shared_scores` (C N) are made once for heads that share keys.
    """

    shared_scores: int = 0
    over_keys: int = 0
    over_values: int = 0
    over_state: int = 0
    over_transition: int = 0


# Additive: scores, and values by scores; the state written, and read. Delta rule: scores of keys, the inverse of the chunk's
# triangular system applied to them, scores of queries; the inverse applied to values, values by scores; the state read by keys,
# written, and read by queries. The transition of a segment is a state that keys read and write.
FORWARD_PRODUCTS: Mapping[UpdateRule, ProductCounts] = {
    "additive": ProductCounts(shared_scores=1, over_values=1, over_state=2),
    "delta": ProductCounts(over_keys=3, over_values=2, over_state=3),
    "elementwise": ProductCounts(),
}
SEGMENT_PRODUCTS: Mapping[UpdateRule, ProductCounts] = {
    "additive": ProductCounts(over_state=1),
    "delta": ProductCounts(over_keys=2, over_values=1, over_state=2, over_transition=2),
    "elementwise": ProductCounts(),
}
# Additive: queries by the output's gradient. Delta rule: as forward, without values.
ADJOINT_PRODUCTS: Mapping[UpdateRule, ProductCounts] = {
    "additive": ProductCounts(over_state=1),
    "delta": ProductCounts(over_keys=3, over_values=1, over_state=3),
    "elementwise": ProductCounts(),
}


@dataclass(frozen=True, slots=True)
class SequenceRecurrence(Operation):
    """The dims and the sharding that a recurrence, its segments' states and their gradients share.

    `value` is the width of a value, `key` that of a key, and `column` as wide; a key or query without some of the value's heads
    serves all of them. Batch and heads are independent. The widths are required unsharded, and the sequence may be split over
    `SEGMENT_AXES` alone. An elementwise recurrence has no key and no query, and all dims of its values are independent.
    `has_rates`: the logarithm of a decay is -exp(rate) * step. Steps are in place of the decays, and the
    operand after them has the rates, of each head or of each row of its state, so that no decay of each row is written.
    """

    kind: ClassVar[OperationKind] = "recurrence"
    rule: UpdateRule = "additive"
    sequence: str = "T"
    key: str = "N"
    value: str = "X"
    column: str = "n"
    has_rates: bool = False

    @property
    def missing_kernel(self) -> str:
        return MISSING_KERNELS[self.rule]

    @property
    def has_keys(self) -> bool:
        """True if keys write the state and queries read it."""
        return HAS_KEYS[self.rule]

    @property
    def value_position(self) -> int:
        """Position of the values among the inputs: behind queries and keys, where there are any."""
        return 2 if self.has_keys else 0

    def heads(self, values: Spec) -> Dims:
        """Return the dims of the values between the sequence and the width; of an elementwise recurrence all after it."""
        widths = (self.key, self.value) if self.has_keys else ()
        return tuple(dim for dim in values.dims[1:] if dim not in (self.sequence, *widths))

    def sharding_of(self, values: Spec, dims: Dims) -> Spec:
        """Return the sharding of an operand with these dims, next to values that come in a sharding."""
        rows = {dim: values.axes_of(dim) for dim in (values.dims[0], *self.heads(values))}
        rows[self.sequence] = tuple(axis for axis in values.axes_of(self.sequence) if axis in SEGMENT_AXES)
        return Spec.of(dims, {dim: axes for dim, axes in rows.items() if dim in dims})

    def segment_sharding(self, values: Spec, dims: Dims, *, gathered: bool) -> Spec:
        """Return the sharding of states or transitions, each device with its own segment's or with all."""
        spec = self.sharding_of(values, dims)
        if gathered:
            return spec
        return spec.with_axes(SEGMENTS, self.sharding_of(values, values.dims).axes_of(self.sequence))

    def products(self, values: Spec, keys: Spec, counts: ProductCounts) -> Polynomial:
        """Return the FLOPs of the products of a chunked recurrence: 2 per element of each, over whole chunks.

        A recurrence without a width of keys or of values has no products.
        """
        if not self.has_keys or self.key not in keys.dims or self.value not in values.dims:
            return Polynomial()
        rows = [LocalDim(dim, values.axes_of(dim)) for dim in values.dims if dim != self.value]
        key_rows = [LocalDim(dim, keys.axes_of(dim)) for dim in keys.dims if dim != self.key]
        n, x = LocalDim(self.key, ()), LocalDim(self.value, ())
        products: tuple[tuple[int, list[Symbol]], ...] = (
            (counts.shared_scores, [*key_rows, CHUNK, n]),
            (counts.over_keys, [*rows, CHUNK, n]),
            (counts.over_values, [*rows, CHUNK, x]),
            (counts.over_state, [*rows, n, x]),
            (counts.over_transition, [*rows, n, n]),
        )
        return sum_polynomials(multiply_symbols(symbols, 2.0 * count) for count, symbols in products if count)


@dataclass(frozen=True, slots=True)
class Recurrence(SequenceRecurrence):
    """Outputs [B, T, *heads, X] of a recurrence over the sequence.

    Inputs: queries and keys [B, T, *heads, N], which may lack heads; values [B, T, *heads, X]; the logarithms of the decays, for
    each head or each row of its state; with the delta rule beta [B, T, *heads]; and states and transitions of all segments
    (`SegmentState`), which are required unsharded: they are gathered over `SEGMENT_AXES`. An elementwise recurrence reads values
    and decays alone. `scales_queries`: queries are divided by the square root of their width.
    """

    scales_queries: bool = False

    def propagate_sharding(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> OperationSharding:
        values = specs[self.value_position]
        *tokens, states, transitions = specs
        operands = [self.sharding_of(values, spec.dims) for spec in tokens]
        segments = [self.segment_sharding(values, spec.dims, gathered=True) for spec in (states, transitions)]
        reasons = (*("" for _ in tokens), *("the states of the segments before",) * len(segments))
        return OperationSharding((*operands, *segments), (operands[self.value_position],), reasons)

    def gradients(self, cotangents: Mapping[str, str], dims: Mapping[str, Dims]) -> list[tuple[str, Operation]]:
        *tokens, states, _ = self.inputs
        dy, shared = (
            cotangents[self.outputs[0]],
            (self.rule, self.sequence, self.key, self.value, self.column, self.has_rates),
        )
        without_values = tuple(name for name in tokens if name != self.inputs[self.value_position])
        adjoint = SegmentAdjoint((*without_values, dy), ("?",), *shared, self.scales_queries)
        outputs = tuple(f"?{position}" for position in range(len(tokens)))
        gradient = RecurrenceGradient((*self.inputs, f"?{states}", dy), outputs, *shared, self.scales_queries)
        return [(states, adjoint), *((name, gradient) for name in tokens)]

    def flops(self, sharding: OperationSharding) -> Polynomial:
        return self.products(sharding.inputs[self.value_position], sharding.inputs[1], FORWARD_PRODUCTS[self.rule])


@dataclass(frozen=True, slots=True)
class RecurrenceGradient(SequenceRecurrence):
    """The gradients of queries, keys, values, decays and beta: (inputs of a recurrence, adjoints of all segments, dy) -> them.

    Those of operands that lack heads sum over these heads.
    """

    scales_queries: bool = False

    def propagate_sharding(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> OperationSharding:
        values = specs[self.value_position]
        *tokens, states, transitions, adjoints, dy = specs
        operands = [self.sharding_of(values, spec.dims) for spec in tokens]
        segments = [self.segment_sharding(values, s.dims, gathered=True) for s in (states, transitions, adjoints)]
        gradients = tuple(spec.with_partial(summed_axes(operands[self.value_position], spec)) for spec in operands)
        before, after = "the states of the segments before", "what the segments after want of the state"
        reasons = (*("" for _ in tokens), before, before, after, "")
        return OperationSharding((*operands, *segments, self.sharding_of(values, dy.dims)), gradients, reasons)

    def flops(self, sharding: OperationSharding) -> Polynomial:
        values = sharding.inputs[self.value_position]
        return self.products(values, sharding.inputs[1], FORWARD_PRODUCTS[self.rule]) * GRADIENT_PRODUCTS


@dataclass(frozen=True, slots=True)
class SegmentState(SequenceRecurrence):
    """The state and the transition of each segment of the sequence; nothing where the sequence is in one part.

    Inputs: keys, values, the logarithms of decays, and with the delta rule beta. Outputs: the state that a segment leaves when it
    starts from zero [B, segments, *heads, N, X], and its transition: the product of the decays, with their dims, or with the
    delta rule a matrix [B, segments, *heads, N, n] (n as wide as N). An elementwise recurrence has no keys and no N.
    """

    @property
    def value_position(self) -> int:
        return 1 if self.has_keys else 0

    def propagate_sharding(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> OperationSharding:
        values = specs[self.value_position]
        results = tuple(self.segment_sharding(values, dims[name], gathered=False) for name in self.outputs)
        return OperationSharding(tuple(self.sharding_of(values, spec.dims) for spec in specs), results)

    def flops(self, sharding: OperationSharding) -> Polynomial:
        """Return the FLOPs of the products of chunks; none where the sequence is in one part."""
        values = sharding.inputs[self.value_position]
        flops = self.products(values, sharding.inputs[0], SEGMENT_PRODUCTS[self.rule])
        return flops * self.num_parts(sharding)

    def num_parts(self, sharding: OperationSharding) -> Polynomial:
        return segments_on_device(sharding)


@dataclass(frozen=True, slots=True)
class SegmentAdjoint(SequenceRecurrence):
    """The gradient of the state before each segment, from the outputs of the segment alone; nothing where the sequence is in one
    part: (queries, keys, decays, beta with the delta rule, dy) -> [B, segments, *heads, N, X]."""

    scales_queries: bool = False

    def propagate_sharding(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> OperationSharding:
        dy = specs[-1]
        operands = tuple(self.sharding_of(dy, spec.dims) for spec in specs)
        return OperationSharding(operands, (self.segment_sharding(dy, dims[self.outputs[0]], gathered=False),))

    def flops(self, sharding: OperationSharding) -> Polynomial:
        """Return the FLOPs of the products of chunks; none where the sequence is in one part."""
        flops = self.products(sharding.inputs[-1], sharding.inputs[1], ADJOINT_PRODUCTS[self.rule])
        return flops * self.num_parts(sharding)

    def num_parts(self, sharding: OperationSharding) -> Polynomial:
        return segments_on_device(sharding)


RECURRENCE_OPERATIONS = (Recurrence, RecurrenceGradient, SegmentState, SegmentAdjoint)


def segments_on_device(sharding: OperationSharding) -> Polynomial:
    """Return the number of segments on one device: 1, or 0 where the sequence is in one part."""
    specs = (*sharding.outputs, *sharding.inputs)
    spec = next(spec for spec in specs if SEGMENTS in spec.dims)
    return multiply_symbols([LocalDim(SEGMENTS, spec.axes_of(SEGMENTS))])


def summed_axes(gradient: Spec, operand: Spec) -> Axes:
    """Return the axes that split dims of `gradient` and no dim of `operand`, whose own gradient is a partial sum over them."""
    return tuple(axis for dim in gradient.dims for axis in gradient.axes_of(dim) if axis not in operand.sharded_axes)
