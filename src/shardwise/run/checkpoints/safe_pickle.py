"""Read pickles as plain data: no callable that they name is called, except a few known ones that construct data."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from shardwise.run.checkpoints.manifest import DTYPES

KnownCallables = Mapping[tuple[str, str], Callable[..., object]]


class InertObject:
    """A value whose fields are data: it replaces each class and each function that a pickle names."""

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments

    def __new__(cls, *arguments: object) -> InertObject:
        return super().__new__(cls)

    def __hash__(self) -> int:
        return id(self)  # it may become a key before it has its fields

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.arguments = state

    def __setitem__(self, key: object, value: object) -> None:
        """Discard an entry of a dict-like object."""

    def append(self, value: object) -> None:
        """Discard an element of a list-like object."""


def join_path(*parts: object) -> str:
    """Join the parts of a path."""
    return "/".join(map(str, parts))


def size_tuple(sizes: Any = ()) -> tuple[int, ...]:
    """Return a `torch.Size` as a tuple."""
    return tuple(sizes)


SAFE_CALLABLES: KnownCallables = {
    ("torch", "Size"): size_tuple,
    ("pathlib", "PosixPath"): join_path,
    ("pathlib", "WindowsPath"): join_path,
}


class SafeUnpickler(pickle.Unpickler):
    """Resolves a name to its entry in `callables`, a dtype of PyTorch to its name, and any other to `InertObject`."""

    callables: ClassVar[KnownCallables] = SAFE_CALLABLES

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in DTYPES:
            return name
        return self.callables.get((module, name), InertObject)


class SafeTensorPickle:
    """A pickle module for `torch.load`: tensors are restored, and all else is plain data."""

    class Unpickler(SafeUnpickler):
        callables: ClassVar[KnownCallables] = {
            **SAFE_CALLABLES,
            ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
            ("torch._utils", "_rebuild_parameter"): torch._utils._rebuild_parameter,
            ("collections", "OrderedDict"): OrderedDict,
        }
