"""The inputs of a pipeline stage's step and memory. Numbers or arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from shardwise.cost.counts import Counts, add_up
from shardwise.cost.host import NOTHING, Host
from shardwise.cost.pipeline import Pipeline
from shardwise.cost.unit_costs import ActivationCost, StateCost
from shardwise.symbolic import Value


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Contents of one device of a stage, the cost of each unit, and the order of micro-batches through the stages."""

    counts: Counts
    activation: Mapping[str, ActivationCost]
    state: Mapping[str, StateCost]
    pipeline: Pipeline
    host: Host = NOTHING

    @cached_property
    def running(self) -> Mapping[str, Value]:
        """The layers by kind; those that do not recompute are kinds of their own."""
        return self.counts.running

    @cached_property
    def held(self) -> Mapping[str, Value]:
        """How often the stage holds each unit's weights."""
        return self.counts.held

    @cached_property
    def computing(self) -> Mapping[str, Value]:
        """How often a micro-batch passes through each unit."""
        return {**self.counts.units, "carry": self.counts.carries}

    def computed(self, field: str, axis: str = "") -> Value:
        """A field of `ActivationCost` over all that the stage computes; `axis`: of a field by parallel axis that of one."""
        return add_up(self.activation, self.computing, field, axis)

    def rests(self, field: str, axis: str = "") -> Value:
        """A field of `StateCost` over all whose weights the stage holds."""
        return add_up(self.state, self.held, field, axis)
