"""What an expression means: what `numpy.einsum` computes from its text.

A dim is one index, wherever it stands. Dims that the result has are kept, others are summed, each once, over the product of
all operands that have it; a dim of all operands and the result is a batch dim. Without `->` the result has the dims that occur
once, in the order in which they are written. A chain that sums a dim and has another of its size behind it writes another
name: `In[B, D] * W1[D, F] * W2[F, D'] -> Out[B, D']`.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Iterator, Mapping, Sequence

from shardwise.errors import InputError
from shardwise.sharding.notation import Expression
from shardwise.sharding.spec import Axes


def result_dims(expression: Expression) -> Axes:
    """The result's dims as they are written or, without a result, the dims that occur once.

    Raises `InputError` for a dim of the result that no operand has.

    >>> from shardwise.sharding.notation import parse_expression
    >>> result_dims(parse_expression("A[B, T, H] * K[B, S, H]"))
    ('T', 'S')
    """
    held = [dim for operand in expression.operands for dim in operand.spec.dims]
    if expression.result is None:
        return tuple(dim for dim in held if held.count(dim) == 1)
    wanted = expression.result.spec.dims
    absent = [dim for dim in wanted if dim not in held]
    if absent:
        raise InputError(f"{expression}: the result's dim {absent[0]} is in no operand")
    return wanted


def letters_of(dims: Iterable[str]) -> dict[str, str]:
    """A letter for each dim, its own where that is free. Raises `InputError` where there are more dims than letters."""
    letters: dict[str, str] = {}
    for dim in dict.fromkeys(dims):
        wanted = (dim[0].lower(), dim[0].upper(), *string.ascii_letters)
        letter = next((letter for letter in wanted if letter not in letters.values()), None)
        if letter is None:
            most = len(string.ascii_letters)
            raise InputError(f"expression: more than {most} dims; an einsum has a letter for each only")
        letters[dim] = letter
    return letters


def einsum_subscripts(operands: Iterable[Sequence[str]], result: Sequence[str], letters: Mapping[str, str]) -> str:
    """The subscripts of an einsum, from the dims of its operands and its result.

    >>> einsum_subscripts([("I", "J"), ("J", "K")], ("I", "K"), {"I": "i", "J": "j", "K": "k"})
    'ij,jk->ik'
    """
    left = ",".join("".join(letters[dim] for dim in dims) for dims in operands)
    return f"{left}->{''.join(letters[dim] for dim in result)}"


def einsum_of(expression: Expression) -> str:
    """The subscripts with which `numpy.einsum` computes an expression from its unsharded operands.

    >>> from shardwise.sharding.notation import parse_expression
    >>> einsum_of(parse_expression("Q[B_X, T, H] * K[B_X, S, H] * V[B_X, S, H] -> O[B_X, T, H]"))
    'bth,bsh,bsh->bth'
    """
    dims = [operand.spec.dims for operand in expression.operands]
    return einsum_subscripts(dims, result_dims(expression), letters_of(dim for own in dims for dim in own))


def notes(expression: Expression) -> tuple[str, ...]:
    """What a reader of a product may not expect: sums over one operand alone, and dims that three operands or more have.

    >>> from shardwise.sharding.notation import parse_expression
    >>> notes(parse_expression("A[I, J] * B[K, L] -> C[I, L]"))[0]
    'A is summed over J by itself, before any product: neither another operand nor C has J'
    """
    if len(expression.operands) < 2:
        return ()
    kept, result = result_dims(expression), expression.result.name if expression.result else "the result"
    holders: dict[str, tuple[str, ...]] = {}
    for operand in expression.operands:
        for dim in operand.spec.dims:
            holders[dim] = (*holders.get(dim, ()), operand.name)
    groups: dict[tuple[tuple[str, ...], bool], list[str]] = {}
    for dim, names in holders.items():
        groups.setdefault((names, dim in kept), []).append(dim)
    return tuple(note for (names, is_kept), dims in groups.items() for note in _notes(names, is_kept, dims, result))


def _notes(names: Sequence[str], is_kept: bool, dims: Sequence[str], result: str) -> Iterator[str]:
    """About the dims that the same operands have, and that the result has or not."""
    text = _listed(dims)
    each = "one index" if len(dims) == 1 else "one index each"
    if len(names) == 1 and not is_kept:
        yield f"{names[0]} is summed over {text} by itself, before any product: neither another operand nor {result} has {text}"
    if len(names) > 2 and not is_kept:
        yield f"{text}: {each} of {_listed(names)}, summed once, over the product of all of these (as in einsum)"
    if len(names) > 2 and is_kept:
        yield (
            f"{text}: {each} of {_listed([*names, result])}, not summed (as in einsum); a dim that a chain sums and has again "
            f"behind the sum needs two names, such as {dims[-1]} and {dims[-1]}'"
        )


def _listed(names: Sequence[str]) -> str:
    """Names as a sentence has them: "A, B and C"."""
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
