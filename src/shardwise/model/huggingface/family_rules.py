"""Model families as Hugging Face's `config.json` describes them: one table of TOML for each `model_type`.

A `FamilyRule` says which fields of the architecture every model of the family has, which keys of the config give the others,
and how the family spells constants that change values but neither weights nor operations
(`model/huggingface/numerics_reader.py`). The tables are in the folder `families`; `parse_rule` turns one into a rule. Sources:
the modelling code of `transformers` for each family; a test compares the parameter counts.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from importlib import resources
from typing import Any

from shardwise.model.architecture import Architecture
from shardwise.model.huggingface.block_configs import BLOCK_LIST
from shardwise.model.huggingface.field_readers import (
    NUM_HEADS_KEYS,
    FieldReader,
    TrackedConfig,
    read_biases,
    read_choice,
    read_d_model,
    read_default_mlp_ratio,
    read_first,
    read_flag,
    read_optional,
    read_or_zero,
    read_positive,
    read_product,
)
from shardwise.model.huggingface.key_sharing import GATE_LIST, key_sharing_list
from shardwise.model.huggingface.layer_lists import (
    DENSE,
    SPARSE,
    LayerList,
    ListReader,
    dense_list,
    every_nth,
    read_listed,
    size_list,
    window_list,
)
from shardwise.model.huggingface.numerics_reader import ROUTERS, NumericsRule, RotaryRule
from shardwise.model.huggingface.shared_blocks import shared_block_list
from shardwise.model.huggingface.uncommon_readers import UNCOMMON_LISTS, UNCOMMON_READERS
from shardwise.model.structure import BIAS_PROJECTIONS

EXPERTS_PER_TOKEN_KEYS = ("num_experts_per_tok", "experts_per_token", "moe_topk", "moe_k", "num_experts_per_token")


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyRule:
    """Properties of every model of a family: fields of the architecture, `fixed` or `read` from the config.

    `only` are the supported values of a key: with others the model has weights or operations that are not supported here.
    `names` are the family's spellings of common keys, `defaults` the values of keys that a config may leave out. `tied` is
    whether the family ties its embeddings when the config does not say. `numerics`: how its config names the constants of its
    arithmetic.
    """

    fixed: Mapping[str, Any] = field(default_factory=dict)
    read: Mapping[str, FieldReader] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    tied: bool = False
    layers: tuple[LayerList, ...] = ()
    numerics: NumericsRule = field(default_factory=NumericsRule)


RULE_PARTS = (
    "only",
    "names",
    "defaults",
    "tied",
    "numerics",
    "window",
    "layer_types",
    "layer_sizes",
    "block_configs",
    "position_types",
    "expert_types",
    "key_sharing_types",
    "listed_gates",
    "shared_blocks",
)  # names in a family's table that are no field
FIELD_NAMES = frozenset(field.name for field in fields(Architecture)) - {*RULE_PARTS}


def parse_rule(table: Mapping[str, Any], tables: Mapping[str, Mapping[str, Any]]) -> FamilyRule:
    """Return the rule of a family's table; `tables` holds the family that it is `like`.

    A field of the architecture is a constant, or a table of a reader: its `key` or `keys` in the config with a `default`, a
    `flag`, `words` that stand for values, or the name of an uncommon `reader`. `bias`, `experts`, `window` and `latent` stand for
    several fields. Raises `ValueError` for a name that is neither.

    >>> rule = parse_rule({"qk_norm": True, "bias": {"qkv": "attention_bias"}}, {})
    >>> rule.fixed, sorted(rule.read)
    ({'qk_norm': True}, ['bias'])
    """
    table = _with_base(table, tables)
    unknown = sorted(set(table) - FIELD_NAMES - GROUPS.keys() - set(RULE_PARTS))
    if unknown:
        raise ValueError(f"a family has no {', '.join(unknown)}")
    readers: dict[str, FieldReader] = {}
    for group, value in table.items():
        readers |= GROUPS[group](value) if group in GROUPS else {}
    fixed: dict[str, Any] = {}
    for name in FIELD_NAMES & (table.keys() - GROUPS.keys()):
        if isinstance(table[name], dict):
            readers[name] = _parse_reader(table[name])
        else:
            fixed[name] = table[name]
    return FamilyRule(
        fixed=fixed, read={name: reader for name, reader in readers.items() if name not in fixed},
        only={key: tuple(values) for key, values in table.get("only", {}).items()}, names=table.get("names", {}),
        defaults=table.get("defaults", {}), layers=tuple(_parse_lists(table)), tied=table.get("tied", False),
        numerics=_parse_numerics(table.get("numerics", {})),
    )  # fmt: skip


MERGED = (
    "only",
    "names",
    "defaults",
    "numerics",
    "experts",
    "layer_types",
)  # tables that add to those of the family that one is like


def _with_base(table: Mapping[str, Any], tables: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return a table with what it does not say taken from the family that it is like; tables in it are merged."""
    changes = {name: value for name, value in table.items() if name != "like"}
    if "like" not in table:
        return changes
    base = _with_base(tables[table["like"]], tables)
    merged = {
        name: {**base[name], **changes[name]} for name in MERGED if name in base and name in changes
    }  # fmt: skip
    return {**base, **changes, **merged}


def _parse_reader(table: Mapping[str, Any]) -> FieldReader:
    if "reader" in table:
        return UNCOMMON_READERS[table["reader"]]
    if "flag" in table:
        return read_flag(table["flag"], table.get("default", False))
    keys = table.get("keys") or (table["key"],)
    if "words" in table:
        return read_choice(table["words"], *keys, default=table.get("default"))
    return read_optional(table["default"], *keys) if "default" in table else read_first(*keys)


def _parse_biases(table: Mapping[str, Any]) -> dict[str, FieldReader]:
    flags = {name: flag for name, flag in table.items() if name != "default"}
    if not flags.keys() <= {*BIAS_PROJECTIONS}:
        raise ValueError(f"bias names {', '.join(flags)}; of {', '.join(BIAS_PROJECTIONS)} some are required")
    return {"bias": read_biases(default=table.get("default", False), **flags)}


def _parse_lists(table: Mapping[str, Any]) -> Iterator[LayerList]:
    """Yield the lists of what differs between a family's layers: windows, its own types of layers, experts."""
    if "window" in table:
        yield window_list(table["window"])
    if table.get("block_configs"):
        yield BLOCK_LIST
    for name in ("layer_types", "position_types", "expert_types"):
        if name in table:
            yield _parse_layer_types(table[name])
    if "experts" in table and "expert_types" not in table:
        experts = table["experts"]
        width = read_first(*_as_keys(experts.get("dense_width", "intermediate_size")))
        yield dense_list(_parse_dense_layers(experts), width, experts.get("dense", {}))
    if table.get("listed_gates"):
        yield GATE_LIST
    if "key_sharing_types" in table:
        yield key_sharing_list(**table["key_sharing_types"])
    if "shared_blocks" in table:
        yield shared_block_list(**table["shared_blocks"])
    for name, key in table.get("layer_sizes", {}).items():
        yield size_list(name, key)


LAYER_LIST_PARTS = (
    "key",
    "list",
    "every",
    "at",
    "other",
    "last",
    "names",
)  # names in a table of layer_types that are no type


def _parse_layer_types(table: Mapping[str, Any]) -> LayerList:
    """Return the list of a family's types of layers, each a table of fields beside those that all layers have.

    `key` is that of the list, `list` the reader of one that the config does not spell out, `every` the interval of the layers of
    the type `at` where there is no list, whose others are of the type `other`; `last` is the type of the last layer, whatever the
    list says, `names` are other spellings of types.
    """
    types = {name: layer_fields for name, layer_fields in table.items() if name not in LAYER_LIST_PARTS}
    first = next(iter(types))
    if "list" in table:
        default: ListReader = UNCOMMON_LISTS[table["list"]]
    else:
        default = every_nth(table.get("at", first), table.get("other", first), _parse_interval(table.get("every", 0)))

    def read_fields(config: TrackedConfig, value: str) -> Mapping[str, Any]:
        return {
            name: _parse_reader(reader)(config) if isinstance(reader, dict) else reader
            for name, reader in types[value].items()
        }

    listed = read_listed(table.get("key", "layer_types"), default, frozenset(types), table.get("names", {}))
    interval = _parse_interval(table.get("every", 0))

    def read(config: TrackedConfig, num_layers: int) -> Sequence[str]:
        interval(config)  # a list goes before it
        values = listed(config, num_layers)
        return [*values[:-1], table["last"]] if "last" in table else values

    return LayerList(read, read_fields)


def _parse_interval(interval: Any) -> FieldReader:
    return _parse_reader(interval) if isinstance(interval, dict) else read_optional(interval)


def _parse_dense_layers(experts: Mapping[str, Any]) -> ListReader:
    """Return the reader of which layers have experts: from a list of each, a family's own keys, or a number of leading ones."""
    if "list" in experts:
        default = UNCOMMON_LISTS[experts["list"]]
    elif "dense_layers" in experts:
        default = _leading_dense(*_as_keys(experts["dense_layers"]))
    else:
        default = every_nth(SPARSE, SPARSE, read_optional(0))
    listed = read_listed("mlp_layer_types", default, frozenset({DENSE, SPARSE}), experts.get("names", {}))

    def read(config: TrackedConfig, num_layers: int) -> Sequence[str]:
        values = listed(config, num_layers)
        keys = _as_keys(experts.get("dense_layers", ()))
        if config.first(*keys) is not None and list(default(config, num_layers)) != list(values):
            raise ValueError(f"mlp_layer_types and {keys[0]} say different layers; the same are required")
        return values

    return read


def _leading_dense(*keys: str) -> ListReader:
    def read(config: TrackedConfig, num_layers: int) -> list[str]:
        stated = config.first(*keys)
        count = read_or_zero(keys[0])(config) if stated is None else stated
        if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= num_layers:
            raise ValueError(f"{keys[0]} is {count!r}; a number of the {num_layers} layers is required")
        return [DENSE] * count + [SPARSE] * (num_layers - count)

    return read


def _parse_experts(table: Mapping[str, Any]) -> dict[str, FieldReader]:
    """Return readers of the number of experts, those of a token, and their width; `shared_count` shared experts of that width
    are one of their joint width."""
    width = read_first(*_as_keys(table.get("width", "moe_intermediate_size")))
    readers: dict[str, FieldReader] = {
        "num_experts": read_positive(*_as_keys(table["count"])),
        "experts_per_token": read_first(*_as_keys(table.get("per_token", EXPERTS_PER_TOKEN_KEYS))), "d_ff": width,
    }  # fmt: skip
    if "shared_count" in table:
        readers["shared_expert_width"] = read_product(width, read_or_zero(table["shared_count"]))
    if "shared_width" in table:
        readers["shared_expert_width"] = read_or_zero(table["shared_width"])
    return readers


def _parse_latent(is_latent: bool) -> dict[str, FieldReader]:
    """Return readers of multi-head latent attention."""
    plain, rotary = read_first("qk_nope_head_dim"), read_first("qk_rope_head_dim")
    return {
        "head_dim": lambda config: _add_sizes(plain(config), rotary(config)),
        "num_kv_heads": read_first(*NUM_HEADS_KEYS), "q_lora_rank": _read_query_rank,
        "kv_lora_rank": read_first("kv_lora_rank"), "rope_head_dim": rotary, "v_head_dim": read_first("v_head_dim"),
    }  # fmt: skip


def _read_query_rank(config: TrackedConfig) -> Any:
    """Return the rank of queries' latent, 0 for null. Its code takes 0 for a latent without elements."""
    if config.get("q_lora_rank") == 0:
        raise ValueError("q_lora_rank is 0; null is required for queries without a latent")
    return read_or_zero("q_lora_rank")(config)


def _parse_ratio(key: str) -> dict[str, FieldReader]:
    """Return the reader of an MLP's width that is four times that of the model where the config does not say it."""
    return {"d_ff": read_product(read_default_mlp_ratio, read_d_model, *([key] if key else []))}


# Names in a family's table that stand for several fields, and for those that are no constant.
GROUPS: Mapping[str, Callable[[Any], dict[str, FieldReader]]] = {
    "bias": _parse_biases, "experts": _parse_experts, "latent": _parse_latent,
    "wide_mlp": _parse_ratio,
}  # fmt: skip


def _as_keys(keys: Any) -> tuple[str, ...]:
    return (keys,) if isinstance(keys, str) else tuple(keys)


def _add_sizes(left: Any, right: Any) -> Any:
    return left + right if isinstance(left, int) and isinstance(right, int) else (left, right)


def _parse_numerics(table: Mapping[str, Any]) -> NumericsRule:
    values = dict(table)
    if "rotary" in values:
        values["rotary"] = RotaryRule(**values["rotary"]) if values["rotary"] else None
    if "router" in values:
        values["router"] = ROUTERS[values["router"]]
    return NumericsRule(**values | ({"unsupported": tuple(values["unsupported"])} if "unsupported" in values else {}))


def _read_tables() -> Iterator[tuple[str, Mapping[str, Any]]]:
    for file in sorted(
        resources.files("shardwise.model.huggingface").joinpath("families").iterdir(), key=lambda f: f.name
    ):
        if file.name.endswith(".toml"):
            yield from tomllib.loads(file.read_text(encoding="utf-8")).items()


@lru_cache(maxsize=1)
def _all_tables() -> Mapping[str, Mapping[str, Any]]:
    return dict(_read_tables())


UNSUPPORTED = "unsupported"  # the table of what is refused, and why


@lru_cache(maxsize=1)
def family_tables() -> Mapping[str, Mapping[str, Any]]:
    """Return the families' tables by `model_type`, as their files have them."""
    return {name: table for name, table in _all_tables().items() if name != UNSUPPORTED}


def unsupported_families() -> Mapping[str, str]:
    """Return what the blocks of each family have that no field describes, by `model_type`."""
    return _all_tables()[UNSUPPORTED]


class FamilyRules(Mapping[str, FamilyRule]):
    """The rules of all families by `model_type`, each parsed when it is asked for."""

    def __getitem__(self, model_type: str) -> FamilyRule:
        return _parse_family(model_type)

    def __contains__(self, model_type: object) -> bool:
        return isinstance(model_type, str) and model_type in family_tables()

    def __iter__(self) -> Iterator[str]:
        return iter(family_tables())

    def __len__(self) -> int:
        return len(family_tables())


@lru_cache(maxsize=1024)
def _parse_family(model_type: str) -> FamilyRule:
    return parse_rule(family_tables()[model_type], family_tables())


FAMILIES = FamilyRules()
