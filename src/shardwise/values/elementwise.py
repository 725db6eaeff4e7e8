"""Elementwise arithmetic on numbers or NumPy arrays, from the same expressions.

NumPy is imported by the first call that has an array, so that `import shardwise` does not load it.
"""

import math
from collections.abc import Iterable
from typing import Any

Value = Any  # an int, a float, or a NumPy array of them


def _numpy() -> Any:
    import numpy as np  # not at the top: `import shardwise` must not load NumPy

    return np


def maximum(first: Value, *operands: Value) -> Value:
    """Return the elementwise maximum of numbers or arrays."""
    result = first
    for operand in operands:
        if hasattr(result, "dtype") or hasattr(operand, "dtype"):
            result = _numpy().maximum(result, operand)
        else:
            result = max(result, operand)
    return result


def sum_values(terms: Iterable[Value]) -> Value:
    """Return the sum of numbers or arrays. Plain zeros are skipped: adding each would cost an operation on an array."""
    result: Value = None
    for term in terms:
        if not (isinstance(term, float) and term == 0.0):
            result = term if result is None else result + term
    return 0.0 if result is None else result


def minimum(first: Value, second: Value) -> Value:
    """Return the elementwise minimum of numbers or arrays."""
    return -maximum(-first, -second)


def where(condition: Value, if_true: Value, if_false: Value) -> Value:
    """Choose elementwise between numbers or arrays."""
    if any(hasattr(operand, "dtype") for operand in (condition, if_true, if_false)):
        return _numpy().where(condition, if_true, if_false)
    return if_true if condition else if_false


def ceil_div(numerator: Value, denominator: Value) -> Value:
    """Return the integer quotient rounded up, of numbers or arrays. Floating-point operands must be below 2^53."""
    if getattr(getattr(numerator, "dtype", None), "kind", "") == "f":
        # Below 2^53 the quotient is exact enough: none is rounded up or down to an integer that it is not.
        return _numpy().ceil(numerator / denominator)
    return -(-numerator // denominator)


def gcd(first: Value, second: Value) -> Value:
    """Return the greatest common divisor of integers or arrays of them."""
    if hasattr(first, "dtype") or hasattr(second, "dtype"):
        return _numpy().gcd(first, second)
    return math.gcd(first, second)
