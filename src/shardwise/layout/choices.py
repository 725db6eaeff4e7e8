"""What a search may choose among: values of each choice, pins and maxima with their text form, and the values that a stack has.

`Choices` also gives the rules that every layout of a search must keep.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from shardwise.hardware.stacks import Stack
from shardwise.layout.context_parallel import VARIANTS, variant_names
from shardwise.layout.layout import OFFLOADS, offloaded_by
from shardwise.layout.rules.engine import RUNNABLE_RULES, runnable_pins
from shardwise.layout.rules.legality import ALIKE_STAGES, EVEN_BATCH, RULES, Rule
from shardwise.layout.rules.stack_abilities import (
    BESIDE,
    OWN,
    _dealt_out,
    _delayed,
    _stages,
    domain_rule,
    mode_rule,
    refused,
    stack_rules,
)
from shardwise.layout.rules.table import OF_MODES
from shardwise.layout.sharding_scheme import Mode
from shardwise.model.architecture import Architecture
from shardwise.model.job import Job
from shardwise.model.recompute_policies import FORMS, POLICIES, policy_names, policy_problem, searched_policies
from shardwise.pipeline.registry import NATURAL, SCHEDULES, natural_schedule, schedule_of, searched_schedules
from shardwise.values.errors import InputError, did_you_mean, require, unknown
from shardwise.values.overrides import convert

if TYPE_CHECKING:  # `estimate` loads no NumPy
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

FACTORED = ("dp", "fsdp", "tp", "cp", "pp")  # their product is the number of devices
AXES = (*FACTORED, "ep")  # ep is borrowed from fsdp
GRID = ("sequence_parallel", "micro_batch_seqs", "num_virtual_stages", "zero_stage")
NUMERIC = (*AXES, "num_virtual_stages", "zero_stage", "micro_batch_seqs")  # what can have a maximum
BALANCED, EVEN = STAGES = ("balanced", "even")  # how layers are dealt out to pipeline stages
FLAGS = ("sequence_parallel", "async_tp")
NAMED: Mapping[str, Collection[str]] = {  # choices by name
    "recompute": policy_names(),
    "cp_variant": VARIANTS,
    "offload": OFFLOADS,
    "schedule": SCHEDULES,
    "stages": STAGES,
}
PINNABLE = (*NUMERIC, *FLAGS, *NAMED, "recompute_layers")
QUARTERS = (0.25, 0.5, 0.75)  # of a stage's layers
MOST = 10**7  # of any number of a layout, as of devices


def _searched_variants() -> tuple[str, ...]:
    """Variants of context parallelism, without those that another one always matches or beats."""
    return tuple(name for name, variant in VARIANTS.items() if not variant.waits_for_last)


class Policy(NamedTuple):
    """A policy for saved activations and state: recomputation by its index, the number of a stage's layers that recompute (a
    value below 1 is a fraction of the fullest stage's, rounded up; None is all), and what is offloaded."""

    recompute: int
    layers: int | float | None
    offload: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of the degrees by axis: one value (`pins`), or a maximum (`maxima`)."""

    pins: Mapping[str, int] = field(default_factory=dict)
    maxima: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        found = [f"{axis} = {degree}" for axis, degree in self.pins.items()]
        return ", ".join(found + [f"{axis} ≤ {degree}" for axis, degree in self.maxima.items()])

    def keep(self, rows: Ints) -> Ints:
        """The factorisations (one per row, a column for each axis) within the limits."""
        for axis, degree in self.pins.items():
            rows = rows[rows[:, AXES.index(axis)] == degree]
        for axis, degree in self.maxima.items():
            rows = rows[rows[:, AXES.index(axis)] <= degree]
        return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices(Limits):
    """What a search may choose apart from the degrees, which are all factorisations of the number of devices within the limits.

    Left out unless pinned, to search fewer layouts: the plain ring (a zigzag moves as much and is even), offload, recomputation
    of some of a stage's layers (fractions of them go with policy `full`), and the schedules that are not natural for the stages
    (`schedule.NATURAL` stands for those that are): AFAB holds every micro-batch, and few engines have the others. Layouts are
    compared with even stages; the pipelines near the best then get layers per stage by cost (`search.balance_stages`), unless
    `stages` says even. Among several numbers of virtual stages that a schedule allows, those with equal ones are searched.
    `divisible` refuses layouts with idle replicas or partly filled micro-batches, `runnable` those that `train` does not run.
    `stack` is the one whose abilities limit the layouts (`of_stack`), `domain` the number of devices among which it overlaps
    tensor parallelism (None: any), and `asked` the names of what was pinned.

    >>> choices = Choices(zero_stage=(1, 3)).narrowed({"tp": 8}, {"pp": 4})
    >>> choices.pins, choices.maxima, choices.zero_stage
    ({'tp': 8}, {'pp': 4}, (1, 3))
    """

    sequence_parallel: tuple[int, ...] = (0, 1)
    micro_batch_seqs: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
    num_virtual_stages: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)
    zero_stage: tuple[int, ...] = (0, 1, 2, 3)
    recompute: tuple[str, ...] = field(default_factory=lambda: tuple(POLICIES))
    recompute_layers: tuple[int | float | None, ...] = (None,)
    offload: tuple[str, ...] = ("none",)
    cp_variant: tuple[str, ...] = field(default_factory=lambda: _searched_variants())
    async_tp: tuple[int, ...] = (0,)
    schedule: tuple[str, ...] = field(default_factory=searched_schedules)
    stages: tuple[str, ...] = (BALANCED,)
    divisible: bool = False
    runnable: bool = False
    stack: Stack | None = None
    domain: int | None = None
    asked: tuple[str, ...] = ()

    def modes(self, architecture: Architecture) -> tuple[Mode, ...]:
        """The modes in which the same degrees can run; the search takes the fastest, and of equals the first.

        With a limit on `ep` the degree is the one requested: experts are then split by tp, and not by a larger ep.
        """
        runs = self.stack.abilities if self.stack else None
        has_whole = runs is None or ("ep" in runs.axes and runs.whole_experts)
        free = architecture.num_experts and has_whole and "ep" not in {**self.pins, **self.maxima}
        whole = (False, True) if free else (False,)
        return tuple(Mode(v, bool(a), w) for v, a, w in itertools.product(self.cp_variant, self.async_tp, whole))

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The legality rules that every layout of the search must keep."""
        chooses = any(
            sum(bool(schedule_of(one).goes_with(2, virtual)) for virtual in self.num_virtual_stages) > 1
            for one in self.schedule
        )
        own = (rule for rule in self._of_stack if rule.name not in OF_MODES)
        asked = (*(ALIKE_STAGES,) * chooses, *(EVEN_BATCH,) * self.divisible, *RUNNABLE_RULES * self.runnable)
        return (*RULES, *asked, *own)

    @property
    def mode_rules(self) -> tuple[Rule, ...]:
        """The legality rules that the modes of the same degrees must keep."""
        return (*RULES, *self._of_stack)

    @property
    def _of_stack(self) -> tuple[Rule, ...]:
        asked = {*self.asked, *self.pins}
        near = () if self.domain is None or "async_tp" in asked else (domain_rule(self.domain),)
        return (*near, *(binding_rules(self.stack, asked) if self.stack else ()))

    @property
    def policies(self) -> tuple[Policy, ...]:
        """Every sensible combination of recomputation and offload."""
        return tuple(
            Policy(number, layers, offload)
            for number, recompute in enumerate(self.recompute)
            for layers in self.recompute_layers
            if layers is None or (recompute != "none" and (isinstance(layers, int) or recompute == "full"))
            for offload in self.offload
        )

    @property
    def offloads_optimizer(self) -> bool:
        """Whether some of the layouts keep the optimizer's state in host memory."""
        return any(offloaded_by(offload).optimizer for offload in self.offload)

    def of_stack(self, stack: Stack | None, architecture: Architecture, job: Job, domain: int | None = None) -> Choices:
        """The choices limited to what a stack supports for a model and a job, on a cluster with a `domain`; values that were not
        pinned become the stack's own.

        With `runnable` the choices stay as they are: the engine of `train` runs them, whatever stack prices them. Raises
        `InputError` for pinned values that the stack does not support.
        """
        if stack is None or self.runnable:
            return self
        pinned = {name: getattr(self, name)[0] for name in self.asked}
        require([f"stack: {problem}" for problem in refused(stack, job, {**self.pins, **pinned})])
        usual = Choices()
        has: Any = {
            name: values
            for name, values in searched_values(stack, architecture, job).items()
            if name not in self.asked and getattr(self, name) == getattr(usual, name)
        }
        return replace(self, stack=stack, domain=domain, **has)

    def narrowed(self, pins: Mapping[str, Any], maxima: Mapping[str, int]) -> Choices:
        """The choices with some values pinned and some limited. A pinned value is searched whether or not it is listed here.

        Raises `InputError` with every pin and maximum that is unknown or out of range.
        """
        require(_problems(pins, maxima))
        values: dict[str, Any] = {
            name: tuple(v for v in getattr(self, name) if v <= most) for name, most in maxima.items() if name in GRID
        }
        values |= {name: (v if name in NAMED else int(v),) for name, v in pins.items() if name not in AXES}
        return replace(
            self, **values, pins={**self.pins, **{axis: v for axis, v in pins.items() if axis in AXES}},
            maxima={**self.maxima, **{axis: most for axis, most in maxima.items() if axis in AXES}},
            asked=tuple(dict.fromkeys((*self.asked, *(name for name in pins if name not in AXES)))),
        )  # fmt: skip


def _problems(pins: Mapping[str, Any], maxima: Mapping[str, int]) -> list[str]:
    """Problems of pins and maxima, each with what is required."""
    problems = [f"pin: {unknown(n, PINNABLE)}" for n in pins if n not in PINNABLE]
    problems += [f"max: {unknown(n, NUMERIC)}" for n in maxima if n not in NUMERIC]
    known = [("pin", n, v) for n, v in pins.items() if n in PINNABLE]
    known += [("max", n, v) for n, v in maxima.items() if n in NUMERIC]
    problems += [
        f"{what}: {name}: found {value!r}{did_you_mean(value, NAMED.get(name, ()))}; {required} is required"
        for what, name, value in known
        if (required := _required(name, value))
    ]
    if problems:
        return problems
    if pins.get("recompute") == "none" and "recompute_layers" in pins:
        problems.append("pin: recompute_layers needs another recompute, such as full; drop one of the two")
    return problems + [
        f"pin: {name} = {pins[name]} is above its maximum {most}; drop one of the two"
        for name, most in maxima.items()
        if name in pins and pins[name] > most
    ]


def _required(name: str, value: Any) -> str:
    """What is required of a value that does not meet it; empty where it does."""
    if name == "recompute" and not policy_problem(value):
        return ""
    if name == "recompute":
        return f"one of {', '.join((*NAMED[name], *FORMS))}"
    if name in NAMED:
        return "" if value in NAMED[name] else f"one of {', '.join(NAMED[name])}"
    if name in FLAGS:
        return "" if value in (0, 1) else "true or false"
    whole = isinstance(value, int) and not isinstance(value, bool)
    if name == "zero_stage":
        return "" if whole and 0 <= value <= 3 else "0, 1, 2 or 3"
    return "" if whole and 1 <= value <= MOST else f"a whole number of 1 to {MOST:,}"


def parse_pins(words: Iterable[str], what: str) -> dict[str, Any]:
    """The values of KEY=VALUE words by key; `what` names the argument in an error.

    An unknown key keeps its text, and `Choices.narrowed` reports it. Raises `InputError`.

    >>> parse_pins(["tp=8", "recompute=full"], "--pin")
    {'tp': 8, 'recompute': 'full'}
    """
    found: dict[str, Any] = {}
    for word in words:
        key, equals, value = (part.strip() for part in word.partition("="))
        if not (key and equals and value):
            raise InputError(f"{what}: found {word!r}; KEY=VALUE is required, such as {what} pp=4")
        if key in found:
            raise InputError(f"{what}: {key} is given twice")
        found[key] = convert(value, pinned_like(key), f"{what} {key}")
    return found


def pinned_like(name: str) -> Any:
    """A value of the kind that a pin of this name has: a count, a flag, or else a name."""
    return 1 if name in (*NUMERIC, "recompute_layers") else True if name in FLAGS else ""


def choices_from_pins(
    pins: Mapping[str, Any], maxima: Mapping[str, Any], choices: Choices | None = None, *, runnable: bool = False,
    divisible: bool = False,
) -> Choices | None:  # fmt: skip
    """The choices (all by default) that pins and maxima leave, limited to those that the engine runs or that split the batch
    evenly; None where nothing is limited."""
    pins = runnable_pins(pins) if runnable else pins
    kept = (choices or Choices()).narrowed(pins, maxima) if pins or maxima else choices
    return replace(kept or Choices(), divisible=divisible, runnable=runnable) if divisible or runnable else kept


def searched_values(stack: Stack, architecture: Architecture, job: Job) -> dict[str, tuple[Any, ...]]:
    """The values of a search's choices that a stack has for a model and a job, in the search's order.

    Asynchronous tensor parallelism is left out for the engine of `train`, which has it in no schedule that splits the backward
    pass; such schedules are left out for a stack that is known only by its kind.
    """
    runs = stack.abilities
    overlapped = runs.async_tp and stack.name != OWN
    return {
        "zero_stage": _stages(runs.zero),
        "sequence_parallel": (0, 1) if runs.sequence_parallel else (0,),
        "recompute": recompute_policies(stack, architecture, job),
        "cp_variant": tuple(name for name in VARIANTS if name in runs.cp_variants) or variant_names()[:1],
        "async_tp": (0, 1) if overlapped else (0,),
        "schedule": _searched_schedules(stack),
        "stages": _dealt_out(runs.uneven_stages)[:1],
    }


def recompute_policies(stack: Stack | None, architecture: Architecture, job: Job) -> tuple[str, ...]:
    """The recompute policies that are worth trying under a stack (None: a bound), from the one that saves the most.

    >>> from shardwise.hardware.stacks import stack_named
    >>> import shardwise as sw
    >>> job = sw.Job(global_batch_tokens=2**20, seq_len=4096)
    >>> recompute_policies(stack_named("megatron"), sw.load_model("mixtral-8x7b"), job)
    ('none', 'layernorm+moe_act', 'full')
    """
    if stack is None:
        return tuple(POLICIES)
    has = [name for name in stack.abilities.recompute if not _delayed(job, name)]
    return searched_policies(has, architecture, writes_scores=stack.unfused_attention)


def _searched_schedules(stack: Stack) -> tuple[str, ...]:
    """The natural schedules for the stages, and those that split the backward pass; others only in place of 1F1B, since they
    use more memory for a bubble that is no shorter."""
    has = stack.abilities.schedules
    natural = {natural_schedule(2, virtual) for virtual in (1, 2)}
    if natural <= set(has):
        return (NATURAL, *(name for name in has if SCHEDULES[name].splits_backward and stack.known))
    return ("none", *has)


# The choice that each rule is about, where it is not the axis that it is named after.
ABOUT = {
    "stack_zero": "zero_stage", **{f"stack_zero_with_{axis}": "zero_stage" for axis in BESIDE},
    "stack_cp_variant": "cp_variant", "cp_by_stack": "cp_variant",
    "stack_sequence_parallel": "sequence_parallel", "stack_stages": "stages",
}  # fmt: skip


def binding_rules(stack: Stack, asked: Collection[str]) -> tuple[Rule, ...]:
    """The rules of a stack for a search with some choices given; for a kind of software, those about the other choices."""
    rules = (*stack_rules(stack), mode_rule(stack))
    return tuple(
        rule for rule in rules if stack.known or ABOUT.get(rule.name, rule.name.removeprefix("stack_")) not in asked
    )
