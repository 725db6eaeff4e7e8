"""A plan with a run of it, as the explorer opens them."""

from __future__ import annotations

from pathlib import Path

import pytest
from train.stand_in import small_plan, write_inputs

from shardwise.present.command_line import main
from shardwise.present.explorer.opened_plan import NameResolver, resolver_of_plan
from shardwise.search.plan_file import load_plan

STEPS = 6


def opened_run(place: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[NameResolver, list[str]]:
    """A small model trained on this machine, and the words that name its plan and its run on a command line."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("shardwise.run.trainer.machine_probe.BUDGET_S", 0.0)
    words = write_inputs(place, small_plan())
    assert main(["train", *words, "--device", "cpu", "--steps", str(STEPS)]) == 0
    return resolver_of_plan(load_plan(words[0]), Path(words[4])), [words[0], words[4]]
