"""Packages that some verbs need beside the required ones, by import name: what brings each, and the error where it is missing."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shardwise.values import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A package by the name that people know, its distribution on the index, and the extra of shardwise that brings it.

    Without an extra every installation of shardwise has it. `purpose` is what it is for.
    """

    title: str
    distribution: str
    extra: str | None = None
    purpose: str = ""

    @property
    def install_command(self) -> str:
        """The command that installs it. The extra is quoted: zsh takes brackets for a pattern of files."""
        return f'pip install "shardwise[{self.extra}]"' if self.extra else f"pip install {self.distribution}"


PACKAGES: Mapping[str, Package] = {
    "numpy": Package(title="NumPy", distribution="numpy", purpose="the search over layouts, derived programs on virtual devices"),
    "pydantic": Package(title="pydantic", distribution="pydantic", purpose="files and payloads"),
    "yaml": Package(title="PyYAML", distribution="pyyaml", purpose="launches of frameworks that are YAML"),
    "rich": Package(title="rich", distribution="rich", purpose="colours and folding on a terminal"),
    "torch": Package(title="PyTorch", distribution="torch", extra="train", purpose="training, verification, measurements"),
    "tokenizers": Package(title="tokenizers", distribution="tokenizers", extra="train", purpose="tokenize"),
    "safetensors": Package(
        title="safetensors", distribution="safetensors", extra="train", purpose="weights of Hugging Face models"
    ),
    "triton": Package(
        title="Triton", distribution="triton", extra="train", purpose="fused kernels on GPUs; comes with PyTorch for GPUs"
    ),
    "jax": Package(title="JAX", distribution="jax", extra="jax", purpose="matmul and reshard --run jax and --verify xla"),
    "matplotlib": Package(
        title="matplotlib", distribution="matplotlib", extra="plot", purpose="pictures as .png and .pdf; .svg needs nothing"
    ),
    "starlette": Package(title="Starlette", distribution="starlette", extra="explore", purpose="the page of explore"),
    "uvicorn": Package(title="uvicorn", distribution="uvicorn", extra="explore", purpose="the page of explore"),
    "mcp": Package(title="mcp", distribution="mcp", extra="mcp", purpose="the verbs as tools of agents"),
    "transformers": Package(
        title="transformers", distribution="transformers", extra="dev", purpose="tests that compare with its models"
    ),
    "tensorboard": Package(title="TensorBoard", distribution="tensorboard", purpose="train --tensorboard"),
}  # fmt: skip


def is_installed(module: str) -> bool:
    """Return True if a module can be found; it is not loaded."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # of a module without a spec
        return False


def missing_packages(modules: Iterable[str]) -> tuple[str, ...]:
    """Return the modules that are not installed."""
    return tuple(module for module in modules if not is_installed(module))


def install_commands(modules: Iterable[str]) -> str:
    """Return the command that installs packages, each extra once; several commands are joined by " && "."""
    return " && ".join(dict.fromkeys(PACKAGES[module].install_command for module in modules))


def require_packages(verb: str, modules: Iterable[str]) -> None:
    """Raise `InputError` with the command that installs what a verb needs and this machine lacks."""
    if missing := missing_packages(modules):
        titles = " and ".join(PACKAGES[module].title for module in missing)
        raise InputError(
            f"{verb}: {titles} {'is' if len(missing) == 1 else 'are'} not installed; {install_commands(missing)}"
        )
