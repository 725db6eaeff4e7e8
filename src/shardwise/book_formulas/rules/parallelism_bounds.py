"""Bounds on the batch and the degrees: when communication takes longer than compute."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from shardwise.values import lookup

AxisOverlap = Literal["sum", "max"]


def critical_intensity(flops_per_s: float, bytes_per_s: float, bytes_per_element: float = 2.0) -> float:
    """alpha, in FLOPs per byte of a 2-byte format: what work must do with a byte it moves to be bound by compute.

    So defined every bound below holds for other formats too: int8 doubles C and halves the bytes, which leaves the bounds as
    they are. W may be a link's bandwidth or the memory's.
    Formula: (C / W) · (bytes per element / 2). Unit: FLOPs/byte.
    Source: the book, "All About Rooflines"; the note, section 2.1 (I*).
    """
    return flops_per_s / bytes_per_s * bytes_per_element / 2.0


def fsdp_min_tokens_per_chip(alpha: float, num_axes: int = 1) -> float:
    """Tokens per chip from which DP or FSDP over `num_axes` axes is compute-bound (850 on v5p, three axes).

    DP's backward pass and FSDP's forward and backward passes all do B/X FLOPs per byte, so all have this bound.
    Formula: alpha / M. Unit: tokens/chip.
    Assumes: communication behind compute, rings on all axes (an axis that does not wrap has about half the bandwidth).
    Source: the book, "Training", FSDP; the note, 2.2 and 2.3.
    """
    return alpha / num_axes


def tp_max_degree(alpha: float, d_ff: float, num_axes: int = 1) -> float:
    """Largest degree of tensor parallelism that is compute-bound, for any batch.

    Formula: M·F / alpha. Unit: chips.
    Assumes: communication behind compute, rings on all axes (an axis that does not wrap has about half the bandwidth).
    Source: the book, "Training", tensor parallelism; the note, 2.4, which writes it as a bound on the width.
    """
    return num_axes * d_ff / alpha


def tp_min_d_ff(alpha: float, tp: float, num_axes: int = 1) -> float:
    """Hidden width from which `tp`-way tensor parallelism is compute-bound.

    Formula: tp·alpha / M. Unit: elements. Source: the note, 2.4.
    """
    return tp * alpha / num_axes


def tp_is_compute_bound(tp: float, alpha: float, d_ff: float, num_axes: int = 1) -> bool:
    """Whether `tp`-way tensor parallelism is within `tp_max_degree`.

    Formula: tp ≤ M·F / alpha. Source: the book, "Training", tensor parallelism; the note, 2.4.
    """
    return tp <= tp_max_degree(alpha, d_ff, num_axes)


def tp_max_by_heads(num_heads: int, num_kv_heads: int, *, repeat_kv: bool = True) -> int:
    """Largest degree of TP that splits attention by heads: the query heads, or the key-value heads if none is held twice.

    Formula: N with `repeat_kv`, otherwise K. Unit: chips. Source: the playbook, "Tensor parallelism".
    """
    return num_heads if repeat_kv else num_kv_heads


Scheme = Literal["dp", "fsdp", "tp", "fsdp_tp"]


def interconnect_intensity(scheme: Scheme, global_batch_tokens: float, d_ff: float, num_chips: float) -> float:
    """FLOPs per byte that a scheme does with all chips, one axis for each kind of communication: compute-bound from alpha on.

    Formula: B/N for DP and FSDP, F/N for TP, sqrt(B·F/N) for FSDP with TP at the best split, both kinds overlapped.
    Unit: FLOPs/byte. Source: the note, table 3.
    """
    by_batch, by_width = global_batch_tokens / num_chips, d_ff / num_chips
    mixed = math.sqrt(global_batch_tokens * by_width)
    return lookup({"dp": by_batch, "fsdp": by_batch, "tp": by_width, "fsdp_tp": mixed}, scheme, "scheme")


def mixed_min_tokens_per_chip(
    alpha: float, d_ff: float, fsdp_axes: int = 2, tp_axes: int = 1, overlap: AxisOverlap = "sum"
) -> float:
    """Tokens per chip from which FSDP with TP, at the best split, is compute-bound.

    Under `sum` the two kinds of communication follow one another, under `max` they run at once on different axes: 453.6 and
    113.4 for Llama-3 70B on v5p.
    Formula: 4·alpha² / (Mx·My·F) under `sum`, a quarter of it under `max`. Unit: tokens/chip.
    Assumes: the split is `fsdp_optimal_degree`, whole or not; rings on all axes (an
    axis that does not wrap has about half the bandwidth).
    Source: the book, "Training", mixed FSDP and TP (`sum`); the note, 2.5 (`max`).
    """
    factor = lookup({"sum": 4.0, "max": 1.0}, overlap, "overlap")
    return factor * alpha**2 / (fsdp_axes * tp_axes * d_ff)


def fsdp_optimal_degree(
    global_batch_tokens: float, d_ff: float, num_chips: float, fsdp_axes: int = 2, tp_axes: int = 1
) -> float:
    """The degree of fsdp that gives FSDP and TP communication the same time; it minimises their sum and their maximum.

    Not rounded, and not held between 1 and N.
    Formula: X = sqrt(B·Mx·N / (F·My)). Unit: chips.
    Source: the book, "Training", mixed FSDP and TP; the note, 2.5.
    """
    return math.sqrt(global_batch_tokens * fsdp_axes * num_chips / (d_ff * tp_axes))


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpTpSplit:
    """Degrees whose product is the number of chips."""

    fsdp: int
    tp: int


def nearest_split(num_chips: int, fsdp_degree: float) -> FsdpTpSplit:
    """The split with a power-of-two `tp` that divides the chips whose `fsdp` is nearest in ratio to `fsdp_degree`.

    Formula: N = X·Y with Y = 2^i that minimises |log(N / (Y·X'))|, X' the degree asked for. Unit: chips.
    Source: the book, "Training", mixed FSDP and TP, which rounds its optimum so.
    """
    powers = [2**i for i in range(num_chips.bit_length()) if num_chips % 2**i == 0]
    tp = min(powers, key=lambda p: abs(math.log(num_chips / p / fsdp_degree)))
    return FsdpTpSplit(fsdp=num_chips // tp, tp=tp)


def mixed_math_over_comms(
    tokens_per_chip: float, d_ff: float, alpha: float, fsdp_axes: int = 2, tp_axes: int = 1, overlap: AxisOverlap = "sum"
) -> float:  # fmt: skip
    """Time of compute over time of communication at the best split; it grows as the square root of the batch.

    Formula: sqrt(tokens per chip / the bound of `mixed_min_tokens_per_chip`).
    Assumes: rings on all axes (an axis that does not wrap has about half the bandwidth).
    Source: the book, "Training".
    """
    return math.sqrt(tokens_per_chip / mixed_min_tokens_per_chip(alpha, d_ff, fsdp_axes, tp_axes, overlap))


def is_compute_bound(tokens_per_chip: float, min_tokens_per_chip: float) -> bool:
    """Whether a batch reaches a bound.

    Formula: B/N ≥ the bound. Source: the book, "Training".
    """
    return tokens_per_chip >= min_tokens_per_chip


def tokens_per_chip(global_batch_tokens: float, num_chips: float) -> float:
    """What every bound on the batch is compared with.

    Formula: B / N. Unit: tokens/chip. Source: the book, "Training".
    """
    return global_batch_tokens / num_chips


def min_batch_tokens(num_chips: float, min_tokens_per_chip: float) -> float:
    """Tokens of a global batch that give every chip the least that it needs.

    Formula: N · the bound in tokens per chip. Unit: tokens. Source: the book, "Training".
    """
    return num_chips * min_tokens_per_chip


def max_chips(global_batch_tokens: float, min_tokens_per_chip: float) -> float:
    """Chips that a batch keeps compute-bound, not rounded.

    Formula: B / the bound in tokens per chip. Unit: chips. Source: the book, "Training".
    """
    return global_batch_tokens / min_tokens_per_chip


def axes_bytes_per_s(link_bytes_per_s: float, num_axes: int = 1) -> float:
    """W of wrapped axes: links in both directions of each, in bytes/s.

    Formula: 2·M·(bytes/s of a link, one way). Source: the book, "TPUs".
    """
    return 2.0 * num_axes * link_bytes_per_s


def num_hosts(num_chips: float, chips_per_host: float) -> float:
    """Hosts of a pod, not rounded.

    Formula: chips / chips of a host. Unit: hosts. Source: the book, "TPUs".
    """
    return num_chips / chips_per_host


def num_pods(num_chips: float, pod_chips: float) -> float:
    """Chips in pods, not rounded.

    Formula: chips / chips of a pod. Unit: pods. Source: the book, "Training", scaling between pods.
    """
    return num_chips / pod_chips


def dcn_bytes_per_s(num_hosts: float, host_bytes_per_s: float) -> float:
    """Egress of a pod to the data-centre network, all hosts together, in bytes/s.

    Formula: hosts · bytes/s of a host. Source: the book, "Training", scaling between pods.
    """
    return num_hosts * host_bytes_per_s


def dcn_min_tokens_per_pod(pod_flops_per_s: float, num_hosts: float, host_bytes_per_s: float) -> float:
    """Tokens per pod from which data parallelism between pods is compute-bound.

    73,440 for a full v5p pod of 2240 hosts with 25 GB/s each.
    Formula: C / W of the pod and its hosts' egress. Unit: tokens/pod. Source: the book, "Training", scaling between pods.
    """
    return critical_intensity(pod_flops_per_s, dcn_bytes_per_s(num_hosts, host_bytes_per_s))


def dcn_bytes_per_s_per_chip(host_bytes_per_s: float, chips_per_host: float) -> float:
    """Egress to the data-centre network for each chip of a host, in bytes/s.

    Formula: bytes/s of a host / its chips. Unit: B/s. Source: the book, "TPUs".
    """
    return host_bytes_per_s / chips_per_host
