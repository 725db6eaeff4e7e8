"""Estimate of a layout: its price in plain Python as a tree of named terms, and the communication that its passes hide.

Communication on activations may overlap with the kernels of its own pass; prices have what is exposed of it.
Asynchronous tensor parallelism and rings move operands in chunks beside products, Megatron moves the inputs of products
beside those of the weight gradients, and collectives run while devices wait for their host.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shardwise.hardware import GroupLinks, Pods
from shardwise.layout import Layout, ShardingScheme, layout_degrees, require_legal, seqs_per_replica
from shardwise.model import Job, model_flops_per_token
from shardwise.price.device_memory import MemoryVerdict, describe_margin, memory_verdict, tight_memory_note
from shardwise.price.estimate_terms import MEMORY, TIME
from shardwise.price.layout_pricer import Pricing
from shardwise.price.problem import Problem
from shardwise.price.stage_contents import NO_RECOMPUTE, StageCosts
from shardwise.price.unit_cost import UnitPricer, is_zero
from shardwise.price.unit_inputs import UnitCostInputs
from shardwise.values import (
    COMMUNICATION_TERMS,
    Displayable,
    InputError,
    IssuePolicy,
    SymbolValues,
    Value,
    format_bytes,
    format_seconds,
    get_precision,
)

# Source: the 916 published runs with a prediction (docs/accuracy.md), each weighted 1/duplicates: the median of their step
# times over the bound is 1.49, the geometric mean 1.54; 4% of them are below it.
BOUND = (
    "a bound: kernels and links at the best that micro-benchmarks reach; published runs took about 1.5 times as long "
    "(--stack NAME predicts; see: show stacks)"
)
PREDICTION = "a prediction for"


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate(Displayable):
    """Cost of a layout: seconds of a step and bytes of a device, each by term.

    `time` (seconds of the slowest stage) adds up to `step_time_s`; `hidden` is communication that compute hides, in its own pass
    or in others; `memory` (bytes of the fullest device) adds up to `memory_bytes`. `mfu` and `hfu` are shares of the dense peak,
    `margin` the free share of `memory_capacity_bytes`; `verdict` says "fits", "tight" (the price's error leaves the answer
    open) or "does not fit", and `fits` is true but for the last. `interval90` is the 90% prediction interval of the step in
    seconds, None for a lower bound. `waste` has the idle shares of an uneven batch or pipeline. `notes` say whether it is a
    bound or a prediction, and what that rests on.

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
    verdict: MemoryVerdict
    time: Mapping[str, float]
    hidden: Mapping[str, float]
    memory: Mapping[str, float]
    train_days: float | None
    interval90: tuple[float, float] | None = None
    waste: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def bound_share(self) -> float:
        """Share of the step's time that `bound` takes."""
        return _bounding_parts(self.time)[self.bound] / sum(self.time.values())

    @property
    def exposed_share(self) -> float:
        """Share of the communication's seconds that compute does not hide; 0 where nothing moves."""
        exposed = sum(self.time.get(axis, 0.0) for axis in COMMUNICATION_TERMS)
        hidden = sum(self.hidden.get(axis, 0.0) for axis in COMMUNICATION_TERMS)
        return exposed / (exposed + hidden) if exposed else 0.0

    @property
    def caveats(self) -> tuple[str, ...]:
        """Notes that qualify the numbers: all but the source of a prediction's constants."""
        return caveats(self.notes)

    def __repr__(self) -> str:
        interval = " to ".join(map(format_seconds, self.interval90)) if self.interval90 else ""
        kind = f"90% prediction interval {interval}" if interval else "a bound"
        step = f"{format_seconds(self.step_time_s)} ({kind})"
        fits = describe_margin(self.margin, self.verdict)
        return (
            f"Estimate: step {step}, {self.tokens_per_s_per_device:,.0f} tokens/s per device, MFU {self.mfu:.1%}, bound by "
            f"{self.bound}\n  memory {format_bytes(self.memory_bytes)} of {format_bytes(self.memory_capacity_bytes)} ({fits})"
        )


def estimate(problem: Problem, layout: Layout, policy: IssuePolicy | None = None) -> Estimate:
    """Price one layout; `policy`: what is issued, if not what the cluster's stack issues.

    Assumes, without a calibration: flash attention, elementwise operations fused with their neighbours, kernels at the
    best measured rate; always: causal attention evenly split over cp. The slowest stage sets the time, the fullest one
    the memory. MFU counts causal attention once and no recomputation, against the peak of `mfu_format`. Raises
    `InputError` with every rule that the layout breaks.
    """
    require_legal(problem.architecture, problem.job, problem.cluster.num_devices, layout)
    priced = _build_estimate(Pricing(problem, layout, policy))
    if not math.isfinite(priced.step_time_s + priced.memory_bytes):
        raise InputError(
            "estimate: the step's time or memory is not finite; smaller sizes, or rates that a chip can have, are required"
        )
    return priced


def stage_memories(problem: Problem, layout: Layout) -> tuple[Mapping[str, float], ...]:
    """Return the bytes of a device of each pipeline stage, by term; the fullest is what `estimate` reports.

    Raises `InputError` with every rule that the layout breaks.
    """
    require_legal(problem.architecture, problem.job, problem.cluster.num_devices, layout)
    pricing = Pricing(problem, layout)
    return tuple(MEMORY.values(memory) for memory in pricing.memories(pricing.stages()))


def caveats(notes: Iterable[str]) -> tuple[str, ...]:
    """Return the notes of an estimate without the source of a prediction's constants."""
    return tuple(note for note in notes if not note.startswith(PREDICTION))


def mfu_format(job: Job) -> str:
    """Return the number format whose peak MFU and HFU are measured against: the activations', whatever format products
    run in.

    An MFU then measures speed independently of the recipe, and two recipes compare as their step times do; it may exceed 1.
    Differs: NVIDIA's DGX Cloud benchmarks divide by the fp8 peak for fp8 runs, which halves their MFU. Source: DeepSeek (arXiv
    2505.09343, table 4) gives the MFU of fp8 training against the bf16 peak, and so does torchtitan.
    """
    return get_precision(job.precision).activations


def _build_estimate(pricing: Pricing) -> Estimate:
    job, cluster, stages = pricing.job, pricing.cluster, pricing.stages()
    step, memory = pricing.slowest_step(stages), pricing.fullest_device(stages)[1]
    hidden = Counter(step.communication.hidden_s)
    hidden.update(hidden_communication_s(pricing, step.stage))
    step_s, time = step.total_s, TIME.values(step)
    tokens, devices, peak = job.global_batch_tokens, cluster.num_devices, cluster.chip.peak(mfu_format(job))
    flops_s = model_flops_per_token(pricing.architecture, job.attended_tokens) * tokens / (devices * peak)
    total, capacity = sum(memory.values()), cluster.chip.capacity_bytes
    verdict = memory_verdict(total, capacity)
    tight = (tight_memory_note(1 - total / capacity),) if verdict == "tight" else ()
    return Estimate(
        step_time_s=step_s, tokens_per_s_per_device=tokens / step_s / devices, mfu=flops_s / step_s,
        hfu=flops_s / step_s * pricing.hardware_ratio(), bound=_largest_part(time),
        memory_bytes=total, memory_capacity_bytes=capacity, margin=1 - total / capacity,
        fits=verdict != "does not fit", verdict=verdict,
        time=time, hidden={axis: seconds for axis, seconds in hidden.items() if seconds > 0},
        memory=memory, train_days=job.tokens / tokens * step_s / 86400 if job.tokens else None,
        interval90=_interval90(pricing, step_s), waste=_waste(pricing, stages), notes=(*_notes(pricing), *tight),
    )  # fmt: skip


def _interval90(pricing: Pricing, step_s: float) -> tuple[float, float] | None:
    """Return the 90% prediction interval of the step in seconds; None without a calibration, when the estimate is a bound."""
    calibration = pricing.cluster.calibration
    return calibration.interval(step_s, moe=bool(pricing.architecture.num_experts)) if calibration else None


def _notes(pricing: Pricing) -> tuple[str, ...]:
    """Return notes that say whether the estimate is a bound or a prediction, and why."""
    chip, calibration = pricing.cluster.chip, pricing.cluster.calibration
    notes = [BOUND if calibration is None else f"{PREDICTION} {calibration.stack}: {calibration.source}"]
    caveat = calibration.interval_note(moe=bool(pricing.architecture.num_experts)) if calibration else None
    notes += [caveat] if caveat else []
    if chip.matmul_fraction == 1.0 and calibration is None:
        notes.append(
            f"{chip.name} has no measured matmul rate in the catalogue: compute is priced at the peak, a bound"
        )
    if isinstance(pricing.cluster.topology, Pods):
        notes.append(
            "the latency of the data-centre network has no source: between pods only bandwidth is priced, a bound"
        )
    if pricing.layout.offload != "none":
        notes.append("how much memory the hosts have is not known: what is offloaded is taken to fit there")
    return (*notes, *pricing.architecture.config_notes)


def _waste(pricing: Pricing, stages: Sequence[StageCosts]) -> dict[str, float]:
    """Return idle shares of the devices' time: replicas without sequences, and stages with less to compute than the slowest."""
    layout = pricing.layout
    max_seqs = seqs_per_replica(pricing.job, layout_degrees(layout))
    padded = (pricing.num_micro_batches - pricing.missing_share) * layout.micro_batch_seqs
    idle = 1 - pricing.job.num_seqs / (padded * layout.num_replicas)
    waste = {"sequences": idle} if idle > 0 else {}
    if idle > 0:
        waste["nearest_full_batch_tokens"] = float(padded * layout.num_replicas * pricing.job.seq_len)
    busy = [float(step.forward_s + step.backward_s + step.recompute_s) for step in map(pricing.step, stages)]
    if max_seqs and max(busy) > min(busy):
        waste["stages"] = 1 - sum(busy) / (max(busy) * layout.pp)
    return waste


def _largest_part(time: Mapping[str, float]) -> str:
    """Return the name of the largest part of the step."""
    parts = _bounding_parts(time)
    return max(parts, key=lambda name: parts[name])


def _bounding_parts(time: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of a step by what may bound it: compute, bubble, optimizer, host, the communication of one axis."""
    groups = {"compute": time["forward"] + time["backward"] + time["recompute"]}
    groups |= {f"communication over {axis}": time[axis] for axis in COMMUNICATION_TERMS}
    groups |= {"pipeline bubble": time["bubble"], "optimizer": time["optimizer"], "the host's link": time["host"]}
    return groups


def hidden_communication_s(pricing: Pricing, stage: StageCosts) -> dict[str, float]:
    """Return the hidden seconds of a stage's step by axis."""
    seconds_by_axis: dict[str, float] = {}
    plain, links = pricing.scheme.with_recompute("none"), pricing.links
    for unit, times in stage.unit_passes.items():
        if is_zero(times):
            continue
        scheme = plain if unit.startswith(NO_RECOMPUTE) else pricing.scheme
        for axis, seconds in _unit_hidden_s(pricing, unit.removeprefix(NO_RECOMPUTE), scheme, links).items():
            seconds_by_axis[axis] = seconds_by_axis.get(axis, 0.0) + float(times * seconds * pricing.pipeline.rounds)
    return seconds_by_axis


def _unit_hidden_s(pricing: Pricing, unit: str, scheme: ShardingScheme, links: GroupLinks) -> Mapping[str, Value]:
    """Return what a unit's collectives take in a micro-batch, less what they expose."""
    pricer, values = pricing.pricer, pricing.unit_values.of(unit)
    parts = pricer.parts(scheme, unit)
    cost = pricer.activation(unit, scheme, values, links)
    hidden_by_axis: dict[str, Value] = {}
    for axis, seconds in _total_collectives_s(pricer, parts, values, links).items():
        exposed = cost.forward_traffic_s.get(axis, 0.0) + cost.backward_traffic_s.get(axis, 0.0)
        hidden_by_axis[axis] = max(float(seconds - exposed), 0.0)
    return hidden_by_axis


def _total_collectives_s(
    pricer: UnitPricer, parts: UnitCostInputs, values: SymbolValues, links: GroupLinks
) -> Mapping[str, Value]:
    """Return the seconds of a unit's collectives on activations by axis, as if nothing ran beside them."""
    collectives = [c for c in parts.collectives if not c.moves_weights and not c.is_control]
    plain = (c for c in collectives if not c.chunked_with)
    seconds_by_axis: dict[str, Value] = {}
    for (_, axis), seconds in pricer.collectives_s(parts, plain, values, links).items():
        seconds_by_axis[axis] = seconds_by_axis.get(axis, 0.0) + seconds
    for collective in collectives:
        if collective.chunked_with:
            seconds = pricer.chunked_s(collective, parts, values, links)
            seconds_by_axis[collective.stream] = seconds_by_axis.get(collective.stream, 0.0) + seconds
    return seconds_by_axis
