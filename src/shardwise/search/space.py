"""The space of layouts: every factorisation of the devices over the axes, times the discrete choices.

A *candidate* is a point of that product; the legality rules of `layout.legality` say which are layouts. Columns of
degrees are kept once per factorisation; everything else is a small integer that indexes a list of choices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.job import Job
from shardwise.layout.layout import RECOMPUTES
from shardwise.layout.legality import RULES
from shardwise.model.architecture import Architecture

Ints = NDArray[np.int64]
AXES = ("dp", "fsdp", "tp", "cp", "pp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """Values of the choices that are not degrees. The degrees are all factorisations of the number of devices."""

    sequence_parallel: tuple[int, ...] = (0, 1)
    micro_batch_seqs: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
    num_virtual_stages: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)
    zero_stage: tuple[int, ...] = (0, 1, 2, 3)
    recompute: tuple[str, ...] = RECOMPUTES


@dataclass(frozen=True, slots=True)
class Space:
    """Legal candidates without placement and recompute: `degrees` columns, and index columns into it and the choices."""

    choices: Choices
    degrees: Mapping[str, Ints]
    factorisation: Ints
    sequence_parallel: Ints
    micro_batch: Ints
    virtual: Ints
    zero: Ints
    num_candidates: int
    num_illegal_by_rule: Mapping[str, int]

    def families(self) -> dict[tuple[int, int, int], Ints]:
        """Candidates by structure: (sequence parallelism, ZeRO stage, without a pipeline), the choices by index."""
        single = np.asarray(self.degrees["pp"] == 1)[self.factorisation]
        count = len(self.choices.zero_stage)
        code = (self.sequence_parallel * count + self.zero) * 2 + single
        found = np.nonzero(np.bincount(code))[0]
        return {(int(c) // 2 // count, int(c) // 2 % count, int(c) % 2): np.nonzero(code == c)[0] for c in found}


def factorisations(number: int, num_parts: int) -> Ints:
    """All ordered ways to write `number` as a product of `num_parts` factors, one a row."""
    divisors = np.array([d for d in range(1, int(number**0.5) + 1) if number % d == 0], dtype=np.int64)
    divisors = np.unique(np.concatenate([divisors, number // divisors]))
    rows = np.array([[number]], dtype=np.int64)
    for _ in range(num_parts - 1):
        left = rows[:, -1]
        picked, which = np.nonzero(left[:, None] % divisors[None, :] == 0)
        factor = divisors[which]
        rows = np.concatenate([rows[picked, :-1], factor[:, None], (left[picked] // factor)[:, None]], axis=1)
    return rows


def build_space(architecture: Architecture, job: Job, num_devices: int, choices: Choices) -> Space:
    """Apply every rule to every candidate; a candidate counts under the first rule that it breaks."""
    rows = factorisations(num_devices, len(AXES))
    columns: dict[str, Any] = {axis: rows[:, i].reshape(-1, 1, 1, 1, 1) for i, axis in enumerate(AXES)}
    grid = ("sequence_parallel", "micro_batch_seqs", "num_virtual_stages", "zero_stage")
    for position, name in enumerate(grid):
        along = [1] * 5
        along[position + 1] = -1
        columns[name] = np.array(getattr(choices, name), dtype=np.int64).reshape(along)
    shape = (len(rows), *(len(getattr(choices, name)) for name in grid))
    legal, illegal = _apply_rules(architecture, job, num_devices, columns, shape)
    index = np.nonzero(legal)
    kept, factorisation = np.unique(index[0], return_inverse=True)
    degrees = {axis: rows[kept, i] for i, axis in enumerate(AXES)}
    times = len(choices.recompute)
    return Space(
        choices, degrees, factorisation, index[1], index[2], index[3], index[4],
        int(np.prod(shape)) * times, {name: count * times for name, count in illegal.items()},
    )  # fmt: skip


def _apply_rules(
    architecture: Architecture, job: Job, num_devices: int, columns: Mapping[str, Any], shape: tuple[int, ...]
) -> tuple[NDArray[np.bool_], dict[str, int]]:
    legal = np.ones(shape, dtype=bool)
    left = legal.size
    illegal: dict[str, int] = {}
    for rule in RULES:
        passed = rule.legal(architecture, job, num_devices, columns)
        if not np.all(passed):
            legal &= passed
            now = int(np.count_nonzero(legal))
            illegal[rule.name], left = left - now, now
    return legal, illegal
