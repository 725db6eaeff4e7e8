"""Constants of chips and stacks fitted to published runs (`catalog/published_constants.toml`, written by
`benchmarks/published.py`), and clusters with them.

A stack without runs has the priors of its kind; a chip without runs has the constants of a similar chip, at the clock that its
power allows, and a wider interval.
"""

import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from shardwise.hardware.calibration_constants import CONSTANTS, HIGHEST_CLOCK, IDEAL_CONSTANTS, MODEL_KINDS, Calibration
from shardwise.hardware.chips import chip_generation, chip_names, clock_of_similar_chip, load_chip, relative_clock
from shardwise.hardware.cluster import Cluster
from shardwise.hardware.stacks import CATALOG, Stack, get_stack, stack_names
from shardwise.values import InputError

MODEL_KIND_WORDS: Mapping[str, str] = {"dense": "dense models", "moe": "mixtures of experts"}
MIN_RUNS = 5  # runs of a kind of model by a stack on a chip, from which its spread is that of a known stack
# Similar chips of chips without published runs: the same architecture with other memory or links.
SIMILAR_CHIP: Mapping[str, str] = {
    "h800": "h100", "h100-pcie": "h100", "h200": "h100", "a100-40gb": "a100-80gb", "a100-80gb-pcie": "a100-80gb",
    "b300": "b200", "gb300": "gb200", "tpu-v4": "tpu-v5p", "tpu-v3": "tpu-v5p", "tpu-v7x": "tpu-v6e",
}  # fmt: skip
# Standard deviation of the logarithm of a step time by which a prediction with a similar chip's constants is off: the root of
# the mean square of these. Source: published runs of dense models priced with another chip's constants, at the clock of its
# power, less the mean error with their own: GB200 as B200 -0.7%, B200 as GB200 -8.9, H200 as H100 +20.6, H100 as H200 0, H100 as
# A100 +6.3, v6e as v5p -7.6, v5p as v6e +9.8, v5e as v5p +8.5, v5e as v6e +17.7. Of mixtures of experts it is less: 0.07.
SIMILAR_CHIP_DEVIATION = 0.11
QUANTILE_90 = 1.645  # of a normal distribution: half the width of a 90% interval over its standard deviation


@lru_cache(maxsize=1)
def load_published_fit() -> Mapping[str, Any]:
    """Load the results of the fit: constants by chip and by stack, their widths, the spread of predictions."""
    return tomllib.loads(CATALOG.joinpath("published_constants.toml").read_text(encoding="utf-8"))


class FittedConstant(NamedTuple):
    """Estimated constant: its value, its standard deviation on the unbounded scale, and the source of both."""

    value: float
    deviation: float
    source: str


def chip_with_runs(chip: str) -> str | None:
    """Return the chip with published runs whose constants a chip uses: itself, the one that it resembles, or None."""
    return next((name for name in (chip, SIMILAR_CHIP.get(chip)) if name in load_published_fit()["chips"]), None)


def is_measured(stack: Stack) -> bool:
    """Return True if published runs used the stack itself, not only others of its kind."""
    return stack.is_known and stack.name in load_published_fit()["stacks"]


def constants_with_sources(chip: str, stack: Stack) -> dict[str, FittedConstant]:
    """Return the thirteen constants of a chip under a stack: fitted, else those of the similar chip, else priors."""
    similar_chip = chip_with_runs(chip)
    chip_entry, stack_entries = load_published_fit()["chips"].get(similar_chip, {}), load_published_fit()["stacks"]
    sources = {
        "chip": load_published_fit()["source"] + (f"; {chip} as {similar_chip}" if similar_chip != chip else ""),
        "stack": load_published_fit()["source"],
    }  # fmt: skip
    prior_sources = {
        "chip": f"no run of {chip}: what is expected of any chip",
        "stack": f"usual of its kind, {stack.kind}",
    }
    fitted = {}
    for name, constant in CONSTANTS.items():
        entry = chip_entry if constant.owner == "chip" else stack_entries.get(stack.constant_owner(name), {})
        prior = _chip_prior(chip, name) if constant.owner == "chip" else stack.prior(name)
        fitted[name] = (
            FittedConstant(float(entry[name]), float(entry["deviations"][name]), sources[constant.owner])
            if name in entry
            else FittedConstant(prior, constant.width, prior_sources[constant.owner])
        )
    return fitted


def _chip_prior(chip: str, name: str) -> float:
    """Return the prior of a constant of a chip without runs: at most the fraction that micro-benchmarks reach on it."""
    prior = CONSTANTS[name].prior
    measured = getattr(load_chip(chip), name, None) if chip in chip_names() else None
    return max(min(prior, float(measured)), CONSTANTS[name].low) if measured is not None else prior


def num_runs(chip: str, stack: Stack, kind: str) -> int:
    """Return the number of published runs of a kind of model ("dense", "moe") by a stack on this very chip."""
    return int(load_published_fit()["runs"].get(stack.name, {}).get(chip, {}).get(kind, 0))


def constant_values(chip: str, stack: Stack) -> dict[str, float]:
    """Return the values of the thirteen constants."""
    return {name: constant.value for name, constant in constants_with_sources(chip, stack).items()}


def published_spread(knowledge: str, chip: str, stack: str, kind: str) -> tuple[float, float]:
    """Return the 90% interval for a kind of model ("dense", "moe"), as factors on a prediction.

    `knowledge`: "known" and "unknown" stacks, and "calibrated", an unknown one of which three runs were given. It is that of the
    chip's generation, of a known stack that of the stack on it, and that of all runs where these have none.
    """
    intervals = load_published_fit()["spread"][knowledge][kind]
    generation = chip_generation(chip)
    names = (spread_class(generation, stack), spread_class(generation), spread_class())
    low, high = next(intervals[name] for name in names if name in intervals)
    return float(low), float(high)


def spread_class(*names: str) -> str:
    """Return the name under which the interval of a class is filed: a generation, with a stack or without, or all.

    >>> spread_class("hopper", "nemo-25"), spread_class("hopper"), spread_class()
    ('hopper nemo-25', 'hopper', 'all')
    """
    return " ".join(names) or "all"


def published_calibration(chip: str, stack: Stack) -> Calibration:
    """Return the calibration from published runs of a chip under a stack, with the spread for a known or an unknown stack.

    `spread_notes` name what had no runs, or too few, and what is used instead.
    """
    spread = {
        kind: published_spread(
            "known" if num_runs(chip, stack, kind) >= MIN_RUNS else "unknown", chip, stack.name, kind
        )
        for kind in MODEL_KINDS
    }
    if chip_with_runs(chip) != chip:
        spread = {kind: (1.0 / _widen(1.0 / low), _widen(high)) for kind, (low, high) in spread.items()}
    return Calibration(
        stack=stack.name, fused_attention=not stack.unfused_attention, spread=spread,
        constants=constant_values(chip, stack), loss=stack.loss, clock=_clock_of_constants(chip),
        source=load_published_fit()["source"], spread_notes=_spread_notes(chip, stack),
    )  # fmt: skip


def _clock_of_constants(chip: str) -> float:
    """Return the sustained clock of a chip over that of the chip whose constants it uses."""
    similar_chip = chip_with_runs(chip)
    if similar_chip is None or chip not in chip_names():
        return 1.0
    return clock_of_similar_chip(load_chip(chip), load_chip(similar_chip))


def _widen(factor: float) -> float:
    """Return an end of an interval, a factor above 1, with the error of a similar chip's constants, independent of the rest."""
    return math.exp(math.hypot(math.log(factor), QUANTILE_90 * SIMILAR_CHIP_DEVIATION))


def _spread_notes(chip: str, stack: Stack) -> dict[str, str]:
    """Return why the spread is that of an unknown stack, for the kinds of model of which it is."""
    missing, few = tuple(_without_runs(chip, stack)), dict(_few_runs(chip, stack))
    notes = {kind: "; ".join((*missing, *([few[kind]] if kind in few else []))) for kind in MODEL_KINDS}
    return {kind: note for kind, note in notes.items() if note}


def _without_runs(chip: str, stack: Stack) -> Iterator[str]:
    """Yield what had no published runs, and what is used instead."""
    similar_chip = chip_with_runs(chip)
    if similar_chip is None:
        yield f"no published run is of {chip}, which has what is expected of any chip"
    elif similar_chip != chip:
        clock = _clock_of_constants(chip)
        at_clock = "" if clock == 1.0 else f", at {clock:.2f} of its share of the peak (power for each peak FLOP/s)"
        yield f"no published run is of {chip}, which is taken to be as {similar_chip}{at_clock}"
    if not stack.is_known:
        yield f"the stack is not known, and has the defaults of its kind, {stack.kind}: --stack NAME narrows the interval"
    elif not is_measured(stack):
        yield f"no published run is of {stack.name}, which has the defaults of its kind, {stack.kind}"


def _few_runs(chip: str, stack: Stack) -> Iterator[tuple[str, str]]:
    """Yield the kinds of model with too few runs of a measured stack on this very chip, each with the consequence."""
    if chip_with_runs(chip) != chip or not is_measured(stack):
        return
    for kind in MODEL_KINDS:
        if num_runs(chip, stack, kind) < MIN_RUNS:
            problem = (
                f"fewer than {MIN_RUNS} published runs are of {stack.name} on {chip} with {MODEL_KIND_WORDS[kind]}"
            )
            yield kind, f"{problem}: the interval is that of a new stack"


def with_published_constants(cluster: Cluster, stack: Stack) -> Cluster:
    """Return the cluster with the constants of published runs of its chip under a stack.

    Raises `InputError` for a stack that runs on other chips; a chip of unknown platform takes any stack.
    """
    chip = cluster.chip
    if chip.platform and chip.platform not in stack.platforms:
        fitting = ", ".join(name for name in stack_names() if chip.platform in get_stack(name).platforms)
        raise InputError(
            f"stack: {stack.name} runs on {' and '.join(stack.platforms)}s, and {chip.name} is a {chip.platform}; one of "
            f"{fitting} is required"
        )
    published = published_calibration(chip.catalog_name, stack)
    return with_calibration(
        cluster, replace(published, clock=min(published.clock * relative_clock(chip), HIGHEST_CLOCK))
    )


def with_calibration(cluster: Cluster, calibration: Calibration) -> Cluster:
    """Return the cluster with a calibration in place of its own."""
    return replace(cluster, calibration=calibration)


def with_ideal_constants(cluster: Cluster) -> Cluster:
    """Return a calibrated cluster with the constants of its stack where nothing is lost: no prediction is faster."""
    assert cluster.calibration is not None
    constants = {**cluster.calibration.constants, **IDEAL_CONSTANTS}
    return with_calibration(cluster, replace(cluster.calibration, constants=constants, spread={}))


def without_calibration(cluster: Cluster) -> Cluster:
    """Return the cluster without its calibration."""
    return replace(cluster, calibration=None)
