"""Pickles of PyTorch are read as plain data: a few known callables are called, and no other that a file names."""

from __future__ import annotations

import io
import os
import pathlib
import pickle
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn import Parameter

from shardwise.run.checkpoints.dcp_reader import InertObject, SafeTensorPickle, SafeUnpickler
from shardwise.run.checkpoints.manifest import DTYPES


class Call:
    """An object whose pickle calls a function."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.call = function, arguments

    def __repr__(self) -> str:
        return self.call[0].__name__

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.call


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (torch.Size([2, 3]), (2, 3)),
        (torch.Size([]), ()),
        (Call(pathlib.PosixPath, "a", "b"), "a/b"),
        (Call(pathlib.WindowsPath, "a", "b"), "a/b"),
        *((getattr(torch, name), name) for name in DTYPES),
    ],
    ids=str,
)
@pytest.mark.parametrize("unpickler", [SafeUnpickler, SafeTensorPickle.Unpickler])
def test_values_of_metadata_are_plain(value: object, plain: object, unpickler: type[SafeUnpickler]) -> None:
    assert unpickler(io.BytesIO(pickle.dumps({"value": value}))).load() == {"value": plain}


def test_a_state_dict_is_read_with_its_tensors() -> None:
    state = OrderedDict(weight=Parameter(torch.randn(2, 3)), steps=torch.arange(4), size=torch.Size([2]))
    file = io.BytesIO()
    torch.save({"model": state}, file)
    file.seek(0)
    (loaded,) = torch.load(file, weights_only=False, pickle_module=SafeTensorPickle).values()
    assert type(loaded) is OrderedDict
    assert list(loaded) == list(state)
    assert type(loaded["weight"]) is Parameter
    assert torch.equal(loaded["weight"], state["weight"])
    assert torch.equal(loaded["steps"], state["steps"])
    assert loaded["size"] == (2,)


@pytest.mark.parametrize("unpickler", [SafeUnpickler, SafeTensorPickle.Unpickler])
def test_no_other_callable_is_called(unpickler: type[SafeUnpickler], tmp_path: Path) -> None:
    folder = str(tmp_path / "made")
    loaded = unpickler(io.BytesIO(pickle.dumps(Call(os.mkdir, folder)))).load()
    assert not os.path.exists(folder)
    assert type(loaded) is InertObject
    assert loaded.arguments == (folder,)
