"""Errors of predictions for runs outside the fit: groups of runs are left out in turn and predicted from the others.

- *model*: stack known, model new; a tenth of all pairs of stack and model at a time, several draws
- *source*: a source and its stack are new: its runs are left out, and the stack is at the priors of its kind
- *lab*: the same with all sources of a lab, such as NVIDIA's and Google's
- *three*: a source is new, and then three of its runs are given

Constants from the other runs follow from the derivatives at the fit to all, exact as long as log times are linear
there; runs that are left out are priced exactly.
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
from shardwise.values import Progress, ignore_progress, lookup

TENTHS, NUM_CALIBRATION_RUNS, DRAWS = 10, 3, 3
FOLDS = ("model", "source", "lab", "three")
REPEATED_FOLDS = ("model", "three")  # drawn at random, several times
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
    """An observation with its source's family and the text of its model's sizes, without the model's name."""

    observation: Observation
    family: str
    model: str

    @property
    def pair(self) -> tuple[str, str]:
        return self.observation.stack.name, self.model

    @property
    def source(self) -> str:
        """Family without its release: releases of one product are one source."""
        return next((source for source, names in SOURCES if re.match(names, self.family)), self.family)

    @property
    def lab(self) -> str:
        return next((lab for lab, names in LABS if re.match(names, self.family)), self.family)


@dataclass(frozen=True, slots=True, kw_only=True)
class FitEvidence:
    """A fit to members and then to observations that are never left out."""

    members: Sequence[FoldMember]
    always_fitted: Sequence[Observation] = ()
    fitted: ConstantFit

    @property
    def observations(self) -> list[Observation]:
        """Observations of the fit, in its order."""
        return [*(member.observation for member in self.members), *self.always_fitted]


class HeldOutPrediction(NamedTuple):
    """A prediction to make for a member, by kind of fold and draw, at these constants."""

    fold: str
    draw: int
    member: int
    constants: Mapping[str, float]


def cross_validate(evidence: FitEvidence, progress: Progress = ignore_progress) -> Mapping[str, Array]:
    """Return the predicted seconds by kind of fold, [draw, member]; nan if a fold does not predict a member."""
    return _predict(evidence.members, list(_held_out_predictions(evidence, progress)), progress)


def _held_out_predictions(evidence: FitEvidence, progress: Progress) -> Iterator[HeldOutPrediction]:
    members = evidence.members
    for draw in range(DRAWS):
        progress("left out by model", draw, DRAWS)
        yield from _leave_out_groups(evidence, "model", model_folds(members, draw), draw)
    for fold in ("source", "lab"):
        progress(f"left out by {fold}")
        yield from _leave_out_groups(evidence, fold, fold_groups(members, fold), new_stacks=True)
    progress("left out by lab, with three runs given")
    yield from _give_three_runs(evidence)


def _predict(
    members: Sequence[FoldMember], requests: Sequence[HeldOutPrediction], progress: Progress
) -> Mapping[str, Array]:
    """Return the seconds by kind of fold; all predictions of a member are priced in one call."""
    by_member: dict[int, list[HeldOutPrediction]] = {}
    for request in requests:
        by_member.setdefault(request.member, []).append(request)
    seconds = {fold: np.full((DRAWS if fold in REPEATED_FOLDS else 1, len(members)), np.nan) for fold in FOLDS}
    for number, (member, group) in enumerate(by_member.items()):
        progress("held-out runs predicted", number, len(by_member))
        constants = {name: np.array([request.constants[name] for request in group]) for name in group[0].constants}
        predicted_s = np.broadcast_to(members[member].observation.seconds(constants), len(group))
        for request, value in zip(group, predicted_s, strict=True):
            seconds[request.fold][request.draw, member] = value
    return seconds


def group_key(fold: str) -> Callable[[FoldMember], Any]:
    """Return the function that maps a member to its group in a kind of fold. Raises `InputError` for another kind."""
    groups: Mapping[str, Callable[[FoldMember], Any]] = {
        "model": lambda member: member.pair, "source": lambda member: member.source, "lab": lambda member: member.lab,
        "three": lambda member: member.source,
    }  # fmt: skip
    return lookup(groups, fold, "fold")


def model_folds(members: Sequence[FoldMember], draw: int = 0) -> list[list[int]]:
    """Return the members of ten folds; all runs of a pair of stack and model fall into the same, at random."""
    pairs = sorted({member.pair for member in members})
    tenth = dict(zip(pairs, np.random.default_rng(SEED + draw).permutation(len(pairs)) % TENTHS, strict=True))
    return [[i for i, member in enumerate(members) if tenth[member.pair] == fold] for fold in range(TENTHS)]


def fold_groups(members: Sequence[FoldMember], fold: str, draw: int = 0) -> list[list[int]]:
    """Return the groups of member indices that are left out together, for a kind of fold. Raises `InputError` for
    another kind."""
    if fold == "model":
        return model_folds(members, draw)
    names = list(map(group_key(fold), members))
    return [[i for i, name in enumerate(names) if name == group] for group in sorted(set(names))]


def _leave_out_groups(
    evidence: FitEvidence, fold: str, groups: Sequence[Sequence[int]], draw: int = 0, *, new_stacks: bool = False
) -> Iterator[HeldOutPrediction]:
    for group in groups:
        point = refit_without(evidence, group, new_stacks=new_stacks)
        for i in group:
            yield HeldOutPrediction(fold, draw, i, evidence.fitted.constants_at(evidence.members[i].observation, point))


def refit_without(evidence: FitEvidence, left_out: Sequence[int], *, new_stacks: bool = False) -> Array:
    """Return the point fitted without some members; with `new_stacks` their stacks are at the priors of their kind."""
    observations, fitted = evidence.observations, evidence.fitted
    kept_indices = sorted(set(range(len(observations))) - set(left_out))
    point = fitted.point
    # Linear steps with the slopes of the fit to all, in place of a refit; the Huber weights change between them.
    for _ in range(6):
        point = point + gauss_newton_step(observations, fitted, point, kept_indices)
    if new_stacks:
        stacks = {f"stack {observations[i].stack.name}" for i in left_out}
        is_new_stack = np.array([owner in stacks for owner, _ in fitted.keys])
        point = np.where(is_new_stack, fitted.prior, point)
    return point


def _give_three_runs(evidence: FitEvidence) -> Iterator[HeldOutPrediction]:
    """Yield predictions of a source after three of its runs, drawn at random, moved the constants of the others."""
    members, fitted = evidence.members, evidence.fitted
    random = np.random.default_rng(SEED)
    for lab in (group for group in fold_groups(members, "three") if len(group) > 2 * NUM_CALIBRATION_RUNS):
        point = refit_without(evidence, lab, new_stacks=True)
        for draw in range(DRAWS):
            calibration_runs = random.choice(lab, NUM_CALIBRATION_RUNS, replace=False).tolist()
            lab_fit = fit_calibration_runs([members[i].observation for i in calibration_runs], fitted, point)
            for i in sorted(set(lab) - set(calibration_runs)):
                yield HeldOutPrediction("three", draw, i, lab_fit.constants_at(members[i].observation, lab_fit.point))


def fit_calibration_runs(observations: Sequence[Observation], fitted: ConstantFit, point: Array) -> ConstantFit:
    """Return a fit to a few runs whose priors are the constants at `point`."""
    index = {key: position for position, key in enumerate(fitted.keys)}
    initial = initial_fit(observations)
    prior = np.array([point[index[key]] for key in initial.keys])
    return fit_constants(observations, initial.with_prior(prior), iterations=6, sigma=SIGMA_FEW)
