"""`shardwise mcp`: ten questions that the protocol's own client asks, over pipes and in this process."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest
from answers import answer
from mcp import Client, StdioServerParameters
from mcp.types import CallToolResult

from shardwise.present.mcp_server import make_server
from shardwise.present.verbs.environment import TOOLS

JOB = {"model": "llama-3-8b", "cluster": "h100:8", "global_batch_tokens": "512Ki", "seq_len": "8192"}
WORDS = ("llama-3-8b", "h100:8", "--batch-tokens", "512Ki", "--seq-len", "8192")


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Question 1: a plan, written to a file."""
    path = tmp_path_factory.mktemp("mcp") / "plan.json"
    result = ask("plan", {**JOB, "cluster": ["h100:8"], "stack": "megatron", "out": str(path)})
    assert not result.is_error
    assert json.loads(path.read_text()) == result.structured_content
    return path


def ask(tool: str, arguments: Mapping[str, Any]) -> CallToolResult:
    async def question() -> CallToolResult:
        async with Client(make_server(TOOLS)) as client:
            return await client.call_tool(tool, dict(arguments))

    return anyio.run(question)


def text_of(result: CallToolResult) -> str:
    return "\n".join(part.text for part in result.content if part.type == "text")


def without_seconds(payload: Any) -> Any:
    """A payload without the search's CPU time, which differs from run to run."""
    return {**payload, "search": {**payload["search"], "cpu_seconds": None}}


def test_a_plan_is_that_of_the_command_line(plan_file: Path) -> None:
    printed = json.loads(answer("plan", *WORDS, "--stack", "megatron", "--json"))
    assert without_seconds(json.loads(plan_file.read_text())) == without_seconds(printed)


def test_an_estimate() -> None:
    result = ask("estimate", {**JOB, "layout": "fsdp=8 recompute=full"})
    assert result.structured_content == json.loads(
        answer("estimate", *WORDS, "--layout", "fsdp=8 recompute=full", "--json")
    )
    assert "predicted for" in text_of(result)


def test_memory_of_two_layouts_short_and_long() -> None:
    arguments = {"model": "llama-3-8b", "cluster": "h100:8", "layout": ["tp=8", "fsdp=8"]}
    short, long = ask("memory", arguments), ask("memory", {**arguments, "verbose": True})
    assert short.structured_content == long.structured_content
    assert "with -v" in text_of(short)
    assert "by term" in text_of(long)
    assert len(long.structured_content["layouts"]) == 2


def test_memory_with_two_words_states_its_defaults() -> None:
    result = ask("memory", {"model": "gpt-2", "cluster": "h100:8"})
    assert result.structured_content["defaults"] == ["seq_len", "batch_tokens", "layout"]


def test_an_explanation_of_a_plan_file(plan_file: Path) -> None:
    result = ask("explain", {"plan": str(plan_file), "against": "tp=8"})
    assert result.structured_content["schema"] == "shardwise.explain/3"
    assert "slower" in text_of(result)


def test_an_export_writes_a_launch_and_it_is_read_again(plan_file: Path, tmp_path: Path) -> None:
    exported = ask("export", {"plan": str(plan_file), "target": "megatron", "out": str(tmp_path / "run")})
    assert not exported.is_error, text_of(exported)
    launch = next((tmp_path / "run").glob("*.sh"))
    read = ask("read", {"files": str(launch), "cluster": "h100:8"})
    assert not read.is_error, text_of(read)
    assert read.structured_content["schema"] == "shardwise.read/3"


def test_wrong_arguments_are_named_all_at_once() -> None:
    result = ask("plan", {"model": "llama-9", "cluster": ["h101:8"], "global_batch_tokens": "x"})
    assert result.is_error
    for part in ("llama-9", "h101", "global_batch_tokens: found 'x'"):
        assert part in text_of(result)
    missing = ask("memory", {"model": "llama-3-8b", "modell": "x"})
    assert "no parameter 'modell'" in text_of(missing)
    assert "cluster is missing" in text_of(missing)


def test_a_tool_that_is_not_offered_is_an_error() -> None:
    result = ask("train", {})
    assert result.is_error
    assert "tool: found 'train'; one of plan" in text_of(result)


def test_a_layout_that_breaks_a_rule_is_an_error() -> None:
    result = ask("estimate", {**JOB, "layout": "tp=3"})
    assert result.is_error
    assert "tp" in text_of(result)


def schemas() -> Iterator[tuple[str, dict[str, Any]]]:
    async def tools() -> list[tuple[str, dict[str, Any]]]:
        async with Client(make_server(TOOLS)) as client:
            return [(tool.name, tool.input_schema) for tool in (await client.list_tools()).tools]

    yield from anyio.run(tools)


def test_every_tool_describes_its_parameters() -> None:
    listed = dict(schemas())
    assert set(listed) == set(TOOLS)
    assert listed["memory"]["required"] == ["model", "cluster"]
    for schema in listed.values():
        texts = [parameter["description"] for parameter in schema["properties"].values()]
        assert all(texts)
        assert not [text for text in texts if "--batch-tokens" in text or "--tokens" in text]


def test_server_answers_a_client_over_pipes() -> None:
    parameters = StdioServerParameters(
        command=sys.executable, args=["-m", "shardwise", "mcp", "--tool", "memory"], env=dict(os.environ)
    )

    async def question() -> tuple[list[str], CallToolResult]:
        async with Client(parameters) as client:
            names = [tool.name for tool in (await client.list_tools()).tools]
            return names, await client.call_tool("memory", {"model": "gpt-2", "cluster": "h100:8", "layout": ["dp=8"]})

    names, result = anyio.run(question)
    assert names == ["memory"]
    assert result.structured_content["layouts"][0]["fits"]
