"""Low-rank adapters (LoRA, Hu et al. 2021): names of the matrices that may have one, groups of them, and settings by word.

A matrix is named as transformers names its module, so that target lists of PEFT and of the trainers on top of it are taken as
they are. Adapters are weights of the model, and a job chooses them: `--set job.lora_rank=16` is written to the model.

Matrices that are parts of one module (those of latent attention that are one `Linear`, and the experts' gate and up) share the
first matrix of its adapter, as that module's adapter has one A. Source: PEFT 0.21 with transformers 5.23: tuners/lora/layer.py,
Linear: A of [r, in_features], B of [out_features, r]; ParamWrapper: both for each expert; experts' gate and up are one parameter,
whose adapter has twice the rank. `benchmarks/export_check/peft_models.py` compares with PEFT's own models.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from shardwise.model.recurrent_mixers import MIXER_MODULES

EXPERT_MODULES = ("experts.gate_up_proj", "experts.down_proj")
# Groups of modules: `all-linear` is PEFT's word for every linear layer but the head.
LORA_GROUPS: Mapping[str, tuple[str, ...]] = {
    "qkv": ("q_proj", "k_proj", "v_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
    "attention_out": ("o_proj",),
    "mlp": ("gate_proj", "up_proj", "down_proj", *EXPERT_MODULES),
    "experts": EXPERT_MODULES,
}
ALL_LINEAR, SHARED_EXPERT_GATE = "all-linear", "shared_expert_gate"
USUAL_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")  # of most launches
# Modules of recurrences (`model.recurrent_mixers`), and that of a gate of attention with a module of its own.
RECURRENCE_MODULES = tuple(
    dict.fromkeys(
        module for modules in MIXER_MODULES.values() for module in modules.values() if module not in LORA_GROUPS["qkv"]
    )
)
LORA_MODULES = (
    *dict.fromkeys(module for modules in LORA_GROUPS.values() for module in modules), "router", "g_proj", SHARED_EXPERT_GATE,
    *(module for module in RECURRENCE_MODULES if module not in ("o_proj", "g_proj")),
)  # fmt: skip
LORA_TARGETS = (ALL_LINEAR, *LORA_GROUPS, *LORA_MODULES)
ADAPTER_INPUT, ADAPTER_OUTPUT = ".lora_a", ".lora_b"  # what ends the names of an adapter's matrices A and B
# What else a module's name stands for: experts' matrices have the names of an MLP's.
NAMESAKES: Mapping[str, tuple[str, ...]] = {
    "gate_proj": EXPERT_MODULES[:1], "up_proj": EXPERT_MODULES[:1], "down_proj": EXPERT_MODULES[1:],
}  # fmt: skip
# The module of each weight of a block (`block_parts`).
MODULES_BY_WEIGHT: Mapping[str, str] = {
    "wq": "q_proj", "wk": "k_proj", "wv": "v_proj", "wo": "o_proj", "router": "router",
    "w_q_down": "q_a_proj", "w_q_plain": "q_b_proj", "w_q_rotary": "q_b_proj", "w_kv_down": "kv_a_proj_with_mqa",
    "w_k_rotary": "kv_a_proj_with_mqa", "w_k_up": "kv_b_proj", "w_v_up": "kv_b_proj",
    **{f"{block}_{matrix}": f"{matrix}_proj" for block in ("w", "shared") for matrix in ("gate", "up", "down")},
    SHARED_EXPERT_GATE: SHARED_EXPERT_GATE,
    **dict.fromkeys(("experts_gate", "experts_up"), EXPERT_MODULES[0]), "experts_down": EXPERT_MODULES[1],
}  # fmt: skip


def expand_lora_targets(targets: Iterable[str], absent: Collection[str]) -> frozenset[str]:
    """Return the modules that targets name, groups expanded, without those that a model lacks (`absent`), as PEFT does.

    >>> sorted(expand_lora_targets(["qkv", "o_proj"], absent=["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"]))
    ['k_proj', 'o_proj', 'q_proj', 'v_proj']
    """
    groups = {ALL_LINEAR: LORA_MODULES, **LORA_GROUPS}
    modules = {
        module
        for target in targets
        for name in groups.get(target, (target,))
        for module in (name, *NAMESAKES.get(name, ()))
    }
    return frozenset(modules.difference(absent))


def absent_modules(
    *, latent: bool, latent_queries: bool, gated: bool, experts: bool, values: bool = True, keys: bool = True,
    recurrence: bool = False, gate: bool = False,
) -> frozenset[str]:  # fmt: skip
    """Return the modules that a model lacks by its structure; plain MLPs are taken to be there. Without `values`
    these are the keys, without `keys` both are another layer's; `gate` is one of attention, with a module of its own."""
    absent = {"k_proj", "v_proj"} if latent else {"kv_a_proj_with_mqa", "kv_b_proj"}
    absent |= {"q_proj"} if latent_queries else {"q_a_proj", "q_b_proj"}
    absent |= set() if values else {"v_proj"}
    absent |= set() if keys else {"k_proj", "v_proj"}
    absent |= set() if gated else {"gate_proj"}
    absent |= set() if recurrence else {*RECURRENCE_MODULES} - {"o_proj", "g_proj"}
    absent |= set() if gate or recurrence else {"g_proj"}
    return frozenset(absent | (set() if experts else {"router", SHARED_EXPERT_GATE, *EXPERT_MODULES}))


def move_adapters_to_model(overrides: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """Return settings by room with the job's adapters among the model's.

    >>> move_adapters_to_model({"model": {}, "job": {"lora_rank": "16", "seq_len": "1024"}})
    {'model': {'lora_rank': '16'}, 'job': {'seq_len': '1024'}}
    """
    rooms = {room: dict(settings) for room, settings in overrides.items()}
    job = rooms.get("job", {})
    rooms["model"].update({name: job.pop(name) for name in [*job] if name.startswith("lora_")})
    return rooms


def with_default_targets(settings: Mapping[str, str], targets: Collection[str]) -> Mapping[str, str]:
    """Return settings of a model with adapters of `all-linear`, where they have a rank, and neither they nor the model targets.

    >>> with_default_targets({"lora_rank": "16"}, ())
    {'lora_targets': 'all-linear', 'lora_rank': '16'}
    """
    has_rank = settings.get("lora_rank", "0") != "0"
    return settings if targets or not has_rank else {"lora_targets": ALL_LINEAR, **settings}
