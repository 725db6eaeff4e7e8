"""Values in notebooks: self-contained tables and a picture, for any name of a model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure

import shardwise as sw
from shardwise.measure.reconcile.reconciliation import Reconciliation
from shardwise.measure.reconcile.step_terms import CollectiveComparison, MemoryTerm, StepMemory, StepTime, TimeTerm
from shardwise.pipeline.registry import build_actions
from shardwise.pipeline.timeline import play_actions
from shardwise.present.charts.common_charts import bar_chart
from shardwise.present.displays import display_of
from shardwise.present.rendering.notebook import NotebookDisplay, NotebookTable
from shardwise.present.rendering.plain_text import render_text
from shardwise.present.reports.run import reconcile_report
from shardwise.search.plan import Plan
from shardwise.values.displayable import Displayable
from shardwise.values.errors import InputError
from shardwise.values.estimate_term_names import MEMORY_TERMS
from unit.draw.page import check_texts

HOSTILE = '<script>alert("1")</script> & <b>'
MODEL = replace(sw.load_model("llama-3.2-1b"), name=HOSTILE)
SIZES: dict[str, Any] = {"global_batch_tokens": 2**19, "seq_len": 4096}


@pytest.fixture(scope="module")
def plan() -> sw.Plan:
    return sw.plan(MODEL, "h100:8", **SIZES)


def reconciliation(plan: Plan) -> Reconciliation:
    """A run that took a tenth longer in every term."""
    time = plan.estimate.time
    terms = tuple(TimeTerm(name=name, predicted_s=value, measured_s=1.1 * value) for name, value in time.items())
    memory_terms = tuple(
        MemoryTerm(name=name, predicted=plan.estimate.memory[name], measured=1e9) for name in MEMORY_TERMS
    )
    step = plan.estimate.step_time_s
    return Reconciliation(
        plan=plan, path=Path("run"), machine=HOSTILE, changes={}, attribution=None, remarks=(HOSTILE,), advice=(),
        time=StepTime(
            predicted_s=step, interval90=None, measured_s=1.1 * step, low_s=step, high_s=1.2 * step, num_steps=10, rest_s=0.0,
            terms=terms,
        ),
        memory=StepMemory(
            terms=memory_terms, total=MemoryTerm(name="total", predicted=plan.estimate.memory_bytes, measured=1e10), runtime=0.0,
            resident_bytes=None, allocated_bytes=None, reserved_bytes=None,
        ),
        collectives=CollectiveComparison(planned=0, found=0, planned_bytes={}, found_bytes={}, miscounted=()),
    )  # fmt: skip


@pytest.fixture(scope="module")
def values(plan: sw.Plan) -> Mapping[str, Displayable]:
    return {
        "plan": plan,
        "estimate": plan.estimate,
        "comparison": sw.plan_clusters(MODEL, ["h100:8", "h200:8"], **SIZES),
        "explanation": sw.explain(plan, against="tp=8"),
        "memory": sw.memory(MODEL, "h100:16", "fsdp=8 pp=2 zero_stage=1"),
        "sweep": sw.sweep(MODEL, "h100:8", over="gpus=8,16", **SIZES),
        "schedule": play_actions(build_actions("1f1b", 4, 8)),
        "simulation": sw.simulation(plan),
        "reconciliation": reconciliation(plan),
    }


NAMES = ("plan", "estimate", "comparison", "explanation", "memory", "sweep", "schedule", "simulation", "reconciliation")


@pytest.mark.parametrize("name", NAMES)
def test_a_value_shows_tables_and_a_picture(values: Mapping[str, Displayable], name: str) -> None:
    html = values[name]._repr_html_()
    root = ElementTree.fromstring(html)
    tags = [element.tag.rpartition("}")[2] for element in root.iter()]
    assert {"table", "svg", "title"} <= set(tags)
    assert "script" not in tags
    assert "b" not in tags, "a name must be text, not an element"


@pytest.mark.parametrize("name", NAMES)
def test_html_is_self_contained(values: Mapping[str, Displayable], name: str) -> None:
    """Nothing is loaded: the only addresses are XML namespaces."""
    html = values[name]._repr_html_()
    assert not re.search(r"\b(src|href|onload)=|url\(|@import", html)
    assert set(re.findall(r"https?://[^\"\s]+", html)) == {"http://www.w3.org/2000/svg"}


@pytest.mark.parametrize("name", NAMES)
def test_pictures_are_legible_and_have_a_figure(values: Mapping[str, Displayable], name: str) -> None:
    check_texts(values[name].drawing())
    assert isinstance(values[name].figure(), Figure)


def test_hostile_names_are_shown_unchanged(values: Mapping[str, Displayable]) -> None:
    for name in ("plan", "explanation", "sweep", "simulation", "reconciliation"):
        text = "".join(ElementTree.fromstring(values[name]._repr_html_()).itertext())
        assert HOSTILE in text, name


def test_tables_have_the_numbers(values: Mapping[str, Displayable], plan: sw.Plan) -> None:
    text = " ".join(ElementTree.fromstring(plan._repr_html_()).itertext())
    assert str(plan.layout) in text
    assert f"{plan.estimate.mfu:.1%}" in text
    for alternative in plan.alternatives:
        assert alternative.reason in text
    swept = values["sweep"]
    assert isinstance(swept, sw.Swept)
    text = " ".join(ElementTree.fromstring(swept._repr_html_()).itertext())
    for point in swept.points:
        assert point.plan is not None
        assert str(point.plan.layout) in text


def test_a_picture_that_is_too_large_is_replaced_by_a_note() -> None:
    """Beside the table, which is shown all the same."""
    line = play_actions(build_actions("1f1b", 64, 512))
    root = ElementTree.fromstring(line._repr_html_())
    assert root.find("table") is not None
    assert "at most 8,192 are drawn" in "".join(root.itertext())
    with pytest.raises(InputError, match="at most 8,192"):
        line.drawing()


def test_a_reconciliation_is_shown_as_text_and_in_a_notebook(values: Mapping[str, Displayable]) -> None:
    reconciliation = values["reconciliation"]
    assert isinstance(reconciliation, Reconciliation)
    first = render_text(reconcile_report(reconciliation)).splitlines()[0]
    assert first.startswith(f"{HOSTILE}, 8 devices")
    assert [chart.title for chart in display_of(reconciliation).charts()] == [
        "Time of a step: predicted and measured", "Memory of a device: predicted and measured",
    ]  # fmt: skip


def test_empty_facts_are_left_out() -> None:
    table = NotebookTable.of({"a": "1", "b": ""})
    assert table.rows == (("a", "1"),)
    display = NotebookDisplay(title="t < u", tables=(table,), charts=lambda: (bar_chart("", "", {"": {"a": 1.0}}),))
    root = ElementTree.fromstring(display.html())
    assert root.findtext("p/strong") == "t < u"
    assert [cell.text for cell in root.iter("td")] == ["1"]
