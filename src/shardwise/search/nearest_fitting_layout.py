"""Layouts near a given one: a partial layout completed by a search, and the nearest layout that fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from math import prod
from typing import Any

from shardwise.layout import (
    DEGREE_AXES,
    DERIVED_FIELDS,
    OFFLOADS,
    Choices,
    Layout,
    layout_as_run,
    layout_from_fields,
    parse_fields,
    stack_of,
    unsupported_choices,
)
from shardwise.layout.choices import FACTORISED_AXES, LAYER_FRACTIONS, PINNABLE_CHOICES
from shardwise.layout.payload import check_derived_fields
from shardwise.pipeline import NATURAL, natural_schedule
from shardwise.price import Problem
from shardwise.search.planner import KEEP_ALL_LAYOUTS
from shardwise.search.vectorised.search_layouts import PricedLayout, search_layouts
from shardwise.search.verdicts import MEMORY_RESERVE, count_changes
from shardwise.values import InputError, NothingFitsError, Progress, ignore_progress

UNPINNABLE_FIELDS = ("etp", "layers_per_stage", "placement")  # fields of a layout that no search pins
STAGE_FIELDS = ("num_virtual_stages", "schedule")  # what layers per stage decide together with


def complete_layout(problem: Problem, fixed_fields: Mapping[str, Any]) -> Layout:
    """Return the fastest layout with some fields given that leaves the memory free that plans leave, or else that fits; if
    none of them fits, the one with the least memory.

    Degrees that are left out are 1 if the given ones multiply to the number of devices. If no legal layout has the given
    fields, the others are natural ones (`layout_from_fields`); pricing it then reports the problem.

    >>> import shardwise as sw
    >>> cluster = sw.load_cluster("h100:16", stack="megatron")
    >>> job = sw.Job(global_batch_tokens=2**20, seq_len=4096)
    >>> layout = complete_layout(Problem(sw.load_model("llama-3-8b"), cluster, job), {"tp": 4, "fsdp": 4})
    >>> (layout.tp, layout.fsdp, layout.pp), layout.micro_batch_seqs > 1
    ((4, 4, 1), True)
    """
    pins = {name: value for name, value in fixed_fields.items() if name in PINNABLE_CHOICES and value is not None}
    if prod(fixed_fields.get(axis, 1) for axis in FACTORISED_AXES) == problem.cluster.num_devices:
        pins = {**dict.fromkeys(FACTORISED_AXES, 1), **pins}
    if "layers_per_stage" in fixed_fields:
        pins = {**{name: getattr(layout_from_fields(fixed_fields), name) for name in STAGE_FIELDS}, **pins}
    fastest = _search_within_pins(problem, pins)
    layout = layout_from_fields(fixed_fields) if fastest is None else replace(fastest, placement=None)
    unpinnable = {name: fixed_fields[name] for name in UNPINNABLE_FIELDS if name in fixed_fields}
    return layout_as_run(stack_of(problem.cluster), replace(layout, **unpinnable))


def _search_within_pins(problem: Problem, pins: Mapping[str, Any]) -> Layout | None:
    """Return the best layout within the pins, or None."""
    try:
        choices = Choices().with_pins(pins, {})
        with suppress(InputError):  # of what the stack does not run the others are of any stack
            choices = choices.limit_to_stack(
                stack_of(problem.cluster),
                problem.architecture,
                replace(problem.job, loss=None),
                problem.cluster.scale_up_size,
            )
        result = search_layouts(problem, choices=choices, top=1, reserve=MEMORY_RESERVE)
        if not result.best:
            result = search_layouts(problem, choices=choices, top=1)
    except (InputError, NothingFitsError):
        return None
    return result.best[0].layout if result.best else result.least_memory.layout


def parse_partial_layout(problem: Problem, text: str, label: str = "layout") -> tuple[Layout, str]:
    """Return the layout of a text that may say a part of it, and the text of the choices that a search made.

    `label` names the text in errors. Raises `InputError` for a wrong text, an empty one, and derived values that do not follow.

    >>> import shardwise as sw
    >>> plan = sw.plan("gpt-2", "h100:8", global_batch_tokens="64Ki", seq_len=1024)
    >>> layout, added = parse_partial_layout(plan.problem, "tp=8")
    >>> layout.num_devices, "recompute" in added
    (8, True)
    """
    values = parse_fields(text, prefix=label, extra_counts=DERIVED_FIELDS)
    if not values:
        raise InputError(f"{label}: found {text!r}; a part of a layout is required at least, such as tp=8")
    derived = {key: values.pop(key) for key in DERIVED_FIELDS if key in values}
    layout = complete_layout(problem, values)
    return check_derived_fields(layout, derived, problem.architecture, problem.job), added_fields_text(layout, values)


def added_fields_text(layout: Layout, fixed_fields: Mapping[str, Any]) -> str:
    """Return the fields of a completed layout that were not given, as its text writes them."""
    return " ".join(word for word in str(layout).split() if word.partition("=")[0] not in fixed_fields)


def find_nearest_fitting(problem: Problem, layout: Layout, progress: Progress = ignore_progress) -> Layout | None:
    """Return the fitting layout that changes the fewest fields of one that does not fit, the fastest of equals; None if none
    fits.

    The search widens in three steps. First the degrees stay, and recomputation (also of a part of the layers), micro-batch,
    ZeRO stage and sequence parallelism are free. Then other degrees with the same choices, the fastest layout of every
    factorisation, and the Pareto front of time and memory. Last the same degrees with offload."""
    degrees = {axis: getattr(layout, axis) for axis in DEGREE_AXES}
    kept_fields = ("zero_stage", "sequence_parallel", "micro_batch_seqs", "recompute")
    extra = () if layout.schedule == natural_schedule(layout.pp, layout.num_virtual_stages) else (layout.schedule,)
    all_choices = Choices(
        micro_batch_seqs=tuple(sorted({*Choices().micro_batch_seqs, layout.micro_batch_seqs})),
        offload=(layout.offload,),
        schedule=(NATURAL, *extra),
    )
    stack = stack_of(problem.cluster)
    if stack and not unsupported_choices(stack, problem.architecture, problem.job, layout):
        all_choices = all_choices.limit_to_stack(
            stack, problem.architecture, problem.job, problem.cluster.scale_up_size
        )
    partial_recompute = replace(all_choices, recompute_layers=(None, *LAYER_FRACTIONS))
    same_degrees = partial_recompute.with_pins({**degrees, "num_virtual_stages": layout.num_virtual_stages}, {})
    same_choices = all_choices.with_pins({name: getattr(layout, name) for name in kept_fields}, {})
    has_pcie_rate = problem.cluster.chip.pcie_bytes_per_s is not None
    offloaded = (replace(same_degrees, offload=OFFLOADS),) if has_pcie_rate else ()
    for attempt in ((same_degrees,), (same_choices, all_choices), offloaded):
        fitting = [row for choices in attempt for row in _search_fitting(problem, choices, progress)]
        if fitting:
            return min(fitting, key=lambda row: (count_changes(layout, row.layout), row.step_time_s)).layout
    return None


def _search_fitting(problem: Problem, choices: Choices, progress: Progress) -> Iterator[PricedLayout]:
    """Yield fitting layouts within the choices: the fastest, those of every factorisation, and the Pareto front."""
    try:
        result = search_layouts(problem, choices=choices, top=KEEP_ALL_LAYOUTS, progress=progress)
    except NothingFitsError:
        return
    yield from (*result.best, *result.by_factorisation, *result.pareto)
