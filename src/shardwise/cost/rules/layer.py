"""One MLP layer under data, fully sharded, tensor and mixed parallelism."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardwise.cost.rules.bounds import AxisOverlap


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
        """That of the phase that binds."""
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


def mlp_layer_times(
    global_batch_tokens: float, d_model: float, d_ff: float, flops_per_s: float, bytes_per_s: float, *,
    fsdp: float = 1, tp: float = 1, fsdp_axes: int = 1, tp_axes: int = 1, overlap: AxisOverlap = "sum",
) -> LayerTimes:  # fmt: skip
    """T_math = 4BDF / (X·Y·C) and T_comms = 4DF / (Y·W·Mx) with 4BD / (X·W·My), their sum or the longer one.

    Source: the book, "Training" (`sum`); the note, 2.5 (`max`).
    """
    cost = mlp_layer_cost(global_batch_tokens, d_model, d_ff, fsdp=fsdp, tp=tp)
    fsdp_s = cost.forward_fsdp_bytes / (bytes_per_s * fsdp_axes)
    tp_s = cost.forward_tp_bytes / (bytes_per_s * tp_axes)
    comms_s = fsdp_s + tp_s if overlap == "sum" else max(fsdp_s, tp_s)
    return LayerTimes(math_s=cost.forward_flops / flops_per_s, fsdp_s=fsdp_s, tp_s=tp_s, comms_s=comms_s)
