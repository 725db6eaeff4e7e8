"""SGLang: `python -m sglang.launch_server` and `sglang serve`.

Source of names and types: SGLang 0.5.23, ServerArgs (sglang/srt/server_args.py, arg_groups/fields); meaning:
arg_groups/parallel_hook.py (tp-size counts all devices of attention and of context parallelism; chunks and running requests are
of all copies of attention together), arg_groups/speculative_hook.py.
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

# Weights that a method stands for. Source: SGLang 0.5.23, sglang/srt/layers/quantization.
METHOD_FORMATS: Mapping[str, str] = {
    "fp8": "fp8", "modelopt": "fp8", "modelopt_fp8": "fp8", "modelopt_fp4": "nvfp4", "nvfp4_online": "nvfp4", "awq": "int4",
    "awq_marlin": "int4", "gptq": "int4", "gptq_marlin": "int4", "moe_wna16": "int4", "w8a8_int8": "int8", "w8a8_fp8": "fp8",
}  # fmt: skip
ONLINE_METHODS: Mapping[str, str] = {"fp8": "fp8", "nvfp4": "nvfp4_online"}
CACHE_FORMATS: Mapping[str, str] = {
    "auto": "bf16", "bf16": "bf16", "bfloat16": "bf16", "fp8_e4m3": "fp8", "fp8_e5m2": "fp8",
}  # fmt: skip
# Values of moe-a2a-backend that gather the tokens of all copies of attention. Source: arg_groups/moe_hook.py, handle_a2a_moe.
GATHERING_BACKENDS = ("none", "ascend_tp")
BOOTSTRAP_PORT = 8998  # the default of disaggregation-bootstrap-port
INIT_PORT = 20000  # of the first node; SGLang's documentation, multi-node deployment
NO_CHUNKS = -1  # chunked-prefill-size that turns chunks off


def _to_options(launch: ServingLaunch) -> Options:
    layout, limits = launch.layout, launch.batch_limits
    degrees = {
        "tp-size": layout.tp * layout.attention_dp * layout.cp, "pp-size": layout.pp, "dp-size": layout.replicas,
        "attn-dp-size": layout.attention_dp, "attn-cp-size": layout.cp, "ep-size": layout.ep,
    }  # fmt: skip
    options: dict[str, Any] = {name: degree for name, degree in degrees.items() if degree > 1}
    if layout.dispatch == "all_to_all":
        options["moe-a2a-backend"] = "deepep"
    if layout.redundant_experts:
        options |= {"enable-eplb": True, "ep-num-redundant-experts": layout.redundant_experts}
    if layout.cp > 1:
        options |= {"enable-prefill-cp": True, "cp-strategy": "zigzag"}
        if launch.has_experts:
            options["moe-dp-size"] = layout.cp
    options |= quantization_option(launch, ONLINE_METHODS)
    if launch.formats.cache != "bf16":
        options["kv-cache-dtype"] = "fp8_e4m3"
    chunk = None if limits.max_batched_tokens is None else limits.max_batched_tokens * layout.attention_dp
    numbers = {
        "context-length": launch.max_model_len, "mem-fraction-static": limits.memory_fraction,
        "max-running-requests": None if limits.max_num_seqs is None else limits.max_num_seqs * layout.attention_dp,
        "chunked-prefill-size": chunk if limits.chunked_prefill else NO_CHUNKS,
        "max-prefill-tokens": None if limits.chunked_prefill else limits.max_batched_tokens,
        "scheduler-recv-interval": limits.admission_passes if limits.admission_passes > 1 else None,
    }  # fmt: skip
    options |= {name: value for name, value in numbers.items() if value is not None}
    if limits.mtp_tokens:
        options |= {
            "speculative-algorithm": "EAGLE", "speculative-num-steps": limits.mtp_tokens, "speculative-eagle-topk": 1,
            "speculative-num-draft-tokens": limits.mtp_tokens + 1,
        }  # fmt: skip
    if launch.pool is not None:
        options |= {"disaggregation-mode": launch.pool, "disaggregation-transfer-backend": "nixl"}
    return options


def _from_options(reader: EngineOptions, checkpoint_name: str) -> ServingLaunch:
    checkpoint = identify_checkpoint(checkpoint_name)
    read_dtype(reader)
    cache = read_cache_format(reader, "kv-cache-dtype", CACHE_FORMATS)
    layout = _read_layout(reader)
    seqs = reader.get_count("max-running-requests")
    has_chunks, tokens = _read_chunk(reader, layout.attention_dp)
    return ServingLaunch(
        engine="sglang", checkpoint=checkpoint_name, architecture=reader.architecture, layout=layout,
        formats=read_formats(reader, checkpoint, cache, METHOD_FORMATS),
        batch_limits=BatchLimits(
            max_num_seqs=None if seqs is None else max(seqs // layout.attention_dp, 1), max_batched_tokens=tokens,
            memory_fraction=reader.get_fraction("mem-fraction-static"), chunked_prefill=has_chunks,
            mtp_tokens=_read_drafted_tokens(reader), admission_passes=reader.get_count("scheduler-recv-interval") or 1,
        ),
        max_model_len=reader.get_count("context-length"), pool=_read_pool(reader),
    )  # fmt: skip


def _read_layout(reader: EngineOptions) -> ServingLayout:
    """Return the layout: tp-size counts the devices of all copies of attention and of context parallelism."""
    width, pp, cp = reader.get_degree("tp-size"), reader.get_degree("pp-size"), reader.get_degree("attn-cp-size")
    replicas, copies = reader.get_degree("dp-size"), reader.get_degree("attn-dp-size")
    if reader.get("enable-dp-attention", False) and copies == 1:  # the former spelling of attn-dp-size
        replicas, copies = 1, replicas
    ep, expert_copies = reader.get_degree("ep-size"), reader.get_degree("moe-dp-size")
    if width % (copies * cp):
        reader.problems.append(
            f"tp-size: found {width}; a multiple of attn-dp-size * attn-cp-size = {copies * cp} is required"
        )
        return ServingLayout()
    if reader.has_experts and expert_copies != cp:
        reader.flag_unpriced("moe-dp-size" if expert_copies > 1 else "attn-cp-size", "time")
    dispatch = read_dispatch(reader, "moe-a2a-backend", GATHERING_BACKENDS)
    if dispatch == "all_to_all":  # sets ep-size to tp-size
        ep = width // cp
    if (width // cp) % ep:
        reader.problems.append(f"ep-size: found {ep}; a divisor of tp-size = {width // cp} is required")
        return ServingLayout()
    return ServingLayout(
        tp=width // (copies * cp),
        attention_dp=copies,
        pp=pp,
        cp=cp,
        ep=ep if reader.has_experts else 1,
        replicas=replicas,
        dispatch=dispatch if reader.has_experts and ep > 1 else "all_gather",
        redundant_experts=_read_redundant_experts(reader) if reader.has_experts and ep > 1 else 0,
    )


def _read_redundant_experts(reader: EngineOptions) -> int:
    """Return the redundant experts; how far a balancer evens out the load is not priced."""
    count = reader.get("ep-num-redundant-experts", 0)
    if reader.get("enable-eplb", False) is True:
        reader.flag_unpriced("enable-eplb", "time")
    if isinstance(count, int) and not isinstance(count, bool) and count >= 0:
        return count
    reader.problems.append(f"ep-num-redundant-experts: found {count!r}; a whole number from 0 is required")
    return 0


def _read_pool(reader: EngineOptions) -> str | None:
    """Return the pool of a disaggregated deployment that the launch is."""
    mode = str(reader.get("disaggregation-mode"))
    return mode if mode in ("prefill", "decode") else None


def _pool_rules(prefill: ServingLaunch, decode: ServingLaunch) -> Iterator[str]:
    """Yield what cannot be sent from one pool to the other. Source: sglang/srt/disaggregation/common/conn.py."""
    if decode.layout.cp > 1:
        yield f"layout: decode: cp is {decode.layout.cp}; SGLang decodes with cp=1, which is required"
    if decode.layout.pp not in (1, prefill.layout.pp):
        yield (
            f"layout: decode: pp is {decode.layout.pp}; 1 or that of prefill, pp={prefill.layout.pp}, is required by SGLang"
        )


def _router_words(prefill: Sequence[InstanceAddress], decode: Sequence[InstanceAddress]) -> list[str]:
    """Return the router's words for the instances, those that prefill with their bootstrap port. Source: sglang-router 0.3.2,
    RouterArgs.
    """
    tokens = ["--pd-disaggregation"]
    for url, number in prefill:
        tokens += ["--prefill", url, str(BOOTSTRAP_PORT + number)]
    return [*tokens, *(word for address in decode for word in ("--decode", address.url))]


def _instance_words(pool: str) -> list[str]:
    """Return the port at which the instances that decode ask one that prefills for caches."""
    return [f'--disaggregation-bootstrap-port "$(({BOOTSTRAP_PORT} + INSTANCE))"'] if pool == "prefill" else []


def _read_chunk(reader: EngineOptions, attention_dp: int) -> tuple[bool, int | None]:
    """Return whether inputs are cut into chunks, and the tokens of a pass of one copy of attention."""
    chunk, prefill_tokens = reader.get("chunked-prefill-size"), reader.get_count("max-prefill-tokens")
    if isinstance(chunk, int) and chunk <= 0:
        return False, prefill_tokens
    count = reader.get_count("chunked-prefill-size")
    if count is None:
        return True, None
    return True, min(max(count // attention_dp, 1), prefill_tokens or count)


def _read_drafted_tokens(reader: EngineOptions) -> int:
    """Return the tokens that the model's own modules draft in a pass; another drafter is recorded as not priced."""
    algorithm = str(reader.get("speculative-algorithm", "")).upper()
    steps, width = reader.get("speculative-num-steps"), reader.get("speculative-eagle-topk")
    drafted, draft_model = reader.get("speculative-num-draft-tokens"), reader.get("speculative-draft-model-path")
    if not algorithm:
        return 0
    is_chain = isinstance(steps, int) and steps > 0 and width in (None, 1) and drafted in (None, steps + 1)
    drafts_itself = reader.architecture is None or reader.architecture.num_predict_layers > 0
    if algorithm in ("EAGLE", "NEXTN") and is_chain and draft_model is None and drafts_itself:
        return int(steps)
    return flag_other_drafter(reader, "speculative-algorithm")


def _context_rules(launch: ServingLaunch) -> Iterator[str]:
    """Yield what context parallelism requires. Source: arg_groups/parallel_hook.py, handle_context_parallelism."""
    layout = launch.layout
    if layout.cp == 1 or not launch.has_experts:
        return
    if layout.pp > 1:
        yield f"layout: cp is {layout.cp} and pp {layout.pp}; SGLang takes one of them with experts: cp=1 or pp=1 is required"
    if layout.ep > 1 and layout.expert_tp_degree > 1:
        yield (
            f"layout: ep is {layout.ep} with cp={layout.cp}; ep=1 or ep={layout.tp * layout.attention_dp} is required by SGLang: "
            "experts are then split over all devices of a token's share"
        )


def _recurrence_rules(launch: ServingLaunch) -> Iterator[str]:
    """Yield what Mamba-2 requires of quantised weights. Source: layers/attention/mamba/mamba.py, MambaMixer2: groups that heads
    share on several devices are loaded from 16 bits alone."""
    tp, layers = launch.layout.tp, launch.architecture.layer_architectures.values() if launch.architecture else ()
    shares_group = any(
        layer.recurrence is not None and layer.recurrence.kind == "mamba2" and not layer.recurrence.structure.has_groups
        for layer in layers
    )
    if tp > 1 and shares_group and launch.formats.attention_format.name != "bf16":
        yield (
            f"layout: tp is {tp} with Mamba-2 in {launch.formats.attention_format.name}, whose heads share one group; tp=1 is "
            "required by SGLang, or weights in bf16"
        )


def _node_options(num_nodes: int) -> list[str]:
    """Return the words that the script on each of several nodes adds."""
    return [f"--nnodes {num_nodes}", '--node-rank "$NODE_RANK"', f'--dist-init-addr "$HEAD_NODE:{INIT_PORT}"']


def _node_script(num_nodes: int, devices: int) -> str:
    """Return the lines that set a node's rank."""
    return (
        f'NODE_RANK="${{NODE_RANK:-0}}"  # 0 to {num_nodes - 1}\n'
        'HEAD_NODE="${HEAD_NODE:?the address of the first node}"\n'
    )


def _group_words(num_nodes: int) -> tuple[list[str], list[str]]:
    """Return the words of the leader and of the workers of a LeaderWorkerSet, which are the same."""
    if num_nodes == 1:
        return [], []
    address = f"$(LWS_LEADER_ADDRESS):{INIT_PORT}"
    tokens = ["--nnodes", str(num_nodes), "--node-rank", "$(LWS_WORKER_INDEX)", "--dist-init-addr", address]
    return tokens, tokens


ENGINE = Engine(
    name="sglang", title="SGLang", version="0.5.23", source="https://github.com/sgl-project/sglang, sglang/srt/server_args.py",
    options_file="sglang", program=("python3", "-m", "sglang.launch_server", "--model-path"),
    image="lmsysorg/sglang:v0.5.23", port=30000, to_options=_to_options, from_options=_from_options,
    rules=(model_rules, _context_rules, _recurrence_rules), syntax=FlagSyntax(suffixes=COUNT_SUFFIXES["sglang"]),
    config_flag="--config",
    starts_copies=lambda launch: True, node_options=_node_options, node_script=_node_script,
    node_prefix=lambda num_nodes, devices: "", group_words=_group_words, has_manifest=lambda num_nodes: True,
    vendors=("NVIDIA", "AMD"), server_options={"host": "0.0.0.0", "port": 30000},
    added=frozenset([
        "host", "port", "nnodes", "node-rank", "dist-init-addr", "config", "enable-prefill-cp", "cp-strategy",
        "disaggregation-transfer-backend", "disaggregation-bootstrap-port",
    ]),
    field_options={
        "layout.tp": ("tp-size",), "layout.attention_dp": ("attn-dp-size", "enable-dp-attention", "dp-size"),
        "layout.pp": ("pp-size",),
        "layout.cp": ("attn-cp-size",), "layout.ep": ("ep-size", "moe-dp-size"), "layout.replicas": ("dp-size",),
        "layout.dispatch": ("moe-a2a-backend",), "layout.redundant_experts": ("ep-num-redundant-experts", "enable-eplb"),
        "formats": ("quantization", "dtype"), "formats.cache": ("kv-cache-dtype",),
        "batch_limits.max_num_seqs": ("max-running-requests",),
        "batch_limits.max_batched_tokens": ("chunked-prefill-size", "max-prefill-tokens"),
        "batch_limits.memory_fraction": ("mem-fraction-static",),
        "batch_limits.chunked_prefill": ("chunked-prefill-size",),
        "batch_limits.mtp_tokens": ("speculative-algorithm", "speculative-num-steps"), "max_model_len": ("context-length",),
        "batch_limits.admission_passes": ("scheduler-recv-interval",), "pool": ("disaggregation-mode",),
    },
    environment="SGLANG_", model_flags=("model-path",),
    pools=PoolSyntax(
        rules=_pool_rules, router=("python3", "-m", "sglang_router.launch_router"), package="sglang-router==0.3.2",
        source="https://github.com/sgl-project/sglang, sgl-model-gateway", router_words=_router_words,
        instance_words=_instance_words, settings=lambda pool, has_nodes: "", pod_variables={},
    ),
)  # fmt: skip
