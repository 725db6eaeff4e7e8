"""TensorRT-LLM: `trtllm-serve`, and the YAML of its arguments (--extra_llm_api_options, --config), which overrides the line.

Source of names and types: TensorRT-LLM's references of its command line and of LlmArgs (tests/unittest/api_stability);
meaning: tensorrt_llm/llmapi/llm_args.py and tensorrt_llm/mapping.py (with attention data parallelism every device holds a whole
attention; experts are split over all devices of tensor parallelism).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shardwise.interop.serving.checkpoints import identify_checkpoint
from shardwise.interop.serving.engine import Engine, EngineOptions
from shardwise.interop.serving.engine_flags import FlagSyntax
from shardwise.interop.serving.engine_rules import (
    flag_other_drafter,
    model_rules,
    read_cache_format,
    read_dtype,
    read_formats,
)
from shardwise.interop.serving.serving_launch import ServingLaunch
from shardwise.interop.text_formats.option_tables import Options
from shardwise.serve import BatchLimits, ServingLayout

CACHE_FORMATS: Mapping[str, str] = {"auto": "bf16", "bfloat16": "bf16", "float16": "bf16", "bf16": "bf16", "fp8": "fp8"}
MEMORY_FRACTION = "kv_cache_config.free_gpu_memory_fraction"
CACHE_DTYPE = "kv_cache_config.dtype"
LOAD_BALANCER = "moe_config.load_balancer"  # slots of experts, redundant ones among them; source: MoeLoadBalancerConfig


def _to_options(launch: ServingLaunch) -> Options:
    layout, limits = launch.layout, launch.batch_limits
    width = layout.tp * layout.attention_dp
    degrees = {"tensor_parallel_size": width, "pipeline_parallel_size": layout.pp}
    options: dict[str, Any] = {name: degree for name, degree in degrees.items() if degree > 1}
    if launch.has_experts and layout.ep > 1:
        options |= {"moe_expert_parallel_size": layout.ep, "moe_tensor_parallel_size": layout.expert_tp_degree}
    if layout.redundant_experts and launch.architecture is not None:
        slots = launch.architecture.num_experts + layout.redundant_experts
        options[LOAD_BALANCER] = {"num_slots": slots, "layer_updates_per_iter": 0}  # placed once, as loaded
    if layout.attention_dp > 1:
        options["enable_attention_dp"] = True
    numbers = {
        "max_batch_size": limits.max_num_seqs, "max_num_tokens": limits.max_batched_tokens,
        "max_seq_len": launch.max_model_len, MEMORY_FRACTION: limits.memory_fraction,
        "batch_wait_timeout_iters": limits.admission_passes if limits.admission_passes > 1 else None,
    }  # fmt: skip
    options |= {name: value for name, value in numbers.items() if value is not None}
    if limits.chunked_prefill:
        options["enable_chunked_prefill"] = True
    if launch.formats.cache != "bf16":
        options[CACHE_DTYPE] = launch.formats.cache
    if limits.mtp_tokens:
        options |= {
            "speculative_config.decoding_type": "MTP", "speculative_config.num_nextn_predict_layers": limits.mtp_tokens
        }  # fmt: skip
    return options


def _from_options(reader: EngineOptions, checkpoint_name: str) -> ServingLaunch:
    checkpoint = identify_checkpoint(checkpoint_name)
    read_dtype(reader)
    dtype_option = CACHE_DTYPE if CACHE_DTYPE in reader.options else "kv_cache_dtype"
    cache = read_cache_format(reader, dtype_option, CACHE_FORMATS)
    fraction_names = (MEMORY_FRACTION, "kv_cache_free_gpu_memory_fraction", "free_gpu_memory_fraction")
    fractions = [reader.get_fraction(name) for name in fraction_names]
    return ServingLaunch(
        engine="trtllm", checkpoint=checkpoint_name, architecture=reader.architecture, layout=_read_layout(reader),
        formats=read_formats(reader, checkpoint, cache, {}),
        batch_limits=BatchLimits(
            max_num_seqs=reader.get_count("max_batch_size"), max_batched_tokens=reader.get_count("max_num_tokens"),
            memory_fraction=next((fraction for fraction in fractions if fraction is not None), None),
            chunked_prefill=reader.get("enable_chunked_prefill", False) is True, mtp_tokens=_read_drafted_tokens(reader),
            admission_passes=reader.get_degree("batch_wait_timeout_iters") if reader.get("batch_wait_timeout_iters") else 1,
        ),
        max_model_len=reader.get_count("max_seq_len"),
    )  # fmt: skip


def _read_layout(reader: EngineOptions) -> ServingLayout:
    """Return the layout. Experts are split by `ep`, and what it leaves by their matrices; all by their matrices without one."""
    width, pp = reader.get_degree("tensor_parallel_size"), reader.get_degree("pipeline_parallel_size")
    ep, expert_tp = reader.get_count("moe_expert_parallel_size"), reader.get_count("moe_tensor_parallel_size")
    if reader.get_degree("context_parallel_size") > 1:
        reader.flag_unpriced("context_parallel_size", "memory")
    splits_requests = reader.get("enable_attention_dp", False) is True and width > 1
    degree = ep or (width // expert_tp if expert_tp and width % expert_tp == 0 else 1)
    if width % degree or (ep and expert_tp and ep * expert_tp != width):
        reader.problems.append(
            f"moe_expert_parallel_size: found {ep} with moe_tensor_parallel_size {expert_tp}; their product is required to be "
            f"tensor_parallel_size = {width}"
        )
        return ServingLayout()
    ep_degree = degree if reader.has_experts else 1
    return ServingLayout(
        tp=1 if splits_requests else width, attention_dp=width if splits_requests else 1, pp=pp, ep=ep_degree,
        redundant_experts=_read_redundant_experts(reader) if ep_degree > 1 else 0,
    )  # fmt: skip


def _read_redundant_experts(reader: EngineOptions) -> int:
    """Return the slots of the balancer beyond the model's experts; a file that it names, and its updates, are not priced."""
    config = reader.get(LOAD_BALANCER)
    if config is None:
        return 0
    slots = config.get("num_slots") if isinstance(config, dict) else None
    if reader.architecture is None or isinstance(slots, bool) or not isinstance(slots, int):
        reader.flag_unpriced(LOAD_BALANCER, "memory")
        return 0
    if isinstance(config, dict) and config.get("layer_updates_per_iter"):
        reader.flag_unpriced(LOAD_BALANCER, "time")
    return max(slots - reader.architecture.num_experts, 0)


def _read_drafted_tokens(reader: EngineOptions) -> int:
    """Return the tokens that the model's own modules draft in a pass; another drafter is recorded as not priced."""
    kind = reader.get("speculative_config.decoding_type")
    names = ("num_nextn_predict_layers", "max_draft_len", "speculative_model_dir", "speculative_model")
    layers, length, folder, model = (reader.get(f"speculative_config.{name}") for name in names)
    config = reader.get("speculative_config")
    if kind is None and not config:
        return 0
    tokens = layers if layers is not None else length
    if str(kind).upper() == "MTP" and folder is None and model is None and isinstance(tokens, int) and tokens > 0:
        return tokens
    return flag_other_drafter(reader, "speculative_config.decoding_type")


def _layout_rules(launch: ServingLaunch) -> Iterator[str]:
    """Yield what attention data parallelism requires. Source: tensorrt_llm/mapping.py."""
    layout = launch.layout
    if layout.attention_dp > 1 and layout.tp > 1:
        width = layout.tp * layout.attention_dp
        yield (
            f"layout: attention_dp is {layout.attention_dp} with tp={layout.tp}; TensorRT-LLM splits requests over all devices "
            f"or none: tp=1 attention_dp={width} or tp={width} is required"
        )
    if layout.cp > 1:
        yield f"layout: cp is {layout.cp}; TensorRT-LLM's context parallelism is not one of prefill: cp=1 is required"


def _format_rules(launch: ServingLaunch) -> Iterator[str]:
    """Yield formats that the PyTorch backend does not load. Source: tensorrt_llm/quantization/mode.py, QuantAlgo."""
    named = {launch.formats.weights, launch.formats.attention_format.name, launch.formats.expert_format.name}
    if "int8" in named:
        yield "formats: weights are int8; fp8 is required: int8 with activations in int8 is not loaded by the PyTorch backend"


def _node_prefix(num_nodes: int, devices: int) -> str:
    """Return what starts a rank on each device of several nodes: SLURM with MPI, as TensorRT-LLM's documentation has it."""
    return f"srun --mpi=pmix -N {num_nodes} --ntasks-per-node={devices} trtllm-llmapi-launch "


ENGINE = Engine(
    name="trtllm", title="TensorRT-LLM", version="1.3",
    source="https://github.com/NVIDIA/TensorRT-LLM, tensorrt_llm/llmapi/llm_args.py", options_file="trtllm",
    program=("trtllm-serve",), image="nvcr.io/nvidia/tensorrt-llm/release:1.3.0", port=8000, to_options=_to_options,
    from_options=_from_options, rules=(model_rules, _layout_rules, _format_rules), syntax=FlagSyntax(abbreviates=False),
    config_flag="--extra_llm_api_options", starts_copies=lambda launch: False, node_options=lambda num_nodes: (),
    node_script=lambda num_nodes, devices: "", node_prefix=_node_prefix, group_words=lambda num_nodes: ((), ()),
    has_manifest=lambda num_nodes: num_nodes == 1, vendors=("NVIDIA",), server_options={"host": "0.0.0.0", "port": 8000},
    added=frozenset(["host", "port", "extra_llm_api_options", "gpus_per_node"]),
    field_options={
        "layout.tp": ("tensor_parallel_size",), "layout.attention_dp": ("enable_attention_dp",),
        "layout.pp": ("pipeline_parallel_size",), "layout.cp": ("context_parallel_size",),
        "layout.ep": ("moe_expert_parallel_size", "moe_tensor_parallel_size"), "layout.replicas": (),
        "layout.redundant_experts": (LOAD_BALANCER,),
        "formats": ("dtype",), "formats.cache": (CACHE_DTYPE, "kv_cache_dtype"),
        "batch_limits.max_num_seqs": ("max_batch_size",), "batch_limits.max_batched_tokens": ("max_num_tokens",),
        "batch_limits.memory_fraction": (
            MEMORY_FRACTION, "kv_cache_free_gpu_memory_fraction", "free_gpu_memory_fraction",
        ),
        "batch_limits.chunked_prefill": ("enable_chunked_prefill",),
        "batch_limits.mtp_tokens": (
            "speculative_config.decoding_type", "speculative_config.num_nextn_predict_layers", "speculative_config.max_draft_len",
        ),
        "max_model_len": ("max_seq_len",), "batch_limits.admission_passes": ("batch_wait_timeout_iters",),
    },
    file_counts_first=True, environment="TRTLLM_", model_flags=("model",),
)  # fmt: skip
