"""Triton's kernels in its interpreter against formulas in float64 and autograd, their traffic against closed forms, and
their resources as compiled for three generations of GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from train.scaled_mm_reference import checked_scaled_mm

from shardwise.run.data.batches import IGNORE_INDEX
from shardwise.run.kernels import device_dispatch, experts
from shardwise.run.kernels.cross_entropy import VocabParallelCrossEntropy
from shardwise.run.kernels.cross_entropy import cross_entropy as dispatched_cross_entropy
from shardwise.run.kernels.elementwise import FUNCTIONS, gated_gradients
from shardwise.run.kernels.experts import TokenRouting, route_tokens
from shardwise.run.kernels.matmul import OperandCast, QuantizedMatmul
from shardwise.run.kernels.norms import NORMS
from shardwise.run.kernels.optimizers import MomentDtypes, TritonAdamW, build_torch_optimizer, step_optimizer
from shardwise.run.kernels.positions_and_masks import rotate as dispatched_rotate
from shardwise.run.kernels.quantization import expand_scales, quantize_matrix
from shardwise.run.triton_kernels import (
    adamw,
    block_casts,
    casts,
    cross_entropy,
    expert_permutation,
    gated_activation,
    norms,
    rotary,
    traffic,
)
from shardwise.run.triton_kernels.interpreter_counts import counted_traffic
from shardwise.values.dtypes import NUMBER_FORMATS
from shardwise.values.scalings import SCALINGS, WHOLE_MATRIX, ScaleBlock, ScaleKind

FP32 = 1e-6
# Of results in 16 bits one rounding; Triton's interpreter cuts bf16 off instead.
ROUNDING = {torch.float32: FP32, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-11}


DEVICE = os.environ.get("SHARDWISE_TEST_DEVICE", "cpu")  # `make gpu-check` runs the kernels where they belong


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(DEVICE, dtype)


def assert_near(computed: Tensor, expected: Tensor, tolerance: float) -> None:
    """Relative in the norm, and no element off by more than a rounding of the largest."""
    difference = (computed.double() - expected.double()).norm()
    assert difference <= tolerance * expected.double().norm() + 1e-30


def expected_loss(logits: Tensor, targets: Tensor, scale: float, cap: float | None) -> Tensor:
    capped = logits if cap is None else cap * torch.tanh(logits / cap)
    return scale * F.cross_entropy(capped.flatten(0, -2), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


def is_hopper() -> bool:
    return torch.cuda.get_device_capability()[0] == 9


@pytest.fixture
def on_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dispatch tensors of the CPU to Triton's kernels too."""
    monkeypatch.setattr(device_dispatch, "TRITON_DEVICES", {"cpu", "cuda"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("num_words", [1, 517, 4096, 5003])
@pytest.mark.usefixtures("on_triton")
def test_logits_become_their_gradient(num_words: int, cap: float | None, dtype: torch.dtype) -> None:
    """Rows of odd lengths, ignored targets, logits between 0.05 and 12; logits stay where no backward pass follows."""
    logits = (4.0 * random(2, 3, num_words)).to(dtype)
    targets = torch.randint(num_words, (2, 3), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    targets[0, 1] = IGNORE_INDEX
    leaf = logits.double().requires_grad_()
    loss = expected_loss(leaf, targets, 0.25, cap)
    (gradient,) = torch.autograd.grad(loss, leaf)
    unchanged = logits.clone()
    assert_near(dispatched_cross_entropy(unchanged, targets, 0.25, cap, replace=False), loss, FP32)
    assert torch.equal(unchanged, logits)
    assert_near(
        dispatched_cross_entropy(logits, targets, torch.tensor(0.25, device=DEVICE), cap, replace=True), loss, FP32
    )
    assert_near(logits, gradient, ROUNDING[dtype])
    assert not logits[0, 1].any()


@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.usefixtures("on_triton")
def test_parts_of_the_vocabulary_give_the_loss_of_the_whole(cap: float | None) -> None:
    """Two ranks, of which the second has padding after its last word."""
    num_words, width = 1001, 512
    logits, targets = 4.0 * random(2, 5, num_words), torch.randint(num_words, (2, 5)).to(DEVICE)
    targets[1, 2] = IGNORE_INDEX
    leaf = logits.double().requires_grad_()
    loss = expected_loss(leaf, targets, 1.0, cap)
    (gradient,) = torch.autograd.grad(loss, leaf)
    parts = [F.pad(part, (0, width - part.shape[-1]), value=9.0) for part in logits.split(width, dim=-1)]
    ranks = [VocabParallelCrossEntropy(first, min(width, num_words - first), cap) for first in (0, width)]
    largest = torch.stack([rank.largest(part) for rank, part in zip(ranks, parts, strict=True)]).amax(0)
    total = sum(rank.local_sum_exp(part, largest) for rank, part in zip(ranks, parts, strict=True))
    target = sum(rank.target_logit(part, targets) for rank, part in zip(ranks, parts, strict=True))
    assert_near(ranks[0].loss(total, largest, target, targets, 1.0), loss, FP32)
    for rank, part in zip(ranks, parts, strict=True):
        rank.gradient(part, largest, total, targets, 1.0)
        assert not part[..., rank.num_words :].any()
    assert_near(torch.cat(parts, dim=-1)[..., :num_words], gradient, FP32)


REFERENCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "swiglu": lambda gate, up: F.silu(gate) * up,
    "geglu": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    "gated_relu2": lambda gate, up: F.relu(gate).square() * up,
    "clamped_swiglu": lambda gate, up: (
        gate.clamp(max=7.0) * torch.sigmoid(1.702 * gate.clamp(max=7.0)) * (up.clamp(-7.0, 7.0) + 1.0)
    ),
}


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("kind", REFERENCES)
@pytest.mark.usefixtures("on_triton")
def test_gated_activations_and_both_gradients(kind: str, dtype: torch.dtype) -> None:
    gate, up, dy = ((5.0 * random(3, 701, seed=seed)).to(dtype) for seed in range(3))
    leaves = gate.double().requires_grad_(), up.double().requires_grad_()
    out = REFERENCES[kind](*leaves)
    gradients = torch.autograd.grad(out, leaves, dy.double())
    assert_near(FUNCTIONS[kind](gate, up), out.detach(), ROUNDING[dtype])
    for computed, expected in zip(gated_gradients(kind, dy, gate, up), gradients, strict=True):
        assert_near(computed, expected, ROUNDING[dtype])


@pytest.mark.parametrize(("head_dim", "num_angles"), [(64, 32), (80, 40), (96, 24), (6, 3)])
@pytest.mark.parametrize("sequences", [(), (2,)])
@pytest.mark.usefixtures("on_triton")
def test_rotation_is_a_product_of_complex_numbers(sequences: tuple[int, ...], head_dim: int, num_angles: int) -> None:
    """Angles of each sequence or of all; dims behind the rotated ones stay."""
    x, angles = random(2, 7, 3, 2, head_dim), random(*sequences, 7, num_angles, seed=2)
    turns = torch.polar(torch.ones_like(angles), angles).view(*sequences, 7, 1, 1, num_angles)
    turned = torch.complex(x[..., :num_angles], x[..., num_angles : 2 * num_angles]) * turns
    expected = torch.cat((turned.real, turned.imag, x[..., 2 * num_angles :]), dim=-1)
    tables = angles.cos(), angles.sin()
    rotated = dispatched_rotate(x, tables)
    assert_near(rotated, expected, FP32)
    assert_near(dispatched_rotate(rotated, tables, -1.0), x, FP32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_layer", [False, True])
@pytest.mark.parametrize("width", [3, 100, 128])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.usefixtures("on_triton")
def test_norms_with_the_residual_sum(in_place: bool, width: int, is_layer: bool, dtype: torch.dtype) -> None:
    """As the engine calls them; the sum may overwrite a term of it, and its gradient that of the residual stream."""
    x, residual, dy, dtotal = (random(3, 5, width, seed=seed, dtype=dtype) for seed in range(4))
    weight, epsilon, norm = random(width, seed=4, dtype=dtype), 1e-5, NORMS["layer_norm" if is_layer else "rms_norm"]
    terms, stream = (x.clone(), residual.clone()), dtotal.clone()
    total, (out,), saved = norm.forward_of_sum(terms, weight, epsilon, into=terms[1] if in_place else None)
    assert (total is terms[1]) == in_place
    assert_near(total, x.double() + residual.double(), ROUNDING[dtype])
    leaves = total.double().requires_grad_(), weight.double().requires_grad_()
    expected = (
        F.layer_norm(leaves[0], (width,), leaves[1], None, epsilon)
        if is_layer
        else leaves[0] * torch.rsqrt(leaves[0].square().mean(-1, keepdim=True) + epsilon) * leaves[1]
    )
    dx, dweight = torch.autograd.grad(expected, leaves, dy.double())
    assert_near(out, expected.detach(), ROUNDING[dtype])
    computed_dx, computed_dweight = norm.backward(
        dy, total, *saved, weight, needs_weight=True, dtotal=stream, into=stream if in_place else None
    )
    assert (computed_dx is stream) == in_place
    assert_near(computed_dx, dx + dtotal.double(), ROUNDING[dtype])
    assert computed_dweight is not None
    assert_near(computed_dweight, dweight, ROUNDING[dtype])
    frozen_dx, frozen = norm.backward(dy, total, *saved, weight, needs_weight=False)
    assert frozen is None
    assert_near(frozen_dx, dx, ROUNDING[dtype])
    (normalised,), statistics = norm.forward(total, weight, epsilon)
    assert_near(normalised, out, ROUNDING[dtype])
    assert [tensor.shape for tensor in statistics] == [(15, 1)] * (1 + is_layer)
    assert norm.forward(total[:0], weight, epsilon)[0][0].shape == (0, 5, width)
    nothing, no_gradient = norm.backward(dy[:0], total[:0], *(row[:0] for row in saved), weight, needs_weight=True)
    assert (nothing.numel(), no_gradient.tolist() if no_gradient is not None else None) == (0, [0.0] * width)


MOMENTS = [MomentDtypes(torch.float32, torch.float32), MomentDtypes(torch.bfloat16, torch.bfloat16)]


@pytest.mark.parametrize("moments", MOMENTS, ids=lambda dtypes: str(dtypes.first))
def test_adamw_updates_as_pytorch_or_the_formulas(moments: MomentDtypes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps, of which the second is not allowed, of a matrix with decay and a vector without; beside PyTorch's kernel,
    or for moments in bf16 the formulas. Moments in bf16 are those
    of the interpreter, which cuts bits off; the weights after the first step have not read them."""
    shapes = {"matrix": 2500, "vector": 7}
    starts = {name: random(size, seed=size) for name, size in shapes.items()}
    weights: list[list[torch.nn.Parameter]] = []
    for devices in ({"cpu", "cuda"}, set[str]()):
        monkeypatch.setattr(device_dispatch, "TRITON_DEVICES", devices)
        parameters = [torch.nn.Parameter(start.clone()) for start in starts.values()]
        optimizer = build_torch_optimizer("adamw", parameters[:1], parameters[1:], {}, moments)
        assert isinstance(optimizer, TritonAdamW) == bool(devices)
        for group in optimizer.param_groups:
            group["lr"] = 0.01
        after: list[torch.nn.Parameter] = []
        for step, allowed in enumerate((True, False, True)):
            gradients = {weight: random(len(weight), seed=step) for weight in parameters}
            step_optimizer(optimizer, gradients, torch.tensor(allowed, device=DEVICE))
            for state in optimizer.state.values():
                if not allowed and isinstance(state["step"], int):
                    state["step"] -= 1  # as `ShardedOptimizer.undo_step_count` does
            after += [torch.nn.Parameter(weight.detach().clone()) for weight in parameters]
        weights.append(after)
    for number, (computed, expected) in enumerate(zip(*weights, strict=True)):
        exact = moments.first == torch.float32 or number < 4
        assert_near(computed, expected, FP32 if exact else 1e-4)
    assert all(map(torch.equal, weights[0][:2], weights[0][2:4]))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_casts_to_fp8_recover_numbers_of_the_format(dtype: torch.dtype, transposed: bool) -> None:
    """Each row has numbers of the format times a power of two, the largest among them, so that no element is rounded:
    the rounding of Triton's interpreter is not that of a GPU."""
    codes = torch.randint(0, 256, (33, 200), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    numbers = codes.view(dtype).float()
    numbers = numbers.where(numbers.isfinite(), 0.0)
    numbers[:, 7] = torch.finfo(dtype).max
    exponents = torch.randint(-9, 9, (33, 1), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    matrix = torch.ldexp(numbers, exponents)
    matrix = matrix.t().contiguous().t() if transposed else matrix
    for power_of_two in (False, True):
        elements, scales = casts.cast_rows(matrix, dtype, power_of_two=power_of_two)
        assert elements.is_contiguous()
        assert torch.equal(elements.float(), numbers)
        assert torch.equal(scales, torch.ldexp(torch.ones(33, 1, device=DEVICE), exponents))
    elements, scale = casts.cast_matrix(8.0 * numbers, dtype)
    assert (torch.equal(elements.float(), numbers), float(scale)) == (True, 8.0)
    elements, scale = casts.cast_matrix(4.0 * numbers, dtype, torch.tensor(0.5, device=DEVICE))
    assert (torch.equal(elements.float(), (2.0 * numbers).clamp(-numbers.max(), numbers.max())), float(scale)) == (
        True,
        2.0,
    )


@pytest.mark.parametrize("kind", ["fp32", "power_of_two"])
def test_scales_of_rows_are_those_of_the_reference(kind: ScaleKind) -> None:
    """To the bit, for rows of any magnitude and one of zeros."""
    matrix = random(33, 200, dtype=torch.bfloat16) * random(33, 1, seed=1).exp()
    matrix[3] = 0.0
    _, scales = casts.cast_rows(matrix, torch.float8_e4m3fn, power_of_two=kind == "power_of_two")
    assert torch.equal(scales, quantize_matrix(matrix, NUMBER_FORMATS["e4m3"], (1, None), kind).scales)
    _, scale = casts.cast_matrix(matrix, torch.float8_e4m3fn)
    assert scale == quantize_matrix(matrix, NUMBER_FORMATS["e4m3"], WHOLE_MATRIX, "fp32").scales


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("block", "kind"), [((1, 128), "fp32"), ((128, 128), "power_of_two"), ((1, 32), "e8m0")])
def test_casts_by_blocks_with_the_transposed_copy(block: ScaleBlock, kind: ScaleKind, transposed: bool) -> None:
    """Scales of both are those of the reference to the bit, for blocks of any magnitude, one of zeros, and a matrix that no
    block divides; elements are not rounded, as they are powers of two."""
    exponents = torch.randint(-3, 4, (150, 200), generator=torch.Generator().manual_seed(0)).float()
    matrix = (torch.sign(random(150, 200)) * torch.exp2(exponents).to(DEVICE)) * torch.exp2(8 * random(150, 1).round())
    matrix[3] = 0.0
    matrix[:40, :130] = 0.0
    matrix = matrix.t().contiguous().t() if transposed else matrix
    (elements, scales), copy = block_casts.cast_blocks(matrix, torch.float8_e4m3fn, block, kind, with_transposed=True)
    assert copy is not None
    for (cast, cast_scales), values in (((elements, scales), matrix), (copy, matrix.t())):
        expected = quantize_matrix(values, NUMBER_FORMATS["e4m3"], block, kind)
        assert torch.equal(cast_scales.float(), expected.scales)
        assert cast.is_contiguous()
        if kind != "fp32":  # powers of two stay powers of two
            assert torch.equal(cast.float(), expected.elements)
        restored = cast.float() * expand_scales(cast_scales.float(), cast.shape, block)
        assert_near(restored, values, 2.0**-3)


@pytest.mark.parametrize(("recipe", "block"), [("tile", (1, 128)), ("tile_power_of_two", (128, 128)), ("mx", (1, 32))])
@pytest.mark.usefixtures("on_triton")
def test_block_scales_are_cast_by_a_kernel(recipe: str, block: ScaleBlock, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[ScaleBlock] = []
    cast_blocks = block_casts.cast_blocks

    def count(matrix: Tensor, dtype: torch.dtype, block: ScaleBlock, kind: ScaleKind) -> object:
        calls.append(block)
        return cast_blocks(matrix, dtype, block, kind)

    monkeypatch.setattr(block_casts, "cast_blocks", count)
    matrix = torch.exp2(random(9, 40).round())
    quantized = quantize_matrix(matrix, NUMBER_FORMATS["e4m3"], block, SCALINGS[recipe].kind)
    assert calls == [block]
    assert_near(quantized.elements * expand_scales(quantized.scales, matrix.shape, block), matrix, 2.0**-3)


@pytest.mark.parametrize(
    ("scaling", "capability"),
    [("row", (9, 0)), ("tensor", (9, 0)), ("tile", (9, 0)), ("tile_power_of_two", (9, 0)), ("mx", (10, 0))],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("on_triton")
def test_products_of_cast_operands(
    scaling: str, capability: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward, and the gradient of a weight, whose operands are transposed views; of whole numbers, so that no cast
    rounds them and sums are exact. The emulation is not called."""
    if DEVICE == "cuda":
        if torch.cuda.get_device_capability() < capability or (scaling.startswith("tile") and not is_hopper()):
            pytest.skip(f"this GPU does not multiply operands with scales of {scaling}")
    else:
        monkeypatch.setitem(device_dispatch.EMULATED_CAPABILITIES, "cpu", capability)
        monkeypatch.setattr(F, "scaled_mm", checked_scaled_mm)
    x, dy = (
        torch.randint(-2, 3, (2, 64, width), generator=torch.Generator().manual_seed(width)) for width in (128, 256)
    )
    weight = torch.randint(-2, 3, (256, 128), generator=torch.Generator().manual_seed(0))
    for matrix in (x, dy, weight):
        if scaling in ("row", "tensor"):
            matrix.view(-1)[0] = 448  # the format's largest number: scales are powers of two
        else:  # the same for every block
            matrix.clamp_(-1, 1).mul_(448)
    x, dy, weight = (tensor.to(DEVICE, dtype) for tensor in (x, dy, weight))
    cast = OperandCast(NUMBER_FORMATS["e4m3"], SCALINGS[scaling].block)
    weight_cast = OperandCast(NUMBER_FORMATS["e4m3"], SCALINGS[scaling].weight_block)
    products = [
        (
            QuantizedMatmul(("B", "T", "D"), ("F", "D"), ("B", "T", "F"), (cast, weight_cast), SCALINGS[scaling]),
            x,
            weight,
        ),
        (QuantizedMatmul(("B", "T", "F"), ("B", "T", "D"), ("F", "D"), (cast, cast), SCALINGS[scaling]), dy, x),
    ]
    expected = [x.double() @ weight.double().t(), dy.double().flatten(0, 1).t() @ x.double().flatten(0, 1)]
    with pytest.MonkeyPatch.context() as patched:
        patched.delattr(QuantizedMatmul, "multiply_in_fp32")
        for (product, *operands), exact in zip(products, expected, strict=True):
            computed = product(*operands)
            assert computed.dtype == dtype
            rounded = exact.bfloat16() if scaling in ("row", "mx") or dtype == torch.bfloat16 else exact
            assert torch.equal(computed.double(), rounded.double())


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("capacity_factor", [None, 0.5])
@pytest.mark.parametrize("width", [5, 300, 2500])
@pytest.mark.usefixtures("on_triton")
def test_rows_of_experts_and_back(width: int, capacity_factor: float | None, dtype: torch.dtype) -> None:
    """Three of five experts for each of 14 tokens; with a capacity some choices are dropped, and their gates get no gradient."""
    routing = route_tokens(
        random(2, 7, 5), 3, torch.zeros(5, device=DEVICE), normalised=True, capacity_factor=capacity_factor
    )
    rows, dy = random(routing.num_rows, width, seed=1, dtype=dtype), random(2, 7, width, seed=2, dtype=dtype)
    leaves = rows.double().requires_grad_(), routing.gates.double().requires_grad_()
    tokens = dispatched_rows(leaves[0], routing)
    combined = torch.einsum("nkd,nk->nd", tokens, leaves[1]).view(2, 7, width)
    drows, dgates = torch.autograd.grad(combined, leaves, dy.double())
    assert_near(experts.combine(routing, rows), combined.detach(), ROUNDING[dtype])
    assert_near(experts.combine_dgates(dy, rows, routing), dgates, FP32)
    assert_near(experts.combine_dx(dy, routing), drows, ROUNDING[dtype])
    assert_near(experts.dispatch_dx(rows, routing), tokens.detach().sum(dim=1).view(2, 7, width), ROUNDING[dtype])
    assert routing.dropped == (capacity_factor is not None)


def dispatched_rows(rows: Tensor, routing: TokenRouting) -> Tensor:
    """Return the row of each pair [N, k, D] by a loop over rows, 0 for dropped ones."""
    pairs = [torch.zeros_like(rows[0]) for _ in range(routing.gates.numel())]
    for row, pair in enumerate(routing.order.tolist()):
        pairs[pair] = rows[row]
    return torch.stack(pairs).view(*routing.gates.shape, -1)


def test_counted_traffic_is_the_closed_form() -> None:
    """Loads and stores of the interpreter, in bytes: of logits, activations, heads, rows and casts."""
    logits, targets = random(6, 5003, dtype=torch.bfloat16), torch.full((6,), 7)
    targets[2] = IGNORE_INDEX
    for replace in (False, True):
        with counted_traffic() as counted:
            cross_entropy.cross_entropy(logits, targets, torch.tensor(1.0), None, replace=replace)
        assert counted == traffic.cross_entropy_traffic(6, 5003, 2, num_ignored=1, replace=replace)
    gate, dy = random(3, 701), random(3, 701, seed=1)
    with counted_traffic() as counted:
        gated_activation.gated_forward("swiglu", gate, gate)
    assert counted == traffic.gated_activation_traffic(3 * 701, 4, backward=False)
    with counted_traffic() as counted:
        gated_activation.gated_backward("swiglu", dy, gate, gate)
    assert counted == traffic.gated_activation_traffic(3 * 701, 4, backward=True)
    heads, angles = random(2, 7, 3, 96), random(7, 24)
    with counted_traffic() as counted:
        rotary.rotate(heads, (angles, angles), 1.0)
    assert counted == traffic.rotary_traffic(14, heads.numel(), 24, 4)
    x, weight = random(5, 100), random(100)
    for is_layer in (False, True):
        for residual in (None, random(5, 100, seed=3)):
            kind = {"is_layer": is_layer, "has_residual": residual is not None}
            with counted_traffic() as counted:
                total, _, mean, inverse = norms.norm_forward(x, residual, weight, 1e-5, is_layer=is_layer)
            assert counted == traffic.norm_forward_traffic(5, 100, 4, **kind)
            with counted_traffic() as counted:
                norms.norm_backward(x, total, weight, (mean, inverse), residual, is_layer=is_layer, needs_weight=True)
            assert counted == traffic.norm_backward_traffic(5, 100, 4, **kind, num_programs=5)
    rows, dy, gates = random(11, 2500), random(4, 2500, seed=1), random(4, 3, seed=2)
    pairs = torch.randperm(12, generator=torch.Generator().manual_seed(0)).view(4, 3)  # one of twelve is dropped
    sizes = (4, 3, 1, 2500, 4)
    for has_gates in (False, True):
        with counted_traffic() as counted:
            expert_permutation.gathered_sum(rows, pairs, gates if has_gates else None)
        assert counted == traffic.gathered_sum_traffic(*sizes, num_blocks=2, has_gates=has_gates)
    with counted_traffic() as counted:
        expert_permutation.gate_gradient(dy, rows, pairs)
    assert counted == traffic.gate_gradient_traffic(*sizes, num_blocks=2)
    with counted_traffic() as counted:
        expert_permutation.row_gradient(dy, gates, torch.arange(11))
    assert counted == traffic.row_gradient_traffic(11, 2500, 4)
    shard, narrow = random(2500).abs(), random(2500, dtype=torch.bfloat16).abs()
    for copy in (None, narrow):
        with counted_traffic() as counted:
            adamw.update(shard, narrow, (shard, narrow), copy, torch.ones(2), adamw.AdamWSettings(*[0.5] * 7))
        copied = 0 if copy is None else 2
        assert counted == traffic.adamw_traffic(2500, 4, 2, (4, 2), copied, num_blocks=3)
    for block, kind, scale_bytes in (((1, 128), "fp32", 4), ((128, 128), "power_of_two", 4), ((1, 32), "e8m0", 1)):
        for turned in (False, True):
            with counted_traffic() as counted:
                block_casts.cast_blocks(random(130, 200), torch.float8_e4m3fn, block, kind, with_transposed=turned)
            assert counted == traffic.block_cast_traffic(130, 200, 4, block, scale_bytes, has_transposed=turned)
    with counted_traffic() as counted:
        casts.cast_rows(x, torch.float8_e4m3fn, power_of_two=False)
    assert counted == traffic.cast_rows_traffic(5, 100, 4)


def test_all_kernels_compile_without_spills() -> None:
    """For A100, H100 and B200, which need not be there; the interpreter is off in a process of its own."""
    command = [sys.executable, "-m", "shardwise.run.triton_kernels.ahead_of_time", "80", "90", "100"]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"}
    output = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    kernels = json.loads(output)
    assert {kernel["compute_capability"] for kernel in kernels} == {80, 90, 100}
    assert {kernel["kernel"] for kernel in kernels} == {
        "cross_entropy_kernel", "row_maximum_kernel", "row_sum_exp_kernel", "vocab_parallel_gradient_kernel",
        "gated_forward_kernel", "gated_backward_kernel", "rotate_kernel", "norm_forward_kernel", "norm_backward_kernel",
        "cast_rows_kernel", "amax_kernel", "cast_matrix_kernel", "gathered_sum_kernel", "gate_gradient_kernel",
        "row_gradient_kernel", "adamw_kernel", "cast_rows_in_blocks_kernel",
        "cast_tiles_kernel", "norm_rows_kernel", "norm_tiles_kernel", "gated_forward_tiles_kernel",
        "gated_backward_tiles_kernel",
    }  # fmt: skip
    assert [kernel for kernel in kernels if kernel["spilled_bytes"]] == []
    assert max(kernel["registers"] for kernel in kernels) <= 128, "at least four blocks of 128 threads a multiprocessor"
