"""The books' closed forms, as explanations beside a derived estimate: nothing is planned with them.

Letters as in the books: B tokens of a global batch, D model width, F hidden width, L layers, N chips, X and Y the
degrees of fsdp and tp on Mx and My axes of the torus, C FLOP/s of a chip, W bytes/s of one axis in both directions, and
alpha = C / W. Both books take an ungated MLP (two matrices) of bf16 for their bounds on communication.

Sources: "the book" is Austin et al., How to Scale Your Model, 2025; "the note" is Stratos, Compute-Bound Training,
2026; "the playbook" is Tazi et al., The Ultra-Scale Playbook, 2025.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal

from shardwise.cluster.cluster import Cluster
from shardwise.cluster.topology import Switched
from shardwise.dtypes import bytes_per_element
from shardwise.errors import InputError
from shardwise.job import Job, precision_named
from shardwise.model.architecture import Architecture
from shardwise.model.counts import num_params
from shardwise.schedule.closed_form import bubble_ratio

AxisOverlap = Literal["sum", "max"]

BOOK = "Austin et al., How to Scale Your Model, 2025"
NOTE = "Stratos, Compute-Bound Training, 2026"
SECONDS_PER_DAY = 86400.0


# Bounds on the batch and the degrees


def critical_intensity(flops_per_s: float, bytes_per_s: float, bytes_per_element: float = 2.0) -> float:
    """alpha, in FLOPs per byte of a 2-byte format: what work must do with a byte it moves to be bound by compute.

    Formula: (C / W) * (bytes per element / 2), so that every bound below holds for other formats too: int8 doubles C
    and halves the bytes, which leaves the bounds as they are. W may be a link's bandwidth or the memory's.
    Source: the book, "All About Rooflines"; the note, section 2.1 (I*).
    """
    return flops_per_s / bytes_per_s * bytes_per_element / 2.0


def fsdp_min_tokens_per_chip(alpha: float, num_axes: int = 1) -> float:
    """Tokens per chip from which DP or FSDP over `num_axes` axes is compute-bound: alpha / M (850 on v5p, three axes).

    DP's backward pass and FSDP's forward and backward passes all do B/X FLOPs per byte, so all have this bound.
    Assumes: communication behind compute, rings on all axes. Source: the book, "Training", FSDP; the note, 2.2 and 2.3.
    """
    return alpha / num_axes


def tp_max_degree(alpha: float, d_ff: float, num_axes: int = 1) -> float:
    """Largest degree of tensor parallelism that is compute-bound: M·F / alpha, for any batch.

    Source: the book, "Training", tensor parallelism; the note, 2.4, which writes it as a bound on the width.
    """
    return num_axes * d_ff / alpha


def tp_min_d_ff(alpha: float, tp: float, num_axes: int = 1) -> float:
    """Hidden width from which `tp`-way tensor parallelism is compute-bound: tp·alpha / M. Source: the note, 2.4."""
    return tp * alpha / num_axes


def mixed_min_tokens_per_chip(
    alpha: float, d_ff: float, fsdp_axes: int = 2, tp_axes: int = 1, overlap: AxisOverlap = "sum"
) -> float:
    """Tokens per chip from which FSDP with TP, at the best split, is compute-bound.

    Formula: 4·alpha² / (Mx·My·F) under `sum`, where the two kinds of communication follow one another (the book);
    a quarter of it under `max`, where they run at once on different axes (the note, 2.5). 453.6 and 113.4 for Llama-3
    70B on v5p. Assumes: the split is `fsdp_optimal_degree`, whole or not.
    """
    factor = {"sum": 4.0, "max": 1.0}.get(overlap)
    if factor is None:
        raise InputError(f"overlap: found {overlap!r}; sum or max is required")
    return factor * alpha**2 / (fsdp_axes * tp_axes * d_ff)


def fsdp_optimal_degree(
    global_batch_tokens: float, d_ff: float, num_chips: float, fsdp_axes: int = 2, tp_axes: int = 1
) -> float:
    """X that gives FSDP and TP communication the same time, X = sqrt(B·Mx·N / (F·My)); it minimises sum and maximum.

    Not rounded, and not held between 1 and N. Source: the book, "Training", mixed FSDP and TP; the note, 2.5.
    """
    return math.sqrt(global_batch_tokens * fsdp_axes * num_chips / (d_ff * tp_axes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Degrees whose product is the number of chips."""

    fsdp: int
    tp: int


def nearest_split(num_chips: int, fsdp_degree: float) -> Split:
    """The split with a power-of-two `tp` that divides the chips whose `fsdp` is nearest in ratio to `fsdp_degree`."""
    powers = [2**i for i in range(num_chips.bit_length()) if num_chips % 2**i == 0]
    tp = min(powers, key=lambda p: abs(math.log(num_chips / p / fsdp_degree)))
    return Split(fsdp=num_chips // tp, tp=tp)


def mixed_math_over_comms(
    tokens_per_chip: float,
    d_ff: float,
    alpha: float,
    fsdp_axes: int = 2,
    tp_axes: int = 1,
    overlap: AxisOverlap = "sum",
) -> float:
    """Time of compute over time of communication at the best split; it grows as the square root of the batch.

    Formula: sqrt(tokens per chip / the bound of `mixed_min_tokens_per_chip`). Source: the book, "Training".
    """
    return math.sqrt(tokens_per_chip / mixed_min_tokens_per_chip(alpha, d_ff, fsdp_axes, tp_axes, overlap))


def is_compute_bound(tokens_per_chip: float, min_tokens_per_chip: float) -> bool:
    """Whether a batch reaches a bound."""
    return tokens_per_chip >= min_tokens_per_chip


def tokens_per_chip(global_batch_tokens: float, num_chips: float) -> float:
    """B / N, what every bound on the batch is compared with."""
    return global_batch_tokens / num_chips


def min_batch_tokens(num_chips: float, min_tokens_per_chip: float) -> float:
    """Tokens of a global batch that give every chip the least that it needs."""
    return num_chips * min_tokens_per_chip


def max_chips(global_batch_tokens: float, min_tokens_per_chip: float) -> float:
    """Chips that a batch keeps compute-bound, not rounded: B over the bound in tokens per chip."""
    return global_batch_tokens / min_tokens_per_chip


def dcn_min_tokens_per_pod(pod_flops_per_s: float, num_hosts: float, host_bytes_per_s: float) -> float:
    """Tokens per pod from which data parallelism between pods is compute-bound: C / W of the pod and its hosts' egress.

    73,440 for a full v5p pod of 2240 hosts with 25 GB/s each. Source: the book, "Training", scaling between pods.
    """
    return critical_intensity(pod_flops_per_s, num_hosts * host_bytes_per_s)


def dcn_bytes_per_s_per_chip(host_bytes_per_s: float, chips_per_host: float) -> float:
    """Egress to the data-centre network for each chip of a host, in bytes/s."""
    return host_bytes_per_s / chips_per_host


# Rooflines


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Seconds of work that overlaps fully, and of work done one after the other."""

    lower_s: float
    upper_s: float


def time_bounds(*seconds: float) -> Bounds:
    """The longest part, with perfect overlap, and the sum of the parts, with none: at most a factor of their number."""
    return Bounds(lower_s=max(seconds), upper_s=sum(seconds))


def attainable_flops_per_s(intensity: float, flops_per_s: float, bytes_per_s: float) -> float:
    """The roofline, min(C, W·intensity), in FLOP/s. Source: the book, "All About Rooflines"."""
    return min(flops_per_s, bytes_per_s * intensity)


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulCost:
    """FLOPs of one product, and bytes that it reads and writes."""

    flops: float
    read_bytes: float
    written_bytes: float

    @property
    def intensity(self) -> float:
        return self.flops / (self.read_bytes + self.written_bytes)

    def math_s(self, flops_per_s: float) -> float:
        return self.flops / flops_per_s

    def bounds(self, flops_per_s: float, bytes_per_s: float) -> Bounds:
        """The product's time with its traffic to memory, overlapped or not."""
        return time_bounds(self.flops / flops_per_s, (self.read_bytes + self.written_bytes) / bytes_per_s)


def matmul_cost(batch: float, d_in: float, d_out: float, bytes_per_element: float = 2.0) -> MatmulCost:
    """[B, D] · [D, F]: 2BDF FLOPs; (BD + DF) elements read and BF written. Source: the book, "All About Rooflines"."""
    return MatmulCost(
        flops=2.0 * batch * d_in * d_out,
        read_bytes=(batch * d_in + d_in * d_out) * bytes_per_element,
        written_bytes=batch * d_out * bytes_per_element,
    )


def matmul_critical_batch(
    flops_per_s: float,
    bytes_per_s: float,
    d_in: float = math.inf,
    d_out: float = math.inf,
    bytes_per_element: float = 2.0,
) -> float:
    """Batch from which [B, D] · [D, F] is bound by compute rather than by memory; C / W in bf16 for wide matrices.

    Formula: B = I / (1 - I (1/D + 1/F)) with I of `critical_intensity`; infinite where the matrices are too narrow.
    Source: the book, "All About Rooflines", which leaves the second factor out.
    """
    intensity = critical_intensity(flops_per_s, bytes_per_s, bytes_per_element)
    room = 1.0 - intensity * (1.0 / d_in + 1.0 / d_out)
    return intensity / room if room > 0 else math.inf


# One MLP layer


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


# Parameters and FLOPs of a transformer


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamsByPart:
    """Parameters of a model's parts; they add up to `num_params`."""

    mlp: int
    attention: int
    vocabulary: int
    norms: int

    @property
    def total(self) -> int:
        return self.mlp + self.attention + self.vocabulary + self.norms

    @property
    def mlp_share(self) -> float:
        return self.mlp / self.total

    @property
    def attention_share_of_blocks(self) -> float:
        """Attention's part of the matrices of the blocks."""
        return self.attention / (self.mlp + self.attention)


def params_by_part(architecture: Architecture) -> ParamsByPart:
    """Parameters in MLPs (3·L·D·F when gated), attention (2·L·D·(N + K)·H), vocabulary (2·V·D untied) and norms."""
    a = architecture
    mlp = a.num_layers * (3 if a.gated else 2) * a.d_model * a.d_ff
    attention = 2 * a.num_layers * a.d_model * (a.num_heads + a.num_kv_heads) * a.head_dim
    vocabulary = (1 if a.tied_embeddings else 2) * a.vocab_size * a.d_model
    return ParamsByPart(
        mlp=mlp, attention=attention, vocabulary=vocabulary, norms=num_params(a) - mlp - attention - vocabulary
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFlops:
    """FLOPs of one block in training, forward and backward; `scores` are the two products of attention."""

    mlp: float
    projections: float
    scores: float


def block_training_flops(
    architecture: Architecture, seqs: float, seq_len: float, *, causal: bool = False
) -> BlockFlops:
    """6·B·T FLOPs per matrix element, and 12·B·T²·N·H for attention's scores, half of it when `causal`.

    Source: the book, "Transformers" (whole square); the note, 1.4 (causal half). Differs: see `model_flops_per_token`.
    """
    parts, a, tokens = params_by_part(architecture), architecture, seqs * seq_len
    scores = 12.0 * tokens * seq_len * a.num_heads * a.head_dim
    return BlockFlops(
        mlp=6.0 * tokens * parts.mlp / a.num_layers,
        projections=6.0 * tokens * parts.attention / a.num_layers,
        scores=scores / 2.0 if causal else scores,
    )


def scores_equal_projections_seq_len(d_model: float) -> float:
    """Sequence length at which attention's scores cost what its projections do: 2D (multi-head, whole square)."""
    return 2.0 * d_model


def scores_equal_block_seq_len(d_model: float) -> float:
    """Sequence length at which attention's scores cost what all of a block's matrices do: 8D.

    Assumes: a gated MLP with F = 4D, N·H = D, multi-head attention, the whole square. Source: the book, "Transformers".
    """
    return 8.0 * d_model


def kv_cache_bytes_per_token(num_layers: float, kv_width: float, bytes_per_element: float = 2.0) -> float:
    """2·L·K·H elements: keys and values of every layer. Source: the book, "Transformers"."""
    return 2.0 * num_layers * kv_width * bytes_per_element


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTimes:
    """A pipeline's step: bubble over ideal time, its length, and the idle part of that."""

    bubble_ratio: float
    makespan_s: float
    idle_fraction: float


def pipeline_times(
    pp: int, num_micro_batches: int, forward_s: float, backward_s: float, num_virtual_stages: int = 1
) -> PipelineTimes:
    """A step of AFAB, 1F1B or interleaved 1F1B whose stages take the same time for each micro-batch.

    Formula: m·(f + b)·(1 + r) with r of `bubble_ratio`; idle r / (1 + r). Source: the playbook, "Pipeline parallelism".
    """
    ratio = float(bubble_ratio(pp, num_micro_batches, num_virtual_stages))
    ideal = num_micro_batches * (forward_s + backward_s)
    return PipelineTimes(bubble_ratio=ratio, makespan_s=ideal * (1 + ratio), idle_fraction=ratio / (1 + ratio))


# Training as a whole


def training_flops(num_params: float, tokens: float, *, recompute: bool = False) -> float:
    """6·P·T FLOPs (2 forward, 4 backward); 8·P·T when every block runs forward again.

    Assumes: attention left out, every parameter in a matrix product. Differs: the note takes the input embedding's V·D
    parameters off and adds causal attention. Source: the book, "Transformers".
    """
    return (8.0 if recompute else 6.0) * num_params * tokens


def training_seconds(num_params: float, tokens: float, num_chips: float, flops_per_s: float, mfu: float = 1.0) -> float:
    """6·P·T / (N·C·MFU) seconds: 44.3 days for 70e9 parameters, 15e12 tokens and 8960 v5p at 0.40. Source: the book."""
    return training_flops(num_params, tokens) / (num_chips * flops_per_s * mfu)


def rescaled_seconds(seconds: float, num_chips: float, target_chips: float) -> float:
    """The time on another number of chips at the same utilisation: t·N / N'."""
    return seconds * num_chips / target_chips


def flops_utilisation(
    num_params: float, tokens: float, seconds: float, num_chips: float, flops_per_s: float, *, recompute: bool = False
) -> float:
    """MFU of 6·P·T FLOPs in a measured time, or HFU where `recompute` counts the forward pass run again (8·P·T).

    Differs: `Estimate.mfu` counts causal attention too. Source: the playbook, "Activation recomputation".
    """
    return training_flops(num_params, tokens, recompute=recompute) / (seconds * num_chips * flops_per_s)


# Memory


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes of training state on one device."""

    weights: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer


def zero_state_bytes(
    num_params: float, zero_stage: int = 0, degree: float = 1, *, weight_bytes: float = 2.0,
    gradient_bytes: float = 2.0, optimizer_bytes: float = 12.0,
) -> StateBytes:  # fmt: skip
    """State of `num_params` parameters on each of `degree` devices under a stage of ZeRO.

    Formula: 2P + 2P + kP; stage 1 divides the optimizer's part by the degree, stage 2 the gradients' too, stage 3 all.
    `optimizer_bytes` k is 12 with a master copy in fp32, 8 without; fp32 gradients beside the bf16 ones take 6.
    Source: the playbook, "ZeRO". Differs: the book leaves gradients out (2 + 8 = 10 bytes).
    """
    _require_stage(zero_stage)
    shard = num_params / degree
    return StateBytes(
        weights=weight_bytes * (shard if zero_stage >= 3 else num_params),
        gradients=gradient_bytes * (shard if zero_stage >= 2 else num_params),
        optimizer=optimizer_bytes * (shard if zero_stage >= 1 else num_params),
    )


def _require_stage(zero_stage: int) -> None:
    if zero_stage not in (0, 1, 2, 3):
        raise InputError(f"zero_stage: found {zero_stage!r}; one of 0, 1, 2, 3 is required")


def zero_memory_reduction(
    zero_stage: int, degree: float = math.inf, *, weight_bytes: float = 2.0, gradient_bytes: float = 2.0,
    optimizer_bytes: float = 12.0,
) -> float:  # fmt: skip
    """How many times less state a stage of ZeRO keeps than none does; 4 for stage 1 and 8 for stage 2 in the limit."""
    state = partial(
        zero_state_bytes, 1.0, weight_bytes=weight_bytes, gradient_bytes=gradient_bytes, optimizer_bytes=optimizer_bytes
    )
    return state().total / state(zero_stage, degree).total


def zero_traffic_per_param(zero_stage: int, num_micro_batches: int = 1) -> int:
    """Elements that each device sends per parameter and step, (n - 1)/n taken as 1: 2, 2, a + 1, 3a for stages 0 to 3.

    Source: the playbook, "ZeRO", for one micro-batch. Differs: the book counts all stages alike, taking the
    forward gather to be hidden.
    """
    _require_stage(zero_stage)
    return (2, 2, num_micro_batches + 1, 3 * num_micro_batches)[zero_stage]


def zero3_extra_all_gathers(num_layers: int) -> int:
    """AllGathers of a step that ZeRO-3 has beyond ZeRO-2: 2L - 1, as the last layer stays gathered.

    Source: the playbook, "ZeRO".
    """
    return 2 * num_layers - 1


def max_params_per_device(memory_bytes: float, bytes_per_param: float) -> float:
    """Parameters whose replicated state fills a device, activations left out. Source: the book, "Training", DP."""
    return memory_bytes / bytes_per_param


def checkpoint_bytes(
    tokens: float, num_layers: float, d_model: float, *, num_d_model: float = 1, d_ff: float = 0, num_d_ff: float = 0,
    bytes_per_element: float = 2.0,
) -> float:  # fmt: skip
    """Bytes of activations kept for a batch: per token and layer `num_d_model` arrays of D and `num_d_ff` of F.

    Assumes: nothing else is kept. Source: the book, "Transformers", gradient checkpointing.
    """
    return bytes_per_element * tokens * num_layers * (num_d_model * d_model + num_d_ff * d_ff)


def bytes_per_chip(
    num_params: float, bytes_per_param: float, activation_bytes: float, num_chips: float
) -> float:  # fmt: skip
    """State and activations shared evenly by all chips: (P·bytes per parameter + activations) / N. Source: the book."""
    return (num_params * bytes_per_param + activation_bytes) / num_chips


def min_chips(total_bytes: float, memory_bytes: float) -> int:
    """Chips whose memory holds so many bytes."""
    return math.ceil(total_bytes / memory_bytes)


# The rules for one model, cluster and job


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One closed form with its numbers: what it gives, what that means here, how and after whom."""

    name: str
    value: float
    unit: str
    verdict: str
    formula: str
    source: str


def book_rules(architecture: Architecture, cluster: Cluster, job: Job) -> tuple[Rule, ...]:
    """The books' rules for one job, in the order they are read.

    A torus of k axes gives FSDP all k of them alone, and k - 1 beside one for TP; behind switches each has one "axis",
    the egress of a device on the tier that spans the cluster. The time is left out of a job without a length in tokens.
    """
    return _Book(architecture, cluster, job).rules()


class _Book:
    """The letters of the books for one job."""

    def __init__(self, architecture: Architecture, cluster: Cluster, job: Job) -> None:
        self.job, self.topology, self.num_chips = job, cluster.topology, cluster.num_devices
        self.precision = precision_named(job.precision)
        dtype = self.precision.activations
        self.flops_per_s, self.axis_bytes_per_s = cluster.chip.peak(dtype), self.topology.axis_bytes_per_s()
        self.alpha = critical_intensity(self.flops_per_s, self.axis_bytes_per_s, bytes_per_element(dtype))
        switched = isinstance(self.topology, Switched)
        self.axes = 1 if switched else max(1, sum(size > 1 for size in self.topology.levels))
        self.fsdp_axes = max(1, self.axes - 1)
        self.d_ff = architecture.d_ff
        self.tokens = tokens_per_chip(job.global_batch_tokens, self.num_chips)
        nominal = architecture.nominal_num_params
        self.num_params = float(nominal or num_params(architecture))
        self.counted = "nominal number of parameters" if nominal else "counted number of parameters"

    def network(self) -> str:
        """What W is, and what the books assume of it that may not hold here."""
        if isinstance(self.topology, Switched):
            tier = "egress of a device on the tier that spans the cluster; M = Mx = My = 1"
            return f"W = {self.axis_bytes_per_s:.3g} B/s, {tier}"
        wraps = all(wrap for wrap, size in zip(self.topology.wraps, self.topology.shape, strict=True) if size > 1)
        ring = "" if wraps else ", which an axis here that does not wrap has half of"
        return f"W = {self.axis_bytes_per_s:.3g} B/s, one wrapped axis in both directions{ring}"

    def against(self, bound: float) -> str:
        """Which side of a bound on tokens per chip the job is on."""
        bound_by, sign = (
            ("compute-bound", "≥") if is_compute_bound(self.tokens, bound) else ("communication-bound", "<")
        )
        return f"{bound_by}: {self.tokens:,.1f} {sign} {bound:,.1f} tokens per chip"

    def rules(self) -> tuple[Rule, ...]:
        return (*self.batch_rules(), *self.mixed_rules(), *self.time_rules())

    def batch_rules(self) -> tuple[Rule, ...]:
        fsdp, batch = fsdp_min_tokens_per_chip(self.alpha, self.axes), self.job.global_batch_tokens
        usable, tp = max_chips(batch, fsdp), tp_max_degree(self.alpha, self.d_ff)
        widest = tp_max_degree(self.alpha, self.d_ff, self.axes)
        peak = f"C = {self.flops_per_s:.4g} FLOP/s ({self.precision.activations})"
        return (
            Rule(name="critical_intensity", value=self.alpha, unit="FLOPs/byte", source=f"{BOOK}; {NOTE}, 2.1",
                 verdict=f"each byte sent must go with {self.alpha:,.0f} FLOPs",
                 formula=f"alpha = C / W with {peak}; {self.network()}"),
            Rule(name="tokens_per_chip", value=self.tokens, unit="tokens/chip", source=BOOK,
                 verdict=f"{batch} tokens over {self.num_chips} chips", formula="B / N"),
            Rule(name="fsdp_min_tokens_per_chip", value=fsdp, unit="tokens/chip",
                 verdict=f"FSDP alone is {self.against(fsdp)}", formula=f"alpha / M with M = {self.axes}",
                 source=f"{BOOK}, FSDP; {NOTE}, 2.3"),
            Rule(name="fsdp_max_chips", value=usable, unit="chips",
                 verdict=f"FSDP alone keeps {min(usable, self.num_chips):.0f} of {self.num_chips} chips compute-bound",
                 formula="B·M / alpha", source=f"{BOOK}, FSDP"),
            Rule(name="tp_max_degree", value=tp, unit="chips", formula="My·F / alpha with My = 1",
                 verdict=f"TP is compute-bound up to {tp:.3g} ways on one axis, {widest:.3g} on M = {self.axes}",
                 source=f"{BOOK}, tensor parallelism; {NOTE}, 2.4"),
        )  # fmt: skip

    def mixed_rules(self) -> tuple[Rule, ...]:
        added, overlapped = (
            mixed_min_tokens_per_chip(self.alpha, self.d_ff, self.fsdp_axes, 1, overlap) for overlap in ("sum", "max")
        )
        degree = fsdp_optimal_degree(self.job.global_batch_tokens, self.d_ff, self.num_chips, self.fsdp_axes)
        split = nearest_split(self.num_chips, degree)
        axes = f"Mx = {self.fsdp_axes}, My = 1"
        return (
            Rule(name="mixed_min_tokens_per_chip_sum", value=added, unit="tokens/chip",
                 verdict=f"FSDP with TP is {self.against(added)}", source=f"{BOOK}, mixed FSDP and TP",
                 formula=f"4·alpha² / (Mx·My·F) with {axes}: communication of both adds up"),
            Rule(name="mixed_min_tokens_per_chip_max", value=overlapped, unit="tokens/chip",
                 verdict=f"FSDP with TP is {self.against(overlapped)}", source=f"{NOTE}, 2.5",
                 formula=f"alpha² / (Mx·My·F) with {axes}: communication of both overlaps"),
            Rule(name="fsdp_optimal_degree", value=degree, unit="chips",
                 verdict=f"the nearest split with a power of two for TP is fsdp = {split.fsdp}, tp = {split.tp}",
                 formula=f"X = sqrt(B·Mx·N / (F·My)) with {axes}", source=f"{BOOK}, mixed FSDP and TP; {NOTE}, 2.5"),
        )  # fmt: skip

    def time_rules(self) -> tuple[Rule, ...]:
        if self.job.tokens is None:
            return ()
        seconds = training_seconds(self.num_params, self.job.tokens, self.num_chips, self.flops_per_s, 0.40)
        days, params = seconds / SECONDS_PER_DAY, f"P = {self.num_params:.4g}, the {self.counted}"
        return (
            Rule(name="train_days_at_40_mfu", value=days, unit="days", source=BOOK,
                 verdict=f"{days:.1f} days at 40% of the peak, attention left out",
                 formula=f"6·P·T / (N·C·0.40) with {params}, and T = {self.job.tokens:.4g} tokens"),
        )  # fmt: skip
