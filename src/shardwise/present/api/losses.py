"""What a caller gives for a plan to a loss: the noise scale, the batches, and the tokens that one of them takes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from shardwise.batch_size import LossTarget, NoiseScale, parse_noise_scale
from shardwise.batch_size.noise_scale import published_noise_scale
from shardwise.model import DEFAULT_SEQ_LEN, Job
from shardwise.present.api.given import Noise, job_of
from shardwise.values import InputError, parse_count, run_all

BATCH = "global_batch_tokens"


def loss_target(
    noise: Noise | None,
    loss: float | None,
    batches: Sequence[int | str],
    job: Job | None,
    given: Mapping[str, Any],
    *,
    usual_seq_len: int = DEFAULT_SEQ_LEN,
    stack: str | None = None,
) -> tuple[LossTarget, tuple[int, ...], Job]:
    """The target, the batches (none: doublings around the noise scale) and a job with the first of them, of sequences as usual
    where it has no length, in the precision that is usual under a stack.

    Raises `InputError` with everything that is wrong with them.

    >>> target, batches, job = loss_target("1Mi", None, ["512Ki", "1Mi"], None, {"seq_len": 4096, "tokens": 1e12})
    >>> target.batch_tokens, batches, job.global_batch_tokens
    (524288.0, (524288, 1048576), 524288)
    """
    own = [given[BATCH]] if BATCH in given else [job.global_batch_tokens] if job else []
    scale, *sizes = run_all(
        lambda: _scale(noise, loss), *(partial(parse_count, one, label="batches") for one in batches or own)
    )
    seq_len = given.get("seq_len", job.seq_len if job else usual_seq_len)
    what = job_of(job, {**given, "seq_len": seq_len, BATCH: sizes[0] if sizes else seq_len}, stack)
    reference = float(min(sizes)) if sizes and what.tokens is not None else None
    return LossTarget(noise=scale, tokens=what.tokens, batch_tokens=reference, loss=loss), tuple(sizes), what


def _scale(noise: Noise | None, loss: float | None) -> NoiseScale:
    if noise is not None:
        return parse_noise_scale(Path(noise) if isinstance(noise, os.PathLike) else noise, "noise_scale")
    if loss is None:
        raise InputError(
            "noise_scale: missing; tokens such as '1.2Mi', the folder of a run, or to_loss=2.5, are required"
        )
    return published_noise_scale(loss, "to_loss")
