"""Choose the batch and the cluster that reach a loss soonest, or for the fewest dollars: every batch is planned on every cluster.

Entry point: `plan_to_loss`, or `plan_loss_problem` for a noise scale or a loss, and one batch, several or none.
The result also says whether another noise scale would choose another batch or cluster.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from shardwise.batch_size import LossTarget, NoiseScale, parse_noise_scale
from shardwise.batch_size.noise_scale import published_noise_scale
from shardwise.layout import Choices, job_for_engine
from shardwise.model import Job
from shardwise.price import (
    PRICE_FIELD,
    ClusterLike,
    Limits,
    ModelLike,
    Problem,
    ProblemInputs,
    Reliability,
    resolve_problem,
)
from shardwise.search.compare_clusters import describe_missed_limits, limit_names
from shardwise.search.loss_time import Goal, LossPoint, LossSearch, NoiseSensitivity, time_to_loss, training_run_to_loss
from shardwise.search.planner import add_other_stack_gain, make_plan
from shardwise.search.sweep_values import parse_sweep
from shardwise.search.verdicts import RESOLUTION, error_without_plan, no_plan_reason
from shardwise.values import (
    InputError,
    MissingValueError,
    NothingFitsError,
    Progress,
    argument_label,
    format_binary,
    ignore_progress,
    parse_count,
    parse_quantity,
    prefix_progress,
    run_all,
)

BATCH_FIELD = "global_batch_tokens"
NoiseScaleLike = str | float | os.PathLike[str] | NoiseScale


@dataclass(frozen=True, slots=True, kw_only=True)
class LossProblem:
    """Problem of a plan to a loss: inputs whose job has the first of the batches, the target, and the batches in tokens."""

    inputs: ProblemInputs
    target: LossTarget
    batches: tuple[int, ...]


def resolve_loss_problem(
    model: ModelLike, clusters: Sequence[ClusterLike], job: Job | None, fields: Mapping[str, Any], *,
    noise_scale: NoiseScaleLike | None = None, to_loss: float | str | None = None, batches: Sequence[int | str] = (),
) -> LossProblem:  # fmt: skip
    """Return the problem of names and texts; `model`, `clusters`, `job` and `fields` are those of `resolve_problem`.

    Without `batches` they are those of the field `global_batch_tokens`, which may be several ("1Mi,2Mi" or "512Ki:8Mi:x2"), or
    that of the job; without any they are doublings around the noise scale. A loss in nats per token alone has the noise scale of
    the published law. The job's tokens are those to the loss with the smallest batch that was given, or the fewest. Raises
    `InputError` with all that is wrong.

    >>> fields = {"seq_len": 4096, "tokens": 1e12}
    >>> problem = resolve_loss_problem("llama-3-8b", ["h100:64"], None, fields, noise_scale="1Mi", batches=["512Ki", "1Mi"])
    >>> problem.target.batch_tokens, problem.batches, problem.inputs.job.global_batch_tokens
    (524288.0, (524288, 1048576), 524288)
    """
    text = fields.get(BATCH_FIELD)
    is_range = isinstance(text, str) and ("," in text or ":" in text)
    has_batches = bool(batches) or is_range
    job_fields = {name: value for name, value in fields.items() if not (has_batches and name == BATCH_FIELD)}
    (noise, loss), sizes, inputs = run_all(
        lambda: _noise_scale(noise_scale, to_loss),
        lambda: _parse_range(str(text)) if is_range and not batches else _parse_batches(batches),
        lambda: resolve_problem(model, clusters, job, job_fields),
    )
    if not has_batches and BATCH_FIELD not in inputs.defaults:
        sizes = (inputs.job.global_batch_tokens,)
    seq_len = inputs.job.seq_len
    planned = sizes or batches_around(noise.tokens, seq_len)
    _require_whole_sequences(planned, seq_len)
    reference = float(min(sizes)) if sizes and inputs.job.tokens is not None else None
    return LossProblem(
        inputs=replace(inputs, job=replace(inputs.job, global_batch_tokens=planned[0])),
        target=LossTarget(noise=noise, tokens=inputs.job.tokens, batch_tokens=reference, loss=loss),
        batches=tuple(planned),
    )


def plan_loss_problem(
    problem: LossProblem, *, limits: Limits | None = None, goal: Goal | None = None, choices: Choices | None = None,
    runnable: bool = False, reliability: Reliability | None = None, progress: Progress = ignore_progress,
) -> LossSearch:  # fmt: skip
    """Plan every batch on every cluster of a problem (`plan_to_loss`); `runnable`: with the loss of the engine of `train`."""
    inputs = problem.inputs
    job = job_for_engine(inputs.job) if runnable else inputs.job
    return plan_to_loss(
        [Problem(inputs.architecture, cluster, job) for cluster in inputs.clusters],
        LossQuestion(problem.target, problem.batches, limits or Limits(), goal),
        choices=choices, reliability=reliability or inputs.reliability, progress=progress,
    )  # fmt: skip


def _noise_scale(noise_scale: NoiseScaleLike | None, to_loss: float | str | None) -> tuple[NoiseScale, float | None]:
    """Return the noise scale, and the loss; a loss alone has the noise scale of the published law."""
    loss_label = argument_label("to_loss")
    loss = None if to_loss is None else parse_quantity(to_loss, label=loss_label, unit="")
    published = None if loss is None else published_noise_scale(loss, loss_label)
    if noise_scale is not None:
        path_or_value = Path(noise_scale) if isinstance(noise_scale, os.PathLike) else noise_scale
        return parse_noise_scale(path_or_value, argument_label("noise_scale")), loss
    if published is None:
        raise InputError(
            "noise_scale: missing; tokens such as '1.2Mi', the folder of a run, or to_loss=2.5, are required"
        )
    return published, loss


def _parse_range(text: str) -> tuple[int, ...]:
    return tuple(int(value) for value in parse_sweep(f"batch={text}", argument_label(BATCH_FIELD)).values)


def _parse_batches(batches: Sequence[int | str]) -> tuple[int, ...]:
    return tuple(run_all(*(partial(parse_count, batch, label="batches") for batch in batches)))


def _require_whole_sequences(batches: Sequence[int], seq_len: int) -> None:
    partial_batches = [f"{batch:,}" for batch in batches if batch % seq_len]
    if partial_batches:
        raise InputError(
            f"{argument_label(BATCH_FIELD)}: found {', '.join(partial_batches)}; multiples of {argument_label('seq_len')} "
            f"{seq_len:,} are required"
        )


# On each side of the noise scale: beyond them the fewest tokens, or steps, are nearly reached (6% more).
DOUBLINGS_AROUND = 4


def batches_around(noise_tokens: float, seq_len: int) -> tuple[int, ...]:
    """Return batches in doublings around a noise scale, of whole sequences, in tokens.

    >>> batches_around(1.2 * 2**20, 4096)[:3], len(batches_around(1.2 * 2**20, 4096))
    ((65536, 131072, 262144), 9)
    """
    nearest = round(math.log2(noise_tokens / seq_len))
    exponents = range(max(nearest - DOUBLINGS_AROUND, 0), max(nearest + DOUBLINGS_AROUND, 0) + 1)
    return tuple(seq_len * 2**exponent for exponent in exponents)


@dataclass(frozen=True, slots=True)
class LossQuestion:
    """Question to a search for a loss: the loss, the batches to try, and what is best.

    `batches` are tokens (default: doublings around the noise scale, `batches_around`). `goal`: "time" (default), or "usd"
    (default with a deadline)."""

    target: LossTarget
    batches: tuple[int, ...] = ()
    limits: Limits = field(default_factory=Limits)
    goal: Goal | None = None

    def batches_for(self, job: Job) -> tuple[int, ...]:
        """Return the batches to try for a job, in tokens."""
        return self.batches or batches_around(self.target.noise.tokens, job.seq_len)


def plan_to_loss(
    problems: Iterable[Problem], question: LossQuestion, *, choices: Choices | None = None,
    reliability: Reliability | None = None, progress: Progress = ignore_progress,
) -> LossSearch:  # fmt: skip
    """Plan every batch on every cluster, and choose what reaches the loss the soonest, or for the fewest dollars.

    `problems` are those of one job on each of the clusters. Of plans whose times a prediction cannot tell apart, the cheaper one
    is chosen. If no point has a plan, raises `NothingFitsError` where nothing fits at one of them, else what all of them lack."""
    target, limits, points = question.target, question.limits, []
    pairs = [(problem, batch) for problem in problems for batch in question.batches_for(problem.job)]
    for number, (problem, batch) in enumerate(pairs, 1):
        cluster = problem.cluster
        point = LossPoint(
            cluster=cluster.name, chip=cluster.chip.name, num_devices=cluster.num_devices, batch_tokens=batch
        )
        try:
            # The run of its job is the one to the loss: days and dollars of a plan file are those that the search compares.
            tokens = None if target.tokens is None else target.tokens_to_loss(batch)
            plan = make_plan(
                replace(problem, job=replace(problem.job, global_batch_tokens=batch, tokens=tokens)), choices=choices,
                reliability=reliability, elsewhere=False,
                progress=prefix_progress(
                    progress, f"{number} of {len(pairs)}: {cluster.name}, batch {format_binary(batch)}"
                ),
            )  # fmt: skip
        except (InputError, MissingValueError, NothingFitsError) as error:
            points.append(replace(point, problem=str(error), no_plan=no_plan_reason(error)))
            continue
        within_limits = not limits or limits.met(training_run_to_loss(plan, target, reliability))
        time = time_to_loss(plan, target, reliability)
        points.append(replace(point, plan=replace(plan, to_loss=target), time=time, within_limits=within_limits))
    if not any(point.plan for point in points):
        lines = [f"{point.name}: {point.problem}" for point in points]
        raise error_without_plan((point.no_plan for point in points), lines)
    goal = question.goal or ("usd" if limits.deadline_s is not None else "time")
    search = choose_point(
        LossSearch(target=target, points=tuple(points), limits=limits, goal=goal, chosen=None, reason="")
    )
    sensitivity = tuple(noise_sensitivity(search))
    if search.chosen is not None and search.plan is not None:  # of the chosen plan only: it takes as long as a plan
        plan = add_other_stack_gain(search.plan, choices, progress)
        points[search.chosen] = replace(points[search.chosen], plan=plan)
    return replace(search, points=tuple(points), sensitivity=sensitivity)


def describe_missed_target(search: LossSearch) -> Iterator[str]:
    """Yield why no point was chosen, and by how much the nearest misses the limits."""
    yield search.reason
    runs = [(point, training_run_to_loss(point.plan, search.target)) for point in search.points if point.plan]
    by_days = search.limits.deadline_s is not None
    point, run = min(runs, key=lambda pair: pair[1].days if by_days else pair[1].chip_hours)
    yield from (f"the nearest, {point.name}: {line}" for line in describe_missed_limits(search.limits, run))


# How far off a noise scale without an interval may be. A choice: McCandlish et al. 2018 find B_simple and the critical batch of
# sweeps within such a factor for most tasks.
NOISE_UNCERTAINTY = 2.0


def choose_point(search: LossSearch) -> LossSearch:
    """Return the search with its chosen point and the reason.

    For the goal "time" the soonest; of those that a prediction cannot tell from it, the cheapest. For "usd" the other way
    round. If any point has no price, chip-hours decide in place of dollars."""
    eligible = {i: point.time for i, point in enumerate(search.points) if point.time and point.within_limits}
    if not eligible:
        return replace(search, chosen=None, reason=f"no batch on any cluster meets the {limit_names(search.limits)}")
    unpriced_chips = sorted({search.points[i].chip for i, time in eligible.items() if time.usd is None})

    def seconds(i: int) -> float:
        return eligible[i].loss_s

    def cost(i: int) -> float:
        return eligible[i].chip_hours if unpriced_chips else eligible[i].usd or 0.0

    if search.goal == "time":
        key, tie_key, tie_name, reason = seconds, cost, "cheapest", "the soonest at the loss"
    else:
        key, tie_key, tie_name, reason = cost, seconds, "soonest", "the fewest dollars to the loss"
        if unpriced_chips:
            reason = f"the fewest chip-hours to the loss (no sourced {PRICE_FIELD} of {', '.join(unpriced_chips)})"
    first = min(eligible, key=key)
    chosen = min((i for i in eligible if key(i) <= key(first) * (1 + RESOLUTION)), key=tie_key)
    if chosen != first:
        reason += f", and the {tie_name} of those within {RESOLUTION:.0%} of it"
    return replace(search, chosen=chosen, reason=reason + (" within the limits" if search.limits else ""))


def noise_sensitivity(search: LossSearch) -> Iterator[NoiseSensitivity]:
    """Yield the choice at both ends of the noise scale's interval (default: half and twice); nothing is planned again."""
    if search.chosen is None:
        return
    noise = search.target.noise
    low, high = noise.interval90 or (noise.tokens / NOISE_UNCERTAINTY, noise.tokens * NOISE_UNCERTAINTY)
    for tokens in (low, high):
        other_search = _with_target(search, search.target.with_noise(tokens / noise.tokens))
        if other_search.chosen is None:
            yield NoiseSensitivity(noise_tokens=tokens, cluster=None, batch_tokens=None, loss_s=None, regret=None)
            continue
        other_point, chosen_point = other_search.points[other_search.chosen], other_search.points[search.chosen]
        regret = other_search.cost(chosen_point) / other_search.cost(other_point) - 1.0
        yield NoiseSensitivity(
            noise_tokens=tokens, cluster=other_point.cluster, batch_tokens=other_point.batch_tokens,
            loss_s=other_point.time.loss_s if other_point.time else None, regret=max(regret, 0.0),
        )  # fmt: skip


def _with_target(search: LossSearch, target: LossTarget) -> LossSearch:
    """Return the same plans with another target."""
    points = tuple(
        replace(
            point,
            time=time_to_loss(point.plan, target),
            within_limits=not search.limits or search.limits.met(training_run_to_loss(point.plan, target)),
        )
        if point.plan
        else point
        for point in search.points
    )
    return choose_point(replace(search, target=target, points=points, chosen=None))
