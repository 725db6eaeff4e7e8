"""Parse the sharding notation; errors print the expression with a caret under the fault.

    A[I_X, J_Y]{U_Z}                       a tensor; I_XY is split over X (major) and Y
    A[B_{dp,fsdp}, T_cp]                   axes with longer names: one bare, several in braces
    A[I_X, J] * B[J, K_Y] -> C[I_X, K_Y]   an expression

Printing is `str(spec)`; parse and print round-trip.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from shardwise.errors import NotationError, ShardingError
from shardwise.sharding.spec import Axes, Spec

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9']*")
_SUBSCRIPT = re.compile(r"_(?:\{([^{}]*)\}|([A-Za-z][A-Za-z0-9]*(?:_[a-z][a-z0-9]*)*))")
_AXIS = re.compile(r"^[A-Za-z][A-Za-z0-9_]*$")


@dataclass(frozen=True, slots=True)
class Tensor:
    """A named tensor with its sharding."""

    name: str
    spec: Spec

    def __str__(self) -> str:
        return f"{self.name}{self.spec}"


@dataclass(frozen=True, slots=True)
class Expression:
    """A product of tensors and the tensor that it should give (absent: the natural one)."""

    operands: tuple[Tensor, ...]
    result: Tensor | None

    def __str__(self) -> str:
        return " * ".join(map(str, self.operands)) + (f" -> {self.result}" if self.result else "")


class _Reader:
    """A cursor over the text that knows how to point at a fault."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0

    def fail(self, problem: str, position: int | None = None) -> NotationError:
        return NotationError(self.text, self.position if position is None else position, problem)

    def skip(self) -> None:
        while self.position < len(self.text) and self.text[self.position].isspace():
            self.position += 1

    def accept(self, token: str) -> bool:
        self.skip()
        if not self.text.startswith(token, self.position):
            return False
        self.position += len(token)
        return True

    def expect(self, token: str, what: str) -> None:
        if not self.accept(token):
            raise self.fail(f"expected {token!r} {what}")

    def name(self, what: str) -> str:
        self.skip()
        match = _NAME.match(self.text, self.position)
        if match is None:
            raise self.fail(f"expected {what}")
        self.position = match.end()
        return match.group()

    def subscript(self) -> Axes:
        """Axes of a subscript; capital letters are an axis each (`_XY`), a lower-case name is one axis (`_fsdp`)."""
        if not self.text.startswith("_", self.position):
            return ()
        match = _SUBSCRIPT.match(self.text, self.position)
        if match is None:
            raise self.fail("expected mesh axes after '_', such as _X, _XY or _{dp,fsdp}")
        start, self.position = self.position, match.end()
        braced, bare = match.groups()
        if braced is None:
            return tuple(bare) if bare.isupper() and bare.isalpha() else (bare,)
        axes = tuple(part.strip() for part in braced.split(","))
        if not all(_AXIS.match(axis) for axis in axes):
            raise self.fail("expected axis names separated by commas between the braces", start + 2)
        return axes


def _tensor(reader: _Reader) -> Tensor:
    reader.skip()
    start = reader.position
    name = reader.name("the name of a tensor")
    reader.expect("[", f"after the tensor name {name!r}")
    dims: list[str] = []
    axes: list[Axes] = []
    while not reader.accept("]"):
        if dims:
            reader.expect(",", "or ']' after a dim")
        dim = reader.name("the name of a dim")
        if dim in dims:
            raise reader.fail(f"dim {dim} occurs twice in {name}", reader.position - len(dim))
        dims.append(dim)
        axes.append(reader.subscript())
    partial: Axes = ()
    if reader.accept("{"):
        reader.expect("U", "for a partial sum, as in {U_X}")
        partial = reader.subscript()
        if not partial:
            raise reader.fail("expected the axes of the partial sum, as in {U_X}")
        reader.expect("}", "after the axes of a partial sum")
    try:
        return Tensor(name, Spec(tuple(dims), tuple(axes), partial))
    except ShardingError as error:
        raise reader.fail(str(error), start) from None


def parse_tensor(text: str) -> Tensor:
    """One tensor, such as `A[I_X, J]{U_Y}`. Raises `NotationError` with a caret under the fault."""
    reader = _Reader(text)
    tensor = _tensor(reader)
    reader.skip()
    if reader.position < len(text):
        raise reader.fail("expected nothing more after the tensor")
    return tensor


def parse_expression(text: str) -> Expression:
    """A product, such as `A[I_X, J] * B[J, K] -> C[I_X, K]`. Raises `NotationError` with a caret under the fault."""
    reader = _Reader(text)
    operands = [_tensor(reader)]
    while reader.accept("*") or reader.accept("·"):
        operands.append(_tensor(reader))
    result = _tensor(reader) if reader.accept("->") else None
    reader.skip()
    if reader.position < len(text):
        raise reader.fail("expected '*', '->' or the end of the expression")
    return Expression(tuple(operands), result)
