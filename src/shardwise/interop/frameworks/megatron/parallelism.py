"""How arguments of Megatron-LM's pretraining scripts express a layout: degrees, ZeRO, pipeline stages, recompute.

Stages are written as `--pipeline-model-parallel-layout "Ett|ttt|ttL"`. Source of that notation: Megatron-Core,
transformer/pipeline_parallel_layer_layout.py: E the embedding, t a decoder layer, m a module of multi-token prediction, L the
loss, | between stages, *N and (...)*N for N of what stands before.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.interop.launches.launch import Launch
from shardwise.interop.launches.target import OptionMapping, OptionReader, Options, add_options, map_flag, map_value
from shardwise.layout.layers_per_stage import layers_by_virtual_stage
from shardwise.model.recompute_policies import MODULES, join_modules, parse_modules
from shardwise.values.errors import InputError

MAX_LAYOUT_CHARACTERS = 100_000  # characters of a layout, written out
_REPEATED_GROUP = re.compile(r"\(([^()]*)\)\*(\d+)")
_REPEATED_LETTER = re.compile(r"([EtmL|])\*(\d+)")


def format_pipeline_layout(stages: Sequence[int], num_predict_layers: int) -> str:
    """The stages in Megatron's letters; modules of multi-token prediction and the loss are with the last."""
    parts = ["t" * layers for layers in stages]
    parts[0] = "E" + parts[0]
    parts[-1] += "m" * num_predict_layers + "L"
    return "|".join(parts)


def parse_pipeline_layout(text: str) -> tuple[int, ...]:
    """Layers of each stage. Raises `InputError` for what is no such text."""
    found = re.sub(r"[\s,]", "", text)
    for pattern in (_REPEATED_GROUP, _REPEATED_LETTER, _REPEATED_GROUP):
        found = pattern.sub(_expand_repeat, found)
    if set(found) - set("EtmL|") or found.count("E") != 1 or found.count("L") != 1:
        raise InputError(
            f"pipeline-model-parallel-layout: found {text[:80]!r}; stages such as Ett|ttt|ttL are required"
        )
    return tuple(stage.count("t") for stage in found.split("|"))


def _expand_repeat(match: re.Match[str]) -> str:
    if len(match[1]) * int(match[2][:7]) > MAX_LAYOUT_CHARACTERS:
        raise InputError(f"pipeline-model-parallel-layout: {match[0][:40]!r} is too long")
    return match[1] * int(match[2])


SHARDING_STRATEGIES = {2: "optim_grads", 3: "optim_grads_params"}  # of Megatron's own FSDP
CP_VARIANTS = {"zigzag": "p2p", "all_gather": "allgather", "ulysses": "a2a"}
DEFAULT_MODULES = ["core_attn"]  # of --recompute-granularity selective (TransformerConfig)


def _replica_options(launch: Launch) -> Options:
    """ZeRO: stage 1 is the distributed optimizer, 2 and 3 are Megatron's own FSDP; replicas of shards are its instances."""
    layout = launch.layout
    instances = {"num-distributed-optimizer-instances": layout.dp} if layout.zero_stage and layout.dp > 1 else {}
    if layout.zero_stage == 1:
        return {"use-distributed-optimizer": True, **instances}
    if not layout.zero_stage:
        return {}
    return {"use-megatron-fsdp": True, "data-parallel-sharding-strategy": SHARDING_STRATEGIES[layout.zero_stage],
            "use-distributed-optimizer": True, "ckpt-format": "fsdp_dtensor", **instances}  # fmt: skip


def _read_replicas(given: OptionReader) -> Mapping[str, Any]:
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
    own = given.get("use-megatron-fsdp", False)
    for name in ("use-distributed-optimizer", "ckpt-format"):
        given.get(name)
    by_strategy = {"no_shard": 0, "optim": 1, **{name: stage for stage, name in SHARDING_STRATEGIES.items()}}
    stage = by_strategy[strategy] if own else int(bool(given.get("use-distributed-optimizer", False)))
    if not stage:
        return {"layout.dp": replicas, "layout.zero_stage": 0}
    return {"layout.dp": instances, "layout.fsdp": replicas // instances, "layout.zero_stage": stage}


def _stage_options(launch: Launch) -> Options:
    """Stages that are as many layers each need no word; others are written out."""
    layout = launch.layout
    if layout.pp == 1:
        return {}
    stages = layers_by_virtual_stage(launch.model, layout)
    virtual = (
        {"num-virtual-stages-per-pipeline-rank": layout.num_virtual_stages} if layout.num_virtual_stages > 1 else {}
    )
    if len(set(stages)) == 1 and not launch.model.num_predict_layers:
        return virtual
    return {"pipeline-model-parallel-layout": format_pipeline_layout(stages, launch.model.num_predict_layers)}


def _read_stages(given: OptionReader) -> Mapping[str, Any]:
    ranks, layers = given.get("pipeline-model-parallel-size", 1), given.require("num-layers")
    if ranks == 1:
        return {"layout.schedule": "none"}
    text, per = given.get("pipeline-model-parallel-layout"), given.get("num-layers-per-virtual-pipeline-stage")
    virtual = given.get("num-virtual-stages-per-pipeline-rank", layers // ranks // per if per else 1)
    stages = parse_pipeline_layout(text) if text else _split_layers(given, layers, ranks, virtual)
    virtual = len(stages) // ranks
    return {"layout.num_virtual_stages": virtual, "layout.stages": stages,
            "layout.schedule": "interleaved" if virtual > 1 else "1f1b"}  # fmt: skip


def _split_layers(given: OptionReader, layers: int, ranks: int, virtual: int) -> tuple[int, ...]:
    """Layers of each virtual stage: as many each, where embedding and loss may count as a layer and the ends have their own."""
    ends = [bool(given.get(f"account-for-{name}-in-pipeline-split", False)) for name in ("embedding", "loss")]
    own = [given.get(f"decoder-{name}-pipeline-num-layers") for name in ("first", "last")]
    others = ranks - sum(one is not None for one in own)
    even = _divide_layers(layers + sum(ends) - sum(one or 0 for one in own), others * virtual)
    stages = [even] * (ranks * virtual)
    for rank, layers_of in ((0, own[0]), (ranks - 1, own[1])):
        if layers_of is not None:
            stages[rank::ranks] = [_divide_layers(layers_of, virtual)] * virtual
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


def _read_recompute(given: OptionReader) -> Mapping[str, Any]:
    granularity, modules = given.get("recompute-granularity"), given.options.get("recompute-modules") or DEFAULT_MODULES
    method, count = given.get("recompute-method"), given.get("recompute-num-layers")
    if granularity is None and not given.get("recompute-activations", False):
        return {"layout.recompute": "none"}
    if granularity == "full":
        return {"layout.recompute": "full", **({"layout.recompute_layers": count} if method == "block" else {})}
    if set(modules) <= MODULES.keys():  # others than these are named as not read
        given.get("recompute-modules")
    return {"layout.recompute": join_modules(modules)}


def _expert_options(launch: Launch) -> Options:
    """Experts are split as layers are, by Megatron's default."""
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


def _read_experts(given: OptionReader) -> Mapping[str, Any]:
    tp, etp = given.get("tensor-model-parallel-size", 1), given.get("expert-tensor-parallel-size")
    for name in ("moe-token-dispatcher-type", "moe-grouped-gemm"):
        given.get(name)
    return {"layout.ep": given.get("expert-model-parallel-size", 1), "layout.etp": 1 if etp == 1 and tp > 1 else None}


def _overlap_options(launch: Launch) -> Options:
    sharded = {"overlap-param-gather": True} if launch.layout.zero_stage else {}
    return {"overlap-grad-reduce": True, **sharded} if launch.layout.dp * launch.layout.fsdp > 1 else {}


LAYOUT_MAPPINGS: tuple[OptionMapping, ...] = (
    map_value("layout.tp", "tensor-model-parallel-size", 1),
    map_value("layout.pp", "pipeline-model-parallel-size", 1),
    map_value("layout.cp", "context-parallel-size", 1),
    OptionMapping(_replica_options, _read_replicas),
    OptionMapping(
        lambda launch: {"sequence-parallel": True} if launch.layout.sequence_parallel else {},
        lambda given: {"layout.sequence_parallel": bool(given.get("sequence-parallel", False))  # it is nothing without tp
                       and given.get("tensor-model-parallel-size", 1) > 1},
    ),
    map_flag("layout.async_tp", "tp-comm-overlap"),
    OptionMapping(
        lambda launch: {"cp-comm-type": [CP_VARIANTS[launch.layout.cp_variant]]}
        if launch.layout.cp > 1 and launch.layout.cp_variant in CP_VARIANTS else {},
        lambda given: {"layout.cp_variant": {v: k for k, v in CP_VARIANTS.items()}[given.get("cp-comm-type", ["p2p"])[0]]}
        if given.get("context-parallel-size", 1) > 1 else {},
    ),
    OptionMapping(_expert_options, _read_experts),
    OptionMapping(_stage_options, _read_stages),
    OptionMapping(_recompute_options, _read_recompute),
    OptionMapping(
        lambda launch: {"optimizer-cpu-offload": True, "use-precision-aware-optimizer": True}
        if launch.layout.offload == "optimizer" else {},
        lambda given: {"layout.offload": "optimizer" if given.get("optimizer-cpu-offload", False) else "none"},
    ),
    add_options("overlap-grad-reduce", "overlap-param-gather", say=_overlap_options),
)  # fmt: skip
