"""Texts of the page name no flag of the command line: not in errors, notes, choices, nor in where a number is from."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

import shardwise as sw
from shardwise.model.job import Job
from shardwise.present.explorer.answer_workers import ExplorerAnswers
from shardwise.present.explorer.background_search import Searches
from shardwise.present.explorer.explorer import QUESTIONS, Explorer
from shardwise.present.explorer.number_provenance import NUMBERS
from shardwise.present.explorer.opened_plan import NameResolver
from shardwise.present.explorer.page_wording import page_wording
from shardwise.present.explorer.request_guard import allowed_hosts
from shardwise.present.explorer.state import State
from shardwise.present.explorer.web_server import application

FLAG = re.compile(r"(?<![\w-])--[a-z]")
JOB = "model=llama-3-8b&cluster=h100:64&batch_tokens=1Mi&seq_len=8192"
STATES = {
    "pipeline": f"{JOB}&layout=tp=2+pp=4+fsdp=8+zero_stage=1",
    "bound": f"{JOB}&overlap=sum&layout=fsdp=64",
    "illegal": f"{JOB}&layout=tp=64",
    "unknown stack": "model=llama-3-8b&cluster=h800:64&layout=fsdp=64",
    "too long": "model=gpt-2&cluster=h100:8&seq_len=2048&layout=fsdp=8",
    "no peak": "model=gpt-2&cluster=v100:8&precision=bf16&layout=fsdp=8",
    "interleaved": f"{JOB}&layout=pp=4+fsdp=16+num_virtual_stages=2",
    "full": "model=llama-3-405b&cluster=h100:8&batch_tokens=64Ki&seq_len=8192&layout=fsdp=8",
}
REFUSED = (
    "model.num_layers=abc",
    "model.foo=3",
    "job.loss=none",
    "job.precision=fp3",
    "stack=nothing&overlap=sum",
    "noise_tokens=x",
    "model=nothing",
)


def texts(value: Any) -> Iterator[str]:
    """Every text of a payload that the page shows: not what it copies, and not the payload of a command."""
    if isinstance(value, dict):
        for key, part in value.items():
            if key not in ("command", "estimate"):
                yield from texts(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from texts(part)
    elif isinstance(value, str):
        yield value


@pytest.mark.parametrize("state", STATES)
def test_no_view_names_a_flag(state: str) -> None:
    explorer = Explorer(NameResolver())
    for question in QUESTIONS:
        if question in ("copy", "why"):
            continue
        answer = explorer.answer(question, STATES[state])
        assert [text for text in texts(answer) if FLAG.search(text)] == [], question


def test_no_provenance_names_a_flag() -> None:
    explorer = Explorer(NameResolver())
    priced = explorer.answer("overview", STATES["pipeline"])["estimate"]["estimate"]
    terms = [f"{tree}.{name}" for tree in ("time", "memory") for name in priced[tree]]
    for name in (*NUMBERS, *terms):
        answer = explorer.answer("why", f"{STATES['pipeline']}&term={name}")
        assert [text for text in texts(answer) if FLAG.search(text)] == [], name


@pytest.mark.parametrize("change", REFUSED)
def test_no_refusal_names_a_flag(change: str) -> None:
    app = application(ExplorerAnswers(Explorer(NameResolver())), allowed_hosts("127.0.0.1", 8631))
    with TestClient(app, base_url="http://127.0.0.1:8631") as client:
        answer = client.get(f"/ask/batch?cluster=h100:64&layout=fsdp=64&{change}")
    assert not FLAG.search(answer.text), answer.text


def test_a_search_that_finds_nothing_names_no_flag() -> None:
    job = Job(global_batch_tokens=1 << 16, seq_len=8192)
    searches = Searches()
    try:
        values = (sw.load_model("llama-3-405b"), sw.load_cluster("h100:8"), job)
        report = searches.wait(State(), values, 120)
        assert report["state"] == "done"
        assert report["problems"]
        assert [problem for problem in report["problems"] if FLAG.search(problem)] == []
    finally:
        searches.close()


def test_errors_outside_of_the_page_name_their_flags() -> None:
    with pytest.raises(sw.InputError, match="--seq-len 1024 or less"):
        sw.load_model("gpt-2").require_positions(2048)


def test_notes_have_the_words_of_the_page() -> None:
    notes = Explorer(NameResolver()).answer("overview", STATES["bound"])["notes"]
    assert any("a stack, chosen under Job" in note for note in notes)
    assert page_wording("a plain text - with a dash -- and two") == "a plain text - with a dash -- and two"
