"""Kernels in NumPy on the arrays of one device, with gradients.

Arrays of a map come aligned: every operand has the union of the operands' dims, of size 1 where it lacks one. `width`
is the number of elements that a norm is taken over. Arrays of a router are dense over the experts, [B, T, E], with zero
for those that were not chosen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwise.model import DEFAULT_NUMERICS, SWIGLU_CLAMP, Gating, Numerics, Optimizer, formula_values, get_optimizer
from shardwise.model.numerics import (
    CLAMPED_SWIGLU_SLOPE,
    NORM_EPSILON,
    ROTARY_BASE,
    SIGMOID,
    SOFTMAX,
    SQRT_SOFTPLUS,
    SWIGLU_LIMIT,
)
from shardwise.run.numpy.alternating_streams import ALTERNATING_STREAM_MAPS
from shardwise.run.numpy.recurrence_functions import RECURRENCE_MAPS, sigmoid

Array = NDArray[Any]

LEARNING_RATE = 1e-2  # any serves: the sharded and the unsharded run share it


def _inverse_rms(squares: Array, width: int) -> Array:
    return 1.0 / np.sqrt(squares / width + NORM_EPSILON)


def _rms_slope(squares: Array, width: int) -> Array:
    """Return the derivative of the inverse root mean square by the sum of squares."""
    slope: Array = (-0.5 / width) * _inverse_rms(squares, width) ** 3
    return slope


def _centre(x: Array, total: Array, squares: Array, width: int) -> tuple[Array, Array]:
    """Return x minus its mean, and the inverse standard deviation."""
    mean = total / width
    return x - mean, 1.0 / np.sqrt(squares / width - mean**2 + NORM_EPSILON)


def _layer_norm(x: Array, total: Array, squares: Array, weight: Array, width: int) -> Array:
    centred, inverse = _centre(x, total, squares, width)
    return centred * inverse * weight


def _layer_norm_dsum(dy: Array, x: Array, total: Array, squares: Array, weight: Array, width: int) -> Array:
    centred, inverse = _centre(x, total, squares, width)
    slope: Array = (-inverse + centred * (total / width) * inverse**3) / width
    return dy * weight * slope


def _layer_norm_dsquares(dy: Array, x: Array, total: Array, squares: Array, weight: Array, width: int) -> Array:
    centred, inverse = _centre(x, total, squares, width)
    slope: Array = centred * (-0.5 / width) * inverse**3
    return dy * weight * slope


def _with_unit_weight(norm: Callable[..., Array], *arrays: Array, width: int) -> Array:
    """Return a norm or a gradient of one whose weight is one everywhere."""
    return norm(*arrays, np.ones(()), width=width)


def _rotate(x: Array, positions: Array, direction: float) -> Array:
    half: int = x.shape[-1] // 2
    angles = direction * positions * ROTARY_BASE ** (-np.arange(half) / half)
    cos, sin = np.cos(angles), np.sin(angles)
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)


def _silu_slope(x: Array) -> Array:
    s = sigmoid(x)
    return s * (1.0 + x * (1.0 - s))


def _limited_gate(gate: Array) -> Array:
    low = np.minimum(gate, SWIGLU_LIMIT)
    return low * sigmoid(low)


def _clamped_gate(gate: Array) -> Array:
    low = np.minimum(gate, SWIGLU_CLAMP)
    return low * sigmoid(CLAMPED_SWIGLU_SLOPE * low)


def _clamped_swiglu_dgate(dy: Array, gate: Array, up: Array, width: int) -> Array:
    s = sigmoid(CLAMPED_SWIGLU_SLOPE * np.minimum(gate, SWIGLU_CLAMP))
    slope = s * (1.0 + CLAMPED_SWIGLU_SLOPE * gate * (1.0 - s))
    gradient: Array = dy * (np.clip(up, -SWIGLU_CLAMP, SWIGLU_CLAMP) + 1.0) * slope * (gate <= SWIGLU_CLAMP)
    return gradient


_C = math.sqrt(2.0 / math.pi)


def _gelu(x: Array) -> Array:
    return 0.5 * x * (1.0 + np.tanh(_C * (x + 0.044715 * x**3)))


def _gelu_slope(x: Array) -> Array:
    t = np.tanh(_C * (x + 0.044715 * x**3))
    return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t**2) * _C * (1.0 + 3 * 0.044715 * x**2)


DIFFERENTIAL_START = (
    0.2  # the constant in the factor of the first layer. Source: lambda_init_fn of transformers' DiffLlama
)
# Of xIELU: the slope at zero, and the least exponent in size. Source: XIELUActivation of transformers
XIELU_SLOPE, XIELU_EPSILON = 0.5, -1e-6


def _below_zero(x: Array) -> Array:
    return np.expm1(np.minimum(x, XIELU_EPSILON)) - x


def _xielu(x: Array, alpha_p: Array, alpha_n: Array, width: int) -> Array:
    above = np.logaddexp(0.0, alpha_p) * x**2
    below = (XIELU_SLOPE + np.logaddexp(0.0, alpha_n)) * _below_zero(x)
    return np.where(x > 0, above, below) + XIELU_SLOPE * x


def _xielu_dx(dy: Array, x: Array, alpha_p: Array, alpha_n: Array, width: int) -> Array:
    above = 2.0 * np.logaddexp(0.0, alpha_p) * x
    exponential = np.where(x < XIELU_EPSILON, np.exp(np.minimum(x, 0.0)), 0.0)
    below = (XIELU_SLOPE + np.logaddexp(0.0, alpha_n)) * (exponential - 1.0)
    return dy * (np.where(x > 0, above, below) + XIELU_SLOPE)


MAPS: Mapping[str, Callable[..., Array]] = {
    "identity": lambda x, width: x,
    "negate": lambda x, width: -x,
    "scale": lambda x, factor, width: x * factor,
    "scaled_sum": lambda x, factor, width: x * factor,
    "sum_square": lambda x, width: x**2,
    "sum_square_dx": lambda dy, x, width: 2 * x * dy,
    "rms_norm": lambda x, squares, weight, width: x * _inverse_rms(squares, width) * weight,
    "rms_norm_dx": lambda dy, squares, weight, width: dy * _inverse_rms(squares, width) * weight,
    "rms_norm_dsquares": lambda dy, x, squares, weight, width: dy * x * weight * _rms_slope(squares, width),
    "rms_norm_dweight": lambda dy, x, squares, width: dy * x * _inverse_rms(squares, width),
    "unit_rms_norm": lambda x, squares, width: x * _inverse_rms(squares, width),
    "unit_rms_norm_dx": lambda dy, squares, width: dy * _inverse_rms(squares, width),
    "unit_rms_norm_dsquares": lambda dy, x, squares, width: dy * x * _rms_slope(squares, width),
    "sum": lambda x, width: x,
    "sum_to": lambda dy, width: dy,
    "unit_layer_norm": partial(_with_unit_weight, _layer_norm),
    "unit_layer_norm_dx": lambda dy, total, squares, width: dy * _centre(total, total, squares, width)[1],
    "unit_layer_norm_dsum": partial(_with_unit_weight, _layer_norm_dsum),
    "unit_layer_norm_dsquares": partial(_with_unit_weight, _layer_norm_dsquares),
    "layer_norm": _layer_norm,
    "layer_norm_dx": lambda dy, total, squares, weight, width: dy * weight * _centre(total, total, squares, width)[1],
    "layer_norm_dsum": _layer_norm_dsum,
    "layer_norm_dsquares": _layer_norm_dsquares,
    "layer_norm_dweight": lambda dy, x, total, squares, width: dy * np.multiply(*_centre(x, total, squares, width)),
    "add_vector": lambda x, vector, width: x + vector,
    "dispatch": lambda x, gates, width: x * (gates > 0),
    "dispatch_dx": lambda dy, gates, width: dy * (gates > 0),
    "handover": lambda x, width: x,
    "combine": lambda gates, x, width: gates * x,
    "combine_dgates": lambda dy, x, width: dy * x,
    "combine_dx": lambda dy, gates, width: dy * gates,
    "sigmoid_gate": lambda x, logit, width: x * sigmoid(logit),
    "sigmoid_gate_dx": lambda dy, logit, width: dy * sigmoid(logit),
    "sigmoid_gate_dlogit": lambda dy, x, logit, width: dy * x * sigmoid(logit) * sigmoid(-logit),
    "softplus_gate": lambda x, logit, width: x * np.logaddexp(0.0, logit),
    "softplus_gate_dx": lambda dy, logit, width: dy * np.logaddexp(0.0, logit),
    "softplus_gate_dlogit": lambda dy, x, logit, width: dy * x * sigmoid(logit),
    "dot": lambda x, y, width: x * y,
    "dot_gradient": lambda dy, factor, width: dy * factor,
    "differential": lambda first, second, a, b, width: first - (np.exp(a) - np.exp(b) + DIFFERENTIAL_START) * second,
    "differential_dsecond": lambda dy, a, b, width: -(np.exp(a) - np.exp(b) + DIFFERENTIAL_START) * dy,
    "differential_da": lambda dy, second, a, width: -np.exp(a) * dy * second,
    "differential_db": lambda dy, second, b, width: np.exp(b) * dy * second,
    "differential_scale": lambda x, width: (1.0 - DIFFERENTIAL_START) * x,
    "sink_share": lambda dy, out, lse, sinks, width: -np.exp(sinks - lse) * dy * out,
    "rotary": lambda x, positions, width: _rotate(x, positions, 1.0),
    "rotary_back": lambda x, positions, width: _rotate(x, positions, -1.0),
    "swiglu": lambda gate, up, width: gate * sigmoid(gate) * up,
    "swiglu_dgate": lambda dy, gate, up, width: dy * up * _silu_slope(gate),
    "swiglu_dup": lambda dy, gate, width: dy * gate * sigmoid(gate),
    "geglu": lambda gate, up, width: _gelu(gate) * up,
    "geglu_dgate": lambda dy, gate, up, width: dy * up * _gelu_slope(gate),
    "geglu_dup": lambda dy, gate, width: dy * _gelu(gate),
    "clamped_swiglu": lambda gate, up, width: _clamped_gate(gate) * (np.clip(up, -SWIGLU_CLAMP, SWIGLU_CLAMP) + 1.0),
    "clamped_swiglu_dgate": _clamped_swiglu_dgate,
    "clamped_swiglu_dup": lambda dy, gate, up, width: dy * _clamped_gate(gate) * (np.abs(up) <= SWIGLU_CLAMP),
    "limited_swiglu": lambda gate, up, width: _limited_gate(gate) * np.clip(up, -SWIGLU_LIMIT, SWIGLU_LIMIT),
    "limited_swiglu_dgate": lambda dy, gate, up, width: (
        dy * np.clip(up, -SWIGLU_LIMIT, SWIGLU_LIMIT) * _silu_slope(gate) * (gate <= SWIGLU_LIMIT)
    ),
    "limited_swiglu_dup": lambda dy, gate, up, width: dy * _limited_gate(gate) * (np.abs(up) <= SWIGLU_LIMIT),
    "repeat": lambda x, width: x,
    "gelu": lambda x, width: _gelu(x),
    "gelu_dx": lambda dy, x, width: dy * _gelu_slope(x),
    "relu": lambda x, width: np.maximum(x, 0.0),
    "relu_dx": lambda dy, x, width: dy * (x > 0),
    "relu2": lambda x, width: np.maximum(x, 0.0) ** 2,
    "relu2_dx": lambda dy, x, width: 2.0 * dy * np.maximum(x, 0.0),
    "xielu": _xielu,
    "xielu_dx": _xielu_dx,
    "xielu_dalpha_p": lambda dy, x, alpha, width: dy * sigmoid(alpha) * np.maximum(x, 0.0) ** 2,
    "xielu_dalpha_n": lambda dy, x, alpha, width: dy * sigmoid(alpha) * np.where(x > 0, 0.0, _below_zero(x)),
    "silu": lambda x, width: x * sigmoid(x),
    "silu_dx": lambda dy, x, width: dy * _silu_slope(x),
    "sigmoid": lambda x, width: sigmoid(x),
    "sigmoid_dx": lambda dy, x, width: dy * sigmoid(x) * sigmoid(-x),
    "multiply": lambda x, factor, width: x * factor,
    **RECURRENCE_MAPS,
    **ALTERNATING_STREAM_MAPS,
    "gated_relu2": lambda gate, up, width: np.maximum(gate, 0.0) ** 2 * up,
    "gated_relu2_dgate": lambda dy, gate, up, width: 2.0 * dy * up * np.maximum(gate, 0.0),
    "gated_relu2_dup": lambda dy, gate, width: dy * np.maximum(gate, 0.0) ** 2,
    "maximum": lambda logits, width: logits,
    "sum_exp": lambda logits, largest, width: np.exp(logits - largest),
    "sum_exp_dx": lambda dy, logits, largest, width: dy * np.exp(logits - largest),
    "token_loss": lambda total, largest, target, width: np.log(total) + largest - target,
    "token_loss_dsum": lambda dy, total, width: dy / total,
}


def get_map(function: str) -> Callable[..., Array]:
    """Return the function of a map.

    One that updates a tensor of an optimizer's state is called "optimizer.tensor"; for weights that are no matrices,
    "optimizer.others.tensor" where the optimizer has updates of their own for these.
    """
    optimizer, *non_matrix, tensor = function.split(".") if "." in function else (function, function)
    if tensor == function:
        return MAPS[function]
    return partial(_apply_update, get_optimizer(optimizer).for_weight(is_matrix=not non_matrix), tensor)


def _apply_update(optimizer: Optimizer, tensor: str, *arrays: Array, width: int) -> Array:
    """Return an update at the first step, with default hyperparameters; of a mean, what each element adds."""
    formula_inputs = formula_values(optimizer.resolve_hyperparameters({}), learning_rate=LEARNING_RATE, step=1)
    updated: Array = optimizer.updates[tensor].formula(formula_inputs, *arrays) / width
    return updated


MASKED = -1e300  # score of a masked key, and log-sum-exp of a query that sees no key


def _scores(q: Array, k: Array, queries: Array, keys: Array, selected: Array | None) -> Array:
    """Return scores [B,K,G,T,S]; a query sees the keys at its own position and before, or those of the selected positions,
    which are the same for all heads [B,T,s] or not [B,T,K,s]."""
    scores = np.einsum("btkgh,bskh->bkgts", q, k) / math.sqrt(q.shape[-1])
    visible = queries[:, None] >= keys[None, :]
    if selected is not None:
        is_selected = (selected[..., None, :] == keys[:, None]).any(axis=-1)
        by_head = is_selected[:, None] if is_selected.ndim == 3 else np.einsum("btks->bkts", is_selected)
        visible = visible & by_head[:, :, None]
    return np.where(visible, scores, MASKED)


def select_keys(
    queries: Array,
    keys: Array,
    weights: Array,
    positions: Array,
    key_positions: Array,
    num_selected: int,
    window: int = 0,
) -> Array:
    """Return the positions [B,T,s] of the keys with the largest scores, of those at a query's position and before.

    Keys of a `window` of so many tokens have the positions of their first ones, and a query sees those whose last one is not
    after it; where there are fewer than s, others are -1.
    """
    scores = np.einsum("bta,btas->bts", weights, np.maximum(np.einsum("btay,bsy->btas", queries, keys), 0.0))
    visible = positions[:, None] >= key_positions[None, :] + max(window - 1, 0)
    best = np.argsort(-np.where(visible, scores, -np.inf), axis=-1, kind="stable")[..., :num_selected]
    chosen = key_positions[best]
    if window:
        chosen = np.where(chosen + window - 1 <= positions[:, None], chosen, -1)
        return np.pad(chosen, ((0, 0), (0, 0), (0, num_selected - chosen.shape[-1])), constant_values=-1)
    return np.where(chosen <= positions[:, None], chosen, positions[:, None])


def select_blocks(
    queries: Array, keys: Array, positions: Array, key_positions: Array, num_selected: int, block: int
) -> Array:
    """Return the numbers [B,T,K,s] of blocks of keys: the query's own, and those in which a key has the largest scores."""
    scores = np.einsum("btky,bsy->btks", queries, keys)
    scores = np.where((positions[:, None] >= key_positions)[:, None], scores, -np.inf)
    in_block = key_positions // block == np.arange(key_positions.max() // block + 1)[:, None]
    by_block = np.where(in_block, scores[..., None, :], -np.inf).max(axis=-1)
    np.put_along_axis(
        by_block, np.broadcast_to((positions // block)[:, None, None], (*scores.shape[:3], 1)), np.inf, -1
    )
    best = np.argsort(-by_block, axis=-1, kind="stable")[..., :num_selected]
    chosen = np.where(np.take_along_axis(by_block, best, axis=-1) > -np.inf, best, -1)
    return np.pad(chosen, [*((0, 0),) * 3, (0, num_selected - chosen.shape[-1])], constant_values=-1)


def expand_blocks(blocks: Array, size: int) -> Array:
    """Return the positions of the keys of blocks, negative for a block -1."""
    return np.array(blocks[..., None] * size + np.arange(size)).reshape(*blocks.shape[:-1], -1)


def attention(
    q: Array, k: Array, v: Array, queries: Array, keys: Array, selected: Array | None = None
) -> tuple[Array, Array]:
    """Return causal attention [B,T,K,G,U] and log-sum-exp [B,T,K,G]; 0 and MASKED for a query that sees no key."""
    shares, lse = softmax_of_visible(_scores(q, k, queries, keys, selected))
    return np.einsum("bkgts,bsku->btkgu", shares, v), np.einsum("bkgt->btkg", lse)


def softmax_of_visible(scores: Array) -> tuple[Array, Array]:
    """Return the softmax over the last dim, zero for masked scores, and log-sum-exp; 0 and MASKED where all are masked."""
    largest = scores.max(axis=-1, keepdims=True)
    weights = np.where(scores > MASKED, np.exp(scores - largest), 0.0)
    total = weights.sum(axis=-1)
    lse = np.where(total > 0, largest[..., 0] + np.log(np.maximum(total, 1e-300)), MASKED)
    return weights / np.maximum(total, 1e-300)[..., None], lse


class AttentionOperands(NamedTuple):
    """Operands of attention: q [B,T,K,G,H], k [B,S,K,H], v [B,S,K,U], the positions of queries [T] and keys [S], and those of the
    keys that each query sees [B,T,s], if it does not see all before it."""

    q: Array
    k: Array
    v: Array
    queries: Array
    keys: Array
    selected: Array | None = None


def attention_gradient(operands: AttentionOperands, out: Array, lse: Array, dy: Array) -> tuple[Array, Array, Array]:
    """Return dq, dk, dv, with rowsum(dy * out) in place of the softmax's Jacobian (Dao et al. 2022)."""
    q, k, v, queries, keys, selected = operands
    weights = np.exp(_scores(q, k, queries, keys, selected) - np.einsum("btkg->bkgt", lse)[..., None])
    dv = np.einsum("bkgts,btkgu->bsku", weights, dy)
    dweights = np.einsum("btkgu,bsku->bkgts", dy, v)
    dy_out = np.einsum("btkgu,btkgu->bkgt", dy, out)[..., None]
    dscores = weights * (dweights - dy_out) / math.sqrt(q.shape[-1])
    return np.einsum("bkgts,bskh->btkgh", dscores, k), np.einsum("bkgts,btkgh->bskh", dscores, q), dv


def merge_attention(first: tuple[Array, Array], second: tuple[Array, Array]) -> tuple[Array, Array]:
    """Return attention over two sets of keys from that over each (online softmax, Milakov et al. 2018)."""
    lse = np.logaddexp(first[1], second[1])
    shares = [np.exp(part - lse)[..., None] for _, part in (first, second)]
    return first[0] * shares[0] + second[0] * shares[1], lse


def add_sinks(part: tuple[Array, Array], sinks: Array) -> tuple[Array, Array]:
    """Return attention that also sees a key with the logits `sinks` [K,G] and no value."""
    out, lse = part
    return merge_attention(part, (np.zeros_like(out), np.broadcast_to(sinks, lse.shape)))


@dataclass(frozen=True, slots=True)
class Router:
    """Router: how experts are scored and chosen (`gating`), and whether the gates of a token are divided by their sum."""

    gating: Gating = DEFAULT_NUMERICS.gating
    normalised: bool = DEFAULT_NUMERICS.normalised_gates

    @classmethod
    def of(cls, numerics: Numerics) -> Router:
        """Return the router of a model."""
        return cls(numerics.gating, numerics.normalised_gates)

    def route(self, logits: Array, num_chosen: int, bias: Array | None = None) -> tuple[Array, Array]:
        """Return gates [B, T, E], zero for experts that a token does not take, and all scores, which the gradient
        needs. A `bias` [E] is added to the scores by which experts are chosen.

        >>> gates, scores = Router(Gating(groups=2, chosen_groups=1)).route(np.log([[[4.0, 1.0, 3.0, 2.0]]]), 2)
        >>> gates.round(6).tolist(), scores.round(6).tolist()
        ([[[0.8, 0.2, 0.0, 0.0]]], [[[0.4, 0.1, 0.3, 0.2]]])
        """
        scores = SCORES[self.gating.scores](logits)
        preferred = scores if bias is None else scores + bias
        chosen = _top_mask(np.where(self._allowed(preferred), preferred, -np.inf), num_chosen)
        gates = np.where(chosen, scores, 0.0)
        return self.gating.scale * (gates / gates.sum(axis=-1, keepdims=True) if self.normalised else gates), scores

    def _allowed(self, scores: Array) -> Array:
        """Return which experts are in a group that a token may choose from."""
        gating = self.gating
        grouped = scores.reshape(*scores.shape[:-1], gating.groups, -1)
        best = np.sort(grouped, axis=-1)[..., -gating.votes :].sum(axis=-1)
        allowed: Array = np.repeat(_top_mask(best, gating.chosen_groups), grouped.shape[-1], axis=-1)
        return allowed

    def gradient(self, dgates: Array, gates: Array, scores: Array) -> Array:
        """Return the gradient of the logits; experts that were not chosen get one through a softmax only."""
        dchosen = dgates * self.gating.scale
        if self.normalised:
            mean = (dgates * gates).sum(axis=-1, keepdims=True)
            dchosen = (dchosen - mean) / np.where(gates > 0, scores, 0.0).sum(axis=-1, keepdims=True)
        dscores = np.where(gates > 0, dchosen, 0.0)
        if self.gating.scores == SOFTMAX:
            return np.array(scores * (dscores - (dscores * scores).sum(axis=-1, keepdims=True)))
        if self.gating.scores == SQRT_SOFTPLUS:
            return np.array(-np.expm1(-(scores**2)) / (2.0 * scores) * dscores)
        return np.array(scores * (1.0 - scores) * dscores)


DEFAULT_ROUTER = Router()


def _softmax(logits: Array) -> Array:
    exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.array(exponentials / exponentials.sum(axis=-1, keepdims=True))


SCORES: Mapping[str, Callable[[Array], Array]] = {
    SOFTMAX: _softmax, SIGMOID: sigmoid, SQRT_SOFTPLUS: lambda logits: np.sqrt(np.logaddexp(0.0, logits)),
}  # fmt: skip


def _top_mask(scores: Array, count: int) -> Array:
    """Return a mask of the `count` largest in the last dim."""
    mask = np.zeros(scores.shape, dtype=bool)
    np.put_along_axis(mask, np.argsort(-scores, axis=-1, kind="stable")[..., :count], True, axis=-1)
    return mask
