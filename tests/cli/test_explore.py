"""`shardwise explore` as a command: what it opens, what it refuses, and the address of its page."""

from __future__ import annotations

import importlib.util
import json

import pytest

from shardwise.present.command_line import main
from shardwise.present.explorer.opened_plan import NameResolver
from shardwise.present.explorer.session import ExplorerSession


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["explore", *arguments])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--run", "runs/a"], "--run: found without a plan; the plan that was run is required"),
        (["--port", "70000"], "--port: found 70000; 0 to 65535 is required"),
        (["--port", "http"], "--port: found 'http'"),
        (["missing.json"], "plan file: cannot read missing.json"),
        (["--at", "layout=tp=zero"], "tp: found 'zero'"),
    ],
)
def test_wrong_input_is_refused_before_serving(
    capsys: pytest.CaptureFixture[str], arguments: list[str], problem: str
) -> None:
    code, out, err = run(capsys, *arguments, "--no-browser")
    assert (code, out) == (2, "")
    assert problem in err


def test_the_page_is_served_and_json_does_without(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions: list[ExplorerSession] = []
    monkeypatch.setattr("shardwise.present.explorer.session.serve_session", sessions.append)
    code, out, _ = run(capsys, "--at", "view=memory", "--port", "0", "--no-browser")
    assert (code, out) == (0, "stopped\n")
    assert sessions == [ExplorerSession(resolver=NameResolver(), query="view=memory", port=0, opens_browser=False)]
    code, out, _ = run(capsys, "--json")
    assert (code, json.loads(out)["schema"], len(sessions)) == (0, "shardwise.explore/1", 1)


def test_without_its_packages_the_page_is_not_served(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "uvicorn" else find_spec(name, *more)
    )
    code, out, err = run(capsys, "--no-browser")
    assert (code, out) == (2, "")
    assert err == 'error: explore: uvicorn is not installed; pip install "shardwise[explore]"\n'
    assert run(capsys, "--json")[0] == 0
