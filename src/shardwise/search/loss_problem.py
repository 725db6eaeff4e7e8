"""Problem of a plan to a loss, as a user writes it: the noise scale, the loss, and one batch, several or none."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from shardwise.batch_size import LossTarget, NoiseScale, parse_noise_scale
from shardwise.batch_size.noise_scale import published_noise_scale
from shardwise.layout import Choices, job_for_engine
from shardwise.model import Job
from shardwise.price import ClusterLike, Limits, ModelLike, Problem, ProblemInputs, Reliability, resolve_problem
from shardwise.search.loss_time import Goal, LossSearch
from shardwise.search.plan_to_target_loss import LossQuestion, batches_around, plan_to_loss
from shardwise.search.sweep_values import parse_sweep
from shardwise.values import InputError, Progress, ignore_progress, parse_count, parse_quantity, run_all
from shardwise.values.argument_labels import argument_label

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
