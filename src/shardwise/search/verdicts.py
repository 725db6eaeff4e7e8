"""Sentences that compare layouts: why one is slower than another, what keeps one from fitting, and what would make it fit.

`RESOLUTION` and `MODEL_ERROR` say which leads predictions can tell, `MEMORY_RESERVE` how much memory a plan leaves free. Where
logits fill the memory, another loss kernel saves less of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shardwise.hardware.cluster import Cluster
from shardwise.layout.layout import Layout
from shardwise.model.architecture import Architecture
from shardwise.model.job import Job
from shardwise.price.estimate import Estimate, estimate
from shardwise.price.roofline import loss_kind
from shardwise.values.loss_kernels import LOSS_KERNELS, get_loss_kernel
from shardwise.values.units import format_bytes, format_seconds

# A lead below this is not a lead: predictions without calibration are off by 16% on average for published runs that they
# have not seen, and pairs of layouts of one model on one machine that differ by more than 10% are put in the right order
# 72% of the time without calibration and 86% with it. Source: a study of 917 published runs of 18 sources.
MODEL_ERROR = 0.10
# Of two layouts of one model on one machine, the one that a prediction puts ahead by less than this is as often the slower one.
# Source: `benchmarks/published.py --leads`, 1,050 pairs of published runs: below 3% right in 56% of 199 pairs, from 3 to 10% in
# 75% of 400, above in 94% of 451.
RESOLUTION = 0.03
MIN_TERM_SHARE = 0.02  # of the difference between two steps: a term with less is no reason for it
# Memory that a plan leaves free where it can: allocators fragment, and the model of memory has an error.
# The share is a choice: against XLA's peaks of a training step the estimate is 20% and more above (docs/xla.md).
MEMORY_RESERVE = 0.10

FIT_ADVICE = (
    "use more devices, chips with more memory, a smaller sequence or a leaner precision recipe"  # for what does not fit
)

COMPARED_FIELDS = (
    "dp", "fsdp", "tp", "cp", "pp", "ep", "num_virtual_stages", "zero_stage", "sequence_parallel", "micro_batch_seqs",
    "recompute", "recompute_layers", "offload",
)  # fmt: skip


def explain_slowdown(other: Estimate, best: Estimate) -> str:
    """One sentence: by how much `other` is slower than `best`, and which terms make the difference."""
    ratio = other.step_time_s / best.step_time_s - 1
    memory = other.memory_bytes - best.memory_bytes
    fuller = f"{format_bytes(abs(memory))} {'more' if memory > 0 else 'less'} memory"
    if abs(memory) < 5e-4 * best.memory_bytes:
        fuller = "same memory"
    if abs(ratio) < 5e-4:
        return f"as fast within 0.05%, {fuller}"
    if ratio < 0:
        return f"{-ratio:.1%} faster, within the resolution of predictions, {RESOLUTION:.0%}, and less simple; {fuller}"
    changes = {term: other.time[term] - best.time[term] for term in best.time}
    least = MIN_TERM_SHARE * (other.step_time_s - best.step_time_s)
    worst = sorted((term for term in changes if changes[term] > least), key=lambda t: -changes[t])[:2]
    terms = " and ".join(f"{_term_label(term)} +{format_seconds(changes[term])}" for term in worst)
    tied = f", within the resolution of predictions, {RESOLUTION:.0%}" if ratio <= RESOLUTION else ""
    return f"{ratio:.1%} slower{tied}: {terms}; {fuller}"


def _term_label(term: str) -> str:
    if term == "host":
        return "exposed transfers to the host"
    return f"exposed {term} communication" if term in ("tp", "cp", "ep", "pp", "fsdp", "dp", "control") else term


def describe_excess(layout: object, estimate: Estimate, *, narrowed: bool = False, remedies: str = "") -> str:
    """What the layout with the least memory lacks, and what fills the memory; `narrowed` where the search was limited.

    `remedies` are the effects of another kind of loss and of offload to the host.
    """
    largest = sorted(estimate.memory, key=lambda term: -estimate.memory[term])[:3]
    parts = ", ".join(f"{term} {format_bytes(estimate.memory[term])}" for term in largest)
    over = estimate.memory_bytes - estimate.memory_capacity_bytes
    return (
        f"no legal layout fits: the leanest ({layout}) needs {format_bytes(estimate.memory_bytes)} of "
        f"{format_bytes(estimate.memory_capacity_bytes)} on each device, {format_bytes(over)} too much ({parts}); "
        f"{remedies}{'loosen a pin or a maximum, or ' if narrowed else ''}{FIT_ADVICE}"
    )


def compare_steps(other: Estimate, best: Estimate) -> str:
    """Whether `other` is slower or faster than `best`, or too close to say; and that it does not fit, if so."""
    if not other.fits:
        over = other.memory_bytes - other.memory_capacity_bytes
        return f"does not fit: {format_bytes(over)} too much of {format_bytes(other.memory_capacity_bytes)}"
    lead = other.step_time_s / best.step_time_s - 1
    if abs(lead) < MODEL_ERROR:
        return f"undecided: the lead of {abs(lead):.1%} is below the model's error, {MODEL_ERROR:.0%}"
    return f"{'slower' if lead > 0 else 'faster'} by {abs(lead):.1%}"


def changed_fields(layout: Layout, other: Layout) -> dict[str, tuple[object, object]]:
    """Fields that differ, without the placement, as (this layout's, the other's).

    The schedule and the layers of each stage count where the number of stages does not decide them.
    """
    staged = (layout.pp, layout.num_virtual_stages) == (other.pp, other.num_virtual_stages)
    names = (*COMPARED_FIELDS, "schedule", "layers_per_stage") if staged else COMPARED_FIELDS
    pairs = {name: (getattr(layout, name), getattr(other, name)) for name in names}
    return {name: (mine, its) for name, (mine, its) in pairs.items() if mine != its}


def count_changes(layout: Layout, other: Layout) -> int:
    """How many fields differ; what is recomputed, and of how many layers, is one choice."""
    changed = changed_fields(layout, other)
    return len(changed) - ({"recompute", "recompute_layers"} <= changed.keys())


def describe_offload(priced: Mapping[str, Estimate]) -> str:
    """The effect of offload on a layout that does not fit: its price by what is offloaded, the least first."""
    fitting = next((offload for offload, estimate in priced.items() if estimate.fits), None)
    if not priced:
        return ""
    if fitting is None:
        least = min(priced.values(), key=lambda estimate: estimate.memory_bytes)
        return f"offload to the host would leave {format_bytes(least.memory_bytes)}, which is still too much; "
    found = priced[fitting]
    return (
        f"it fits with --pin offload={fitting} ({format_bytes(found.memory_bytes)}, "
        f"a step of {format_seconds(found.step_time_s)}); otherwise "
    )


def price_leaner_losses(architecture: Architecture, cluster: Cluster, job: Job, layout: Layout) -> dict[str, Estimate]:
    """A layout priced with each kind of loss that saves less per logit than the job's, in descending order.

    Empty for a job with the engine's own kind (`plan --runnable`): the engine has no other.
    """
    mine = get_loss_kernel(loss_kind(cluster, job))
    if mine.stepwise:
        return {}
    leaner = [
        name for name, one in LOSS_KERNELS.items() if one.bytes_per_logit < mine.bytes_per_logit and not one.stepwise
    ]
    leaner.sort(key=lambda name: -LOSS_KERNELS[name].bytes_per_logit)
    return {name: estimate(architecture, cluster, replace(job, loss=name), layout) for name in leaner}


def fitting_loss_flag(priced: Mapping[str, Estimate]) -> str | None:
    """The first kind with which the layout fits, as a flag of the command line."""
    return next((f"--set job.loss={name}" for name, one in priced.items() if one.fits), None)


def describe_leaner_loss(now: Estimate, priced: Mapping[str, Estimate]) -> str:
    """The effect of a loss with less memory on a layout that does not fit; nothing where no other kind is priced, or where
    logits do not fill the memory."""
    fitting = next((name for name, one in priced.items() if one.fits), None)
    if fitting is not None:
        found = priced[fitting]
        return (
            f"it fits with --set job.loss={fitting} ({format_bytes(found.memory_bytes)}, a step of "
            f"{format_seconds(found.step_time_s)}); otherwise "
        )
    if not priced or now.memory["logits"] < max(now.memory.values()):
        return ""
    least = min(priced, key=lambda name: priced[name].memory_bytes)
    return f"--set job.loss={least} would leave {format_bytes(priced[least].memory_bytes)}, which is still too much; "
