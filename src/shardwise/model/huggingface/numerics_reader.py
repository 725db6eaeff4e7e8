"""Read the constants of a model's arithmetic from a `config.json`: norm epsilons, rotary angles, scales, router gates.

`read_numerics` returns a `Numerics`; settings that our arithmetic does not have are named in its `unread`. Settings that
change weights or operations are read by `family_rules`. Sources: the configuration classes of `transformers` 5.23, whose
defaults stand for keys that a config leaves out, its `modeling_rope_utils.py`, and its modelling code of each family.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shardwise.model.huggingface.field_readers import read_boolean, shorten
from shardwise.model.numerics import (
    MAX_CONSTANT,
    RAMP_OVER_INDEX,
    SIGMOID,
    SOFTMAX,
    SQRT_SOFTPLUS,
    Gating,
    Numerics,
    Rotary,
    yarn_magnitude,
)
from shardwise.values import FileMessages, InputError, require_number, short_repr

EPSILON_KEYS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
# Names of activations in a config, by those of `Architecture.mlp`.
ACTIVATIONS: Mapping[str, tuple[str, ...]] = {
    "swiglu": ("silu", "swish"), "geglu": ("gelu_pytorch_tanh",), "gelu": ("gelu_pytorch_tanh", "gelu_new", "gelu_fast"),
    "relu": ("relu",), "relu2": ("relu2",), "gated_relu2": ("relu2",), "clamped_swiglu": ("silu", "swigluoai"),
    "limited_swiglu": ("silu",),
    "xielu": ("xielu",),
}  # fmt: skip
ACTIVATION_KEYS = ("hidden_activation", "hidden_act", "activation_function", "activation")
# Keys that change values in a way that is not modelled, and the value with which they change none.
NEUTRAL_VALUES: Mapping[str, Any] = {
    "embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0, "logit_scale": 1.0,
    "routed_scaling_factor": 1.0, "alibi": False, "clip_qkv": None, "no_rope_layers": None, "quantization_config": None,
    "use_bidirectional_attention": False, "scale_attn_by_inverse_layer_idx": False,
    "attn_logit_softcapping": None, "final_logit_softcapping": None, "topk_method": "greedy", "mup_enabled": False,
    "attention_value_scale": 1.0, "output_logit_soft_cap": None, "moe_router_logit_softcapping": 0.0,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterRule:
    """A router with groups of experts: its constants where the config is silent.

    `limited` is the value of `topk_method` with which a token may take experts of few groups only, `free` that with which it
    may take any. `groups` are the defaults of n_group and topk_group.
    """

    scores: str
    votes: int
    limited: str
    free: str = ""
    groups: tuple[int, int] = (1, 1)  # n_group and topk_group
    scale: float = 1.0
    normalised: bool = True


# Source: DeepseekV2TopkRouter, DeepseekV3TopkRouter and Glm4MoeTopkRouter of transformers, and their configurations' defaults.
DEEPSEEK_V2_ROUTER = RouterRule(
    scores=SOFTMAX, votes=1, limited="group_limited_greedy", free="greedy", normalised=False
)
SIGMOID_ROUTER = RouterRule(scores=SIGMOID, votes=2, limited="noaux_tc")
DEEPSEEK_V3_ROUTER = replace(SIGMOID_ROUTER, groups=(8, 4), scale=2.5)
DEEPSEEK_V4_ROUTER = replace(SIGMOID_ROUTER, scores=SQRT_SOFTPLUS)
SCORE_WORDS: Mapping[str, str] = {"sqrtsoftplus": SQRT_SOFTPLUS}  # spellings of scores
ROUTERS = {
    "sqrt_softplus": DEEPSEEK_V4_ROUTER,
    "deepseek_v2": DEEPSEEK_V2_ROUTER,
    "deepseek_v3": DEEPSEEK_V3_ROUTER,
    "sigmoid": SIGMOID_ROUTER,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryRule:
    """Spelling of rotary angles in a family's config.

    `theta` is the default of their base, `local_theta` that of layers with a window, where they have angles of their own.
    `part` is the default of the share of a head's width that turns (None: the family's code turns all of it, whatever a config
    says). `width_key` is the key under which configs may say how many elements of a head turn instead, `width` its default (None:
    `part`). `scaled`: the family multiplies scores by the square of YaRN's `mscale_all_dim`.
    """

    theta: float = 10_000.0
    local_theta: float | None = None
    part: float | None = None
    width_key: str = ""
    width: int | None = None
    scaled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericsRule:
    """Spelling of constants in a family's config.

    `epsilon` is its default, `rotary` how it spells rotary angles (None: it has none). `gemma`: norms add one to their weight
    and the embedding is scaled by √D. `norm_offset` is added to the weights of norms in place of that, and all scores are
    multiplied by `attention_scale` in place of 1/√H, or divided by the root of `scored_part` of H. `scaled_scores`: the config
    may cap and scale scores.
    `layers_without_positions`: its kinds of layers say which have none. `multipliers`: it multiplies the embedding and, in
    place of 1/√H, the scores. `gates`: the key that says whether gates are normalised ("": they are). `router`: it has groups
    of experts (None: the softmax chooses among all). `unsupported`: what every model of the family has and our arithmetic
    does not.
    """

    epsilon: float = 1e-6
    rotary: RotaryRule | None = field(default_factory=RotaryRule)
    gemma: bool = False
    norm_offset: float | None = None
    attention_scale: float | None = None
    scored_part: float = 1.0
    scaled_scores: bool = False
    multipliers: bool = False
    layers_without_positions: bool = False
    gates: str = ""
    router: RouterRule | None = None
    unsupported: tuple[str, ...] = ()


def read_numerics(config: Mapping[str, Any], rule: NumericsRule, *, d_model: int, head_dim: int, mlp: str) -> Numerics:
    """Return the constants of a config, by its family's keys. Raises `InputError` for rotary angles that cannot be read.

    Settings of a config that our arithmetic lacks are named in `Numerics.unread`: planning goes on without them.

    >>> config = {"rope_theta": 500000.0, "rms_norm_eps": 1e-5}
    >>> read_numerics(config, NumericsRule(), d_model=8, head_dim=4, mlp="swiglu").rotary.base
    500000.0
    """
    rotary, local_rotary, unread = read_rotaries(_share_of_head(config, rule.rotary, head_dim), rule.rotary)
    return Numerics(
        norm_epsilon=next(
            (_read_positive(config, key) for key in EPSILON_KEYS if config.get(key) is not None), rule.epsilon
        ),
        norm_offset=float(rule.gemma) if rule.norm_offset is None else rule.norm_offset, rotary=rotary, local_rotary=local_rotary,
        embedding_scale=_read_embedding_scale(config, rule, d_model),
        attention_scale=_read_attention_scale(config, rule, head_dim),
        attention_cap=_read_cap(config, "attn_logit_softcapping") if rule.scaled_scores else None,
        logit_cap=_read_cap(config, "final_logit_softcapping") if rule.scaled_scores else None,
        normalised_gates=_normalises_gates(config, rule), gating=_read_gating(config, rule.router),
        unread=tuple(dict.fromkeys((*unread, *_unsupported_values(config, rule, mlp)))),
    )  # fmt: skip


def _read_positive(config: Mapping[str, Any], key: str) -> float:
    return float(require_number(config[key], key, FileMessages("model: the config's ")))


def _read_cap(config: Mapping[str, Any], key: str) -> float | None:
    return None if config.get(key) is None else _read_positive(config, key)


def _normalises_gates(config: Mapping[str, Any], rule: NumericsRule) -> bool:
    if rule.router:
        is_stated = config.get("norm_topk_prob") is not None
        return read_boolean(config, "norm_topk_prob", False) if is_stated else rule.router.normalised
    return read_boolean(config, rule.gates, False) if rule.gates else True


def _read_gating(config: Mapping[str, Any], rule: RouterRule | None) -> Gating:
    """Return a router's constants, from the keys of DeepSeek's configs."""
    if rule is None:
        return Gating()
    scale = _read_cap(config, "routed_scaling_factor")
    scores = config.get("scoring_func") or rule.scores
    gating = Gating(scores=SCORE_WORDS.get(scores, scores), scale=rule.scale if scale is None else scale)
    if config.get("topk_method", rule.free or rule.limited) != rule.limited:
        return gating
    groups, chosen = (
        int(require_number(config.get(key) or default, key, FileMessages("model: the config's "), is_integer=True))
        for key, default in zip(("n_group", "topk_group"), rule.groups, strict=True)
    )
    return gating if groups == 1 else replace(gating, groups=groups, chosen_groups=chosen, votes=rule.votes)


def _read_embedding_scale(config: Mapping[str, Any], rule: NumericsRule, d_model: int) -> float:
    if rule.multipliers:
        return _read_positive(config, "embedding_multiplier") if config.get("embedding_multiplier") else 1.0
    return math.sqrt(d_model) if rule.gemma else 1.0


def _read_attention_scale(config: Mapping[str, Any], rule: NumericsRule, head_dim: int) -> float | None:
    """Return the factor on attention scores; None: 1/√H."""
    if rule.attention_scale is not None:
        return rule.attention_scale
    if rule.multipliers:
        scale = _read_positive(config, "attention_multiplier") if config.get("attention_multiplier") else 1.0
        return None if math.isclose(scale, head_dim**-0.5) else scale
    if rule.scored_part != 1.0:
        return float((rule.scored_part * head_dim) ** -0.5)
    factor = yarn_score_factor(config, rule.rotary)
    if factor != 1.0:
        return factor / math.sqrt(head_dim)
    scalar = _read_cap(config, "query_pre_attn_scalar") if rule.scaled_scores else None
    return None if scalar in (None, head_dim) else float(scalar**-0.5)


def _unsupported_values(config: Mapping[str, Any], rule: NumericsRule, mlp: str) -> Iterator[str]:
    """Yield settings that change values and are not modelled, with their values in the config."""
    yield from rule.unsupported
    supported_keys = ("attn_logit_softcapping", "final_logit_softcapping") if rule.scaled_scores else ()
    supported_keys = (*supported_keys, "embedding_multiplier") if rule.multipliers else supported_keys
    supported_keys = (*supported_keys, "no_rope_layers") if rule.layers_without_positions else supported_keys
    if rule.router:
        is_known_method = config.get("topk_method") in (None, rule.router.limited, rule.router.free)
        supported_keys = (*supported_keys, "routed_scaling_factor", *(["topk_method"] if is_known_method else []))
    for key, neutral in NEUTRAL_VALUES.items():
        setting = config.get(key, neutral)
        if key not in supported_keys and setting not in (neutral, None):
            yield f"{key} = {shorten(setting)}"
    activation = next((config[key] for key in ACTIVATION_KEYS if config.get(key) is not None), None)
    if activation is not None and activation not in ACTIVATIONS[mlp]:
        yield f"the activation {activation!r} (modelled: {' or '.join(ACTIVATIONS[mlp])})"


FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"
PART_KEY = "partial_rotary_factor"
ROTARY_KINDS = ("default", "linear", "llama3", "yarn")
YARN_BETA_SLOW, YARN_BETA_FAST = 1.0, 32.0  # α and β (Peng et al. 2023, 3.2), as in `_compute_yarn_parameters`


def read_rotaries(config: Mapping[str, Any], rule: RotaryRule | None) -> tuple[Rotary, Rotary | None, tuple[str, ...]]:
    """Return the angles of all layers, those of layers with a window where theirs differ, and the settings not
    modelled.

    >>> read_rotaries({"rope_theta": 500000.0}, RotaryRule())[0].base
    500000.0
    """
    if rule is None:
        return Rotary(), None, ()
    parameters = _read_table(config, "rope_parameters")
    legacy = _legacy_parameters(config, rule)
    by_kind = {
        kind: _read_table(parameters, kind) for kind in (FULL_ATTENTION, SLIDING_ATTENTION) if parameters.get(kind)
    }
    if rule.local_theta is not None:
        local_defaults = {"rope_theta": config.get("rope_local_base_freq") or rule.local_theta}
        angles = by_kind.get(FULL_ATTENTION) or legacy, by_kind.get(SLIDING_ATTENTION) or local_defaults
    elif by_kind:
        angles = {**legacy, **by_kind.get(FULL_ATTENTION, {})}, {**legacy, **by_kind.get(SLIDING_ATTENTION, {})}
    else:
        rotary, unread = _read_rotary({**legacy, **parameters}, config, rule)
        return rotary, None, unread
    (rotary, unread), (local_rotary, local_unread) = (_read_rotary(part, config, rule) for part in angles)
    has_both = rule.local_theta is not None or local_rotary != rotary
    return rotary, local_rotary if has_both else None, (*unread, *local_unread)


def _share_of_head(config: Mapping[str, Any], rule: RotaryRule | None, head_dim: int) -> Mapping[str, Any]:
    """Return a config that says which share of a head turns, where it or its family says how many elements do."""
    if rule is None or not rule.width_key or config.get(PART_KEY) is not None:
        return config
    width = config.get(rule.width_key, rule.width)
    if width is None:
        return config
    number = require_number(width, rule.width_key, FileMessages("model: the config's "), is_integer=True)
    if not 0 < number <= head_dim:
        raise InputError(
            f"model: the config's {rule.width_key} is {number}; a number of a head's {head_dim} elements is required, from 1 on"
        )
    return {**config, PART_KEY: number / head_dim}


def yarn_score_factor(config: Mapping[str, Any], rule: RotaryRule | None) -> float:
    """Return the factor of a family with YaRN's angles on 1/√H: the square of the magnitude of `mscale_all_dim`."""
    if rule is None or not rule.scaled:
        return 1.0
    parameters = _legacy_parameters(config, rule) | _read_table(config, "rope_parameters")
    if _rope_type(parameters) == "default" or not parameters.get("mscale_all_dim"):
        return 1.0
    return yarn_magnitude(_read_number(parameters, "factor"), _read_number(parameters, "mscale_all_dim")) ** 2


def _legacy_parameters(config: Mapping[str, Any], rule: RotaryRule) -> dict[str, Any]:
    """Return the parameters under the keys of older configs: `rope_theta` and `rope_scaling`."""
    part = next((config[key] for key in (PART_KEY, "rotary_pct") if config.get(key) is not None), rule.part)
    named = {} if part is None else {PART_KEY: part}
    return {"rope_theta": config.get("rope_theta") or rule.theta, **named, **_read_table(config, "rope_scaling")}


def _read_table(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    table = config.get(key) or {}
    if not isinstance(table, dict):
        raise InputError(f"model: the config's {key} is {shorten(table)}; an object is required")
    return table


def _rope_type(parameters: Mapping[str, Any]) -> Any:
    return parameters.get("rope_type", parameters.get("type", "default"))


def _read_rotary(
    parameters: Mapping[str, Any], config: Mapping[str, Any], rule: RotaryRule
) -> tuple[Rotary, tuple[str, ...]]:
    part = _read_number({PART_KEY: 1.0, **parameters}, PART_KEY)
    rotary, unread = _read_angles(parameters, config)
    if rule.part is not None:
        return replace(rotary, part=part), unread
    return rotary, (*((f"rotary angles on {part:g} of a head's width",) if part != 1.0 else ()), *unread)


def _read_angles(parameters: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[Rotary, tuple[str, ...]]:
    kind, base = _rope_type(parameters), _read_number(parameters, "rope_theta")
    if kind not in ROTARY_KINDS:
        return Rotary(base=base), (f"rotary angles of type {kind!r}",)
    if kind == "default":
        return Rotary(base=base), ()
    factor = _read_number(parameters, "factor")
    if kind == "linear":
        return Rotary(base=base, factor=factor), ()
    return (_read_llama3 if kind == "llama3" else _read_yarn)(parameters, config, base, factor), ()


def _read_llama3(parameters: Mapping[str, Any], config: Mapping[str, Any], base: float, factor: float) -> Rotary:
    low, high = (_read_number(parameters, f"{name}_freq_factor") for name in ("low", "high"))
    rows = int(_read_number(parameters, "original_max_position_embeddings"))
    return Rotary(base=base, factor=factor, original_positions=rows, low=low, high=high)


def _read_yarn(parameters: Mapping[str, Any], config: Mapping[str, Any], base: float, factor: float) -> Rotary:
    """Return YaRN's angles, for the config's number of positions where it lacks the number that the model was trained on."""
    rows = parameters if parameters.get("original_max_position_embeddings") else {
        "original_max_position_embeddings": config.get("max_position_embeddings")
    }  # fmt: skip
    low, high = parameters.get("beta_slow") or YARN_BETA_SLOW, parameters.get("beta_fast") or YARN_BETA_FAST
    return Rotary(
        base=base, factor=factor, original_positions=int(_read_number(rows, "original_max_position_embeddings")),
        low=_read_number({"beta_slow": low}, "beta_slow"), high=_read_number({"beta_fast": high}, "beta_fast"),
        ramp=RAMP_OVER_INDEX,
        rounded=read_boolean(parameters, "truncate", True), amplitude=_read_amplitude(parameters, factor),
    )  # fmt: skip


def _read_amplitude(parameters: Mapping[str, Any], factor: float) -> float:
    if parameters.get("attention_factor") is not None:
        return _read_number(parameters, "attention_factor")
    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        numerator, denominator = (
            yarn_magnitude(factor, _read_number(parameters, key)) for key in ("mscale", "mscale_all_dim")
        )
        return numerator / denominator
    return yarn_magnitude(factor)


def _read_number(parameters: Mapping[str, Any], key: str) -> float:
    value = parameters.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < MAX_CONSTANT:
        raise InputError(
            f"model: the config's rotary embeddings have {key} = {short_repr(value)}; a number above 0 is required"
        )
    return float(value)
