"""FLOPs and bytes of single kernels, and the size from which compute binds them.

Letters of sizes: B rows of activations, or sequences (batch); D width in (d_in, d_model); F width out (d_out, d_ff); T queries
of a sequence (queries); S keys of a sequence (keys); N query heads (num_heads, length); H width of a head (head_dim); K
key-value heads (num_kv_heads); G query heads of a key-value head (queries_per_kv_head); E experts (num_experts); k experts of a
token (experts_per_token); A arrays (num_arrays); I critical intensity (intensity).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise, zip_longest

from shardwise.book_formulas.rules.roofline import TimeBounds, time_bounds
from shardwise.values import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCost:
    """FLOPs of one kernel, and bytes that it reads and writes."""

    flops: float
    read_bytes: float
    written_bytes: float

    @property
    def moved_bytes(self) -> float:
        return self.read_bytes + self.written_bytes

    @property
    def intensity(self) -> float:
        return self.flops / self.moved_bytes

    @property
    def backward_flops(self) -> float:
        """FLOPs of a product's backward pass: two products of the same size, the gradients of both operands."""
        return 2.0 * self.flops

    @property
    def training_flops(self) -> float:
        return self.flops + self.backward_flops

    def math_s(self, flops_per_s: float) -> float:
        return self.flops / flops_per_s

    def bounds(self, flops_per_s: float, bytes_per_s: float) -> TimeBounds:
        """Return the kernel's time with its memory traffic overlapped, and one after the other."""
        return time_bounds(self.flops / flops_per_s, self.moved_bytes / bytes_per_s)


def matmul_cost(
    batch: float, d_in: float, d_out: float, bytes_per_element: float = 2.0, weight_bytes: float | None = None
) -> KernelCost:
    """FLOPs and bytes of [B, D] · [D, F], the weight's elements of a width of their own if given.

    Formula: 2BDF FLOPs; BD and DF elements read and BF written.
    Source: the book, "All About Rooflines" and its question 2 (int8 weights).
    """
    return batched_matmul_cost(1.0, batch, d_in, d_out, bytes_per_element, weight_bytes)


def dot_product_cost(length: float, bytes_per_element: float = 2.0) -> KernelCost:
    """FLOPs and bytes of two vectors' product; half a FLOP per byte in bf16.

    Formula: N products and N - 1 sums; 2N elements read and one written. Source: the book, "All About Rooflines".
    """
    return KernelCost(
        flops=2.0 * length - 1.0, read_bytes=2.0 * length * bytes_per_element, written_bytes=bytes_per_element
    )


def batched_matmul_cost(
    batch: float, rows: float, d_in: float, d_out: float, bytes_per_element: float = 2.0,
    weight_bytes: float | None = None,
) -> KernelCost:  # fmt: skip
    """FLOPs and bytes of [B, T, D] · [B, D, F], a matrix for each of B: B does not change the intensity.

    Formula: 2BTDF FLOPs; BTD and BDF elements read and BTF written.
    Source: the book, "All About Rooflines", question 4 (T = 1: about 2 FLOPs per byte in int8); the note, A.1.3.
    """
    weight = bytes_per_element if weight_bytes is None else weight_bytes
    return KernelCost(
        flops=2.0 * batch * rows * d_in * d_out,
        read_bytes=batch * (rows * d_in * bytes_per_element + d_in * d_out * weight),
        written_bytes=batch * rows * d_out * bytes_per_element,
    )


def experts_cost(
    batch: float, d_in: float, d_out: float, num_experts: float, experts_per_token: float,
    bytes_per_element: float = 2.0, weight_bytes: float | None = None,
) -> KernelCost:  # fmt: skip
    """FLOPs and bytes of one matrix [D, F] of each of E experts, k of them for each of B tokens.

    Formula: 2kBDF FLOPs; kB rows in and out, E·DF elements of matrices.
    Assumes: every expert has a token, so all E matrices are read; even routing.
    Source: the book, "Transformers", question 8, which leaves the rows out.
    """
    return batched_matmul_cost(
        num_experts, batch * experts_per_token / num_experts, d_in, d_out, bytes_per_element, weight_bytes
    )


def attended_pairs(queries: float, keys: float, *, causal: bool = False) -> float:
    """Pairs of a query and a key, all or those that a causal mask leaves to the last T of S positions.

    Formula: T·S; causal T·S - T(T - 1)/2, which is T(T + 1)/2 where T = S. Unit: pairs. Source: the note, A.3.
    """
    return queries * keys - (queries * (queries - 1.0) / 2.0 if causal else 0.0)


def attention_cost(
    num_seqs: float, queries: float, keys: float, num_heads: float, num_kv_heads: float, head_dim: float,
    bytes_per_element: float = 2.0, *, causal: bool = False, fused: bool = True,
) -> KernelCost:  # fmt: skip
    """FLOPs and bytes of softmax(Q·K)·V without its projections. A prompt has T = S, a step of decoding T = 1.

    What is not `fused` (flash attention is) also writes and reads the scores and the softmax of them, masked or not.
    Formula: 4·N·H FLOPs for each pair of query and key; queries and results of N heads, keys and values of K heads, and not
    fused N·T·S elements each of scores and softmax. Source: the book, "Transformers", question 4; the note, A.3.
    """
    pairs = attended_pairs(queries, keys, causal=causal)
    scores = 0.0 if fused else 2.0 * num_heads * queries * keys
    query_elements, kv_elements = queries * num_heads * head_dim, 2.0 * keys * num_kv_heads * head_dim
    return KernelCost(
        flops=4.0 * num_seqs * num_heads * head_dim * pairs,
        read_bytes=num_seqs * (query_elements + kv_elements + scores) * bytes_per_element,
        written_bytes=num_seqs * (query_elements + scores) * bytes_per_element,
    )


def elementwise_cost(length: float, num_arrays: float = 2, bytes_per_element: float = 2.0) -> KernelCost:
    """FLOPs and bytes of one array of N elements out of A arrays of N.

    Formula: A - 1 FLOPs for each element, 1 where A = 1; A reads and a write. Source: the book, "TPUs", the elementwise product.
    """
    return KernelCost(
        flops=max(1.0, num_arrays - 1.0) * length,
        read_bytes=num_arrays * length * bytes_per_element,
        written_bytes=length * bytes_per_element,
    )


def critical_size(cost: Callable[[float], KernelCost], flops_per_s: float, bytes_per_s: float) -> float:
    """The least size from which compute takes as long as memory traffic: 0 where it does at every size, infinite at none.

    FLOPs and bytes are polynomials of the size, whose difference is solved for: the batch of a product is linear, the side
    of a cube has the third power, 2·n³ FLOPs against 3·n² elements, so 3·C/W in bf16. Raises `InputError` where they are not,
    or of more than the sixth degree. Source: the book, "All About Rooflines".

    >>> round(critical_size(lambda side: matmul_cost(side, side, side), flops_per_s=312e12, bytes_per_s=1.6e12))
    585
    """
    costs = [cost(float(size)) for size in range(POINTS)]
    flops, moved = (
        coefficients([kernel_cost.flops for kernel_cost in costs]),
        coefficients([kernel_cost.moved_bytes for kernel_cost in costs]),
    )
    excess = (f * bytes_per_s - m * flops_per_s for f, m in zip_longest(flops, moved, fillvalue=0.0))
    return first_rise(list(excess))


ROUNDING = 1e-12  # of a difference of numbers that are equal but for rounding, as a part of them
MOST_DEGREE = 6  # of a cost in one size; a product of four tensors' dims has four
POINTS = MOST_DEGREE + 2  # one more than determines the polynomial, to see that it is one


def coefficients(values: Sequence[float]) -> list[float]:
    """Return the coefficients (constant first) of the polynomial with these values at 0, 1, 2, ...

    Raises `InputError` if there is none of degree `MOST_DEGREE` or less. Source: Newton's forward differences.

    >>> coefficients([2.0 * n**3 + 1.0 for n in range(POINTS)])
    [1.0, 0.0, 0.0, 2.0]
    """
    differences, row = [], [Fraction(value) for value in values]
    while row:
        differences.append(row[0])
        row = [after - before for before, after in pairwise(row)]
    rounding = ROUNDING * max(map(abs, values))
    while differences and abs(differences[-1]) <= rounding * 2.0 ** len(differences):  # order k adds 2^k values up
        differences.pop()
    if len(differences) == len(values):
        raise InputError(f"size: FLOPs and bytes are required to be polynomials of it, of degree {MOST_DEGREE} at most")
    polynomial, binomial = [Fraction(0)] * len(differences), [Fraction(1)]
    for order, difference in enumerate(differences):
        for power, factor in enumerate(binomial):
            polynomial[power] += difference * factor
        # times (size - order) / (order + 1)
        shifted, padded = [Fraction(0), *binomial], [*binomial, Fraction(0)]
        binomial = [(high - order * low) / (order + 1) for high, low in zip(shifted, padded, strict=True)]
    largest = len(values) - 1
    return [
        float(factor) if abs(factor) * largest**power > rounding else 0.0 for power, factor in enumerate(polynomial)
    ]


def first_rise(polynomial: Sequence[float]) -> float:
    """Return the least size above zero from which a polynomial (constant first) is positive.

    0 if it is from the start, infinite if it never is.

    >>> first_rise([-8.0, 0.0, 0.0, 1.0])
    2.0
    """
    lowest = next((factor for factor in polynomial if factor), 0.0)
    return 0.0 if lowest > 0 else min(_roots(polynomial), default=math.inf)


def _roots(polynomial: Sequence[float]) -> list[float]:
    """Positive roots at which the sign changes, in order: there is at most one between two turning points."""
    factors = list(polynomial)
    while factors and not factors[-1]:
        factors.pop()
    while factors and not factors[0]:  # a root at zero
        factors.pop(0)
    if len(factors) < 2:
        return []
    if len(factors) == 2:
        root = -factors[0] / factors[1]
        return [root] if root > 0 else []
    largest = 1.0 + max(abs(factor / factors[-1]) for factor in factors)  # Cauchy's bound of all roots
    derivative = [power * factor for power, factor in enumerate(factors)][1:]
    turning = [root for root in _roots(derivative) if root < largest]
    ends = [0.0, *turning, largest]
    return [_bisect(factors, low, high) for low, high in pairwise(ends) if _changes_sign(factors, low, high)]


def _changes_sign(polynomial: Sequence[float], low: float, high: float) -> bool:
    return (_value(polynomial, low) < 0) != (_value(polynomial, high) < 0)


def _bisect(polynomial: Sequence[float], low: float, high: float) -> float:
    negative = _value(polynomial, low) < 0
    while low < (middle := (low + high) / 2.0) < high:
        if (_value(polynomial, middle) < 0) == negative:
            low = middle
        else:
            high = middle
    return high


def _value(polynomial: Sequence[float], size: float) -> float:
    total = 0.0
    for factor in reversed(polynomial):
        total = total * size + factor
    return total
