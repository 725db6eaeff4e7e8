"""Megatron Bridge's names for the arguments of Megatron-LM: the same in snake case, but for those of the tables here.

Source: megatron-bridge 0.3.1, training/config.py, models/gpt_provider.py and training/mixed_precision.py; megatron-core 0.16.1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from shardwise.export.field import Options
from shardwise.export.formats.recipe import Call, Reference
from shardwise.export.megatron_model import ACTIVATIONS
from shardwise.export.target import option_table

TABLE = "megatron_bridge"
SECTIONS = ("model", "train", "ddp", "optimizer", "checkpoint")
RENAMED = {
    "num-experts": "model.num_moe_experts", "norm-epsilon": "model.layernorm_epsilon",
    "num-virtual-stages-per-pipeline-rank": "model.virtual_pipeline_model_parallel_size",
    "tp-comm-overlap": "comm_overlap.tp_comm_overlap", "fp8-format": "mixed_precision.fp8",
    "fp8-recipe": "mixed_precision.fp8_recipe", "fp4-format": "mixed_precision.fp4", "fp4-recipe": "mixed_precision.fp4_recipe",
    "bf16": "mixed_precision.bf16", "fp16": "mixed_precision.fp16", "swiglu": "model.gated_linear_unit",
}  # fmt: skip
INVERTED = {
    "untie-embeddings-and-output-weights": "model.share_embeddings_and_output_weights",
    "disable-bias-linear": "model.add_bias_linear", "grad-reduce-in-bf16": "mixed_precision.grad_reduce_in_fp32",
}  # fmt: skip
# What Bridge does not say by a field of its own, or says by others (below).
UNNAMED = {"group-query-attention", "max-position-embeddings", "train-samples", "quick-geglu", "swiglu"}
# Of a recipe that begins with _pretrain_common: what it has where the recipe says nothing.
COMMON: Options = {
    "train.global_batch_size": 32, "train.micro_batch_size": 2, "train.train_iters": 300_000, "dataset.seq_length": 4096,
    "ddp.use_distributed_optimizer": True, "optimizer.use_distributed_optimizer": True, "ddp.overlap_grad_reduce": True,
    "ddp.overlap_param_gather": True, "ddp.data_parallel_sharding_strategy": "optim_grads_params",
    "mixed_precision": "bf16_mixed", "checkpoint.ckpt_format": "torch_dist",
}  # fmt: skip
SET_ANYWAY = (
    "ddp.use_distributed_optimizer",
    "ddp.overlap_grad_reduce",
    "ddp.overlap_param_gather",
)  # as COMMON has them
DTYPES = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16", "fp8": "torch.uint8"}
GATES = {"swiglu": "torch.nn.functional.silu", "clamped_swiglu": "quick_gelu", "gelu": "torch.nn.functional.gelu"}
_FORMATS = {"": {}, "fp8_delayed_scaling": ("hybrid", "delayed"), "fp8_current_scaling": ("hybrid", "tensorwise"),
            "fp8_subchannel_scaling": ("hybrid", "blockwise"), "mxfp8": ("e4m3", "mxfp8")}  # fmt: skip


def field_of(option: str) -> str | None:
    """The field of an argument; None where there is none."""
    if option in RENAMED or option in INVERTED:
        return RENAMED.get(option) or INVERTED[option]
    name, known = option.replace("-", "_"), option_table(TABLE)
    return next((f"{section}.{name}" for section in SECTIONS if f"{section}.{name}" in known), None)


@cache
def option_of() -> Mapping[str, str]:
    """Arguments of Megatron-LM by field."""
    return {field: option for option in option_table("megatron") if (field := field_of(option))}


def _freq_text(freq: Any) -> str:
    """Layers of experts as Megatron-LM writes them: dense layers first."""
    if not isinstance(freq, (list, tuple)) or list(freq) != sorted(freq):
        return str(freq)
    return f"([0]*{freq.count(0)}+[1]*{freq.count(1)})" if 0 in freq else "1"


def _freq_list(text: str) -> Any:
    dense, experts = (int(part.split("*")[1]) for part in text.strip("()").split("+"))
    return [0] * dense + [1] * experts


# Values that are written otherwise: to Bridge's, and back.
WRITTEN: Mapping[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "cp-comm-type": (lambda kinds: kinds[0], lambda kind: list(kind) if isinstance(kind, (list, tuple)) else [kind]),
    "window-size": (
        lambda text: tuple(map(int, text.split(","))), lambda pair: ",".join(map(str, pair)) if pair else None,
    ),
    "window-attn-skip-freq": (int, lambda freq: freq),
    "moe-layer-freq": (_freq_list, _freq_text),
    **dict.fromkeys(
        ("exp-avg-dtype", "exp-avg-sq-dtype"),
        (lambda kind: Reference(DTYPES[kind]), lambda kind: {v: k for k, v in DTYPES.items()}.get(str(kind), str(kind))),
    ),
}  # fmt: skip


def to_bridge(options: Options) -> dict[str, Any]:
    """The fields that say what arguments of Megatron-LM say."""
    found: dict[str, Any] = {}
    for option, value in options.items():
        field = None if option in UNNAMED else field_of(option)
        if field:
            found[field] = (
                not value if option in INVERTED else WRITTEN[option][0](value) if option in WRITTEN else value
            )
    found |= {name: found.get(name, False) for name in SET_ANYWAY}
    found["optimizer.use_distributed_optimizer"] = found["ddp.use_distributed_optimizer"]
    found["model.cross_entropy_loss_fusion"] = found.get("model.cross_entropy_loss_fusion", False)
    found["dataset.seq_length"] = found["model.seq_length"]
    if "train-samples" in options:
        found["train.train_iters"] = max(round(options["train-samples"] / options["global-batch-size"]), 1)
    kind = next(name for name, said in ACTIVATIONS.items() if said.items() <= options.items())
    found |= {"model.activation_func": Reference(GATES[kind]), "model.gated_linear_unit": kind != "gelu"}
    dtype = Reference(DTYPES["bf16" if "bf16" in options else "fp16" if "fp16" in options else "fp32"])
    plain = {} if "bf16" in options or "fp16" in options else {"mixed_precision.fp32": True}
    return {**found, **plain, "mixed_precision.params_dtype": dtype, "mixed_precision.pipeline_dtype": dtype}


def to_megatron(fields: Options) -> dict[str, Any]:
    """The arguments of Megatron-LM that say what fields say; those that say nothing (None) are left out."""
    named = {} if fields.get("mixed_precision.fp32") else formats_of(fields.get("mixed_precision"))
    said = {
        **named,
        **{name: value for name, value in fields.items() if value is not None},
    }
    found: dict[str, Any] = {}
    for field, option in option_of().items():
        if field in said and option not in UNNAMED:
            value = said[field]
            value = not value if option in INVERTED else WRITTEN[option][1](value) if option in WRITTEN else value
            found |= {} if value is None or value is False else {option: value}
    length = said.get("model.seq_length", said.get("dataset.seq_length"))
    found |= {"seq-length": length, "max-position-embeddings": length} if length is not None else {}
    found |= {"group-query-attention": True} if "num-query-groups" in found else {}
    found |= {"cross-entropy-loss-fusion": True} if said.get("model.cross_entropy_loss_fusion", True) else {}
    gate = str(said.get("model.activation_func", "")).split(".")[-1]
    if said.get("model.gated_linear_unit", False):
        found |= {"quick-geglu": True} if gate == "quick_gelu" else {"swiglu": True}
    return found


def formats_of(precision: Any) -> dict[str, Any]:
    """The fields of a precision that has a name: of its text, or of a call of its function."""
    name = precision.name if isinstance(precision, Call) else str(precision or "")
    name = str(precision.values[0]) if isinstance(precision, Call) and precision.values else name
    kind, _, rest = name.replace("-", "_").removesuffix("_mixed").partition("_with_")
    if kind not in ("bf16", "fp16"):
        return {}
    found: dict[str, Any] = {f"mixed_precision.{kind}": True, "mixed_precision.grad_reduce_in_fp32": kind == "bf16"}
    if rest == "nvfp4":
        return {**found, "mixed_precision.fp4": "e2m1", "mixed_precision.fp4_recipe": "nvfp4"}
    formats = _FORMATS.get(rest)
    return {
        **found,
        **(dict(zip(("mixed_precision.fp8", "mixed_precision.fp8_recipe"), formats, strict=True)) if formats else {}),
    }
