"""Fit the constants of chips and stacks to the published runs, and say how good predictions are where they were not fitted.

    python benchmarks/published.py            # folds only
    python benchmarks/published.py --write    # and src/shardwise/hardware/catalog/published_constants.toml
    python benchmarks/published.py --ablate   # what each constant buys: with it held where it is expected (ten minutes)
    python benchmarks/published.py --leads    # how often the layout that is predicted to lead does, by its lead

Takes about a minute on one core.
"""

from __future__ import annotations

import argparse
import sys
import time

from shardwise.hardware.calibration_constants import CONSTANTS
from shardwise.measure.calibrate.layout_ranking import ordered_share_by_lead, time_per_token
from shardwise.measure.calibrate.prediction_errors import predict_rows
from shardwise.measure.calibrate.published_fit import (
    STRATA,
    fit_published,
    fold_statistics,
    format_constants,
    write_constants,
)
from shardwise.measure.calibrate.published_runs.run_table import published_rows
from shardwise.present.rendering.plain_text import render_text
from shardwise.present.reports.calibration import fold_report


def ablate() -> None:
    """Mean and median error of each kind of fold, with some of the constants held."""
    groups: dict[str, tuple[str, ...]] = {"nothing": ()} | {name: (name,) for name in CONSTANTS}
    for owner in ("chip", "stack"):
        groups[f"all of a {owner}"] = tuple(name for name, constant in CONSTANTS.items() if constant.owner == owner)
    groups["all"] = tuple(CONSTANTS)
    print(f"{'held where expected':<24}{'in sample':>16}{'model new':>16}{'lab new':>16}")
    for name, fixed in groups.items():
        fit = fit_published(fixed=fixed)
        errors = [fold_statistics(fit, fold, STRATA["all"]) for fold in ("fitted", "model", "lab")]
        print(
            f"{name:<24}"
            + "".join(f"{statistics.mean:>8.1%}{statistics.median:>8.1%}" for statistics in errors if statistics),
            flush=True,
        )


LEADS = (0.0, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2)


def leads() -> None:
    """Pairs of layouts of one model on one machine: how often the predicted order is the measured one, by the predicted lead."""
    judged = [
        predicted for predicted in predict_rows(published_rows()) if predicted.scored and predicted.error is not None
    ]
    runs = [
        time_per_token(predicted.row, predicted.row.step_time_s, predicted.prediction.estimate.step_time_s)
        for predicted in judged
    ]
    for min_lead, (count, share) in zip(LEADS, ordered_share_by_lead(runs, LEADS), strict=True):
        print(f"lead of {min_lead:>4.0%} or more  {count:>5} pairs  {share:>6.1%} ordered rightly")


def print_stage(stage: str, done: int = 0, total: int = 0) -> None:
    """What is being done, once for each."""
    if done <= 1:
        print(stage, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the constants into the package")
    parser.add_argument("--ablate", action="store_true", help="hold each constant in turn where it is expected")
    parser.add_argument("--leads", action="store_true", help="how often the layout that is predicted to lead does")
    arguments = parser.parse_args()
    if arguments.leads:
        leads()
        return
    if arguments.ablate:
        ablate()
        return
    started = time.process_time()
    result = fit_published(progress=print_stage)
    print(render_text(fold_report(result)))
    print(f"{time.process_time() - started:.0f} s of CPU")
    if arguments.write:
        write_constants(format_constants(result))


if __name__ == "__main__":
    main()
