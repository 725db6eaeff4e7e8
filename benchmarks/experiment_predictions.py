"""Predictions of runs from a few measured ones: by factors on the terms of a step, and by a fit of the constants.

    python benchmarks/experiment_predictions.py --seeds 4

Layouts of a search have a drawn truth: factors on their terms, or constants drawn from their priors, with 2% of noise. Of the 30
fastest predictions some are measured; the root mean square error of the logarithm of all others is printed. Twenty minutes.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shardwise.hardware import Stack, published_calibration
from shardwise.layout import stack_of
from shardwise.measure.calibrate.constant_fit import (
    SIGMA,
    SIGMA_FEW,
    ConstantFit,
    fit_constants,
    initial_fit,
    linearise,
)
from shardwise.measure.calibrate.observations import Observation, run_observation
from shardwise.measure.calibrate.user_runs import run_from_log
from shardwise.measure.experiments.candidates import Candidate, list_candidates
from shardwise.measure.experiments.expected_information import DOES_NOT_FIT
from shardwise.measure.experiments.grid_file import read_grid
from shardwise.measure.experiments.renewed_predictions import StepTerms, renew_predictions

Array = NDArray[np.float64]
GRID = """
target = "megatron"
[problem]
model = "llama-3-8b"
cluster = "h100:16"
batch_tokens = "512Ki"
seq_len = 4096
stack = "megatron"
[layouts]
top = 96
"""
NOISE, TERM_DEVIATION, COMMON_DEVIATION, FASTEST = 0.02, 0.12, 0.1, 30
NUM_MEASURED = (3, 5, 10, 15)


@dataclass(frozen=True)
class Layouts:
    """Layouts that fit, with their terms, their observations at any constants, and the published constants."""

    terms: Sequence[StepTerms]
    observations: Sequence[Observation]
    initial: ConstantFit

    @classmethod
    def search(cls) -> Layouts:
        """Return the layouts of the grid."""
        grid = Path(tempfile.mkdtemp()) / "grid.toml"
        grid.write_text(GRID, encoding="utf-8")
        pairs = [
            (row, prediction) for row in list_candidates(read_grid(grid)).values() if (prediction := row.predict())
        ]
        fitting = [(row, prediction) for row, prediction in pairs if prediction.fits != DOES_NOT_FIT]
        stack = next(stack_of(row.problem.cluster) for row, _ in fitting if row.problem)
        assert stack is not None
        observations = [_observe(row, stack) for row, _ in fitting]
        published = published_calibration(observations[0].chip, stack).constants
        initial = initial_fit(observations, {key: published[key[1]] for key in observations[0].names})
        terms = [StepTerms(prediction=prediction, time=row.step_terms) for row, prediction in fitting]
        return cls(terms, observations, initial)

    def truths(self, num_seeds: int) -> Iterator[tuple[str, int, Array]]:
        """Yield the kind of each truth, its seed, and the logarithms of its steps."""
        names = sorted({name for term in self.terms for name in term.time})
        for seed in range(num_seeds):
            chance = np.random.default_rng(seed)
            common = chance.normal(0.0, COMMON_DEVIATION)
            factors = {name: math.exp(chance.normal(0.0, TERM_DEVIATION)) for name in names}
            steps = [common + math.log(_weighted_sum(term.time, factors)) for term in self.terms]
            yield "factors", seed, np.array(steps) + chance.normal(0.0, NOISE, len(steps))
        for seed in range(num_seeds):
            chance, fit = np.random.default_rng(seed), self.initial
            point = np.clip(fit.prior + fit.prior_widths * chance.normal(0.0, 1.0, len(fit.keys)), *fit.bounds)
            logs = linearise(self.observations, replace(fit, point=point)).log_times
            yield "constants", seed, logs + chance.normal(0.0, NOISE, len(logs))

    def errors(self, truth: Array, measured: Sequence[int]) -> list[float]:
        """Return errors before any run, by factors, and by fits with two deviations; and the coverage of the factors."""
        unmeasured_indices = [index for index in range(len(truth)) if index not in measured]
        before = np.array([math.log(self.terms[index].prediction.step_time_s) for index in unmeasured_indices])
        steps = renew_predictions(self.terms, [(index, math.exp(truth[index])) for index in measured])
        errors = [
            before - truth[unmeasured_indices],
            np.array([steps[index].mean for index in unmeasured_indices]) - truth[unmeasured_indices],
        ]
        runs = [replace(self.observations[index], measured_s=math.exp(truth[index])) for index in measured]
        for sigma in (SIGMA_FEW, SIGMA):
            fit = fit_constants(runs, self.initial, sigma=sigma)
            unmeasured = [self.observations[index] for index in unmeasured_indices]
            errors.append(
                linearise(unmeasured, replace(self.initial, point=fit.point)).log_times - truth[unmeasured_indices]
            )
        ends = [steps[index].interval90 for index in unmeasured_indices]
        inside = [low <= math.exp(truth[i]) <= high for i, (low, high) in zip(unmeasured_indices, ends, strict=True)]
        return [*(float(np.sqrt(np.mean(error**2))) for error in errors), float(np.mean(inside))]


def _observe(candidate: Candidate, stack: Stack) -> Observation:
    assert candidate.problem is not None
    assert candidate.layout is not None
    return run_observation(run_from_log("run", candidate.problem, candidate.layout, stack, 1.0).case, 1.0)


def _weighted_sum(time: Mapping[str, float], factors: Mapping[str, float]) -> float:
    return sum(seconds * factors[name] for name, seconds in time.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=4, help="draws of each truth")
    arguments = parser.parse_args()
    layouts, errors = Layouts.search(), dict[tuple[str, int], list[list[float]]]()
    fastest = np.argsort([term.prediction.step_time_s for term in layouts.terms])[:FASTEST]
    for kind, seed, truth in layouts.truths(arguments.seeds):
        order = np.random.default_rng(seed).permutation(fastest).tolist()
        for count in NUM_MEASURED:
            errors.setdefault((kind, count), []).append(layouts.errors(truth, sorted(order[:count])))
    print(
        f"{len(layouts.terms)} layouts; truth, runs measured; errors in % before, by factors, by fits; coverage of factors"
    )
    for (kind, count), rows in errors.items():
        print(kind, count, *(f"{100 * value:.1f}" for value in np.mean(rows, axis=0)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
