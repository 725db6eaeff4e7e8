"""Layers of a model as a pattern: the kinds of layers beside the base layer, and which kind each layer is.

The base layer has the fields of the `Architecture` itself. A further kind has a name and the fields in which it differs. A
pattern names the kind of one layer after the other and is repeated until every layer has one: `("sliding*5", "block")` is five
layers of the kind `sliding` and one base layer, again and again.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, groupby
from typing import Any

from shardwise.values import InputError, did_you_mean, parse_count

BASE_LAYER = "block"  # the name of the base layer in patterns, and of its unit
DENSE_LAYER = "dense_block"  # the kind that `num_dense_layers` stands for
# Units of a model that are no layers: every other unit is a kind of layer.
EMBEDDING, HEAD = "embedding", "head"  # also the names of their matrices
OTHER_UNITS = (EMBEDDING, "inner_predict", "predict", HEAD, "carry", "untied")
REPEAT_MARK = "*"
_KIND_NAME = re.compile(r"[a-z][a-z0-9_]*")
# Fields of an architecture that a kind of layer may set: those of a block. All others are the model's.
KIND_FIELDS = (
    "mixer", "feed_forward", "d_ff", "num_heads", "num_kv_heads", "head_dim", "mlp", "positions", "bias", "qk_norm",
    "qk_norm_over", "value_norm", "values_from_keys", "inner_norms", "sinks", "pre_norms", "post_norms", "parallel",
    "separate_norms", "shared_gate", "sliding_window", "num_experts", "experts_per_token", "shared_expert_width",
    "q_lora_rank", "kv_lora_rank", "rope_head_dim", "v_head_dim", "attention_gate", "index_heads", "index_head_dim",
    "index_topk", "index_block", "shared_keys", "output_rank",
    "compress_window", "overlapping_windows", "hashed_experts", "expert_scales", "expert_latent_dim", "recurrence",
    "attention_gate_function", "attention_gate_module", "pre_norms_over", "post_norms_over", "rotary_key_norm", "choice_bias",
    "norm_gate_rank", "norm_gates_over", "differential", "window_kind", "key_sharing", "sparse_activation", "shared_block",
    "weights_of", "adapted_parts",
)  # fmt: skip


class FrozenFields(Mapping[str, Any]):
    """A mapping of names to values that can be hashed; mappings inside are frozen too, and lists become tuples.

    >>> kinds = FrozenFields({"sliding": {"bias": ["qkv"]}})
    >>> kinds["sliding"]["bias"], hash(kinds) == hash(FrozenFields({"sliding": {"bias": ("qkv",)}}))
    (('qkv',), True)
    """

    __slots__ = ("_items",)

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._items = {name: _frozen(value) for name, value in fields.items()}

    def __getitem__(self, name: str) -> Any:
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)


def _frozen(value: Any) -> Any:
    if isinstance(value, Mapping):
        return FrozenFields(value)
    return tuple(map(_frozen, value)) if isinstance(value, (list, tuple)) else value


NO_KINDS = FrozenFields({})


def is_layer(unit: str) -> bool:
    """Return whether a unit is a kind of layer."""
    return unit not in OTHER_UNITS


def pattern_problems(kinds: Mapping[str, Mapping[str, Any]], pattern: Sequence[str], num_layers: int) -> list[str]:
    """Return what is wrong with the names of kinds, with the names of their fields, and with a pattern of them."""
    problems = [
        f"layer_kinds has {name!r}; a name in small letters is required, other than {', '.join(_RESERVED)}"
        for name in kinds
        if not _KIND_NAME.fullmatch(name) or name in _RESERVED
    ]
    problems += [
        f"layer_kinds.{name} has {field!r}{did_you_mean(field, KIND_FIELDS)}; one of {', '.join(KIND_FIELDS)} is required"
        for name, fields in kinds.items()
        for field in fields
        if field not in KIND_FIELDS
    ]
    if not kinds and not pattern:
        return problems
    try:
        layers = expand_pattern(tuple(pattern), num_layers)
    except InputError as error:
        return [*problems, *error.problems]
    kind_names = (BASE_LAYER, *kinds)
    problems += [
        f"layer_pattern has {name!r}{did_you_mean(name, kind_names)}; one of {', '.join(kind_names)} is required"
        for name in dict.fromkeys(layers)
        if name not in kind_names
    ]
    problems += [
        f"layer_pattern has no {name!r} among its {num_layers} layers; each kind of layer is required there"
        for name in kind_names
        if name not in layers
    ]
    return problems


_RESERVED = (BASE_LAYER, DENSE_LAYER, *OTHER_UNITS)


@lru_cache(maxsize=256)
def expand_pattern(pattern: tuple[str, ...], num_layers: int) -> tuple[str, ...]:
    """Return the kind of each layer. Raises `InputError` for a pattern without kinds or with a repeat that is not a number.

    >>> expand_pattern(("sliding*2", "block"), 7)
    ('sliding', 'sliding', 'block', 'sliding', 'sliding', 'block', 'sliding')
    """
    period: list[str] = []
    for entry in pattern:
        name, mark, times = entry.partition(REPEAT_MARK)
        count = parse_count(times, label=f"layer_pattern: {entry!r}") if mark else 1
        if not name or not 1 <= count <= num_layers:
            raise InputError(
                f"layer_pattern has {entry!r}; a kind of layer is required, such as block, or block*3 for three of "
                f"{num_layers} layers"
            )
        period += [name] * count
    if not 1 <= len(period) <= num_layers:
        raise InputError(
            f"layer_pattern names {len(period)} layers of {num_layers}; at least one and at most all are required"
        )
    repeated = chain.from_iterable(period for _ in range(0, num_layers, len(period)))
    return tuple(name for name, _ in zip(repeated, range(num_layers), strict=False))


def compress_layers(layers: Sequence[str]) -> tuple[str, ...]:
    """Return the shortest pattern of some layers: the least period, with runs of a kind counted.

    >>> compress_layers(["a", "a", "b", "a", "a", "b", "a"])
    ('a*2', 'b')
    """
    num_layers = len(layers)
    period = next(n for n in range(1, num_layers + 1) if all(layers[i] == layers[i - n] for i in range(n, num_layers)))
    runs = ((name, sum(1 for _ in run)) for name, run in groupby(layers[:period]))
    return tuple(f"{name}{REPEAT_MARK}{count}" if count > 1 else name for name, count in runs)


@lru_cache(maxsize=256)
def list_layers(pattern: tuple[str, ...], num_layers: int, num_dense_layers: int) -> tuple[str, ...]:
    """Return the unit of each layer of a pattern, or without one of leading dense layers and base layers."""
    if pattern:
        return expand_pattern(pattern, num_layers)
    return (DENSE_LAYER,) * num_dense_layers + (BASE_LAYER,) * (num_layers - num_dense_layers)


@lru_cache(maxsize=256)
def count_layers(layers: tuple[str, ...]) -> Mapping[str, int]:
    """Return how many layers each unit is: kinds in the order in which they first come, then the base layer."""
    counts = Counter(layers)
    return {unit: counts[unit] for unit in sorted(counts, key=lambda unit: unit == BASE_LAYER)}


@lru_cache(maxsize=256)
def count_before(layers: tuple[str, ...]) -> tuple[Mapping[str, int], ...]:
    """Return how many layers each unit is before each layer, and last of all of them."""
    counts = [dict.fromkeys(count_layers(layers), 0)]
    for name in layers:
        counts.append({**counts[-1], name: counts[-1][name] + 1})
    return tuple(counts)


def describe_layers(
    layers: Sequence[Mapping[str, Any]], names: Sequence[str], base: str | None = None
) -> dict[str, Any]:
    """Return the fields of an architecture whose layers have these fields, one mapping and one name of a kind for each layer.

    All layers give the same fields, and layers of one name equal ones. The base layer is the kind named `base`: by default one
    with experts if any layer has them, and of those the one with the most layers. Without a second kind there is no pattern.

    >>> full, sliding = {"num_kv_heads": 4, "sliding_window": None}, {"num_kv_heads": 8, "sliding_window": 1024}
    >>> described = describe_layers([sliding, sliding, full] * 4, ["sliding", "sliding", "full"] * 4, base="full")
    >>> described["num_kv_heads"], described["layer_kinds"], described["layer_pattern"]
    (4, {'sliding': {'num_kv_heads': 8, 'sliding_window': 1024}}, ('sliding*2', 'block'))
    """
    fields_by_name = dict(zip(names, layers, strict=True))
    assert all(fields_by_name[name] == fields for name, fields in zip(names, layers, strict=True)), (
        "one kind, one layer"
    )
    counts = Counter(names)
    base = base or max(fields_by_name, key=lambda name: (bool(fields_by_name[name].get("num_experts")), counts[name]))
    base_fields = dict(fields_by_name.pop(base))
    if not fields_by_name:
        return base_fields
    kinds = {
        name: {field: value for field, value in fields.items() if base_fields[field] != value}
        for name, fields in fields_by_name.items()
    }
    pattern = compress_layers([BASE_LAYER if name == base else name for name in names])
    return {**base_fields, "layer_kinds": kinds, "layer_pattern": pattern}
