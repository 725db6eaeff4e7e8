"""Weights in FP8 tiles at rest: what products take of them, to the bit, their bytes, and the runs that have them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from test_narrow_products import POSITIONS, SEQS, batches, engine_of, losses_of_a_run_that_goes_on

from shardwise.hardware.cluster_loading import load_cluster
from shardwise.layout.layout import Layout
from shardwise.layout.rules.engine import require_runnable
from shardwise.model.architecture import Architecture
from shardwise.model.job import Job
from shardwise.price import Problem
from shardwise.price.estimate import estimate
from shardwise.run.kernels.matmul import OperandCast, QuantizedMatmul
from shardwise.run.kernels.quantized_weights import TiledWeight
from shardwise.run.trainer.training_engine import TrainingEngine
from shardwise.values.dtypes import NUMBER_FORMATS
from shardwise.values.errors import InputError
from shardwise.values.precision import PRECISIONS
from shardwise.values.quantization import quantize_blocks
from shardwise.values.scalings import SCALINGS

E4M3, TILE = NUMBER_FORMATS["e4m3"], SCALINGS["tile"]
# Every matrix has whole tiles of 128 x 128, so that scales are four bytes for 16,384 elements.
WIDE = Architecture(
    name="w", num_layers=2, d_model=128, d_ff=256, num_heads=4, num_kv_heads=2, head_dim=64, vocab_size=96
)
ROUTED = replace(WIDE, name="r", num_experts=4, experts_per_token=2)


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    random = np.random.default_rng(seed)
    return torch.from_numpy((random.standard_normal(shape) * np.exp2(random.uniform(-6, 2, shape))).astype(np.float32))


def make_tiled(weight: torch.Tensor, num_stacked: int, num_rows: int) -> TiledWeight:
    stored = TiledWeight.zeros(weight.shape, num_stacked, num_rows, E4M3, TILE, torch.device("cpu"))
    stored.store(weight)
    return stored


def test_tiles_are_those_of_the_reference() -> None:
    weight = values(3, 100, 150)
    tiles = make_tiled(weight, 1, 1)
    for matrix, tile in zip(weight, tiles, strict=True):
        expected = quantize_blocks(matrix.numpy(), E4M3, TILE.weight_block, TILE.kind)
        assert tile.elements.float().numpy().tobytes() == expected.elements.tobytes()
        assert tile.scales.numpy().tobytes() == expected.scales.tobytes()


# A weight's dims, how many of them are rows, and the products that take it: forward, and back to its input.
PRODUCTS = {
    "columns are summed": (("F", "D"), 1, (("B", "D"), ("B", "F"))),
    "rows are summed": (("D", "F"), 1, (("B", "D"), ("B", "F"))),
    "heads": (("N", "H", "D"), 2, (("B", "N", "H"), ("B", "D"))),
}
SIZES = {"B": 20, "D": 192, "F": 160, "N": 3, "H": 64}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_take_a_tiled_weight_as_they_cast_the_one_that_it_is_of(name: str) -> None:
    dims, num_rows, ends = PRODUCTS[name]
    weight = values(*(SIZES[dim] for dim in dims))
    for input_dims, output_dims in (ends, ends[::-1]):
        product = QuantizedMatmul(
            input_dims, dims, output_dims, (OperandCast(E4M3, TILE.block), OperandCast(E4M3, TILE.weight_block)), TILE
        )
        x = values(*(SIZES[dim] for dim in input_dims), seed=1)
        output = product(x, make_tiled(weight, 0, num_rows))
        assert torch.equal(output, product(x, weight))
        assert output.shape == torch.Size(SIZES[dim] for dim in output_dims)
        turned = QuantizedMatmul(dims, input_dims, output_dims, product.operands[::-1], TILE)
        assert torch.equal(turned(make_tiled(weight, 0, num_rows), x), turned(weight, x))


@pytest.mark.parametrize("exchanged", [False, True])
def test_experts_take_their_matrices_of_a_stack(exchanged: bool) -> None:
    weight = values(2, 160, 192)
    stack = make_tiled(weight, 1, 1)
    plain = weight.transpose(1, 2) if exchanged else weight
    rows = values(20, plain.shape[1], seed=1)
    operands = OperandCast(E4M3, TILE.block), OperandCast(E4M3, TILE.weight_block)
    product = QuantizedMatmul(("rows", "D"), ("D", "M"), ("rows", "M"), operands, TILE)
    for tile, matrix in zip(stack.transpose(1, 2) if exchanged else stack, plain, strict=True):
        assert tile.shape == matrix.shape
        assert torch.equal(product(rows, tile), product(rows, matrix))


@pytest.mark.parametrize("architecture", [WIDE, ROUTED], ids=lambda architecture: architecture.name)
def test_state_takes_the_bytes_of_the_plan(architecture: Architecture) -> None:
    """Matrices of blocks 15 for each parameter and four for each tile, all else 16."""
    precision, layout = PRECISIONS["fp8_deepseek_v3"], Layout(micro_batch_seqs=SEQS)
    engine = engine_of("fp8_deepseek_v3", architecture)
    measured: dict[str, int] = {}
    storages = {
        tensor.untyped_storage().data_ptr(): (term, tensor.untyped_storage().nbytes())
        for term, tensor in engine.stored_tensors()
    }
    for term, num_bytes in storages.values():
        measured[term] = measured.get(term, 0) + num_bytes
    job = Job(global_batch_tokens=SEQS * POSITIONS, seq_len=POSITIONS, precision=precision.name)
    planned = estimate(Problem(architecture, load_cluster("h100:1"), job), layout).memory
    assert measured == {term: planned[term] for term in measured}
    members = [member for group in engine.instance.groups for member in group.members]
    by_products = sum(
        member.size for member in members if isinstance(engine_view(engine, member.parameter.name), TiledWeight)
    )
    every = sum(member.size for member in members)
    assert by_products > every / 2
    assert sum(measured.values()) == by_products * (15 + 4 / 128**2) + (every - by_products) * 16


def engine_view(engine: TrainingEngine, name: str) -> object:
    return next(group.views[name] for group in engine.groups if name in group.views)


def test_weights_are_cast_from_the_master_copy_behind_every_update() -> None:
    engine = engine_of("fp8_deepseek_v3", WIDE)
    before = engine_view(engine, "layers.0.w_up")
    assert isinstance(before, TiledWeight)
    first = before.elements.clone()
    for step, batch in enumerate(batches(2)):
        engine.step([batch], SEQS * POSITIONS, 1, step)
    group = next(group for group in engine.groups if "layers.0.w_up" in group.views)
    member = next(
        group_member for group_member in group.group.members if group_member.parameter.name == "layers.0.w_up"
    )
    stored = group.views["layers.0.w_up"]
    expected = quantize_blocks(group.view(group.state, member).numpy(), E4M3, TILE.weight_block, TILE.kind)
    assert stored.elements.float().numpy().tobytes() == expected.elements.tobytes()
    assert not torch.equal(stored.elements.float(), first.float())


def test_a_master_copy_in_parts_and_adapters_are_refused() -> None:
    precision = PRECISIONS["fp8_deepseek_v3"]
    require_runnable(WIDE, Layout(dp=2, tp=2, pp=2), precision)
    with pytest.raises(InputError, match=r"zero_stage=1 splits within what has one scale .* --pin zero_stage=0"):
        require_runnable(WIDE, Layout(fsdp=2, zero_stage=1), precision)
    adapted = replace(WIDE, lora_rank=4, lora_targets=("qkv",))
    with pytest.raises(InputError, match="adapters of weights in fp8"):
        require_runnable(adapted, Layout(), precision)


def test_a_checkpoint_has_the_master_copy_and_a_run_goes_on_from_it_bit_by_bit() -> None:
    first, second = losses_of_a_run_that_goes_on("fp8_deepseek_v3", WIDE)
    assert first == second
