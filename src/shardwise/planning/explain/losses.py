"""Which kind of loss would make a layout fit: where logits fill the memory, another kernel saves less of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shardwise.cluster.cluster import Cluster
from shardwise.cost.estimate import Estimate, estimate
from shardwise.cost.rates import loss_of
from shardwise.job import Job
from shardwise.layout.layout import Layout
from shardwise.loss import LOSSES, loss_named
from shardwise.model.architecture import Architecture
from shardwise.units import format_bytes, format_seconds


def leaner_losses(architecture: Architecture, cluster: Cluster, job: Job, layout: Layout) -> dict[str, Estimate]:
    """A layout priced with each kind of loss that saves less per logit than the job's, in descending order.

    Empty for a job with the engine's own kind (`plan --runnable`): the engine has no other.
    """
    mine = loss_named(loss_of(cluster, job))
    if mine.stepwise:
        return {}
    leaner = [name for name, one in LOSSES.items() if one.bytes_per_logit < mine.bytes_per_logit and not one.stepwise]
    leaner.sort(key=lambda name: -LOSSES[name].bytes_per_logit)
    return {name: estimate(architecture, cluster, replace(job, loss=name), layout) for name in leaner}


def fitting_loss(priced: Mapping[str, Estimate]) -> str | None:
    """The first kind with which the layout fits, as a flag of the command line."""
    return next((f"--set job.loss={name}" for name, one in priced.items() if one.fits), None)


def loss_would(now: Estimate, priced: Mapping[str, Estimate]) -> str:
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
