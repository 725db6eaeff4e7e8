"""Readers of a Hugging Face `config.json`: small functions that take one field of an architecture from a `TrackedConfig`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from shardwise.values import InputError, short_repr

MAX_SHOWN_CHARS = 60  # half a line


class TrackedConfig(Mapping[str, Any]):
    """A config that records which of its keys were read, so that others can be refused.

    `names` are spellings of common keys in this config: a value is found under either.
    """

    def __init__(self, config: Mapping[str, Any], names: Mapping[str, str] = MappingProxyType({})) -> None:
        self.values_by_key = config
        self.names = names
        self.read_keys: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        spelling = self.names.get(key, key)
        spelling = spelling if self.values_by_key.get(spelling) is not None else key
        self.read_keys |= {key, spelling}
        return self.values_by_key[spelling]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_by_key)

    def __len__(self) -> int:
        return len(self.values_by_key)

    def first(self, *keys: str) -> Any:
        """Return the value under the first of several spellings that the config has."""
        return next((self[key] for key in keys if self.get(key) is not None), None)


def shorten(value: Any) -> str:
    """Return a config's value as messages print it: at most `MAX_SHOWN_CHARS` characters."""
    return short_repr(value, MAX_SHOWN_CHARS)


class MissingKey(Exception):
    """A missing value of a config; the message names the keys under which it may be."""


FieldReader = Callable[[TrackedConfig], Any]


def read_first(*keys: str) -> FieldReader:
    """Read the value under the first of some keys that the config has; the architecture refuses anything but a count."""

    def read(config: TrackedConfig) -> Any:
        setting = config.first(*keys)
        if setting is None:
            raise MissingKey(" or ".join(keys))
        return setting

    return read


def read_optional(default: Any, *keys: str) -> FieldReader:
    """Read the value under the first of some keys that the config has, or return the default."""

    def read(config: TrackedConfig) -> Any:
        setting = config.first(*keys)
        return default if setting is None else setting

    return read


def read_positive(*keys: str) -> FieldReader:
    """Read a count that the family always has."""

    def read(config: TrackedConfig) -> Any:
        count = read_first(*keys)(config)
        if count == 0:
            raise ValueError(f"{keys[0]} is {count!r}; at least 1 is required")
        return count

    return read


def read_flag(key: str, default: bool) -> FieldReader:
    """Read a boolean."""

    def read(config: TrackedConfig) -> bool:
        setting = config.first(key)
        if setting not in (None, True, False):
            raise ValueError(f"{key} is {setting!r}; true or false is required")
        return default if setting is None else bool(setting)

    return read


def read_boolean(config: Mapping[str, Any], key: str, default: bool) -> bool:
    """Return the boolean under a key: `default` without the key, False for null. Raises `InputError` for anything else."""
    setting = config.get(key, default)
    if setting not in (None, True, False):
        raise InputError(f"model: {key} is {shorten(setting)}; true or false is required")
    return bool(setting)


def read_biases(*, default: bool = False, **flags: str | bool) -> FieldReader:
    """Read the names of the projections with a bias: always, never, or as a key of the config says (`default` without the
    key)."""

    def read(config: TrackedConfig) -> tuple[str, ...]:
        return tuple(
            n for n, flag in flags.items() if (read_flag(flag, default)(config) if isinstance(flag, str) else flag)
        )

    return read


def read_product(factor: FieldReader, size: FieldReader, *keys: str) -> FieldReader:
    """Read the value under a key, or if the config lacks it return the product of two others."""

    def read(config: TrackedConfig) -> Any:
        stated, left, right = config.first(*keys), factor(config), size(config)
        if stated is not None:
            return stated
        return left * right if isinstance(left, int) and isinstance(right, int) else (left, right)

    return read


def read_default_mlp_ratio(config: TrackedConfig) -> int:
    """Return the default width of an ungated MLP, in widths of the model."""
    return 4


def read_choice(value_by_word: Mapping[str, str], *keys: str, default: str | None = None) -> FieldReader:
    """Read a word and return what it maps to."""

    def read(config: TrackedConfig) -> str:
        word = (read_first(*keys) if default is None else read_optional(default, *keys))(config)
        if word not in value_by_word:
            raise ValueError(f"{keys[0]} is {word!r}; one of {', '.join(value_by_word)} is known here")
        return value_by_word[word]

    return read


def read_window(config: TrackedConfig) -> int | None:
    """Read the sliding window, where the config has one and uses it on some layer."""
    kinds, size = config.get("layer_types"), config.get("sliding_window")
    used = config.get("use_sliding_window", True) and (not kinds or "sliding_attention" in kinds)
    return int(size) if size and used else None


def read_or_zero(key: str) -> FieldReader:
    """Read a size that is 0 where the config has null. A config without the key is refused, since families differ then."""

    def read(config: TrackedConfig) -> Any:
        if key not in config:
            raise MissingKey(key)
        return config[key] or 0

    return read


NUM_LAYERS_KEYS = ("num_hidden_layers", "n_layer", "n_layers")
NUM_HEADS_KEYS = ("num_attention_heads", "n_head", "n_heads")
read_d_model = read_first("hidden_size", "n_embd", "n_embed", "d_model")


def _read_head_dim(config: TrackedConfig) -> Any:
    stated, heads, width = config.first("head_dim"), read_first(*NUM_HEADS_KEYS)(config), read_d_model(config)
    are_counts = isinstance(heads, int) and isinstance(width, int) and heads > 0
    if stated is not None:
        return stated
    return width // heads if are_counts else width  # not a number: the architecture refuses it


# Sizes of every family, and their spellings in the order in which they are looked for. A model of any may have been trained with
# multi-token prediction; its modules go by DeepSeek-V3's name.
SIZE_READERS: Mapping[str, FieldReader] = {
    "num_layers": read_first(*NUM_LAYERS_KEYS),
    "d_model": read_d_model,
    "d_ff": read_first("intermediate_size", "n_inner", "ffn_dim"),
    "num_heads": read_first(*NUM_HEADS_KEYS),
    "num_kv_heads": read_first("num_key_value_heads", *NUM_HEADS_KEYS),
    "head_dim": _read_head_dim,
    "vocab_size": read_first("vocab_size"),
    "num_predict_layers": lambda config: config.first("num_nextn_predict_layers", "num_mtp_layers") or 0,
}
