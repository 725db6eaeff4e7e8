"""A report is one file: the page's own modules, one payload, nothing asked for and nothing else run."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path

import pytest

from shardwise.present.charts.palette import palette_payload, stylesheet
from shardwise.present.command_line import main
from shardwise.present.explorer.html_report import report
from shardwise.present.explorer.page_files import EXPORT, IMPORT, bundle_modules, pages
from shardwise.values.estimate_term_names import MEMORY_TERMS, TIME_TERMS

PLAN = ["plan", "llama-3.2-1b", "h100:8", "--batch-tokens", "512Ki", "--seq-len", "4096"]
MODULES = {path[1:-3]: page.text for path, page in pages().items() if path.endswith(".js")}


def payload_of(text: str) -> dict[str, object]:
    match = re.search(r'<script id="payload" type="application/json">\n(.*?)\n</script>', text, re.DOTALL)
    assert match
    payload: dict[str, object] = json.loads(match[1])
    return payload


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reports")
    assert main([*PLAN, "--out", str(folder / "plan.json"), "--report", str(folder / "plan.html")]) == 0
    return folder / "plan.html"


def test_a_plan_report_has_every_view_and_the_source_of_each_number(plan_file: Path) -> None:
    payload = payload_of(plan_file.read_text(encoding="utf-8"))
    assert payload["schema"] == "shardwise.report/1"
    views, why = payload["payload"]["views"], payload["payload"]["why"]  # type: ignore[index]
    saved = json.loads(plan_file.with_name("plan.json").read_text(encoding="utf-8"))
    assert views["overview"]["estimate"]["estimate"] == saved["estimate"]
    assert views["pareto"]["search"]["best"]["step_time_s"] == saved["estimate"]["step_time_s"]
    assert {f"time.{name}" for name, value in saved["estimate"]["time"].items() if value} <= why.keys()


VALIDATE = ["validate", "--chip", "h100", "--source", "torchtitan"]


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [(["explain", "{plan}"], "explain"), ([*PLAN, "--sweep", "gpus=8,16"], "sweep"), (VALIDATE, "validate")],
)
def test_verbs_write_what_they_print_as_json(
    arguments: list[str], kind: str, plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word.format(plan=plan_file.with_name("plan.json")) for word in arguments]
    target = tmp_path / "report.html"
    assert main([*words, "--json", "--report", str(target)]) == 0
    report = payload_of(target.read_text(encoding="utf-8"))
    assert report["kind"] == kind
    assert report["payload"] == json.loads(capsys.readouterr().out)


def test_a_report_asks_for_nothing_and_runs_its_own_script_alone(plan_file: Path) -> None:
    text = plan_file.read_text(encoding="utf-8")
    assert not re.search(r"(?:src|href)=\"(?!data:)", text)
    assert "http://" not in re.sub(r"http://www\.w3\.org/2000/svg", "", text)
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert len(scripts) == 1
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in text
    assert "default-src 'none'" in text


def test_text_of_a_payload_cannot_end_its_element() -> None:
    hostile = "</script><script>alert(1)</script>"
    text = report("explain", hostile, {"note": hostile})
    assert text.count("<script") == 2
    assert payload_of(text)["payload"] == {"note": hostile}


def test_reports_end_in_html(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*PLAN, "--report", "plan.pdf"])
    assert "ends in .html" in capsys.readouterr().err


def test_every_module_is_written_in_the_style_that_is_bundled() -> None:
    for name, text in MODULES.items():
        assert len(IMPORT.findall(text)) == len(re.findall(r"^import\b", text, re.MULTILINE)), name
        assert len(EXPORT.findall(text)) == len(re.findall(r"^export\b", text, re.MULTILINE)), name
    script = bundle_modules(MODULES, "report")
    assert not re.search(r"^(?:import|export)\b", script, re.MULTILINE)
    assert not re.search(r"^const \$main\b", script, re.MULTILINE)


def test_pages_never_parse_markup_from_data() -> None:
    for name, text in MODULES.items():
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text), name


def test_one_colour_for_one_term_on_both_themes() -> None:
    css, themes = stylesheet(), palette_payload()
    for name in {*TIME_TERMS, *MEMORY_TERMS}:
        for theme in ("light", "dark"):
            assert f"--term-{name}:{themes[theme]['terms'][name]}" in css
