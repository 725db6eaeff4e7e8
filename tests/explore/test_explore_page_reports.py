"""Reports of the page: numbers are those of the payload at their paths, every view has one, verbs' reports become panels."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

import shardwise as sw
from shardwise.present.charts.chart import Chart
from shardwise.present.charts.chart_json import chart_to_json
from shardwise.present.charts.draw_chart import draw
from shardwise.present.explorer.answer_workers import dump_payload
from shardwise.present.explorer.background_search import SEARCHING, Values, report_searches
from shardwise.present.explorer.explorer import Explorer
from shardwise.present.explorer.number_provenance import NUMBERS, field_path
from shardwise.present.explorer.opened_plan import NameResolver
from shardwise.present.explorer.page_reports import REPORTS, view_report
from shardwise.present.explorer.state import State
from shardwise.present.rendering.page_report import Facts, PageAction, PageSection, panels, report_to_json
from shardwise.present.rendering.payload_text import FORMATS, PayloadText, format_share
from shardwise.present.rendering.report import Line, Number, Preformatted, Section, ShareBar, Status, Table

JOB = "model=llama-3-8b&cluster=h100:64&batch_tokens=1Mi&seq_len=8192"
LAYOUTS = ("tp=2+pp=4+fsdp=8+zero_stage=1", "fsdp=64", "pp=8+fsdp=8+schedule=zb_v+num_virtual_stages=2")


def ask(question: str, layout: str) -> dict[str, Any]:
    answer = Explorer(NameResolver()).answer(question, f"{JOB}&layout={layout}")
    payload: dict[str, Any] = json.loads(dump_payload(answer))
    return payload


def numbers(value: Any) -> Iterator[tuple[str, str]]:
    """Text and path of every number of a report."""
    if isinstance(value, dict):
        if "number" in value:
            yield value["number"], value["path"]
        for part in value.values():
            yield from numbers(part)
    elif isinstance(value, list):
        for part in value:
            yield from numbers(part)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("question", REPORTS)
def test_every_number_is_the_one_at_its_path(question: str, layout: str) -> None:
    payload = ask(question, layout)
    if question != "pareto":  # nothing is searched
        assert payload["report"]
    for text, path in numbers(payload["report"]):
        if path in NUMBERS or path.startswith(("time.", "memory.")):
            continue  # explained by name
        assert field_path(payload["fields"], path) == path
        value = PayloadText(payload).value(path)
        texts = {form(value) for form in FORMATS.values()} | {format_share(abs(value), 0)}
        if not path.endswith("shards.rest.elements"):  # written as the sizes of its dims
            assert text in texts, path


def layout_values(step_time_s: float, memory_bytes: float) -> dict[str, Any]:
    return {"layout": "fsdp=8+tp=1", "text": "fsdp=8", "step_time_s": step_time_s, "memory_bytes": memory_bytes}


FRONT = [layout_values(1.0, 30e9), layout_values(2.0, 20e9)]
SEARCHED = {
    "search": {
        "best": FRONT[0], "front": FRONT, "points": [*FRONT, layout_values(3.0, 40e9)], "num_layouts": 3, "num_fitting": 3,
    },
    "own": layout_values(2.5, 50e9), "memory_capacity_bytes": 80e9,
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("question", REPORTS)
def test_charts_of_the_page_are_drawn_as_pictures_too(question: str, layout: str) -> None:
    report = view_report(question, SEARCHED if question == "pareto" else ask(question, layout))
    blocks = [block for section in report for block in section.blocks]
    charts = [block for block in blocks if isinstance(block, Chart)]
    assert charts or question == "notation"  # whose charts are choices
    for chart in charts:
        text, values = draw(chart).svg(), json.loads(json.dumps(chart_to_json(chart)))
        (panel,) = values["panels"]
        for axis in (panel["x"], panel["y"]):
            assert all(text for ticks in axis["ticks"] for _, text in ticks)
        for mark in panel["marks"]:
            assert mark["kind"] != "Points" or mark["hover"].partition("\n")[0] in text.replace("&amp;", "&")


def test_a_point_of_the_front_is_a_layout_to_take() -> None:
    (section,) = report_to_json(view_report("pareto", SEARCHED))
    (chart,) = [block["chart"] for block in section["blocks"] if "chart" in block]
    points = [mark for mark in chart["panels"][0]["marks"] if mark["kind"] == "Points"]
    assert [point.get("query") for point in points] == [*["layout=fsdp%3D8%2Btp%3D1"] * 5, None, None]
    assert [entry["label"] for entry in chart["legend"]] == [
        "fastest of its degrees", "on the front", "the plan", "this layout",
    ]  # fmt: skip


@pytest.mark.parametrize("question", [name for name in REPORTS if name not in ("pareto", "serving")])
def test_a_layout_that_cannot_run_has_a_report_too(question: str) -> None:
    assert "heads_by_tp" in json.dumps(ask(question, "tp=64")["report"])


def test_a_text_reads_its_numbers_from_the_payload() -> None:
    payload = {"name": "h100", "chips": [{"rate": 2e9, "layout": "fsdp=8"}], "none": None, "share": 0.1875}
    text = PayloadText(payload)
    assert text.cells("{name}: {share:%@part}") == ["h100", ": ", Number("18.8%", 0.1875, "%", "part")]
    assert text.cells("{{x}}") == ["{", "x}"]
    assert text.cells("{none:s}") == [""]
    rows = text.table("chips", "rate | | ", "chips", "{rate:B} | *{layout} | [take it]").rows
    assert rows[1] == [
        Number("2 GB", 2e9, "B", "chips.0.rate"), Status("fsdp=8", "note"), PageAction("take it", {"layout": "fsdp=8"}),
    ]  # fmt: skip


def test_sections_of_a_verb_become_panels() -> None:
    report = [
        Section(["    first"], title="head"), Section([Line(("second ", Number("1 s", 1.0, "s", "step")))]),
        Section([Table(rows=(("term", "s"), ("tp", ShareBar("##--", "tp"))), right=(1,))], detail=True, name="terms"),
        Section([Preformatted(lambda width: ["|>>|"])]),
    ]  # fmt: skip
    first, folded, last = report_to_json(panels(report, "Title"), lambda path: f"run.{path}")
    assert first["title"] == "Title"
    assert first["blocks"][1] == {"text": "    first", "style": "line", "indent": 2}
    assert first["blocks"][2]["text"] == ["second ", {"number": "1 s", "path": "run.step"}]
    assert folded["fold"] == "terms"
    assert folded["blocks"][0]["rows"] == [["tp", {"bar": [["#", 2 / 28], ["-", 2 / 28]], "term": "tp"}]]
    assert last["blocks"] == [{"pre": "|>>|"}]


def test_unexplained_numbers_are_text_and_unknown_ones_a_dash() -> None:
    facts = Facts([("days", Number("-", None), []), ("usd", Number("$1", 1.0, "$", "usd"), [])])
    (section,) = report_to_json([PageSection(title="run", blocks=[facts])], lambda path: "")
    assert section["blocks"][0]["facts"] == [["days", {"unknown": "-"}, []], ["usd", "$1", []]]


def test_the_timeline_says_why_its_step_is_not_the_predicted_one() -> None:
    payload = ask("timeline", LAYOUTS[0])
    simulated, predicted = payload["simulation"]["step_time_s"], payload["simulation"]["estimate"]["step_time_s"]
    assert abs(simulated / predicted - 1) > 0.005
    texts = json.dumps(payload["report"], ensure_ascii=False)
    assert payload["simulation"]["difference"][1:] in texts
    assert "The time that this page prints is the prediction." in texts
    assert texts.index("predicted") < texts.index("simulated")


def test_days_of_batches_carry_the_interval_of_the_step() -> None:
    payload = ask("batch", LAYOUTS[1])
    priced = [row for row in payload["rows"] if row["days"] is not None]
    assert priced
    for row in priced:
        low, high = row["days_interval90"]
        assert low < row["days"] < high
    assert f"{priced[0]['days_interval90'][1]:.3g}" in json.dumps(payload["report"])


def test_a_rate_without_a_source_is_not_said_to_keep_a_layout_from_running() -> None:
    query = "model=llama-3-8b&cluster=a100-80gb:8&batch_tokens=1Mi&seq_len=8192&precision=fp8_deepseek_v3&layout=fsdp=8"
    unknown = Explorer(NameResolver()).answer("overview", query)
    assert "no sourced fp8" in unknown["problems"][0]
    assert unknown["report"][0]["title"] == "Whether this layout runs is not known"
    illegal = Explorer(NameResolver()).answer("overview", f"{JOB}&layout=tp=3+fsdp=8")
    assert illegal["report"][0]["title"] == "This layout cannot run"


class Ended:
    """A search that ended with a report."""

    def __init__(self, outcome: str, problem: str) -> None:
        self.report = {**SEARCHING, "state": "done", "outcome": outcome, "problems": [problem]}

    def ask(self, setting: State, values: Values) -> Mapping[str, Any]:
        return self.report


@pytest.mark.parametrize(
    ("outcome", "claim"),
    [
        ("nothing fits", "no layout of this job fits"),
        ("refused", "the best layout is not known"),
        ("stopped", "the best layout is not known: the search was stopped"),
    ],
)
def test_a_search_without_a_result_is_no_verdict_on_fit(outcome: str, claim: str) -> None:
    answer = Explorer(NameResolver(), Ended(outcome, "why it ended")).answer(
        "overview", "model=gpt-2&cluster=h100:8&layout=fsdp=8"
    )
    texts = json.dumps(answer["report"])
    assert claim in texts
    assert "why it ended" in texts
    assert ("no layout of this job fits" in texts) == (outcome == "nothing fits")


def test_a_problem_of_the_job_is_no_verdict_on_fit() -> None:
    job = sw.Job(global_batch_tokens=1 << 16, seq_len=1024)
    (refused,) = report_searches(sw.load_model("gpt-2"), sw.load_cluster("h100:8"), replace(job, seq_len=2048))
    assert refused["outcome"] == "refused"
    (full,) = report_searches(sw.load_model("llama-3-405b"), sw.load_cluster("h100:8"), job)
    assert full["outcome"] == "nothing fits"
