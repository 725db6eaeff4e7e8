"""Values of published runs near a plan, and of their layouts priced beside it.

`measure.nearest_published_runs` finds the runs; `search.compare_published_runs` prices their layouts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRun:
    """A training run that others published.

    `layout_text` is the layout of its own devices; `recomputes` are the policies that it may have run with, one where the source
    states it. `tokens_per_s_per_device` was measured. `id` is that of its row in `calibrate/published_runs/runs.csv`.
    """

    id: str
    model_name: str
    chip: str
    num_devices: int
    software: str
    precision: str
    seq_len: int
    num_seqs: int
    layout_text: str
    recomputes: tuple[str, ...]
    tokens_per_s_per_device: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NearestRuns:
    """Published runs near a problem, nearest first. `same_model` and `same_chip` hold for all of them or for none."""

    runs: tuple[PublishedRun, ...]
    same_model: bool
    same_chip: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedLayout:
    """The layout of published runs on a plan's cluster, priced for its job at the plan's rates.

    `run` is the nearest of the `num_runs` with this layout, of which the fastest measured `best_tokens_per_s_per_device`. A
    refused layout has a `problem`, and no price. `lacks` says what the plan's stack does not support of it. `lead` is its step
    time over the plan's, less one; `time` and `memory` are its terms less the plan's, in seconds and bytes.
    """

    run: PublishedRun
    num_runs: int
    best_tokens_per_s_per_device: float
    layout_text: str
    problem: str = ""
    lacks: str = ""
    step_time_s: float | None = None
    memory_bytes: float | None = None
    fits: bool | None = None
    lead: float | None = None
    difference: str = ""
    time: Mapping[str, float] | None = None
    memory: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedComparison:
    """A plan beside the nearest published runs. `unlike`: choices of the plan that none of the runs made."""

    num_runs: int
    same_model: bool
    same_chip: bool
    unlike: tuple[str, ...]
    layouts: tuple[PublishedLayout, ...]
