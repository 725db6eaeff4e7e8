"""Helpers for tests of weight writers: a checkpoint in parts, a count of live bytes, and calls that fail."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.run.checkpoints import Checkpointer, TensorShard, latest
from shardwise.run.engine.model_builder import ModelWeights


class Alive(TorchDispatchMode):
    """Bytes of the tensors that operations have made and that live; what is mapped from a file is not the process's own."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        mapped = {
            id(argument.untyped_storage()) for argument in args if isinstance(argument, torch.Tensor)
        } - self.sizes.keys()
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and "from_file" not in str(func):
            storage = out.untyped_storage()
            if id(storage) not in self.sizes and id(storage) not in mapped:
                self.sizes[id(storage)] = storage.nbytes()
                weakref.finalize(storage, self.sizes.pop, id(storage))
                self.peak_bytes = max(self.peak_bytes, sum(self.sizes.values()))
        return out


def save_in_parts(folder: Path, weights: ModelWeights, biases: Mapping[str, torch.Tensor], num_ranks: int = 3) -> Path:
    """Write a checkpoint in which each parameter lies in several parts."""

    def pieces(tensor: torch.Tensor) -> tuple[TensorShard, ...]:
        starts, parts = [0], tensor.flatten().tensor_split(num_ranks)
        for part in parts:
            starts.append(starts[-1] + len(part))
        return tuple(
            TensorShard(tuple(tensor.shape), (start,), part) for start, part in zip(starts, parts, strict=False)
        )

    with Checkpointer(folder, keep=1) as writer:
        state = {f"model.{name}": pieces(tensor) for name, tensor in weights.tensors.items()}
        writer.save(1, state | {f"buffer.{name}": pieces(bias) for name, bias in biases.items()})
    path = latest(folder)
    assert path is not None
    return path


class Killed(BaseException):
    """As a process is: nothing catches it."""


def dies(monkeypatch: pytest.MonkeyPatch, where: Any, name: str, after: int) -> list[int]:
    """Have a function fail after so many calls; how many there were."""
    count, plain = [0], getattr(where, name)

    def dying(*args: Any, **kwargs: Any) -> Any:
        if count[0] == after:
            raise Killed
        count[0] += 1
        return plain(*args, **kwargs)

    monkeypatch.setattr(where, name, dying)
    return count
