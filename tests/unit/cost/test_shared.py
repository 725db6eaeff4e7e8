"""What is shared equals what it was made of, and has one object for equal parts."""

from __future__ import annotations

from shardwise.model.program import Role
from shardwise.price.derivation_cache import Shared
from shardwise.step.instructions import Shape
from shardwise.values.symbolic import Local, product


def test_equal_parts_are_one_object() -> None:
    def whole() -> tuple[object, ...]:
        sizes = product(["T", Local("D", ("fsdp",))], 2.0)
        return Shape(summed=sizes, sides=(sizes, product(["T"]))), {Role.WEIGHT: sizes}, ["T", "D"][0]

    shared = Shared()
    first, second = shared.of(whole()), shared.of(whole())
    assert first == whole()
    assert first is second
    shape, by_role, _ = first
    assert isinstance(shape, Shape)
    assert isinstance(by_role, dict)
    assert shape.summed is shape.sides[0] is by_role[Role.WEIGHT]
    assert shape.sides[1].monomials[0].factors[0] is shape.summed.monomials[0].factors[0]


def test_numbers_of_other_types_stay_apart() -> None:
    one, truth, real = Shared().of(((1,), (True,), (1.0,)))
    assert (type(one[0]), type(truth[0]), type(real[0])) == (int, bool, float)
