"""The constants that published runs give for chips and stacks, from `catalog/published_constants.toml`
(`benchmarks/published.py` writes it), and clusters that are predicted with them.

A stack that no run names has the priors of its kind; a chip that no run has, the constants of the chip that it is like.
"""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from shardwise.hardware.calibration_constants import CONSTANTS, MODEL_KINDS, Calibration
from shardwise.hardware.chips import chip_names, load_chip, relative_clock
from shardwise.hardware.cluster import Cluster
from shardwise.hardware.stacks import CATALOG, Stack, get_stack, stack_names
from shardwise.values.errors import InputError

MODEL_KIND_WORDS: Mapping[str, str] = {"dense": "dense models", "moe": "mixtures of experts"}
MIN_RUNS = 5  # runs of a kind of model by a stack on a chip, from which on its predictions are those of a known stack
# Chips without published runs, and those that they are like: the same architecture with other memory or links.
SIMILAR_CHIP: Mapping[str, str] = {
    "h800": "h100", "h100-pcie": "h100", "h200": "h100", "a100-40gb": "a100-80gb", "a100-80gb-pcie": "a100-80gb",
    "b300": "b200", "gb300": "gb200", "tpu-v4": "tpu-v5p", "tpu-v3": "tpu-v5p", "tpu-v7x": "tpu-v6e",
}  # fmt: skip


@lru_cache(maxsize=1)
def load_published_fit() -> Mapping[str, Any]:
    """The results of the fit: constants by chip and by stack, their widths, the spread of predictions."""
    return tomllib.loads(CATALOG.joinpath("published_constants.toml").read_text(encoding="utf-8"))


class FittedConstant(NamedTuple):
    """An estimated constant: its value, its standard deviation on the unbounded scale, and the source of both."""

    value: float
    deviation: float
    source: str


def chip_with_runs(chip: str) -> str | None:
    """The chip with published runs whose constants a chip uses: itself, the one that it resembles, or None."""
    return next((name for name in (chip, SIMILAR_CHIP.get(chip)) if name in load_published_fit()["chips"]), None)


def is_measured(stack: Stack) -> bool:
    """Whether published runs are of the stack itself, not only of others of its kind."""
    return stack.known and stack.name in load_published_fit()["stacks"]


def constants_with_sources(chip: str, stack: Stack) -> dict[str, FittedConstant]:
    """The twelve constants of a chip under a stack: as fitted, else those of the chip that it resembles, else the priors."""
    like = chip_with_runs(chip)
    entries = {
        "chip": load_published_fit()["chips"].get(like, {}),
        "stack": load_published_fit()["stacks"].get(stack.name, {}),
    }
    sources = {
        "chip": load_published_fit()["source"] + (f"; {chip} as {like}" if like != chip else ""),
        "stack": load_published_fit()["source"],
    }  # fmt: skip
    expected = {"chip": f"no run of {chip}: what is expected of any chip", "stack": f"usual of its kind, {stack.kind}"}
    found = {}
    for name, one in CONSTANTS.items():
        entry = entries[one.owner]
        prior = _chip_prior(chip, name) if one.owner == "chip" else stack.prior(name)
        found[name] = (
            FittedConstant(float(entry[name]), float(entry["deviations"][name]), sources[one.owner])
            if name in entry
            else FittedConstant(prior, one.width, expected[one.owner])
        )
    return found


def _chip_prior(chip: str, name: str) -> float:
    """Where a constant of a chip without runs is expected: no faster than what micro-benchmarks reach on it."""
    prior = CONSTANTS[name].prior
    reached = getattr(load_chip(chip), name, None) if chip in chip_names() else None
    return max(min(prior, float(reached)), CONSTANTS[name].low) if reached is not None else prior


def num_runs(chip: str, stack: Stack, kind: str) -> int:
    """Published runs of a kind of model ("dense", "moe") by a stack on this very chip."""
    return int(load_published_fit()["runs"].get(stack.name, {}).get(chip, {}).get(kind, 0))


def constant_values(chip: str, stack: Stack) -> dict[str, float]:
    """The values of the twelve constants."""
    return {name: one.value for name, one in constants_with_sources(chip, stack).items()}


def published_calibration(chip: str, stack: Stack) -> Calibration:
    """The calibration from published runs of a chip under a stack, with the spread of predictions for known or unknown stacks.

    `spread_notes` name what had no runs, or too few, and what is used instead.
    """
    spread = {
        kind: load_published_fit()["spread"]["known" if num_runs(chip, stack, kind) >= MIN_RUNS else "unknown"][kind]
        for kind in MODEL_KINDS
    }
    return Calibration(
        stack=stack.name, fused_attention=not stack.unfused_attention,
        spread={kind: (float(low), float(high)) for kind, (low, high) in spread.items()},
        constants=constant_values(chip, stack), loss=stack.loss,
        source=load_published_fit()["source"], spread_notes=_spread_notes(chip, stack),
    )  # fmt: skip


def _spread_notes(chip: str, stack: Stack) -> dict[str, str]:
    """By kind of model, why the spread is that of an unknown stack; kinds with their own spread are left out."""
    without, few = tuple(_without_runs(chip, stack)), dict(_few_runs(chip, stack))
    found = {kind: "; ".join((*without, *([few[kind]] if kind in few else []))) for kind in MODEL_KINDS}
    return {kind: note for kind, note in found.items() if note}


def _without_runs(chip: str, stack: Stack) -> Iterator[str]:
    """What had no published runs, and what is used instead."""
    like = chip_with_runs(chip)
    if like is None:
        yield f"no published run is of {chip}, which has what is expected of any chip"
    elif like != chip:
        yield f"no published run is of {chip}, which is taken to be as {like}"
    if not stack.known:
        yield f"the stack is not known, and has the defaults of its kind, {stack.kind}: --stack NAME narrows the interval"
    elif not is_measured(stack):
        yield f"no published run is of {stack.name}, which has the defaults of its kind, {stack.kind}"


def _few_runs(chip: str, stack: Stack) -> Iterator[tuple[str, str]]:
    """Kinds of model that too few runs of a measured stack on this very chip are of, each with what follows for it."""
    if chip_with_runs(chip) != chip or not is_measured(stack):
        return
    for kind in MODEL_KINDS:
        if num_runs(chip, stack, kind) < MIN_RUNS:
            words = f"fewer than {MIN_RUNS} published runs are of {stack.name} on {chip} with {MODEL_KIND_WORDS[kind]}"
            yield kind, f"{words}: the interval is that of a new stack"


def with_published_constants(cluster: Cluster, stack: Stack) -> Cluster:
    """The cluster with what published runs say about its chip under a stack.

    Raises `InputError` for a stack that runs on other chips; of a chip whose platform is not known any is taken.
    """
    chip = cluster.chip
    if chip.platform and chip.platform not in stack.platforms:
        fitting = ", ".join(name for name in stack_names() if chip.platform in get_stack(name).platforms)
        raise InputError(
            f"stack: {stack.name} runs on {' and '.join(stack.platforms)}s, and {chip.name} is a {chip.platform}; one of "
            f"{fitting} is required"
        )
    return with_calibration(
        cluster, replace(published_calibration(chip.catalog_name, stack), clock=relative_clock(chip))
    )


def with_calibration(cluster: Cluster, calibration: Calibration) -> Cluster:
    """The cluster with a calibration, which replaces the one that it has."""
    return replace(cluster, calibration=calibration)


def without_calibration(cluster: Cluster) -> Cluster:
    """The cluster without its calibration."""
    return replace(cluster, calibration=None)
