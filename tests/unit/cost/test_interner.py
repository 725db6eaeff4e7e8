"""Interned values equal the originals, and equal parts are the same object."""

from __future__ import annotations

from shardwise.model.program import Role
from shardwise.price.derivation_cache import Interner
from shardwise.step.instructions import KernelShape
from shardwise.values.symbolic import LocalDim, multiply_symbols


def test_equal_parts_are_the_same_object() -> None:
    def build() -> tuple[object, ...]:
        sizes = multiply_symbols(["T", LocalDim("D", ("fsdp",))], 2.0)
        return (
            KernelShape(contraction=sizes, extents=(sizes, multiply_symbols(["T"]))),
            {Role.WEIGHT: sizes},
            ["T", "D"][0],
        )

    shared = Interner()
    first, second = shared.of(build()), shared.of(build())
    assert first == build()
    assert first is second
    shape, by_role, _ = first
    assert isinstance(shape, KernelShape)
    assert isinstance(by_role, dict)
    assert shape.contraction is shape.extents[0] is by_role[Role.WEIGHT]
    assert shape.extents[1].monomials[0].factors[0] is shape.contraction.monomials[0].factors[0]


def test_equal_numbers_of_different_types_are_not_merged() -> None:
    integer, truth, real = Interner().of(((1,), (True,), (1.0,)))
    assert (type(integer[0]), type(truth[0]), type(real[0])) == (int, bool, float)
