"""How good predictions are where they were not fitted: runs are left out in turn, and predicted from the others.

*model*: the stack is known, the model is new: a tenth of all pairs of stack and model at a time, several draws. *source*: a
source and its stack are new: their runs are left out, and the stack is expected to be as others of its kind. *lab*: the same
with all sources of a lab, NVIDIA's and Google's many among them. *three*: a source is new, and then three of its runs are
given. The constants of the others are found from the derivatives at the fit to all, which is exact as far as times are
straight lines there; what is left out is priced exactly.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwise.calibrate.fit import SIGMA_FEW, Array, Fit, fit, start, step
from shardwise.calibrate.response import Observation
from shardwise.errors import chosen
from shardwise.progress import Progress, silent

TENTHS, GIVEN, DRAWS = 10, 3, 3
FOLDS = ("model", "source", "lab", "three")
SEED = 0
# Sources of several releases.
SOURCES = (("mbridge", r"nvidia-mbridge|mbridge"), ("dgxc", "dgxc"))
# Labs of several sources: what the name of a source starts with.
LABS = (
    ("NVIDIA", r"nvidia-|mbridge|dgxc|nemo|megatron-lm|megatron-core|megatron-ptdp|jax-toolbox|korthikanti"),
    ("Google", r"maxtext|tpu-"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """An observation with where it comes from: its source's family, and its model by its sizes, whatever it is called."""

    observation: Observation
    family: str
    model: str

    @property
    def pair(self) -> tuple[str, str]:
        return self.observation.stack.name, self.model

    @property
    def source(self) -> str:
        """The family without its releases: those of one product are no sources of their own."""
        return next((source for source, names in SOURCES if re.match(names, self.family)), self.family)

    @property
    def lab(self) -> str:
        return next((lab for lab, names in LABS if re.match(names, self.family)), self.family)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """A fit to members and to observations that are never left out, in this order."""

    members: Sequence[Member]
    always: Sequence[Observation] = ()
    fitted: Fit

    @property
    def observations(self) -> list[Observation]:
        """All that was fitted."""
        return [*(one.observation for one in self.members), *self.always]


def cross_validated(found: Evidence, progress: Progress = silent) -> Mapping[str, Array]:
    """Predicted seconds by kind of fold, [draw, member]; nan where a fold has none (given runs, labs of few)."""
    draws, members = [], found.members
    for draw in range(DRAWS):
        progress("left out by model", draw, DRAWS)
        draws.append(_predicted(found, model_folds(members, draw)))
    progress("left out by source")
    source = _predicted(found, fold_groups(members, "source"), new_stacks=True)[None]
    progress("left out by lab")
    lab = _predicted(found, fold_groups(members, "lab"), new_stacks=True)[None]
    progress("left out by lab, with three runs given")
    return {"model": np.stack(draws), "source": source, "lab": lab, "three": _three(found)}


def group_of(fold: str) -> Callable[[Member], Any]:
    """What the runs of a group have in common, by kind of fold. Raises `InputError` for another kind."""
    groups: Mapping[str, Callable[[Member], Any]] = {
        "model": lambda one: one.pair, "source": lambda one: one.source, "lab": lambda one: one.lab,
        "three": lambda one: one.source,
    }  # fmt: skip
    return chosen(groups, fold, "fold")


def model_folds(members: Sequence[Member], draw: int = 0) -> list[list[int]]:
    """Members by a tenth of the pairs of stack and model, dealt out at random: all runs of a pair are left out together."""
    pairs = sorted({one.pair for one in members})
    tenth = dict(zip(pairs, np.random.default_rng(SEED + draw).permutation(len(pairs)) % TENTHS, strict=True))
    return [[i for i, one in enumerate(members) if tenth[one.pair] == fold] for fold in range(TENTHS)]


def fold_groups(members: Sequence[Member], fold: str, draw: int = 0) -> list[list[int]]:
    """Which members are left out together: by tenths, by lab, or (three of its runs given or none) by source.

    Raises `InputError` for another kind of fold.
    """
    if fold == "model":
        return model_folds(members, draw)
    names = list(map(group_of(fold), members))
    return [[i for i, own in enumerate(names) if own == name] for name in sorted(set(names))]


def _predicted(found: Evidence, folds: Sequence[Sequence[int]], *, new_stacks: bool = False) -> Array:
    seconds = np.full(len(found.members), np.nan)
    for left_out in folds:
        free = without(found, left_out, new_stacks=new_stacks)
        for i in left_out:
            seconds[i] = _seconds(found.members[i].observation, found.fitted, free)
    return seconds


def without(found: Evidence, left_out: Sequence[int], *, new_stacks: bool = False) -> Array:
    """The constants from all but some members; `new_stacks`: the stacks of these are as expected of their kind."""
    observations, fitted = found.observations, found.fitted
    others = sorted(set(range(len(observations))) - set(left_out))
    free = fitted.found
    for _ in range(6):  # the pull of far residuals changes as they do
        free = free + step(observations, fitted, free, others)
    if new_stacks:
        stacks = {f"stack {observations[i].stack.name}" for i in left_out}
        new = np.array([who in stacks for who, _ in fitted.keys])
        free = np.where(new, fitted.expected, free)
    return free


def _three(found: Evidence) -> Array:
    """Three runs of a lab, drawn at random several times, move the constants from where the others leave them."""
    members, fitted = found.members, found.fitted
    seconds = np.full((DRAWS, len(members)), np.nan)
    random = np.random.default_rng(SEED)
    for lab in (one for one in fold_groups(members, "three") if len(one) > 2 * GIVEN):
        free = without(found, lab, new_stacks=True)
        for draw in range(DRAWS):
            given = random.choice(lab, GIVEN, replace=False).tolist()
            own = given_runs([members[i].observation for i in given], fitted, free)
            for i in set(lab) - set(given):
                seconds[draw, i] = _seconds(members[i].observation, own, own.found)
    return seconds


def given_runs(observations: Sequence[Observation], fitted: Fit, free: Array) -> Fit:
    """A fit to a few runs that starts at given constants."""
    index = {key: position for position, key in enumerate(fitted.keys)}
    begin = start(observations)
    expected = np.array([free[index[key]] for key in begin.keys])
    return fit(observations, begin.starting_at(expected), iterations=6, sigma=SIGMA_FEW)


def _seconds(observation: Observation, fitted: Fit, free: Array) -> float:
    return float(np.max(observation.seconds(fitted.constants_at(observation, free))))
