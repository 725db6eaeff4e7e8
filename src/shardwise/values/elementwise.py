"""Arithmetic on numbers or NumPy arrays of them, elementwise, from the same expressions.

NumPy is imported where an array comes in, and not before: `import shardwise` loads none.
"""

import math
from collections.abc import Iterable
from typing import Any

Value = Any  # an int, a float, or a NumPy array of them


def maximum(first: Value, *others: Value) -> Value:
    """Elementwise maximum of numbers or arrays."""
    result = first
    for other in others:
        if hasattr(result, "dtype") or hasattr(other, "dtype"):
            import numpy as np

            result = np.maximum(result, other)
        else:
            result = max(result, other)
    return result


def sum_values(values: Iterable[Value]) -> Value:
    """Sum of numbers or arrays. Plain zeros are left out: each would cost an operation on an array."""
    result: Value = None
    for value in values:
        if not (isinstance(value, float) and value == 0.0):
            result = value if result is None else result + value
    return 0.0 if result is None else result


def minimum(first: Value, other: Value) -> Value:
    """Elementwise minimum of numbers or arrays."""
    return -maximum(-first, -other)


def where(condition: Value, if_true: Value, if_false: Value) -> Value:
    """Elementwise choice between numbers or arrays."""
    if any(hasattr(value, "dtype") for value in (condition, if_true, if_false)):
        import numpy as np

        return np.where(condition, if_true, if_false)
    return if_true if condition else if_false


def ceil_div(numerator: Value, denominator: Value) -> Value:
    """Integer division rounded up, of numbers or arrays of them; in floating point they are below 2^53, so that no quotient is
    rounded to a whole number that it is not."""
    if getattr(getattr(numerator, "dtype", None), "kind", "") == "f":
        import numpy as np

        return np.ceil(numerator / denominator)
    return -(-numerator // denominator)


def gcd(first: Value, second: Value) -> Value:
    """Greatest common divisor of integers or arrays of them."""
    if hasattr(first, "dtype") or hasattr(second, "dtype"):
        import numpy as np

        return np.gcd(first, second)
    return math.gcd(first, second)
