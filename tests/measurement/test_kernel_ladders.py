"""Ladders of kernels: every rung against float64, its loads and stores counted, its kernels compiled for a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw
from shardwise.measure.kernel_ladders.ladders import LADDERS, SMALL_LADDERS
from shardwise.measure.kernel_ladders.workbench import relative_error
from shardwise.present.verbs.kernels import LADDER_NAMES
from shardwise.run.triton_kernels.interpreter_counts import counted_traffic
from shardwise.run.triton_kernels.traffic import Traffic
from shardwise.values import InputError

RUNGS = [(name, rung.name) for name, make in SMALL_LADDERS.items() for rung in make().rungs]
VIEWS = {"detach", "_to_copy", "transpose", "t", "alias", "view", "_unsafe_view", "expand", "unsqueeze", "clone"}


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
    counting = counted_traffic() if rung.uses_triton else counted_operations()
    with counting as counts:
        computed = rung.run(*operands)
    results = [tuple(one) if isinstance(one, (tuple, list)) else (one,) for one in (computed, expected)]
    assert relative_error(*results) < 4e-3
    counted = counts if isinstance(counts, Traffic) else counts.traffic
    if rung.uses_triton or name not in ("attention", "attention-gradient", "norm"):
        assert counted == Traffic(int(rung.loaded_bytes), int(rung.stored_bytes))
    else:  # masks, statistics and norms of a CPU aside
        assert counted.loaded_bytes == pytest.approx(rung.loaded_bytes, rel=0.25)
        assert counted.stored_bytes == pytest.approx(rung.stored_bytes, rel=0.25)


def test_each_rung_moves_no_more_than_the_one_before_and_no_less_than_the_least() -> None:
    for make in LADDERS.values():
        ladder = make()
        moved = [rung.loaded_bytes + rung.stored_bytes for rung in ladder.rungs]
        assert moved == sorted(moved, reverse=True)
        assert moved[-1] >= ladder.least_bytes * 0.999


def test_names_are_those_of_the_verb() -> None:
    assert tuple(LADDERS) == tuple(SMALL_LADDERS) == LADDER_NAMES


def test_rooflines_of_a_chip() -> None:
    """By hand, for H100 SXM: 989 TFLOP/s and 3.35 TB/s. A product of 4,096 in bf16 is bound by compute, a softmax by memory."""
    (product,), (softmax,) = (sw.kernels([name], "h100", device="none").ladders for name in ("product", "softmax"))
    assert product.bound == "compute"
    assert product.roofline_s == pytest.approx(2 * 4096**3 / 989e12, rel=2e-3)
    assert softmax.bound == "memory"
    assert softmax.roofline_s == pytest.approx(2 * 8192 * 8192 * 2 / 3.35e12, rel=1e-3)
    (by_rows, small, large, *_) = product.rungs
    assert large.loaded_bytes == 2 * 2 * 4096**3 / 128
    assert small.loaded_bytes == 4 * large.loaded_bytes
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
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        sw.kernels(**arguments)


def test_compiled_kernels_and_their_resources() -> None:
    """Kernels of rows and elements spill nothing, and large tiles fit into the shared memory of an H100."""
    ladders = {ladder.name: ladder for ladder in sw.kernels(device="none", compile_for=[90]).ladders}
    compiled = {name: [kernel for rung in ladder.rungs for kernel in rung.compiled] for name, ladder in ladders.items()}
    for name in ("elu", "softmax", "norm"):
        assert compiled[name]
        assert not any(kernel.spilled_bytes for kernel in compiled[name])
    assert {kernel.kernel for kernel in compiled["attention-gradient"]} == {
        "row_products_kernel", "flash_dquery_kernel", "flash_dkey_dvalue_kernel"
    }  # fmt: skip
    assert max(kernel.shared_bytes for kernels in compiled.values() for kernel in kernels) <= 227 * 1024
