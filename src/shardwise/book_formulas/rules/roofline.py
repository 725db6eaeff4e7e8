"""Rooflines: compute against memory; bounds on a product's batch and width."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated

from shardwise.book_formulas.rules.parallelism_bounds import critical_intensity
from shardwise.sharding import Mesh, Spec, contract
from shardwise.values import Hidden, Payload, printed


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeBounds:
    """Seconds of parts that overlap fully (`lower_s`), and one after the other (`upper_s`)."""

    lower_s: float
    upper_s: float

    @property
    def ratio(self) -> float:
        """Largest gain of overlap: the number of parts if they are equal."""
        return self.upper_s / self.lower_s


def time_bounds(*seconds: float) -> TimeBounds:
    """The longest part, with perfect overlap, and the sum of the parts, with none: at most a factor of their number."""
    return TimeBounds(lower_s=max(seconds), upper_s=sum(seconds))


def math_s(flops: float, flops_per_s: float) -> float:
    """T_math: FLOPs at the peak, in seconds.

    Formula: FLOPs / C. Source: the book, "All About Rooflines".
    """
    return flops / flops_per_s


def transfer_s(num_bytes: float, bytes_per_s: float, num_links: float = 1) -> float:
    """T_comms: bytes over a memory's or a link's bandwidth, shared by `num_links` links, in seconds.

    Formula: bytes / (links · W). Source: the book, "All About Rooflines".
    """
    return num_bytes / (num_links * bytes_per_s)


def dense_flops_per_s(sparse_flops_per_s: float) -> float:
    """The peak of dense products where a data sheet prints that with 2:4 sparsity.

    Formula: half of the sparse peak. Source: the book, "All About Rooflines", problems.
    """
    return sparse_flops_per_s / 2.0


def attainable_flops_per_s(intensity: float, flops_per_s: float, bytes_per_s: float) -> float:
    """The roofline: FLOP/s that an intensity allows.

    Formula: min(C, W·intensity). Source: the book, "All About Rooflines".
    """
    return min(flops_per_s, bytes_per_s * intensity)


def matmul_critical_batch(
    flops_per_s: float, bytes_per_s: float, d_in: float = math.inf, d_out: float = math.inf,
    bytes_per_element: float = 2.0,
) -> float:  # fmt: skip
    """Batch from which [B, D] · [D, F] is bound by compute rather than by memory; C / W in bf16 for wide matrices.

    Formula: B = I / (1 - I (1/D + 1/F)) with I of `critical_intensity`; infinite where the matrices are too narrow. Unit: tokens.
    Source: the book, "All About Rooflines", which leaves the second factor out.
    """
    intensity = critical_intensity(flops_per_s, bytes_per_s, bytes_per_element)
    denominator = 1.0 - intensity * (1.0 / d_in + 1.0 / d_out)
    return intensity / denominator if denominator > 0 else math.inf


def linear_width(d_in: float, d_out: float) -> float:
    """The width that a layer's intensity sees: 1 / (1/B + 1/width) in bf16.

    Formula: D·F / (D + F). Unit: elements. Source: the note, 1.2.
    """
    return d_in * d_out / (d_in + d_out)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearIntensity:
    """FLOPs per byte of a bf16 linear layer; at least `lower`, half the smaller of batch and width, at most `upper`."""

    value: float
    lower: float
    upper: float


def linear_intensity(batch: float, width: float) -> LinearIntensity:
    """Intensity of a linear layer from its batch and `linear_width`, and bounds on it.

    Formula: 1 / (1/B + 1/width), between half the smaller of the two and the smaller. Unit: FLOPs/byte. Source: the note, 1.2.
    """
    smaller = min(batch, width)
    return LinearIntensity(value=1.0 / (1.0 / batch + 1.0 / width), lower=smaller / 2.0, upper=smaller)


def attention_critical_seq_len(intensity: float, queries_per_kv_head: float = 1) -> float:
    """Sequence length from which attention over a whole prompt is bound by compute, in bf16.

    G query heads share a key-value head: T·G/(G + 1) FLOPs per byte. 2I for multi-head attention, I for large G.
    Formula: I·(G + 1)/G. Unit: tokens.
    Source: the book, "Transformers", questions. Differs: the book prints I, the limit of large G.
    """
    return intensity * (1.0 + 1.0 / queries_per_kv_head)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductTimes:
    """Seconds of compute and of communication of one product."""

    math_s: float
    comms_s: float

    @property
    def compute_bound(self) -> bool:
        return self.math_s >= self.comms_s


def contracting_split_times(
    batch: float, d_in: float, d_out: float, flops_per_s: float, bytes_per_s: float, *, num_chips: int = 2,
    bytes_per_element: float = 2.0,
) -> ProductTimes:  # fmt: skip
    """Seconds of [B, D_X] · [D_X, F] on chips that each send their whole partial result.

    Formula: 2BDF / (N·C) and 2BF / W in bf16. Assumes: W is one way, the sum itself takes no time.
    Source: the book, "All About Rooflines", network.
    """
    return ProductTimes(
        math_s=2.0 * batch * d_in * d_out / (num_chips * flops_per_s),
        comms_s=batch * d_out * bytes_per_element / bytes_per_s,
    )


def contracting_split_min_dim(
    flops_per_s: float, bytes_per_s: float, num_chips: int = 2, bytes_per_element: float = 2.0
) -> float:
    """Contracted dim D from which `contracting_split_times` is compute-bound, whatever the batch.

    Formula: N·C/W in bf16. Unit: elements. Source: the book, "All About Rooflines", network.
    """
    return num_chips * critical_intensity(flops_per_s, bytes_per_s, bytes_per_element)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherOrReduce:
    """Sizes at which [B, D] · [D_X, F] had better gather the weight, or add up partial sums.

    gather_min_batch: from it on gathering is bound by compute. reduce_max_degree: up to it adding up is. min_contracted_dim:
        from it on adding up is the faster one, where neither its compute nor the degree counts.
    """

    gather_min_batch: float
    reduce_max_degree: float
    min_contracted_dim: float


def gather_or_reduce(alpha: float, d_in: float, batch: float = math.inf) -> GatherOrReduce:
    """The batch, the degree and the contracted dim at which gathering the weight and adding up partial sums change places.

    Gathering takes max(2BDF/C, 2DF/W), adding up max(2BDF/(X·C), 4BF/W).
    Formula: B = alpha, X = D/(2 alpha), D = 2 min(alpha, B).
    Assumes: bf16, an AllReduce twice an AllGather, D large for the third. Source: the book, "Sharded Matrices", question 4.
    """
    return GatherOrReduce(
        gather_min_batch=alpha, reduce_max_degree=d_in / (2.0 * alpha), min_contracted_dim=2.0 * min(alpha, batch)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductFlops:
    """FLOPs of a product: on a single device, on each device of a mesh, and on all of them together."""

    once: float
    per_device: float
    total: float

    @property
    def repeated(self) -> float:
        """Number of times that the mesh does the same work: axes that split nothing of the product repeat it."""
        return self.total / self.once


def product_flops(
    left: Spec, right: Spec, dims: Iterable[str], mesh: Mesh, sizes: Mapping[str, int]
) -> ProductFlops:  # fmt: skip
    """FLOPs of `left * right -> [dims]` with the operands as `contract` wants them: 2 for each combination of indices.

    One where nothing is summed. Source: the book, "Transformers", question 2; "Sharded Matrices", questions.
    """
    dims = tuple(dims)
    product = contract(left, right, dims)
    labels = dict.fromkeys((*product.left.dims, *product.right.dims))
    total_flops = math.prod(sizes[dim] for dim in labels) * (2.0 if any(dim not in dims for dim in labels) else 1.0)
    per_device = total_flops / mesh.size(product.left.sharded_axes | product.right.sharded_axes)
    return ProductFlops(once=total_flops, per_device=per_device, total=per_device * mesh.num_devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferStage(Payload):
    """One stage: bytes (or FLOPs) over `num_links` links (or units) of a rate each."""

    name: str
    amount: float
    rate: float
    num_links: Annotated[float, Hidden] = 1

    @property
    @printed
    def seconds(self) -> float:
        return self.amount / (self.rate * self.num_links)


@dataclass(frozen=True, slots=True, kw_only=True)
class Staging:
    """Stages in order. Source: the book, "TPUs", question 6: a pipeline takes as long as its slowest piece."""

    stages: tuple[TransferStage, ...]

    @property
    def overlapped_s(self) -> float:
        """Seconds with all stages at once, on chunks of the data."""
        return self.binding.seconds

    @property
    def sequential_s(self) -> float:
        """Seconds with each stage on all of the data before the next."""
        return sum(stage.seconds for stage in self.stages)

    @property
    def binding(self) -> TransferStage:
        """Slowest stage, the first of equal ones."""
        return max(self.stages, key=lambda stage: stage.seconds)
