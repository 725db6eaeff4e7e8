"""The books' rules: one by name with your own numbers, all of them, and those that bound a job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

from shardwise.book_formulas import Rule
from shardwise.model import Job
from shardwise.present.api.given import Model, Where, resolved
from shardwise.values import InputError

if TYPE_CHECKING:
    from shardwise.book_formulas.named_rules import NamedRule, RuleValue


def rule(name: str, **values: Any) -> RuleValue:
    """One of the books' rules with your own numbers: its `value`, the `parts` of that with units, its formula and its source.

    A number is in the unit that the name of its key ends with; a text may have a unit, such as "4Ki", "3.2TB/s" or "80 GB"; a
    model is given by name. Raises `InputError` for an unknown rule or key, a missing key, and a wrong value.

    >>> import shardwise as sw
    >>> found = sw.rule("critical_intensity", flops_per_s="459 TFLOP/s", bytes_per_s="180 GB/s")
    >>> found
    RuleValue: critical_intensity = 2,550 FLOPs/byte; (C / W) · (bytes per element / 2)
    >>> sw.rule("fsdp_min_tokens_per_chip", alpha=found.value, num_axes=3).value
    850.0
    """
    from shardwise.book_formulas import get_rule
    from shardwise.book_formulas.named_rules import evaluate_rule

    return evaluate_rule(get_rule(name), values)


@overload
def rules() -> tuple[NamedRule, ...]: ...
@overload
def rules(model: Model, cluster: Where, job: Job | None = None, **job_fields: Any) -> tuple[Rule, ...]: ...
def rules(
    model: Model | None = None, cluster: Where | None = None, job: Job | None = None, **job_fields: Any
) -> tuple[Rule, ...] | tuple[NamedRule, ...]:
    """All of the books' rules, each with its parameters, formula and source; or those that bound a job on a cluster.

    For a job they are closed forms with their numbers and verdicts: critical intensity (FLOPs/byte), tokens per chip, the batch
    that FSDP needs, the largest degree of tensor parallelism that stays bound by compute, and the days of a run. Raises
    `InputError` for a model without a cluster, an unknown one, and a wrong job.

    >>> import shardwise as sw
    >>> next(one for one in sw.rules() if one.name == "tp_max_degree")
    NamedRule: tp_max_degree alpha=... d_ff=... num_axes=1: M·F / alpha
    >>> found = {rule.name: rule for rule in sw.rules("llama-3-70b", "tpu-v5p:16x20x28", global_batch_tokens="4Mi", seq_len=4096)}
    >>> round(found["tokens_per_chip"].value), found["tokens_per_chip"].unit
    (468, 'tokens/chip')
    """
    from shardwise.book_formulas import rules_by_name
    from shardwise.book_formulas.rules import book_rules

    if model is None and cluster is None and job is None and not job_fields:
        return tuple(rules_by_name().values())
    if model is None or cluster is None:
        raise InputError(
            "rules: found no model or no cluster; both are required, or none of them for the list of all rules"
        )
    return book_rules(*resolved(model, cluster, job, None, job_fields))
