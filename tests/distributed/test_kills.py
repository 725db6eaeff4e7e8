"""Runs killed by SIGKILL and resumed end like uninterrupted ones; sixty of them by `benchmarks/kills.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
from train.killing import LAYOUTS, Kill, Killable

STEPS = 60
KILLS = {
    "dp": Kill("rank 1", "in a step", 20, 0.0),
    "zero3": Kill("all", "in a save", 20, 0.0),
    "tp": Kill("launcher", "in a step", 20, 0.0),
    "pp": Kill("rank 0", "in a save", 20, 0.0),
    "ep": Kill("rank 0", "in a step", 20, 0.0),
}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_that_is_killed_ends_as_one_that_was_not(name: str, tmp_path: Path) -> None:
    model, layout, _ = LAYOUTS[name]
    uninterrupted, run = (
        Killable(tmp_path / name, model, layout, STEPS, checkpoint_every=4) for name in ("alone", "killed")
    )
    uninterrupted.ends()
    assert run.killed(KILLS[name])
    assert 0 < max(run.losses()) < STEPS
    run.ends()
    assert run.losses() == uninterrupted.losses()
