"""Bytes and number formats of a parameter's state: what a precision recipe and an optimizer say together."""

from __future__ import annotations

from shardwise.model.optimizers.definition import PAIR_GRANULARITIES, Granularity, Optimizer
from shardwise.model.optimizers.registry import get_optimizer
from shardwise.values import Precision, bytes_per_element


def bytes_per_parameter(precision: Precision) -> float:
    """Return `state_bytes` with AdamW's two moments, as the sources of the recipes count.

    >>> from shardwise.values.precision import PRECISIONS
    >>> bytes_per_parameter(PRECISIONS["bf16"])
    16.0
    """
    return state_bytes(precision, get_optimizer("adamw"))


def state_bytes(precision: Precision, optimizer: Optimizer) -> float:
    """Return the bytes of a parameter's weight, gradient, master copy and moments."""
    return sum(state_parts(precision, optimizer))


def state_parts(precision: Precision, optimizer: Optimizer) -> tuple[float, float, float, float]:
    """Return the bytes of a parameter's weight, gradient, master copy and moments, one by one."""
    return (
        bytes_per_element(precision.weights), precision.gradient_bytes, precision.master_bytes,
        moment_bytes(precision, optimizer),
    )  # fmt: skip


def moment_formats(precision: Precision, optimizer: Optimizer) -> dict[str, str]:
    """Return the number format of each moment by name.

    Moments with a number for each two rows or columns are in fp32 at least: rounded to 16 bits such a matrix has negative
    eigenvalues, and no root.
    """
    _, squares = precision.moment_dtypes
    fine_format = squares if bytes_per_element(squares) >= bytes_per_element("fp32") else "fp32"
    return {
        name: moment.format
        or (
            fine_format
            if moment.granularity in PAIR_GRANULARITIES
            else squares
            if moment.is_second_moment
            else precision.moments
        )
        for name, moment in optimizer.moments.items()
    }


def moment_bytes(precision: Precision, optimizer: Optimizer) -> float:
    """Return the bytes of a parameter's moments, and of the gradient that is cast for the update."""
    copy = bytes_per_element(precision.update_gradients) if precision.update_gradients else 0.0
    return sum(map(bytes_per_element, element_moments(precision, optimizer).values())) + copy


def element_moments(precision: Precision, optimizer: Optimizer) -> dict[str, str]:
    """Return the number format of each moment that has a number for each element of a parameter."""
    formats = moment_formats(precision, optimizer)
    return {name: format for name, format in formats.items() if optimizer.granularity(name) is Granularity.ELEMENT}


def factor_bytes(precision: Precision, optimizer: Optimizer) -> float:
    """Return the bytes of each number of the moments that have fewer numbers than elements (a row, a column, a pair); 0
    without any."""
    formats = moment_formats(precision, optimizer)
    return max(
        (bytes_per_element(formats[n]) for n in formats if optimizer.granularity(n) is not Granularity.ELEMENT),
        default=0.0,
    )
