"""Every task begins unsolved, has a solution, and its check is a pure function of the state."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.present.explorer.book_tasks import TASKS, task_payload
from shardwise.present.explorer.explorer import Explorer
from shardwise.present.explorer.opened_plan import NameResolver
from shardwise.present.explorer.request import resolve_request
from shardwise.present.explorer.state import parse_query, write_query
from shardwise.values.errors import InputError

# Changes of the start state that solve each task, and some that almost do with what they miss.
SOLUTIONS = {
    "fit-70b": {"layout": "tp=4 pp=4 fsdp=4 zero_stage=1"},
    "hide-communication": {"layout": "tp=2 fsdp=32 zero_stage=1"},
    "short-bubble": {"layout": "tp=8 pp=8 num_virtual_stages=2"},
    "critical-batch": {"batch_tokens": "4Mi"},
}
FAILURES = [
    ("fit-70b", {"layout": "fsdp=64 recompute=full"}, "MFU"),
    ("fit-70b", {"layout": "tp=4 pp=4 fsdp=4 zero_stage=1", "batch_tokens": "4Mi"}, "model, cluster and batch of the task"),
    ("hide-communication", {"layout": "fsdp=64 zero_stage=1"}, "memory of a device"),
    ("short-bubble", {"layout": "tp=8 pp=4 fsdp=2 zero_stage=1"}, "pipeline stages"),
    ("critical-batch", {"batch_tokens": "16Mi"}, "tokens over the fewest"),
    ("critical-batch", {"noise_tokens": "64Ki"}, "steps over the fewest"),
]  # fmt: skip


def progress(name: str, changes: dict[str, str] | None = None) -> dict[str, Any]:
    explorer = Explorer(NameResolver())
    start = write_query(explorer.state(f"task={name}"))
    fields = dict(part.split("=", 1) for part in start.split("&")) | {
        key: text.replace(" ", "+") for key, text in (changes or {}).items()
    }
    query = "&".join(f"{key}={text}" for key, text in fields.items())
    payload: dict[str, Any] = explorer.answer(explorer.state(query).view, query)
    return payload["task"]


def test_every_task_has_a_solution() -> None:
    assert list(TASKS) == list(SOLUTIONS)


@pytest.mark.parametrize("name", TASKS)
def test_a_task_begins_unsolved_and_can_be_solved(name: str) -> None:
    start = progress(name)
    assert not start["done"]
    assert any(requirement["met"] for requirement in start["requirements"])
    assert start["url"].startswith("https://")
    done = progress(name, SOLUTIONS[name])
    assert done["done"], done["requirements"]


@pytest.mark.parametrize(("name", "changes", "label"), FAILURES)
def test_a_task_that_misses_a_number_is_not_done(name: str, changes: dict[str, str], label: str) -> None:
    task = progress(name, changes)
    assert not task["done"]
    assert [requirement["label"] for requirement in task["requirements"] if not requirement["met"]] == [label]


def test_a_layout_that_cannot_run_reaches_nothing() -> None:
    task = progress("fit-70b", {"layout": "tp=64 pp=2"})
    assert not task["done"]
    assert [requirement["value"] for requirement in task["requirements"]] == [None, None, None]


@pytest.mark.parametrize("name", TASKS)
def test_the_check_is_a_pure_function_of_the_state(name: str) -> None:
    state = parse_query(TASKS[name].start)
    request = resolve_request(state, NameResolver())
    assert task_payload(TASKS[name], request) == task_payload(TASKS[name], resolve_request(state, NameResolver()))


def test_numbers_of_a_task_are_those_of_the_plan() -> None:
    explorer = Explorer(NameResolver())
    answer = explorer.answer("overview", "task=short-bubble")
    bubble, stages, memory, _ = answer["task"]["requirements"]
    assert bubble["value"] == answer["verdict"]["bubble"]
    assert memory["value"] == answer["estimate"]["estimate"]["memory_bytes"]
    assert (
        stages["value"] == answer["estimate"]["layout"]["degrees"]["pp"]
        if "degrees" in answer["estimate"]["layout"]
        else 8
    )


def test_a_task_travels_in_the_address() -> None:
    explorer = Explorer(NameResolver())
    state = explorer.state("task=fit-70b")
    assert (state.model, state.task) == ("llama-3-70b", "fit-70b")
    assert parse_query(write_query(state)) == state
    assert explorer.answer("overview", "task=fit-70b&model=gpt-2&cluster=h100:8")["model_name"] == "gpt-2"
    assert explorer.answer("overview", "model=gpt-2&cluster=h100:8")["task"] is None


def test_an_unknown_task_is_refused() -> None:
    with pytest.raises(InputError, match="fit-70b"):
        Explorer(NameResolver()).answer("overview", "task=fit-70")
