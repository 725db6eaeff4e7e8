"""XLA's choice for the same products: S2's cases as the book has them, and never fewer bytes than were derived."""

from __future__ import annotations

import subprocess
import sys

import pytest
from expressions import for_xla, solve, verdict
from random_expressions import random_expressions

from shardwise.derive.sharded_einsum import ShardedExpression, derive_by_cases, shard_expression
from shardwise.price.product import price_product
from shardwise.sharding.collectives import CollectiveKind
from shardwise.sharding.notation import parse_expression
from shardwise.sharding.spec import Mesh
from shardwise.values.errors import InputError
from shardwise.values.symbolic import SymbolValues
from shardwise.verify import xla_compile
from shardwise.verify.xla_compile import XlaReport, compile_product, compile_products, group_axes, missing_packages

# S2's four cases, and two axes at once: the collectives that the book derives, in the order in which they are written here.
CASES = {
    "A[I_X, J] * B[J, K_Y] -> C[I_X, K_Y]": [],
    "A[I, J_Y] * B[J, K] -> C[I, K]": [(CollectiveKind.ALL_GATHER, ("Y",))],
    "A[I, J_Y] * B[J_Y, K] -> C[I, K]": [(CollectiveKind.ALL_REDUCE, ("Y",))],
    "A[I, J_Y] * B[J_Y, K] -> C[I, K_Y]": [(CollectiveKind.REDUCE_SCATTER, ("Y",))],
    "A[I_Y, J] * B[J, K_Y] -> C[I_Y, K]": [(CollectiveKind.ALL_GATHER, ("Y",))],
    "A[I_X, J_Y] * B[J_X, K_Y] -> C[I_X, K_Y]": [
        (CollectiveKind.ALL_GATHER, ("X",)),
        (CollectiveKind.ALL_GATHER, ("Y",)),
    ],
}
RANDOM = [sharded for sharded in random_expressions(24) if for_xla(sharded)][:20]


def shard_text(text: str, dtype: str = "bf16") -> ShardedExpression:
    return shard_expression(parse_expression(text), Mesh.of({"X": 2, "Y": 4}), {"I": 256, "J": 512, "K": 1024}, dtype)


@pytest.fixture(scope="module")
def reports() -> list[XlaReport]:
    return compile_products([*map(shard_text, CASES), *RANDOM])


@pytest.mark.parametrize(("index", "text"), list(enumerate(CASES)))
def test_the_cases_of_the_book_are_what_xla_does(index: int, text: str, reports: list[XlaReport]) -> None:
    sharded, report = shard_text(text), reports[index]
    assert sorted((c.op, c.axes) for c in report.collectives) == CASES[text]
    derived = derive_by_cases(sharded).communication
    assert sorted((c.collective.kind, c.collective.axes) for c in derived) == CASES[text]
    values = SymbolValues({**sharded.sizes, **dict(sharded.mesh.axes)})
    elements = sum(float(c.collective.received_elements.evaluate(values)) for c in derived)
    assert report.bytes_per_device == pytest.approx(2 * elements)


@pytest.mark.parametrize("index", range(len(CASES) + len(RANDOM)))
def test_xla_never_moves_fewer_bytes(index: int, reports: list[XlaReport]) -> None:
    sharded = [*map(shard_text, CASES), *RANDOM][index]
    assert verdict(sharded, solve(sharded), reports[index]) != "losses"


# An AllReduce and a slice, which is how the CPU backend writes a ReduceScatter, on meshes of many devices; elements received.
SCATTERED = (
    ("A[I, J_XY] * B[J_XY, K] -> C[I_X, K_Y]", {"X": 4, "Y": 4}, [(CollectiveKind.REDUCE_SCATTER, ("X", "Y"))]),
    ("A[I, J_XY] * B[J_XY, K] -> C[I_Y, K_X]", {"X": 3, "Y": 4}, [(CollectiveKind.REDUCE_SCATTER, ("X", "Y"))]),
    ("A[I, J_X] * B[J_X, K] -> C[I_X, K]", {"X": 24}, [(CollectiveKind.REDUCE_SCATTER, ("X",))]),
    ("A[I, J_XY] * B[J_XY, K] -> C[I_X, K]", {"X": 2, "Y": 8},
     [(CollectiveKind.REDUCE_SCATTER, ("X",)), (CollectiveKind.ALL_REDUCE, ("Y",))]),
)  # fmt: skip
LONE_SUMS = ("A[I, J_X] * B[K, L] -> C[I, L]", "A[I_X, J] -> B[I_X]", "A[I, J_Y] -> B[J_Y, I]")


def test_a_reduce_scatter_is_one_on_meshes_of_many_devices() -> None:
    cases = [
        shard_expression(parse_expression(text), Mesh.of(mesh), dict.fromkeys("IJK", 48)) for text, mesh, _ in SCATTERED
    ]
    for report, (text, mesh, expected) in zip(compile_products(cases), SCATTERED, strict=True):
        assert [(c.op, c.axes) for c in report.collectives] == expected, (text, mesh)
        payload, elements = 48.0 * 48, 0.0
        for op, axes in expected:
            n = Mesh.of(mesh).size(axes)
            elements += payload * (n - 1) / n * (2 if op is CollectiveKind.ALL_REDUCE else 1)
            payload /= n
        assert report.bytes_per_device == pytest.approx(2 * elements)


def test_sums_of_one_operand_are_flops_too() -> None:
    mesh, sizes = Mesh.of({"X": 2, "Y": 2}), {"I": 4, "J": 6, "K": 8, "L": 10}
    cases = [shard_expression(parse_expression(text), mesh, sizes) for text in LONE_SUMS]
    for sharded, report in zip(cases, compile_products(cases), strict=True):
        assert report.flops_per_device == price_product(sharded, None).by_cases.flops_per_device


def test_the_flops_of_the_compiled_product(reports: list[XlaReport]) -> None:
    assert reports[0].flops_per_device == 2 * (256 // 2) * 512 * (1024 // 4)
    assert reports[0].multiplications_per_device == reports[0].flops_per_device / 2


def test_a_partial_operand_is_refused() -> None:
    with pytest.raises(InputError, match=r"A\[I\]\{U_X\} is a partial sum; XLA takes whole operands"):
        compile_product(shard_text("A[I]{U_X} * B[I, J] -> C[J]"))


def test_a_timeout_is_reported() -> None:
    with pytest.raises(InputError, match=r"1 products were not compiled within 0.01 s"):
        compile_product(shard_text("A[I] * B[I] -> C[]"), timeout_s=0.01)


def test_a_missing_jax_is_named_with_its_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xla_compile, "find_spec", lambda name: None)
    assert missing_packages("cpu") == ['xla: jax is not installed; pip install "shardwise[jax]"']
    with pytest.raises(InputError, match="jax is not installed"):
        compile_product(shard_text("A[I] * B[I] -> C[]"))


def test_a_missing_compiler_is_named_with_its_wheels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xla_compile, "find_spec", lambda name: name == "jax" or None)
    assert missing_packages("cpu") == []
    assert "pip install jax-cuda12-plugin==0.10.2 jax-cuda12-pjrt==0.10.2" in missing_packages("gpu")[0]
    assert "pip install libtpu==0.0.42.*" in missing_packages("tpu")[0]


def test_meshes_that_a_backend_cannot_take() -> None:
    large = shard_expression(parse_expression("A[I_X] * B[I_X] -> C[]"), Mesh.of({"X": 4096}), {"I": 4096})
    with pytest.raises(InputError, match="the CPU backend takes at most 2048"):
        compile_product(large)


def test_groups_that_are_no_whole_axes_have_no_name() -> None:
    mesh = Mesh.of({"X": 2, "Y": 4})
    assert group_axes(((0, 4), (1, 5), (2, 6), (3, 7)), mesh) == ("X",)
    assert group_axes((tuple(range(8)),), mesh) == ("X", "Y")
    assert group_axes(((0, 1), (2, 3), (4, 5), (6, 7)), mesh) is None
    assert group_axes(((0, 4), (4, 0)), mesh, pairs=True) == ("X",)


def test_the_module_does_not_load_jax() -> None:
    code = "import sys, shardwise.verify.xla_compile; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
