"""The names and shapes that a framework gives to the weights of a kind of model: one table, read both ways."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwise.lowering.parameters import Parameter
from shardwise.model.architecture import Architecture
from shardwise.model.decoder import LAYERS, PREDICT_BLOCK, PREDICTS


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor's name, and its layout (`notation.py`); without one it is a vector of our dims in their order.

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
