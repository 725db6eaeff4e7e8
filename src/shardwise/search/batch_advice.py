"""Advice on a batch that is too small for its cluster: a batch, or a number of devices, with which devices are used well."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.search.plan import Plan

# A plan below this share of the rate that products sustain uses its devices badly. The share is a choice: published runs of
# dense models at their usual batch reach more than half (calibrate/published_runs/runs.csv), and those that do not have too few
# tokens for each device.
WELL_USED = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchAdvice:
    """A batch that is too small for its devices. `batch_tokens` is the smallest doubling of the batch with at least
    `min_tokens_per_device`, from which FSDP is bound by compute; `max_devices` is how many are bound by compute with the batch
    as it is."""

    tokens_per_device: float
    min_tokens_per_device: float
    batch_tokens: int
    max_devices: int
    reason: str


def advise_batch(plan: Plan) -> BatchAdvice | None:
    """Return what to do about a batch that leaves devices idle; None where the plan uses its devices, or its rules do not say.

    The rules are those of the book (`book_formulas.rules.job_rules`): FSDP alone is bound by compute from alpha / M tokens for
    each device, with alpha = C / W. A layout with other axes may be so with fewer, and a plan of a good MFU is left alone.

    >>> import shardwise as sw
    >>> plan = sw.plan("llama-3.2-1b", "h100:1024", global_batch_tokens="512Ki", seq_len=4096, pins="tp=8")
    >>> advice = advise_batch(plan)
    >>> advice.tokens_per_device, advice.batch_tokens // 2**20
    (512.0, 4)
    """
    rules = {rule.name: rule.value for rule in plan.rules}
    tokens, least, devices = (
        rules.get(name) for name in ("tokens_per_chip", "fsdp_min_tokens_per_chip", "fsdp_max_chips")
    )
    if tokens is None or least is None or devices is None or tokens >= least or devices < 1:
        return None
    calibration, chip = plan.cluster.calibration, plan.cluster.chip
    sustained = chip.matmul_fraction if calibration is None else calibration["matmul_fraction"]
    if plan.estimate.mfu >= WELL_USED * sustained:
        return None
    multiple = 1
    while multiple * tokens < least:
        multiple *= 2
    batch_tokens = multiple * plan.job.global_batch_tokens
    return BatchAdvice(
        tokens_per_device=tokens, min_tokens_per_device=least, batch_tokens=batch_tokens, max_devices=int(devices),
        reason=(
            f"{tokens:,.0f} tokens for each device are too few to use it well: FSDP alone is compute-bound from {least:,.0f}, "
            f"with a batch of {batch_tokens:,} tokens ({multiple} times this one), or with at most {int(devices):,} devices; "
            "--noise-scale tells whether a larger batch pays"
        ),
    )  # fmt: skip
