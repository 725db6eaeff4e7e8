"""The schema of a framework's weight tables: tensor names and shapes of a kind of model, and which models the framework computes.

One table is read both ways: it says how weights are written and how they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple

from shardwise.model.architecture import Architecture
from shardwise.model.decoder import LAYER_UNITS, MTP_BLOCK_PREFIX, MTP_UNITS
from shardwise.step.parameters import Parameter


@dataclass(frozen=True, slots=True)
class TensorPattern:
    """A tensor's name, and the pattern of its dims (`dim_patterns.py`); without one it is a vector of our dims in their order.

    `{layer}`, `{module}` (of multi-token prediction) and `{expert}` are their numbers: in the name, a tensor for each of them; in
    the dims, one tensor in which each has its place.
    """

    name: str
    dims: str = ""

    def with_prefix(self, prefix: TensorPattern) -> TensorPattern:
        """The tensor of this name in a block of that one, whose dims go before its own."""
        return TensorPattern(prefix.name + self.name, ", ".join(filter(None, (prefix.dims, self.dims))))


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightTable:
    """Where a kind of model keeps its weights: `ends` are those of embedding and head, `block` those of a block. `routed` are
    those that a block with experts has elsewhere, `direct` those of latent attention whose queries come from no latent.

    What stands before the names of a block is `layer` in a layer and `module` in a module of multi-token prediction, whose own
    weights are `predict`. `copies` are tensors that hold again what another unit lends, by the kind of the unit that borrows;
    they are written, and not read. `balance_bias` is the bias of a router's choice, in a block, if it has one.
    """

    title: str
    ends: Mapping[str, TensorPattern]
    block: Mapping[str, TensorPattern]
    layer: TensorPattern
    module: TensorPattern | None = None
    routed: Mapping[str, TensorPattern] = field(default_factory=dict)
    direct: Mapping[str, TensorPattern] = field(default_factory=dict)
    predict: Mapping[str, TensorPattern] = field(default_factory=dict)
    copies: Mapping[str, Mapping[str, TensorPattern]] = field(default_factory=dict)
    balance_bias: TensorPattern | None = None

    def tensor_of(self, parameter: Parameter, architecture: Architecture) -> TensorPattern | None:
        """Where it keeps a parameter, if anywhere."""
        if parameter.unit not in (*LAYER_UNITS, *MTP_UNITS):
            return self.ends.get(parameter.weight)
        if parameter.unit in MTP_UNITS and not parameter.weight.startswith(MTP_BLOCK_PREFIX):
            return self._in_block(parameter.unit, self.predict.get(parameter.weight))
        names = [self.block]
        if architecture.num_experts and parameter.unit != "dense_block":
            names.append(self.routed)
        if architecture.kv_lora_rank and not architecture.q_lora_rank:
            names.append(self.direct)
        found = [table[parameter.name_in_block] for table in names if parameter.name_in_block in table]
        return self._in_block(parameter.unit, found[-1] if found else None)

    def copy_of(self, unit: str, weight: str) -> TensorPattern | None:
        """Where a unit of this kind has a copy of what it borrows, if anywhere."""
        found = self.copies.get(unit, {}).get(weight)
        return found if unit == "head" else self._in_block(unit, found)

    def bias_of(self, unit: str) -> TensorPattern | None:
        """Where the bias of a router's choice is, if anywhere."""
        return self._in_block(unit, self.balance_bias)

    def _in_block(self, unit: str, stored: TensorPattern | None) -> TensorPattern | None:
        prefix = self.layer if unit in LAYER_UNITS else self.module
        return stored.with_prefix(prefix) if stored and prefix else None


# What every framework has in any size, and what says nothing of the arithmetic.
SIZE_FIELDS = frozenset(
    {"name", "source", "nominal_num_params", "num_layers", "d_model", "d_ff", "num_heads", "num_kv_heads", "head_dim",
     "vocab_size", "max_positions", "numerics.norm_epsilon", "numerics.rotary.base"}
)  # fmt: skip


class ModelCondition(NamedTuple):
    """What is asked of several values together, in words."""

    holds: Callable[[Architecture], bool]
    required: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SupportedModels:
    """The models of a kind: fields (those of `numerics` behind a dot) that may be any, those that are one of some values, and
    what is asked beyond them. Any other is at its default."""

    any_of: frozenset[str] = frozenset()
    values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    conditions: tuple[ModelCondition, ...] = ()

    def problems(self, architecture: Architecture) -> Iterator[str]:
        """Why a model is none of them, one reason after the other."""
        for name, value, default in _field_values(architecture, ""):
            if name in SIZE_FIELDS | self.any_of or value in (allowed := self.values.get(name, (default,))):
                continue
            yield f"{name} is {value!r}; {' or '.join(map(repr, allowed))} is required"
        yield from (one.required for one in self.conditions if not one.holds(architecture))


def _field_values(value: Any, prefix: str) -> Iterator[tuple[str, Any, Any]]:
    """Fields of a value and of the values in it: name, value, default (None for one that has none)."""
    for one in fields(value):
        found, name = getattr(value, one.name), f"{prefix}{one.name}"
        if is_dataclass(found) and one.default is not None:
            yield from _field_values(found, f"{name}.")
        else:
            yield name, found, None if one.default is MISSING else one.default


def rotary_scaling(architecture: Architecture) -> str:
    """How frequencies of rotary embeddings are divided: none of them, all of them (linear), or the slow ones (llama3)."""
    rotary = architecture.numerics.rotary
    if rotary.original_positions:
        return "llama3"
    return "none" if rotary.factor == 1.0 else "linear"


ROTARY_FIELDS = frozenset(f"numerics.rotary.{name}" for name in ("factor", "original_positions", "low", "high"))


def scaling_condition(*kinds: str) -> ModelCondition:
    """That frequencies are divided in one of these ways."""
    return ModelCondition(
        lambda architecture: rotary_scaling(architecture) in kinds,
        f"rotary scaling of kind {' or '.join(kinds)} is required",
    )
