"""`shardwise doctor` reports packages, the machine and the usable verbs; verbs without a needed package say so."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace

import pytest
from json_schemas import require_valid
from number_paths import require_payload_numbers

import shardwise as sw
from shardwise.present import diagnosis
from shardwise.present.command_line import main
from shardwise.present.registry import report_of
from shardwise.present.rendering.plain_text import render_text
from shardwise.present.requirements import PACKAGES, require_packages
from shardwise.present.verbs import GROUPS
from shardwise.run import TorchSupport, describe_host
from shardwise.run.machine_resources import Gpu

VERBS = {entry.name: entry for group in GROUPS.values() for entry in group}
OPTIONAL = (
    "torch",
    "jax",
    "triton",
    "matplotlib",
    "transformers",
    "tokenizers",
    "safetensors",
    "starlette",
    "uvicorn",
    "mcp",
)
BLOCKED = (
    f"import sys\nsys.modules.update(dict.fromkeys({(*OPTIONAL, 'numpy')!r}))\n"  # None: as if it were not installed
)


def without(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name in modules else find_spec(name, *more)
    )


def run_blocked(*words: str) -> tuple[int, str, str]:
    """A command line in an interpreter that has none of the optional packages, nor NumPy."""
    code = f"{BLOCKED}from shardwise.present.command_line import main\nsys.exit(main({list(words)!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def test_report_and_payload_agree(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    payload = json.loads(capsys.readouterr().out)
    require_valid(payload)
    assert [verb["name"] for verb in payload["verbs"]] == list(VERBS)
    assert [package["module"] for package in payload["packages"]] == list(PACKAGES)
    assert require_payload_numbers(sw.doctor()) == 3
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"shardwise {sw.__version__}, Python {sys.version.split()[0]}\n")
    for verb in VERBS:
        assert f" {verb}" in out.partition("\nverbs\n")[2]


def test_without_optional_packages_every_fix_is_named() -> None:
    code, out, err = run_blocked("doctor", "--json")
    assert (code, err) == (0, "")
    payload = json.loads(out)
    packages = {package["module"]: package for package in payload["packages"]}
    assert all(packages[module]["version"] is None for module in OPTIONAL)
    assert payload["machine"]["torch"] is None
    verbs = {verb["name"]: verb for verb in payload["verbs"]}
    fixes = {verb["name"]: verb["fix"] for verb in payload["verbs"] if not verb["works"]}
    assert fixes == {
        **dict.fromkeys(
            ("tokenize", "verify", "rehearse", "train", "bench", "convert"), 'pip install "shardwise[train]"'
        ),
        "explore": 'pip install "shardwise[explore]"',
        "mcp": 'pip install "shardwise[mcp]"',
    }
    assert verbs["convert"]["missing"] == ["torch", "safetensors"]
    assert [part["fix"] for part in verbs["matmul"]["parts"]] == [
        'pip install "shardwise[jax]"', 'pip install "shardwise[train]"',
    ]  # fmt: skip
    assert verbs["batch"]["parts"][0]["part"] == "batch sweep and batch branch"
    code, out, err = run_blocked("doctor")
    assert (code, err) == (0, "")
    assert "unknown: PyTorch, which is not installed, finds them" in out
    row = next(line for line in out.splitlines() if line.startswith("  convert"))
    assert " ".join(row.split()) == (
        'convert does not work needs PyTorch and safetensors pip install "shardwise[train]"'
    )


def test_verbs_that_need_pytorch_say_so() -> None:
    """A verb that moves keeps its requirements; doctor lists every package that a verb needs."""
    verbs = {name: entry.load() for name, entry in VERBS.items()}
    assert {name for name, verb in verbs.items() if "torch" in verb.requires} == {
        "verify", "rehearse", "train", "bench", "convert",
    }  # fmt: skip
    for verb in verbs.values():
        assert {*verb.requires, *(module for modules in verb.requires_for.values() for module in modules)} <= set(
            PACKAGES
        )


def test_a_verb_without_its_package_prints_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, "torch")
    problem = 'convert: PyTorch is not installed; pip install "shardwise[train]"'
    assert main(["convert", "folder", "--to", "huggingface", "--out", "hf"]) == 2
    assert capsys.readouterr() == ("", f"error: {problem}\n")
    with pytest.raises(sw.InputError) as caught:
        sw.convert("folder", "huggingface", out="hf")
    assert caught.value.problems == (problem,)


def test_several_packages_are_named_together(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "torch", "jax", "safetensors")
    with pytest.raises(sw.InputError) as caught:
        require_packages("verb", ("torch", "numpy", "safetensors", "jax"))
    assert str(caught.value) == (
        "verb: PyTorch and safetensors and JAX are not installed; "
        'pip install "shardwise[train]" && pip install "shardwise[jax]"'
    )


H100 = Gpu(name="NVIDIA H100 80GB HBM3", memory_bytes=85e9)


@pytest.mark.parametrize(
    ("torch", "lines"),
    [
        (
            TorchSupport(platform="CUDA 12.8", gpus=(H100,) * 8, backends=("gloo", "nccl")),
            ["8 x NVIDIA H100 80GB HBM3, 85 GB each (CUDA 12.8)", "gloo yes, nccl yes"],
        ),
        (
            TorchSupport(platform="CUDA 12.8", gpus=(H100,), backends=("gloo",)),
            ["1 x NVIDIA H100", "train     works  one process alone: this PyTorch has no nccl"],
        ),
        (
            TorchSupport(problem="OSError: libcudart.so.12: cannot open"),
            ["unknown: PyTorch cannot be loaded: OSError: libcudart.so.12", "train     does not work  PyTorch cannot be loaded"],
        ),
    ],
)  # fmt: skip
def test_report_lists_the_devices_and_backends_of_pytorch(
    torch: TorchSupport, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    host = replace(describe_host(), torch=torch)
    monkeypatch.setattr(diagnosis, "describe_host", lambda folder: host)
    diagnosed = sw.doctor()
    require_payload_numbers(diagnosed)
    text = render_text(report_of(diagnosed))
    for line in lines:
        assert line in text, text


def test_a_broken_pytorch_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed", None)
    support = describe_host().torch
    assert support is not None
    assert "ImportError" in support.problem or "ModuleNotFoundError" in support.problem
