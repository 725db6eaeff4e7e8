"""What the next doubling gains: a plan's job with twice the batch, the devices or both, planned again."""

from __future__ import annotations

from dataclasses import replace

from shardwise.batch.target import LossTarget
from shardwise.cluster.cluster import Cluster
from shardwise.errors import InputError, MissingValueError, NothingFitsError
from shardwise.planning.loss_time import Doubled, Doubling, doubling, loss_time
from shardwise.planning.plan import Plan
from shardwise.progress import Progress, silent, within
from shardwise.search.choices import Choices
from shardwise.search.clusters import sizes
from shardwise.search.plan import plan as search_plan

DOUBLED: dict[Doubled, tuple[int, int]] = {"batch and devices": (2, 2), "batch": (2, 1), "devices": (1, 2)}


def doublings(
    plan: Plan, target: LossTarget, *, choices: Choices | None = None, progress: Progress = silent
) -> tuple[Doubling, ...]:
    """A plan with twice the batch and the devices, the batch alone, and the devices alone; each is planned again.

    `target` says what reaching the loss takes. A doubling without a plan says why: nothing fits, or a cluster that has no rule by
    which it grows.

    >>> import shardwise as sw
    >>> from shardwise.batch.noise_scale import NoiseScale
    >>> plan = sw.plan("gpt-2", "h100:8", global_batch_tokens="64Ki", seq_len=1024)
    >>> both, batch, devices = doublings(plan, LossTarget(noise=NoiseScale(tokens=1e6)))
    >>> both.cluster, both.loss_ratio > both.token_ratio, batch.usd_ratio == batch.loss_ratio
    ('h100:16', True, True)
    """
    return tuple(_doubled(plan, target, name, choices, within(progress, f"twice the {name}")) for name in DOUBLED)


def _doubled(plan: Plan, target: LossTarget, name: Doubled, choices: Choices | None, progress: Progress) -> Doubling:
    batches, devices = DOUBLED[name]
    batch = batches * plan.job.global_batch_tokens
    cluster = plan.cluster if devices == 1 else twice(plan.cluster)
    if cluster is None:
        said = f"{plan.cluster.name} has no cluster of twice its size in the catalogue"
        return Doubling(doubled=name, cluster=plan.cluster.name, batch_tokens=batch, problem=said)
    tokens = None if plan.job.tokens is None else target.tokens_to_loss(batch)
    job = replace(plan.job, global_batch_tokens=batch, tokens=tokens)
    try:
        found = search_plan(
            plan.model, cluster, job, choices=choices, reliability=plan.run.reliability if plan.run else None,
            progress=progress, elsewhere=False,
        )  # fmt: skip
    except (InputError, MissingValueError, NothingFitsError) as error:
        return Doubling(doubled=name, cluster=cluster.name, batch_tokens=batch, problem=str(error))
    return doubling(name, loss_time(plan, target), loss_time(found, target), cluster.name)


def twice(cluster: Cluster) -> Cluster | None:
    """The cluster with twice the devices; None where the catalogue has none.

    >>> import shardwise as sw
    >>> twice(sw.load_cluster("h100:64")).name, twice(sw.load_cluster("tpu-v5p:4x4x4")).name
    ('h100:128', 'tpu-v5p:4x4x8')
    """
    found = next(sizes(cluster, 2.0), None)
    return found if found and found.num_devices == 2 * cluster.num_devices else None
