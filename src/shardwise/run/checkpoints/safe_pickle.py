"""Pickles read as plain data: what they ask to be called is never called, but for a few names that stand for data."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from shardwise.run.checkpoints.manifest import DTYPES

Known = Mapping[tuple[str, str], Callable[..., object]]


class Record:
    """A value whose fields are data: it stands for each class and each function that a pickle names."""

    def __init__(self, *given: object) -> None:
        self.given = given

    def __new__(cls, *given: object) -> Record:
        return super().__new__(cls)

    def __hash__(self) -> int:
        return id(self)  # a key before it has its fields

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.given = state

    def __setitem__(self, key: object, value: object) -> None:
        """An entry of what is a kind of dict: it is not kept."""

    def append(self, value: object) -> None:
        """An element of what is a kind of list: it is not kept."""


def joined(*given: object) -> str:
    """A path of its parts."""
    return "/".join(map(str, given))


def sizes(given: Any = ()) -> tuple[int, ...]:
    """A `torch.Size`."""
    return tuple(given)


PLAIN: Known = {("torch", "Size"): sizes, ("pathlib", "PosixPath"): joined, ("pathlib", "WindowsPath"): joined}


class PlainUnpickler(pickle.Unpickler):
    """Gives what `known` has for a name, formats of PyTorch by their name, and a `Record` for any other."""

    known: ClassVar[Known] = PLAIN

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in DTYPES:
            return name
        return self.known.get((module, name), Record)


class PlainTensors:
    """What `torch.load` takes for a module that unpickles: tensors are tensors, and all else is plain data."""

    class Unpickler(PlainUnpickler):
        known: ClassVar[Known] = {
            **PLAIN,
            ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
            ("torch._utils", "_rebuild_parameter"): torch._utils._rebuild_parameter,
            ("collections", "OrderedDict"): OrderedDict,
        }
