"""Reports of the page: numbers are those of the payload at their paths, every view has one, verbs' reports become panels."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from shardwise.present.explorer.explorer import Explorer
from shardwise.present.explorer.number_provenance import NUMBERS, field_path
from shardwise.present.explorer.opened_plan import NameResolver
from shardwise.present.explorer.page_reports import REPORTS, view_report
from shardwise.present.explorer.web_server import dump_payload
from shardwise.present.rendering.page_report import Action, Facts, PageSection, panels, report_to_json
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


@pytest.mark.parametrize("question", [name for name in REPORTS if name != "pareto"])
def test_a_layout_that_cannot_run_has_a_report_too(question: str) -> None:
    assert "heads_by_tp" in json.dumps(ask(question, "tp=64")["report"])


@pytest.mark.parametrize(
    ("outcome", "claim"),
    [
        ("searching", "searching for the best"), ("nothing fits", "no layout of this job fits"),
        ("refused", "whether another layout fits is not known"), ("stopped", "whether another layout fits is not known"),
    ],
)  # fmt: skip
def test_only_a_search_that_went_to_its_end_says_that_nothing_fits(outcome: str, claim: str) -> None:
    payload = ask("overview", LAYOUTS[0])
    problems = [] if outcome == "searching" else ["a problem"]
    payload["search"] = {"state": "done", "outcome": outcome, "best": None, "problems": problems}
    verdict = view_report("overview", payload)[0]
    assert verdict.claims[1] == [claim]


def test_a_text_reads_its_numbers_from_the_payload() -> None:
    payload = {"name": "h100", "chips": [{"rate": 2e9, "layout": "fsdp=8"}], "none": None, "share": 0.1875}
    text = PayloadText(payload)
    assert text.cells("{name}: {share:%@part}") == ["h100", ": ", Number("18.8%", 0.1875, "%", "part")]
    assert text.cells("{{x}}") == ["{", "x}"]
    assert text.cells("{none:s}") == [""]
    rows = text.table("chips", "rate | | ", "chips", "{rate:B} | *{layout} | [take it]").rows
    assert rows[1] == [
        Number("2 GB", 2e9, "B", "chips.0.rate"), Status("fsdp=8", "note"), Action("take it", {"layout": "fsdp=8"}),
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


def test_what_nothing_explains_is_text_and_what_is_unknown_a_dash() -> None:
    facts = Facts([("days", Number("-", None), []), ("usd", Number("$1", 1.0, "$", "usd"), [])])
    (section,) = report_to_json([PageSection(title="run", blocks=[facts])], lambda path: "")
    assert section["blocks"][0]["facts"] == [["days", {"unknown": "-"}, []], ["usd", "$1", []]]
