"""Rules of frameworks: combinations of choices that their code refuses, though it has each choice by itself.

A stack names its rules in `hardware/catalog/stacks.toml` (`runs.rules`), with their source. Searches, plans, estimates and
`export` apply them with the other abilities of the stack, so that what is planned for a stack is what its framework runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from shardwise.layout.layout import cp_variant_names, get_cp_variant, get_offload_targets
from shardwise.layout.rules.layout_rule import LayoutRule, RuleContext
from shardwise.layout.sharding_scheme import num_micro_batches
from shardwise.pipeline import NATURAL
from shardwise.values import Value


class FrameworkRule(NamedTuple):
    """Combination that a framework requires: `choices`, `legal` and `reads_mode` as of a `LayoutRule`.

    `explain` returns what was found and the fix; the name of the stack is put before it.
    """

    choices: tuple[str, ...]
    legal: Callable[[RuleContext], Value]
    explain: Callable[[RuleContext], str]
    reads_mode: bool = False


class PolicyRule(NamedTuple):
    """Combination of recomputation and offload that a framework requires, as of a `FrameworkRule`: of values of `Layout`."""

    legal: Callable[[str, float | None, str], bool]
    explanation: str


def framework_rules(stack: str, names: Iterable[str]) -> tuple[LayoutRule, ...]:
    """Return the rules of a stack about its degrees, by their names.

    >>> [rule.name for rule in framework_rules("deepspeed", ("tp_excludes_cp", "host_has_checkpoints"))]
    ['tp_excludes_cp']
    """
    return tuple(_layout_rule(stack, name, FRAMEWORK_RULES[name]) for name in names if name in FRAMEWORK_RULES)


def policy_problems(
    stack: str, names: Iterable[str], recompute: str, recompute_layers: float | None, offload: str
) -> Iterator[str]:
    """Yield what a stack's rules, by their names, refuse of recomputation and offload."""
    rules = [POLICY_RULES[name] for name in names if name in POLICY_RULES]
    yield from (
        f"{stack}: {rule.explanation}" for rule in rules if not rule.legal(recompute, recompute_layers, offload)
    )


def _layout_rule(stack: str, name: str, rule: FrameworkRule) -> LayoutRule:
    return LayoutRule(
        name, "stack", rule.choices, rule.legal, lambda c: f"{stack}: {rule.explain(c)}", reads_mode=rule.reads_mode
    )


def _runs_schedule(c: RuleContext, schedules: tuple[str, ...]) -> Value:
    """Return whether a candidate runs one of some schedules; a search names the natural one by `NATURAL`."""
    if c["schedule"] != NATURAL:
        return c["schedule"] in schedules
    is_1f1b, is_interleaved = c["num_virtual_stages"] == 1, c["num_virtual_stages"] > 1
    return (c["pp"] > 1) & ((is_1f1b & ("1f1b" in schedules)) | (is_interleaved & ("interleaved" in schedules)))


def _num_micro_batches(c: RuleContext) -> Value:
    return num_micro_batches(c.job, c.degrees)


def _sequence_divisor(c: RuleContext) -> Value:
    """Return the number that must divide a sequence: tp with sequence parallelism, times 2·cp with context parallelism."""
    return (1 + (c["tp"] - 1) * c["sequence_parallel"]) * (1 + (2 * c["cp"] - 1) * (c["cp"] > 1))


def _is_ring(c: RuleContext) -> bool:
    return get_cp_variant(cp_variant_names()[c["cp_variant"]]).is_ring


def _exchanges_heads(c: RuleContext) -> bool:
    return get_cp_variant(cp_variant_names()[c["cp_variant"]]).exchanges_heads


def _offloads_optimizer(c: RuleContext) -> bool:
    return get_offload_targets(c.degrees.get("offload", "none")).optimizer


WHOLE_LAYERS = ("full",)  # policies that keep the inputs of layers alone

POLICY_RULES: Mapping[str, PolicyRule] = {
    "host_has_checkpoints": PolicyRule(
        lambda recompute, layers, offload: not get_offload_targets(offload).activations or recompute in WHOLE_LAYERS,
        "activations on the host are checkpoints of layers; set recompute=full, or leave activations where they are",
    ),
    "parts_of_all_layers": PolicyRule(
        lambda recompute, layers, offload: layers is None or recompute in WHOLE_LAYERS,
        "recompute_layers goes with whole layers, and modules are those of every layer; leave it out, or set recompute=full",
    ),
}  # fmt: skip
FILLED_SCHEDULES = ("1f1b", "dualpipe_v")  # torch.distributed.pipelining, schedules.py

FRAMEWORK_RULES: Mapping[str, FrameworkRule] = {
    "zero_over_all_replicas": FrameworkRule(
        ("zero_stage", "dp"),
        lambda c: (c["zero_stage"] == 0) | (c["dp"] == 1),
        lambda c: f"ZeRO shards over all replicas, found dp = {c['dp']} beside fsdp = {c['fsdp']}; set dp=1",
    ),
    "zero_1_over_all_replicas": FrameworkRule(
        ("zero_stage", "dp"),
        lambda c: (c["zero_stage"] != 1) | (c["dp"] == 1),
        lambda c: f"ZeRO-1 shards over all replicas, found dp = {c['dp']} beside fsdp = {c['fsdp']}; set dp=1",
    ),
    "copies_have_shards": FrameworkRule(
        ("zero_stage", "dp", "fsdp"),
        lambda c: (c["zero_stage"] == 0) | (c["dp"] == 1) | (c["fsdp"] > 1),
        lambda c: f"dp = {c['dp']} copies of shards have to be fewer than all replicas; set fsdp > 1, or dp=1",
    ),
    "splits_beside_shards": FrameworkRule(
        ("dp", "fsdp", "tp", "cp"),
        lambda c: (c["dp"] == 1) | (c["fsdp"] > 1) | (c["tp"] * c["cp"] == 1),
        lambda c: "tensor and context parallelism go with shards, not with replicas alone; set fsdp > 1, or dp=1",
    ),
    "replicas_split_nothing": FrameworkRule(
        ("zero_stage", "dp", "tp", "cp", "pp"),
        lambda c: (c["zero_stage"] > 0) | (c["dp"] == 1) | (c["tp"] * c["cp"] * c["pp"] == 1),
        lambda c: "plain replicas are DDP's, which splits nothing else; set a zero_stage of 2 or 3",
    ),
    "tp_excludes_cp": FrameworkRule(
        ("tp", "cp"),
        lambda c: (c["tp"] == 1) | (c["cp"] == 1),
        lambda c: f"tensor and context parallelism exclude each other, found tp = {c['tp']} and cp = {c['cp']}; set one to 1",
    ),
    "tp_divides_kv_heads": FrameworkRule(
        ("tp",),
        lambda c: bool(c.model.kv_lora_rank) | (c.model.num_kv_heads % c["tp"] == 0),
        lambda c: (
            f"tp = {c['tp']} for {c.model.num_kv_heads} key-value heads, which are not copied; a tp that divides them is required"
        ),
    ),
    "tp_divides_kv_heads_or_copies_one": FrameworkRule(
        ("tp",),
        lambda c: (c.model.num_kv_heads == 1) | (c.model.num_kv_heads % c["tp"] == 0),
        lambda c: (
            f"tp = {c['tp']} for {c.model.num_kv_heads} key-value heads, which are not copied; a tp that divides them is required"
        ),
    ),
    "experts_beside_tp_split_positions": FrameworkRule(
        ("tp", "sequence_parallel"),
        lambda c: (not c.model.num_experts) | (c["tp"] == 1) | (c["sequence_parallel"] == 1),
        lambda c: "experts beside tensor parallelism require sequence parallelism; set sequence_parallel=true",
    ),
    "experts_beside_tp_are_whole": FrameworkRule(
        ("tp", "ep", "etp", "sequence_parallel", "async_tp"),
        lambda c: (
            (not c.model.num_experts)
            | (c["tp"] == 1)
            | ((c["ep"] > 1) & (c["etp"] == 1) & (c["sequence_parallel"] == 0) & (c["async_tp"] == 0))
        ),
        lambda c: (
            "experts beside tensor parallelism are whole, without sequence_parallel and async_tp; set tp=1, or ep > 1 etp=1 "
            "sequence_parallel=false"
        ),
        reads_mode=True,
    ),
    "spread_experts_are_whole": FrameworkRule(
        ("ep", "etp"),
        lambda c: (c["ep"] == 1) | (c["etp"] == 1),
        lambda c: f"experts over expert parallelism are whole, found etp = {c['etp']}; set etp=1",
        reads_mode=True,
    ),
    "experts_with_biases_are_whole": FrameworkRule(
        ("etp",),
        lambda c: ("experts" not in c.model.bias) | (c["etp"] == 1),
        lambda c: f"experts of {c.model.name} have biases, found etp = {c['etp']}; set etp=1",
        reads_mode=True,
    ),
    "zero_3_of_experts_excludes_cp": FrameworkRule(
        ("ep", "cp", "zero_stage"),
        lambda c: (c["ep"] == 1) | (c["cp"] == 1) | (c["zero_stage"] < 3),
        lambda c: "expert parallelism with ZeRO-3 excludes context parallelism; set cp=1 or zero_stage=2",
    ),
    "offloaded_optimizer_is_sharded": FrameworkRule(
        ("offload", "zero_stage"),
        lambda c: (not _offloads_optimizer(c)) | (c["zero_stage"] > 0),
        lambda c: "an optimizer on the host is a sharded one; set a zero_stage of at least 1, or offload=none",
    ),
    "micro_batches_for_each_rank": FrameworkRule(
        ("pp", "micro_batch_seqs"),
        lambda c: (c["pp"] == 1) | (_num_micro_batches(c) >= c["pp"]),
        lambda c: (
            f"{_num_micro_batches(c)} micro-batches are fewer than the {c['pp']} ranks of the pipeline; take a larger batch, or "
            "fewer ranks"
        ),
    ),
    "micro_batches_for_each_other_rank": FrameworkRule(
        ("pp", "schedule", "micro_batch_seqs"),
        lambda c: (not _runs_schedule(c, ("1f1b",))) | (_num_micro_batches(c) >= c["pp"] - 1)
        if c["schedule"] != NATURAL
        else (_num_micro_batches(c) >= c["pp"] - 1) | (c["num_virtual_stages"] > 1),
        lambda c: (
            f"1f1b takes at least {c['pp'] - 1} micro-batches of pp = {c['pp']}, found {_num_micro_batches(c)}; a smaller "
            "micro-batch or fewer stages are required"
        ),
    ),
    "micro_batches_for_each_stage": FrameworkRule(
        ("pp", "schedule", "num_virtual_stages", "micro_batch_seqs"),
        lambda c: (
            (_runs_schedule(c, FILLED_SCHEDULES) == 0) | (_num_micro_batches(c) >= c["pp"] * c["num_virtual_stages"])
        ),
        lambda c: (
            f"{c['schedule']} takes no fewer micro-batches than stages, found {_num_micro_batches(c)} for "
            f"{c['pp'] * c['num_virtual_stages']}; a smaller micro-batch or fewer stages are required"
        ),
    ),
    "micro_batches_in_rounds": FrameworkRule(
        ("pp", "micro_batch_seqs"),
        lambda c: (c["pp"] == 1) | (_num_micro_batches(c) % c["pp"] == 0),
        lambda c: f"the {_num_micro_batches(c)} micro-batches of a pipeline are not a multiple of its {c['pp']} stages",
    ),
    "pipeline_of_equal_layers": FrameworkRule(
        ("pp",),
        lambda c: (c["pp"] == 1) | (not c.model.num_dense_layers),
        lambda c: f"the {c.model.num_dense_layers} leading dense layers are outside of the pipeline; set pp=1",
    ),
    "pipeline_of_untied_embeddings": FrameworkRule(
        ("pp",),
        lambda c: (c["pp"] == 1) | (not c.model.tied_embeddings),
        lambda c: f"{c.model.name} ties its embeddings, which no pipeline of torchtitan does; set pp=1",
    ),
    "predicts_in_one_stage": FrameworkRule(
        ("pp", "cp"),
        lambda c: (not c.model.num_predict_layers) | (c["pp"] * c["cp"] == 1),
        lambda c: "multi-token prediction goes without pipeline and context parallelism; set pp=1 cp=1",
    ),
    "sequence_in_whole_pieces": FrameworkRule(
        ("tp", "cp", "sequence_parallel"),
        lambda c: c.job.seq_len % _sequence_divisor(c) == 0,
        lambda c: (
            f"seq_len = {c.job.seq_len} is not a multiple of {_sequence_divisor(c)}: of tp with sequence parallelism, times 2·cp "
            "with context parallelism; choose other degrees"
        ),
    ),
    "sinks_with_gathered_keys": FrameworkRule(
        ("cp", "cp_variant"),
        lambda c: (c["cp"] == 1) | (not ((_is_ring(c) or _exchanges_heads(c)) and c.model.sinks)),
        lambda c: "attention with sinks goes neither in rings nor by exchanging heads; set cp_variant=all_gather",
        reads_mode=True,
    ),
    "windows_without_rings": FrameworkRule(
        ("cp", "cp_variant"),
        lambda c: (c["cp"] == 1) | (not (_is_ring(c) and c.model.sliding_window is not None)),
        lambda c: "attention with windows does not go in rings; set cp_variant=all_gather",
        reads_mode=True,
    ),
    "rings_of_squares": FrameworkRule(
        ("cp", "cp_variant"),
        lambda c: (c["cp"] == 1) | (not _is_ring(c)) | (c.job.seq_len % c["cp"] ** 2 == 0),
        lambda c: f"a ring asks for sequences that cp² = {c['cp'] ** 2} divides, found {c.job.seq_len}; set another cp",
        reads_mode=True,
    ),
    "rings_predict_one_token": FrameworkRule(
        ("cp", "cp_variant"),
        lambda c: (c["cp"] == 1) | (not (_is_ring(c) and c.model.num_predict_layers)),
        lambda c: "a balanced ring does not go with multi-token prediction; set cp_variant=all_gather",
        reads_mode=True,
    ),
    "heads_exchanged_of_global_attention": FrameworkRule(
        ("cp", "cp_variant"),
        lambda c: (
            (c["cp"] == 1)
            | (not (_exchanges_heads(c) and (c.model.kv_lora_rank or c.model.sliding_window is not None)))
        ),
        lambda c: "exchanging heads goes with global attention alone; set cp_variant=all_gather",
        reads_mode=True,
    ),
    "delayed_scales_of_one_micro_batch": FrameworkRule(
        ("pp", "micro_batch_seqs"),
        lambda c: (c.precision.scaling != "delayed") | (c["pp"] > 1) | (_num_micro_batches(c) == 1),
        lambda c: "delayed scaling does not go with gradient accumulation; take a larger micro-batch or another precision",
    ),
}  # fmt: skip
