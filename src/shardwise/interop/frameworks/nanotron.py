"""nanotron: a YAML of its dataclasses, and a script that starts run_train.py with it.

Source of names, types and defaults: nanotron 0.4, config/config.py, config/models_config.py and parallelism_config.py;
requirements: models/llama.py, models/starcoder2.py, helpers.py, parallel/context.py and parallel/pipeline_parallel/engine.py.

A model is one of LlamaConfig or of Starcoder2Config. Of configurations for the main branch (2411b022, 2026-04-07) its Qwen2Config
is read too, and the base of LlamaConfig's rotary angles, which 0.4 does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from shardwise.interop.launches.launch import Launch
from shardwise.interop.launches.launch_scripts import is_true, torchrun_command
from shardwise.interop.launches.target import (
    LaunchFiles,
    OptionMapping,
    OptionReader,
    Requirement,
    Target,
    add_options,
    map_value,
)
from shardwise.interop.text_formats.config_trees import find_yaml, flatten, format_yaml, parse_yaml
from shardwise.interop.text_formats.option_tables import Options, option_table, require_types
from shardwise.layout.layers_per_stage import layers_by_products
from shardwise.model import Architecture, get_optimizer
from shardwise.values import InputError

MODEL_CONFIG = "model.model_config"
LLAMA, STARCODER = f"{MODEL_CONFIG}.is_llama_config", f"{MODEL_CONFIG}.is_starcoder2_config"
GATED_ACTIVATIONS = {"swiglu": "silu", "geglu": "gelu_pytorch_tanh"}  # LlamaConfig.hidden_act: the MLP is always gated
PLAIN_ACTIVATIONS = {"gelu": "gelu_pytorch_tanh", "relu": "relu"}  # Starcoder2Config.activation_function
MLP_OF_ACTIVATION = {"silu": "swiglu", "swish": "swiglu", "gelu_pytorch_tanh": "geglu", "gelu": "geglu"}
STARCODER_BIASES = ("qkv", "attention_out", "mlp")
DROPOUTS = ("attn_pdrop", "embd_pdrop", "resid_pdrop")
QWEN = f"{MODEL_CONFIG}.is_qwen2_config"
LLAMA_THETA = 10_000.0  # RotaryEmbedding of models/llama.py, which no option of 0.4 sets


def is_starcoder2(model: Architecture) -> bool:
    """Return whether a model is one of Starcoder2Config rather than of LlamaConfig: its norms have a bias."""
    return model.norm_bias


def _model_options(launch: Launch) -> Options:
    model = launch.model
    sizes = {
        "hidden_size": model.d_model, "num_hidden_layers": model.num_layers, "num_attention_heads": model.num_heads,
        "intermediate_size": model.d_ff, "vocab_size": model.vocab_size, "max_position_embeddings": launch.job.seq_len,
    }  # fmt: skip
    family_options = _starcoder_options(model) if is_starcoder2(model) else _llama_options(model)
    return {f"{MODEL_CONFIG}.{name}": value for name, value in {**sizes, **family_options}.items()}


def _llama_options(model: Architecture) -> Options:
    activation = {"hidden_act": GATED_ACTIVATIONS[model.mlp]} if model.mlp in GATED_ACTIVATIONS else {}
    return {
        "is_llama_config": True, "num_key_value_heads": model.num_kv_heads, **activation,
        "rms_norm_eps": model.numerics.norm_epsilon, "tie_word_embeddings": model.tied_embeddings,
    }  # fmt: skip


def _starcoder_options(model: Architecture) -> Options:
    activation = {"activation_function": PLAIN_ACTIVATIONS[model.mlp]} if model.mlp in PLAIN_ACTIVATIONS else {}
    grouped = {"grouped_query": True, "num_kv_heads": model.num_kv_heads}
    heads = {"multi_query": True} if model.num_kv_heads == 1 else grouped
    windows: dict[str, object] = {}
    if model.sliding_window:
        every = model.global_every
        windows = {"sliding_window_size": model.sliding_window,
                   "global_attn_layers": [i for i in range(model.num_layers) if every and (i + 1) % every == 0]}  # fmt: skip
    return {
        "is_starcoder2_config": True, **heads, **activation, "layer_norm_epsilon": model.numerics.norm_epsilon, **windows,
        "use_rotary_embeddings": model.structure.has_rotary, "rope_theta": round(model.numerics.rotary.base),
        **dict.fromkeys(DROPOUTS, 0.0),
    }  # fmt: skip


def _read_model(reader: OptionReader) -> Mapping[str, Any]:
    families = [name for name in READERS if is_true(reader.get(name, False))]
    if len(families) != 1:
        listed = [name.rpartition(".")[2] for name in READERS]
        raise InputError(
            f"{MODEL_CONFIG}: found {'several' if families else 'none'} of {', '.join(listed)}; one of them, true, is required"
        )

    def get_option(name: str, default: Any = None) -> Any:
        return reader.get(f"{MODEL_CONFIG}.{name}", default)

    get_option("max_position_embeddings")  # rows of the rotary table, which grows as needed
    return READERS[families[0]](get_option)


def _read_llama(get_option: Any) -> Mapping[str, Any]:
    """Return sizes with the defaults of LlamaConfig."""
    activation, heads = get_option("hidden_act", "silu"), get_option("num_attention_heads", 32)
    if activation not in MLP_OF_ACTIVATION:
        raise InputError(
            f"{MODEL_CONFIG}.hidden_act: found {activation!r}; one of {', '.join(MLP_OF_ACTIVATION)} is what can be read"
        )
    return {
        **_read_sizes(get_option, hidden=4096, layers=32, heads=heads, vocab=32000),
        "model.d_ff": get_option("intermediate_size", 11008),
        "model.num_kv_heads": get_option("num_key_value_heads", heads), "model.mlp": MLP_OF_ACTIVATION[activation],
        "model.tied_embeddings": bool(get_option("tie_word_embeddings", False)),
        "numerics.norm_epsilon": get_option("rms_norm_eps", 1e-6),
        "numerics.rotary.base": float(get_option("rope_theta", LLAMA_THETA)),
    }  # fmt: skip


def _read_qwen(get_option: Any) -> Mapping[str, Any]:
    """Return sizes of Qwen2Config: Llama's defaults, biases of queries, keys and values, and layers without positions."""
    if get_option("moe_config") is not None:
        raise InputError(f"{MODEL_CONFIG}.moe_config: experts of nanotron cannot be read; a dense model is required")
    every = get_option("no_rope_layer") or 0
    if every and every < 2:
        raise InputError(f"{MODEL_CONFIG}.no_rope_layer: found {every}; at least 2, or null, is what can be read")
    kinds = {
        "model.layer_kinds": {"nope": {"positions": "none"}},
        "model.layer_pattern": (f"block*{every - 1}", "nope"),
    }
    window = get_option("sliding_window_size")
    return {
        **_read_llama(get_option), "model.bias": ("qkv",) if get_option("attention_bias", False) else (),
        **(kinds if every else {}), **({"model.sliding_window": window} if window else {}),
    }  # fmt: skip


def _read_starcoder(get_option: Any) -> Mapping[str, Any]:
    """Return sizes with the defaults of Starcoder2Config, which ties head and embedding."""
    plain = {theirs: ours for ours, theirs in PLAIN_ACTIVATIONS.items()} | {"gelu": "gelu"}
    activation, hidden = get_option("activation_function", "gelu_pytorch_tanh"), get_option("hidden_size", 2048)
    if activation not in plain:
        raise InputError(
            f"{MODEL_CONFIG}.activation_function: found {activation!r}; one of {', '.join(plain)} is what can be read"
        )
    grouped = get_option("grouped_query", False)
    if grouped and get_option("multi_query", False):
        raise InputError(f"{MODEL_CONFIG}: multi_query and grouped_query are both true; one of them is required")
    for name in DROPOUTS:
        get_option(name)
    layers = get_option("num_hidden_layers", 24)
    return {
        **_read_sizes(get_option, hidden=hidden, layers=layers, heads=get_option("num_attention_heads", 16), vocab=49280),
        "model.d_ff": get_option("intermediate_size") or 4 * hidden,
        "model.num_kv_heads": get_option("num_kv_heads") if grouped else 1,
        "model.mlp": plain[activation], "model.norm": "layer", "model.norm_bias": True, "model.bias": STARCODER_BIASES,
        "model.tied_embeddings": True, "numerics.norm_epsilon": get_option("layer_norm_epsilon", 1e-5),
        "model.positions": "rotary" if get_option("use_rotary_embeddings", True) else "none",
        "numerics.rotary.base": float(get_option("rope_theta", 10_000)),
        **_read_windows(get_option("sliding_window_size"), get_option("global_attn_layers") or [], layers),
    }  # fmt: skip


def _read_sizes(get_option: Any, *, hidden: int, layers: int, heads: int, vocab: int) -> Mapping[str, Any]:
    width = get_option("hidden_size", hidden)
    if width % heads:
        raise InputError(
            f"{MODEL_CONFIG}.hidden_size: found {width}; a multiple of num_attention_heads = {heads} is required"
        )
    return {
        "model.d_model": width, "model.num_layers": get_option("num_hidden_layers", layers), "model.num_heads": heads,
        "model.head_dim": width // heads, "model.vocab_size": get_option("vocab_size", vocab),
    }  # fmt: skip


def _read_windows(window: int | None, global_layers: Sequence[int], layers: int) -> Mapping[str, Any]:
    """Return a sliding window on all layers, or on all but every n-th."""
    if window is None:
        return {}
    every = global_layers[0] + 1 if global_layers else 0
    if list(global_layers) != [i for i in range(layers) if every and (i + 1) % every == 0]:
        raise InputError(
            f"{MODEL_CONFIG}.global_attn_layers: found {list(global_layers)[:20]}; "
            "every so many-th layer, or none, is what can be read"
        )
    return {"model.sliding_window": window, "model.global_every": every}


READERS: Mapping[str, Callable[[Any], Mapping[str, Any]]] = {
    LLAMA: _read_llama, STARCODER: _read_starcoder, QWEN: _read_qwen,
}  # fmt: skip
MODEL_MAPPINGS: tuple[OptionMapping, ...] = (
    OptionMapping(_model_options, _read_model),
    add_options(
        "model.make_vocab_size_divisible_by", to_options=lambda launch: {"model.make_vocab_size_divisible_by": 1}
    ),
)


BATCH_OPTIONS = (
    "tokens.micro_batch_size", "tokens.batch_accumulation_per_replica", "parallelism.dp", "tokens.sequence_length",
)  # fmt: skip
# bf16 weights with fp32 master copies and fp32 gradient accumulation (optim/gradient_accumulator.py), or all in fp32.
# bf16 weights alone would have bf16 moments, as no recipe here has.
PRECISIONS: Mapping[str, Options] = {
    "bf16_fp32_gradients": {"model.dtype": "bfloat16", "optimizer.accumulate_grad_in_fp32": True},
    "fp32": {"model.dtype": "float32", "optimizer.accumulate_grad_in_fp32": False},
}
DEFAULT_STEPS = 15  # without a length in the plan: examples/config_tiny_llama.yaml of the repository


def _replica_options(launch: Launch) -> Options:
    return {"parallelism.dp": launch.layout.num_replicas, "optimizer.zero_stage": launch.layout.zero_stage}


def _read_replicas(reader: OptionReader) -> Mapping[str, Any]:
    """Return replicas and ZeRO: stages above 0 are ZeRO-1 (helpers.py, init_optimizer_and_grad_accumulator: zero_stage > 0)."""
    replicas, stage = reader.get("parallelism.dp"), reader.get("optimizer.zero_stage", 0)
    if stage not in (0, 1, 2, 3):
        raise InputError(f"optimizer.zero_stage: found {stage}; 0 or 1 is required")
    sharded = stage > 0 and replicas > 1
    dp, fsdp = (1, replicas) if sharded else (replicas, 1)
    return {"layout.dp": dp, "layout.fsdp": fsdp, "layout.zero_stage": int(sharded)}


def _tp_options(launch: Launch) -> Options:
    layout = launch.layout
    mode = "REDUCE_SCATTER" if layout.sequence_parallel else "ALL_REDUCE"
    return {"parallelism.tp_mode": mode, "parallelism.tp_linear_async_communication": layout.async_tp}


def _read_tp_communication(reader: OptionReader) -> Mapping[str, Any]:
    """Return sequence parallelism and async TP; both are off without tensor parallelism, and async TP needs REDUCE_SCATTER."""
    parallel = reader.get("parallelism.tp_mode", "ALL_REDUCE") == "REDUCE_SCATTER" and reader.get("parallelism.tp") > 1
    in_pieces = bool(reader.get("parallelism.tp_linear_async_communication", False))
    return {"layout.sequence_parallel": parallel, "layout.async_tp": parallel and in_pieces}


def _read_stages(reader: OptionReader) -> Mapping[str, Any]:
    pp, schedule = reader.get("parallelism.pp"), reader.get("parallelism.pp_engine", "afab")
    if pp == 1:
        return {"layout.schedule": "none"}
    fields = {name: value for mapping in MODEL_MAPPINGS for name, value in mapping.from_options(reader).items()}
    sizes = {name.removeprefix("model."): value for name, value in fields.items() if name.startswith("model.")}
    stages = layers_by_products(Architecture(**{"name": "model", **sizes}), pp)
    return {"layout.schedule": schedule, "layout.stages": stages}


def _precision_options(launch: Launch) -> Options:
    name = launch.job.precision
    return PRECISIONS.get(name, PRECISIONS["bf16_fp32_gradients"])


def _read_precision(reader: OptionReader) -> Mapping[str, Any]:
    dtype = reader.get("model.dtype", "bfloat16")
    in_fp32 = reader.get("optimizer.accumulate_grad_in_fp32", False)
    settings = {"model.dtype": dtype, "optimizer.accumulate_grad_in_fp32": in_fp32}
    precision = next((name for name, options in PRECISIONS.items() if options == settings), None)
    if precision is None:
        raise InputError(
            f"model.dtype: found {dtype} with accumulate_grad_in_fp32 = {str(in_fp32).lower()}, which no precision here is; "
            "bfloat16 with true, or float32 with false, is what can be read"
        )
    return {"job.precision": precision}


def _batch_options(launch: Launch) -> Options:
    return {
        "tokens.sequence_length": launch.job.seq_len, "tokens.micro_batch_size": launch.layout.micro_batch_seqs,
        "tokens.batch_accumulation_per_replica": launch.num_micro_batches,
        "tokens.train_steps": launch.num_steps or DEFAULT_STEPS,
    }  # fmt: skip


def _read_batch(reader: OptionReader) -> Mapping[str, Any]:
    micro_batch, accumulation, replicas, length = (reader.get(name) for name in BATCH_OPTIONS)
    seqs, steps = micro_batch * accumulation * replicas, reader.get("tokens.train_steps")
    return {
        "job.seq_len": length, "job.global_batch_seqs": seqs, "layout.micro_batch_seqs": micro_batch,
        **({"job.tokens": float(steps * seqs * length)} if steps else {}),
    }  # fmt: skip


def _read_experts(reader: OptionReader) -> Mapping[str, Any]:
    degree = reader.get("parallelism.expert_parallel_size", 1)
    if degree != 1:
        raise InputError(
            f"parallelism.expert_parallel_size: found {degree}; 1 is what can be read: no model of nanotron 0.4 has experts"
        )
    return {}


def _read_main_branch(reader: OptionReader) -> Mapping[str, Any]:
    """Return what configurations for the main branch have beside those of 0.4: recomputed layers. Raises `InputError` for
    context parallelism and for another optimizer than AdamW."""
    context = reader.get("parallelism.context_parallel_size", 1)
    if context != 1:
        raise InputError(f"parallelism.context_parallel_size: found {context}; 1 is what can be read")
    optimizer = str(reader.get("optimizer.optimizer_factory.name", "adamW"))
    if optimizer.lower() != "adamw":
        raise InputError(f"optimizer.optimizer_factory.name: found {optimizer[:40]!r}; adamW is what can be read")
    for_layers, for_experts = (
        is_true(reader.get(f"parallelism.{name}", False)) for name in ("recompute_layer", "moe_layer_recompute")
    )
    return {"layout.recompute": "full"} if for_layers or for_experts else {}


LAYOUT_MAPPINGS: tuple[OptionMapping, ...] = (
    OptionMapping(_replica_options, _read_replicas),
    map_value("layout.tp", "parallelism.tp"),
    map_value("layout.pp", "parallelism.pp"),
    OptionMapping(
        lambda launch: {"parallelism.pp_engine": launch.layout.schedule if launch.layout.pp > 1 else "1f1b"},
        _read_stages,
    ),
    OptionMapping(_tp_options, _read_tp_communication),
    OptionMapping(lambda launch: {"parallelism.expert_parallel_size": 1}, _read_experts),
    OptionMapping(_batch_options, _read_batch),
    OptionMapping(_precision_options, _read_precision),
    OptionMapping(lambda launch: {}, _read_main_branch),
    # Logits are in fp32, and their softmax is kept (models/llama.py).
    OptionMapping(lambda launch: {}, lambda reader: {"job.loss": "unfused"}),
)

CONFIG, SCRIPT = "config.yaml", "launch.sh"
# Options that a configuration must have and no plan has. Source of the values: examples/config_tiny_llama.yaml of the repository.
USER_ARGUMENTS: Options = {
    "general.project": "shardwise", "general.run": "%date_%jobid", "general.seed": 42,
    "model.init_method.std": 0.025, "model.ddp_bucket_cap_mb": 25,
    "optimizer.clip_grad": 1.0, "optimizer.torch_adam_is_fused": True,
    "optimizer.learning_rate_scheduler.learning_rate": 3e-4, "optimizer.learning_rate_scheduler.lr_warmup_steps": 2,
    "optimizer.learning_rate_scheduler.lr_warmup_style": "linear", "optimizer.learning_rate_scheduler.lr_decay_style": "cosine",
    "optimizer.learning_rate_scheduler.min_decay_lr": 1e-5,
    "checkpoints.checkpoints_path": "checkpoints", "checkpoints.checkpoint_interval": 1000,
    "logging.log_level": "info", "logging.log_level_replica": "info",
    "tokenizer": {}, "data.dataset": None, "data.num_loading_workers": 1, "data.seed": 42,
}  # fmt: skip


def _user_options(launch: Launch) -> Options:
    adam = get_optimizer("adamw").fields
    return {
        **USER_ARGUMENTS, "optimizer.adam_beta1": adam["beta1"].default, "optimizer.adam_beta2": adam["beta2"].default,
        "optimizer.adam_eps": adam["epsilon"].default, "optimizer.weight_decay": adam["weight_decay"].default,
    }  # fmt: skip


def _write_files(options: Options, launch: Launch) -> LaunchFiles:
    script = (
        "#!/bin/bash\n# Starts on each node; NANOTRON is a checkout of nanotron.\nset -euo pipefail\n"
        "export CUDA_DEVICE_MAX_CONNECTIONS=1\n"
        f"{torchrun_command(launch.machines, chr(34) + '${NANOTRON:?}/run_train.py' + chr(34))} "
        f'--config-file "$(dirname "$0")/{CONFIG}"\n'
    )
    return {CONFIG: format_yaml(options), SCRIPT: script}


def _read_files(files: LaunchFiles) -> Options:
    name, text = find_yaml(files, f"one, nanotron's {CONFIG},")
    table = option_table("nanotron")
    options = flatten(parse_yaml(text, name), table)
    options = {option: value for option, value in options.items() if value is not None or option not in table}
    mode = options.get("parallelism.tp_mode")
    if isinstance(mode, str):
        options["parallelism.tp_mode"] = mode.upper()  # as nanotron reads it
    require_types(options, table)
    _require_counts(options)
    return options


def _require_counts(options: Options) -> None:
    """Raise `InputError` for a launch without its batch and degrees, and for counts below 1."""
    problems = [
        f"{name}: found {options.get(name, 'nothing')}; a whole number of at least 1 is required"
        for name in (*BATCH_OPTIONS, "parallelism.tp", "parallelism.pp")
        if options.get(name, 0) < 1
    ]
    if problems:
        raise InputError(*problems)


def _notes(launch: Launch) -> Iterator[str]:
    yield (
        f"data, tokenizer, learning rate and checkpoints are yours: set data.dataset, tokenizer, optimizer and checkpoints in "
        f"{CONFIG}; without a dataset run_train.py trains on random tokens"
    )
    if not launch.job.tokens:
        yield f"tokens.train_steps is {DEFAULT_STEPS}: the plan says no length of the run"


TARGET = Target(
    name="nanotron", title="nanotron", version="0.4",
    source="https://github.com/huggingface/nanotron, src/nanotron/config", stack="nanotron", options_file="nanotron",
    mappings=(
        *MODEL_MAPPINGS,
        *LAYOUT_MAPPINGS,
        add_options(
            *USER_ARGUMENTS,
            *(f"optimizer.{name}" for name in ("adam_beta1", "adam_beta2", "adam_eps", "weight_decay")), to_options=_user_options
        ),
    ),
    requirements=(
        Requirement(
            lambda launch: launch.model.num_kv_heads % launch.layout.tp == 0
            or (is_starcoder2(launch.model) and launch.model.num_kv_heads == 1),
            lambda launch: f"tp = {launch.layout.tp} does not divide the {launch.model.num_kv_heads} key-value heads, and "
            "nanotron does not replicate them",
        ),
    ),
    write=_write_files, read=_read_files, command=lambda launch: f"bash {SCRIPT}", notes=_notes,
)  # fmt: skip
