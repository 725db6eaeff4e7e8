"""Megatron-LM's pretraining arguments for a layout: degrees, ZeRO, pipeline stages, recompute.

Stages are written as `--pipeline-model-parallel-layout "Ett|ttt|ttL"`. Source of that notation: Megatron-Core,
transformer/pipeline_parallel_layer_layout.py: E is the embedding, t a decoder layer, m a module of multi-token prediction, L
the loss, | separates stages, *N and (...)*N repeat what stands before N times.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.interop.launches.launch import Launch, plain_replica_fields
from shardwise.interop.launches.target import OptionMapping, OptionReader, add_options, map_flag, map_value
from shardwise.interop.text_formats.option_tables import Options
from shardwise.layout import layers_by_virtual_stage
from shardwise.model.recompute_policies import MODULES, join_modules, parse_modules
from shardwise.values import InputError, describe_unknown

MAX_LAYOUT_CHARACTERS = 100_000  # of a pipeline layout with repeats expanded
_REPEATED_GROUP = re.compile(r"\(([^()]*)\)\*(\d+)")
_REPEATED_LETTER = re.compile(r"([EtmL|])\*(\d+)")


def format_pipeline_layout(stages: Sequence[int], num_predict_layers: int) -> str:
    """Return the stages in Megatron's letters; multi-token prediction and the loss are in the last."""
    parts = ["t" * layers for layers in stages]
    parts[0] = "E" + parts[0]
    parts[-1] += "m" * num_predict_layers + "L"
    return "|".join(parts)


def parse_pipeline_layout(text: str) -> tuple[int, ...]:
    """Return the layers of each stage. Raises `InputError` for an invalid text."""
    letters = re.sub(r"[\s,]", "", text)
    for pattern in (_REPEATED_GROUP, _REPEATED_LETTER, _REPEATED_GROUP):
        letters = pattern.sub(_expand_repeat, letters)
    if set(letters) - set("EtmL|") or letters.count("E") != 1 or letters.count("L") != 1:
        raise InputError(
            f"pipeline-model-parallel-layout: found {text[:80]!r}; stages such as Ett|ttt|ttL are required"
        )
    return tuple(stage.count("t") for stage in letters.split("|"))


def _expand_repeat(match: re.Match[str]) -> str:
    if len(match[1]) * int(match[2][:7]) > MAX_LAYOUT_CHARACTERS:
        raise InputError(f"pipeline-model-parallel-layout: {match[0][:40]!r} is too long")
    return match[1] * int(match[2])


SHARDING_STRATEGIES = {2: "optim_grads", 3: "optim_grads_params"}  # of Megatron's own FSDP
CP_VARIANTS = {"zigzag": "p2p", "all_gather": "allgather", "ulysses": "a2a"}
HIERARCHICAL_EXCHANGE = "a2a+p2p"
DEFAULT_MODULES = ["core_attn"]  # default of --recompute-granularity selective (TransformerConfig)


def _replica_options(launch: Launch) -> Options:
    """Return ZeRO's options: stage 1 is the distributed optimizer, 2 and 3 are Megatron's own FSDP; dp counts its instances."""
    layout = launch.layout
    instances = {"num-distributed-optimizer-instances": layout.dp} if layout.zero_stage and layout.dp > 1 else {}
    if layout.zero_stage == 1:
        return {"use-distributed-optimizer": True, **instances}
    if not layout.zero_stage:
        return {}
    return {"use-megatron-fsdp": True, "data-parallel-sharding-strategy": SHARDING_STRATEGIES[layout.zero_stage],
            "use-distributed-optimizer": True, "ckpt-format": "fsdp_dtensor", **instances}  # fmt: skip


def read_num_replicas(reader: OptionReader) -> int:
    """Return how many groups of devices have sequences of their own. Raises `InputError` if degrees do not divide the cluster."""
    tp, pp = reader.get("tensor-model-parallel-size", 1), reader.get("pipeline-model-parallel-size", 1)
    model_parallel = tp * pp * reader.get("context-parallel-size", 1)
    if not isinstance(model_parallel, int) or model_parallel < 1 or reader.machines.num_devices % model_parallel:
        raise InputError(
            f"tensor, pipeline and context parallelism take {model_parallel} devices together, which do not divide "
            f"{reader.machines.num_devices}; give the cluster of the launch"
        )
    return reader.machines.num_devices // model_parallel


def _read_replicas(reader: OptionReader) -> Mapping[str, Any]:
    replicas = read_num_replicas(reader)
    strategy = reader.get("data-parallel-sharding-strategy", "no_shard")
    instances = reader.get("num-distributed-optimizer-instances", 1)
    uses_fsdp = reader.get("use-megatron-fsdp", False)
    reader.acknowledge("use-distributed-optimizer", "ckpt-format")
    by_strategy = {"no_shard": 0, "optim": 1, **{name: stage for stage, name in SHARDING_STRATEGIES.items()}}
    stage = by_strategy[strategy] if uses_fsdp else int(bool(reader.get("use-distributed-optimizer", False)))
    if reader.get(
        "use-torch-fsdp2", False
    ):  # PyTorch's own, which gathers weights again for the backward pass unless told not to
        stage = 2 if reader.get("torch-fsdp2-no-reshard-after-forward", False) else 3
    if not stage:
        experts = _read_experts(reader)
        return plain_replica_fields(
            replicas, experts["layout.ep"], reader.get("tensor-model-parallel-size", 1), experts["layout.etp"]
        )
    return {"layout.dp": instances, "layout.fsdp": replicas // instances, "layout.zero_stage": stage}


def _stage_options(launch: Launch) -> Options:
    """Return the stages' options: none if all stages have equally many layers, else the stages written out."""
    layout = launch.layout
    if layout.pp == 1:
        return {}
    stages = layers_by_virtual_stage(launch.model, layout)
    num_virtual_stages = layout.num_virtual_stages
    if len(set(stages)) == 1 and not launch.model.num_predict_layers:
        return {"num-virtual-stages-per-pipeline-rank": num_virtual_stages} if num_virtual_stages > 1 else {}
    return {"pipeline-model-parallel-layout": format_pipeline_layout(stages, launch.model.num_predict_layers)}


def _read_stages(reader: OptionReader) -> Mapping[str, Any]:
    ranks, layers = reader.get("pipeline-model-parallel-size", 1), reader.require("num-layers")
    if ranks == 1:
        return {"layout.schedule": "none"}
    text = reader.get("pipeline-model-parallel-layout")
    layers_per_stage = reader.get("num-layers-per-virtual-pipeline-stage")
    default = layers // ranks // layers_per_stage if layers_per_stage else 1
    num_virtual_stages = reader.get("num-virtual-stages-per-pipeline-rank", default)
    stages = parse_pipeline_layout(text) if text else _split_layers(reader, layers, ranks, num_virtual_stages)
    num_virtual_stages = len(stages) // ranks
    return {"layout.num_virtual_stages": num_virtual_stages, "layout.stages": stages,
            "layout.schedule": "interleaved" if num_virtual_stages > 1 else "1f1b"}  # fmt: skip


def _split_layers(reader: OptionReader, layers: int, ranks: int, num_virtual_stages: int) -> tuple[int, ...]:
    """Return the layers of each virtual stage.

    All have equally many, but embedding and loss may count as a layer, and the first and last rank may have their own number.
    """
    # Embedding and loss that count as layers take part in the division, and are taken off the end stages afterwards.
    ends = [bool(reader.get(f"account-for-{name}-in-pipeline-split", False)) for name in ("embedding", "loss")]
    end_layers = [reader.get(f"decoder-{name}-pipeline-num-layers") for name in ("first", "last")]
    middle_ranks = ranks - sum(count is not None for count in end_layers)
    middle_layers = layers + sum(ends) - sum(count or 0 for count in end_layers)
    layers_per_stage = _divide_layers(middle_layers, middle_ranks * num_virtual_stages)
    stages = [layers_per_stage] * (ranks * num_virtual_stages)
    for rank, end_count in ((0, end_layers[0]), (ranks - 1, end_layers[1])):
        if end_count is not None:
            stages[rank::ranks] = [_divide_layers(end_count, num_virtual_stages)] * num_virtual_stages
    stages[0], stages[-1] = stages[0] - ends[0], stages[-1] - ends[1]
    return tuple(stages)


def _divide_layers(layers: int, stages: int) -> int:
    if stages < 1 or layers % stages:
        raise InputError(
            f"num-layers: found {layers} on {stages} stages; a multiple, or --pipeline-model-parallel-layout, is required"
        )
    return layers // stages


def _recompute_options(launch: Launch) -> Options:
    layout, stages = launch.layout, layers_by_virtual_stage(launch.model, launch.layout)
    modules = parse_modules(layout.recompute)
    if modules:
        return {"recompute-granularity": "selective", "recompute-modules": list(modules)}
    if layout.recompute != "full":
        return {}
    count = layout.recompute_layers
    method = {"recompute-method": "uniform", "recompute-num-layers": 1} if count is None or count >= max(stages) \
        else {"recompute-method": "block", "recompute-num-layers": count}  # fmt: skip
    return {"recompute-granularity": "full", **method}


def _read_recompute(reader: OptionReader) -> Mapping[str, Any]:
    granularity = reader.get("recompute-granularity")
    modules = reader.options.get("recompute-modules") or DEFAULT_MODULES
    method, count = reader.get("recompute-method"), reader.get("recompute-num-layers")
    if granularity is None and not reader.get("recompute-activations", False):
        return {"layout.recompute": "none"}
    if granularity == "full" and method == "block" and not count:  # of no layer
        return {"layout.recompute": "none"}
    if granularity == "full":
        return {"layout.recompute": "full", **({"layout.recompute_layers": count} if method == "block" else {})}
    if set(modules) <= MODULES.keys():  # else the option is reported as unread
        reader.acknowledge("recompute-modules")
    return {"layout.recompute": join_modules(modules)}


def _expert_options(launch: Launch) -> Options:
    """Return options of experts. Without etp Megatron-LM splits them as it splits layers."""
    model, layout = launch.model, launch.layout
    if not model.num_experts:
        return {}
    tensor_parallel = {"expert-tensor-parallel-size": layout.expert_tp} if layout.tp > 1 else {}
    kernels = {"moe-token-dispatcher-type": "alltoall", "moe-grouped-gemm": True}
    return {"expert-model-parallel-size": layout.ep, **tensor_parallel, **kernels}


def _read_experts(reader: OptionReader) -> Mapping[str, Any]:
    tp, etp = reader.get("tensor-model-parallel-size", 1), reader.get("expert-tensor-parallel-size")
    reader.acknowledge("moe-token-dispatcher-type", "moe-grouped-gemm")
    if reader.get("num-experts") and etp not in (None, 1, tp):
        raise InputError(
            f"expert-tensor-parallel-size: found {etp} beside {tp} of layers; 1 or {tp} is what can be read"
        )
    return {"layout.ep": reader.get("expert-model-parallel-size", 1), "layout.etp": 1 if etp == 1 and tp > 1 else None}


def _overlap_options(launch: Launch) -> Options:
    sharded = {"overlap-param-gather": True} if launch.layout.zero_stage else {}
    return {"overlap-grad-reduce": True, **sharded} if launch.layout.num_replicas > 1 else {}


def _read_context_exchange(reader: OptionReader) -> Mapping[str, Any]:
    """Return how context parallelism exchanges keys and values. Heads within and a ring across nodes are priced as the ring."""
    kinds = reader.get("cp-comm-type", ["p2p"])
    kind = str(kinds[0] if isinstance(kinds, (list, tuple)) and kinds else kinds)
    if reader.get("context-parallel-size", 1) == 1:
        return {}
    if kind == HIERARCHICAL_EXCHANGE:
        reader.acknowledge("hierarchical-context-parallel-sizes")
        reader.notes.append(
            f"cp-comm-type {kind} (heads exchanged within nodes, a ring across them) is priced as p2p, the ring alone"
        )
        kind = "p2p"
    variants = {theirs: ours for ours, theirs in CP_VARIANTS.items()}
    if kind not in variants:
        raise InputError(f"cp-comm-type: {describe_unknown(kind, variants)}")
    return {"layout.cp_variant": variants[kind]}


LAYOUT_MAPPINGS: tuple[OptionMapping, ...] = (
    map_value("layout.tp", "tensor-model-parallel-size", 1),
    map_value("layout.pp", "pipeline-model-parallel-size", 1),
    map_value("layout.cp", "context-parallel-size", 1),
    OptionMapping(_replica_options, _read_replicas),
    OptionMapping(
        lambda launch: {"sequence-parallel": True} if launch.layout.sequence_parallel else {},
        lambda reader: {"layout.sequence_parallel": bool(reader.get("sequence-parallel", False))  # it is nothing without tp
                       and reader.get("tensor-model-parallel-size", 1) > 1},
    ),
    map_flag("layout.async_tp", "tp-comm-overlap"),
    OptionMapping(
        lambda launch: {"cp-comm-type": [CP_VARIANTS[launch.layout.cp_variant]]}
        if launch.layout.cp > 1 and launch.layout.cp_variant in CP_VARIANTS else {},
        _read_context_exchange,
    ),
    OptionMapping(_expert_options, _read_experts),
    OptionMapping(_stage_options, _read_stages),
    OptionMapping(_recompute_options, _read_recompute),
    OptionMapping(
        lambda launch: {"optimizer-cpu-offload": True, "use-precision-aware-optimizer": True}
        if launch.layout.offload == "optimizer" else {},
        lambda reader: {"layout.offload": "optimizer" if reader.get("optimizer-cpu-offload", False) else "none"},
    ),
    add_options("overlap-grad-reduce", "overlap-param-gather", to_options=_overlap_options),
)  # fmt: skip
