"""Writes what was fitted to the published runs into the package."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np

from shardwise.calibrate.published import SPREADS, Published

HERE = Path(__file__).parents[1] / "cluster" / "measured" / "constants.toml"


def constants_toml(found: Published) -> str:
    """The constants by chip and stack with their deviations, and the spread of predictions, as TOML."""
    deviations = found.fitted.deviations(np.array([one.weight for one in found.evidence.observations]))
    lines = [
        "# Made by benchmarks/published.py --write; cluster/calibration.py says what each constant means.",
        f'source = "fitted to {len(found.members)} published runs of quality A and A- (calibrate/published_runs/runs.csv), each '
        'weighted 1/duplicates, beside half of a study of layouts (layouts.csv)"',
    ]
    lines += ["", "# 90% prediction interval, as factors on a prediction, from folds."]
    for name, fold in SPREADS.items():
        pairs = ", ".join(f"{kind} = [{low:.3f}, {high:.3f}]" for kind, (low, high) in found.spread(fold).items())
        lines.append(f"spread.{name} = {{ {pairs} }}")
    lines += ["", "# Runs by stack, chip and kind of model."]
    runs = Counter(
        (one.observation.stack.name, one.observation.chip, kind)
        for one, kind in zip(found.members, found.kinds, strict=True)
    )
    lines += [f'runs."{stack}"."{chip}".{kind} = {count}' for (stack, chip, kind), count in sorted(runs.items())]
    owners = sorted({who for who, _ in found.fitted.keys})
    for owner in owners:
        group, _, name = owner.partition(" ")
        own = [(key, d) for key, d in zip(found.fitted.keys, deviations, strict=True) if key[0] == owner]
        lines += ["", f'[{group}s."{name}"]', *(f"{key[1]} = {found.fitted.value(key):.4g}" for key, _ in own)]
        pairs = ", ".join(f"{key[1]} = {deviation:.2g}" for key, deviation in own)
        lines += ["# standard deviations on the line without bounds", f"deviations = {{ {pairs} }}"]
    return "\n".join(lines) + "\n"


def write_constants(text: str) -> None:
    """Replace the constants that the package comes with."""
    HERE.write_text(text, encoding="utf-8")
