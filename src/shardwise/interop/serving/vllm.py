"""vLLM: `vllm serve` and `python -m vllm.entrypoints.openai.api_server`.

Source of names and types: vLLM 0.32.0, EngineArgs (vllm/engine/arg_utils.py); meaning: vllm/config/parallel.py (experts are split
over all devices of tensor, data and prefill-context parallelism, or not at all; a model without experts is copied by data
parallelism), vllm/config/scheduler.py (verify_max_model_len), vllm/config/speculative.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardwise.interop.serving.checkpoints import identify_checkpoint
from shardwise.interop.serving.engine import Engine, EngineOptions, InstanceAddress, PoolSyntax
from shardwise.interop.serving.engine_flags import COUNT_SUFFIXES, FlagSyntax
from shardwise.interop.serving.engine_rules import (
    flag_other_drafter,
    model_rules,
    quantization_option,
    read_cache_format,
    read_dispatch,
    read_dtype,
    read_formats,
)
from shardwise.interop.serving.serving_launch import ServingLaunch
from shardwise.interop.text_formats.option_tables import Options
from shardwise.serve import BatchLimits, ServingLayout

# Weights that a method stands for. Source: vLLM 0.32.0, model_executor/layers/quantization and vllm/config/quantization.py.
METHOD_FORMATS: Mapping[str, str] = {
    "fp8": "fp8", "fp8_per_tensor": "fp8", "fp8_per_channel": "fp8", "fp8_per_block": "fp8_block", "fbgemm_fp8": "fp8",
    "modelopt": "fp8", "modelopt_fp4": "nvfp4", "awq": "int4", "auto_awq": "int4", "awq_marlin": "int4", "gptq": "int4",
    "auto_gptq": "int4", "gptq_marlin": "int4", "moe_wna16": "int4",
}  # fmt: skip
ONLINE_METHODS: Mapping[str, str] = {"fp8": "fp8", "fp8_block": "fp8_per_block"}
CACHE_FORMATS: Mapping[str, str] = {
    "auto": "bf16", "bfloat16": "bf16", "float16": "bf16", "fp8": "fp8", "fp8_e4m3": "fp8", "fp8_e5m2": "fp8", "fp8_inc": "fp8",
}  # fmt: skip

# Backends that gather the tokens of all copies of attention, the default first; the others exchange them. Source: vLLM 0.32.0,
# ParallelConfig.all2all_backend and distributed/device_communicators/all2all.py.
GATHERING_BACKENDS = ("allgather_reducescatter", "naive")
ALL_TO_ALL_BACKEND = (
    "deepep_low_latency"  # its decode passes are captured as graphs; those of deepep_high_throughput are not
)
REDUNDANT = "num_redundant_experts"  # of EPLBConfig


def _to_options(launch: ServingLaunch) -> Options:
    layout, limits = launch.layout, launch.batch_limits
    replicas = layout.attention_dp if launch.has_experts else layout.replicas
    degrees = {
        "tensor-parallel-size": layout.tp, "pipeline-parallel-size": layout.pp,
        "prefill-context-parallel-size": layout.cp, "data-parallel-size": replicas,
    }  # fmt: skip
    options: dict[str, Any] = {name: degree for name, degree in degrees.items() if degree > 1}
    if launch.has_experts and layout.ep > 1:
        options["enable-expert-parallel"] = True
    if layout.dispatch == "all_to_all":
        options["all2all-backend"] = ALL_TO_ALL_BACKEND
    if layout.redundant_experts:
        options |= {"enable-eplb": True, "eplb-config": {REDUNDANT: layout.redundant_experts}}
    options |= quantization_option(launch, ONLINE_METHODS)
    if launch.formats.cache != "bf16":
        options["kv-cache-dtype"] = launch.formats.cache
    numbers = {
        "max-model-len": launch.max_model_len, "max-num-seqs": limits.max_num_seqs,
        "max-num-batched-tokens": limits.max_batched_tokens, "gpu-memory-utilization": limits.memory_fraction,
    }  # fmt: skip
    options |= {name: value for name, value in numbers.items() if value is not None}
    if not limits.chunked_prefill:
        options["enable-chunked-prefill"] = False
    if limits.mtp_tokens:
        options["speculative-config"] = {"method": "mtp", "num_speculative_tokens": limits.mtp_tokens}
    if launch.pool is not None:
        role = next(role for role, pool in POOLS.items() if pool == launch.pool)
        options[TRANSFER] = {"kv_connector": "NixlConnector", "kv_role": role}
    return options


def _from_options(reader: EngineOptions, checkpoint_name: str) -> ServingLaunch:
    checkpoint = identify_checkpoint(checkpoint_name)
    read_dtype(reader)
    cache = read_cache_format(reader, "kv-cache-dtype", CACHE_FORMATS)
    return ServingLaunch(
        engine="vllm", checkpoint=checkpoint_name, architecture=reader.architecture, layout=_read_layout(reader),
        formats=read_formats(reader, checkpoint, cache, METHOD_FORMATS),
        batch_limits=BatchLimits(
            max_num_seqs=reader.get_count("max-num-seqs"), max_batched_tokens=reader.get_count("max-num-batched-tokens"),
            memory_fraction=reader.get_fraction("gpu-memory-utilization"),
            chunked_prefill=reader.get("enable-chunked-prefill") is not False, mtp_tokens=_read_drafted_tokens(reader),
        ),
        max_model_len=_read_length(reader), pool=_read_pool(reader),
    )  # fmt: skip


def _read_layout(reader: EngineOptions) -> ServingLayout:
    """Return the layout. Experts are split over all devices of attention, or each over all of them."""
    tp, pp = reader.get_degree("tensor-parallel-size"), reader.get_degree("pipeline-parallel-size")
    cp, dp = reader.get_degree("prefill-context-parallel-size"), reader.get_degree("data-parallel-size")
    splits_experts = reader.get("enable-expert-parallel", False) is True
    if not reader.has_experts:
        return ServingLayout(tp=tp, pp=pp, cp=cp, replicas=dp)
    if cp > 1:
        reader.flag_unpriced("prefill-context-parallel-size", "time")
    dispatch = read_dispatch(reader, "all2all-backend", GATHERING_BACKENDS)
    redundant_experts = _read_redundant_experts(reader)
    if not splits_experts or tp * dp == 1:
        return ServingLayout(tp=tp, attention_dp=dp, pp=pp, cp=cp)
    return ServingLayout(  # without copies of attention the backend is not used
        tp=tp, attention_dp=dp, pp=pp, cp=cp, ep=tp * dp, dispatch=dispatch if dp > 1 else "all_gather",
        redundant_experts=redundant_experts,
    )  # fmt: skip


def _read_redundant_experts(reader: EngineOptions) -> int:
    """Return the redundant experts of the balancer. Source: ParallelConfig, which takes them with enable_eplb alone."""
    is_on, config = reader.get("enable-eplb", False) is True, reader.get("eplb-config", {})
    count = config.get(REDUNDANT, 0) if isinstance(config, dict) else 0
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        reader.problems.append(f"eplb-config: {REDUNDANT} is {count!r}; a whole number from 0 is required")
        return 0
    if count and not is_on:
        reader.problems.append(
            f"eplb-config: {REDUNDANT} is {count} without --enable-eplb; that flag, or 0, is required"
        )
    if is_on:
        reader.flag_unpriced("enable-eplb", "time")
    return count


# Roles of a connector that moves the cache between pools. Source: vLLM 0.32.0, KVTransferConfig.kv_role; "kv_both" is that of a
# store beside one engine, or of either pool (NixlConnector), so that it says no pool.
POOLS: Mapping[str, str] = {"kv_producer": "prefill", "kv_consumer": "decode"}
TRANSFER = "kv-transfer-config"


def _read_pool(reader: EngineOptions) -> str | None:
    """Return the pool of a disaggregated deployment that the launch is; another connector is recorded as not priced."""
    config = reader.get(TRANSFER)
    pool = POOLS.get(str(config.get("kv_role"))) if isinstance(config, dict) else None
    if config is not None and pool is None:
        reader.flag_unpriced(TRANSFER, "memory")
    return pool


def _with_pool(options: Options, pool: str) -> Options:
    """Return options in which a connector of either role has that of a pool."""
    config = options.get(TRANSFER)
    if not isinstance(config, dict) or config.get("kv_role") != "kv_both":
        return options
    role = next(role for role, name in POOLS.items() if name == pool)
    return {**options, TRANSFER: {**config, "kv_role": role}}


def _pool_rules(prefill: ServingLaunch, decode: ServingLaunch) -> Iterator[str]:
    """Yield what NixlConnector cannot move. Source: vLLM, docs/features/nixl_connector_compatibility.md."""
    architecture = prefill.architecture
    if architecture is None or prefill.layout.tp == decode.layout.tp:
        return
    if any(layer.mixer != "attention" for layer in architecture.layer_architectures.values()):
        yield (
            f"layout: decode: tp is {decode.layout.tp} and that of prefill {prefill.layout.tp}; {architecture.name} has "
            f"recurrent states, which vLLM moves between instances of the same tp, so tp={prefill.layout.tp} is required"
        )


def _pool_settings(pool: str, has_nodes: bool) -> str:
    """Return the lines that say where an instance's caches are asked for. Source: vLLM, docs/features/nixl_connector_usage.md."""
    first_port = {"prefill": 5600, "decode": 18600}[pool]
    address = "?the address of this node" if has_nodes else "-localhost"
    return (
        f'export VLLM_NIXL_SIDE_CHANNEL_HOST="${{NODE_ADDRESS:{address}}}"\n'
        f"export VLLM_NIXL_SIDE_CHANNEL_PORT=$(({first_port} + INSTANCE * 20))  # and one more for each copy of attention\n"
    )


def _router_words(prefill: Sequence[InstanceAddress], decode: Sequence[InstanceAddress]) -> list[str]:
    """Return the router's words for the instances. Source: vllm-router 0.1.17, README.md, prefill-decode disaggregation."""
    pools = {"--prefill": prefill, "--decode": decode}
    tokens = [word for flag, addresses in pools.items() for address in addresses for word in (flag, address.url)]
    return ["--vllm-pd-disaggregation", *tokens]


def _read_length(reader: EngineOptions) -> int | None:
    """Return the longest request; -1 leaves it to the free memory."""
    if reader.get("max-model-len") == -1:
        reader.flag_unpriced("max-model-len", "memory")
        return None
    return reader.get_count("max-model-len")


def _read_drafted_tokens(reader: EngineOptions) -> int:
    """Return the tokens that the model's own modules draft in a pass; another drafter is recorded as not priced."""
    config = reader.get("speculative-config", {})
    config = config if isinstance(config, dict) else {"method": str(config)}
    names = {"spec-method": "method", "spec-model": "model", "spec-tokens": "num_speculative_tokens"}
    flags = {part: value for name, part in names.items() if (value := reader.get(name)) is not None}
    config = {**config, **flags}
    if not config:
        return 0
    option = "speculative-config" if not flags else "spec-method"
    tokens = config.get("num_speculative_tokens")
    drafts_itself = str(config.get("method", "")).endswith("mtp") and not config.get("model")
    if drafts_itself and isinstance(tokens, int) and not isinstance(tokens, bool) and tokens > 0:
        return tokens
    return flag_other_drafter(reader, option)


def _batch_rules(launch: ServingLaunch) -> Iterator[str]:
    """Yield what the scheduler requires. Source: SchedulerConfig.verify_max_model_len."""
    limits = launch.batch_limits
    tokens = limits.max_batched_tokens
    if tokens is None:
        return
    if limits.max_num_seqs is not None and tokens < limits.max_num_seqs:
        yield (
            f"batch_limits.max_batched_tokens is {tokens}; at least max_num_seqs = {limits.max_num_seqs} is required: each "
            "request computes a token"
        )
    if not limits.chunked_prefill and launch.max_model_len is not None and tokens < launch.max_model_len:
        yield (
            f"batch_limits.max_batched_tokens is {tokens} without chunked prefill; at least max_model_len = "
            f"{launch.max_model_len} is required, or chunked_prefill=true"
        )


def _expert_rules(launch: ServingLaunch) -> Iterator[str]:
    """Yield what expert parallelism requires: all devices of attention, or none. Source: ParallelConfig."""
    layout = launch.layout
    if not launch.has_experts:
        return
    width = layout.tp * layout.attention_dp
    if layout.ep not in (1, width):
        yield (
            f"layout: ep is {layout.ep} over {width} devices; vLLM splits experts over all devices of attention or none: ep=1 or "
            f"ep={width} is required"
        )
    if layout.cp > 1:
        yield f"layout: cp is {layout.cp}; vLLM splits experts over the devices of cp too: cp=1 is required with experts"


def _node_options(num_nodes: int) -> list[str]:
    """Return the words that the script on each of several nodes adds."""
    return [f"--nnodes {num_nodes}", '--node-rank "$NODE_RANK"', '--master-addr "$HEAD_NODE"', "$HEADLESS"]


def _node_script(num_nodes: int, devices: int) -> str:
    """Return the lines that set a node's rank, and leave the server to the first node."""
    return (
        f'NODE_RANK="${{NODE_RANK:-0}}"  # 0 to {num_nodes - 1}\n'
        'HEAD_NODE="${HEAD_NODE:?the address of the first node}"\n'
        'HEADLESS=""\n'
        'if [ "$NODE_RANK" -gt 0 ]; then HEADLESS="--headless"; fi\n'
    )


def _group_words(num_nodes: int) -> tuple[list[str], list[str]]:
    """Return the words of the leader and of the workers of a LeaderWorkerSet."""
    if num_nodes == 1:
        return [], []
    tokens = [
        "--nnodes",
        str(num_nodes),
        "--node-rank",
        "$(LWS_WORKER_INDEX)",
        "--master-addr",
        "$(LWS_LEADER_ADDRESS)",
    ]
    return tokens, [*tokens, "--headless"]


ENGINE = Engine(
    name="vllm", title="vLLM", version="0.32.0", source="https://github.com/vllm-project/vllm, vllm/engine/arg_utils.py",
    options_file="vllm", program=("vllm", "serve"), image="vllm/vllm-openai:v0.32.0", port=8000, to_options=_to_options,
    from_options=_from_options, rules=(model_rules, _batch_rules, _expert_rules),
    syntax=FlagSyntax(
        joins_dashes=True, has_parts=True, suffixes=COUNT_SUFFIXES["vllm"], automatic={"max-model-len": -1},
    ), config_flag="--config",
    starts_copies=lambda launch: not launch.has_experts, node_options=_node_options, node_script=_node_script,
    node_prefix=lambda num_nodes, devices: "", group_words=_group_words, has_manifest=lambda num_nodes: True,
    vendors=("NVIDIA", "AMD"), server_options={"host": "0.0.0.0", "port": 8000},
    added=frozenset(
        {
            "host", "port", "nnodes", "node-rank", "master-addr", "master-port", "headless", "data-parallel-size-local",
            "data-parallel-address", "data-parallel-start-rank", "data-parallel-rank", "data-parallel-rpc-port", "config",
        }
    ),
    field_options={
        "layout.tp": ("tensor-parallel-size",), "layout.attention_dp": ("data-parallel-size",),
        "layout.pp": ("pipeline-parallel-size",), "layout.cp": ("prefill-context-parallel-size",),
        "layout.ep": ("enable-expert-parallel",), "layout.dispatch": ("all2all-backend",),
        "layout.redundant_experts": ("eplb-config", "enable-eplb"), "layout.replicas": ("data-parallel-size",),
        "formats": ("quantization", "dtype"), "formats.cache": ("kv-cache-dtype",),
        "batch_limits.max_num_seqs": ("max-num-seqs",), "batch_limits.max_batched_tokens": ("max-num-batched-tokens",),
        "batch_limits.memory_fraction": ("gpu-memory-utilization",),
        "batch_limits.chunked_prefill": ("enable-chunked-prefill",),
        "batch_limits.mtp_tokens": ("speculative-config", "spec-method", "spec-model", "spec-tokens"),
        "max_model_len": ("max-model-len",), "pool": (TRANSFER,),
    },
    environment="VLLM_", model_flags=("model",), with_pool=_with_pool,
    pools=PoolSyntax(
        rules=_pool_rules, router=("vllm-router",), package="vllm-router==0.1.17", source="https://github.com/vllm-project/router",
        router_words=_router_words, instance_words=lambda pool: (), settings=_pool_settings,
        pod_variables={"VLLM_NIXL_SIDE_CHANNEL_HOST": "status.podIP"},
    ),
)  # fmt: skip
