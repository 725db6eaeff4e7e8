"""Pickles of PyTorch are read as plain data: a few known callables are called, and no other that a file names."""

from __future__ import annotations

import io
import os
import pathlib
import pickle
import time
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


def nest_tuples(depth: int, *, end: bytes) -> bytes:
    """A pickle of a tuple that holds the one before it twice, so that seven bytes double what it stands for."""
    content = pickle.PROTO + b"\x02" + pickle.EMPTY_TUPLE
    for number in range(depth):
        content += pickle.BINPUT + bytes([number]) + (pickle.BINGET + bytes([number])) + pickle.TUPLE2
    return content + end


PATH = pickle.GLOBAL + b"pathlib\nPosixPath\n"
DOUBLED = {
    "path": PATH + pickle.BINGET + bytes([27]) + pickle.TUPLE1 + pickle.REDUCE,
    "key": pickle.EMPTY_DICT + pickle.BINGET + bytes([27]) + pickle.NONE + pickle.SETITEM,
}


@pytest.mark.parametrize("end", DOUBLED)
@pytest.mark.parametrize("unpickler", [SafeUnpickler, SafeTensorPickle.Unpickler])
def test_a_short_pickle_takes_no_long_time(end: str, unpickler: type[SafeUnpickler]) -> None:
    content = nest_tuples(28, end=DOUBLED[end] + pickle.STOP)
    assert len(content) < 250
    started = time.process_time()
    with pytest.raises(pickle.UnpicklingError, match="a tuple of more than 2,000 values"):
        unpickler(io.BytesIO(content)).load()
    assert time.process_time() - started < 1.0


def test_a_short_pickle_takes_no_memory() -> None:
    content = (
        pickle.PROTO + b"\x02" + pickle.NONE + pickle.LONG_BINPUT + (2**31 - 2).to_bytes(4, "little") + pickle.STOP
    )
    with pytest.raises(pickle.UnpicklingError, match="place 2,147,483,646 after 0 others"):
        SafeUnpickler(io.BytesIO(content)).load()


@pytest.mark.parametrize(
    ("value", "words"),
    [(Call(pathlib.PosixPath, ["a"]), "a part that is not a text"), (Call(torch.Size, ["a"]), "whole numbers")],
    ids=str,
)
def test_callables_take_plain_arguments_alone(value: object, words: str) -> None:
    with pytest.raises(pickle.UnpicklingError, match=words):
        SafeUnpickler(io.BytesIO(pickle.dumps(value))).load()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_any_protocol_is_read(protocol: int) -> None:
    value = {"a": [1, (2, "b", (None, 3.0))], "size": torch.Size([2]), "set": {"x"}, 4: frozenset([5]), "bytes": b"6"}
    loaded = SafeUnpickler(io.BytesIO(pickle.dumps(value, protocol))).load()
    assert loaded["a"] == value["a"]
    assert loaded["size"] == (2,)


@pytest.mark.parametrize("content", [b"", b"\x80\x02", b"\x80\x02.", b"\x85.", b"h\x05.", b"t.", b"0.", b"\xff" * 9])
def test_an_invalid_pickle_is_refused(content: bytes) -> None:
    with pytest.raises((pickle.UnpicklingError, EOFError)):
        SafeUnpickler(io.BytesIO(content)).load()
