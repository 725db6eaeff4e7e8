"""The static build answers as the explorer does, for examples and the neighbours of their best layout."""

from __future__ import annotations

import base64
import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

import shardwise as sw
from shardwise.present.explorer import static_build
from shardwise.present.explorer.answer_workers import dump_payload
from shardwise.present.explorer.background_search import report_searches
from shardwise.present.explorer.explorer import Explorer
from shardwise.present.explorer.opened_plan import NameResolver
from shardwise.present.explorer.state import parse_query
from shardwise.present.explorer.static_build import EXAMPLES, Example, canonical, edit_query, write_static_build
from shardwise.values.errors import InputError

SMALL = (Example("tiny-llama-15m", "h100:8", 1 << 16, 1024), Example("gpt-2", "h100:2", 1 << 16, 1024))


def answers_of(file: Path) -> dict[str, dict[str, Any]]:
    data = re.fullmatch(r'shardwiseAnswers\("([\w.-]+)","([\w+/=]+)"\);\n', file.read_text(encoding="utf-8"))
    assert data
    assert data[1] == file.stem
    store = json.loads(gzip.decompress(base64.b64decode(data[2])))
    values = store["values"]
    shown = {}
    for key, fields in store["answers"].items():
        places = {name: place if isinstance(place, list) else [place] for name, place in fields.items()}
        shown[key] = {name: [values[index] for index in places[name]] for name in places}
        shown[key] |= {name: values[place] for name, place in fields.items() if not isinstance(place, list)}
    return shown


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("static")
    write_static_build(folder / "site", examples=SMALL)
    return folder / "site"


@pytest.fixture(scope="module")
def answers(build: Path) -> dict[str, dict[str, Any]]:
    return answers_of(build / "answers" / "tiny-llama-15m-h100-8.js")


def best_query(answers: dict[str, dict[str, Any]]) -> str:
    return next(
        answer["query"]
        for key, answer in answers.items()
        if key.startswith("overview?") and answer["verdict"]["is_best"]
    )


def test_the_page_and_a_script_for_each_example_are_written(build: Path) -> None:
    assert sorted(str(file.relative_to(build)) for file in build.rglob("*") if file.is_file()) == [
        "answers/gpt-2-h100-2.js", "answers/tiny-llama-15m-h100-8.js", "index.html",
    ]  # fmt: skip


def test_the_page_says_what_is_not_in_the_build(build: Path) -> None:
    page = (build / "index.html").read_text(encoding="utf-8")
    assert "2 examples" in page
    assert static_build.OMITTED in page
    assert not re.search(r"(?:src|href)=\"(?!data:|#)", page)


def test_answers_are_those_of_the_explorer(answers: dict[str, dict[str, Any]]) -> None:
    query = best_query(answers)
    values = NameResolver()
    state = parse_query(query)
    *_, report = report_searches(values.model(state), values.cluster(state), values.job(state))
    explorer = Explorer(NameResolver(), static_build._FinishedSearch(report))
    for question in ("overview", "timeline", "roofline", "pareto"):
        expected = json.loads(dump_payload(explorer.answer(question, query)))
        stored = answers[f"{question}?{canonical(query)}"]
        assert {name: value for name, value in stored.items() if name not in ("controls", "tasks")} == {
            name: value for name, value in expected.items() if name not in ("controls", "tasks")
        }


def test_the_best_layout_is_that_of_plan(answers: dict[str, dict[str, Any]]) -> None:
    chosen = sw.plan("tiny-llama-15m", "h100:8", global_batch_tokens=1 << 16, seq_len=1024)
    assert answers[f"overview?{canonical(best_query(answers))}"]["layout_text"] == str(chosen.layout)


def test_every_choice_leads_to_an_answer(answers: dict[str, dict[str, Any]]) -> None:
    overviews = [answer for key, answer in answers.items() if key.startswith("overview?")]
    assert len(overviews) > 20
    choices = 0
    for overview in overviews:
        assert overview["controls"][0]["name"] == "example"
        for control in overview["controls"][1:]:
            assert len(control["options"]) > 1
            for option in control["options"]:
                choices += 1
                assert f"overview?{canonical(edit_query(overview['query'], option['edit']))}" in answers
    assert choices > 100


def test_a_neighbour_has_its_views_and_the_best_has_where_its_numbers_are_from(
    answers: dict[str, dict[str, Any]],
) -> None:
    best = best_query(answers)
    assert f"schedule?{canonical(edit_query(best, {'view': 'schedule'}))}" in answers
    assert f"why?{canonical(edit_query(best, {'term': 'time.forward'}))}" in answers
    for key, overview in answers.items():
        if key.startswith("overview?") and not overview["problems"]:
            for view in ("notation", "batch"):
                assert f"{view}?{canonical(edit_query(overview['query'], {'view': view}))}" in answers


def test_the_same_answers_are_the_same_bytes(tmp_path: Path) -> None:
    first, second = (write_static_build(tmp_path / name, examples=SMALL[1:])[0] for name in "ab")
    assert first.read_bytes() == second.read_bytes()


def test_a_dozen_examples_are_known_and_each_has_a_file_of_its_own() -> None:
    assert len(EXAMPLES) == 12
    assert len({example.name for example in EXAMPLES}) == 12
    for example in EXAMPLES:
        state = static_build._start_state(example)
        job = NameResolver().job(state)
        assert job.global_batch_tokens % job.seq_len == 0
        assert NameResolver().cluster(state).num_devices > 1


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(InputError, match="writable folder"):
        write_static_build(tmp_path / "file", examples=SMALL)


def test_an_example_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="llama-3-405b on h100:8"):
        write_static_build(tmp_path, examples=(Example("llama-3-405b", "h100:8", 1 << 16, 8192),))
