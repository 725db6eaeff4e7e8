"""Pickles read as plain data: what they ask to be called is never called, but for a few names that stand for data."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from shardwise.run.checkpoints.manifest import DTYPES

KnownCallables = Mapping[tuple[str, str], Callable[..., object]]


class InertObject:
    """A value whose fields are data: it stands for each class and each function that a pickle names."""

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments

    def __new__(cls, *arguments: object) -> InertObject:
        return super().__new__(cls)

    def __hash__(self) -> int:
        return id(self)  # a key before it has its fields

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.arguments = state

    def __setitem__(self, key: object, value: object) -> None:
        """An entry of what is a kind of dict: it is not kept."""

    def append(self, value: object) -> None:
        """An element of what is a kind of list: it is not kept."""


def join_path(*parts: object) -> str:
    """A path of its parts."""
    return "/".join(map(str, parts))


def size_tuple(sizes: Any = ()) -> tuple[int, ...]:
    """A `torch.Size`."""
    return tuple(sizes)


SAFE_CALLABLES: KnownCallables = {
    ("torch", "Size"): size_tuple,
    ("pathlib", "PosixPath"): join_path,
    ("pathlib", "WindowsPath"): join_path,
}


class SafeUnpickler(pickle.Unpickler):
    """Gives what `known` has for a name, formats of PyTorch by their name, and a `InertObject` for any other."""

    known: ClassVar[KnownCallables] = SAFE_CALLABLES

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in DTYPES:
            return name
        return self.known.get((module, name), InertObject)


class SafeTensorPickle:
    """What `torch.load` takes for a module that unpickles: tensors are tensors, and all else is plain data."""

    class Unpickler(SafeUnpickler):
        known: ClassVar[KnownCallables] = {
            **SAFE_CALLABLES,
            ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
            ("torch._utils", "_rebuild_parameter"): torch._utils._rebuild_parameter,
            ("collections", "OrderedDict"): OrderedDict,
        }
