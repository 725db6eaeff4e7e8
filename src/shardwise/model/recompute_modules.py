"""Modules of a block that Megatron-Core runs again one by one (--recompute-modules): what of a block each discards.

A policy of them is their names joined by "+", in the order of the table: `layernorm+moe_act`. What none of them discards is saved
as under `none`. Source: Megatron-Core 0.20.0 (d98e8a64), transformer/transformer_config.py (recompute_modules),
transformer_layer.py, attention.py, multi_latent_attention.py, moe/moe_layer.py, moe/experts.py, models/gpt/gpt_layer_specs.py.

Assumes Transformer Engine's layers: a norm in front of one matrix is a part of that matrix's layer, whose normalised input is
saved; a norm stands alone, so that `layernorm` discards it, in front of experts and of latent attention. Differs: Megatron-Core
runs `mlp`, `moe` and `shared_experts` again to their last product, which no gradient reads and which is not counted here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.model.program import Part, Program, Role, Tensor

if TYPE_CHECKING:
    from shardwise.model.architecture import Architecture

# What of latent attention is made before or after what its up-projections make.
OUTSIDE_UP = ("q_latent", "kv_latent", "k_rotary_flat", "attended", "lse", "attention_out")


@dataclass(frozen=True, slots=True)
class Module:
    """`discards`: whether a tensor of a block is recomputed; `of`: whether a model has anything that is."""

    summary: str
    discards: Callable[[Program, Tensor], bool]
    of: Callable[[Architecture], bool]


def _is_routed(block: Program) -> bool:
    return any(tensor.role is Role.ROUTED for tensor in block.tensors.values())


def _is_latent(block: Program) -> bool:
    return any(name.endswith("kv_latent") for name in block.tensors)


def _of_norm(name: str, tensor: Tensor) -> bool:
    """Whether a norm in front of attention or of the MLP makes a tensor."""
    return tensor.part is Part.NORM and f"{name}_norm." in tensor.name


def _norm_alone(block: Program, tensor: Tensor) -> bool:
    return (_is_latent(block) and _of_norm("attention", tensor)) or (_is_routed(block) and _of_norm("mlp", tensor))


def _up_projected(block: Program, tensor: Tensor) -> bool:
    return _is_latent(block) and tensor.part is Part.ATTENTION and not tensor.name.endswith(OUTSIDE_UP)


def _of_dense_mlp(block: Program, tensor: Tensor) -> bool:
    return not _is_routed(block) and (tensor.part is Part.MLP or _of_norm("mlp", tensor))


def _has_experts(model: Architecture) -> bool:
    return model.num_experts > 0


# In the order of their names in a policy.
MODULES: dict[str, Module] = {
    "core_attn": Module(
        "attention between its products: of a fused kernel it frees the sums of softmax alone",
        lambda block, tensor: tensor.name.endswith("lse"), lambda model: True,
    ),
    "layernorm": Module(
        "norms in front of experts and of latent attention", _norm_alone,
        lambda model: _has_experts(model) or model.kv_lora_rank > 0,
    ),
    "moe_act": Module(
        "activations of experts", lambda block, tensor: tensor.name.endswith("experts_act"), _has_experts,
    ),
    "mla_up_proj": Module(
        "what latent attention makes of its latents", _up_projected, lambda model: model.kv_lora_rank > 0,
    ),
    "mlp": Module(
        "MLPs of dense layers, with the norm in front of them", _of_dense_mlp,
        lambda model: not model.num_experts or model.num_dense_layers > 0,
    ),
    "moe": Module(
        "routers, experts and shared experts, with the exchange of tokens",
        lambda block, tensor: _is_routed(block) and tensor.part is Part.MLP, _has_experts,
    ),
    "shared_experts": Module(
        "shared experts", lambda block, tensor: tensor.name.rpartition(".")[2].startswith("shared_"),
        lambda model: model.shared_expert_width > 0,
    ),
}  # fmt: skip
# Joint policies that a search tries: from the modules that cost least time for what they free, each with those before it. `moe`
# exchanges tokens once more, and `core_attn` frees nothing of fused attention: both are for those who ask.
LADDER = (("layernorm", "moe_act"), ("mla_up_proj",), ("mlp", "shared_experts"))


def modules_in(policy: str) -> tuple[str, ...]:
    """The modules of a policy; none where it is not one of modules.

    >>> modules_in("layernorm+moe_act"), modules_in("moe_act+layernorm"), modules_in("full")
    (('layernorm', 'moe_act'), (), ())
    """
    named = tuple(policy.split("+"))
    return named if named == tuple(name for name in MODULES if name in named) else ()


def joined(modules: Iterable[str]) -> str:
    """The policy of some modules, in the order of the table; "none" of none.

    >>> joined({"moe_act", "layernorm"}), joined(())
    ('layernorm+moe_act', 'none')
    """
    named = set(modules)
    return "+".join(name for name in MODULES if name in named) or "none"
