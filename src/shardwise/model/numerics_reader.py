"""The constants of a model's arithmetic from a Hugging Face config.json, and what of it our arithmetic lacks.

What changes weights or operations is `model/families.py`'s. Source: the configuration classes of `transformers` 5.23, whose
defaults stand for keys that a config leaves out, and its modelling code.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shardwise.model.numerics import SIGMOID, SOFTMAX, Gating, Numerics
from shardwise.model.readers import shown
from shardwise.model.rotary_reader import RotaryRule, read_rotaries, score_factor

EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
# Names of activations in a config, by those of `Architecture.mlp`.
ACTIVATIONS: Mapping[str, tuple[str, ...]] = {
    "swiglu": ("silu", "swish"), "geglu": ("gelu_pytorch_tanh",), "gelu": ("gelu_pytorch_tanh", "gelu_new", "gelu_fast"),
    "relu": ("relu",),
    "clamped_swiglu": ("silu",),
}  # fmt: skip
ACTIVATION_KEYS = ("hidden_activation", "hidden_act", "activation_function", "activation")
# Keys that change values in a way that is not modelled, and the value with which they change none.
NEUTRAL: Mapping[str, Any] = {
    "embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0, "logit_scale": 1.0,
    "routed_scaling_factor": 1.0, "alibi": False, "clip_qkv": None, "no_rope_layers": None, "quantization_config": None,
    "use_bidirectional_attention": False, "scale_attn_by_inverse_layer_idx": False,
    "attn_logit_softcapping": None, "final_logit_softcapping": None, "topk_method": "greedy",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterRule:
    """A router with groups of experts: what it has where the config is silent, and how `topk_method` names that it limits its
    choice to groups, and that it does not."""

    scores: str
    votes: int
    limited: str
    free: str = ""
    groups: tuple[int, int] = (1, 1)  # n_group and topk_group
    scale: float = 1.0
    normalised: bool = True


# Source: DeepseekV2TopkRouter, DeepseekV3TopkRouter and Glm4MoeTopkRouter of transformers, and their configurations' defaults.
LIMITED = RouterRule(scores=SOFTMAX, votes=1, limited="group_limited_greedy", free="greedy", normalised=False)
SIGMOID_ROUTER = RouterRule(scores=SIGMOID, votes=2, limited="noaux_tc")
DEEPSEEK_V3 = replace(SIGMOID_ROUTER, groups=(8, 4), scale=2.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericsRule:
    """How a family spells its constants.

    `epsilon` is its default, `rotary` how it spells rotary angles (None: it has none). `gemma`: norms add one to their weight
    and the embedding is scaled by √D. `scaled_scores`: the config may cap scores and logits and scale scores.
    `multipliers`: it multiplies the embedding and, in place of 1/√H, the scores. `gates`: the key that says whether gates are
    normalised ("": they are). `router`: it has groups of experts (None: the softmax chooses among all). `lacks`: what every model
    of the family has and our arithmetic does not.
    """

    epsilon: float = 1e-6
    rotary: RotaryRule | None = field(default_factory=RotaryRule)
    gemma: bool = False
    scaled_scores: bool = False
    multipliers: bool = False
    gates: str = ""
    router: RouterRule | None = None
    lacks: tuple[str, ...] = ()


def read_numerics(config: Mapping[str, Any], rule: NumericsRule, *, d_model: int, head_dim: int, mlp: str) -> Numerics:
    """The constants of a config, by its family's keys. Raises `InputError` for rotary angles that cannot be read.

    Settings of a config that our arithmetic lacks are named in `Numerics.unread`: planning goes on without them.

    >>> config = {"rope_theta": 500000.0, "rms_norm_eps": 1e-5}
    >>> read_numerics(config, NumericsRule(), d_model=8, head_dim=4, mlp="swiglu").rotary.base
    500000.0
    """
    rotary, local, unread = read_rotaries(config, rule.rotary)
    return Numerics(
        norm_epsilon=float(next((config[key] for key in EPSILONS if config.get(key) is not None), rule.epsilon)),
        norm_offset=float(rule.gemma), rotary=rotary, local_rotary=local,
        embedding_scale=_embedding_scale(config, rule, d_model), attention_scale=_attention_scale(config, rule, head_dim),
        attention_cap=config.get("attn_logit_softcapping") if rule.scaled_scores else None,
        logit_cap=config.get("final_logit_softcapping") if rule.scaled_scores else None,
        normalised_gates=_normalised(config, rule), gating=_gating(config, rule.router),
        unread=(*unread, *_unread(config, rule, mlp)),
    )  # fmt: skip


def _normalised(config: Mapping[str, Any], rule: NumericsRule) -> bool:
    if rule.router:
        found = config.get("norm_topk_prob")
        return rule.router.normalised if found is None else bool(found)
    return bool(config.get(rule.gates, False)) if rule.gates else True


def _gating(config: Mapping[str, Any], rule: RouterRule | None) -> Gating:
    """A router's constants, from the keys of DeepSeek's configs."""
    if rule is None:
        return Gating()
    scale = config.get("routed_scaling_factor")
    found = Gating(
        scores=config.get("scoring_func") or rule.scores, scale=rule.scale if scale is None else float(scale)
    )
    if config.get("topk_method", rule.free or rule.limited) != rule.limited:
        return found
    groups, chosen = (config.get(key) or own for key, own in zip(("n_group", "topk_group"), rule.groups, strict=True))
    return found if groups == 1 else replace(found, groups=groups, chosen_groups=chosen, votes=rule.votes)


def _embedding_scale(config: Mapping[str, Any], rule: NumericsRule, d_model: int) -> float:
    if rule.multipliers:
        return float(config.get("embedding_multiplier") or 1.0)
    return math.sqrt(d_model) if rule.gemma else 1.0


def _attention_scale(config: Mapping[str, Any], rule: NumericsRule, head_dim: int) -> float | None:
    """The factor on attention scores; None: 1/√H."""
    if rule.multipliers:
        scale = float(config.get("attention_multiplier") or 1.0)
        return None if math.isclose(scale, head_dim**-0.5) else scale
    factor = score_factor(config, rule.rotary)
    if factor != 1.0:
        return factor / math.sqrt(head_dim)
    scalar = config.get("query_pre_attn_scalar") if rule.scaled_scores else None
    return None if scalar in (None, head_dim) else float(scalar**-0.5)


def _unread(config: Mapping[str, Any], rule: NumericsRule, mlp: str) -> Iterator[str]:
    """Settings that change values and are not modelled, with their values in the config."""
    yield from rule.lacks
    read = ("attn_logit_softcapping", "final_logit_softcapping") if rule.scaled_scores else ()
    read = (*read, "embedding_multiplier") if rule.multipliers else read
    if rule.router:
        known = config.get("topk_method") in (None, rule.router.limited, rule.router.free)
        read = (*read, "routed_scaling_factor", *(["topk_method"] if known else []))
    for key, neutral in NEUTRAL.items():
        found = config.get(key, neutral)
        if key not in read and found not in (neutral, None):
            yield f"{key} = {shown(found)}"
    named = next((config[key] for key in ACTIVATION_KEYS if config.get(key) is not None), None)
    if named is not None and named not in ACTIVATIONS[mlp]:
        yield f"the activation {named!r} (modelled: {' or '.join(ACTIVATIONS[mlp])})"
