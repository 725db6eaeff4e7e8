"""A guess why a prediction is off, from what the row says and where the estimate puts the time."""

from __future__ import annotations

from collections.abc import Callable

from shardwise.calibrate.accuracy import Judged
from shardwise.calibrate.published_runs.case import Prediction
from shardwise.model.architecture import Architecture
from shardwise.terms import COMMUNICATION

FEW_TOKENS, NARROW = 4096, 1024
Applies = Callable[[Prediction], bool]


def _tokens(found: Prediction) -> float:
    """Tokens that a device's kernels see in one micro-batch."""
    return found.case.layout.micro_batch_seqs * found.case.job.seq_len / found.case.layout.cp


def _width(architecture: Architecture, tp: int) -> float:
    return architecture.d_ff / tp


def _attention_share(found: Prediction) -> float:
    """FLOPs of attention's scores over those of a block's matrices, about seq_len / 6 D for one of the usual shape."""
    architecture = found.case.architecture
    return found.case.job.seq_len * architecture.num_heads * architecture.head_dim / (6.0 * architecture.d_model**2)


def _hidden_share(found: Prediction) -> float:
    return sum(found.estimate.hidden.values()) / found.estimate.step_time_s


# What makes a run slower than predicted; the first that applies.
SLOWER: tuple[tuple[Applies, str], ...] = (
    (lambda p: not p.case.software.stack.known, "a stack that no run measured: priced as others of its kind"),
    (lambda p: _hidden_share(p) > 0.4, "much traffic, taken as hidden behind compute for the most part"),
    (
        lambda p: bool(p.case.architecture.num_experts),
        "routing, the dispatcher and the host's waiting are priced by rules of thumb",
    ),
    (
        lambda p: min(_width(p.case.architecture, p.case.layout.tp), p.case.architecture.d_model) < 2 * NARROW,
        "narrow matmuls: many short kernels",
    ),
    (lambda p: _tokens(p) <= FEW_TOKENS, "few tokens a micro-batch: partial waves of tiles are not priced"),
    (lambda p: _attention_share(p) > 0.2, "much attention, whose kernels differ by release"),
    (lambda p: True, "no obvious cause: noise, or a release slower than others of its stack"),
)  # fmt: skip


def guess(judged: Judged) -> str:
    """What may be behind a row's error: what was approximated, else what of the step is not priced, or priced too high."""
    found = judged.prediction
    assert found is not None
    if (judged.error or 0.0) < 0:
        return next((words for words in found.case.approximations if words.startswith("attention")), "") or next(
            words for applies, words in SLOWER if applies(found)
        )
    time = {axis: found.estimate.time[axis] for axis in COMMUNICATION}
    longest = max(time, key=lambda axis: time[axis])
    if time[longest] > 0.1 * found.estimate.step_time_s:
        return f"communication over {longest} may hide behind compute"
    if found.estimate.time["bubble"] > 0.1 * found.estimate.step_time_s:
        return "the pipeline may be interleaved more than stated"
    return "recompute may be less than it is priced as"
