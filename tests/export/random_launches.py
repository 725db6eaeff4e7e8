"""Random launches: models of the catalogue on clusters, with layouts that are legal for them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

from shardwise.hardware.cluster_loading import load_cluster
from shardwise.hardware.stacks import Abilities, get_stack
from shardwise.interop.frameworks.targets import get_target
from shardwise.interop.launches.launch import Launch, cluster_machines
from shardwise.interop.launches.translate_launch import refusals, use_target_stages
from shardwise.layout.layers_per_stage import STAGES
from shardwise.layout.layout import Layout, cp_variant_names
from shardwise.layout.rules.table import violations
from shardwise.model.job import Job
from shardwise.model.load import load_model
from shardwise.model.recompute_policies import policy_names
from shardwise.pipeline.registry import natural_schedule, schedule_names
from shardwise.price import Problem
from shardwise.price.estimate import estimate
from shardwise.search.plan import Plan
from shardwise.values.errors import InputError
from shardwise.values.precision import PRECISIONS as ALL_PRECISIONS

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
# Tori of TPUs with 8 to 1024 devices, by the number.
TORI = {8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8", 512: "8x8x8", 1024: "8x8x16"}

# No launch says what it costs: the estimate of any plan stands for that of each.
PRICED = estimate(
    Problem(load_model("gpt-2"), load_cluster("h100:8"), Job(global_batch_tokens=2**13, seq_len=1024)), Layout(dp=8)
)


# Everything that there is, for launches that most targets refuse.
ANY = Abilities(
    axes=("tp", "cp", "pp", "ep"), zero=(1, 2, 3), zero_with_pp=(1, 2, 3), zero_with_cp=(0, 1, 2, 3), zero_with_ep=(0, 1, 2, 3),
    schedules=schedule_names(), cp_variants=cp_variant_names(), recompute=policy_names(), losses=("fused",), products=("fp8",),
    precisions=tuple(ALL_PRECISIONS), replica_precisions=tuple(ALL_PRECISIONS),
    offload=("none", "none", "optimizer"), sequence_parallel=True, async_tp=True, uneven_stages=True, uneven_batches=True,
    whole_experts=True, stages=STAGES, rules=(), source="every choice",
)  # fmt: skip


def random_launch(
    rng: random.Random, *, chip: str = "h100", models: Sequence[str] = MODELS, precisions: Sequence[str] = PRECISIONS,
    runs: Abilities = ANY,
) -> Launch | None:  # fmt: skip
    """A launch whose layout is legal, of choices that a stack runs; None where the dice made one that is not."""
    num_devices = 8 * 2 ** rng.randrange(0, 8)
    shape = TORI[num_devices] if chip.startswith("tpu") else num_devices
    model, cluster = load_model(rng.choice(models)), load_cluster(f"{chip}:{shape}")
    degrees = {"tp": (1, 2, 4, 8), "pp": (1, 1, 2, 4, 8, 16), "cp": (1, 1, 1, 2, 4), "ep": (1, 2, 4, 8)}
    tp, pp, cp, ep = (rng.choice(several if axis in runs.axes else (1,)) for axis, several in degrees.items())
    replicas = num_devices // (tp * pp * cp)
    if replicas < 1:
        return None
    zero = rng.choice([stage for stage in (0, 1, 1, 2, 3, 3) if stage in (0, *runs.zero)])
    dp = replicas if not zero else rng.choice([d for d in (1, 1, 2, 4) if replicas % d == 0])
    virtual = rng.choice((1, 1, 2, 4)) if pp > 1 else 1
    seq_len, micro = rng.choice((2048, 4096, 8192)), rng.choice((1, 1, 2, 4))
    accumulation = rng.choice((1, 2, pp, 4 * pp))
    job = Job(
        global_batch_tokens=seq_len * micro * replicas * accumulation, seq_len=seq_len,
        tokens=rng.choice((None, 1e12)), precision=rng.choice(precisions), loss=rng.choice(("fused", "unfused")),
    )  # fmt: skip
    schedules = (*[natural_schedule(pp, virtual)] * 3, *(runs.schedules if pp > 1 else ()))
    try:
        layout = Layout(
            dp=dp, fsdp=replicas // dp, tp=tp, cp=cp, pp=pp, ep=ep if model.num_experts else 1,
            etp=rng.choice((None, 1)) if model.num_experts and tp > 1 else None, num_virtual_stages=virtual, zero_stage=zero,
            sequence_parallel=runs.sequence_parallel and tp > 1 and rng.random() < 0.8,
            async_tp=runs.async_tp and tp > 1 and rng.random() < 0.2,
            cp_variant=rng.choice(runs.cp_variants) if cp > 1 else cp_variant_names()[0], micro_batch_seqs=micro,
            recompute=rng.choice(tuple(runs.recompute)), offload=rng.choice(runs.offload), schedule=rng.choice(schedules),
        )  # fmt: skip
    except InputError:
        return None
    if layout.recompute == "full" and rng.random() < 0.3:
        layout = replace(layout, recompute_layers=rng.randrange(1, model.num_layers // pp + 1))
    if violations(model, job, num_devices, layout):
        return None
    plan = Plan(model=model, cluster=cluster, job=job, layout=layout, estimate=PRICED)
    return Launch(model=model, job=job, layout=layout, machines=cluster_machines(cluster), plan=plan)


def random_launches(seed: int, **choices: object) -> Iterator[Launch]:
    """Legal launches without an end."""
    rng = random.Random(seed)
    while True:
        launch = random_launch(rng, **choices)  # type: ignore[arg-type]
        if launch is not None:
            yield launch


def runnable_launches(name: str, seed: int) -> Iterator[Launch]:
    """Legal launches that a target runs, without an end: of what its stack can run, with stages as it deals them out."""
    target, runs = get_target(name), get_stack(get_target(name).stack).abilities
    choices = {"models": sayable(name, "models"), "precisions": sayable(name, "precisions")}
    for launch in random_launches(seed, chip=chip_of(name), runs=runs, **choices):
        taken = use_target_stages(launch, target)
        legal = not violations(taken.model, taken.job, taken.machines.num_devices, taken.layout)
        if legal and not refusals(taken, target):
            yield _with_plan(taken)


def _with_plan(launch: Launch) -> Launch:
    """The launch with the plan that it is, of which a target may have dealt the layers out in its own way."""
    return replace(launch, plan=replace(launch.plan, layout=launch.layout)) if launch.plan else launch


def chip_of(name: str) -> str:
    """What a target is tried on."""
    return "h100" if "GPU" in get_stack(get_target(name).stack).platforms else "tpu-v5p"


@cache
def sayable(name: str, of: str) -> tuple[str, ...]:
    """Models, or precisions, of which a target runs some launch of replicas."""
    pairs = [
        (model, precision)
        for model in MODELS
        for precision in ALL_PRECISIONS
        if not refusals(_plain(name, model, precision), get_target(name))
    ]
    return tuple(sorted({pair[of == "precisions"] for pair in pairs}))


def _plain(name: str, model: str, precision: str) -> Launch:
    chip = chip_of(name)
    cluster = load_cluster(f"{chip}:{TORI[8] if chip.startswith('tpu') else 8}")
    architecture, job = load_model(model), Job(global_batch_tokens=8 * 4096, seq_len=4096, precision=precision)
    runs = get_stack(get_target(name).stack).abilities
    recompute, zero = "full" if "full" in runs.recompute else "none", max((0, *runs.zero))
    layout = Layout(dp=1 if zero else 8, fsdp=8 if zero else 1, zero_stage=zero, recompute=recompute)
    plan = Plan(model=architecture, cluster=cluster, job=job, layout=layout, estimate=PRICED)
    return Launch(model=architecture, job=job, layout=layout, machines=cluster_machines(cluster), plan=plan)
