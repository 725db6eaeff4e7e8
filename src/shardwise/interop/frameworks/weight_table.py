"""The schema of a framework's weight tables: tensor names and shapes of a kind of model, and which models the framework computes.

One table is read both ways: it says how weights are written and how they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple

from shardwise.model.architecture import Architecture
from shardwise.model.decoder import LAYERS, PREDICT_BLOCK, PREDICTS
from shardwise.step.parameters import Parameter


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor's name, and its layout (`dim_patterns.py`); without one it is a vector of our dims in their order.

    `{layer}`, `{module}` (of multi-token prediction) and `{expert}` are their numbers: in the name, a tensor for each of them; in
    the layout, one tensor in which each has its place.
    """

    name: str
    layout: str = ""

    def behind(self, prefix: Stored) -> Stored:
        """The tensor of this name in a block of that one, whose layout goes before its own."""
        return Stored(prefix.name + self.name, ", ".join(filter(None, (prefix.layout, self.layout))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Naming:
    """Where a kind of model keeps its weights: `ends` are those of embedding and head, `block` those of a block. `routed` are
    those that a block with experts has elsewhere, `direct` those of latent attention whose queries come from no latent.

    What stands before the names of a block is `layer` in a layer and `module` in a module of multi-token prediction, whose own
    weights are `predict`. `copies` are tensors that hold again what another unit lends, by the kind of the unit that borrows;
    they are written, and not read. `balance_bias` is the bias of a router's choice, in a block, if it has one.
    """

    title: str
    ends: Mapping[str, Stored]
    block: Mapping[str, Stored]
    layer: Stored
    module: Stored | None = None
    routed: Mapping[str, Stored] = field(default_factory=dict)
    direct: Mapping[str, Stored] = field(default_factory=dict)
    predict: Mapping[str, Stored] = field(default_factory=dict)
    copies: Mapping[str, Mapping[str, Stored]] = field(default_factory=dict)
    balance_bias: Stored | None = None

    def stored(self, parameter: Parameter, architecture: Architecture) -> Stored | None:
        """Where it keeps a parameter, if anywhere."""
        if parameter.unit not in (*LAYERS, *PREDICTS):
            return self.ends.get(parameter.weight)
        if parameter.unit in PREDICTS and not parameter.weight.startswith(PREDICT_BLOCK):
            return self._in_block(parameter.unit, self.predict.get(parameter.weight))
        names = [self.block]
        if architecture.num_experts and parameter.unit != "dense_block":
            names.append(self.routed)
        if architecture.kv_lora_rank and not architecture.q_lora_rank:
            names.append(self.direct)
        found = [table[parameter.in_block] for table in names if parameter.in_block in table]
        return self._in_block(parameter.unit, found[-1] if found else None)

    def copy(self, unit: str, weight: str) -> Stored | None:
        """Where a unit of this kind has a copy of what it borrows, if anywhere."""
        found = self.copies.get(unit, {}).get(weight)
        return found if unit == "head" else self._in_block(unit, found)

    def bias(self, unit: str) -> Stored | None:
        """Where the bias of a router's choice is, if anywhere."""
        return self._in_block(unit, self.balance_bias)

    def _in_block(self, unit: str, stored: Stored | None) -> Stored | None:
        prefix = self.layer if unit in LAYERS else self.module
        return stored.behind(prefix) if stored and prefix else None


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
