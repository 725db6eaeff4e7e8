"""The schema of a framework's weight tables: tensor names and shapes of a kind of model, and which models it computes.

Each table is used both to write weights and to read them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple

from shardwise.model import LABEL_FIELDS, MTP_UNITS, Architecture, is_layer
from shardwise.model.decoder import MTP_BLOCK_PREFIX
from shardwise.step.parameters import Parameter


@dataclass(frozen=True, slots=True)
class TensorPattern:
    """A tensor's name, and the pattern of its dims (`dim_patterns.py`); without one it is a vector of our dims in their order.

    `{layer}`, `{module}` (of multi-token prediction) and `{expert}` stand for numbers: in the name, there is one tensor for
    each; in the dims, one tensor has all of them along a dim.
    """

    name: str
    dims: str = ""

    def with_prefix(self, prefix: TensorPattern) -> TensorPattern:
        """Return this tensor inside a block: the prefix's name and dims come first."""
        return TensorPattern(prefix.name + self.name, ", ".join(filter(None, (prefix.dims, self.dims))))


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightTable:
    """The tensors in which a kind of model keeps its weights.

    `ends` are those of embedding and head, `block` those of a block. `routed` overrides names in blocks with experts, `direct`
    in latent attention without a query latent. The names of a block are prefixed by `layer` in a layer and by `module` in a
    module of multi-token prediction, whose own weights are `predict`. `copies` are tensors that repeat a weight that another
    unit lends, by the kind of the borrowing unit; they are written, but not read. `balance_bias` is a router's balance bias,
    in a block, if there is one.
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
        """Return the tensor of a parameter, or None."""
        if not is_layer(parameter.unit) and parameter.unit not in MTP_UNITS:
            return self.ends.get(parameter.weight)
        if parameter.unit in MTP_UNITS and not parameter.weight.startswith(MTP_BLOCK_PREFIX):
            return self._in_block(parameter.unit, self.predict.get(parameter.weight))
        tables = [self.block]
        layer = architecture.unit_architecture(parameter.unit)
        if layer.num_experts:
            tables.append(self.routed)
        if layer.kv_lora_rank and not layer.q_lora_rank:
            tables.append(self.direct)
        patterns = [table[parameter.name_in_block] for table in tables if parameter.name_in_block in table]
        return self._in_block(parameter.unit, patterns[-1] if patterns else None)

    def copy_of(self, unit: str, weight: str) -> TensorPattern | None:
        """Return the tensor in which a unit of this kind repeats a weight that it borrows, or None."""
        pattern = self.copies.get(unit, {}).get(weight)
        return pattern if unit == "head" else self._in_block(unit, pattern)

    def bias_of(self, unit: str) -> TensorPattern | None:
        """Return the tensor of a router's balance bias, or None."""
        return self._in_block(unit, self.balance_bias)

    def _in_block(self, unit: str, pattern: TensorPattern | None) -> TensorPattern | None:
        prefix = self.layer if is_layer(unit) else self.module
        return pattern.with_prefix(prefix) if pattern and prefix else None


# Fields that every framework supports with any value, or that do not affect the arithmetic.
SIZE_FIELDS = frozenset(
    {*LABEL_FIELDS, "num_layers", "d_model", "d_ff", "num_heads", "num_kv_heads", "head_dim",
     "vocab_size", "max_positions", "numerics.norm_epsilon", "numerics.rotary.base"}
)  # fmt: skip


class ModelCondition(NamedTuple):
    """A condition on several fields together; `required` is the message."""

    holds: Callable[[Architecture], bool]
    required: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SupportedModels:
    """The models that a framework's code computes, as conditions on fields (those of `numerics` behind a dot).

    Fields in `any_of` may have any value, those in `values` one of some; all others must have their default. `conditions` are
    checked besides.
    """

    any_of: frozenset[str] = frozenset()
    values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    conditions: tuple[ModelCondition, ...] = ()

    def problems(self, architecture: Architecture) -> Iterator[str]:
        """Yield each reason why a model is not supported."""
        for name, value, default in _field_values(architecture, ""):
            if name in SIZE_FIELDS | self.any_of or value in (allowed := self.values.get(name, (default,))):
                continue
            yield f"{name} is {value!r}; {' or '.join(map(repr, allowed))} is required"
        yield from (condition.required for condition in self.conditions if not condition.holds(architecture))


def _field_values(value: Any, prefix: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, value, default) of a dataclass's fields and nested fields; the default is None if there is none."""
    for member in fields(value):
        setting, name = getattr(value, member.name), f"{prefix}{member.name}"
        if is_dataclass(setting) and member.default is not None:
            yield from _field_values(setting, f"{name}.")
        else:
            yield name, setting, None if member.default is MISSING else member.default


def rotary_scaling(architecture: Architecture) -> str:
    """Return which frequencies of rotary embeddings are divided: "none", all of them ("linear"), or the slow ones ("llama3")."""
    rotary = architecture.numerics.rotary
    if rotary.original_positions:
        return "llama3"
    return "none" if rotary.factor == 1.0 else "linear"


ROTARY_FIELDS = frozenset(f"numerics.rotary.{name}" for name in ("factor", "original_positions", "low", "high"))


def scaling_condition(*kinds: str) -> ModelCondition:
    """Return the condition that rotary scaling is of one of these kinds."""
    return ModelCondition(
        lambda architecture: rotary_scaling(architecture) in kinds,
        f"rotary scaling of kind {' or '.join(kinds)} is required",
    )
