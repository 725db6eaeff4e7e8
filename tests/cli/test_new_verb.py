"""The new verb of docs/extending.md is one function and two entries."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from shardwise.present import command_line, registry, verbs
from shardwise.present.command_line import main
from shardwise.present.shell_completion import complete

ROOT = Path(__file__).parents[2]
NAME = "shardwise.present.verbs.token_rate"


@pytest.fixture
def plan_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """A plan, and the verb of the document installed as its text says."""
    text = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8").split("\n## A verb\n")[1]
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert code is not None
    module = ModuleType(NAME)
    monkeypatch.setitem(sys.modules, NAME, module)
    exec(compile(code[1], "docs/extending.md", "exec"), module.__dict__)
    entry = verbs.VerbEntry("token-rate", "tokens of a day", "token_rate:token_rate")
    groups = {**verbs.GROUPS, "more": (entry,)}
    monkeypatch.setattr(verbs, "GROUPS", groups)
    monkeypatch.setattr(command_line, "GROUPS", groups)
    place = "present.verbs.token_rate"
    functions = registry.ResultFunctions(f"{place}:token_rate_report")
    monkeypatch.setattr(registry, "RESULTS", {**registry.RESULTS, "TokenRate": functions})
    path = tmp_path / "plan.json"
    assert main(["plan", "gpt-2", "h100:8", "--out", str(path)]) == 0
    capsys.readouterr()
    return str(path)


def test_new_verb_has_help_errors_and_completion(plan_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    def printed(*words: str) -> tuple[int, str, str]:
        try:
            code: Any = main(["token-rate", *words])
        except SystemExit as stop:
            code = stop.code
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    code, out, _ = printed(plan_file, "--days", "7", "--json")
    week = json.loads(out)["tokens_per_day"]
    assert code == 0
    assert week == pytest.approx(7 * json.loads(printed(plan_file, "--json")[1])["tokens_per_day"])
    assert f"{week:,.0f} tokens" in printed(plan_file, "--days", "7")[1]
    code, help_text, _ = printed("--help")
    assert code == 0
    assert "Return the tokens that a plan trains on in some days." in help_text
    assert "shardwise token-rate plan.json --days 7" in help_text
    code, _, error = printed(plan_file, "--dayz", "7")
    assert code == 2
    assert "did you mean '--days'" in error
    assert printed("missing.json")[0] == 2
    assert [completion.word for completion in complete(["token-rate", "plan.json", "--da"])] == ["--days"]
