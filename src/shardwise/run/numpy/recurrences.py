"""Recurrences and short convolutions in NumPy, token by token, with gradients: what chunked kernels have to equal.

Arrays of a recurrence come with the dims of their specs. Inside, all have the heads of the values, [B, T, *heads, width], and
gradients are summed over the heads that an operand lacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwise.model.operations import (
    SEGMENTS,
    CachedRecurrence,
    Dims,
    Operation,
    Recurrence,
    RecurrenceGradient,
    SegmentAdjoint,
    SegmentEdge,
    SegmentState,
    SequenceRecurrence,
    ShortConvolution,
    ShortConvolutionGradient,
)
from shardwise.sharding import Spec

Array = NDArray[Any]


class Tokens(NamedTuple):
    """Operands with all heads: q, k [B,T,*heads,N], v [B,T,*heads,X], decay [B,T,*heads,N or 1], beta [B,T,*heads,1]. Each
    element of an elementwise recurrence is a head, with widths of one."""

    q: Array
    k: Array
    v: Array
    decay: Array
    beta: Array | None


class TokenGradients(NamedTuple):
    """Gradients of `Tokens`, and of the state before the first one."""

    q: Array
    k: Array
    v: Array
    decay: Array
    beta: Array
    initial: Array


def scan_tokens(tokens: Tokens, initial: Array) -> tuple[Array, list[Array]]:
    """Return the outputs, and the states [B,*heads,N,X] before the first and after each token."""
    states, outputs = [initial], []
    for t in range(tokens.v.shape[1]):
        decayed = np.exp(tokens.decay[:, t])[..., None] * states[-1]
        written = tokens.v[:, t]
        if tokens.beta is not None:
            written = tokens.beta[:, t] * (written - np.einsum("...nx,...n->...x", decayed, tokens.k[:, t]))
        states.append(decayed + tokens.k[:, t][..., :, None] * written[..., None, :])
        outputs.append(np.einsum("...nx,...n->...x", states[-1], tokens.q[:, t]))
    return np.stack(outputs, axis=1), states


def scan_gradient(tokens: Tokens, states: Sequence[Array], dout: Array, dlast: Array) -> TokenGradients:
    """Return the gradients, from those of the outputs and of the last state, from the last token to the first."""
    dq, dk, dv = (np.zeros(np.broadcast_shapes(a.shape)) for a in (tokens.q, tokens.k, tokens.v))
    ddecay, dbeta = np.zeros(dk.shape), np.zeros((*dv.shape[:-1], 1))
    dstate = dlast
    for t in reversed(range(tokens.v.shape[1])):
        dq[:, t] = np.einsum("...nx,...x->...n", states[t + 1], dout[:, t])
        dstate = dstate + tokens.q[:, t][..., :, None] * dout[:, t][..., None, :]
        k, decay = tokens.k[:, t], np.exp(tokens.decay[:, t])[..., None]
        decayed = decay * states[t]
        written, dwritten, ddecayed = tokens.v[:, t], np.einsum("...nx,...n->...x", dstate, k), dstate
        if tokens.beta is not None:
            error = written - np.einsum("...nx,...n->...x", decayed, k)
            written, derror = tokens.beta[:, t] * error, tokens.beta[:, t] * dwritten
            dbeta[:, t] = (dwritten * error).sum(axis=-1, keepdims=True)
            dk[:, t] = -np.einsum("...nx,...x->...n", decayed, derror)
            dwritten, ddecayed = derror, dstate - k[..., :, None] * derror[..., None, :]
        dk[:, t] += np.einsum("...nx,...x->...n", dstate, written)
        dv[:, t] = dwritten
        ddecay[:, t] = (ddecayed * decayed).sum(axis=-1)
        dstate = decay * ddecayed
    return TokenGradients(dq, dk, dv, ddecay, dbeta, dstate)


class Segments(NamedTuple):
    """States that segments leave [segments,B,*heads,N,X], and transitions: matrices [segments,B,*heads,N,N], or the products of
    the decays [segments,B,*heads,N or 1]."""

    states: Array
    transitions: Array
    are_matrices: bool

    def state_before(self, segment: int) -> Array:
        """Return the state before a segment."""
        state = np.zeros(self.states.shape[1:])
        for index in range(min(segment, len(self.states))):
            state = self._through(index, state) + self.states[index]
        return state

    def gradient_after(self, segment: int, adjoints: Array) -> Array:
        """Return the gradient of the state after a segment, from what each segment wants of the state before it."""
        gradient = np.zeros(self.states.shape[1:])
        for index in reversed(range(segment + 1, len(adjoints))):
            gradient = self._back_through(index, gradient) + adjoints[index]
        return gradient

    def _through(self, index: int, state: Array) -> Array:
        transition = self.transitions[index]
        if self.are_matrices:
            return np.array(np.einsum("...nm,...mx->...nx", transition, state))
        return np.array(transition[..., None] * state)

    def _back_through(self, index: int, gradient: Array) -> Array:
        if self.are_matrices:
            return np.array(np.einsum("...nm,...nx->...mx", self.transitions[index], gradient))
        return self._through(index, gradient)


@dataclass(frozen=True, slots=True)
class RecurrenceKernel:
    """A recurrence, its gradient, or what its segments hand to each other, on one device.

    `operands` and `results` are the specs of its arrays, `segment` the number of the device's segment of the sequence (None: it
    is in one part).
    """

    operation: SequenceRecurrence
    operands: Sequence[Spec]
    results: Sequence[Spec]
    segment: int | None

    def __call__(self, arrays: Sequence[Array]) -> tuple[Array, ...]:
        """Return the results, in the dims of their specs."""
        match self.operation:
            case Recurrence():
                initial = self._segments(arrays[-2:]).state_before(self.segment or 0)
                return self._results([scan_tokens(self._tokens(arrays[:-2]), initial)[0]], [self._rows("X")])
            case CachedRecurrence():
                return self._with_state(arrays)
            case RecurrenceGradient():
                return self._gradient(arrays)
            case SegmentState():
                return self._segment_state(self._tokens(arrays))
            case SegmentAdjoint():
                return self._adjoint(arrays)
        raise TypeError(f"no kernel for {self.operation}")

    def _with_state(self, arrays: Sequence[Array]) -> tuple[Array, ...]:
        """Return the outputs of new tokens and the state that they leave, from the state before them."""
        dims = self._state_dims()[1:]
        outputs, states = scan_tokens(self._tokens(arrays[:-1]), _align(arrays[-1], self.operands[-1], dims))
        return self._results([outputs, states[-1]], [self._rows("X"), dims])

    @property
    def _is_delta(self) -> bool:
        return self.operation.rule == "delta"

    @property
    def _token_names(self) -> str:
        """Letters of the operands of tokens, in their order: q, k, v, decays or steps, rates, beta."""
        names = {SegmentState: "kvd", SegmentAdjoint: "qkd"}.get(type(self.operation), "qkvd")
        if not self.operation.has_keys:
            names = "".join(name for name in names if name not in "qk")
        return names + "r" * self.operation.has_rates + "b" * self._is_delta

    @property
    def _heads(self) -> Dims:
        values = (
            self.operands[-1]
            if isinstance(self.operation, SegmentAdjoint)
            else self.operands[self._token_names.index("v")]
        )
        return self.operation.heads(values)

    def _rows(self, width: str) -> Dims:
        """Return the dims of tokens with all heads; the widths of a key and of a value are N and X."""
        dim = dict(zip("NX", self._widths, strict=True)).get(width, width)
        return (self.operands[0].dims[0], self.operation.sequence, *self._heads, dim)

    @property
    def _widths(self) -> tuple[str, str]:
        """Dims of a key and of a value; both of one element in an elementwise recurrence."""
        return (self.operation.key, self.operation.value) if self.operation.has_keys else ("1", "1")

    def _token_dims(self) -> list[Dims]:
        widths = {"q": "N", "k": "N", "v": "X", "d": "N", "r": "N", "b": "1"}
        return [self._rows(widths[name]) for name in self._token_names]

    def _state_dims(self) -> Dims:
        return (SEGMENTS, self.operands[0].dims[0], *self._heads, *self._widths)

    def _transition_dims(self) -> Dims:
        return (*self._state_dims()[:-1], *([self.operation.column] if self._is_delta else []))

    def _tokens(self, arrays: Sequence[Array]) -> Tokens:
        """Return operands with a dim of tokens, with all heads; queries and values that the operation lacks are zero."""
        names = self._token_names
        aligned = {
            name: _align(array, spec, dims)
            for name, array, spec, dims in zip(names, arrays, self.operands, self._token_dims(), strict=False)
        }
        constant = np.full(
            1, float(not self.operation.has_keys)
        )  # keys and queries of an elementwise recurrence are one
        q, k, decay = aligned.get("q", constant), aligned.get("k", constant), aligned["d"]
        if "r" in aligned:
            decay = -np.exp(aligned["r"]) * decay
        shape = np.broadcast_shapes(*(array.shape[:-1] for array in (k, decay, aligned.get("v", decay))))
        q, k = (np.broadcast_to(array, (*shape, k.shape[-1])) for array in (q * self._query_scale(q), k))
        v = aligned.get("v", np.zeros((*shape, 1)))
        return Tokens(q, k, v, decay, aligned.get("b"))

    def _query_scale(self, q: Array) -> float:
        is_scaled = getattr(self.operation, "scales_queries", False)
        return float(q.shape[-1]) ** -0.5 if is_scaled else 1.0

    def _segments(self, arrays: Sequence[Array]) -> Segments:
        """Return states and transitions."""
        first = len(self._token_names)
        states = _align(arrays[0], self.operands[first], self._state_dims())
        transitions = _align(arrays[1], self.operands[first + 1], self._transition_dims())
        return Segments(states, transitions, are_matrices=self._is_delta)

    def _results(self, arrays: Sequence[Array], dims: Sequence[Dims]) -> tuple[Array, ...]:
        """Return arrays of these dims in those of the results, summed over the dims that these lack."""
        return tuple(
            _sum_to(array, row, spec.dims) for array, row, spec in zip(arrays, dims, self.results, strict=True)
        )

    def _gradient(self, arrays: Sequence[Array]) -> tuple[Array, ...]:
        *_, states, transitions, adjoints, dy = arrays
        tokens, segments, segment = self._tokens(arrays), self._segments((states, transitions)), self.segment or 0
        _, scanned = scan_tokens(tokens, segments.state_before(segment))
        dlast = segments.gradient_after(segment, _align(adjoints, self.operands[-2], self._state_dims()))
        gradients = scan_gradient(tokens, scanned, _align(dy, self.operands[-1], self._rows("X")), dlast)
        beta = [gradients.beta] if self._is_delta else []
        dq = gradients.q * self._query_scale(gradients.q)
        of_keys = [dq, gradients.k] if self.operation.has_keys else []
        of_decays = self._decay_gradients(gradients.decay, arrays)
        return self._results([*of_keys, gradients.v, *of_decays, *beta], self._token_dims())

    def _decay_gradients(self, ddecay: Array, arrays: Sequence[Array]) -> list[Array]:
        """Return the gradients of the decays, or of the steps and rates that make them."""
        if not self.operation.has_rates:
            return [ddecay]
        index, dims = self._token_names.index("d"), self._token_dims()
        step, rate = (_align(arrays[i], self.operands[i], dims[i]) for i in (index, index + 1))
        return [-np.exp(rate) * ddecay, -np.exp(rate) * step * ddecay]

    def _segment_state(self, tokens: Tokens) -> tuple[Array, ...]:
        """Return the state that the segment leaves, and its transition: what the delta rule makes of the identity."""
        shape, n, x = tokens.k.shape, tokens.k.shape[-1], tokens.v.shape[-1]
        rows = (shape[0], *shape[2:-1])
        values = np.concatenate([tokens.v, np.zeros(shape)], axis=-1)
        identity = np.broadcast_to(np.eye(n), (*rows, n, n))
        initial = np.concatenate([np.zeros((*rows, n, x)), identity], axis=-1)
        last = scan_tokens(tokens._replace(v=values), initial)[1][-1]
        transition = last[..., x:] if self._is_delta else np.exp(tokens.decay.sum(axis=1))
        present = [self._of_segment(array) for array in (last[..., :x], transition)]
        return self._results(present, [self._state_dims(), self._transition_dims()])

    def _adjoint(self, arrays: Sequence[Array]) -> tuple[Array, ...]:
        tokens, dy = self._tokens(arrays), _align(arrays[-1], self.operands[-1], self._rows("X"))
        state = np.zeros((dy.shape[0], *dy.shape[2:-1], tokens.k.shape[-1], dy.shape[-1]))  # the gradient reads none
        initial = scan_gradient(tokens._replace(v=np.zeros(dy.shape)), [state] * (dy.shape[1] + 1), dy, state).initial
        return self._results([self._of_segment(initial)], [self._state_dims()])

    def _of_segment(self, array: Array) -> Array:
        """Return an array with a dim of segments: one, or none where the sequence is in one part."""
        return array[None][: 0 if self.segment is None else 1]


def _align(array: Array, spec: Spec, dims: Dims) -> Array:
    """Return an array with its dims in this order, and with size 1 where it lacks one."""
    order = [spec.dims.index(dim) for dim in dims if dim in spec.dims]
    return np.expand_dims(np.transpose(array, order), [i for i, dim in enumerate(dims) if dim not in spec.dims])


def _sum_to(array: Array, dims: Dims, target: Dims) -> Array:
    """Return an array summed over the dims that the target lacks, with the others in its order."""
    summed = array.sum(axis=tuple(i for i, dim in enumerate(dims) if dim not in target))
    remaining = [dim for dim in dims if dim in target]
    return np.array(np.transpose(summed, [remaining.index(dim) for dim in target]))


@dataclass(frozen=True, slots=True)
class ConvolutionKernel:
    """A short convolution, its gradient, or the rows that segments hand to each other, on one device.

    Arrays are [B, T, *channels], [W, *channels] and [B, segments, w, *channels]; `num_rows` is w, the rows before a row that it
    reads, and `segment` the number of the device's segment of the sequence (None: it is in one part).
    """

    operation: Operation
    num_rows: int
    segment: int | None

    def __call__(self, arrays: Sequence[Array]) -> tuple[Array, ...]:
        """Return the results."""
        match self.operation:
            case SegmentEdge(edge=edge):
                (x,) = arrays
                rows = x[:, : self.num_rows] if edge == "first" else x[:, x.shape[1] - self.num_rows :]
                return (np.array(rows[:, None][:, : 0 if self.segment is None else 1]),)
            case ShortConvolution():
                x, weight, edges = arrays
                rows = self._with_rows_before(x, edges)
                return (np.array(sum(tap * self._shifted(rows, x, i) for i, tap in enumerate(weight))),)
            case ShortConvolutionGradient():
                return self._gradient(*arrays)
        raise TypeError(f"no kernel for {self.operation}")

    def _shifted(self, rows: Array, like: Array, start: int) -> Array:
        return rows[:, start : start + like.shape[1]]

    def _with_rows_before(self, x: Array, edges: Array) -> Array:
        """Return x with the last rows of the segment before, or zeros."""
        before = edges[:, self.segment - 1] if self.segment else np.zeros((len(x), self.num_rows, *x.shape[2:]))
        return np.concatenate([before, x], axis=1)

    def _gradient(self, x: Array, weight: Array, edges: Array, first_rows: Array, dy: Array) -> tuple[Array, ...]:
        following = 0 if self.segment is None else self.segment + 1
        has_next = self.segment is not None and following < first_rows.shape[1]
        after = first_rows[:, following] if has_next else np.zeros((len(x), self.num_rows, *x.shape[2:]))
        rows, drows = self._with_rows_before(x, edges), np.concatenate([dy, after], axis=1)
        dx = sum(tap * self._shifted(drows, x, self.num_rows - i) for i, tap in enumerate(weight))
        dweight = [(self._shifted(rows, x, i) * dy).sum(axis=(0, 1)) for i in range(len(weight))]
        return np.array(dx), np.stack(dweight)
