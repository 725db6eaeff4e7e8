"""Which models a framework's code computes: what of them may be any, what is one of some values, and all else at its default."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple

from shardwise.model.architecture import Architecture

# What every framework has in any size, and what says nothing of the arithmetic.
SIZES = frozenset(
    {"name", "source", "nominal_num_params", "num_layers", "d_model", "d_ff", "num_heads", "num_kv_heads", "head_dim",
     "vocab_size", "max_positions", "numerics.norm_epsilon", "numerics.rotary.base"}
)  # fmt: skip


class Condition(NamedTuple):
    """What is asked of several values together, in words."""

    holds: Callable[[Architecture], bool]
    required: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """The models of a kind: fields (those of `numerics` behind a dot) that may be any, those that are one of some values, and
    what is asked beyond them. Any other is at its default."""

    any_of: frozenset[str] = frozenset()
    values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    conditions: tuple[Condition, ...] = ()

    def problems(self, architecture: Architecture) -> Iterator[str]:
        """Why a model is none of them, one reason after the other."""
        for name, value, default in _facts(architecture, ""):
            if name in SIZES | self.any_of or value in (allowed := self.values.get(name, (default,))):
                continue
            yield f"{name} is {value!r}; {' or '.join(map(repr, allowed))} is required"
        yield from (one.required for one in self.conditions if not one.holds(architecture))


def _facts(value: Any, prefix: str) -> Iterator[tuple[str, Any, Any]]:
    """Fields of a value and of the values in it: name, value, default (None for one that has none)."""
    for one in fields(value):
        found, name = getattr(value, one.name), f"{prefix}{one.name}"
        if is_dataclass(found) and one.default is not None:
            yield from _facts(found, f"{name}.")
        else:
            yield name, found, None if one.default is MISSING else one.default


def scaling(architecture: Architecture) -> str:
    """How frequencies of rotary embeddings are divided: none of them, all of them (linear), or the slow ones (llama3)."""
    rotary = architecture.numerics.rotary
    if rotary.original_positions:
        return "llama3"
    return "none" if rotary.factor == 1.0 else "linear"


ROTARY = frozenset(f"numerics.rotary.{name}" for name in ("factor", "original_positions", "low", "high"))


def scaled(*kinds: str) -> Condition:
    """That frequencies are divided in one of these ways."""
    return Condition(
        lambda architecture: scaling(architecture) in kinds, f"rotary scaling of kind {' or '.join(kinds)} is required"
    )
