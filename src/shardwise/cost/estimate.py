"""What a layout costs: one layout priced in plain Python, as a tree of named terms."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shardwise.cluster.cluster import Cluster
from shardwise.cost.hidden import hidden_in_passes
from shardwise.cost.pricing import Pricing
from shardwise.cost.stage import Stage
from shardwise.cost.time_terms import TIME
from shardwise.draw.notebook import Pictured, Shown
from shardwise.errors import InputError
from shardwise.issuing import IssuePolicy
from shardwise.job import Job, precision_named
from shardwise.layout.layout import Layout
from shardwise.layout.legality import require_legal, seqs_per_replica
from shardwise.model.architecture import Architecture
from shardwise.model.counts import model_flops_per_token
from shardwise.network.topology import Pods
from shardwise.terms import COMMUNICATION
from shardwise.units import format_bytes, format_seconds

# Source: the 916 published runs with a prediction (docs/accuracy.md), each weighted 1/duplicates: the median of their step
# times over the bound is 1.49, the geometric mean 1.54; 4% of them are below it.
BOUND = (
    "a bound: kernels and links at the best that micro-benchmarks reach; published runs took about 1.5 times as long "
    "(--stack NAME predicts; see: show stacks)"
)
PREDICTION = "a prediction for"


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate(Pictured):
    """What a layout costs: seconds of a step and bytes of a device, each by term.

    `time` (seconds of the slowest stage) adds up to `step_time_s`; `hidden` is communication that compute hides, in its own pass
    or in others; `memory` (bytes of the fullest device) adds up to `memory_bytes`. `mfu` and `hfu` are shares of the dense peak,
    `margin` the free share of `memory_capacity_bytes`. `interval90` is the 90% prediction interval of the step in seconds, None
    for a lower bound. `waste` has the idle shares of an uneven batch or pipeline. `notes` say whether it is a bound or a
    prediction, and what that rests on.

    >>> import shardwise as sw
    >>> found = sw.estimate("llama-3-8b", "h100:8", layout="fsdp=8", global_batch_tokens="512Ki", seq_len=4096)
    >>> abs(sum(found.memory.values()) - found.memory_bytes) < 1, found.fits == (found.margin >= 0)
    (True, True)
    """

    step_time_s: float
    tokens_per_s_per_device: float
    mfu: float
    hfu: float
    bound: str
    memory_bytes: float
    memory_capacity_bytes: float
    margin: float
    fits: bool
    time: Mapping[str, float]
    hidden: Mapping[str, float]
    memory: Mapping[str, float]
    train_days: float | None
    interval90: tuple[float, float] | None = None
    waste: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def shown(self) -> Shown:
        """The estimate as text and picture, as a notebook displays it."""
        from shardwise.cost.picture import shown_estimate

        return shown_estimate(self)

    @property
    def bound_share(self) -> float:
        """The share of the step's time that `bound` takes."""
        return _parts(self.time)[self.bound] / sum(self.time.values())

    @property
    def exposed_share(self) -> float:
        """The share of the communication's seconds that compute does not hide; 0 where nothing moves."""
        exposed, hidden = (sum(of.get(axis, 0.0) for axis in COMMUNICATION) for of in (self.time, self.hidden))
        return exposed / (exposed + hidden) if exposed else 0.0

    @property
    def caveats(self) -> tuple[str, ...]:
        """The notes that qualify the numbers: all but the source of a prediction's constants."""
        return caveats(self.notes)

    def __repr__(self) -> str:
        around = " to ".join(map(format_seconds, self.interval90)) if self.interval90 else ""
        step = f"{format_seconds(self.step_time_s)} ({f'90% prediction interval {around}' if around else 'a bound'})"
        fits = f"fits, {self.margin:.0%} free" if self.fits else f"DOES NOT FIT, {-self.margin:.0%} too much"
        return (
            f"Estimate: step {step}, {self.tokens_per_s_per_device:,.0f} tokens/s per device, MFU {self.mfu:.1%}, bound by "
            f"{self.bound}\n  memory {format_bytes(self.memory_bytes)} of {format_bytes(self.memory_capacity_bytes)} ({fits})"
        )


def estimate(
    architecture: Architecture, cluster: Cluster, job: Job, layout: Layout, policy: IssuePolicy | None = None
) -> Estimate:
    """Price one layout; `policy`: what is issued, where it is not what the cluster's stack issues. Raises `InputError` with every
    rule that the layout breaks.

    Assumes, of a cluster without a calibration: flash attention, elementwise operations fused with their neighbours, kernels at
    the best measured rate; of any: causal attention evenly split over cp.
    The slowest stage sets the time, the fullest one the memory. MFU counts causal attention once and no recomputation, and
    is measured against the peak of `mfu_format`.
    """
    require_legal(architecture, job, cluster.num_devices, layout)
    found = _priced(Pricing(architecture, cluster, job, layout, policy))
    if not math.isfinite(found.step_time_s + found.memory_bytes):
        raise InputError(
            "estimate: the step's time or memory is not finite; smaller sizes, or rates that a chip can have, are required"
        )
    return found


def caveats(notes: Iterable[str]) -> tuple[str, ...]:
    """The notes of an estimate without the source of a prediction's constants."""
    return tuple(note for note in notes if not note.startswith(PREDICTION))


def mfu_format(job: Job) -> str:
    """The number format whose peak MFU and HFU are measured against: that of the activations, whatever format products run in.

    An MFU then measures speed independently of the recipe, and two recipes compare as their step times do; it may exceed 1.
    Differs: NVIDIA's DGX Cloud benchmarks divide by the fp8 peak for fp8 runs, which halves their MFU. Source: DeepSeek (arXiv
    2505.09343, table 4) gives the MFU of fp8 training against the bf16 peak, and so does torchtitan.
    """
    return precision_named(job.precision).activations


def _priced(pricing: Pricing) -> Estimate:
    job, cluster, stages = pricing.job, pricing.cluster, pricing.stages()
    step, memory = pricing.slowest(stages), pricing.fullest(stages)[1]
    hidden = Counter(step.traffic.hidden_s)
    hidden.update(hidden_in_passes(pricing, step.stage))
    step_s, time = step.total_s, TIME.values(step)
    tokens, devices, peak = job.global_batch_tokens, cluster.num_devices, cluster.chip.peak(mfu_format(job))
    flops_s = model_flops_per_token(pricing.architecture, job.attended_tokens) * tokens / (devices * peak)
    total, capacity = sum(memory.values()), cluster.chip.memory_bytes
    return Estimate(
        step_time_s=step_s, tokens_per_s_per_device=tokens / step_s / devices, mfu=flops_s / step_s,
        hfu=flops_s / step_s * pricing.hardware_ratio(), bound=_bound(time),
        memory_bytes=total, memory_capacity_bytes=capacity, margin=1 - total / capacity, fits=total <= capacity,
        time=time, hidden={axis: seconds for axis, seconds in hidden.items() if seconds > 0},
        memory=memory, train_days=job.tokens / tokens * step_s / 86400 if job.tokens else None,
        interval90=_interval90(pricing, step_s), waste=_waste(pricing, stages), notes=_notes(pricing),
    )  # fmt: skip


def _interval90(pricing: Pricing, step_s: float) -> tuple[float, float] | None:
    """The 90% prediction interval of the step in seconds; None without a calibration, when the estimate is a bound."""
    calibration = pricing.cluster.calibration
    return calibration.interval(step_s, moe=bool(pricing.architecture.num_experts)) if calibration else None


def _notes(pricing: Pricing) -> tuple[str, ...]:
    """Notes that say whether the estimate is a bound or a prediction, and why."""
    chip, calibration = pricing.cluster.chip, pricing.cluster.calibration
    found = [BOUND if calibration is None else f"{PREDICTION} {calibration.stack}: {calibration.source}"]
    caveat = calibration.caveat(moe=bool(pricing.architecture.num_experts)) if calibration else None
    found += [caveat] if caveat else []
    if chip.matmul_fraction == 1.0 and calibration is None:
        found.append(
            f"{chip.name} has no measured matmul rate in the catalogue: compute is priced at the peak, a bound"
        )
    if isinstance(pricing.cluster.topology, Pods):
        found.append(
            "the latency of the data-centre network has no source: between pods only bandwidth is priced, a bound"
        )
    if pricing.layout.offload != "none":
        found.append("how much memory the hosts have is not known: what is offloaded is taken to fit there")
    return tuple(found)


def _waste(pricing: Pricing, stages: Sequence[Stage]) -> dict[str, float]:
    """Idle shares of the devices' time: replicas without sequences, and stages with less to compute than the slowest."""
    layout = pricing.layout
    most = seqs_per_replica(pricing.job, pricing.degrees)
    padded = pricing.num_micro_batches * layout.micro_batch_seqs
    idle = 1 - pricing.job.num_seqs / (padded * layout.num_replicas)
    found = {"sequences": idle} if idle > 0 else {}
    if idle > 0:
        found["nearest_full_batch_tokens"] = float(padded * layout.num_replicas * pricing.job.seq_len)
    busy = [float(step.forward_s + step.backward_s + step.recompute_s) for step in map(pricing.step, stages)]
    if most and max(busy) > min(busy):
        found["stages"] = 1 - sum(busy) / (max(busy) * layout.pp)
    return found


def _bound(time: Mapping[str, float]) -> str:
    """The name of the largest part of the step."""
    parts = _parts(time)
    return max(parts, key=lambda name: parts[name])


def _parts(time: Mapping[str, float]) -> dict[str, float]:
    """The seconds of a step by what may bound it: compute, the bubble, the optimizer, the communication of one axis."""
    groups = {"compute": time["forward"] + time["backward"] + time["recompute"]}
    groups |= {f"communication over {axis}": time[axis] for axis in COMMUNICATION}
    groups |= {"pipeline bubble": time["bubble"], "optimizer": time["optimizer"], "the host's link": time["host"]}
    return groups
