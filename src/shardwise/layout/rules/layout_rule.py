"""Layout rules, and the context that they read: one layout, or columns of many."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from shardwise.layout.layout import Layout
from shardwise.layout.sharding_scheme import Degrees, layout_degrees
from shardwise.model import Architecture, Job
from shardwise.values import Precision, Value, get_precision

# The source of a rule's requirement. "layout": choices of a layout that do not go together, whatever the model.
RuleSource = Literal["layout", "model", "job", "cluster", "stack", "engine"]


@dataclass(frozen=True, slots=True)
class RuleContext:
    """Context of rules: a model, a job, a number of devices, and the degrees of one layout (numbers) or of many (arrays).

    `degrees` has the names of `layout_degrees`, and "offload" where all have the same. `recipe` is the precision if it is not
    the job's, since a plan's may have no name.
    """

    model: Architecture
    job: Job
    num_devices: int
    degrees: Degrees
    recipe: Precision | None = None

    @classmethod
    def from_layout(cls, model: Architecture, job: Job, num_devices: int, layout: Layout) -> RuleContext:
        """Return the context of one layout."""
        return cls(model, job, num_devices, {**layout_degrees(layout), "offload": layout.offload})

    def __getitem__(self, name: str) -> Value:
        return self.degrees[name]

    @property
    def precision(self) -> Precision:
        return self.recipe or get_precision(self.job.precision)

    def with_degrees(self, **changes: Value) -> RuleContext:
        """Return the context with some degrees replaced."""
        return replace(self, degrees={**self.degrees, **changes})


@dataclass(frozen=True, slots=True)
class LayoutRule:
    """Rule of layouts: `legal` tells whether a layout, or each row of many, can run; `explain` describes what is wrong with one.

    On arrays `legal` gives a truth value for each row (or one for all), so it combines terms by `&` and `|`, never by `and` or
    `or`. The first rule that a candidate breaks is the one that counts it, and names are printed.

    `choices`: fields of a layout, or other choices of a search, that it is about. A search drops a rule of a stack that is known
    only by its kind where one of them is pinned. `reads_mode`: `legal` reads what may differ between the modes of the same
    degrees (cp_variant, async_tp, and the etp of whole experts), so a search applies it to each mode.
    """

    name: str
    source: RuleSource
    choices: tuple[str, ...]
    legal: Callable[[RuleContext], Value]
    explain: Callable[[RuleContext], str]
    reads_mode: bool = False
