"""The nearest layout that a software stack runs, where it runs none with the choices that the user pinned."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from shardwise.layout import Choices, Layout, stack_of
from shardwise.price import Problem
from shardwise.search.vectorised.search_layouts import search_layouts
from shardwise.values import InputError, NothingFitsError

MAX_SEARCHES = 24  # of pins that are dropped in turn; a search takes tenths of a second


@contextmanager
def naming_nearest(problem: Problem, choices: Choices | None) -> Iterator[None]:
    """Add the nearest layout that a named stack runs to an error about pinned choices that it does not run.

    Of an error where layouts run and none fits, nothing is added: it names the excess and the remedies.
    """
    try:
        yield
    except (InputError, NothingFitsError) as error:
        stack, pins = stack_of(problem.cluster), pinned_values(choices)
        refused = not isinstance(error, NothingFitsError) or str(error).startswith("no legal layout")
        nearest = (
            nearest_to_pins(problem, choices, pins)
            if stack and stack.is_known and pins and choices and refused
            else None
        )
        if stack is None or nearest is None:
            raise
        layout, dropped = nearest
        text = f"the nearest that {stack.name} runs, without the pin of {' and '.join(dropped)}: {layout}"
        raise type(error)(*error.problems, text) from None


def pinned_values(choices: Choices | None) -> dict[str, Any]:
    """Return the values of pinned choices by name.

    >>> pinned_values(Choices().with_pins({"tp": 8, "recompute": "full"}, {"pp": 4}))
    {'tp': 8, 'recompute': 'full'}
    """
    if choices is None:
        return {}
    experts = {} if choices.etp is None else {"etp": choices.etp}
    return {**choices.pins, **{name: getattr(choices, name)[0] for name in choices.asked}, **experts}


def nearest_to_pins(
    problem: Problem, choices: Choices, pins: Mapping[str, Any]
) -> tuple[Layout, tuple[str, ...]] | None:
    """Return the fastest layout that a stack runs with as many of some pins as possible, and the names of those dropped.

    None if there is none, and if more searches would be needed than are tried.
    """
    free = replace(Choices(), divisible=choices.divisible, runnable=choices.runnable)
    searches = 0
    for num_dropped in range(1, len(pins) + 1):
        candidates: list[tuple[float, Layout, tuple[str, ...]]] = []
        for dropped in itertools.combinations(pins, num_dropped):
            searches += 1
            if searches > MAX_SEARCHES and num_dropped < len(pins):
                break
            remaining = {name: value for name, value in pins.items() if name not in dropped}
            candidates += _fastest(problem, free.with_pins(remaining, choices.maxima), dropped)
        if candidates:
            _, layout, dropped = min(candidates, key=lambda row: row[0])
            return layout, dropped
    return None


def _fastest(
    problem: Problem, choices: Choices, dropped: tuple[str, ...]
) -> Iterator[tuple[float, Layout, tuple[str, ...]]]:
    """Yield seconds, layout and names of dropped pins of the fastest layout that fits, if there is one."""
    with_defaults = problem.with_defaults()
    try:
        limited = choices.limit_to_stack(
            stack_of(with_defaults.cluster), problem.architecture, problem.job, problem.cluster.scale_up_size
        )
        result = search_layouts(with_defaults, choices=limited, top=1)
    except (InputError, NothingFitsError):
        return
    if result.best:
        yield result.best[0].step_time_s, replace(result.best[0].layout, placement=None), dropped
