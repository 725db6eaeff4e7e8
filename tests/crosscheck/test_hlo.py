"""The reader of HLO on small modules as the compilers print them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from shardwise.derive.sharded_einsum import shard_expression
from shardwise.sharding.collectives import CollectiveKind
from shardwise.sharding.notation import parse_expression
from shardwise.sharding.spec import Mesh
from shardwise.values.dtypes import BYTES_PER_ELEMENT
from shardwise.values.errors import InputError
from shardwise.verify import xla_compile
from shardwise.verify.hlo_graph import replica_groups
from shardwise.verify.hlo_program import HloCollective, HloProgram
from shardwise.verify.xla_compile import read_report


def text_of(entry: str, computations: str = "", num_devices: int = 4) -> str:
    head = f"HloModule jit_f, is_scheduled=true, num_partitions={num_devices}\n\n"
    return f"{head}{computations}\nENTRY %main (param: f32[]) -> f32[] {{\n{entry}\n}}\n"


def program(entry: str, computations: str = "", num_devices: int = 4) -> HloProgram:
    return HloProgram(text_of(entry, computations, num_devices))


def kinds(hlo: HloProgram) -> list[tuple[CollectiveKind, int, float]]:
    return [(c.kind, len(c.groups[0]), c.payload) for c in hlo.collectives()]


@pytest.mark.parametrize(
    ("attributes", "groups"),
    [
        ("channel_id=1, replica_groups={{0,1},{2,3}}, dimensions={0}", ((0, 1), (2, 3))),
        ("replica_groups={}, dimensions={0}", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("replica_groups=[2,4]<=[8], dimensions={0}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%add", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("replica_groups=mesh['a'=2,'b'=4] {'b'}, to_apply=%add", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}, to_apply=%add", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("replica_groups=mesh['a'=2,'b'=4] {'b','a'}, to_apply=%add", ((0, 4, 1, 5, 2, 6, 3, 7),)),
        (
            "replica_groups=mesh['a'=1,'b'=4,'c'=2], device_ids=([2,4]T(1,0)) {'b'}, to_apply=%add",
            ((0, 1, 2, 3), (4, 5, 6, 7)),
        ),
        (
            "replica_groups=mesh['a'=4,'b'=2], device_ids=([2,2,2]T(0,2,1)) {'a':(2)2}, metadata={}",
            ((0, 1), (2, 3), (4, 5), (6, 7)),
        ),
        ("replica_groups=mesh['a'=8] {'a':(1)2}, metadata={}", ((0, 4), (1, 5), (2, 6), (3, 7))),
    ],
)
def test_groups_in_every_syntax(attributes: str, groups: tuple[tuple[int, ...], ...]) -> None:
    assert set(replica_groups(attributes, 8)) == set(groups)


SLICE = """
%part (whole: f32[8,8], table: s32[4], id: u32[]) -> f32[2,8] {
  %whole = f32[8,8]{1,0} parameter(0)
  %table = s32[4]{0} parameter(1)
  %id = u32[] parameter(2)
  %zero = s32[] constant(0)
  %at = s32[1]{0} dynamic-slice(%table, %id), dynamic_slice_sizes={1}
  %row = s32[] bitcast(%at)
  ROOT %kept = f32[ROWS,8]{1,0} dynamic-slice(%whole, %row, %zero), dynamic_slice_sizes={ROWS,8}
}
"""
REDUCE_AND_KEEP = """
  %param = f32[8,8]{1,0} parameter(0)
  %id = u32[] partition-id()
  %table = s32[4]{0} constant({TABLE})
  %sum = f32[8,8]{1,0} all-reduce(%param), channel_id=1, replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %fusion = f32[ROWS,8]{1,0} fusion(%sum, %table, %id), kind=kLoop, calls=%part
"""


def reduce_and_keep(rows: int, table: str) -> HloProgram:
    return program(REDUCE_AND_KEEP.replace("TABLE", table).replace("ROWS", str(rows)), SLICE.replace("ROWS", str(rows)))


def test_an_all_reduce_of_which_each_device_keeps_a_part_is_a_reduce_scatter() -> None:
    assert kinds(reduce_and_keep(2, "0, 2, 4, 6")) == [(CollectiveKind.REDUCE_SCATTER, 4, 64.0)]


def test_devices_that_keep_the_same_part_still_reduce_it_among_them() -> None:
    hlo = reduce_and_keep(4, "0, 0, 4, 4")
    assert kinds(hlo) == [(CollectiveKind.REDUCE_SCATTER, 2, 64.0), (CollectiveKind.ALL_REDUCE, 2, 32.0)]
    assert hlo.collectives()[0].groups == ((0, 2), (1, 3))
    assert hlo.collectives()[1].groups == ((0, 1), (2, 3))


def test_a_table_without_its_values_is_refused() -> None:
    """XLA leaves out constants of more than ten elements unless it is told to print them: a table for 12 devices is one."""
    with pytest.raises(InputError, match=r"found constant\(\{\.\.\.\}\), whose values the text leaves out"):
        reduce_and_keep(2, "...").collectives()


def test_a_part_that_is_the_same_everywhere_does_not_make_a_scatter() -> None:
    assert kinds(reduce_and_keep(2, "4, 4, 4, 4")) == [(CollectiveKind.ALL_REDUCE, 4, 64.0)]


def test_an_all_reduce_that_is_also_used_whole_stays_one() -> None:
    entry = REDUCE_AND_KEEP.replace("TABLE", "0, 2, 4, 6").replace("ROWS", "2").replace("ROOT ", "")
    hlo = program(f"{entry}  ROOT %both = (f32[2,8], f32[8,8]) tuple(%fusion, %sum)", SLICE.replace("ROWS", "2"))
    assert kinds(hlo) == [(CollectiveKind.ALL_REDUCE, 4, 64.0)]


def test_two_all_reduces_in_a_row_are_one_over_both_groups() -> None:
    hlo = program(
        """
  %param = bf16[8]{0} parameter(0)
  %wide = f32[8]{0} convert(%param)
  %first = f32[8]{0} all-reduce(%wide), channel_id=1, replica_groups={{0,1},{2,3}}, to_apply=%add
  %narrow = bf16[8]{0} convert(%first)
  %again = f32[8]{0} convert(%narrow)
  ROOT %second = f32[8]{0} all-reduce(%again), channel_id=2, replica_groups={{0,2},{1,3}}, to_apply=%add"""
    )
    assert hlo.collectives() == (HloCollective(CollectiveKind.ALL_REDUCE, ((0, 1, 2, 3),), 8.0),)
    assert hlo.collectives()[0].received_elements == 12.0


def test_a_fusion_that_hides_a_reduce_scatter_is_unfolded() -> None:
    hidden = """
%all-reduce-scatter (whole: bf16[8]) -> bf16[2] {
  %whole = bf16[8]{0:T(256)(128)(2,1)S(1)} parameter(0)
  %sum = bf16[8]{0:T(256)} all-reduce(%whole), channel_id=1, replica_groups=[1,4]<=[4], to_apply=%add
  %id = u32[] partition-id()
  %two = u32[] constant(2)
  %start = u32[] multiply(%id, %two)
  ROOT %kept = bf16[2]{0:T(256)} dynamic-slice(%sum, %start), dynamic_slice_sizes={2}
}
"""
    entry = "  %p = bf16[8]{0} parameter(0)\n  ROOT %f = bf16[2]{0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter"
    assert kinds(program(entry, hidden)) == [(CollectiveKind.REDUCE_SCATTER, 4, 8.0)]


def test_asynchronous_combined_and_repeated_collectives_count_once() -> None:
    hlo = program(
        """
  %a = bf16[2]{0} parameter(0)
  %b = bf16[4]{0} parameter(1)
  %gather = ((bf16[2], bf16[4]), (bf16[8], /*index=1*/bf16[16])) all-gather-start(%a, %b), channel_id=1, replica_groups={}
  %done = (bf16[8]{0}, bf16[16]{0}) all-gather-done(%gather)
  %again = bf16[8]{0} all-gather(%a), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}
  %both = (bf16[2]{0}, bf16[4]{0}) all-reduce(%a, %b), channel_id=2, replica_groups={{0,1,2,3}}, to_apply=%add
  %exchanged = (bf16[2]{0}, bf16[2]{0}) all-to-all(%a, %a), channel_id=3, replica_groups={{0,1},{2,3}}
  ROOT %all = (bf16[2]{0}) tuple(%both)"""
    )  # fmt: skip
    assert kinds(hlo) == [
        (CollectiveKind.ALL_GATHER, 4, 24.0),
        (CollectiveKind.ALL_REDUCE, 4, 2.0),
        (CollectiveKind.ALL_REDUCE, 4, 4.0),
        (CollectiveKind.ALL_TO_ALL, 2, 4.0),
    ]


def test_a_permute_receives_its_shard_unless_every_device_keeps_its_own() -> None:
    text = "  %a = f32[6]{0} parameter(0)\n  ROOT %p = f32[6]{0} collective-permute(%a), source_target_pairs={PAIRS}"
    moved = program(text.replace("PAIRS", "{0,0},{1,2},{2,1},{3,3}")).collectives()
    assert [(c.kind, c.received_elements) for c in moved] == [(CollectiveKind.PERMUTE, 6.0)]
    assert program(text.replace("PAIRS", "{0,0},{1,1}")).collectives() == ()


def test_a_report_has_the_axes_along_which_a_permute_moves() -> None:
    """Devices that keep their own are no group of a whole line: of a permute any pair that differs says the axis."""
    expression = parse_expression("A[I_X, J] * B[J, K] -> C[I_X, K]")
    sharded = shard_expression(expression, Mesh.of({"X": 2, "Y": 2}), {"I": 4, "J": 6, "K": 2})
    pairs = "source_target_pairs={{0,0},{1,1},{2,3},{3,2}}"
    entry = f"  %a = f32[2,6]{{1,0}} parameter(0)\n  ROOT %p = f32[2,6]{{1,0}} collective-permute(%a), {pairs}"
    (moved,) = read_report(sharded, text_of(entry), "cpu", "0").collectives
    assert (moved.op, moved.axes) == (CollectiveKind.PERMUTE, ("Y",))


GEMM = (
    '  ROOT %c = (f32[2,4]{1,0}, s8[64]{0}) custom-call(%a, %b), custom_call_target="__cublas$lt$matmul", '
    'backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}'
)


@pytest.mark.parametrize(
    ("product", "flops"),
    [
        ("  ROOT %c = f32[2,4]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}", 48),
        (GEMM, 48),
        ("  ROOT %c = f32[2,4]{1,0} convolution(%a, %b), dim_labels=bf_io->bf", 48),
        ("  ROOT %c = f32[2,3]{1,0} multiply(%a, %a)", 6),
        (
            "  %c = f32[2,3] multiply(%a, %a)\n  %d = f32[6] bitcast(%c)\n  ROOT %e = f32[] reduce(%d, %z), to_apply=%add",
            12,
        ),
        ("  %c = f32[2,3] convert(%a)\n  ROOT %d = f32[2] reduce(%c, %z), dimensions={1}, to_apply=%add", 6),
    ],
)
def test_flops_of_products(product: str, flops: float) -> None:
    inputs = "  %a = f32[2,3]{1,0} parameter(0)\n  %b = f32[3,4]{1,0} parameter(1)\n  %z = f32[] constant(0)\n"
    assert program(inputs + product).flops() == flops


def test_a_product_inside_a_call_is_counted_and_indices_are_not() -> None:
    called = """
%body (x: f32[2,3]) -> f32[2,3] {
  %x = f32[2,3]{1,0} parameter(0)
  %i = s32[8]{0} iota(), iota_dimension=0
  %j = s32[8]{0} multiply(%i, %i)
  ROOT %m = f32[2,3]{1,0} multiply(%x, %x)
}
"""
    hlo = program("  %a = f32[2,3]{1,0} parameter(0)\n  ROOT %c = f32[2,3]{1,0} call(%a), to_apply=%body", called)
    assert (hlo.multiplications(), hlo.flops()) == (6, 6)


class AskedError(Exception):
    """The compiler was asked."""


@pytest.mark.parametrize(
    ("backend", "degree", "problem"),
    [
        ("cpu", 2048, None), ("cpu", 4096, "the mesh has 4096 devices; the CPU backend takes at most 2048"), ("tpu", 256, None),
        ("tpu", 3, "the mesh has 3 devices; for tpu it must be one of 4, 8"), ("tpu", 4096, "the mesh has 4096 devices; for tpu"),
    ],
)  # fmt: skip
def test_a_mesh_that_a_backend_does_not_take_is_refused(
    backend: xla_compile.Backend, degree: int, problem: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiled(*operands: object) -> None:
        raise AskedError

    monkeypatch.setattr(xla_compile, "missing_packages", lambda backend: [])
    monkeypatch.setattr(xla_compile, "_compile", compiled)
    expression = parse_expression("A[I_X, J] * B[J, K] -> C[I_X, K]")
    sharded = shard_expression(expression, Mesh.of({"X": degree}), {"I": degree, "J": 2, "K": 2})
    with pytest.raises(InputError if problem else AskedError, match=problem):
        xla_compile.compile_product(sharded, backend=backend)


def test_products_of_each_dtype_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Integers as integers, floating-point numbers as such; bytes are counted in the product's dtype."""
    requested: list[str] = []

    def compiled(requests: Sequence[Mapping[str, Any]], *operands: object) -> dict[str, Any]:
        requested.extend(request["dtype"] for request in requests)
        return {"version": "", "hlo": [text_of("  ROOT %a = f32[2] parameter(0)", num_devices=1)] * len(requests)}

    monkeypatch.setattr(xla_compile, "missing_packages", lambda backend: [])
    monkeypatch.setattr(xla_compile, "_compile", compiled)
    expression = parse_expression("A[I, J] * B[J, K] -> C[I, K]")
    sizes = {"I": 2, "J": 2, "K": 2}
    dtypes = list(BYTES_PER_ELEMENT)
    xla_compile.compile_products([shard_expression(expression, Mesh.of({"X": 1}), sizes, dtype) for dtype in dtypes])
    for dtype, stand_in in zip(dtypes, requested, strict=True):
        assert getattr(torch, stand_in).is_floating_point == (not dtype.startswith("int")), dtype
