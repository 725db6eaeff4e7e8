"""Operations with matrix products: einsums of one or two operands, attention and its gradient, functions of whole matrices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from shardwise.model.operations.base import Dims, Operation, OperationKind, OperationSharding
from shardwise.model.operations.elementwise_and_indexing import Map
from shardwise.sharding import Spec, contract
from shardwise.sharding.contraction import infer_product_spec
from shardwise.values import ZERO, LocalDim, Polynomial, multiply_symbols, sum_polynomials


@dataclass(frozen=True, slots=True)
class Contract(Operation):
    """`result = left * right`, summed over the dims that the result lacks: an einsum of two operands.

    Of one operand it is the sum over some of its dims, or the operand with its dims in another order.
    """

    kind: ClassVar[OperationKind] = "contract"

    def propagate_sharding(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> OperationSharding:
        if len(self.inputs) == 1:
            return OperationSharding((specs[0],), (infer_product_spec(specs, dims[self.outputs[0]]),))
        left, right = self.inputs
        keep = "left" if fixed(left) else "right" if fixed(right) else None
        case = contract(specs[0], specs[1], dims[self.outputs[0]], fixed=keep, goal=goal)
        reasons = tuple("; ".join(reason for s, reason in case.moves if s == side) for side in ("left", "right"))
        return OperationSharding((case.left, case.right), (case.result,), reasons)

    def gradients(self, cotangents: Mapping[str, str], dims: Mapping[str, Dims]) -> list[tuple[str, Operation]]:
        dy = cotangents[self.outputs[0]]
        if len(self.inputs) == 1:
            return [(self.inputs[0], Map((dy,), ("?",), "sum_to"))]
        left, right = self.inputs
        return [(left, Contract((dy, right), ("?",))), (right, Contract((left, dy), ("?",)))]

    def flops(self, sharding: OperationSharding) -> Polynomial:
        """Return 2 per element of the index space; 1 where nothing is summed (an elementwise or outer product).

        Of one operand 1 per element, for the additions; none where only the order of its dims changes.
        """
        sizes = {LocalDim(d, a) for spec in sharding.inputs for d, a in zip(spec.dims, spec.axes, strict=True)}
        summed = bool({size.dim for size in sizes} - set(sharding.outputs[0].dims))
        return multiply_symbols(sizes, float(len(sharding.inputs) - 1 + summed))


@dataclass(frozen=True, slots=True)
class Scan(Operation):
    """Causal softmax attention as an online-softmax scan over the keys.

    Inputs: q[B,T,K,G,H], k[B,T,K,H], v[B,T,K,U] (U may be another width than H), positions[T] of the queries and of the
    keys. Outputs: attended values [B,T,K,G,U] and log-sum-exp [B,T,K,G]. Keys and values are needed unsharded along T where q
    is split (all-gather context parallelism); heads and batch are independent. A sixth input, sinks[K,G], adds a logit to each
    head's softmax that no value goes with (OpenAI 2025, gpt-oss). `is_sparse`: the last input has the positions of the keys that
    each query sees [B,T,s] (`SelectKeys`), or with a `selected_block`, the letter of their size, the numbers of blocks of keys
    [B,T,K,s] (`SelectBlocks`). Source: Dao et al. 2022; S1, "ring attention".
    """

    kind: ClassVar[OperationKind] = "scan"
    sequence: str = "T"
    heads: Dims = ("K", "G", "H")
    is_sparse: bool = False
    selected_block: str = ""

    @property
    def missing_kernel(self) -> str:
        return "sparse attention" if self.is_sparse else ""

    @property
    def sinks(self) -> tuple[str, ...]:
        """Names of the logits that no value goes with: one tensor, or none."""
        return self.inputs[5 : len(self.inputs) - self.is_sparse]

    def propagate_sharding(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> OperationSharding:
        q, k, v, positions, _, *by_query = specs
        q = Spec.of(q.dims, {d: q.axes_of(d) for d in q.dims})
        keys = {d: () if d == self.sequence else q.axes_of(d) for d in k.dims[:-1]}
        query_positions = Spec.of(positions.dims, {self.sequence: q.axes_of(self.sequence)})
        extras = (Spec.of(spec.dims, {d: q.axes_of(d) for d in spec.dims}) for spec in by_query)
        operands = (q, Spec.of(k.dims, keys), Spec.of(v.dims, keys), query_positions, Spec.of(positions.dims), *extras)
        rows = {d: q.axes_of(d) for d in q.dims[:-1]}
        return OperationSharding(operands, (Spec.of((*q.dims[:-1], v.dims[-1]), rows), Spec.of(q.dims[:-1], rows)))

    def gradients(self, cotangents: Mapping[str, str], dims: Mapping[str, Dims]) -> list[tuple[str, Operation]]:
        out, lse = self.outputs
        selected = self.inputs[-1:] if self.is_sparse else ()
        operands = (*self.inputs[:5], out, lse, cotangents[out], *selected)
        gradient = ScanGradient(
            operands, ("?0", "?1", "?2"), self.sequence, self.heads, self.is_sparse, self.selected_block
        )
        # A sink's share of the weights is exp(sink - lse), and its value is zero: of the softmax's Jacobian the row sum stays.
        sinks = [(name, Map((cotangents[out], out, lse, name), ("?",), "sink_share")) for name in self.sinks]
        return [*((name, gradient) for name in self.inputs[:3]), *sinks]

    def flops(self, sharding: OperationSharding) -> Polynomial:
        return _attention_flops(sharding, self.sequence, over_keys=1, over_values=1)


@dataclass(frozen=True, slots=True)
class ScanGradient(Operation):
    """The gradient of attention, which rebuilds the scores: (a scan's first five operands, output, lse, dy) -> (dq, dk, dv).

    dk and dv sum over the queries and over the query heads of a group, so they are partial where those are split. `is_sparse`:
    the last input has the positions of the keys that each query sees, or the numbers of blocks (`selected_block`).
    """

    kind: ClassVar[OperationKind] = "scan"
    sequence: str = "T"
    heads: Dims = ("K", "G", "H")
    is_sparse: bool = False
    selected_block: str = ""

    def propagate_sharding(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> OperationSharding:
        selected = specs[8:]
        forward = Scan((), (), self.sequence, self.heads).propagate_sharding([*specs[:5], *selected], dims, fixed)
        q, k, v = forward.inputs[:3]
        out, lse = forward.outputs
        summed = (*q.axes_of(self.sequence), *(a for d in q.dims if d not in k.dims for a in q.axes_of(d)))
        operands = (*forward.inputs[:5], out, lse, out, *forward.inputs[5:])
        return OperationSharding(operands, (q, k.with_partial(summed), v.with_partial(summed)))

    def flops(self, sharding: OperationSharding) -> Polynomial:
        """Return the FLOPs: scores again, dq and dk over the width of a key; dv and the scores' gradient over that of a value."""
        return _attention_flops(sharding, self.sequence, over_keys=3, over_values=2)


def _attention_flops(sharding: OperationSharding, sequence: str, *, over_keys: int, over_values: int) -> Polynomial:
    """Return 2 FLOPs per element of each product over the part of the scores that is not masked. The symbol `span` is that
    part's share: a half for causal attention (the diagonal's half is dropped), less with a window."""
    q, k, v = sharding.inputs[:3]
    scores = [LocalDim(d, q.axes_of(d)) for d in q.dims[:-1]] + [LocalDim(sequence, k.axes_of(sequence))]
    widths = ((q.dims[-1], over_keys), (v.dims[-1], over_values))
    return sum_polynomials(
        multiply_symbols([*scores, LocalDim(width, ()), "span"], 2.0 * products) for width, products in widths
    )


ATTENTION_OPERATIONS = (Scan, ScanGradient)


@dataclass(frozen=True, slots=True)
class MatrixFunction(Operation):
    """`result = function(matrices)`, a function of whole matrices such as an inverse root.

    Dims of operands and result before `rows` and `columns` (or their pairs) are a `stack` of matrices, which may be split;
    each device has whole matrices. `flops_per_matrix` are the FLOPs for a matrix, `workspace` the elements beside operands and
    results while it is computed. `is_state`: the result is state, which every device that uses the matrices has; of a result
    that is not state, a device needs only the matrices that it updates a part of.
    """

    kind: ClassVar[OperationKind] = "of_matrix"
    function: str = ""
    stack: Dims = ()
    rows: Dims = ()
    columns: Dims = ()
    flops_per_matrix: Polynomial = ZERO
    workspace: Polynomial = ZERO
    is_state: bool = False

    def propagate_sharding(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> OperationSharding:
        split = {dim: specs[0].axes_of(dim) for dim in self.stack}
        operand_specs = tuple(Spec.of(spec.dims, split) for spec in specs)
        reasons = ("a function of whole matrices",) * len(operand_specs)
        return OperationSharding(operand_specs, (Spec.of(dims[self.outputs[0]], split),), reasons)

    def flops(self, sharding: OperationSharding) -> Polynomial:
        """Return the FLOPs of all matrices that one device has."""
        return self.flops_per_matrix * self.num_matrices(sharding)

    def workspace_elements(self, sharding: OperationSharding) -> Polynomial:
        """Return the elements beside operands and results, of all matrices that one device has."""
        return self.workspace * self.num_matrices(sharding)

    def num_matrices(self, sharding: OperationSharding) -> Polynomial:
        """Return how many matrices one device has."""
        return multiply_symbols(LocalDim(dim, sharding.inputs[0].axes_of(dim)) for dim in self.stack)
