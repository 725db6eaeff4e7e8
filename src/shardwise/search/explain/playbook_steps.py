"""The decision procedure of the Ultra-Scale Playbook, applied to a plan: fit, then batch, then throughput.

Source: Tazi et al., The Ultra-Scale Playbook, 2025, "Finding the best training configuration", steps 1 to 3."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from shardwise.layout import layout_degrees, num_micro_batches, seqs_per_replica
from shardwise.model import num_params
from shardwise.model.parameters_and_flops import num_trained_params
from shardwise.price import MEMORY
from shardwise.price.device_memory import MemoryVerdict
from shardwise.price.estimate import estimate
from shardwise.price.estimate_terms import TIME, TermRules
from shardwise.price.layout_pricer import term_context
from shardwise.price.training_run import trained_bytes
from shardwise.search.explain.neighbour_layouts import larger_memory_neighbours
from shardwise.search.plan import Plan
from shardwise.search.verdicts import MEMORY_RESERVE, compare_steps
from shardwise.values import bytes_per_element, format_bytes, get_precision

MIN_GAIN = 0.01  # of the step's time, for which memory counts as what holds a layout back


@dataclass(frozen=True, slots=True, kw_only=True)
class TermShare:
    """One term of a tree: seconds or bytes, its share of the whole, and what it is."""

    term: str
    value: float
    share: float
    formula: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFit:
    """Step 1. `regime` is the playbook's, poor where the plan's degrees need recomputation to fit in the memory that is planned
    with; `binding` is what a better layout would need more of.

    `state_bytes` are weights, gradients, master copy and moments of the whole model, once; `devices_for_state` hold as much.
    """

    fits: bool
    verdict: MemoryVerdict
    num_devices: int
    state_bytes: float
    devices_for_state: int
    held: str
    memory_bytes: float
    memory_capacity_bytes: float
    margin: float
    regime: Literal["GPU-rich", "GPU-poor"]
    because: str
    binding: str
    memory: tuple[TermShare, ...]
    smallest_change: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchBreakdown:
    """Step 2: how the global batch is made up."""

    global_batch_tokens: int
    num_seqs: int
    num_replicas: int
    seqs_per_replica: int
    most_replicas: int
    micro_batch_seqs: int
    num_micro_batches: int
    waste: Mapping[str, float]
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepThroughput:
    """Step 3: where the step's time goes; `hidden` communication is overlapped with compute and costs nothing.

    `exposed`: the share of communication that is exposed, in place of the convention; None, as `interval90`, for a bound.
    """

    step_time_s: float
    tokens_per_s_per_device: float
    mfu: float
    hfu: float
    bound: str
    overlap: str
    time: tuple[TermShare, ...]
    hidden: Mapping[str, float]
    exposed: float | None = None
    interval90: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerUp:
    """A layout that the search kept, why it lost, and whether the model can tell them apart."""

    layout: str
    step_time_s: float
    memory_bytes: float
    reason: str
    verdict: str


def explain_fit(plan: Plan, smallest_change: str | None = None) -> MemoryFit:
    """Explain step 1, fitting a training step in memory."""
    priced, devices = plan.estimate, plan.cluster.num_devices
    poor = not fits_without_recompute(plan)
    recipe, frozen = get_precision(plan.job.precision), num_params(plan.model) - num_trained_params(plan.model)
    state = trained_bytes(plan.model, plan.job) + frozen * bytes_per_element(recipe.weights)
    return MemoryFit(
        fits=priced.fits, verdict=priced.verdict, num_devices=devices, state_bytes=state,
        devices_for_state=math.ceil(state / priced.memory_capacity_bytes), held=_sharding_text(plan),
        memory_bytes=priced.memory_bytes, memory_capacity_bytes=priced.memory_capacity_bytes,
        margin=priced.margin, regime="GPU-poor" if poor else "GPU-rich",
        because=_gpu_poor_text(plan) if poor else _gpu_rich_text(plan),
        binding=binding_constraint(plan), memory=term_shares(MEMORY, priced.memory, plan), smallest_change=smallest_change,
    )  # fmt: skip


def _sharding_text(plan: Plan) -> str:
    """Describe how the layout gets the state and the activations of a model onto its devices."""
    layout = plan.layout
    measures = [f"tp = {layout.tp} splits the matrices"] if layout.tp > 1 else []
    measures += [f"pp = {layout.pp} the blocks"] if layout.pp > 1 else []
    measures += [f"ep = {layout.ep} the experts"] if layout.ep > 1 else []
    shards = layout.fsdp * layout.cp
    parts = ("", "optimizer", "optimizer and gradients", "optimizer, gradients and weights")[layout.zero_stage]
    measures += [f"ZeRO-{layout.zero_stage} the {parts} over {shards:,}"] if layout.zero_stage and shards > 1 else []
    measures += [f"cp = {layout.cp} the sequences"] if layout.cp > 1 else []
    layers_text = f" of {layout.recompute_layers} layers of each stage" if layout.recompute_layers is not None else ""
    measures += [f"recompute {layout.recompute}{layers_text} spares activations"] if layout.recompute != "none" else []
    measures += ["the optimizer's state rests on the host"] if layout.offloads_optimizer else []
    measures += ["activations wait on the host"] if layout.offloads_activations else []
    return "; ".join(measures) or "every device holds all of it"


def fits_without_recompute(plan: Plan) -> bool:
    """Return True if the degrees fit without recomputation, with as much memory left free as the plan leaves."""
    if plan.layout.recompute == "none":
        return plan.estimate.fits
    plain = replace(plan.layout, recompute="none", recompute_layers=None)
    return estimate(plan.problem, plain).memory_bytes <= _plannable_bytes(plan)


def _plannable_bytes(plan: Plan) -> float:
    """Bytes of a device that a plan may fill: it leaves the reserve free, or as much as it does leave."""
    return plan.estimate.memory_capacity_bytes * (1 - min(MEMORY_RESERVE, max(plan.estimate.margin, 0.0)))


def _gpu_poor_text(plan: Plan) -> str:
    """Describe the playbook's two measures for few devices, and which of them the layout takes."""
    measures = {
        "full activation recomputation": plan.layout.recompute == "full",
        "gradient accumulation": num_micro_batches(plan.job, layout_degrees(plan.layout)) > 1,
    }
    measures_text = "; ".join(f"{measure} {'is used' if used else 'is not used'}" for measure, used in measures.items())
    room = format_bytes(_plannable_bytes(plan))
    return f"these degrees do not fit without recomputing activations, with {room} to plan with; {measures_text}"


def _gpu_rich_text(plan: Plan) -> str:
    """Describe the playbook's starting point for a model of this size on so many devices."""
    params, devices = num_params(plan.model), plan.cluster.num_devices
    if devices >= 1024:
        advice = "at 1,024 devices and more the playbook combines tp = 8, ZeRO-2 and a pipeline"
    elif devices >= 512:
        advice = (
            "at 512 devices and more the playbook combines ZeRO with tp or pp, as pure ZeRO-3 starts to wait for links"
        )
    elif params < 10e9:
        advice = "below 10B parameters the playbook uses one technique: tp, or ZeRO-3"
    else:
        advice = "from 10B parameters on the playbook takes tp = 8 with pp, tp = 8 with ZeRO-3, or ZeRO-3 alone"
    recompute_text = ", though the layout does" if plan.layout.recompute != "none" else ""
    return f"these degrees fit without recomputing activations{recompute_text}; {advice}"


def binding_constraint(plan: Plan) -> str:
    """Describe what binds: memory if a faster neighbour of the layout does not fit, else what bounds the step."""
    priced = plan.estimate
    if not priced.fits:
        largest = max(priced.memory, key=lambda term: priced.memory[term])
        over = format_bytes(priced.memory_bytes - priced.memory_capacity_bytes)
        return f"memory: {over} too much, most of it {largest} ({format_bytes(priced.memory[largest])})"
    plannable_bytes = priced.memory_capacity_bytes * (1 - MEMORY_RESERVE)
    faster_neighbours = [
        (change, neighbour)
        for change, neighbour in larger_memory_neighbours(plan)
        if neighbour.memory_bytes > plannable_bytes and neighbour.step_time_s < priced.step_time_s * (1 - MIN_GAIN)
    ]
    if not faster_neighbours:
        return priced.bound
    change, neighbour = min(faster_neighbours, key=lambda pair: pair[1].step_time_s)
    return (
        f"memory: {change} would be {1 - neighbour.step_time_s / priced.step_time_s:.1%} faster, but takes "
        f"{format_bytes(neighbour.memory_bytes)} ({format_bytes(plannable_bytes)} are planned with)"
    )


def explain_batch(plan: Plan) -> BatchBreakdown:
    """Explain step 2, achieving the target global batch size."""
    degrees = layout_degrees(plan.layout)
    return BatchBreakdown(
        global_batch_tokens=plan.job.global_batch_tokens, num_seqs=plan.job.num_seqs, num_replicas=plan.layout.num_replicas,
        seqs_per_replica=seqs_per_replica(plan.job, degrees), most_replicas=plan.job.num_seqs,
        micro_batch_seqs=plan.layout.micro_batch_seqs,
        num_micro_batches=num_micro_batches(plan.job, degrees), waste=plan.estimate.waste, because=_batch_reason(plan),
    )  # fmt: skip


def _batch_reason(plan: Plan) -> str:
    replicas, seqs = plan.layout.num_replicas, plan.job.num_seqs
    num_accumulated = num_micro_batches(plan.job, layout_degrees(plan.layout))
    if seqs < replicas:
        return f"{replicas - seqs:,} of {replicas:,} replicas have no sequence: use fewer devices, a larger batch, or cp, tp, pp"
    if num_accumulated > 1:
        return f"gradients are accumulated over {num_accumulated:,} micro-batches"
    return "one micro-batch for each replica: no gradient accumulation; more devices would need a larger batch, cp, tp or pp"


def explain_throughput(plan: Plan) -> StepThroughput:
    """Explain step 3, the time of the step by term."""
    priced = plan.estimate
    return StepThroughput(
        step_time_s=priced.step_time_s, tokens_per_s_per_device=priced.tokens_per_s_per_device, mfu=priced.mfu,
        hfu=priced.hfu, bound=priced.bound, overlap=plan.job.overlap_convention, exposed=plan.exposed_share,
        time=term_shares(TIME, priced.time, plan), hidden=priced.hidden, interval90=priced.interval90,
    )  # fmt: skip


def term_shares(rules: TermRules[Any], terms: Mapping[str, float], plan: Plan) -> tuple[TermShare, ...]:
    """Return the nonzero terms of a tree, in its order."""
    total, context = sum(terms.values()), term_context(plan.cluster, plan.job, plan.layout)
    return tuple(
        TermShare(term=term, value=value, share=value / total, formula=rules.formula(term, context))
        for term, value in terms.items()
        if value > 0
    )


def list_runners_up(plan: Plan) -> tuple[RunnerUp, ...]:
    """Return the other layouts of the plan, with the reason each lost."""
    return tuple(
        RunnerUp(
            layout=str(alternative.layout), step_time_s=alternative.estimate.step_time_s,
            memory_bytes=alternative.estimate.memory_bytes, reason=alternative.reason,
            verdict=compare_steps(alternative.estimate, plan.estimate),
        )
        for alternative in plan.alternatives
    )  # fmt: skip
