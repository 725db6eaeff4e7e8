"""Products on tensor cores without a GPU: PyTorch's own checks of a CUDA call accept every one, on tensors without data, and what
the call's operands and scales stand for, read from memory as cuBLAS documents it, has the emulation's product."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from train.scaled_mm_reference import checked_scaled_mm

from shardwise.layout.layout import Layout
from shardwise.model.architecture import Architecture
from shardwise.run.engine.micro_batch import MicroBatch
from shardwise.run.kernels import device_dispatch, tensor_cores
from shardwise.run.kernels.matmul import ProductFormats, QuantizedMatmul, product_formats
from shardwise.run.kernels.quantization import pack_e2m1, quantize_matrix, unpack_e2m1
from shardwise.run.kernels.quantized_weights import TiledWeight
from shardwise.run.parallel.world import World
from shardwise.run.recipe import TrainingRecipe
from shardwise.run.trainer.training_engine import TrainingEngine
from shardwise.step.rank_program import RankProgram
from shardwise.values import get_precision
from shardwise.values.dtypes import NUMBER_FORMATS
from shardwise.values.scalings import SCALINGS

# The devices that multiply each recipe's products: Ada, Hopper, Blackwell of data centres and of desktops; none before Ada.
CAPABILITIES = ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0))
DEVICES = {
    "fp8_torchao": CAPABILITIES[1:],
    "fp8_transformer_engine": CAPABILITIES[1:],
    "fp8_torchao_rowwise": CAPABILITIES[1:],
    "fp8_blockwise": ((9, 0),),
    "fp8_deepseek_v3": ((9, 0),),
    "mxfp8": CAPABILITIES[3:],
    "nvfp4": CAPABILITIES[3:],
}
TOKENS, WIDTH, HIDDEN = (2, 128), 512, 384  # 3 and 4 blocks of 128
# Dims of left, right and result. Weights lie as [WIDTH, HIDDEN]; in the last the weight is the left operand.
LAYOUTS = {
    "forward": (("B", "T", "D"), ("D", "F"), ("B", "T", "F")),
    "input gradient": (("B", "T", "F"), ("D", "F"), ("B", "T", "D")),
    "weight gradient": (("B", "T", "D"), ("B", "T", "F"), ("D", "F")),
    "weight gradient, transposed": (("B", "T", "F"), ("B", "T", "D"), ("F", "D")),
    "weight first": (("D", "F"), ("B", "T", "D"), ("F", "B", "T")),
}


class FixedScales:
    """Factors of a run with delayed scaling."""

    def factor(self, name: str, tensor: Tensor) -> Tensor:
        return torch.tensor(64.0)


@pytest.fixture
def tensor_cores_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[int, int]], list[torch.dtype]]:
    """A function that gives the CPU a compute capability, and returns a list of the results' dtypes, one for each call."""

    def emulate(capability: tuple[int, int]) -> list[torch.dtype]:
        calls: list[torch.dtype] = []

        def multiply(*arguments: Any, output_dtype: torch.dtype, **options: Any) -> Tensor:
            calls.append(output_dtype)
            return checked_scaled_mm(*arguments, output_dtype=output_dtype, **options)

        monkeypatch.setattr(F, "scaled_mm", multiply)
        monkeypatch.setitem(device_dispatch.EMULATED_CAPABILITIES, "cpu", capability)
        return calls

    return emulate


def build_product(recipe: str, layout: str) -> tuple[QuantizedMatmul, list[Any]]:
    """A recipe's product and its operands, with the weight in tiles where the recipe stores it so."""
    formats = product_formats(get_precision(recipe))
    assert formats is not None
    sizes = {"B": TOKENS[0], "T": TOKENS[1], "D": WIDTH, "F": HIDDEN}
    left_dims, right_dims, result_dims = LAYOUTS[layout]
    generator = torch.Generator().manual_seed(1)
    operands: list[Any] = []
    casts = []
    for dims in (left_dims, right_dims):
        is_weight, is_gradient = dims == ("D", "F"), dims == ("B", "T", "F")
        values = torch.randn([sizes[dim] for dim in dims], generator=generator)
        values = (values * torch.exp2(4 * torch.randn(values.shape[-1], generator=generator))).bfloat16()
        casts.append(operand_cast(formats, is_weight=is_weight, is_gradient=is_gradient))
        if is_weight and recipe == "fp8_deepseek_v3":
            tiled = TiledWeight.zeros(values.shape, 0, 1, formats.operand, formats.scaling, values.device)
            tiled.store(values)
            operands.append(tiled)
        else:
            operands.append(values)
    scales = FixedScales() if formats.scaling.is_delayed else None
    return QuantizedMatmul(left_dims, right_dims, result_dims, (casts[0], casts[1]), formats.scaling, scales), operands


def operand_cast(formats: ProductFormats, *, is_weight: bool, is_gradient: bool) -> Any:
    from shardwise.run.kernels.matmul import OperandCast

    block = formats.scaling.weight_block if is_weight else formats.scaling.block
    return OperandCast(formats.gradient if is_gradient else formats.operand, block, "tensor")


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("recipe", DEVICES)
def test_products_of_each_recipe_and_device(
    recipe: str,
    layout: str,
    capability: tuple[int, int],
    tensor_cores_of: Callable[[tuple[int, int]], list[torch.dtype]],
) -> None:
    product, operands = build_product(recipe, layout)
    emulated = product.multiply_in_fp32(*operands)
    calls = tensor_cores_of(capability)
    computed = {dtype: product.multiply(*operands, dtype) for dtype in (torch.bfloat16, torch.float32)}
    if capability not in DEVICES[recipe]:
        assert calls == []
        assert torch.equal(computed[torch.float32], emulated)
        return
    wide = torch.bfloat16 if recipe in ("fp8_torchao_rowwise", "mxfp8", "nvfp4") else torch.float32
    assert calls == [torch.bfloat16, wide]
    size = emulated.abs().max().item()
    torch.testing.assert_close(computed[torch.bfloat16], emulated.bfloat16(), rtol=2**-7, atol=1e-5 * size)
    assert computed[torch.float32].dtype == torch.float32
    tolerance = 2**-7 if wide == torch.bfloat16 else 1e-5
    torch.testing.assert_close(computed[torch.float32], emulated, rtol=tolerance, atol=1e-5 * size)


@pytest.mark.parametrize("num_tokens", [1, 37])
@pytest.mark.parametrize("layout", ["forward", "input gradient", "weight gradient"])
@pytest.mark.parametrize("recipe", DEVICES)
def test_any_number_of_tokens_runs_on_tensor_cores(
    recipe: str, layout: str, num_tokens: int, tensor_cores_of: Callable[[tuple[int, int]], list[torch.dtype]]
) -> None:
    """As the rows of an expert: padded with zeros to what the device takes, which changes no scale."""
    product, operands = build_product(recipe, layout)
    operands = [tensor[:1, :num_tokens] if tensor.shape[:2] == TOKENS else tensor for tensor in operands]
    emulated = product.multiply_in_fp32(*operands)
    calls = tensor_cores_of(DEVICES[recipe][0])
    computed = product.multiply(*operands, torch.bfloat16)
    assert len(calls) == 1
    assert computed.shape == emulated.shape
    size = emulated.abs().max().item()
    torch.testing.assert_close(computed, emulated.bfloat16(), rtol=2**-7, atol=1e-5 * size)


def test_every_recipe_of_the_engine_is_tested() -> None:
    from shardwise.values.precision import PRECISIONS

    scalings = {precision.scaling for precision in PRECISIONS.values() if precision.scaling is not None}
    assert {get_precision(recipe).scaling for recipe in DEVICES} == scalings


@pytest.mark.parametrize(
    ("scaling", "formats", "sizes", "runs"),
    [
        ("tensor", ("e4m3", "e5m2"), (7, 32, 48), True),  # rows of the left matrix are free
        ("tensor", ("e5m2", "e5m2"), (16, 32, 48), False),
        ("tensor", ("e4m3", "e4m3"), (16, 24, 48), False),
        ("tensor", ("e4m3", "e4m3"), (16, 32, 40), False),
        ("row", ("e4m3", "e5m2"), (16, 32, 48), False),
        ("tile", ("e4m3", "e4m3"), (16, 128, 256), True),
        ("tile", ("e4m3", "e4m3"), (16, 144, 256), False),  # not whole tiles of the weight
        ("tile", ("e4m3", "e4m3"), (20, 128, 256), False),
        ("tile", ("e4m3", "e4m3"), (16, 128, 192), False),
        ("tile", ("e5m2", "e4m3"), (16, 128, 256), False),
    ],
)
def test_sizes_and_formats_of_a_hopper(
    scaling: str, formats: tuple[str, str], sizes: tuple[int, int, int], runs: bool
) -> None:
    blocks = SCALINGS[scaling].block, SCALINGS[scaling].weight_block
    operands = tensor_cores.ProductOperands(sizes, formats, blocks, SCALINGS[scaling].kind)
    assert operands.run_on((9, 0)) is runs
    assert not operands.run_on(None)


def test_pytorch_before_scaled_mm_multiplies_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(F, "scaled_mm")
    blocks = SCALINGS["tensor"].block, SCALINGS["tensor"].weight_block
    assert not tensor_cores.ProductOperands((16, 16, 16), ("e4m3", "e4m3"), blocks, "fp32").run_on((9, 0))


@pytest.mark.parametrize("formats", [("e4m3", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e4m3")], ids=str)
@pytest.mark.parametrize("name", ["tensor", "row"])
def test_the_emulation_is_what_pytorchs_scaled_product_gives(name: str, formats: tuple[str, str]) -> None:
    """`scaled_mm` itself, which has a CPU's kernel for these."""
    scaling, generator = SCALINGS[name], torch.Generator().manual_seed(0)
    first, second = (
        quantize_matrix(
            torch.randn(rows, 320, generator=generator), NUMBER_FORMATS[to], scaling.block, scaling.kind
        ).store(NUMBER_FORMATS[to], scaling.kind)
        for rows, to in zip((48, 64), formats, strict=True)
    )
    from shardwise.run.kernels.quantization import scaled_product

    blocks, dtype = (scaling.block, scaling.block), torch.float32 if name == "tensor" else torch.bfloat16
    computed = tensor_cores.tensor_core_product(first, second, blocks, dtype)
    expected = scaled_product(first, scaling.block, second, scaling.block, is_local=False).to(dtype)
    rounding = 2**-8 if name == "row" else 1e-5
    torch.testing.assert_close(computed, expected, rtol=rounding, atol=1e-5 * float(expected.abs().max()))


def test_fp4_codes_are_those_of_ml_dtypes() -> None:
    numbers = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    numbers = torch.stack((numbers, -numbers)).T.reshape(1, -1)
    codes = numbers.numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    packed = pack_e2m1(numbers)
    assert packed.view(torch.uint8).tolist() == (codes[:, ::2] | codes[:, 1::2] << 4).tolist()
    assert torch.equal(unpack_e2m1(packed), numbers)


def test_the_products_of_a_process_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_cores, "_RAN", set())
    assert tensor_cores.product_kernels() == {}
    product, operands = build_product("fp8_blockwise", "forward")
    product.multiply(*operands, torch.bfloat16)
    assert tensor_cores.product_kernels() == {"1x128 by 128x128 in power_of_two": "float32"}


WIDE = Architecture(
    name="wide", num_layers=2, d_model=128, d_ff=256, num_heads=4, num_kv_heads=4, head_dim=32, vocab_size=96
)
SEQS, POSITIONS = 4, 64


def losses_of_two_steps(precision: str, architecture: Architecture) -> list[float]:
    recipe, layout = TrainingRecipe(steps=2, learning_rate=3e-3, warmup_steps=0), Layout(micro_batch_seqs=SEQS)
    instance = RankProgram(
        architecture=architecture, layout=layout, precision=get_precision(precision), seq_len=POSITIONS
    )
    engine = TrainingEngine(instance, recipe, World(instance.mesh))
    engine.initialize(0)
    ids = torch.randint(96, (SEQS, POSITIONS + 1), generator=torch.Generator().manual_seed(0))
    batch = MicroBatch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
    return [float(engine.step([batch], SEQS * POSITIONS, 1, step).loss) for step in range(2)]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("recipe", DEVICES)
def test_a_model_trains_with_its_products_on_tensor_cores(
    recipe: str, tensor_cores_of: Callable[[tuple[int, int]], list[torch.dtype]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them, 7 weights of each of 2 layers three times a step; losses are the emulation's but for roundings to bf16."""
    emulated = losses_of_two_steps(recipe, WIDE)
    calls = tensor_cores_of(DEVICES[recipe][0])
    monkeypatch.delattr(QuantizedMatmul, "multiply_in_fp32")
    assert losses_of_two_steps(recipe, WIDE) == pytest.approx(emulated, rel=2e-3)
    assert len(calls) == 2 * 7 * 2 * 3
    assert emulated[1] < emulated[0]


@pytest.mark.parametrize("recipe", ["fp8_torchao_rowwise", "fp8_blockwise"])
def test_experts_train_on_tensor_cores(
    recipe: str, tensor_cores_of: Callable[[tuple[int, int]], list[torch.dtype]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has as many rows as chose it."""
    experts = replace(WIDE, name="experts", num_experts=4, experts_per_token=2)
    emulated = losses_of_two_steps(recipe, experts)
    calls = tensor_cores_of(DEVICES[recipe][-1])
    monkeypatch.delattr(QuantizedMatmul, "multiply_in_fp32")
    assert losses_of_two_steps(recipe, experts) == pytest.approx(emulated, rel=2e-3)
    assert len(calls) > 2 * 7 * 2 * 3
