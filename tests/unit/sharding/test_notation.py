"""Parsing, printing, and errors that point at the fault."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.sharding import Spec, parse_expression, parse_tensor
from shardwise.sharding.notation import EinsumExpression, ParsedTensor
from shardwise.values.errors import InputError, NotationError

AXES = ("X", "Y", "Z", "dp", "fsdp", "tp_kv", "tp_rep")


@st.composite
def tensors(draw: st.DrawFn) -> ParsedTensor:
    """Any tensor that the notation can write: axes of one letter and of names, in any order, partial sums."""
    dims = draw(st.lists(st.sampled_from(["B", "T", "D", "F", "I1", "seq"]), unique=True, max_size=4))
    split: dict[str, list[str]] = {dim: [] for dim in dims}
    partial = []
    for axis in draw(st.permutations(AXES)):
        place = draw(st.sampled_from([*dims, "partial", "nowhere", "nowhere"]))
        if place == "partial":
            partial.append(axis)
        elif place != "nowhere":
            split[place].append(axis)
    return ParsedTensor(draw(st.sampled_from(["A", "dW", "x1", "y'"])), Spec.of(dims, split, partial))


@given(tensors())
def test_tensors_round_trip(tensor: ParsedTensor) -> None:
    assert parse_tensor(str(tensor)) == tensor


@given(st.lists(tensors(), min_size=1, max_size=3), st.one_of(st.none(), tensors()))
def test_expressions_round_trip(operands: list[ParsedTensor], result: ParsedTensor | None) -> None:
    expression = EinsumExpression(tuple(operands), result)
    assert parse_expression(str(expression)) == expression


@pytest.mark.parametrize(
    ("text", "dims", "axes", "partial"),
    [
        ("A[]", (), (), ()),
        ("A[I, J]", ("I", "J"), ((), ()), ()),
        ("A[I_X, J_YZ]", ("I", "J"), (("X",), ("Y", "Z")), ()),
        ("A[I_YX]", ("I",), (("Y", "X"),), ()),
        ("A[ B_{dp, fsdp} , T_cp ]", ("B", "T"), (("dp", "fsdp"), ("cp",)), ()),
        ("A[K_tp_kv]", ("K",), (("tp_kv",),), ()),
        ("A[I]{U_X}", ("I",), ((),), ("X",)),
        ("A[I] { U_{fsdp,dp} }", ("I",), ((),), ("dp", "fsdp")),
    ],
)
def test_texts_are_parsed_into_specs(
    text: str, dims: tuple[str, ...], axes: tuple[tuple[str, ...], ...], partial: tuple[str, ...]
) -> None:
    assert parse_tensor(text).spec == Spec(dims, axes, partial)


def test_an_expression_has_operands_and_an_optional_result() -> None:
    expression = parse_expression("A[I_X, J] * B[J, K_Y] -> C[I_X, K_Y]")
    assert [operand.name for operand in expression.operands] == ["A", "B"]
    assert expression.result == parse_tensor("C[I_X, K_Y]")
    assert parse_expression("A[I]·B[I]") == parse_expression("A[I] * B[I]")
    assert parse_expression("A[I]").result is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("A[I_X, J", "expected ',' or ']' after a dim\n  A[I_X, J\n          ^"),
        ("A[I_X J]", "expected ',' or ']' after a dim\n  A[I_X J]\n        ^"),
        ("A[I, I]", "dim I occurs twice in A\n  A[I, I]\n       ^"),
        (
            "A[I_X, J_X]",
            "[I_X, J_X]: mesh axis X is used twice; an array may use each axis once\n  A[I_X, J_X]\n  ^",
        ),
        (
            "A[I_X]{U_X}",
            "[I_X]{U_X}: mesh axis X is used twice; an array may use each axis once\n  A[I_X]{U_X}\n  ^",
        ),
        ("A[I_{}]", "expected axis names separated by commas between the braces\n  A[I_{}]\n       ^"),
        ("A[I_]", "expected mesh axes after '_', such as _X, _XY or _{dp,fsdp}\n  A[I_]\n     ^"),
        ("[I]", "expected the name of a tensor\n  [I]\n  ^"),
        ("A(I)", "expected '[' after the tensor name 'A'\n  A(I)\n   ^"),
        ("A[I]{X}", "expected 'U' for a partial sum, as in {U_X}\n  A[I]{X}\n       ^"),
        ("A[I]{U}", "expected the axes of the partial sum, as in {U_X}\n  A[I]{U}\n        ^"),
        ("A[I]{U_X", "expected '}' after the axes of a partial sum\n  A[I]{U_X\n          ^"),
        ("A[I] x", "expected nothing more after the tensor\n  A[I] x\n       ^"),
    ],
)
def test_errors_of_a_tensor_point_at_the_fault(text: str, message: str) -> None:
    with pytest.raises(NotationError) as caught:
        parse_tensor(text)
    assert str(caught.value) == message
    assert isinstance(caught.value, InputError)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("A[I] * ", "expected the name of a tensor\n  A[I] * \n         ^"),
        ("A[I] + B[I]", "expected '*', '->' or the end of the expression\n  A[I] + B[I]\n       ^"),
        ("A[I] -> B[I] C", "expected '*', '->' or the end of the expression\n  A[I] -> B[I] C\n               ^"),
    ],
)
def test_errors_of_an_expression_point_at_the_fault(text: str, message: str) -> None:
    with pytest.raises(NotationError) as caught:
        parse_expression(text)
    assert str(caught.value) == message
