"""Layers that differ in a config, read from its lists as kinds of layers and their pattern.

A `LayerList` gives a value for each layer ("sliding_attention", "dense") and the fields that each value stands for. Layers that
agree in the values of all lists are of one kind. Two lists need no pattern where they are regular: a window on all layers but
every n-th, and leading layers without experts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.model.architecture import Architecture
from shardwise.model.huggingface.field_readers import FieldReader, TrackedConfig, read_window
from shardwise.model.layer_pattern import KIND_FIELDS, compress_layers
from shardwise.values.input_texts import parse_integer

FULL, SLIDING, DENSE, SPARSE = "full_attention", "sliding_attention", "dense", "sparse"
MAX_LISTED_LAYERS = 10_000

ListReader = Callable[[TrackedConfig, int], Sequence[str]]
FieldValues = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LayerList:
    """A property of layers: its value for each, the fields of each value, and how it is said without a pattern, if it can be."""

    read: ListReader
    fields: Callable[[TrackedConfig, str], FieldValues]
    without_pattern: Callable[[TrackedConfig, Sequence[str]], FieldValues | None] = lambda config, values: None


def read_listed(key: str, default: ListReader, allowed: frozenset[str], names: Mapping[str, str]) -> ListReader:
    """Read a list of each layer's value, or what the family has without it. `names` are other spellings of values. A list may
    go on with the values of modules of multi-token prediction."""

    def read(config: TrackedConfig, num_layers: int) -> Sequence[str]:
        listed = config.first(key)
        values = default(config, num_layers) if listed is None else listed
        lengths = (num_layers, num_layers + (config.first("num_nextn_predict_layers", "num_mtp_layers") or 0))
        if not isinstance(values, (list, tuple)) or len(values) not in lengths:
            raise ValueError(f"{key} is not a list of a value for each of {num_layers} layers")
        values = [names.get(value, value) if isinstance(value, str) else value for value in values[:num_layers]]
        unknown = next((value for value in values if not isinstance(value, str) or value not in allowed), None)
        if unknown is not None:
            raise ValueError(f"{key} has {unknown!r}; of {', '.join(sorted(allowed))} some are known here")
        return values

    return read


def every_nth(value: str, default: str, interval: FieldReader) -> ListReader:
    """Return the list in which every n-th layer has a value; none has it where n is 0."""

    def read(config: TrackedConfig, num_layers: int) -> Sequence[str]:
        n = interval(config)
        if not isinstance(n, int) or isinstance(n, bool) or n < 0:
            raise ValueError(f"{n!r} is no interval of layers")
        return [value if n and (layer + 1) % n == 0 else default for layer in range(num_layers)]

    return read


def window_list(every: int) -> LayerList:
    """Return the list of layers with a sliding window: all but every n-th (0: all), where the config does not say it."""
    interval: FieldReader = lambda config: config.get("sliding_window_pattern") or every  # noqa: E731
    listed = read_listed("layer_types", every_nth(FULL, SLIDING, interval), frozenset({FULL, SLIDING}), {})

    def read(config: TrackedConfig, num_layers: int) -> Sequence[str]:
        values = listed(config, num_layers)
        return values if read_window(config) else [FULL] * num_layers

    def without_pattern(config: TrackedConfig, values: Sequence[str]) -> FieldValues | None:
        window, kinds = read_window(config), listed(config, len(values))
        if not config.get("layer_types"):
            return {"sliding_window": window, "global_every": interval(config)}
        n = list(kinds).index(FULL) + 1 if FULL in kinds else 0
        regular = [FULL if n and (layer + 1) % n == 0 else SLIDING for layer in range(len(kinds))]
        is_regular = window is None or regular == list(kinds)
        return {"sliding_window": window, "global_every": n} if is_regular else None

    def fields(config: TrackedConfig, value: str) -> FieldValues:
        return {"sliding_window": read_window(config) if value == SLIDING else None}

    return LayerList(read, fields, without_pattern)


def size_list(field: str, key: str) -> LayerList:
    """Return the list of layers with sizes of their own under a key, or with one size for all; a kind of layer is named for its
    field and size."""

    def read(config: TrackedConfig, num_layers: int) -> Sequence[str]:
        sizes = config.first(key)
        if sizes is None or (isinstance(sizes, int) and not isinstance(sizes, bool)):
            return [field] * num_layers
        if not isinstance(sizes, (list, tuple)) or len(sizes) != num_layers:
            raise ValueError(f"{key} is not a list of a size for each of {num_layers} layers")
        if not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes):
            raise ValueError(
                f"{key} has {next(size for size in sizes if not isinstance(size, int) or size < 1)!r}, no size"
            )
        return [f"{field}_{size}" for size in sizes]

    def fields(config: TrackedConfig, value: str) -> FieldValues:
        return {} if value == field else {field: parse_integer(value.rpartition("_")[2])}

    return LayerList(read, fields)


NO_EXPERTS: Mapping[str, Any] = {
    "num_experts": 0,
    "experts_per_token": 0,
    "shared_expert_width": 0,
    "shared_gate": False,
    "choice_bias": False,
}


def dense_list(read: ListReader, dense_width: FieldReader, changes: Mapping[str, Any]) -> LayerList:
    """Return the list of layers with experts and without; `changes` are further fields of those without."""

    def without_pattern(config: TrackedConfig, values: Sequence[str]) -> FieldValues | None:
        num_dense = list(values).index(SPARSE) if SPARSE in values else len(values)
        if changes or list(values) != [DENSE] * num_dense + [SPARSE] * (len(values) - num_dense):
            return None
        if num_dense == len(values):
            return fields(config, DENSE)
        return {"num_dense_layers": num_dense, "dense_d_ff": dense_width(config) if num_dense else 0}

    def fields(config: TrackedConfig, value: str) -> FieldValues:
        return {**NO_EXPERTS, "d_ff": dense_width(config), **changes} if value == DENSE else {}

    return LayerList(read, fields, without_pattern)


def arrange_layers(
    config: TrackedConfig, lists: Sequence[LayerList], fields: Mapping[str, Any], fixed: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """Return the fields of an architecture whose layers some lists describe, with a pattern where they differ."""
    num_layers = fields.get("num_layers")
    if not lists or not isinstance(num_layers, int) or not 1 <= num_layers <= MAX_LISTED_LAYERS:
        return dict(fields)  # the architecture names what is wrong with the number
    values = [layer_list.read(config, num_layers) for layer_list in lists]
    plain = [layer_list.without_pattern(config, listed) for layer_list, listed in zip(lists, values, strict=True)]
    varying = [list(listed) != [listed[0]] * num_layers for listed in values]
    arranged = dict(fields)
    if all(form is not None or not varies for form, varies in zip(plain, varying, strict=True)):
        for layer_list, listed, form in zip(lists, values, plain, strict=True):
            arranged |= layer_list.fields(config, listed[0]) if form is None else form
        return arranged
    layers = list(zip(*values, strict=True))
    settings = {}
    for kind in dict.fromkeys(layers):
        settings[kind] = dict(fields)
        for layer_list, value in zip(lists, kind, strict=True):
            settings[kind] |= layer_list.fields(config, value)
    return {**fields, **_name_kinds(layers, settings)}


def _name_kinds(
    layers: Sequence[tuple[str, ...]], settings: Mapping[tuple[str, ...], Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the fields of the base layer, which is the most frequent one with experts, and those in which kinds differ."""
    counts = Counter(layers)
    with_experts = [kind for kind in counts if settings[kind].get("num_experts")]
    base = max(with_experts or counts, key=lambda kind: counts[kind])
    names = {
        kind: "block" if kind == base else "_".join(v for v, b in zip(kind, base, strict=True) if v != b) for kind in counts
    }  # fmt: skip
    kinds = {
        names[kind]: {
            field: value
            for field in KIND_FIELDS
            if (value := _field_value(settings[kind], field)) != _field_value(settings[base], field)
        }
        for kind in counts
        if kind != base
    }
    same = [name for name, changes in kinds.items() if not changes]  # kinds that differ in values, and not in fields
    pattern = ["block" if names[kind] in same else names[kind] for kind in layers]
    kinds = {name: changes for name, changes in kinds.items() if changes}
    return {**settings[base], **({"layer_kinds": kinds, "layer_pattern": compress_layers(pattern)} if kinds else {})}


DEFAULTS: Mapping[str, Any] = {name: member.default for name, member in Architecture.__dataclass_fields__.items()}


def _field_value(fields: Mapping[str, Any], name: str) -> Any:
    return fields.get(name, DEFAULTS[name])
