"""Sentences that compare layouts: why one is slower than another, why one does not fit, and what would make it fit.

`RESOLUTION` and `MODEL_ERROR` are the smallest leads that predictions can tell, `MEMORY_RESERVE` the share of memory that a
plan leaves free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from shardwise.layout import Layout
from shardwise.price import Estimate, Problem, loss_kind
from shardwise.price.device_memory import TIGHT_MARGIN
from shardwise.price.estimate import estimate
from shardwise.values import (
    LOSS_KERNELS,
    InputError,
    MissingValueError,
    NothingFitsError,
    ShardwiseError,
    argument_label,
    format_bytes,
    format_seconds,
    get_loss_kernel,
)

# A lead below this is not a lead: predictions without calibration are off by 16% on average for published runs that they
# have not seen, and pairs of layouts of one model on one machine that differ by more than 10% are put in the right order
# 72% of the time without calibration and 86% with it. Source: a study of 917 published runs of 18 sources.
MODEL_ERROR = 0.10
# Of two layouts of one model on one machine, the one that a prediction puts ahead by less than this is as often the slower one.
# Source: `benchmarks/published.py --leads`, 1,050 pairs of published runs: below 3% right in 61% of 204 pairs, from 3 to 10% in
# 76% of 364, above in 96% of 482.
RESOLUTION = 0.03
NUM_NAMED_TERMS, MIN_CHANGE_SHARE = (
    3,
    0.1,
)  # of two steps: the terms that differ most, and least of the largest difference
MIN_TERM_SHARE = 0.02  # of the difference between two steps: a term with less is no reason for it
# Memory that a plan leaves free where it can: allocators fragment, and the model of memory has an error.
# With less a layout is tight. Against XLA's peaks of a training step the estimate is 20% and more above (docs/xla.md).
MEMORY_RESERVE = TIGHT_MARGIN

NoPlanReason = Literal["nothing fits", "no legal layout", "job refused", "not known"]


def no_plan_reason(error: ShardwiseError) -> NoPlanReason:
    """Return in two or three words why a job has no plan. "not known": a value has no source, so that nothing was priced.

    >>> no_plan_reason(MissingValueError("chip a100: no sourced fp8 peak"))
    'not known'
    """
    if str(error).startswith("no legal layout:"):  # a `NothingFitsError` too, though nothing was priced
        return "no legal layout"
    if isinstance(error, NothingFitsError):
        return "nothing fits"
    return "not known" if isinstance(error, MissingValueError) else "job refused"


def error_without_plan(reasons: Iterable[NoPlanReason | None], lines: Sequence[str]) -> ShardwiseError:
    """Return the error of several jobs none of which has a plan: `NothingFitsError` only if one of them has no layout that is
    legal and fits, `MissingValueError` if all lack a value, else `InputError`."""
    distinct = set(reasons)
    if distinct & {"nothing fits", "no legal layout"}:
        return NothingFitsError(*lines)
    return MissingValueError(*lines) if distinct == {"not known"} else InputError(*lines)


FIT_ADVICE = "use more devices, chips with more memory, a smaller sequence or a leaner precision recipe"
ADAPTER_ADVICE = ", or train low-rank adapters alone (--set job.lora_rank=16)"
COMPARED_FIELDS = (
    "dp", "fsdp", "tp", "cp", "pp", "ep", "num_virtual_stages", "zero_stage", "sequence_parallel", "micro_batch_seqs",
    "recompute", "recompute_layers", "offload",
)  # fmt: skip


def explain_slowdown(candidate: Estimate, best: Estimate) -> str:
    """Describe by how much `candidate` is slower than `best`, which terms make the difference, and the difference in memory."""
    ratio = candidate.step_time_s / best.step_time_s - 1
    memory_text = describe_memory_change(candidate, best)
    if abs(ratio) < 5e-4:
        return f"as fast within 0.05%, {memory_text}"
    if ratio < 0:
        return f"{-ratio:.1%} faster, within the resolution of predictions, {RESOLUTION:.0%}, and less simple; {memory_text}"
    changes = {term: candidate.time[term] - best.time[term] for term in best.time}
    min_change_s = MIN_TERM_SHARE * (candidate.step_time_s - best.step_time_s)
    worst = sorted((term for term in changes if changes[term] > min_change_s), key=lambda t: -changes[t])[:2]
    terms = " and ".join(f"{_term_label(term)} +{format_seconds(changes[term])}" for term in worst)
    tie_text = f", within the resolution of predictions, {RESOLUTION:.0%}" if ratio <= RESOLUTION else ""
    return f"{ratio:.1%} slower{tie_text}: {terms}; {memory_text}"


def describe_memory_change(candidate: Estimate, best: Estimate) -> str:
    """Return how much more or less memory `candidate` takes, as "1.2 GB more memory"."""
    memory = candidate.memory_bytes - best.memory_bytes
    if abs(memory) < 5e-4 * best.memory_bytes:
        return "same memory"
    return f"{format_bytes(abs(memory))} {'more' if memory > 0 else 'less'} memory"


def describe_time_changes(candidate: Estimate, best: Estimate) -> str:
    """Return the terms by which two steps differ most, as "forward +682 ms, recompute -1.44 s"."""
    changes = {term: candidate.time[term] - best.time[term] for term in best.time}
    least_s = MIN_CHANGE_SHARE * max(map(abs, changes.values()))
    terms = sorted((term for term in changes if abs(changes[term]) > least_s), key=lambda term: -abs(changes[term]))
    return ", ".join(
        f"{_term_label(term)} {'+' if changes[term] > 0 else '-'}{format_seconds(abs(changes[term]))}"
        for term in terms[:NUM_NAMED_TERMS]
    )


def _term_label(term: str) -> str:
    if term == "host":
        return "exposed transfers to the host"
    return f"exposed {term} communication" if term in ("tp", "cp", "ep", "pp", "fsdp", "dp", "control") else term


def describe_excess(layout: object, estimate: Estimate, *, narrowed: bool = False, remedies: str = "") -> str:
    """Describe how much memory the leanest layout (`layout`) lacks, and its largest terms.

    `narrowed`: the search was limited by pins or maxima, so that loosening them may help. `remedies` describes the effects of
    another loss kernel and of offload to the host."""
    largest = sorted(estimate.memory, key=lambda term: -estimate.memory[term])[:3]
    parts = ", ".join(f"{term} {format_bytes(estimate.memory[term])}" for term in largest)
    over = estimate.memory_bytes - estimate.memory_capacity_bytes
    adapters = ADAPTER_ADVICE if largest[:1] == ["optimizer"] else ""  # frozen weights have no state of an optimizer
    return (
        f"no legal layout fits: the leanest ({layout}) needs {format_bytes(estimate.memory_bytes)} of "
        f"{format_bytes(estimate.memory_capacity_bytes)} on each device, {format_bytes(over)} too much ({parts}); "
        f"{remedies}{'loosen a pin or a maximum, or ' if narrowed else ''}{FIT_ADVICE}{adapters}"
    )


def compare_steps(candidate: Estimate, best: Estimate) -> str:
    """Describe whether `candidate` is slower or faster than `best`, undecided, or does not fit."""
    if not candidate.fits:
        over = candidate.memory_bytes - candidate.memory_capacity_bytes
        return f"does not fit: {format_bytes(over)} too much of {format_bytes(candidate.memory_capacity_bytes)}"
    lead = candidate.step_time_s / best.step_time_s - 1
    if abs(lead) < MODEL_ERROR:
        return f"undecided: the lead of {abs(lead):.1%} is below the model's error, {MODEL_ERROR:.0%}"
    return f"{'slower' if lead > 0 else 'faster'} by {abs(lead):.1%}"


def changed_fields(layout: Layout, other_layout: Layout) -> dict[str, tuple[object, object]]:
    """Return the fields that differ as (this layout's, the other's), without the placement.

    Schedule and layers per stage count only if the number of stages does not already decide them."""
    same_stages = (layout.pp, layout.num_virtual_stages) == (other_layout.pp, other_layout.num_virtual_stages)
    names = (*COMPARED_FIELDS, "schedule", "layers_per_stage") if same_stages else COMPARED_FIELDS
    pairs = {name: (getattr(layout, name), getattr(other_layout, name)) for name in names}
    return {name: (before, after) for name, (before, after) in pairs.items() if before != after}


def count_changes(layout: Layout, other_layout: Layout) -> int:
    """Return the number of fields that differ; the recompute policy and its number of layers count as one."""
    changed = changed_fields(layout, other_layout)
    return len(changed) - ({"recompute", "recompute_layers"} <= changed.keys())


def describe_offload(priced: Mapping[str, Estimate]) -> str:
    """Describe the effect of offload on a layout that does not fit; `priced` is by kind of offload, the least first."""
    if not priced:
        return ""
    fitting = next((offload for offload, estimate in priced.items() if estimate.fits), None)
    if fitting is None:
        least_memory = min(priced.values(), key=lambda estimate: estimate.memory_bytes)
        return _still_too_much("offload to the host", least_memory)
    return _fits_with(f"{argument_label('pin', '--pin')} offload={fitting}", priced[fitting])


def _fits_with(flag: str, estimate: Estimate) -> str:
    memory, step = format_bytes(estimate.memory_bytes), format_seconds(estimate.step_time_s)
    return f"it fits with {flag} ({memory}, a step of {step}); otherwise "


def _still_too_much(change: str, estimate: Estimate) -> str:
    return f"{change} would leave {format_bytes(estimate.memory_bytes)}, which is still too much; "


def price_leaner_losses(problem: Problem, layout: Layout) -> dict[str, Estimate]:
    """Price a layout with each loss kernel that saves fewer bytes per logit than the job's, in descending order of bytes.

    Empty for a job with the engine's own loss (`plan --runnable`): the engine has no other."""
    job_kernel = get_loss_kernel(loss_kind(problem.cluster, problem.job))
    if job_kernel.stepwise:
        return {}
    leaner = [
        name
        for name, kernel in LOSS_KERNELS.items()
        if kernel.bytes_per_logit < job_kernel.bytes_per_logit and not kernel.stepwise
    ]
    leaner.sort(key=lambda name: -LOSS_KERNELS[name].bytes_per_logit)
    return {name: estimate(replace(problem, job=replace(problem.job, loss=name)), layout) for name in leaner}


def _set_flag() -> str:
    return argument_label("overrides", "--set")


def fitting_loss_flag(priced: Mapping[str, Estimate]) -> str | None:
    """Return the first loss kernel with which the layout fits, as a flag of the command line."""
    return next(
        (f"{_set_flag()} job.loss={name}" for name, loss_estimate in priced.items() if loss_estimate.fits), None
    )


def describe_leaner_loss(job_estimate: Estimate, priced: Mapping[str, Estimate]) -> str:
    """Describe the effect of a leaner loss kernel on a layout that does not fit; "" if logits do not fill the memory."""
    fitting = next((name for name, loss_estimate in priced.items() if loss_estimate.fits), None)
    if fitting is not None:
        return _fits_with(f"{_set_flag()} job.loss={fitting}", priced[fitting])
    if not priced or job_estimate.memory["logits"] < max(job_estimate.memory.values()):
        return ""
    least = min(priced, key=lambda name: priced[name].memory_bytes)
    return _still_too_much(f"{_set_flag()} job.loss={least}", priced[least])
