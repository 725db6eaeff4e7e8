"""Random launches: models of the catalogue on clusters, with layouts that are legal for them."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

from shardwise.cluster.abilities import Abilities
from shardwise.cluster.load import load_cluster
from shardwise.cost.estimate import estimate
from shardwise.errors import InputError
from shardwise.export.launch import Launch, machines_of
from shardwise.job import Job
from shardwise.layout.context import variant_names
from shardwise.layout.layout import Layout
from shardwise.layout.legality import violations
from shardwise.model.load import load_model
from shardwise.model.recompute import policy_names
from shardwise.planning.plan import Plan
from shardwise.schedule.schedule import natural_schedule

MODELS = (
    "llama-3-8b", "llama-3-70b", "llama-3-405b", "mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3", "gpt-3-175b", "qwen2.5-7b",
    "gemma-2-9b", "gpt-oss-20b",
)  # fmt: skip
PRECISIONS = (
    "bf16",
    "bf16",
    "bf16_fp32_main_gradients",
    "bf16_fp32_reduction",
    "bf16_fp32_reduction",
    "fp8_current",
    "fp8_torchao",
    "fp8_torchao_rowwise",
    "fp8_deepseek_v3",
)

# No launch says what it costs: the estimate of any plan stands for that of each.
PRICED = estimate(
    load_model("gpt-2"), load_cluster("h100:8"), Job(global_batch_tokens=2**13, seq_len=1024), Layout(dp=8)
)


def _had(choices: tuple[Any, ...], has: Collection[Any] | None) -> tuple[Any, ...]:
    """Those of some choices that a stack has; all where nothing is said of it, or where it has none of them."""
    return tuple(one for one in choices if has is None or one in has) or choices


def random_launch(
    rng: random.Random, *, chip: str = "h100", models: tuple[str, ...] = MODELS, runs: Abilities | None = None
) -> Launch | None:
    """A launch whose layout is legal, of what a stack `runs`; None where the dice made one that is not."""
    has = dict(runs.items()) if runs else {}
    num_devices = 8 * 2 ** rng.randrange(0, 8)
    model, cluster = load_model(rng.choice(models)), load_cluster(f"{chip}:{num_devices}")
    tp, pp, cp = 2 ** rng.randrange(0, 4), rng.choice((1, 1, 2, 4, 8, 16)), rng.choice((1, 1, 1, 2, 4))
    replicas = num_devices // (tp * pp * cp)
    if replicas < 1:
        return None
    zero = rng.choice(_had((0, 1, 1, 2, 3, 3), has.get("zero")))
    dp = replicas if not zero else rng.choice([d for d in (1, 1, 2, 4) if replicas % d == 0])
    virtual = rng.choice((1, 1, 2, 4)) if pp > 1 else 1
    seq_len, micro = rng.choice((2048, 4096, 8192)), rng.choice((1, 1, 2, 4))
    accumulation = rng.choice((1, 2, pp, 4 * pp))
    job = Job(
        global_batch_tokens=seq_len * micro * replicas * accumulation, seq_len=seq_len,
        tokens=rng.choice((None, 1e12)), precision=rng.choice(PRECISIONS), loss=rng.choice(("fused", "unfused")),
    )  # fmt: skip
    try:
        layout = Layout(
            dp=dp, fsdp=replicas // dp, tp=tp, cp=cp, pp=pp, ep=rng.choice((1, 2, 4, 8)) if model.num_experts else 1,
            etp=rng.choice((None, 1)) if model.num_experts and tp > 1 else None, num_virtual_stages=virtual, zero_stage=zero,
            sequence_parallel=tp > 1 and rng.random() < 0.8, async_tp=tp > 1 and rng.random() < 0.2,
            cp_variant=rng.choice(_had(variant_names(), has.get("cp_variants"))) if cp > 1 else variant_names()[0],
            micro_batch_seqs=micro,
            recompute=rng.choice(_had(policy_names(), has.get("recompute"))),
            offload=rng.choice(_had(("none", "none", "optimizer"), has.get("offload"))),
            schedule=rng.choice((*[natural_schedule(pp, virtual)] * 3, *(has.get("schedules", ()) if pp > 1 else ()))),
        )  # fmt: skip
    except InputError:
        return None
    if layout.recompute == "full" and rng.random() < 0.3:
        layout = replace(layout, recompute_layers=rng.randrange(1, model.num_layers // pp + 1))
    if violations(model, job, num_devices, layout):
        return None
    plan = Plan(model=model, cluster=cluster, job=job, layout=layout, estimate=PRICED)
    return Launch(model=model, job=job, layout=layout, machines=machines_of(cluster), plan=plan)


def random_launches(seed: int, **choices: object) -> Iterator[Launch]:
    """Legal launches without an end."""
    rng = random.Random(seed)
    while True:
        launch = random_launch(rng, **choices)  # type: ignore[arg-type]
        if launch is not None:
            yield launch
