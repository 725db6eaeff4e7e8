"""Readers of a Hugging Face `config.json`: small functions that take one field of an architecture from a config."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

SHOWN = 60  # half a line


class Config(Mapping[str, Any]):
    """A config that records which of its keys were read."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values_by_key = values
        self.asked: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return self.values_by_key[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_by_key)

    def __len__(self) -> int:
        return len(self.values_by_key)

    def first(self, *keys: str) -> Any:
        """The value under the first of several spellings that the config has."""
        return next((self[key] for key in keys if self.get(key) is not None), None)


def shown(value: Any) -> str:
    """A config's value as messages show it: at most `SHOWN` characters."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


class MissingKey(Exception):
    """A missing value of a config; the message names the keys under which it may be."""


Reader = Callable[[Config], Any]


def number(*keys: str) -> Reader:
    """The value under the first of some keys that the config has; the architecture refuses anything but a count."""

    def read(config: Config) -> Any:
        found = config.first(*keys)
        if found is None:
            raise MissingKey(" or ".join(keys))
        return found

    return read


def counted(*keys: str) -> Reader:
    """A count that the family always has."""

    def read(config: Config) -> Any:
        found = number(*keys)(config)
        if found == 0:
            raise ValueError(f"{keys[0]} is {found!r}; at least 1 is required")
        return found

    return read


def either(key: str, default: bool) -> Reader:
    """A boolean."""

    def read(config: Config) -> bool:
        found = config.first(key)
        if found not in (None, True, False):
            raise ValueError(f"{key} is {found!r}; true or false is required")
        return default if found is None else bool(found)

    return read


def biases(*, default: bool = False, **flags: str | bool) -> Reader:
    """Names of the projections with a bias: always, never, or as a key of the config says (`default` where it does not)."""

    def read(config: Config) -> tuple[str, ...]:
        return tuple(
            n for n, flag in flags.items() if (either(flag, default)(config) if isinstance(flag, str) else flag)
        )

    return read


def times(factor: Reader, size: Reader, *keys: str) -> Reader:
    """The value under a key, or if the config lacks it the product of two others."""

    def read(config: Config) -> Any:
        found, left, right = config.first(*keys), factor(config), size(config)
        if found is not None:
            return found
        return left * right if isinstance(left, int) and isinstance(right, int) else (left, right)

    return read


def four(config: Config) -> int:
    """The default width of an ungated MLP, in widths of the model."""
    return 4


def choice(values: Mapping[str, str], *keys: str) -> Reader:
    """The value that one of some words maps to."""

    def read(config: Config) -> str:
        found = number(*keys)(config)
        if found not in values:
            raise ValueError(f"{keys[0]} is {found!r}; one of {', '.join(values)} is known here")
        return values[found]

    return read


def window(config: Config) -> int | None:
    """The sliding window, where the config has one and uses it on some layer."""
    kinds, size = config.get("layer_types"), config.get("sliding_window")
    used = config.get("use_sliding_window", True) and (not kinds or "sliding_attention" in kinds)
    return int(size) if size and used else None


def global_every(default: int) -> Reader:
    """The interval of the layers with global attention."""

    def read(config: Config) -> int:
        kinds = config.get("layer_types")
        if not kinds:
            return int(config.get("sliding_window_pattern") or default)
        full, num_layers = kinds.count("full_attention"), number(*LAYERS)(config)
        # the first full layer says it; of a list in another order the count does
        tried = (kinds.index("full_attention") + 1, round(len(kinds) / full)) if full else (0,)
        every = next((n for n in tried if n and len(kinds) // n == full), tried[-1])
        if set(kinds) - {"full_attention", "sliding_attention"} or len(kinds) != num_layers:
            raise ValueError("layer_types is not a list of full_attention and sliding_attention for each layer")
        if full and len(kinds) // every != full:
            raise ValueError(f"layer_types has {full} full layers of {len(kinds)}; every n-th layer is known here")
        return every

    return read


def optional(key: str) -> Reader:
    """A size that is 0 where the config says null. A config without the key does not say, and families differ then."""

    def read(config: Config) -> Any:
        if key not in config:
            raise MissingKey(key)
        return config[key] or 0

    return read


LAYERS = ("num_hidden_layers", "n_layer", "n_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads")
WIDTH = number("hidden_size", "n_embd", "n_embed", "d_model")


def _head_dim(config: Config) -> Any:
    found, heads, width = config.first("head_dim"), number(*HEADS)(config), WIDTH(config)
    whole = isinstance(heads, int) and isinstance(width, int) and heads > 0
    return (
        found if found is not None else width // heads if whole else width
    )  # not a number: the architecture refuses it


# Sizes of every family, and their spellings in the order in which they are looked for. A model of any may have been trained with
# multi-token prediction; its modules go by DeepSeek-V3's name.
SIZES: Mapping[str, Reader] = {
    "num_layers": number(*LAYERS),
    "d_model": WIDTH,
    "d_ff": number("intermediate_size", "n_inner", "ffn_dim"),
    "num_heads": number(*HEADS),
    "num_kv_heads": number("num_key_value_heads", *HEADS),
    "head_dim": _head_dim,
    "vocab_size": number("vocab_size"),
    "num_predict_layers": lambda config: config.first("num_nextn_predict_layers", "num_mtp_layers") or 0,
}
