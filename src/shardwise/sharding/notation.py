"""Sharding notation: parse and print it, and explain what an expression means. Errors print the text with a caret under the
fault.

    A[I_X, J_Y]{U_Z}                       a tensor; I_XY is split over X (major) and Y
    A[B_{dp,fsdp}, T_cp]                   axes with longer names: one bare, several in braces
    A: bf16[I_X = 8192, J = 4096]          a number format and sizes
    bf16[4096_X, 8192]                     sizes alone: dims are named from I on, the tensor from A on
    A[I_X, J] * B[J, K_Y] -> C[I_X, K_Y]   an expression

Printing is `str`; parse and print round-trip. An expression means what `numpy.einsum` computes from its text. A dim is one
index, wherever it occurs. Dims of the result are kept, others are summed, each once, over the product of all operands that
have it; a dim of all operands and the result is a batch dim. Without `->` the result has the dims that occur once, in the
order in which they are written. A chain that sums a dim and later has another one of the same size needs a second name:
`In[B, D] * W1[D, F] * W2[F, D'] -> Out[B, D']`.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shardwise.sharding.spec import Axes, Spec
from shardwise.values import InputError, ShardingError
from shardwise.values.dtypes import BYTES_PER_ELEMENT
from shardwise.values.errors import NotationError, join_words
from shardwise.values.input_texts import parse_integer

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9']*")
_NUMBER = re.compile(r"\d+")
_SUBSCRIPT = re.compile(r"_(?:\{([^{}]*)\}|([A-Za-z][A-Za-z0-9]*(?:_[a-z][a-z0-9]*)*))")
_AXIS = re.compile(r"^[A-Za-z][A-Za-z0-9_]*$")
_LETTERS = "IJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True, slots=True)
class ParsedTensor:
    """Named tensor with its sharding; `dtype` and `sizes` if the text gives them."""

    name: str
    spec: Spec
    dtype: str | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        if not self.dtype and not self.sizes:
            return f"{self.name}{self.spec}"
        inner = ", ".join(self._dim(dim) for dim in self.spec.dims)
        partial = str(self.spec)[str(self.spec).index("]") + 1 :]
        return f"{self.name}: {self.dtype or ''}[{inner}]{partial}"

    def _dim(self, dim: str) -> str:
        dim_text = str(Spec.of((dim,), {dim: self.spec.axes_of(dim)}))[1:-1]
        return f"{dim_text} = {self.sizes[dim]}" if dim in self.sizes else dim_text


@dataclass(frozen=True, slots=True)
class EinsumExpression:
    """Product of tensors, and the tensor that it should give (None: its natural sharding)."""

    operands: tuple[ParsedTensor, ...]
    result: ParsedTensor | None

    @property
    def is_reshard(self) -> bool:
        """True for one tensor before and after, with the same dims."""
        if len(self.operands) != 1 or self.result is None:
            return False
        return set(self.operands[0].spec.dims) == set(self.result.spec.dims)

    def __str__(self) -> str:
        return " * ".join(map(str, self.operands)) + (f" -> {self.result}" if self.result else "")


class _Cursor:
    """Cursor over the text that can point at a fault."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0

    def error_at(self, problem: str, position: int | None = None) -> NotationError:
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

    def expect(self, token: str, context: str) -> None:
        if not self.accept(token):
            raise self.error_at(f"expected {token!r} {context}")

    def name(self, expected: str) -> str:
        self.skip()
        match = _NAME.match(self.text, self.position)
        if match is None:
            raise self.error_at(f"expected {expected}")
        self.position = match.end()
        return match.group()

    def number(self, label: str) -> int:
        self.skip()
        match = _NUMBER.match(self.text, self.position)
        if match is None:
            raise self.error_at(f"expected a whole number, {label}")
        self.position = match.end()
        return parse_integer(match.group())

    def subscript(self) -> Axes:
        """Parse the axes of a subscript; capital letters are an axis each (`_XY`), a lower-case name is one axis (`_fsdp`)."""
        if not self.text.startswith("_", self.position):
            return ()
        match = _SUBSCRIPT.match(self.text, self.position)
        if match is None:
            raise self.error_at("expected mesh axes after '_', such as _X, _XY or _{dp,fsdp}")
        start, self.position = self.position, match.end()
        braced, bare = match.groups()
        if braced is None:
            return tuple(bare) if bare.isupper() and bare.isalpha() else (bare,)
        axes = tuple(part.strip() for part in braced.split(","))
        if not all(_AXIS.match(axis) for axis in axes):
            raise self.error_at("expected axis names separated by commas between the braces", start + 2)
        return axes


def _parse_tensor(cursor: _Cursor, number: int = 0) -> ParsedTensor:
    """Parse one tensor; `number` is its position in the expression, which names it if the text does not."""
    cursor.skip()
    start = cursor.position
    name, dtype = _parse_heading(cursor, number)
    dims, axes, sizes = _parse_dims(cursor, name)
    partial = _parse_partial(cursor)
    try:
        return ParsedTensor(name, Spec(tuple(dims), tuple(axes), partial), dtype, sizes)
    except ShardingError as error:
        raise cursor.error_at(str(error), start) from None


def _parse_heading(cursor: _Cursor, number: int) -> tuple[str, str | None]:
    """Parse `A`, `A: bf16` or `bf16` into the name and the number format."""
    start = cursor.position
    first = cursor.name("the name of a tensor")
    if cursor.accept(":"):
        cursor.skip()
        if cursor.text.startswith("[", cursor.position):
            return first, None
        dtype = cursor.name("a number format such as bf16")
        if dtype not in BYTES_PER_ELEMENT:
            raise cursor.error_at(
                f"expected a number format, one of {', '.join(BYTES_PER_ELEMENT)}", cursor.position - len(dtype)
            )
        return first, dtype
    if first in BYTES_PER_ELEMENT:
        return chr(ord("A") + number), first
    cursor.skip()
    if not cursor.text.startswith("[", cursor.position):
        raise cursor.error_at(f"expected '[' after the tensor name {first!r}", max(start + len(first), cursor.position))
    return first, None


def _parse_dims(cursor: _Cursor, name: str) -> tuple[list[str], list[Axes], dict[str, int]]:
    cursor.expect("[", f"after the tensor name {name!r}")
    dims: list[str] = []
    axes: list[Axes] = []
    sizes: dict[str, int] = {}
    while not cursor.accept("]"):
        if dims:
            cursor.expect(",", "or ']' after a dim")
        cursor.skip()
        number = _NUMBER.match(cursor.text, cursor.position)
        if number is not None:
            cursor.position = number.end()
            dim = _LETTERS[len(dims)]
            sizes[dim] = parse_integer(number.group())
        else:
            dim = cursor.name("the name of a dim")
        if dim in dims:
            raise cursor.error_at(f"dim {dim} occurs twice in {name}", cursor.position - len(dim))
        dims.append(dim)
        axes.append(cursor.subscript())
        if cursor.accept("="):
            sizes[dim] = cursor.number(f"the size of {dim}")
    return dims, axes, sizes


def _parse_partial(cursor: _Cursor) -> Axes:
    if not cursor.accept("{"):
        return ()
    cursor.expect("U", "for a partial sum, as in {U_X}")
    partial = cursor.subscript()
    if not partial:
        raise cursor.error_at("expected the axes of the partial sum, as in {U_X}")
    cursor.expect("}", "after the axes of a partial sum")
    return partial


def parse_tensor(text: str) -> ParsedTensor:
    """Parse one tensor, such as `A[I_X, J]{U_Y}`. Raises `NotationError` with a caret under the fault."""
    cursor = _Cursor(text)
    tensor = _parse_tensor(cursor)
    cursor.skip()
    if cursor.position < len(text):
        raise cursor.error_at("expected nothing more after the tensor")
    return tensor


def parse_expression(text: str) -> EinsumExpression:
    """Parse a product, such as `A[I_X, J] * B[J, K] -> C[I_X, K]`. Raises `NotationError` with a caret under the fault."""
    cursor = _Cursor(text)
    operands = [_parse_tensor(cursor)]
    while cursor.accept("*") or cursor.accept("·"):
        operands.append(_parse_tensor(cursor, len(operands)))
    result = _parse_tensor(cursor, len(operands)) if cursor.accept("->") else None
    cursor.skip()
    if cursor.position < len(text):
        raise cursor.error_at("expected '*', '->' or the end of the expression")
    return EinsumExpression(tuple(operands), result)


def result_dims(expression: EinsumExpression) -> Axes:
    """Return the result's dims as written or, without a result, the dims that occur once.

    Raises `InputError` for a dim of the result that no operand has.

    >>> from shardwise.sharding.notation import parse_expression
    >>> result_dims(parse_expression("A[B, T, H] * K[B, S, H]"))
    ('T', 'S')
    """
    operand_dims = [dim for operand in expression.operands for dim in operand.spec.dims]
    if expression.result is None:
        return tuple(dim for dim in operand_dims if operand_dims.count(dim) == 1)
    written_dims = expression.result.spec.dims
    absent = [dim for dim in written_dims if dim not in operand_dims]
    if absent:
        raise InputError(f"{expression}: the result's dim {absent[0]} is in no operand")
    return written_dims


def assign_letters(dims: Iterable[str]) -> dict[str, str]:
    """Assign a letter to each dim, its own if that is free. Raises `InputError` for more dims than letters."""
    letters: dict[str, str] = {}
    for dim in dict.fromkeys(dims):
        candidates = (dim[0].lower(), dim[0].upper(), *string.ascii_letters)
        letter = next((letter for letter in candidates if letter not in letters.values()), None)
        if letter is None:
            num_letters = len(string.ascii_letters)
            raise InputError(f"expression: more than {num_letters} dims; an einsum has a letter for each only")
        letters[dim] = letter
    return letters


def einsum_subscripts(operands: Iterable[Sequence[str]], result: Sequence[str], letters: Mapping[str, str]) -> str:
    """Return the subscripts of an einsum, from the dims of its operands and its result.

    >>> einsum_subscripts([("I", "J"), ("J", "K")], ("I", "K"), {"I": "i", "J": "j", "K": "k"})
    'ij,jk->ik'
    """
    inputs = ",".join("".join(letters[dim] for dim in dims) for dims in operands)
    return f"{inputs}->{''.join(letters[dim] for dim in result)}"


def einsum_equation(expression: EinsumExpression) -> str:
    """Return the subscripts with which `numpy.einsum` computes an expression from its unsharded operands.

    >>> from shardwise.sharding.notation import parse_expression
    >>> einsum_equation(parse_expression("Q[B_X, T, H] * K[B_X, S, H] * V[B_X, S, H] -> O[B_X, T, H]"))
    'bth,bsh,bsh->bth'
    """
    dims = [operand.spec.dims for operand in expression.operands]
    return einsum_subscripts(dims, result_dims(expression), assign_letters(dim for operand in dims for dim in operand))


def explain_sums(expression: EinsumExpression) -> tuple[str, ...]:
    """Explain what a reader of a product may not expect: sums over one operand alone, and dims of three operands or more.

    >>> from shardwise.sharding.notation import parse_expression
    >>> explain_sums(parse_expression("A[I, J] * B[K, L] -> C[I, L]"))[0]
    'A is summed over J by itself, before any product: neither another operand nor C has J'
    """
    if len(expression.operands) < 2:
        return ()
    output_dims, result = result_dims(expression), expression.result.name if expression.result else "the result"
    operands_by_dim: dict[str, tuple[str, ...]] = {}
    for operand in expression.operands:
        for dim in operand.spec.dims:
            operands_by_dim[dim] = (*operands_by_dim.get(dim, ()), operand.name)
    groups: dict[tuple[tuple[str, ...], bool], list[str]] = {}
    for dim, names in operands_by_dim.items():
        groups.setdefault((names, dim in output_dims), []).append(dim)
    return tuple(
        note for (names, is_kept), dims in groups.items() for note in _explain_dims(names, is_kept, dims, result)
    )


def _explain_dims(names: Sequence[str], is_kept: bool, dims: Sequence[str], result: str) -> Iterator[str]:
    """Yield a note on dims that the same operands have and that the result has (`is_kept`) or lacks."""
    text = join_words(dims, "and")
    index_text = "one index" if len(dims) == 1 else "one index each"
    if len(names) == 1 and not is_kept:
        yield f"{names[0]} is summed over {text} by itself, before any product: neither another operand nor {result} has {text}"
    if len(names) > 2 and not is_kept:
        yield f"{text}: {index_text} of {join_words(names, 'and')}, summed once, over the product of all of these (as in einsum)"
    if len(names) > 2 and is_kept:
        yield (
            f"{text}: {index_text} of {join_words([*names, result], 'and')}, not summed (as in einsum); a dim that a chain sums "
            f"and has again behind the sum needs two names, such as {dims[-1]} and {dims[-1]}'"
        )
