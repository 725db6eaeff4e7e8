"""How good predictions are where they were not fitted: runs are left out in turn, and predicted from the others.

*model*: the stack is known, the model is new: a tenth of all pairs of stack and model at a time, several draws. *source*: a
source and its stack are new: their runs are left out, and the stack is expected to be as others of its kind. *lab*: the same
with all sources of a lab, NVIDIA's and Google's many among them. *three*: a source is new, and then three of its runs are
given. The constants of the others are found from the derivatives at the fit to all, which is exact as far as times are
straight lines there; what is left out is priced exactly.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from shardwise.measure.calibrate.constant_fit import (
    SIGMA_FEW,
    Array,
    ConstantFit,
    fit_constants,
    gauss_newton_step,
    initial_fit,
)
from shardwise.measure.calibrate.observations import Observation
from shardwise.values.errors import lookup
from shardwise.values.progress import Progress, ignore_progress

TENTHS, NUM_GIVEN, DRAWS = 10, 3, 3
FOLDS = ("model", "source", "lab", "three")
REPEATED_FOLDS = ("model", "three")  # those that chance decides, several times
SEED = 0
# Sources of several releases.
SOURCES = (("mbridge", r"nvidia-mbridge|mbridge"), ("dgxc", "dgxc"))
# Labs of several sources: what the name of a source starts with.
LABS = (
    ("NVIDIA", r"nvidia-|mbridge|dgxc|nemo|megatron-lm|megatron-core|megatron-ptdp|jax-toolbox|korthikanti"),
    ("Google", r"maxtext|tpu-"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldMember:
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
class FitEvidence:
    """A fit to members and to observations that are never left out, in this order."""

    members: Sequence[FoldMember]
    always_fitted: Sequence[Observation] = ()
    fitted: ConstantFit

    @property
    def observations(self) -> list[Observation]:
        """All that was fitted."""
        return [*(one.observation for one in self.members), *self.always_fitted]


class HeldOutPrediction(NamedTuple):
    """A prediction to make: of a member, for a kind of fold and draw, at constants by name."""

    fold: str
    draw: int
    member: int
    constants: Mapping[str, float]


def cross_validate(found: FitEvidence, progress: Progress = ignore_progress) -> Mapping[str, Array]:
    """Predicted seconds by kind of fold, [draw, member]; nan where a fold has none (given runs, labs of few)."""
    return _predict(found.members, list(_held_out_predictions(found, progress)), progress)


def _held_out_predictions(found: FitEvidence, progress: Progress) -> Iterator[HeldOutPrediction]:
    members = found.members
    for draw in range(DRAWS):
        progress("left out by model", draw, DRAWS)
        yield from _leave_out_groups(found, "model", model_folds(members, draw), draw)
    for fold in ("source", "lab"):
        progress(f"left out by {fold}")
        yield from _leave_out_groups(found, fold, fold_groups(members, fold), new_stacks=True)
    progress("left out by lab, with three runs given")
    yield from _give_three_runs(found)


def _predict(
    members: Sequence[FoldMember], asked: Sequence[HeldOutPrediction], progress: Progress
) -> Mapping[str, Array]:
    """Seconds by kind of fold; all of a member are worked out at once."""
    by_member: dict[int, list[HeldOutPrediction]] = {}
    for one in asked:
        by_member.setdefault(one.member, []).append(one)
    seconds = {fold: np.full((DRAWS if fold in REPEATED_FOLDS else 1, len(members)), np.nan) for fold in FOLDS}
    for number, (member, own) in enumerate(by_member.items()):
        progress("held-out runs predicted", number, len(by_member))
        constants = {name: np.array([one.constants[name] for one in own]) for name in own[0].constants}
        found = np.broadcast_to(members[member].observation.seconds(constants), len(own))
        for one, value in zip(own, found, strict=True):
            seconds[one.fold][one.draw, member] = value
    return seconds


def group_key(fold: str) -> Callable[[FoldMember], Any]:
    """What the runs of a group have in common, by kind of fold. Raises `InputError` for another kind."""
    groups: Mapping[str, Callable[[FoldMember], Any]] = {
        "model": lambda one: one.pair, "source": lambda one: one.source, "lab": lambda one: one.lab,
        "three": lambda one: one.source,
    }  # fmt: skip
    return lookup(groups, fold, "fold")


def model_folds(members: Sequence[FoldMember], draw: int = 0) -> list[list[int]]:
    """Members by a tenth of the pairs of stack and model, dealt out at random: all runs of a pair are left out together."""
    pairs = sorted({one.pair for one in members})
    tenth = dict(zip(pairs, np.random.default_rng(SEED + draw).permutation(len(pairs)) % TENTHS, strict=True))
    return [[i for i, one in enumerate(members) if tenth[one.pair] == fold] for fold in range(TENTHS)]


def fold_groups(members: Sequence[FoldMember], fold: str, draw: int = 0) -> list[list[int]]:
    """Which members are left out together: by tenths, by lab, or (three of its runs given or none) by source.

    Raises `InputError` for another kind of fold.
    """
    if fold == "model":
        return model_folds(members, draw)
    names = list(map(group_key(fold), members))
    return [[i for i, own in enumerate(names) if own == name] for name in sorted(set(names))]


def _leave_out_groups(
    found: FitEvidence, fold: str, groups: Sequence[Sequence[int]], draw: int = 0, *, new_stacks: bool = False
) -> Iterator[HeldOutPrediction]:
    """Each group of members from all the others."""
    for group in groups:
        free = refit_without(found, group, new_stacks=new_stacks)
        for i in group:
            yield HeldOutPrediction(fold, draw, i, found.fitted.constants_at(found.members[i].observation, free))


def refit_without(found: FitEvidence, left_out: Sequence[int], *, new_stacks: bool = False) -> Array:
    """The constants from all but some members; `new_stacks`: the stacks of these are as expected of their kind."""
    observations, fitted = found.observations, found.fitted
    others = sorted(set(range(len(observations))) - set(left_out))
    free = fitted.point
    for _ in range(6):  # the pull of far residuals changes as they do
        free = free + gauss_newton_step(observations, fitted, free, others)
    if new_stacks:
        stacks = {f"stack {observations[i].stack.name}" for i in left_out}
        new = np.array([who in stacks for who, _ in fitted.keys])
        free = np.where(new, fitted.prior, free)
    return free


def _give_three_runs(found: FitEvidence) -> Iterator[HeldOutPrediction]:
    """Three runs of a lab, drawn at random several times, move the constants from where the others leave them."""
    members, fitted = found.members, found.fitted
    random = np.random.default_rng(SEED)
    for lab in (one for one in fold_groups(members, "three") if len(one) > 2 * NUM_GIVEN):
        free = refit_without(found, lab, new_stacks=True)
        for draw in range(DRAWS):
            given = random.choice(lab, NUM_GIVEN, replace=False).tolist()
            own = fit_given_runs([members[i].observation for i in given], fitted, free)
            for i in sorted(set(lab) - set(given)):
                yield HeldOutPrediction("three", draw, i, own.constants_at(members[i].observation, own.point))


def fit_given_runs(observations: Sequence[Observation], fitted: ConstantFit, free: Array) -> ConstantFit:
    """A fit to a few runs that starts at given constants."""
    index = {key: position for position, key in enumerate(fitted.keys)}
    begin = initial_fit(observations)
    expected = np.array([free[index[key]] for key in begin.keys])
    return fit_constants(observations, begin.with_prior(expected), iterations=6, sigma=SIGMA_FEW)
