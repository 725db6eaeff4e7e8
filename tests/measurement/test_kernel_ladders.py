"""Ladders of kernels: every rung against float64, its loads and stores counted, its kernels compiled for a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw
from shardwise.book_formulas.rooflines.kernels import kernel_roofline
from shardwise.hardware import load_chip
from shardwise.measure.kernel_ladders.closed_forms import int8_tiles
from shardwise.measure.kernel_ladders.ladders import LADDERS, SMALL_LADDERS
from shardwise.measure.kernel_ladders.product_ladders import layer_batch_ladder, product_ladder
from shardwise.measure.kernel_ladders.workbench import place_on_chip, relative_error, time_ladder
from shardwise.present.verbs.kernels import LADDER_NAMES
from shardwise.run.triton_kernels.interpreter_counts import counted_traffic, counted_warps
from shardwise.run.triton_kernels.traffic import Traffic
from shardwise.values import InputError

RUNGS = [(name, rung.name) for name, make in SMALL_LADDERS.items() for rung in make().rungs]
VIEWS = {
    "detach", "_to_copy", "transpose", "t", "alias", "view", "_unsafe_view", "expand", "unsqueeze", "clone", "slice", "select",
    "new_empty",
}  # fmt: skip


class OperationTraffic(TorchDispatchMode):
    """Counts the bytes of tensors that operations of PyTorch read and write, one kernel each; of a tensor that is
    broadcast its own bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.traffic, self.num_launches = Traffic(), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ not in VIEWS:
            self.num_launches += 1
            self.traffic.loaded_bytes += sum(map(bytes_of, args))
            self.traffic.stored_bytes += sum(map(bytes_of, result if isinstance(result, tuple) else (result,)))
        return result


def bytes_of(argument: Any) -> int:
    if isinstance(argument, (list, tuple)):
        return sum(map(bytes_of, argument))
    return argument.numel() * argument.element_size() if isinstance(argument, torch.Tensor) and argument.dim() else 0


@contextmanager
def counted_operations() -> Iterator[OperationTraffic]:
    with OperationTraffic() as mode:
        yield mode


@pytest.mark.parametrize(("name", "rung_name"), RUNGS)
def test_rungs_compute_the_ladders_function_and_move_their_bytes(name: str, rung_name: str) -> None:
    """In fp16, at sizes that no block divides: within one rounding and what its sums add to it. Triton's kernels ask memory
    for exactly the bytes of the closed form; PyTorch's operations for those of their operands and results."""
    ladder = SMALL_LADDERS[name]()
    rung = next(rung for rung in ladder.rungs if rung.name == rung_name)
    operands = ladder.make_operands("cpu")
    expected = ladder.reference(*operands)
    expected = expected if rung.num_rows is None else expected[: rung.num_rows]
    counting = counted_traffic() if rung.uses_triton else counted_operations()
    with counting as counts:
        computed = rung.run(*operands)
    results = [tuple(result) if isinstance(result, (tuple, list)) else (result,) for result in (computed, expected)]
    assert relative_error(*results) < 4e-3
    if rung.name == "compiled":  # it runs as separate operations on a CPU
        return
    counted = counts if isinstance(counts, Traffic) else counts.traffic
    if rung.uses_triton or name not in ("attention", "attention-gradient", "norm"):
        assert counted == Traffic(int(rung.loaded_bytes), int(rung.stored_bytes))
    else:  # masks, statistics and norms of a CPU aside
        assert counted.loaded_bytes == pytest.approx(rung.loaded_bytes, rel=0.25)
        assert counted.stored_bytes == pytest.approx(rung.stored_bytes, rel=0.25)


def test_each_rung_moves_no_more_than_the_one_before_and_no_less_than_the_least() -> None:
    for name in ("elu", "softmax", "norm", "gated-cast", "launches", "product", "attention", "attention-gradient"):
        ladder = LADDERS[name]()
        moved = [rung.loaded_bytes + rung.stored_bytes for rung in ladder.rungs]
        assert moved == sorted(moved, reverse=True)
        assert moved[-1] >= ladder.least_bytes * 0.999


def test_sectors_are_those_that_warps_touch() -> None:
    """Counted address by address in the interpreter. Neighbouring rows: each lane of a warp has 32 bytes for its 2."""
    ladder = product_ladder(64, 32, 256)
    elu = SMALL_LADDERS["elu"]()
    for rung, operands in [
        *((rung, ladder.make_operands("cpu")) for rung in ladder.rungs[:2]),
        *((rung, elu.make_operands("cpu")) for rung in elu.rungs[2:]),
    ]:
        with counted_warps() as counts:
            rung.run(*operands)
        assert counts.loaded_sectors == rung.loaded_sectors, rung.name
    strided, coalesced = LADDERS["elu"]().rungs[2:]
    assert (strided.sector_use, coalesced.sector_use) == (1 / 16, 1.0)
    by_elements, by_rows = LADDERS["product"]().rungs[:2]
    assert by_elements.loaded_sectors == pytest.approx(15.5 * (by_rows.loaded_sectors or 0), rel=0.01)


def test_a_warp_with_lanes_of_both_sides_goes_through_both() -> None:
    """Multiplications counted in the interpreter: 4 steps of each side that a warp goes through, for each of its lanes."""
    ladder = SMALL_LADDERS["divergence"]()
    (operand,) = ladder.make_operands("cpu")
    executed = []
    for rung in ladder.rungs:
        with counted_warps() as counts:
            rung.run(operand)
        assert 2 * counts.multiplications == rung.executed_flops, rung.name
        executed.append(counts.multiplications)
    assert executed == [2 * 4 * 1024, 2 * 4 * 1024, 4 * 1024]


def test_ladder_names_equal_those_of_the_verb() -> None:
    assert tuple(LADDERS) == tuple(SMALL_LADDERS) == LADDER_NAMES


def test_rooflines_of_a_chip() -> None:
    """By hand, for H100 SXM: 989 TFLOP/s and 3.35 TB/s. A product of 4,096 in bf16 is bound by compute, a softmax by memory."""
    (product,), (softmax,) = (sw.kernels([name], "h100", device="none").ladders for name in ("product", "softmax"))
    assert product.bound == "compute"
    assert product.roofline_s == pytest.approx(2 * 4096**3 / 989e12, rel=2e-3)
    assert softmax.bound == "memory"
    assert softmax.roofline_s == pytest.approx(2 * 8192 * 8192 * 2 / 3.35e12, rel=1e-3)
    by_elements, by_rows, small, medium, large, *_ = product.rungs
    assert large.loaded_bytes == 2 * 2 * 4096**3 / 128
    assert small.loaded_bytes == 2 * medium.loaded_bytes == 4 * large.loaded_bytes
    assert by_elements.loaded_bytes == 2 * 2 * 4096**3
    assert by_rows.loaded_bytes == pytest.approx(2 * 4096**3, rel=0.01)
    assert all(rung.seconds is None for rung in product.rungs), "no GPU here"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"names": ["sofmax"]}, "did you mean 'softmax'"),
        ({"chip": "h10"}, "h100"),
        ({"compile_for": [85]}, "one of 80, 90, 100 is required"),
        ({"compile_for": ["ninety"]}, "--compile-for"),
        ({"device": "cuda"}, "--device none"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        sw.kernels(**arguments)


def test_compiled_kernels_and_their_resources() -> None:
    """Kernels of rows and elements spill nothing, and large tiles fit into the shared memory of an H100."""
    ladders = {ladder.name: ladder for ladder in sw.kernels(device="none", compile_for=[90]).ladders}
    compiled = {name: [kernel for rung in ladder.rungs for kernel in rung.compiled] for name, ladder in ladders.items()}
    for name in compiled.keys() - {"attention", "attention-gradient", "layer-batch"}:
        assert compiled[name]
        assert not any(kernel.spilled_bytes for kernel in compiled[name]), name
    assert {kernel.kernel for kernel in compiled["attention-gradient"]} == {
        "row_products_kernel", "flash_dquery_kernel", "flash_dkey_dvalue_kernel"
    }  # fmt: skip
    assert max(kernel.shared_bytes for kernels in compiled.values() for kernel in kernels) <= 227 * 1024


def test_int8_weights_become_16_bit_numbers_in_registers() -> None:
    """On A100 and B200 (H100 is above): nothing spills. Tiles of weights are one byte an element in shared memory, in all stages
    that are in flight."""
    compiled = sw.kernels(["int8-layer-batch", "divergence"], device="none", compile_for=[80, 100]).ladders
    kernels = [kernel for ladder in compiled for rung in ladder.rungs for kernel in rung.compiled]
    assert {kernel.compute_capability for kernel in kernels} == {80, 100}
    assert not any(kernel.spilled_bytes for kernel in kernels), [kernel for kernel in kernels if kernel.spilled_bytes]
    small = next(kernel for kernel in kernels if kernel.kernel == "int8_product_kernel")
    tiles = int8_tiles(1)
    assert small.shared_bytes <= tiles.num_stages * tiles.depth * (2 * tiles.rows + tiles.columns)
    assert "cp.async" in small.loads


def test_each_step_of_a_product_is_in_its_machine_code() -> None:
    """Loads of one element, then of 16 bytes; asynchronous copies to shared memory; TMA. The tile without tensor cores has its
    operands in shared memory too."""
    (product,) = sw.kernels(["product"], device="none", compile_for=[90]).ladders
    kernels = {rung.name: rung.compiled[0] for rung in product.rungs if rung.compiled}
    assert {name: kernel.loads for name, kernel in kernels.items()} == {
        "by elements": ("ld.global.b16",), "by rows": ("ld.global.b16", "ld.global.b32"),
        **dict.fromkeys(("tiles of 32", "tiles of 64", "tiles of 128"), ("ld.global.b16",)),
        **dict.fromkeys(("wide loads", "tensor cores", "tiles in groups"), ("ld.global.v4.b32",)),
        **dict.fromkeys(("pipelined", "persistent"), ("cp.async",)), "tensor descriptors": ("cp.async.bulk.tensor",),
    }  # fmt: skip
    assert kernels["tiles of 128"].shared_bytes == 2 * 128 * 16 * 4
    assert kernels["pipelined"].shared_bytes >= 3 * 2 * 128 * 64 * 2


def test_the_knee_of_a_layer_against_its_batch() -> None:
    """Closed form for H100: 989e12 over 3.35e12 FLOPs a byte, and one FLOP for each byte of a weight and token, so weights are
    read while 295 tokens are computed; and a few more for the bytes that tokens move themselves."""
    (ladder,) = sw.kernels(["layer-batch"], "h100", device="none").ladders
    weights = 3 * 4096 * 14336
    by_hand = 2 * weights / 3.35e12 / (2 * weights / 989e12 - 4 * 4096 / 3.35e12)
    assert ladder.knee_rows == pytest.approx(by_hand, rel=1e-3)
    assert 295 < by_hand < 310
    times = {rung.name: rung.roofline_s for rung in ladder.rungs}
    assert times["8 tokens"] == pytest.approx(times["1 token"], rel=0.01), "memory, whatever the batch"
    assert times["2,048 tokens"] == pytest.approx(2 * times["1,024 tokens"]), "compute"


@pytest.mark.parametrize("chip", ["h100", "a100-80gb", "b200"])
def test_int8_weights_halve_the_knee(chip: str) -> None:
    """By the roofline of a product with these weights: bf16 activations and arithmetic, int8 weights. A layer passes fewer bytes
    of each token than its three products would, so its knee lies between theirs and that of weights alone."""
    wide, narrow = sw.kernels(["layer-batch", "int8-layer-batch"], chip, device="none").ladders
    sizes = {"B": 1, "D": 4096, "F": 14_336}
    products = [kernel_roofline(load_chip(chip), "matmul", sizes, weights=weights) for weights in ("bf16", "int8")]
    assert narrow.knee_rows is not None
    assert wide.knee_rows is not None
    assert narrow.knee_rows / wide.knee_rows == pytest.approx(
        products[1].critical_size / products[0].critical_size, rel=1e-3
    )
    assert narrow.knee_rows / wide.knee_rows == pytest.approx(0.5, rel=1e-3)
    assert products[1].critical_intensity / 2 < narrow.knee_rows < products[1].critical_size
    times = {rung.name: rung.roofline_s for rung in narrow.rungs}
    assert times["1 token"] == pytest.approx(
        0.5 * {rung.name: rung.roofline_s for rung in wide.rungs}["1 token"], rel=0.01
    )
    assert times["2,048 tokens"] == pytest.approx(2 * times["1,024 tokens"]), "compute, as with bf16"


class BatchTimer:
    """A device that takes 1 ms up to 100 rows, and then 10 us a row."""

    def time_run(self, run: Any, num_runs: int = 1) -> float:
        return max(1e-3, 1e-5 * len(run()))

    def time_cold_run(self, run: Any) -> float:
        return self.time_run(run)

    def time_issue(self, run: Any, num_runs: int) -> float:
        return self.time_run(run)

    def time_queued(self, run: Any, num_runs: int = 1) -> float:
        return self.time_run(run)


def test_the_measured_knee() -> None:
    """A layer on 1, 40 and 400 tokens, on that device: the flat and the rising line meet at 100."""
    ladder = layer_batch_ladder(16, 24, (1, 40, 400))
    timed = time_ladder(place_on_chip(ladder, load_chip("h100")), ladder, "cpu", BatchTimer())
    assert [rung.seconds for rung in timed.rungs] == pytest.approx([1e-3, 1e-3, 4e-3])
    assert timed.measured_knee_rows == pytest.approx(100.0)
    assert all(rung.relative_error is not None and rung.relative_error < 4e-3 for rung in timed.rungs)
