"""One MLP layer under data, fully sharded, tensor and mixed parallelism: what it computes, communicates, and for how long."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shardwise.book_formulas.rules.parallelism_bounds import AxisOverlap
from shardwise.book_formulas.rules.roofline import ProductTimes
from shardwise.values import lookup


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpLayerCost:
    """FLOPs of one chip, and payload bytes of its collectives (time is bytes / W), for one ungated MLP layer."""

    forward_flops: float
    backward_flops: float
    forward_fsdp_bytes: float
    forward_tp_bytes: float
    backward_fsdp_bytes: float
    backward_tp_bytes: float

    @property
    def forward_bytes(self) -> float:
        return self.forward_fsdp_bytes + self.forward_tp_bytes

    @property
    def backward_bytes(self) -> float:
        return self.backward_fsdp_bytes + self.backward_tp_bytes

    @property
    def forward_intensity(self) -> float:
        """FLOPs per payload byte of the forward pass; infinite where nothing moves."""
        return self.forward_flops / self.forward_bytes if self.forward_bytes else math.inf

    @property
    def backward_intensity(self) -> float:
        """FLOPs per payload byte of the backward pass; infinite where nothing moves."""
        return self.backward_flops / self.backward_bytes if self.backward_bytes else math.inf

    @property
    def intensity(self) -> float:
        """FLOPs per payload byte of the phase that binds."""
        return min(self.forward_intensity, self.backward_intensity)


def mlp_layer_cost(
    global_batch_tokens: float, d_model: float, d_ff: float, *, dp: float = 1, fsdp: float = 1, tp: float = 1,
    backward_activation_collectives: int = 2, bytes_per_element: float = 2.0,
) -> MlpLayerCost:  # fmt: skip
    """What one chip computes and communicates for In[B, D] · W_in[D, F] · W_out[F, D].

    Formula: 4BDF / N FLOPs forward, twice that backward. Each matrix is gathered over fsdp (forward and backward) and
    its gradient scattered or, over dp, reduced; In is gathered and Out scattered over tp, B·D/X elements each.
    Assumes: (n - 1)/n taken as 1. `backward_activation_collectives` is 2 when In is kept from the forward pass, 3 when
    it is gathered again. Differs: the book's table for FSDP with TP counts 4, its algorithm 3, its table for TP 2.
    Source: the book, "Training", tables of the takeaways; the note, 2.2 to 2.5.
    """
    replicas = dp * fsdp
    forward = 4.0 * global_batch_tokens * d_model * d_ff / (replicas * tp)
    weights = 2.0 * d_model * d_ff * bytes_per_element / tp
    activation = global_batch_tokens * d_model * bytes_per_element / replicas if tp > 1 else 0.0
    return MlpLayerCost(
        forward_flops=forward,
        backward_flops=2.0 * forward,
        forward_fsdp_bytes=weights if fsdp > 1 else 0.0,
        forward_tp_bytes=2.0 * activation,
        backward_fsdp_bytes=2.0 * weights if replicas > 1 else 0.0,
        backward_tp_bytes=backward_activation_collectives * activation,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """Seconds of the forward pass of one MLP layer."""

    math_s: float
    fsdp_s: float
    tp_s: float
    comms_s: float

    @property
    def math_over_comms(self) -> float:
        return self.math_s / self.comms_s if self.comms_s else math.inf

    @property
    def compute_bound(self) -> bool:
        return self.math_s >= self.comms_s


# Seconds of two kinds of communication: one after the other, or at once.
COMBINED: Mapping[str, Callable[[float, float], float]] = {"sum": lambda fsdp_s, tp_s: fsdp_s + tp_s, "max": max}


def mlp_layer_times(
    global_batch_tokens: float, d_model: float, d_ff: float, flops_per_s: float, bytes_per_s: float, *,
    fsdp: float = 1, tp: float = 1, fsdp_axes: int = 1, tp_axes: int = 1, overlap: AxisOverlap = "sum",
) -> LayerTimes:  # fmt: skip
    """Seconds of an MLP layer's forward pass: compute, and communication of both kinds, added up or the longer one.

    Formula: T_math = 4BDF / (X·Y·C) and T_comms = 4DF / (Y·W·Mx) with 4BD / (X·W·My), their sum or the longer one.
    Source: the book, "Training" (`sum`); the note, 2.5 (`max`).
    """
    cost = mlp_layer_cost(global_batch_tokens, d_model, d_ff, fsdp=fsdp, tp=tp)
    fsdp_s = cost.forward_fsdp_bytes / (bytes_per_s * fsdp_axes)
    tp_s = cost.forward_tp_bytes / (bytes_per_s * tp_axes)
    comms_s = float(lookup(COMBINED, overlap, "overlap")(fsdp_s, tp_s))
    return LayerTimes(math_s=cost.forward_flops / flops_per_s, fsdp_s=fsdp_s, tp_s=tp_s, comms_s=comms_s)


def zero_comms_over_math(
    tokens_per_device: float, degree: float, flops_per_s: float, bytes_per_s: float, bytes_per_element: float = 2.0
) -> float:
    """Communication over compute of DP's backward pass, and of ZeRO-3's forward pass: the parameters cancel.

    Formula: (n - 1)/n · C·e / (2·T·W): an AllReduce of 2P elements against 4PT FLOPs, a gather of P against 2PT. W is what a
    device sends each second. Source: the playbook, A3. Differs: it leaves P in DP's, and counts elements (e = 1).
    """
    share = (degree - 1.0) / degree
    return share * flops_per_s * bytes_per_element / (2.0 * tokens_per_device * bytes_per_s)


def zero_balanced_tokens(
    degree: float, flops_per_s: float, bytes_per_s: float, bytes_per_element: float = 2.0
) -> float:  # fmt: skip
    """Tokens per device at which `zero_comms_over_math` is 1.

    Formula: (n - 1)/n · C·e / (2·W). Unit: tokens/device. Source: the playbook, A3.
    """
    return zero_comms_over_math(1.0, degree, flops_per_s, bytes_per_s, bytes_per_element)


def tp_comms_over_math(
    d_model: float, tp: float, flops_per_s: float, bytes_per_s: float, bytes_per_element: float = 2.0
) -> float:
    """Communication over compute of TP, whatever the batch.

    Formula: (n - 1) · C·e / (2·D·W). Source: the playbook, A3 (e = 1).
    """
    return (tp - 1.0) * flops_per_s * bytes_per_element / (2.0 * d_model * bytes_per_s)


def tp_elements(tokens: float, d_model: float, tp: float, num_layers: float = 1) -> float:
    """Elements that TP moves in a step.

    Formula: 8·L·T·D/n. Unit: elements. Source: the playbook, A3.
    """
    return num_layers * 8.0 * tokens * d_model / tp


@dataclass(frozen=True, slots=True, kw_only=True)
class Zero3Elements:
    """Elements of ZeRO-3's three collectives a step: a device's own shards, and what it receives of the others'."""

    own: float
    received: float


def zero3_elements(num_layers: float, d_model: float, degree: float) -> Zero3Elements:
    """Elements of ZeRO-3's two gathers and one scatter a step, for blocks of 16·D² parameters.

    Formula: 3·L·16·D²/n its own, (n - 1) times that received. Unit: elements.
    Source: the playbook, A3. Differs: it prints the own shards as what is communicated.
    """
    local_elements = 3.0 * num_layers * 16.0 * d_model**2 / degree
    return Zero3Elements(own=local_elements, received=local_elements * (degree - 1.0))


def ring_attention_times(
    seq_len: float, cp: float, num_heads: float, num_kv_heads: float, head_dim: float, flops_per_s: float,
    bytes_per_s: float, *, causal: bool = True, bytes_per_element: float = 2.0,
) -> ProductTimes:  # fmt: skip
    """One step of ring attention for one sequence: keys and values of T/n tokens sent on, (T/n)² scores computed.

    Formula: 2·T/n·K·H elements; 4·(T/n)²·N·H FLOPs, half when `causal`, as the zig-zag order has it on every device.
    Source: the playbook, "Context parallelism".
    """
    tokens_per_device = seq_len / cp
    return ProductTimes(
        math_s=4.0 * tokens_per_device**2 * num_heads * head_dim * (0.5 if causal else 1.0) / flops_per_s,
        comms_s=2.0 * tokens_per_device * num_kv_heads * head_dim * bytes_per_element / bytes_per_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceFlops:
    """Training FLOPs of one sequence: those of the matrices, and of attention's scores."""

    matrices: float
    scores: float

    @property
    def total(self) -> float:
        return self.matrices + self.scores

    @property
    def scores_share(self) -> float:
        return self.scores / self.total


def sequence_training_flops(num_params: float, num_layers: float, d_model: float, seq_len: float) -> SequenceFlops:
    """FLOPs that one sequence trains with: of the matrices, and of attention's scores over the whole square.

    Formula: 6·T·P and 12·L·D·T². Unit: FLOPs. Source: the playbook, A2, which takes the second off where T² << D.
    Differs: the second is small where 2·L·D·T << P.
    """
    return SequenceFlops(matrices=6.0 * seq_len * num_params, scores=12.0 * num_layers * d_model * seq_len**2)


def gemm_flops_per_token(num_layers: float, d_model: float, ff_ratio: float, vocab_size: float) -> float:
    """Training FLOPs per token in matrices, for multi-head attention and a gated MLP of F = f·D.

    Formula: L(24 + 18f)·D² + 6·D·V. Unit: FLOPs/token. Source: the note, 1.4. Differs: grouped key-value heads have fewer.
    """
    return num_layers * (24.0 + 18.0 * ff_ratio) * d_model**2 + 6.0 * d_model * vocab_size


def causal_scores_equal_gemm_seq_len(
    num_layers: float, d_model: float, ff_ratio: float, vocab_size: float
) -> float:  # fmt: skip
    """Sequence length T at which causal attention's FLOPs per token, 6·L·D·T, are `gemm_flops_per_token`.

    Attention adds T over it to the FLOPs of shorter sequences.
    Formula: D(4 + 3f) + V/L. Unit: tokens. Source: the note, 1.4.
    """
    return d_model * (4.0 + 3.0 * ff_ratio) + vocab_size / num_layers


def causal_scores_over_gemm(
    seq_len: float, num_layers: float, d_model: float, ff_ratio: float, vocab_size: float
) -> float:
    """FLOPs of causal attention over those of the matrices.

    Formula: T / (D(4 + 3f) + V/L). Source: the note, 1.4.
    """
    return seq_len / causal_scores_equal_gemm_seq_len(num_layers, d_model, ff_ratio, vocab_size)


def embedding_share(vocab_size: float, d_model: float, num_params: float) -> float:
    """By how much 6·P·T overstates the FLOPs where the input embedding is a table of its own.

    Formula: V·D / P. Source: the note, 1.4.
    """
    return vocab_size * d_model / num_params
