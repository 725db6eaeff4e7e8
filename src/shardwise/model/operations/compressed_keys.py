"""Keys that stand for several tokens each, and attention of all heads to one head of keys, which are its values as well.

A compressed key is the mean of m tokens, weighted by a softmax of learned logits; its tokens are a window of the sequence, or two
windows, of which the one before has projections of its own. Devices that split the sequence have whole windows of it. Where
windows overlap, the first compressed key of a segment reads the last window of the one before, which is gathered.

Source: DeepSeek-AI 2026 (DeepSeek-V4, section 2.3); `DeepseekV4Attention` of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from shardwise.model.operations.base import Dims, Operation, OperationKind, OperationSharding
from shardwise.model.operations.elementwise_and_indexing import Map
from shardwise.model.operations.recurrences import SEGMENT_AXES, SEGMENTS, segments_on_device, summed_axes
from shardwise.sharding import Axes, Spec
from shardwise.values import LocalDim, Polynomial, QuotientDim, multiply_symbols, sum_polynomials

WINDOWS = QuotientDim("T", "m")  # compressed keys of a sequence
COMPRESSED_SPAN = "compressed_span"  # symbol of the share of (query, compressed key) pairs with a score
PAIR = "v"  # dim of two: the projected tokens, and the logits of their weights


def _segment_axes(spec: Spec) -> Axes:
    return tuple(axis for axis in spec.axes_of(spec.dims[1]) if axis in SEGMENT_AXES)


def _window_rows(spec: Spec, dims: Dims) -> Spec:
    """Return the sharding of a tensor of tokens or windows with the sequence split over `SEGMENT_AXES` alone."""
    rows = {dims[0]: spec.axes_of(spec.dims[0]), dims[1]: _segment_axes(spec)}
    return Spec.of(dims, {dim: axes for dim, axes in rows.items() if dim in dims})


@dataclass(frozen=True, slots=True)
class FirstOfWindow(Operation):
    """Positions [T/m] of the first token of each window, of positions [T]."""

    kind: ClassVar[OperationKind] = "map"

    def propagate_sharding(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> OperationSharding:
        axes = tuple(axis for axis in specs[0].axes_of("T") if axis in SEGMENT_AXES)
        return OperationSharding((Spec.of(("T",), {"T": axes}),), (Spec.of((WINDOWS,), {WINDOWS: axes}),))


@dataclass(frozen=True, slots=True)
class LastWindow(Operation):
    """Projected tokens and logits of the last window of each segment [B, segments, 2, m, H], of both [B,T,H]; nothing where the
    sequence is in one part."""

    kind: ClassVar[OperationKind] = "map"

    def propagate_sharding(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> OperationSharding:
        x = _window_rows(specs[0], specs[0].dims)
        edge = Spec.of(dims[self.outputs[0]], {"B": x.axes_of("B"), SEGMENTS: _segment_axes(x)})
        return OperationSharding((x, x), (edge,))

    def num_parts(self, sharding: OperationSharding) -> Polynomial:
        return segments_on_device(sharding)


@dataclass(frozen=True, slots=True)
class CompressKeys(Operation):
    """Compressed keys [B,T/m,H] of tokens.

    Inputs: tokens and logits [B,T,H] of a window, and a bias [m,H] of the logits by the token's place in it. With `overlaps` also
    those of the window before, and the last window of all segments (`LastWindow`), which is required unsharded: the first
    compressed key of a sequence has no window before it. Tokens that fill no window are left out.
    """

    kind: ClassVar[OperationKind] = "map"
    overlaps: bool = False

    @property
    def missing_kernel(self) -> str:
        return "compressed keys"

    def propagate_sharding(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> OperationSharding:
        operands = [self._operand(spec, specs[0]) for spec in specs]
        reasons = ["" if SEGMENTS not in spec.dims else "the window of the segment before" for spec in specs]
        return OperationSharding(tuple(operands), (_window_rows(specs[0], dims[self.outputs[0]]),), tuple(reasons))

    @staticmethod
    def _operand(spec: Spec, tokens: Spec) -> Spec:
        if SEGMENTS in spec.dims:
            return Spec.of(spec.dims, {"B": tokens.axes_of("B")})
        return _window_rows(tokens, spec.dims) if "T" in spec.dims else Spec.of(spec.dims)

    def gradients(self, cotangents: Mapping[str, str], dims: Mapping[str, Dims]) -> list[tuple[str, Operation]]:
        dy = cotangents[self.outputs[0]]
        trained = self.inputs[:6] if self.overlaps else self.inputs
        outputs = tuple(f"?{position}" for position in range(len(trained)))
        if not self.overlaps:
            gradient = CompressKeysGradient((*self.inputs, dy), outputs)
            return [(name, gradient) for name in trained]
        edge = self.inputs[6]
        before = LastWindowGradient((*self.inputs, dy), ("?",), self.overlaps)
        gradient = CompressKeysGradient((*self.inputs, f"?{edge}", dy), outputs, self.overlaps)
        return [(edge, before), *((name, gradient) for name in trained)]


@dataclass(frozen=True, slots=True)
class LastWindowGradient(Operation):
    """The gradient of the last window of all segments, from the segment after each: a sum over segments; nothing where the
    sequence is in one part: (inputs of `CompressKeys`, dy) -> [B, segments, 2, m, H]."""

    kind: ClassVar[OperationKind] = "map"
    overlaps: bool = True

    def propagate_sharding(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> OperationSharding:
        *inputs, dy = specs
        forward = CompressKeys(self.inputs[:-1], ("",), self.overlaps).propagate_sharding(inputs, {"": dy.dims}, fixed)
        edge = next(spec for spec in forward.inputs if SEGMENTS in spec.dims)
        return OperationSharding((*forward.inputs, forward.outputs[0]), (edge.with_partial(_segment_axes(specs[0])),))

    def num_parts(self, sharding: OperationSharding) -> Polynomial:
        return multiply_symbols([LocalDim(SEGMENTS, SEGMENT_AXES)])


@dataclass(frozen=True, slots=True)
class CompressKeysGradient(Operation):
    """The gradients of tokens, logits and biases: (inputs of `CompressKeys`, with overlaps what the segment after wants of the
    last window, dy) -> them. Those of biases sum over windows."""

    kind: ClassVar[OperationKind] = "map"
    overlaps: bool = False

    def propagate_sharding(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> OperationSharding:
        num_inputs = 7 if self.overlaps else 3
        inputs, dy = specs[:num_inputs], specs[-1]
        forward = CompressKeys((), ("",), self.overlaps).propagate_sharding(inputs, {"": dy.dims}, fixed)
        edge_gradients = [
            Spec.of(spec.dims, {"B": inputs[0].axes_of("B"), SEGMENTS: _segment_axes(inputs[0])})
            for spec in specs[num_inputs:-1]
        ]
        tokens = forward.inputs[0]
        trained = forward.inputs[: num_inputs - self.overlaps]
        gradients = (spec if "T" in spec.dims else spec.with_partial(summed_axes(tokens, spec)) for spec in trained)
        return OperationSharding((*forward.inputs, *edge_gradients, forward.outputs[0]), tuple(gradients))


@dataclass(frozen=True, slots=True)
class SharedKeyScan(Operation):
    """Causal softmax attention of all heads to one head of keys, which are the values as well.

    Inputs: q[B,T,K,G,H] and keys [B,T,H], with `compressed` also compressed keys [B,T/m,H]; positions of the queries [T] and
    of the keys [T], and of the first tokens of compressed keys [T/m], which a query sees if it is not before their last one;
    with `has_sinks` sinks[K,G], logits of each head that no value goes with; with `is_sparse` the positions of the first
    tokens of the compressed keys that each query sees [B,T,s]. Outputs: attended values [B,T,K,G,H] and log-sum-exp
    [B,T,K,G]. Keys are needed unsharded along the sequence; heads and batch are independent.
    """

    kind: ClassVar[OperationKind] = "scan"
    compressed: bool = False
    has_sinks: bool = False
    is_sparse: bool = False

    @property
    def missing_kernel(self) -> str:
        return "attention of all heads to one head of keys"

    @property
    def num_keys(self) -> int:
        """Number of tensors of keys."""
        return 1 + self.compressed

    @property
    def sinks(self) -> tuple[str, ...]:
        first = 2 + 2 * self.num_keys
        return self.inputs[first : first + self.has_sinks]

    def propagate_sharding(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> OperationSharding:
        operands = _place_by_query(specs, self.num_keys)
        rows = {dim: operands[0].axes_of(dim) for dim in operands[0].dims[:-1]}
        return OperationSharding(operands, (operands[0], Spec.of(operands[0].dims[:-1], rows)))

    def gradients(self, cotangents: Mapping[str, str], dims: Mapping[str, Dims]) -> list[tuple[str, Operation]]:
        out, lse = self.outputs
        trained, num_positioned = self.inputs[: 1 + self.num_keys], 2 + 2 * self.num_keys
        selected = self.inputs[len(self.inputs) - self.is_sparse :]
        operands = (*self.inputs[:num_positioned], out, lse, cotangents[out], *selected)
        outputs = tuple(f"?{position}" for position in range(len(trained)))
        gradient = SharedKeyScanGradient(operands, outputs, self.compressed, self.is_sparse)
        sinks = [(name, Map((cotangents[out], out, lse, name), ("?",), "sink_share")) for name in self.sinks]
        return [*((name, gradient) for name in trained), *sinks]

    def flops(self, sharding: OperationSharding) -> Polynomial:
        """Return 2 FLOPs per element of the two products over the scores that are not masked."""
        return _shared_key_flops(sharding.inputs[: 1 + self.num_keys], num_products=2)


@dataclass(frozen=True, slots=True)
class SharedKeyScanGradient(Operation):
    """The gradients of queries and keys, from scores that are made again: (q, keys and positions as `SharedKeyScan` has them,
    output, lse, dy, the compressed keys that each query sees) -> (dq, dkeys, dcompressed).

    Those of keys sum over queries and heads, and are partial where these are split.
    """

    kind: ClassVar[OperationKind] = "scan"
    compressed: bool = False
    is_sparse: bool = False

    def propagate_sharding(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> OperationSharding:
        num_keys = 1 + self.compressed
        operands = _place_by_query(specs, num_keys)
        summed = tuple(axis for dim in operands[0].dims[1:-1] for axis in operands[0].axes_of(dim))
        return OperationSharding(
            operands, (operands[0], *(spec.with_partial(summed) for spec in operands[1 : 1 + num_keys]))
        )

    def flops(self, sharding: OperationSharding) -> Polynomial:
        """Return the FLOPs: scores again, their gradient, dq, and the keys' gradient as keys and as values."""
        return _shared_key_flops(sharding.inputs[: 2 + self.compressed], num_products=5)


def _place_by_query(specs: Sequence[Spec], num_keys: int) -> tuple[Spec, ...]:
    """Return the shardings of queries, keys, positions of both, and of what has a value for each query, next to queries that come
    in a sharding: keys have every token of their sequences."""
    queries = specs[0]
    axes = {dim: queries.axes_of(dim) for dim in queries.dims[:-1]}
    keys = {*range(1, 1 + num_keys), *range(2 + num_keys, 2 + 2 * num_keys)}
    return tuple(
        Spec.of(spec.dims, {d: a for d, a in axes.items() if d in spec.dims and (d == "B" or i not in keys)})
        for i, spec in enumerate(specs)
    )


def _shared_key_flops(operands: Sequence[Spec], *, num_products: int) -> Polynomial:
    queries, *keys = operands
    rows = [LocalDim(dim, queries.axes_of(dim)) for dim in queries.dims]
    return sum_polynomials(
        multiply_symbols([*rows, LocalDim(spec.dims[1], spec.axes_of(spec.dims[1])), share], 2.0 * num_products)
        for spec, share in zip(keys, ("span", COMPRESSED_SPAN), strict=False)
    )


SHARED_KEY_OPERATIONS = (SharedKeyScan, SharedKeyScanGradient)
COMPRESSION_OPERATIONS = (FirstOfWindow, LastWindow, LastWindowGradient, CompressKeys, CompressKeysGradient)
