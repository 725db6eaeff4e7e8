"""The benchmarks of advice: what the best single pick is, under which stacks; the document of well-known runs."""

from __future__ import annotations

import importlib.util
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

import shardwise as sw
from shardwise.hardware.stacks import STACK_KINDS, get_stack, stack_names
from shardwise.layout.rules.stack_abilities import unsupported_choices

ROOT = Path(__file__).parents[2]


def benchmark(name: str) -> ModuleType:
    specification = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module  # dataclasses look there
    specification.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def advice() -> ModuleType:
    return benchmark("advice")


def test_a_pick_is_held_against_the_best_one_layout_for_all_stacks_that_run_it(advice: ModuleType) -> None:
    question = advice.Question("llama-3-8b", "h100:16", 64, 8192)
    model, job = sw.load_model(question.model), sw.Job(global_batch_tokens=64 * 8192, seq_len=8192)
    answer = advice.answer(question)
    assert answer.pick == sw.plan(model, sw.load_cluster("h100:16"), job).layout
    able = {
        name
        for name in stack_names()
        if name not in STACK_KINDS
        and "GPU" in (stack := get_stack(name)).platforms
        and not unsupported_choices(stack, model, replace(job, loss=stack.loss), answer.pick)
        and sw.estimate(
            model, sw.load_cluster("h100:16", stack=name), replace(job, loss=stack.loss), answer.pick
        ).fits
    }  # fmt: skip
    assert set(answer.seconds) == able
    assert len(able) > 3
    for name, (pick, single, best) in answer.seconds.items():
        assert best <= min(pick, single)
        assert not unsupported_choices(get_stack(name), model, job, answer.single)
    assert answer.above_best(1) <= answer.above_best(0) <= answer.above_best(1) + advice.BAR + 0.01
    assert answer.above_single <= advice.BAR
    worse = replace(answer, seconds={"a": (2.0, 1.0, 1.0), "b": (1.0, 1.0, 0.5)})
    assert (worse.above_single, worse.above_best(0), worse.above_best(1)) == (0.5, 1.0, 0.5)
    assert "50.0%" in advice.table([worse])


def test_there_are_twelve_questions(advice: ModuleType) -> None:
    assert len(advice.QUESTIONS) == 12
    assert len({str(question) for question in advice.QUESTIONS}) == 12
    assert {sw.load_cluster(question.cluster).chip.platform for question in advice.QUESTIONS} == {"GPU", "TPU"}


def test_the_document_is_of_twenty_well_known_runs_and_current() -> None:
    """One of them is compared anew: MT-NLG, for which the plan is what was run."""
    well_known = benchmark("well_known")
    text = (ROOT / "docs" / "advice.md").read_text(encoding="utf-8")
    described = tomllib.loads((ROOT / "benchmarks" / "well_known.toml").read_text(encoding="utf-8"))
    assert len(described) >= 20
    assert [line.removeprefix("## ") for line in text.splitlines() if line.startswith("## ")] == [
        run["title"] for run in described.values()
    ]
    assert all(entry.get("reason", "") in text for entry in described.values())
    (compared,) = well_known.compared("MT-NLG")
    assert _degrees(compared.best.layout) == _degrees(compared.used.case.layout) == (8, 1, 35, 3)
    row, paragraph = well_known.document([compared]).split("|---|\n")[1].split("\n\n", 1)
    assert row in text
    assert paragraph in text


def _degrees(layout: sw.Layout) -> tuple[int, ...]:
    return layout.tp, layout.cp, layout.pp, layout.num_virtual_stages
