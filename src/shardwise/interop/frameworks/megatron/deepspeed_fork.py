"""Megatron-DeepSpeed: scripts that start its pretrain_gpt.py, with the DeepSpeed configuration that they name; read only.

Sources: deepspeedai/Megatron-DeepSpeed at 4efb479d (2025-07-16) and bigscience-workshop/Megatron-DeepSpeed at 8387ae17
(2023-12-07), megatron/arguments.py; experts: megatron/model/transformer.py (get_num_experts_per_layer) and DeepSpeed,
moe/layer.py; number formats: DeepSpeed, runtime/engine.py (get_data_types) and runtime/bf16_optimizer.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import chain, cycle, islice
from typing import Any

from shardwise.interop.frameworks.deepspeed import UNPRICED
from shardwise.interop.frameworks.megatron.model_options import MODEL_MAPPINGS
from shardwise.interop.frameworks.megatron.weight_names import default_biases
from shardwise.interop.frameworks.trainers.trainer_fields import (
    DEEPSPEED,
    OPTIMIZER_DEVICE,
    STAGE,
    Sharding,
    num_replicas,
    read_deepspeed,
    read_only,
    refuse_writing,
    sharding_fields,
)
from shardwise.interop.launches.launch import plain_replica_fields
from shardwise.interop.launches.launch_scripts import is_true
from shardwise.interop.launches.target import LaunchFiles, OptionReader, Target
from shardwise.interop.text_formats.command_flags import parse_flags
from shardwise.interop.text_formats.config_trees import normalize_values
from shardwise.interop.text_formats.option_tables import Options, option_table
from shardwise.interop.text_formats.shell_script import (
    ShellVariables,
    is_python_script,
    list_commands,
    training_command,
)
from shardwise.model.layer_pattern import BASE_LAYER
from shardwise.values import InputError, describe_unknown, raise_problems
from shardwise.values.input_texts import parse_integer

TABLE = "megatron_deepspeed"
# Options that only scripts of a Megatron have, beside the flag of DeepSpeed that only the forks know.
_MARKS = ("--deepspeed", "--num-attention-heads", "--hidden-size")
_TEMPLATE_STAGE = re.compile(r"s/(?:CONFIG_)?ZERO_STAGE/([0-3])/g?")  # of sed
FLASH_ATTENTION = ("use-flash-attn", "use-flash-attn-v1", "use-flash-attn-v2", "use-flash-attn-triton")
GATED_ACTIVATIONS = {"swiglu": "swiglu", "geglu": "geglu"}  # by --glu-activation (megatron/model/glu_activations.py)
# By --position-embedding-type, as Megatron-LM has them; ALiBi has no weights and no cost of its own.
POSITIONS = {"absolute": "learned_absolute", "rotary": "rope", "alibi": "none"}
DENSE_KIND = "dense"
NO_EXPERTS = {"num_experts": 0, "experts_per_token": 0}


def recognizes(files: LaunchFiles) -> bool:
    """Return whether a script starts a Megatron with DeepSpeed's flag, which Megatron-LM lacks."""
    return any(all(mark in text for mark in _MARKS) for name, text in files.items() if name.endswith(".sh"))


def _read_files(files: LaunchFiles) -> Options:
    """Return the options of a script, and those of the DeepSpeed configuration that it names, if it is given."""
    configs = [name for name in files if name.endswith(".json")]
    source = ", ".join(name for name in files if name not in configs)
    text = "\n".join(text for name, text in files.items() if name not in configs)
    options = parse_flags(training_command(text, source).arguments, option_table(TABLE))
    if options.get("num-experts") == [1]:  # a plain MLP
        del options["num-experts"]
    if "zero-stage" not in options and (stage := _stage_of_template(text, source)) is not None:
        options["zero-stage"] = stage
    if "position-embedding-type" in options:
        options["position-embedding-type"] = _position_kind(str(options["position-embedding-type"]))
    settings = read_deepspeed(configs[0], files) if configs else {}
    _refuse_unpriced(settings)
    table = option_table(TABLE)
    return {**options, **normalize_values({name: settings[name] for name in settings if name in table}, table)}


def _position_kind(name: str) -> str:
    if name not in POSITIONS:
        raise InputError(f"position-embedding-type: {describe_unknown(name, POSITIONS)}")
    return POSITIONS[name]


def _refuse_unpriced(settings: Options) -> None:
    """Raise `InputError` for settings of a DeepSpeed configuration that no plan expresses and whose cost is not known."""
    names = {f"{DEEPSPEED}{name}": harmless for name, harmless in UNPRICED.items()}
    raise_problems([
        f"{name.removeprefix(DEEPSPEED)}: found {settings[name]!r}, whose cost is not known; leave it out"
        for name, harmless in names.items() if name in settings and settings[name] not in harmless
    ])  # fmt: skip


def _stage_of_template(text: str, source: str) -> int | None:
    """Return the stage that a script fills into a template of the configuration, as its examples do; None without one."""
    tokens = chain.from_iterable(list_commands(text, ShellVariables(source), is_python_script))
    matches = (_TEMPLATE_STAGE.fullmatch(token) for token in tokens)
    return next((parse_integer(match[1]) for match in matches if match), None)


def _zero_stage(reader: OptionReader) -> int:
    """Return ZeRO's stage: the configuration's, or else the script's. Raises `InputError` if neither says one."""
    stage = reader.get(STAGE, reader.get("zero-stage"))
    if stage is None:
        raise InputError(
            "zero-stage: missing, and the DeepSpeed configuration is not among the files; give it too, or add --zero-stage"
        )
    if stage not in (0, 1, 2, 3):
        raise InputError(f"zero-stage: found {str(stage)[:40]!r}; a stage from 0 to 3 is required")
    return int(stage)


def _sharding(reader: OptionReader) -> Sharding:
    tp, pp = (reader.get_degree(f"{name}-model-parallel-size") for name in ("tensor", "pipeline"))
    return Sharding(
        zero_stage=_zero_stage(reader), software="deepspeed", tp=tp * pp,
        cp=reader.get_degree("ds-sequence-parallel-size"),
    )  # fmt: skip


def _layout_fields(reader: OptionReader) -> Mapping[str, Any]:
    """Return degrees, ZeRO, experts, recomputation and offload. Ranks of Ulysses share the states that ZeRO shards."""
    sharding = _sharding(reader)
    tp, pp = reader.get_degree("tensor-model-parallel-size"), reader.get_degree("pipeline-model-parallel-size")
    reader.acknowledge("no-pipeline-parallel", "pp-partition-method", "deepspeed-config")
    has_experts = bool(reader.get("num-experts"))
    ep = reader.get_degree("moe-expert-parallel-size") if has_experts else 1
    etp = 1 if tp > 1 and has_experts and not reader.get("enable-expert-tensor-parallelism", False) else None
    sharded = sharding_fields(reader, sharding)
    if not sharded["layout.zero_stage"]:
        sharded = {**sharded, **plain_replica_fields(sharded["layout.dp"], ep, tp, etp)}
    on_host = reader.get(OPTIMIZER_DEVICE, "none") == "cpu" or is_true(reader.get("cpu-optimizer", False))
    return {
        **sharded, "layout.tp": tp, "layout.pp": pp, "layout.ep": ep, "layout.etp": etp,
        "layout.schedule": "1f1b" if pp > 1 else "none",
        "layout.sequence_parallel": bool(reader.get("sequence-parallel", False)) and tp > 1,
        **({"layout.cp_variant": "ulysses"} if sharding.cp > 1 else {}),
        "layout.recompute": _read_recompute(reader), "layout.offload": "optimizer" if on_host else "none",
    }  # fmt: skip


def _read_recompute(reader: OptionReader) -> str:
    """Return what is recomputed: whole layers, as the forks' flag says and as Megatron's of that age do, or attention."""
    layers = reader.get_count("checkpoint-num-layers", reader.get_count("recompute-num-layers", 1)) or 1
    reader.acknowledge("deepspeed-activation-checkpointing", "recompute-method")
    if is_true(reader.get("checkpoint-activations", False)) or reader.get("recompute-granularity") == "full":
        if layers > 1:
            reader.notes.append(f"a checkpoint for each {layers} layers is priced as one for each layer")
        return "full"
    selective = reader.get("recompute-granularity") == "selective" or reader.get("recompute-activations", False)
    return "selective" if selective else "none"


def _job_fields(reader: OptionReader) -> Mapping[str, Any]:
    """Return batch, length and number formats. Without a global batch it is one micro-batch of each replica."""
    micro_batch, seq_len = reader.require("micro-batch-size"), reader.require("seq-length")
    seqs = reader.get_count("global-batch-size", micro_batch * num_replicas(reader, _sharding(reader))) or 1
    tokens = reader.get("train-tokens")
    samples = reader.get("train-samples") or (reader.get("train-iters") or 0) * seqs
    if reader.get("rampup-batch-size"):
        reader.notes.append("the batch grows during the run: this is its last size")
    optimizer = str(reader.get("optimizer", "adam"))
    if optimizer not in ("adam", "sgd"):
        raise InputError(f"optimizer: {describe_unknown(optimizer, ('adam', 'sgd'))}")
    total = tokens or samples * seq_len
    return {
        "layout.micro_batch_seqs": micro_batch, "job.seq_len": seq_len, "job.global_batch_seqs": seqs,
        "job.precision": _read_precision(reader), "job.optimizer": "adamw" if optimizer == "adam" else optimizer,
        **({"job.tokens": float(total)} if total else {}),
    }  # fmt: skip


def _read_precision(reader: OptionReader) -> str:
    """Return the number formats: pipelines in bf16 run BF16_Optimizer, which keeps gradients in fp32 beside those in bf16."""
    bf16, fp16 = (
        is_true(reader.get(f"{DEEPSPEED}{name}.enabled", False)) or is_true(reader.get(name, False))
        for name in ("bf16", "fp16")
    )
    if fp16:
        return "fp16_fp32_update"
    if not bf16:
        return "fp32"
    in_pipeline = not is_true(reader.get("no-pipeline-parallel", False))
    accumulated = reader.get(f"{DEEPSPEED}data_types.grad_accum_dtype", "fp32" if in_pipeline else "bf16")
    return "bf16_fp32_gradients" if accumulated == "fp32" else "bf16"


def _model_fields(reader: OptionReader) -> Mapping[str, Any]:
    """Return the fields of a model that the forks say otherwise than Megatron-LM."""
    heads = reader.require("num-attention-heads")
    layer_norm = str(reader.get("normalization", "layernorm")).lower() == "layernorm"
    reader.acknowledge("apply-layernorm-1p")
    fields = {
        "model.num_kv_heads": reader.get_count("num-key-value-heads", heads), "model.norm_bias": layer_norm,
        "model.norm": "layer" if layer_norm else "rms", "numerics.norm_epsilon": reader.get("layernorm-epsilon", 1e-5),
        "model.bias": () if reader.get("disable-bias-linear", False) else default_biases(False, False),
        "model.embedding_norm": bool(reader.get("embed-layernorm", False)),
        "numerics.rotary.base": float(reader.get("rotary-position-embeddings-theta", 10_000)),
    }  # fmt: skip
    if (padded := reader.get_count("pad-vocab-size-to")) is not None:
        fields["model.vocab_size"] = padded
    return {**fields, **_activation_fields(reader), **_expert_fields(reader)}


def _activation_fields(reader: OptionReader) -> Mapping[str, Any]:
    gated = reader.get("glu-activation")
    if gated is None:
        return {}
    if gated not in GATED_ACTIVATIONS:
        raise InputError(f"glu-activation: {describe_unknown(str(gated), GATED_ACTIVATIONS)}")
    return {"model.mlp": GATED_ACTIVATIONS[gated]}


def _expert_fields(reader: OptionReader) -> Mapping[str, Any]:
    """Return the experts of each layer: every `expert-interval`-th has some, as many as the list says for it."""
    counts, interval, topk = (
        reader.get("num-experts"),
        reader.get_count("expert-interval", 2) or 1,
        reader.get("topk", 1),
    )
    if not counts:
        return {}
    layers = reader.require("num-layers")
    counts = list(counts) if isinstance(counts, (list, tuple)) else [counts]
    if any(not isinstance(count, int) or count < 1 for count in counts) or len(counts) not in (1, layers // interval):
        raise InputError(
            f"num-experts: found {' '.join(map(str, counts))[:80]!r}; one number, or {layers // interval} (one for every "
            f"{interval} of {layers} layers), is required"
        )
    by_layer = _experts_by_layer(counts, layers, interval)
    max_experts = max(counts)
    names = {
        max_experts: BASE_LAYER,
        0: DENSE_KIND,
        **{count: f"experts_{count}" for count in counts if count != max_experts},
    }
    kinds = {names[count]: {"num_experts": count} if count else NO_EXPERTS for count in set(by_layer) - {max_experts}}
    return {
        "model.num_experts": max_experts, "model.experts_per_token": min(topk, max_experts),
        "numerics.normalised_gates": topk > 1,
        **({"model.layer_kinds": kinds, "model.layer_pattern": tuple(names[count] for count in by_layer)} if kinds else {}),
    }  # fmt: skip


def _experts_by_layer(counts: Sequence[int], layers: int, interval: int) -> list[int]:
    """Return the number of experts of each layer, 0 where it has none."""
    sparse = islice(cycle(counts), layers // interval)
    return [next(sparse, 0) if layer % interval == 0 else 0 for layer in range(1, layers + 1)]


def _choose_stack(options: Options) -> str:
    """Return the stack that predicts a launch: attention writes its scores to memory unless a flash kernel is asked for."""
    return "deepspeed" if any(options.get(name) for name in FLASH_ATTENTION) else "megatron-deepspeed"


def _read_attention(reader: OptionReader) -> Mapping[str, Any]:
    reader.acknowledge(*FLASH_ATTENTION)
    return {}


TARGET = Target(
    name="megatron-deepspeed", title="Megatron-DeepSpeed", version="4efb479d",
    source="https://github.com/deepspeedai/Megatron-DeepSpeed, megatron/arguments.py", stack="megatron-deepspeed",
    options_file=TABLE, model_mappings=(*MODEL_MAPPINGS, read_only(_model_fields)),
    mappings=(read_only(_layout_fields), read_only(_job_fields), read_only(_read_attention)), requirements=(),
    write=refuse_writing, read=_read_files, command=lambda launch: "", is_written=False, recognizes=recognizes,
    choose_stack=_choose_stack,
)  # fmt: skip
