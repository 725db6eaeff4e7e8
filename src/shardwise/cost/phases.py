"""A run whose global batch changes: each phase priced with the same layout and another number of micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardwise.batch.schedule import GivenSchedule, WrittenSchedule, steps_of
from shardwise.cluster.cluster import Cluster
from shardwise.cost.estimate import estimate
from shardwise.cost.reliability import Reliability
from shardwise.cost.run import Run, RunPhase, run_of_steps
from shardwise.errors import InputError, collect
from shardwise.job import Job
from shardwise.layout.layout import Layout
from shardwise.model.architecture import Architecture

WHAT = "--batch-schedule"


def scheduled_run(
    architecture: Architecture, cluster: Cluster, job: Job, layout: Layout, schedule: WrittenSchedule,
    reliability: Reliability | None = None,
) -> Run:  # fmt: skip
    """Days, chip-hours and dollars of training on the job's tokens with batches by a schedule, in all and by phase.

    A phase's step is that of the layout with the batch of the phase; its days are its share of all, interruptions included.
    Raises `InputError` for a job without `tokens`, a schedule by noise scale, which is not known before a run, and batches that
    the layout does not run.

    >>> import shardwise as sw
    >>> from shardwise.batch.schedule import parse_schedule
    >>> model, cluster = sw.load_model("llama-3-8b"), sw.load_cluster("h100:64")
    >>> job = sw.Job(global_batch_tokens=2**20, seq_len=8192, tokens=1e12)
    >>> ramp = parse_schedule("0:512Ki,100G:1Mi")
    >>> run = scheduled_run(model, cluster, job, sw.Layout.parse("fsdp=64"), ramp)
    >>> [(phase.batch_tokens, round(phase.num_steps)) for phase in run.phases]
    [(524288, 190735), (1048576, 858307)]
    >>> abs(sum(phase.days for phase in run.phases) - run.days) < 1e-9
    True
    """
    settled = schedule.settled(job.global_batch_tokens, layout.num_replicas * layout.micro_batch_seqs * job.seq_len)
    if job.tokens is None:
        raise InputError(f"{WHAT}: found no --tokens; the length of the run is required, such as --tokens 15T")
    if not isinstance(settled, GivenSchedule):
        raise InputError(
            f"{WHAT}: the noise scale of the run is not known before it; batches by tokens, such as 0:1Mi,100G:4Mi, are required"
        )
    parts = steps_of(settled.phases, job.tokens, job.seq_len)
    jobs = [replace(job, global_batch_tokens=batch) for batch, _ in parts]
    priced = collect(*(lambda one=one: estimate(architecture, cluster, one, layout) for one in jobs))
    times, counts = [one.step_time_s for one in priced], [count for _, count in parts]
    ideal_s = sum(time * count for time, count in zip(times, counts, strict=True))
    run = run_of_steps(architecture, cluster, job, sum(counts), ideal_s / sum(counts), reliability)
    return replace(run, phases=tuple(_phases(run, [batch for batch, _ in parts], counts, times)))


def _phases(run: Run, batches: Sequence[int], counts: Sequence[float], times: Sequence[float]) -> list[RunPhase]:
    ideal_s = sum(time * count for time, count in zip(times, counts, strict=True))
    shares = [time * count / ideal_s for time, count in zip(times, counts, strict=True)]
    return [
        RunPhase(
            batch_tokens=batch, num_steps=count, step_time_s=time, days=share * run.days,
            usd=None if run.usd is None else share * run.usd,
        )
        for batch, count, time, share in zip(batches, counts, times, shares, strict=True)
    ]  # fmt: skip
