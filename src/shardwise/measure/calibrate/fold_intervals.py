"""90% prediction intervals from the folds of published runs, and which left-out runs are inside those of the other groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shardwise.hardware.calibration_constants import MODEL_KINDS
from shardwise.hardware.chips import chip_generation
from shardwise.hardware.published_constants import MIN_RUNS
from shardwise.measure.calibrate.constant_fit import FoldMember, fold_groups, group_key
from shardwise.measure.calibrate.prediction_spread import Array, ErrorClass, LeftOutErrors, Spread, fit_spread

# The kind of fold whose errors are the spread of a prediction for a stack that is known, unknown, or calibrated.
FOLD_OF_SPREAD = {"known": "model", "unknown": "lab", "calibrated": "three"}
KNOWN_FOLD, UNKNOWN_FOLD = FOLD_OF_SPREAD["known"], FOLD_OF_SPREAD["unknown"]


@dataclass(frozen=True, kw_only=True)
class FoldIntervals:
    """Runs with their kind of model and measured seconds, and predicted seconds by fold, [draw, run]."""

    members: Sequence[FoldMember]
    kinds: Array
    measured_s: Array
    seconds_by_fold: Mapping[str, Array]

    @cached_property
    def weights(self) -> Array:
        return np.array([member.observation.weight for member in self.members])

    def spread(self, fold: str) -> dict[str, Spread]:
        """Return the intervals of a fold by kind of model, of the kinds that it predicts."""
        return self._spreads(fold, range(len(self.seconds_by_fold[fold])))

    def num_groups(self, fold: str) -> int:
        """Return the number of groups that a fold leaves out in turn: pairs of stack and model, sources, or labs."""
        return len(set(map(group_key(fold), self.members)))

    def coverage(self, fold: str, chosen: NDArray[np.bool_] | None = None) -> float | None:
        """Return the weighted share of a fold's runs, or of the chosen ones, inside the interval that the other groups give."""
        inside = self._inside[fold]
        counted = ~np.isnan(inside) if chosen is None else ~np.isnan(inside) & chosen
        weights = np.broadcast_to(self.weights, inside.shape)[counted]
        return float(np.average(inside[counted], weights=weights)) if counted.any() else None

    @cached_property
    def _inside(self) -> Mapping[str, Array]:
        """1 for a run inside the interval that the other groups give and 0 for one outside, [draw, run]; nan without any."""
        return {fold: self._count_inside(fold) for fold in self.seconds_by_fold}

    def _count_inside(self, fold: str) -> Array:
        ratios = self.measured_s / self.seconds_by_fold[fold]
        inside = np.full(ratios.shape, np.nan)
        for draw in range(len(ratios)):
            for group in fold_groups(self.members, fold, draw):
                fold_spreads = self._spreads(fold, (draw,), group)
                unknown_spreads = self._spreads(UNKNOWN_FOLD, (0,), group) if fold == KNOWN_FOLD else fold_spreads
                for i in (i for i in group if not np.isnan(ratios[draw, i])):
                    spreads = fold_spreads if self._is_known[draw, i] else unknown_spreads
                    if self.kinds[i] in spreads:
                        low, high = spreads[self.kinds[i]].interval(self._error_class(i))
                        inside[draw, i] = low <= ratios[draw, i] <= high
        return inside

    def _spreads(self, fold: str, draws: Iterable[int], left_out: Collection[int] = ()) -> dict[str, Spread]:
        """Return the spreads of some draws of a fold by kind of model, without the runs that are left out."""
        draws = list(draws)
        spreads = {}
        for kind in MODEL_KINDS:
            is_counted = np.zeros((len(draws), len(self.members)), dtype=bool)
            is_counted[:] = (self.kinds == kind) & ~np.isin(np.arange(len(self.members)), list(left_out))
            is_counted &= ~np.isnan(self.seconds_by_fold[fold][draws])
            if fold == KNOWN_FOLD:  # the others are predicted as by an unknown stack, and say nothing of known ones
                is_counted &= self._is_known[draws]
            if is_counted.any():
                spreads[kind] = fit_spread(self._errors(fold, draws, is_counted), self.num_groups(fold))
        return spreads

    def _errors(self, fold: str, draws: Sequence[int], is_counted: NDArray[np.bool_]) -> LeftOutErrors:
        ratios, key = (self.measured_s / self.seconds_by_fold[fold])[draws], group_key(fold)
        runs: list[int] = np.nonzero(is_counted)[1].tolist()
        depth = 2 if fold == KNOWN_FOLD else 1  # a stack has a spread of its own where it is not new
        return LeftOutErrors(
            log_ratios=np.log(ratios[is_counted]), weights=self.weights[runs],
            classes=[self._error_class(i)[:depth] for i in runs], groups=[key(self.members[i]) for i in runs],
        )  # fmt: skip

    def _error_class(self, i: int) -> ErrorClass:
        observation = self.members[i].observation
        return chip_generation(observation.chip), observation.stack.name

    @cached_property
    def _is_known(self) -> NDArray[np.bool_]:
        """True if the other runs make the stack of a run a known one where its model is left out, [draw, run].

        The rule of predictions (`published_constants`): enough runs by the stack on the chip, of that kind of model.
        """
        keys = [
            (member.observation.stack.name, member.observation.chip, kind)
            for member, kind in zip(self.members, self.kinds, strict=True)
        ]
        is_known = np.zeros(self.seconds_by_fold[KNOWN_FOLD].shape, dtype=bool)
        for draw, row in enumerate(is_known):
            for group in fold_groups(self.members, KNOWN_FOLD, draw):
                left_out = set(group)
                remaining_runs = Counter(key for i, key in enumerate(keys) if i not in left_out)
                row[group] = [remaining_runs[keys[i]] >= MIN_RUNS for i in group]
        return is_known
