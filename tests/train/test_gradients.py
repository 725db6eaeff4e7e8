"""The executor's norms, functions and loss: each result against a formula, each gradient against autograd of that formula."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from train.formulas import EXACT, NARROW, Formula, Largest, assert_near, gradients_of, random

from shardwise.model.numerics import CLAMPED_SWIGLU_SLOPE, SWIGLU_CLAMP
from shardwise.run.data.batches import IGNORE_INDEX
from shardwise.run.kernels.cross_entropy import cap_logits, cross_entropy
from shardwise.run.kernels.elementwise import FUNCTIONS
from shardwise.run.kernels.norms import NORMS
from shardwise.run.kernels.positions_and_masks import rotate, rotate_back

# Norms.


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    dims = tuple(range(-weight.dim(), 0))
    return x / torch.sqrt(x.square().mean(dim=dims, keepdim=True) + epsilon) * weight


def layer_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    centred = x - x.mean(dim=-1, keepdim=True)
    return centred / torch.sqrt(centred.square().mean(dim=-1, keepdim=True) + epsilon) * weight


NORM_FORMULAS: dict[str, Formula] = {"rms_norm": rms_norm, "layer_norm": layer_norm}
PYTORCHS: dict[str, Formula] = {
    "rms_norm": lambda x, weight, epsilon: F.rms_norm(x, weight.shape, weight, epsilon),
    "layer_norm": lambda x, weight, epsilon: F.layer_norm(x, weight.shape, weight, None, epsilon),
}


def assert_norm_is(
    kind: str, formula: Formula, x: Tensor, weight: Tensor, dy: Tensor, epsilon: float, tolerance: float = EXACT
) -> None:
    norm = NORMS[kind]
    (y,), statistics = norm.forward(x, weight, epsilon)
    dx, dweight = norm.backward(dy, x, *statistics, weight, needs_weight=True)
    expected = gradients_of(lambda x, weight: formula(x, weight, epsilon), (x, weight), dy)
    for actual, reference in zip((y, dx, dweight), (expected[0], *expected[1]), strict=True):
        assert_near(actual, reference, tolerance)
    dx_alone, nothing = norm.backward(dy, x, *statistics, weight, needs_weight=False)
    assert nothing is None
    assert torch.equal(dx_alone, dx)


@pytest.mark.parametrize("epsilon", [1e-5, 0.3])
@pytest.mark.parametrize("kind", NORM_FORMULAS)
def test_norms_equal_their_formulas(kind: str, epsilon: float) -> None:
    assert_norm_is(kind, NORM_FORMULAS[kind], random(2, 3, 4), random(4, seed=1), random(2, 3, 4, seed=2), epsilon)


def test_a_norm_over_several_dims_is_over_all_of_them() -> None:
    """As over queries of all heads, which come as a view of another order."""
    x, dy = random(3, 2, 2, 4).transpose(0, 1), random(2, 2, 3, 4, seed=2).transpose(1, 2)
    assert_norm_is("rms_norm", rms_norm, x, random(2, 4, seed=1), dy, 1e-5)


@NARROW
@pytest.mark.parametrize("kind", NORM_FORMULAS)
def test_norms_in_narrow_formats_equal_pytorch(kind: str, dtype: torch.dtype, tolerance: float) -> None:
    """Results are in the format of the operands; the statistics of an RMSNorm are in float32."""
    x, weight, dy = random(64, 8, dtype=dtype), random(8, dtype=dtype, seed=1), random(64, 8, dtype=dtype, seed=2)
    assert_norm_is(kind, PYTORCHS[kind], x, weight, dy, 1e-5, tolerance)
    _, statistics = NORMS[kind].forward(x, weight, 1e-5)
    assert {saved.numel() for saved in statistics} == {64}
    assert kind == "layer_norm" or statistics[0].dtype == torch.float32


def test_the_gradient_of_a_norms_weight_is_added_up_in_float32() -> None:
    """Of 4000 rows of ones: added up in bf16 it would stop at 256."""
    x = torch.ones(4000, 8, dtype=torch.bfloat16)
    weight = torch.ones(8, dtype=torch.bfloat16)
    _, statistics = NORMS["rms_norm"].forward(x, weight, 1e-5)
    _, dweight = NORMS["rms_norm"].backward(x, x, *statistics, weight, needs_weight=True)
    assert dweight is not None
    assert_near(dweight, torch.full((8,), 4000.0, dtype=torch.bfloat16), 1e-2)


# Elementwise functions: the operands of each, in order, and the formula.


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    low = gate.clamp(max=SWIGLU_CLAMP)
    return low / (1.0 + torch.exp(-CLAMPED_SWIGLU_SLOPE * low)) * (up.clamp(-SWIGLU_CLAMP, SWIGLU_CLAMP) + 1.0)


def gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


FORMULAS: dict[str, tuple[tuple[str, ...], Formula]] = {
    "swiglu": (("gate", "up"), lambda gate, up: gate / (1.0 + torch.exp(-gate)) * up),
    "geglu": (("gate", "up"), lambda gate, up: gelu(gate) * up),
    "clamped_swiglu": (("gate", "up"), clamped_swiglu),
    "gelu": (("x",), gelu),
    "relu": (("x",), torch.relu),
    "relu2": (("x",), lambda x: torch.relu(x) ** 2),
    "gated_relu2": (("gate", "up"), lambda gate, up: torch.relu(gate) ** 2 * up),
    "sigmoid_gate": (("x", "logit"), lambda x, logit: x / (1.0 + torch.exp(-logit))),
}
# What a gradient reads beside dy, where it is not all operands.
READS = {"swiglu_dup": ("gate",), "geglu_dup": ("gate",), "gated_relu2_dup": ("gate",), "sigmoid_gate_dx": ("logit",)}


def test_every_function_with_a_gradient_has_a_formula() -> None:
    partners = {f"{name}_d{operand}" for name, (operands, _) in FORMULAS.items() for operand in operands}
    assert {name for name in FUNCTIONS if "_d" in name} == partners
    assert set(FUNCTIONS) - partners - set(FORMULAS) == {"add", "add_vector", "negate", "sum_to"}


@pytest.mark.parametrize("name", FORMULAS)
def test_functions_and_their_gradients_equal_their_formulas(name: str) -> None:
    """On both sides of every clamp, and at each; no operand is written over."""
    names, formula = FORMULAS[name]
    operands = {operand: 5.0 * random(40, 8, seed=seed) for seed, operand in enumerate(names)}
    for place, operand in enumerate(operands.values()):
        operand[place, :3] = torch.tensor([-SWIGLU_CLAMP, 0.0, SWIGLU_CLAMP])
    dy, before = random(40, 8, seed=9), [operand.clone() for operand in operands.values()]
    result, gradients = gradients_of(formula, list(operands.values()), dy)
    assert_near(FUNCTIONS[name](*operands.values()), result)
    for operand, gradient in zip(names, gradients, strict=True):
        partner = f"{name}_d{operand}"
        reads = [operands[read] for read in READS.get(partner, names)]
        assert_near(FUNCTIONS[partner](dy, *reads), gradient)
    assert all(torch.equal(original, operand) for original, operand in zip(before, operands.values(), strict=True))
    assert torch.equal(dy, random(40, 8, seed=9))


@NARROW
@pytest.mark.parametrize("name", FORMULAS)
def test_functions_in_narrow_formats_return_them(name: str, dtype: torch.dtype, tolerance: float) -> None:
    names, formula = FORMULAS[name]
    operands = [random(40, 8, dtype=dtype, seed=seed) for seed, _ in enumerate(names)]
    dy = random(40, 8, dtype=dtype, seed=9)
    result, gradients = gradients_of(lambda *x: formula(*(operand.double() for operand in x)), operands, dy.double())
    assert_near(FUNCTIONS[name](*operands), result.to(dtype), tolerance)
    for operand, gradient in zip(names, gradients, strict=True):
        partner = f"{name}_d{operand}"
        reads = [operands[names.index(read)] for read in READS.get(partner, names)]
        assert_near(FUNCTIONS[partner](dy, *reads), gradient, tolerance)


def test_sums_include_every_term() -> None:
    terms = [random(3, 4, seed=seed) for seed in range(4)]
    for count in (2, 3, 4):
        assert_near(FUNCTIONS["add"](*terms[:count]), torch.stack(terms[:count]).sum(dim=0))
    assert torch.equal(FUNCTIONS["negate"](terms[0]), 0.0 - terms[0])
    assert torch.equal(FUNCTIONS["add_vector"](terms[0], terms[1][0]), terms[0] + terms[1][:1])
    assert FUNCTIONS["sum_to"](terms[0]) is terms[0]


@pytest.mark.parametrize("num_unrotated", [0, 3])
@pytest.mark.parametrize("heads", [(), (3,), (3, 2)])
@pytest.mark.parametrize("sequences", [(), (2,)])
def test_rotation_equals_a_product_of_complex_numbers(
    heads: tuple[int, ...], sequences: tuple[int, ...], num_unrotated: int
) -> None:
    """The second half of a head are the imaginary parts, and what lies behind both stays as it is; positions are each
    sequence's own, or shared."""
    x, dy = random(2, 5, *heads, 8 + num_unrotated), random(2, 5, *heads, 8 + num_unrotated, seed=1)
    angles = random(*sequences, 5, 4, seed=2)
    turns = torch.polar(torch.ones_like(angles), angles).view(*sequences, 5, *(1 for _ in heads), 4)
    turned = torch.complex(x[..., :4], x[..., 4:8]) * turns
    tables = (angles.cos(), angles.sin())
    rotated, back = rotate(x, tables), rotate_back(dy, tables)
    assert_near(rotated, torch.cat((turned.real, turned.imag, x[..., 8:]), dim=-1))
    assert (rotated * dy).sum().item() == pytest.approx((x * back).sum().item(), rel=1e-12)
    assert_near(rotate_back(rotated, tables), x)


# The loss.


def loss_by_hand(logits: Tensor, targets: Tensor, scale: float, cap: float | None) -> Tensor:
    bent = logits if cap is None else cap * torch.tanh(logits / cap)
    return scale * F.cross_entropy(bent.flatten(0, -2), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("scale", [1.0, 1 / 3])
@pytest.mark.parametrize("width", [7, 2000])
def test_cross_entropy_replaces_logits_by_their_gradient(width: int, scale: float, cap: float | None) -> None:
    """More rows than a part has, the last part shorter; some targets are ignored. Without a backward pass logits stay."""
    logits = 2.0 * random(7, 43, width)
    targets = torch.randint(width, (7, 43), generator=torch.Generator().manual_seed(2))
    targets[0, 5:9] = IGNORE_INDEX
    targets[3] = IGNORE_INDEX
    loss, (gradient,) = gradients_of(lambda x: loss_by_hand(x, targets, scale, cap), [logits], torch.tensor(1.0))
    buffer = logits.clone()
    assert_near(cross_entropy(buffer, targets, scale, cap, replace=False), loss)
    assert torch.equal(buffer, logits)
    assert_near(cross_entropy(buffer, targets, torch.tensor(scale, dtype=torch.float64), cap, replace=True), loss)
    assert_near(buffer, gradient)
    assert not buffer[3].any()


@NARROW
def test_loss_in_narrow_formats_equals_cross_entropy(dtype: torch.dtype, tolerance: float) -> None:
    """The loss is in float32, its gradient in the format of the logits."""
    logits = random(301, 2000, dtype=dtype)
    targets = torch.randint(2000, (301,), generator=torch.Generator().manual_seed(2))
    targets[5:9] = IGNORE_INDEX
    loss, (gradient,) = gradients_of(
        lambda x: loss_by_hand(x.double(), targets, 1 / 300, None), [logits], torch.tensor(1.0)
    )
    actual = cross_entropy(logits, targets, 1 / 300, None, replace=True)
    assert actual.dtype == torch.float32
    assert actual.item() == pytest.approx(loss.item(), rel=2e-6)
    assert_near(logits, gradient, tolerance)


def test_a_loss_over_many_targets_scales_its_gradient_in_float32() -> None:
    """1/3000 is no number of bf16: rounded to one, it would make the whole gradient 0.15% too large."""
    logits = random(3000, 40, dtype=torch.bfloat16)
    targets = torch.randint(40, (3000,), generator=torch.Generator().manual_seed(3))
    exact = logits.double()
    for buffer in (logits, exact):
        cross_entropy(buffer, targets, 1 / 3000, None, replace=True)
    actual, exact = logits.double().flatten(), exact.flatten()
    assert torch.dot(actual, exact) / torch.dot(exact, exact) == pytest.approx(1.0, abs=5e-4)


def test_capped_logits_are_in_float32() -> None:
    logits = random(3, 5, dtype=torch.bfloat16)
    assert torch.equal(cap_logits(logits, None), logits.float())
    assert_near(cap_logits(logits, 0.5), 0.5 * torch.tanh(logits.float() / 0.5), 1e-6)
    assert cap_logits(logits.double(), 0.5).dtype == torch.float64


@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize(
    ("rows", "width", "part"),
    [
        (1000, 64, 512),  # of 2^15 logits
        (40 * 128, 1024, 40),  # 1/128 of all rows
        (40 * 128 + 1, 1024, 41),
        (3, 40_000, 1),
        (0, 40_000, 1),
    ],
)
def test_no_copy_of_all_logits_is_made(rows: int, width: int, part: int, cap: float | None) -> None:
    """The loss is made of some rows at a time, and nothing that is made beside the logits is larger."""
    logits, targets = torch.zeros(rows, width, dtype=torch.bfloat16), torch.zeros(rows, dtype=torch.long)
    with Largest() as largest:
        cross_entropy(logits, targets, 1.0, cap, replace=True)
    assert largest.elements == max(min(part, rows) * width, 1)
