"""The tensors of a folder that torch.distributed.checkpoint wrote, as those of a model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from shardwise.errors import InputError
from shardwise.train.box import Box, Shape
from shardwise.train.checkpoint.dcp import METADATA, DcpFolder, read_dcp
from shardwise.train.checkpoint.manifest import Part


class DcpTensors:
    """Those whose names a pattern begins with. Raises `InputError` for a folder that is not what was written."""

    def __init__(self, folder: Path, own: re.Pattern[str]) -> None:
        self.folder = folder
        self._held = _opened(folder)
        self._own = {name: tensor for name, tensor in self._held.tensors.items() if own.match(name)}
        self._last: tuple[Part, Tensor] | None = None  # boxes of one part are asked for one after the other

    @cached_property
    def shapes(self) -> Mapping[tuple[str, str], Shape]:
        return {("", name): tensor.shape for name, tensor in self._own.items()}

    def dtype(self) -> torch.dtype:
        return self._own[min(self._own)].format

    def read(self, file: str, name: str, box: Box) -> Tensor:
        """A box of a tensor: a view of the part that has it, or what several have."""
        tensor, found = self._own[name], None
        for part in tensor.parts:
            shared = part.box.intersection(box)
            if shared is None:
                continue
            values = self._elements(part)[shared.seen_from(part.box).slices]
            if shared == box:
                return values
            found = torch.empty(box.lengths, dtype=tensor.format) if found is None else found
            found[shared.seen_from(box).slices] = values
        assert found is not None, f"no part has {box} of {name}"
        return found

    def _elements(self, part: Part) -> Tensor:
        if self._last is None or self._last[0] is not part:
            self._last = None  # before the next one is read
            try:
                self._last = part, self._held.elements(part)
            except Exception as error:  # of what is no tensor, anything may be raised
                raise InputError(f"model: cannot read {self.folder / part.file}: {_first_line(error)}") from None
        return self._last[1]


def _opened(folder: Path) -> DcpFolder:
    try:
        return read_dcp(folder)
    except Exception as error:  # of what is no pickle, or another one, anything may be raised
        raise InputError(f"model: cannot read {folder / METADATA}: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(text).splitlines()[0]
