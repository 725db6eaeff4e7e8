"""The choices of a search: values of each, pins and maxima with their text form, and the values that a stack has.

`Choices` also gives the rules that every layout of a search must keep.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from shardwise.hardware import Stack
from shardwise.layout.layers_per_stage import BALANCED, STAGES
from shardwise.layout.layout import CP_VARIANTS, OFFLOADS, cp_variant_names, get_offload_targets
from shardwise.layout.rules.engine import add_engine_pins
from shardwise.layout.rules.framework_rules import policy_problems
from shardwise.layout.rules.layout_rule import LayoutRule
from shardwise.layout.rules.stack_abilities import ENGINE_STACK, forbids_recompute, supported_values, unsupported_pins
from shardwise.layout.rules.table import layout_rules
from shardwise.layout.sharding_scheme import ParallelMode
from shardwise.model import POLICIES, POLICY_FORMS, Architecture, Job, policy_names
from shardwise.model.recompute_policies import policies_to_search, policy_problem
from shardwise.pipeline import NATURAL, SCHEDULES, get_schedule, natural_schedule
from shardwise.pipeline.registry import default_searched_schedules
from shardwise.values import InputError, describe_unknown, did_you_mean, parse_like, raise_problems

if TYPE_CHECKING:  # `estimate` loads no NumPy
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

FACTORISED_AXES = ("dp", "fsdp", "tp", "cp", "pp")  # their product is the number of devices
DEGREE_AXES = (*FACTORISED_AXES, "ep")  # ep is borrowed from fsdp
GRID_CHOICES = ("sequence_parallel", "micro_batch_seqs", "num_virtual_stages", "zero_stage")
NUMERIC_CHOICES = (*DEGREE_AXES, "num_virtual_stages", "zero_stage", "micro_batch_seqs")  # what can have a maximum
FLAG_CHOICES = ("sequence_parallel", "async_tp")
NAMED_CHOICES: Mapping[str, Collection[str]] = {  # choices by name
    "recompute": policy_names(),
    "cp_variant": CP_VARIANTS,
    "offload": OFFLOADS,
    "schedule": SCHEDULES,
    "stages": STAGES,
}
PINNABLE_CHOICES = (*NUMERIC_CHOICES, *FLAG_CHOICES, *NAMED_CHOICES, "recompute_layers", "etp")
LAYER_FRACTIONS = (0.25, 0.5, 0.75)  # of a stage's layers
MAX_NUMBER = 10**7  # of any number of a layout, as of devices


def _default_cp_variants() -> tuple[str, ...]:
    """Return the variants of context parallelism, without those that another one always matches or beats."""
    return tuple(name for name, variant in CP_VARIANTS.items() if not variant.waits_for_last)


class RecomputeOffload(NamedTuple):
    """One combination of recomputation and offload.

    `recompute` is the index of a policy among the choices. `layers` of each stage recompute: below 1 it is a fraction of the
    fullest stage's, rounded up; None is all. `offload` names what is kept in host memory.
    """

    recompute: int
    layers: int | float | None
    offload: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DegreeLimits:
    """Limits of the degrees by axis: one value (`pins`), or a maximum (`maxima`)."""

    pins: Mapping[str, int] = field(default_factory=dict)
    maxima: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        limits = [f"{axis} = {degree}" for axis, degree in self.pins.items()]
        return ", ".join(limits + [f"{axis} ≤ {degree}" for axis, degree in self.maxima.items()])

    def filter_factorisations(self, rows: Ints) -> Ints:
        """Return the factorisations (one per row, a column for each axis) within the limits."""
        for axis, degree in self.pins.items():
            rows = rows[self._axis_degrees(rows, axis) == degree]
        for axis, degree in self.maxima.items():
            rows = rows[self._axis_degrees(rows, axis) <= degree]
        return rows

    def _axis_degrees(self, rows: Ints, axis: str) -> Ints:
        return rows[:, DEGREE_AXES.index(axis)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices(DegreeLimits):
    """Values that a search may choose from, apart from the degrees: these are all factorisations of the number of devices
    within the limits.

    Left out unless pinned, to search fewer layouts: the plain ring (a zigzag moves as much and is even), offload,
    recomputation of a part of a stage's layers (fractions of them go with policy `full`), and schedules that are not natural
    for the stages (`NATURAL` stands for those that are): AFAB holds every micro-batch, and few engines have the others.
    Layouts are compared with even stages; the pipelines near the best then get layers per stage by cost
    (`search.balance_stages`), unless `stages` says even. Where a schedule allows several numbers of virtual stages, only those
    with equal stages are searched. `divisible` refuses layouts with idle replicas or partly filled micro-batches, `runnable`
    those that `train` does not run. `etp`: 1 for whole experts, or tp for those that it splits; None: either. `stack` is the
    one whose abilities limit the layouts (`limit_to_stack`), `domain` the number of devices among which it overlaps tensor
    parallelism (None: any), and `asked` the names of what was pinned.

    >>> choices = Choices(zero_stage=(1, 3)).with_pins({"tp": 8}, {"pp": 4})
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
    cp_variant: tuple[str, ...] = field(default_factory=_default_cp_variants)
    async_tp: tuple[int, ...] = (0,)
    schedule: tuple[str, ...] = field(default_factory=default_searched_schedules)
    stages: tuple[str, ...] = (BALANCED,)
    etp: int | None = None
    divisible: bool = False
    runnable: bool = False
    stack: Stack | None = None
    domain: int | None = None
    asked: tuple[str, ...] = ()

    def modes(self, architecture: Architecture) -> tuple[ParallelMode, ...]:
        """Return the modes in which the same degrees can run; the search takes the fastest, and of equals the first.

        With a limit on `ep` the degree is the one requested: experts are then split by tp, and not by a larger ep, unless
        `etp` asks for whole ones.
        """
        abilities = self.stack.abilities if self.stack else None
        has_whole_experts = abilities is None or ("ep" in abilities.axes and abilities.whole_experts)
        is_free = architecture.num_experts and has_whole_experts and "ep" not in {**self.pins, **self.maxima}
        whole_experts = (False, True) if is_free or (self.etp == 1 and architecture.num_experts) else (False,)
        return tuple(
            ParallelMode(v, bool(a), w) for v, a, w in itertools.product(self.cp_variant, self.async_tp, whole_experts)
        )

    def _axis_degrees(self, rows: Ints, axis: str) -> Ints:
        """Return the degrees of an axis in rows of factorisations; whole experts are over ep of them times tp."""
        degrees = rows[:, DEGREE_AXES.index(axis)]
        return degrees * rows[:, DEGREE_AXES.index("tp")] if axis == "ep" and self.etp == 1 else degrees

    @property
    def rules(self) -> tuple[LayoutRule, ...]:
        """Legality rules that every layout of the search must keep."""
        # Legality is judged in the mode with the fewest requirements, and again in each; what a stack has of modes only in each.
        return tuple(rule for rule in self._all_rules if not (rule.reads_mode and rule.source in ("cluster", "stack")))

    @property
    def mode_rules(self) -> tuple[LayoutRule, ...]:
        """Legality rules that the modes of the same degrees must keep."""
        pinned_etp = () if self.etp is None else (_pinned_etp_rule(self.etp),)
        return (*pinned_etp, *(rule for rule in self._all_rules if rule.reads_mode))

    @property
    def _all_rules(self) -> Iterator[LayoutRule]:
        has_choice = any(
            sum(bool(get_schedule(schedule).supports(2, virtual)) for virtual in self.num_virtual_stages) > 1
            for schedule in self.schedule
        )
        pinned = {*self.asked, *self.pins, *(("etp",) if self.etp else ())}
        rules = layout_rules(
            self.stack, equal_stages=has_choice, divisible=self.divisible, runnable=self.runnable,
            domain=None if "async_tp" in pinned else self.domain, sharded_replicas=len(self.zero_stage) > 1,
        )  # fmt: skip
        # A stack that is known only by its kind may have what is pinned.
        knows_pinned = self.stack is None or self.stack.is_known
        return (rule for rule in rules if knows_pinned or rule.source != "stack" or pinned.isdisjoint(rule.choices))

    @property
    def policies(self) -> tuple[RecomputeOffload, ...]:
        """Every sensible combination of recomputation and offload that the stack runs."""
        rules = self.stack.abilities.rules if self.stack else ()
        return tuple(
            RecomputeOffload(number, layers, offload)
            for number, recompute in enumerate(self.recompute)
            for layers in self.recompute_layers
            if layers is None or (recompute != "none" and (isinstance(layers, int) or recompute == "full"))
            for offload in self.offload
            if not any(policy_problems("", rules, recompute, layers, offload))
        )

    @property
    def offloads_optimizer(self) -> bool:
        """True if some of the layouts keep the optimizer's state in host memory."""
        return any(get_offload_targets(offload).optimizer for offload in self.offload)

    def limit_to_stack(
        self, stack: Stack | None, architecture: Architecture, job: Job, domain: int | None = None
    ) -> Choices:
        """Return the choices limited to what a stack supports for a model and a job; values that were not pinned become the
        stack's own.

        `domain` is the number of devices among which the cluster overlaps tensor parallelism. With `runnable` the choices stay
        as they are: the engine of `train` runs them, whatever stack prices them. Raises `InputError` for pinned values that
        the stack does not support.
        """
        if stack is None or self.runnable:
            return self
        pinned = {name: getattr(self, name)[0] for name in self.asked}
        raise_problems([f"stack: {problem}" for problem in unsupported_pins(stack, job, {**self.pins, **pinned})])
        defaults = Choices()
        stack_values: Any = {
            name: values
            for name, values in stack_search_values(stack, architecture, job).items()
            if name not in self.asked and getattr(self, name) == getattr(defaults, name)
        }
        limited = replace(self, stack=stack, domain=domain, **stack_values)
        if not limited.policies:
            combinations = itertools.product(limited.recompute, limited.recompute_layers, limited.offload)
            rules = stack.abilities.rules
            problems = [text for policy in combinations for text in policy_problems(stack.name, rules, *policy)]
            raise_problems(list(dict.fromkeys(problems)))
        return limited

    def with_pins(self, pins: Mapping[str, Any], maxima: Mapping[str, int]) -> Choices:
        """Return the choices with some values pinned and some limited. A pinned value is searched whether or not it is listed
        here.

        Raises `InputError` with every pin and maximum that is unknown or out of range.
        """
        raise_problems(_pin_problems(pins, maxima))
        etp = pins.get("etp", self.etp)
        tied = {"tp": etp} if etp and etp > 1 else {}  # experts that are split are split as layers are
        pins = {name: value for name, value in {**tied, **pins}.items() if name != "etp"}
        searched: dict[str, Any] = {
            name: tuple(v for v in getattr(self, name) if v <= maximum)
            for name, maximum in maxima.items()
            if name in GRID_CHOICES
        }
        searched |= {
            name: (v if name in NAMED_CHOICES else int(v),) for name, v in pins.items() if name not in DEGREE_AXES
        }
        return replace(
            self, **searched, etp=etp, pins={**self.pins, **{axis: v for axis, v in pins.items() if axis in DEGREE_AXES}},
            maxima={**self.maxima, **{axis: maximum for axis, maximum in maxima.items() if axis in DEGREE_AXES}},
            asked=tuple(dict.fromkeys((*self.asked, *(name for name in pins if name not in DEGREE_AXES)))),
        )  # fmt: skip


def _pinned_etp_rule(etp: int) -> LayoutRule:
    return LayoutRule(
        "etp",
        "layout",
        ("etp",),
        lambda c: c["etp"] == etp,
        lambda c: f"etp = {c['etp']}, found a pin of {etp}",
        reads_mode=True,
    )


def _pin_problems(pins: Mapping[str, Any], maxima: Mapping[str, int]) -> list[str]:
    problems = [f"pin: {describe_unknown(n, PINNABLE_CHOICES)}" for n in pins if n not in PINNABLE_CHOICES]
    problems += [f"max: {describe_unknown(n, NUMERIC_CHOICES)}" for n in maxima if n not in NUMERIC_CHOICES]
    known_limits = [("pin", n, v) for n, v in pins.items() if n in PINNABLE_CHOICES]
    known_limits += [("max", n, v) for n, v in maxima.items() if n in NUMERIC_CHOICES]
    problems += [
        f"{kind}: {name}: found {value!r}{did_you_mean(value, NAMED_CHOICES.get(name, ()))}; {required} is required"
        for kind, name, value in known_limits
        if (required := _requirement(name, value))
    ]
    if problems:
        return problems
    if pins.get("etp", 1) > 1 and pins.get("tp", pins["etp"]) != pins["etp"]:
        problems.append(f"pin: etp = {pins['etp']} beside tp = {pins['tp']}; 1 for whole experts, or tp, is required")
    if pins.get("recompute") == "none" and "recompute_layers" in pins:
        problems.append("pin: recompute_layers needs another recompute, such as full; drop one of the two")
    return problems + [
        f"pin: {name} = {pins[name]} is above its maximum {maximum}; drop one of the two"
        for name, maximum in maxima.items()
        if name in pins and pins[name] > maximum
    ]


def _requirement(name: str, value: Any) -> str:
    """Return what is required of a value that does not meet it; empty where it does."""
    if name == "recompute" and not policy_problem(value):
        return ""
    if name == "recompute":
        return f"one of {', '.join((*NAMED_CHOICES[name], *POLICY_FORMS))}"
    if name in NAMED_CHOICES:
        return "" if value in NAMED_CHOICES[name] else f"one of {', '.join(NAMED_CHOICES[name])}"
    if name in FLAG_CHOICES:
        return "" if value in (0, 1) else "true or false"
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if name == "zero_stage":
        return "" if is_whole and 0 <= value <= 3 else "0, 1, 2 or 3"
    return "" if is_whole and 1 <= value <= MAX_NUMBER else f"a whole number of 1 to {MAX_NUMBER:,}"


def parse_pins(assignments: Iterable[str], argument: str) -> dict[str, Any]:
    """Return the values of KEY=VALUE texts by key; `argument` names the command-line argument in an error.

    An unknown key keeps its text, and `Choices.with_pins` reports it. Raises `InputError`.

    >>> parse_pins(["tp=8", "recompute=full"], "--pin")
    {'tp': 8, 'recompute': 'full'}
    """
    pins: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, value = (part.strip() for part in assignment.partition("="))
        if not (key and equals and value):
            raise InputError(f"{argument}: found {assignment!r}; KEY=VALUE is required, such as {argument} pp=4")
        if key in pins:
            raise InputError(f"{argument}: {key} is given twice")
        pins[key] = parse_like(value, example_value(key), f"{argument} {key}")
    return pins


def example_value(name: str) -> Any:
    """Return a value of the kind that a pin of this name has: a count, a flag, or else a name."""
    return 1 if name in (*NUMERIC_CHOICES, "recompute_layers", "etp") else True if name in FLAG_CHOICES else ""


def choices_from_pins(
    pins: Mapping[str, Any], maxima: Mapping[str, Any], choices: Choices | None = None, *, runnable: bool = False,
    divisible: bool = False,
) -> Choices | None:  # fmt: skip
    """Return the choices (all by default) that pins and maxima leave; None where nothing is limited.

    `runnable` limits them to what the engine runs, `divisible` to layouts that split the batch evenly.
    """
    pins = add_engine_pins(pins) if runnable else pins
    limited = (choices or Choices()).with_pins(pins, maxima) if pins or maxima else choices
    return replace(limited or Choices(), divisible=divisible, runnable=runnable) if divisible or runnable else limited


def stack_search_values(stack: Stack, architecture: Architecture, job: Job) -> dict[str, tuple[Any, ...]]:
    """Return the values of a search's choices that a stack has for a model and a job, in the search's order.

    Asynchronous tensor parallelism is left out for the engine of `train`, which has it in no schedule that splits the backward
    pass; such schedules are left out for a stack that is known only by its kind.
    """
    abilities, supported = stack.abilities, supported_values(stack)
    async_tp = supported["async_tp"] if stack.name != ENGINE_STACK else (False,)
    return {
        "zero_stage": supported["zero_stage"],
        "sequence_parallel": tuple(map(int, supported["sequence_parallel"])),
        "recompute": stack_recompute_policies(stack, architecture, job),
        # The first is what layouts without context parallelism have; `cp_by_stack` keeps it from the others.
        "cp_variant": tuple(name for name in CP_VARIANTS if name in (cp_variant_names()[0], *abilities.cp_variants)),
        "async_tp": tuple(map(int, async_tp)),
        "schedule": _stack_search_schedules(stack),
        "stages": supported["stages"][:1],
    }


def stack_recompute_policies(stack: Stack | None, architecture: Architecture, job: Job) -> tuple[str, ...]:
    """Return the recompute policies worth trying under a stack (None: a bound), from the one that saves the most.

    >>> from shardwise.hardware.stacks import get_stack
    >>> import shardwise as sw
    >>> job = sw.Job(global_batch_tokens=2**20, seq_len=4096)
    >>> stack_recompute_policies(get_stack("megatron"), sw.load_model("mixtral-8x7b"), job)
    ('none', 'layernorm+moe_act', 'full')
    """
    if stack is None:
        return tuple(POLICIES)
    policies = [name for name in stack.abilities.recompute if not forbids_recompute(job, name)]
    return policies_to_search(policies, architecture, writes_scores=stack.unfused_attention)


def _stack_search_schedules(stack: Stack) -> tuple[str, ...]:
    """Return the natural schedules for the stages and those that split the backward pass; others only in place of 1F1B, since
    they use more memory for a bubble that is no shorter."""
    schedules = stack.abilities.schedules
    natural = {natural_schedule(2, virtual) for virtual in (1, 2)}
    if natural <= set(schedules):
        return (NATURAL, *(name for name in schedules if SCHEDULES[name].splits_backward and stack.is_known))
    return ("none", *schedules)
