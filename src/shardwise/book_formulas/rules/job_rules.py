"""The books' rules for one model, cluster and job."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.book_formulas.rules.parallelism_bounds import (
    critical_intensity,
    dcn_min_tokens_per_pod,
    fsdp_min_tokens_per_chip,
    fsdp_optimal_degree,
    is_compute_bound,
    max_chips,
    mixed_min_tokens_per_chip,
    nearest_split,
    tokens_per_chip,
    tp_max_degree,
)
from shardwise.book_formulas.rules.training_run import training_seconds
from shardwise.hardware import Cluster, Pods, Switched, Torus, without_calibration
from shardwise.model import Architecture, Job, num_active_params
from shardwise.values import SECONDS_PER_DAY, bytes_per_element, get_precision

BOOK = "Austin et al., How to Scale Your Model, 2025"
NOTE = "Stratos, Compute-Bound Training, 2026"
PLAYBOOK = "Tazi et al., The Ultra-Scale Playbook, 2025"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One closed form with its numbers: the value and its unit, the verdict for this job, the formula, and its source.

    >>> import shardwise as sw
    >>> rule = sw.rules("llama-3-70b", "tpu-v5p:16x20x28", global_batch_tokens="4Mi", seq_len=4096)[1]
    >>> rule.name, rule.verdict
    ('tokens_per_chip', '4194304 tokens over 8960 chips')
    """

    name: str
    value: float
    unit: str
    verdict: str
    formula: str
    source: str


def book_rules(architecture: Architecture, cluster: Cluster, job: Job) -> tuple[Rule, ...]:
    """Return the books' rules for one job, in the order of the books: closed forms with value, unit, verdict and source.

    On a torus of k axes pure FSDP uses all k, and k - 1 next to one for TP. Behind switches FSDP has the rate at which a node
    receives data, and TP the links within the node; the rules for a mix assume equal axes and are left out. The time of a run
    is left out for a job without `tokens`. With several pods, FSDP and TP are within a pod for its part of the batch, and a
    rule of its own is about data parallelism between pods. Raises `MissingValueError` if the chip has no sourced peak for the
    precision.

    Source: "How to Scale Your Model", How to Parallelize a Transformer; each rule's `source` has the section.

    >>> import shardwise as sw
    >>> job = sw.Job(global_batch_tokens=2**22, seq_len=4096)
    >>> rule = book_rules(sw.load_model("llama-3-70b"), sw.load_cluster("tpu-v5p:16x20x28"), job)[0]
    >>> rule.name, round(rule.value), rule.unit
    ('critical_intensity', 2550, 'FLOPs/byte')
    """
    return _Book(architecture, without_calibration(cluster), job).rules()


class _Book:
    """Letters of the books for one job."""

    def __init__(self, architecture: Architecture, cluster: Cluster, job: Job) -> None:
        self.job, self.pods, self.num_chips = job, _pods_of(cluster), cluster.num_devices
        self.num_pods = self.pods.num_pods if self.pods else 1
        self.topology = self.pods.torus if self.pods else cluster.topology  # of one pod
        self.precision = get_precision(job.precision)
        dtype = self.precision.activations
        self.flops_per_s = cluster.chip.peak(self.precision.matmul_format)
        self.mfu_peak_flops_per_s = cluster.chip.peak(dtype)  # what an MFU is measured against
        self.axis_bytes_per_s = self.topology.axis_bytes_per_s()
        self.alpha = critical_intensity(self.flops_per_s, self.axis_bytes_per_s, bytes_per_element(dtype))
        self.switched = isinstance(self.topology, Switched)
        near = self.topology.neighbour_bytes_per_s()
        self.alpha_tp = critical_intensity(self.flops_per_s, near, bytes_per_element(dtype))
        self.axes = 1 if self.switched else max(1, sum(size > 1 for size in self.topology.levels))
        self.fsdp_axes = max(1, self.axes - 1)
        self.d_ff = architecture.d_ff
        # With experts FSDP gathers all E of them for the k that a token takes; the rules for TP are about one dense MLP.
        self.sparse = bool(architecture.num_experts)
        self.has_uniform_mlp = not self.sparse and not architecture.layer_pattern  # of one width, on all layers
        self.sparsity = architecture.num_experts / architecture.experts_per_token if self.sparse else 1.0
        self.tokens = tokens_per_chip(job.global_batch_tokens, self.num_chips)
        nominal = None if self.sparse else architecture.nominal_num_params  # of experts a token meets a few
        self.num_params = float(nominal or num_active_params(architecture))
        self.counted = "nominal number of parameters" if nominal else "counted number of parameters that a token meets"

    def network(self) -> str:
        """Describe W, and what the books assume of it that may not hold here."""
        if isinstance(self.topology, Switched):
            tier = "at which each device gathers an array over the cluster; M = 1"
            return f"W = {self.axis_bytes_per_s:.3g} B/s, {tier}"
        assert isinstance(self.topology, Torus)
        wraps = all(wrap for wrap, size in zip(self.topology.wraps, self.topology.shape, strict=True) if size > 1)
        ring = "" if wraps else ", which an axis here that does not wrap has half of"
        return f"W = {self.axis_bytes_per_s:.3g} B/s, one wrapped axis in both directions{ring}"

    def against(self, bound: float) -> str:
        """Describe on which side of a bound on tokens per chip the job is."""
        bound_by, sign = (
            ("compute-bound", "≥") if is_compute_bound(self.tokens, bound) else ("communication-bound", "<")
        )
        return f"{bound_by}: {self.tokens:,.1f} {sign} {bound:,.1f} tokens per chip"

    def rules(self) -> tuple[Rule, ...]:
        return (
            *self.batch_rules(),
            *self.pod_rules(),
            *(self.tp_rules() if self.has_uniform_mlp else ()),
            *(self.mixed_rules() if self.has_uniform_mlp and not self.switched else ()),
            *self.time_rules(),
        )

    def batch_rules(self) -> tuple[Rule, ...]:
        fsdp = fsdp_min_tokens_per_chip(self.alpha * self.sparsity, self.axes)
        batch = self.job.global_batch_tokens
        usable, experts = max_chips(batch, fsdp), "·E/k" if self.sparse else ""
        peak = f"C = {self.flops_per_s:.4g} FLOP/s ({self.precision.matmul_format})"
        return (
            Rule(name="critical_intensity", value=self.alpha, unit="FLOPs/byte", source=f"{BOOK}; {NOTE}, 2.1",
                 verdict=f"each byte sent must go with {self.alpha:,.0f} FLOPs",
                 formula=f"alpha = C / W with {peak}; {self.network()}"),
            Rule(name="tokens_per_chip", value=self.tokens, unit="tokens/chip", source=BOOK,
                 verdict=f"{batch} tokens over {self.num_chips} chips", formula="B / N"),
            Rule(name="fsdp_min_tokens_per_chip", value=fsdp, unit="tokens/chip",
                 verdict=f"FSDP alone is {self.against(fsdp)}", formula=f"alpha{experts} / M with M = {self.axes}",
                 source=f"{BOOK}, FSDP; {NOTE}, 2.3"),
            Rule(name="fsdp_max_chips", value=usable, unit="chips",
                 verdict=f"FSDP alone keeps {min(usable, self.num_chips):.0f} of {self.num_chips} chips compute-bound",
                 formula=f"B·M / (alpha{experts})" if experts else "B·M / alpha", source=f"{BOOK}, FSDP"),
        )  # fmt: skip

    def pod_rules(self) -> tuple[Rule, ...]:
        """Rule on whether a pod's part of the batch hides the gradients that the pods exchange."""
        if self.pods is None:
            return ()
        chips, width = self.num_chips // self.num_pods, bytes_per_element(self.precision.activations)
        # Each chip counts as a host: only the egress of the whole pod matters.
        bound = dcn_min_tokens_per_pod(chips * self.flops_per_s, chips, self.pods.bytes_per_s) * width / 2.0
        bound *= self.sparsity
        tokens = self.job.global_batch_tokens / self.num_pods
        word, sign = ("compute-bound", "≥") if is_compute_bound(tokens, bound) else ("communication-bound", "<")
        egress = f"W = {chips * self.pods.bytes_per_s:.4g} B/s, egress of all hosts of a pod of {chips} chips"
        return (
            Rule(name="dcn_min_tokens_per_pod", value=bound, unit="tokens/pod",
                 verdict=f"data parallelism between {self.num_pods} pods is {word}: {tokens:,.0f} {sign} {bound:,.0f} "
                         "tokens per pod",
                 formula=f"C{'·E/k' if self.sparse else ''} / W with C = {chips * self.flops_per_s:.4g} FLOP/s and {egress}",
                 source=f"{BOOK}, scaling between pods"),
        )  # fmt: skip

    def tp_rules(self) -> tuple[Rule, ...]:
        tp, widest = (tp_max_degree(self.alpha_tp, self.d_ff, axes) for axes in (1, self.axes))
        return (
            Rule(name="tp_max_degree", value=tp, unit="chips", formula="My·F / alpha with My = 1",
                 verdict=f"TP is compute-bound up to {tp:.3g} ways on one axis, {widest:.3g} on M = {self.axes}",
                 source=f"{BOOK}, tensor parallelism; {NOTE}, 2.4"),
        )  # fmt: skip

    def mixed_rules(self) -> tuple[Rule, ...]:
        added, overlapped = (
            mixed_min_tokens_per_chip(self.alpha, self.d_ff, self.fsdp_axes, 1, overlap) for overlap in ("sum", "max")
        )
        chips, batch = self.num_chips // self.num_pods, self.job.global_batch_tokens / self.num_pods
        degree = fsdp_optimal_degree(batch, self.d_ff, chips, self.fsdp_axes)
        split = nearest_split(chips, degree)
        axes = f"Mx = {self.fsdp_axes}, My = 1"
        return (
            Rule(name="mixed_min_tokens_per_chip_sum", value=added, unit="tokens/chip",
                 verdict=f"FSDP with TP is {self.against(added)}", source=f"{BOOK}, mixed FSDP and TP",
                 formula=f"4·alpha² / (Mx·My·F) with {axes}: communication of both adds up"),
            Rule(name="mixed_min_tokens_per_chip_max", value=overlapped, unit="tokens/chip",
                 verdict=f"FSDP with TP is {self.against(overlapped)}", source=f"{NOTE}, 2.5",
                 formula=f"alpha² / (Mx·My·F) with {axes}: communication of both overlaps"),
            Rule(name="fsdp_optimal_degree", value=degree, unit="chips",
                 verdict=f"the nearest split{' of a pod' if self.pods else ''} with a power of two for TP is "
                         f"fsdp = {split.fsdp}, tp = {split.tp}",
                 formula=f"X = sqrt(B·Mx·N / (F·My)) with {axes}", source=f"{BOOK}, mixed FSDP and TP; {NOTE}, 2.5"),
        )  # fmt: skip

    def time_rules(self) -> tuple[Rule, ...]:
        if self.job.tokens is None:
            return ()
        seconds = training_seconds(self.num_params, self.job.tokens, self.num_chips, self.mfu_peak_flops_per_s, 0.40)
        days, params = seconds / SECONDS_PER_DAY, f"P = {self.num_params:.4g}, the {self.counted}"
        return (
            Rule(name="train_days_at_40_mfu", value=days, unit="days", source=BOOK,
                 verdict=f"{days:.1f} days at 40% of the peak, attention left out",
                 formula=f"6·P·T / (N·C·0.40) with {params}, and T = {self.job.tokens:.4g} tokens"),
        )  # fmt: skip


def _pods_of(cluster: Cluster) -> Pods | None:
    return cluster.topology if isinstance(cluster.topology, Pods) else None
