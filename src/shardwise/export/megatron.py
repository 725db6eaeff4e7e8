"""Megatron-LM: a script that starts pretrain_gpt.py with its arguments.

Source of names and types: Megatron-LM at d98e8a64 (2026-08-22, Megatron-Core 0.20.0), the parser of
megatron/training/arguments.py; what it asks of them: validate_args there and TransformerConfig.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shardwise.errors import InputError
from shardwise.export.field import Field, Given, Options, beside, flag, named, required, same
from shardwise.export.formats.flags import flag_words, options_in
from shardwise.export.formats.shell import training_command
from shardwise.export.launch import Launch
from shardwise.export.launchers import torchrun
from shardwise.export.megatron_model import MODEL
from shardwise.export.megatron_stages import layout_stages, layout_text
from shardwise.export.target import Files, Need, Target, option_table
from shardwise.layout.stages import virtual_stages

SCRIPT = "launch.sh"
SHARDING = {2: "optim_grads", 3: "optim_grads_params"}  # of Megatron's own FSDP
VARIANTS = {"zigzag": "p2p", "all_gather": "allgather", "ulysses": "a2a"}
# Modules that run again: what attention computes between its products, norms and activations of experts. Of a dense MLP the
# activation runs again by itself where it is fused.
SELECTIVE = ("core_attn", "layernorm")
PRECISIONS: Mapping[str, Options] = {
    "bf16": {"bf16": True, "grad-reduce-in-bf16": True},
    "bf16_fp32_main_gradients": {"bf16": True},
    "bf16_bf16_moments": {"bf16": True, "grad-reduce-in-bf16": True, "use-precision-aware-optimizer": True,
                          "exp-avg-dtype": "bf16", "exp-avg-sq-dtype": "bf16"},
    "fp8_delayed": {"bf16": True, "fp8-format": "hybrid", "fp8-recipe": "delayed"},
    "fp8_current": {"bf16": True, "fp8-format": "hybrid", "fp8-recipe": "tensorwise"},
    "mxfp8": {"bf16": True, "fp8-format": "e4m3", "fp8-recipe": "mxfp8"},
    "nvfp4": {"bf16": True, "fp4-format": "e2m1", "fp4-recipe": "nvfp4"},
    "fp32": {},
}  # fmt: skip
# The recipe of each of Megatron's, whatever else of the number formats is said.
LOW: Mapping[tuple[str, str], str] = {
    ("fp8-recipe", "delayed"): "fp8_delayed", ("fp8-recipe", "tensorwise"): "fp8_current", ("fp8-recipe", "mxfp8"): "mxfp8",
    ("fp8-recipe", "blockwise"): "fp8_deepseek_v3", ("fp4-recipe", "nvfp4"): "nvfp4",
}  # fmt: skip
NUMBER_FORMATS = sorted({name for options in PRECISIONS.values() for name in options})


def _replicas(launch: Launch) -> Options:
    """ZeRO: stage 1 is the distributed optimizer, 2 and 3 are Megatron's own FSDP; replicas of shards are its instances."""
    layout = launch.layout
    instances = {"num-distributed-optimizer-instances": layout.dp} if layout.zero_stage and layout.dp > 1 else {}
    if layout.zero_stage == 1:
        return {"use-distributed-optimizer": True, **instances}
    if not layout.zero_stage:
        return {}
    return {"use-megatron-fsdp": True, "data-parallel-sharding-strategy": SHARDING[layout.zero_stage],
            "use-distributed-optimizer": True, **instances}  # fmt: skip


def _heard_replicas(given: Given) -> Mapping[str, Any]:
    degrees = [
        given.get(f"{name}-size", 1)
        for name in ("tensor-model-parallel", "pipeline-model-parallel", "context-parallel")
    ]
    model_parallel = degrees[0] * degrees[1] * degrees[2]
    if not isinstance(model_parallel, int) or model_parallel < 1 or given.machines.num_devices % model_parallel:
        raise InputError(
            f"tensor, pipeline and context parallelism take {model_parallel} devices together, which do not divide "
            f"{given.machines.num_devices}; give the cluster of the launch"
        )
    replicas = given.machines.num_devices // model_parallel
    strategy, instances = (
        given.get("data-parallel-sharding-strategy", "no_shard"),
        given.get("num-distributed-optimizer-instances", 1),
    )
    own, distributed = given.get("use-megatron-fsdp", False), given.get("use-distributed-optimizer", False)
    by_strategy = {"no_shard": 0, "optim": 1, **{name: stage for stage, name in SHARDING.items()}}
    stage = by_strategy[strategy] if own else int(bool(distributed))
    if not stage:
        return {"layout.dp": replicas, "layout.zero_stage": 0}
    return {"layout.dp": instances, "layout.fsdp": replicas // instances, "layout.zero_stage": stage}


def _stages(launch: Launch) -> Options:
    """Stages that are as many layers each need no word; others are written out."""
    layout = launch.layout
    if layout.pp == 1:
        return {}
    stages = virtual_stages(launch.model, layout)
    virtual = (
        {"num-virtual-stages-per-pipeline-rank": layout.num_virtual_stages} if layout.num_virtual_stages > 1 else {}
    )
    if len(set(stages)) == 1 and not launch.model.num_predict_layers:
        return virtual
    return {"pipeline-model-parallel-layout": layout_text(stages, launch.model.num_predict_layers)}


def _heard_stages(given: Given) -> Mapping[str, Any]:
    ranks, layers = given.get("pipeline-model-parallel-size", 1), given.need("num-layers")
    if ranks == 1:
        return {"layout.schedule": "none"}
    text, per = given.get("pipeline-model-parallel-layout"), given.get("num-layers-per-virtual-pipeline-stage")
    virtual = given.get("num-virtual-stages-per-pipeline-rank", layers // ranks // per if per else 1)
    stages = layout_stages(text) if text else _alike(layers, ranks * virtual)
    virtual = len(stages) // ranks
    return {"layout.num_virtual_stages": virtual, "layout.stages": stages,
            "layout.schedule": "interleaved" if virtual > 1 else "1f1b"}  # fmt: skip


def _alike(layers: int, stages: int) -> tuple[int, ...]:
    if layers % stages:
        raise InputError(
            f"num-layers: found {layers} on {stages} stages; a multiple, or --pipeline-model-parallel-layout, is required"
        )
    return (layers // stages,) * stages


def _recompute(launch: Launch) -> Options:
    layout, stages = launch.layout, virtual_stages(launch.model, launch.layout)
    match layout.recompute:
        case "none":
            return {}
        case "full":
            count = layout.recompute_layers
            method = {"recompute-method": "uniform", "recompute-num-layers": 1} if count is None or count >= max(stages) \
                else {"recompute-method": "block", "recompute-num-layers": count}  # fmt: skip
            return {"recompute-granularity": "full", **method}
        case "selective":
            return {
                "recompute-granularity": "selective",
                "recompute-modules": [*SELECTIVE, *(["moe_act"] if launch.model.num_experts else [])],
            }
        case "mla_up_proj":
            return {"recompute-granularity": "selective", "recompute-modules": ["mla_up_proj"]}
    return {}


def _heard_recompute(given: Given) -> Mapping[str, Any]:
    granularity, modules = given.get("recompute-granularity"), given.get("recompute-modules", ["core_attn"])
    method, count = given.get("recompute-method"), given.get("recompute-num-layers")
    if granularity is None:
        return {"layout.recompute": "selective" if given.get("recompute-activations", False) else "none"}
    if granularity == "full":
        return {"layout.recompute": "full", **({"layout.recompute_layers": count} if method == "block" else {})}
    return {"layout.recompute": "mla_up_proj" if list(modules) == ["mla_up_proj"] else "selective"}


def _precision(launch: Launch) -> Options:
    return PRECISIONS.get(launch.job.precision, {})


def _heard_precision(given: Given) -> Mapping[str, Any]:
    """The recipe with these very options, else the nearest, which is said."""
    said = {name: given.get(name) for name in NUMBER_FORMATS if name in given}
    exact = next((name for name, options in PRECISIONS.items() if dict(options) == said), None)
    if exact and "fp16" not in given:
        return {"job.precision": exact}
    kinds = [("fp4-recipe", said.get("fp4-recipe", "nvfp4"))] if "fp4-format" in said else []
    kinds += [("fp8-recipe", said.get("fp8-recipe", "delayed"))] if "fp8-format" in said else []
    found = next((LOW[kind] for kind in kinds if kind in LOW), "bf16_fp32_main_gradients")
    words = " ".join(name if value is True else f"{name}={value}" for name, value in said.items()) or "fp16"
    given.notes.append(f"number formats {words} are priced as {found}")
    return {"job.precision": found}


def _etp(launch: Launch) -> Options:
    """Experts are split as layers are unless Megatron is told otherwise."""
    model, layout = launch.model, launch.layout
    if not model.num_experts:
        return {}
    own = {"expert-tensor-parallel-size": layout.expert_tp} if layout.tp > 1 else {}
    return {
        "expert-model-parallel-size": layout.ep,
        **own,
        "moe-token-dispatcher-type": "alltoall",
        "moe-grouped-gemm": True,
    }


def _heard_etp(given: Given) -> Mapping[str, Any]:
    tp, etp = given.get("tensor-model-parallel-size", 1), given.get("expert-tensor-parallel-size")
    for name in ("moe-token-dispatcher-type", "moe-grouped-gemm"):
        given.get(name)
    return {"layout.ep": given.get("expert-model-parallel-size", 1), "layout.etp": 1 if etp == 1 and tp > 1 else None}


def _beside_tp(part: str, option: str) -> Field:
    """A flag that counts beside tensor parallelism alone. Source: validate_args switches it off for one device."""
    return Field(
        flag(part, option).say,
        lambda given: {part: bool(given.get(option, False)) and given.get("tensor-model-parallel-size", 1) > 1},
    )


def _overlap(launch: Launch) -> Options:
    sharded = {"overlap-param-gather": True} if launch.layout.zero_stage else {}
    return {"overlap-grad-reduce": True, **sharded} if launch.layout.dp * launch.layout.fsdp > 1 else {}


def _samples(launch: Launch) -> Options:
    tokens = launch.job.tokens
    return {"train-samples": round(tokens / launch.job.seq_len)} if tokens else {}


def _heard_samples(given: Given) -> Mapping[str, Any]:
    samples = given.get("train-samples")
    if samples is None and given.get("train-iters"):
        samples = given.get("train-iters") * given.need("global-batch-size")
    return {"job.tokens": float(samples * given.need("seq-length"))} if samples else {}


LAYOUT: tuple[Field, ...] = (
    same("layout.tp", "tensor-model-parallel-size", 1),
    same("layout.pp", "pipeline-model-parallel-size", 1),
    same("layout.cp", "context-parallel-size", 1),
    Field(_replicas, _heard_replicas),
    _beside_tp("layout.sequence_parallel", "sequence-parallel"),
    _beside_tp("layout.async_tp", "tp-comm-overlap"),
    Field(
        lambda launch: {"cp-comm-type": [VARIANTS[launch.layout.cp_variant]]}
        if launch.layout.cp > 1 and launch.layout.cp_variant in VARIANTS else {},
        lambda given: {"layout.cp_variant": {v: k for k, v in VARIANTS.items()}[given.get("cp-comm-type", ["p2p"])[0]]}
        if given.get("context-parallel-size", 1) > 1 else {},
    ),
    Field(_etp, _heard_etp),
    Field(_stages, _heard_stages),
    Field(_recompute, _heard_recompute),
    Field(
        lambda launch: {"optimizer-cpu-offload": True} if launch.layout.offload == "optimizer" else {},
        lambda given: {"layout.offload": "optimizer" if given.get("optimizer-cpu-offload", False) else "none"},
    ),
    beside("overlap-grad-reduce", "overlap-param-gather", say=_overlap),
)  # fmt: skip
JOB: tuple[Field, ...] = (
    required("job.seq_len", "seq-length"),
    required("layout.micro_batch_seqs", "micro-batch-size"),
    required("job.global_batch_seqs", "global-batch-size"),
    Field(_precision, _heard_precision),
    named("job.loss", "cross-entropy-loss-fusion", {"fused": True, "unfused": False}, False),
    named("job.optimizer", "optimizer", {"adamw": "adam", "lion": "lion"}, "adam"),
    Field(_samples, _heard_samples),
)
# What no plan says: data, its tokenizer, learning rate. The script asks for them.
YOURS = ('--data-path "${DATA_PATH:?a prefix of indexed data}"', '--tokenizer-type HuggingFaceTokenizer',
         '--tokenizer-model "${TOKENIZER:?a tokenizer}"', '--lr "${LR:?a learning rate}"')  # fmt: skip


def _write(options: Options, launch: Launch) -> Files:
    words = [" ".join(one) for one in flag_words(options)]
    arguments = "\n".join(f"  {one}" for one in (*words, *YOURS))
    text = (
        "#!/bin/bash\n# Starts on each node; MEGATRON is a checkout of Megatron-LM.\nset -euo pipefail\n"
        f"export CUDA_DEVICE_MAX_CONNECTIONS={1 if launch.layout.zero_stage < 2 else 32}\n\nARGS=(\n{arguments}\n)\n\n"
        f'{torchrun(launch.machines, chr(34) + "${MEGATRON:?}/pretrain_gpt.py" + chr(34))} "${{ARGS[@]}}"\n'
    )
    return {SCRIPT: text}


def _read(files: Files) -> Options:
    (name, text), *_ = files.items()
    return options_in(training_command(text, name).arguments, option_table("megatron"))


def _notes(launch: Launch) -> Iterator[str]:
    yield "data, tokenizer and learning rate are yours: set DATA_PATH, TOKENIZER and LR"
    if launch.layout.recompute == "selective":
        yield "selective recomputation keeps a dense MLP's activation where it is not fused: memory may be above the plan's"


TARGET = Target(
    name="megatron", title="Megatron-LM", version="core 0.20.0 (d98e8a64)",
    source="https://github.com/NVIDIA/Megatron-LM, megatron/training/arguments.py", stack="megatron", table="megatron",
    model_fields=MODEL, fields=(*LAYOUT, *JOB),
    needs=(
        Need(
            lambda launch: launch.job.num_seqs % (launch.layout.dp * launch.layout.fsdp * launch.layout.micro_batch_seqs) == 0,
            lambda launch: f"global-batch-size = {launch.job.num_seqs} is no multiple of micro-batch-size × replicas = "
            f"{launch.layout.dp * launch.layout.fsdp * launch.layout.micro_batch_seqs}",
        ),
        Need(
            lambda launch: not (launch.model.num_experts and launch.layout.tp > 1) or launch.layout.sequence_parallel,
            lambda launch: "experts beside tensor parallelism require sequence parallelism; set sequence_parallel=true",
        ),
    ),
    write=_write, read=_read, command=lambda launch: f"bash {SCRIPT}", notes=_notes,
)  # fmt: skip
