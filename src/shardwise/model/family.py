"""A rule of a family of models: what it reads from a config.json, what it does not know, and how it is applied."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwise.errors import InputError
from shardwise.model.numerics_reader import NumericsRule
from shardwise.model.readers import SIZES, Config, MissingKey, Reader, shown


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyRule:
    """Properties of every model of a family: fields of the architecture, `fixed` or `read` from the config.

    `only` are the supported values of a key: with others the model has weights or operations that are not supported here.
    `tied` is whether the family ties its embeddings when the config does not say. `numerics`: how its config names the
    constants of its arithmetic.
    """

    fixed: Mapping[str, Any] = field(default_factory=dict)
    read: Mapping[str, Reader] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    tied: bool = False
    numerics: NumericsRule = field(default_factory=NumericsRule)


# Keys that stand for weights which most families lack: one that is set and that the family's rule does not ask for means
# a model that is not known.
WEIGHTY = (
    "num_local_experts", "num_experts", "n_routed_experts", "n_shared_experts", "num_shared_experts",
    "shared_expert_intermediate_size", "shared_intermediate_size", "moe_intermediate_size", "first_k_dense_replace",
    "mlp_only_layers", "moe_layer_freq", "q_lora_rank", "kv_lora_rank", "full_attention_interval",
    "linear_num_value_heads", "mamba_num_heads", "index_topk", "use_qk_norm", "qk_layernorm", "cross_attention_layers",
    "add_cross_attention",
)  # fmt: skip


def unknown_parts(config: Config, rule: FamilyRule) -> Iterator[str]:
    """Settings of a config that its family's rule does not support: values other than the known ones, and keys that imply
    weights."""
    for key, known in rule.only.items():
        found = config.first(key)
        if found is not None and found not in known:
            yield f"{key} = {shown(found)} (known: {', '.join(map(repr, known))})"
    yield from (f"{key} = {shown(config[key])}" for key in WEIGHTY if key not in config.asked and config.get(key))
    kinds = None if "layer_types" in config.asked else config.get("layer_types")
    if kinds and not (isinstance(kinds, list) and all(kind == "full_attention" for kind in kinds)):
        yield f"layer_types = {shown(kinds)}"


def read_fields(config: Config, rule: FamilyRule) -> dict[str, Any]:
    """The architecture's fields that a config gives. Raises `InputError` with every key that is missing."""
    found: dict[str, Any] = {}
    missing: list[str] = []
    for name, read in {**SIZES, **rule.read}.items():
        try:
            found[name] = read(config)
        except MissingKey as lacking:
            missing.append(str(lacking))
        except (TypeError, ValueError, OverflowError, AttributeError) as error:
            raise InputError(f"model: the config's values for {name} cannot be read: {error}") from None
    if missing:
        raise InputError(f"model: the config lacks {', '.join(dict.fromkeys(missing))}")
    return found
