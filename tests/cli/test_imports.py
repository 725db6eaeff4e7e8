"""Planning imports no framework, and --help not even NumPy. Each check is a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import shardwise

PLAN = ["llama-3-8b", "h100:8", "--batch-tokens", "64Ki", "--seq-len", "4096"]


def loaded_modules(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after running `code`."""
    script = f"import sys\n{code}\nsys.stderr.write('\\n'.join(sorted({{name.split('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stderr.split())


def run_verb(*arguments: str) -> str:
    return f"from shardwise.present.command_line import main\ntry:\n    main({list(arguments)!r})\nexcept SystemExit:\n    pass"


HEAVY = {"numpy", "torch", "jax", "pydantic", "tokenizers", "matplotlib", "rich"}


def test_importing_the_package_loads_no_numpy() -> None:
    assert not loaded_modules("import shardwise") & HEAVY


def test_the_version_is_read_when_it_is_asked_for() -> None:
    code = "import shardwise, sys; print('importlib.metadata' in sys.modules, shardwise.__version__ != '')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False True\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--version"],
        ["--help"],
        ["plan", "--help"],
        ["estimate", "--help"],
        ["tokenize", "--help"],
        ["train", "--help"],
        ["convert", "--help"],
        ["reconcile", "--help"],
        ["trace", "--help"],
        ["rehearse", "--help"],
        ["schedule", "--help"],
        ["simulate", "--help"],
        ["figures", "--help"],
    ],
)
def test_help_loads_no_numpy(arguments: list[str]) -> None:
    assert not loaded_modules(run_verb(*arguments)) & HEAVY


def test_reconciling_loads_no_framework() -> None:
    code = "from shardwise.measure.reconcile import reconciliation\nfrom shardwise.present.reports import run as reconcile_report"
    assert not loaded_modules(code) & {"torch", "jax", "jaxlib", "tokenizers"}


@pytest.mark.parametrize("arguments", [["plan", *PLAN], ["estimate", *PLAN, "--layout", "fsdp=8 recompute=full"]])
def test_planning_loads_no_framework(arguments: list[str]) -> None:
    loaded = loaded_modules(run_verb(*arguments))
    assert "shardwise" in loaded
    assert not loaded & {"torch", "jax", "jaxlib", "tokenizers"}
    assert "rich" not in loaded, "it is for terminals"
    if arguments[0] == "estimate":
        assert "numpy" not in loaded, "the scalar path is plain Python"


def test_payloads_live_with_their_values() -> None:
    """Verbs and reports render: no module of them names the schema of a payload, or has a function that builds one."""
    folder = Path(shardwise.__file__).parent / "present"
    modules = sorted([*folder.glob("verbs/*.py"), *folder.glob("reports/*.py")])
    builders = re.compile(r'"schema"|shardwise\.[a-z.-]+/[0-9]|def \w*payload')
    assert len(modules) > 8
    assert [module.name for module in modules if builders.search(module.read_text(encoding="utf-8"))] == []
