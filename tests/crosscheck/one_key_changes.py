"""Configs with one key changed: each is read with the count of the model that `transformers` builds, or is refused.

Run as a script with a number of changes and a seed, it prints every change that is read otherwise:
`python tests/crosscheck/one_key_changes.py 300 1`.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from crosscheck.decoders import REQUIRED_KEYS, build_meta_model, read_decoders, text_params

from shardwise.model.huggingface.config import parse_config
from shardwise.model.parameters_and_flops import num_params
from shardwise.values.errors import InputError

# Keys of every config that say nothing of the model, or whose value decides which class is built.
SKIPPED_KEYS = frozenset(
    {"model_type", "architectures", "transformers_version", "dtype", "id2label", "label2id", "_name_or_path"}
)
DERIVED_KEYS = ("layer_types", "mlp_layer_types")  # lists that the library fills in by itself


@dataclass(frozen=True, slots=True)
class OneKeyChange:
    """A family's default config with one key changed."""

    model_type: str
    key: str
    value: Any
    keeps_lists: bool

    def config(self) -> dict[str, Any]:
        defaults = {**default_config(self.model_type), self.key: self.value}
        return {
            key: value
            for key, value in defaults.items()
            if self.keeps_lists or key not in DERIVED_KEYS or key == self.key
        }


@lru_cache(maxsize=256)
def default_config(model_type: str) -> Mapping[str, Any]:
    return build_meta_model(model_type, REQUIRED_KEYS.get(model_type, {}))[0]


def change_value(value: Any, rng: random.Random) -> Any:
    """Return another value of the same kind; of None any."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice([0, 1, 2, value + 1, value * 2, max(value // 2, 1), None])
    if isinstance(value, float):
        return rng.choice([value * 2, 0.0, None])
    if isinstance(value, list) and value:
        return rng.choice([value[1:], value[::-1], [value[0]] * len(value), [], None])
    if value is None:
        return rng.choice([1, 2, 4, True, "auto"])
    return rng.choice([None, "gelu", "other"])


def draw_changes(count: int, seed: int) -> Iterator[OneKeyChange]:
    rng = random.Random(seed)
    families = [row.model_type for row in read_decoders() if row.state == "exact"]
    for _ in range(count):
        model_type = rng.choice(families)
        config = default_config(model_type)
        key = rng.choice(sorted(config.keys() - SKIPPED_KEYS))
        yield OneKeyChange(model_type, key, change_value(config[key], rng), rng.random() < 0.5)


def judge(change: OneKeyChange) -> str:
    """Return "exact", "refused", "unbuildable" (`transformers` builds no such model), or how the two counts differ."""
    config = change.config()
    try:
        theirs = text_params(
            build_meta_model(change.model_type, {k: v for k, v in config.items() if k != "model_type"})[1]
        )
    except Exception:  # whatever its code raises for a value that it cannot use
        return "unbuildable"
    try:
        ours = num_params(parse_config(config))
    except InputError:
        return "refused"
    return "exact" if ours == theirs else f"{ours} parameters here, {theirs} in transformers"


def main(count: int, seed: int) -> None:
    states: Counter[str] = Counter()
    for change in draw_changes(count, seed):
        state = judge(change)
        known = state in ("exact", "refused", "unbuildable")
        states[state if known else "different"] += 1
        if not known:
            print(change, state)
    print(dict(states))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
