"""Casts in the kernels that make operands of products: to the bits of casts in the products, in the bytes that are planned."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from train.short_steps import MICRO_BATCHES, POSITIONS, SEQS, build_engine, micro_batches, run_step
from train.test_cast_weights import DENSE, LATENT, LAYOUTS, MOE, WIDE, make_plan, runs

from shardwise.derive.producer_casts import FORMS, Form, ProducedOperand, is_gated, produced_operands
from shardwise.layout.layout import Layout
from shardwise.measure.reconcile.reconciliation import REHEARSAL_TOLERANCE, compare_rehearsal
from shardwise.model.architecture import Architecture
from shardwise.price.layout_pricer import Pricing
from shardwise.price.tensor_formats import TensorFormats
from shardwise.run.kernels import activation_casts, device_dispatch, matmul
from shardwise.run.kernels.activation_casts import CastActivation, OutputCast
from shardwise.run.kernels.elementwise import FUNCTIONS, gated_forms, gated_gradient_forms, gated_gradients
from shardwise.run.kernels.norms import NORMS
from shardwise.run.kernels.quantization import quantize_matrix
from shardwise.run.recipe import TrainingRecipe
from shardwise.run.trainer.engine_prediction import engine_policy
from shardwise.run.trainer.rehearsal import rehearse_rank
from shardwise.run.trainer.training_engine import TrainingEngine
from shardwise.run.triton_kernels import fused_casts, traffic
from shardwise.run.triton_kernels.interpreter_counts import counted_traffic
from shardwise.run.triton_kernels.traffic import FormSizes
from shardwise.step.rank_program import RankProgram
from shardwise.values import IssuePolicy, get_precision
from shardwise.values.dtypes import NUMBER_FORMATS
from shardwise.values.engine_policies import Casts
from shardwise.values.scalings import SCALINGS

RECIPES = ("fp8_blockwise", "mxfp8", "fp8_torchao_rowwise")
OTHER_RECIPES = ("fp8_current", "fp8_delayed", "nvfp4")  # a scale has to wait for the whole matrix
LAYER_NORM = replace(DENSE, name="layer norm", norm="layer", norm_bias=False)
GEGLU = replace(DENSE, name="geglu", mlp="geglu", d_ff=96)
MODELS = (DENSE, MOE, LATENT, LAYER_NORM, GEGLU)


def engine_of(precision: str, casts: Casts, architecture: Architecture = DENSE, **layout: Any) -> TrainingEngine:
    return build_engine(precision, IssuePolicy(casts=casts, weight_casts="each_step"), architecture, **layout)


def written_names(engine: TrainingEngine) -> set[str]:
    """Names of the casts that calls write, such as "act rows"."""
    slots = {slot for layer in engine.model.layers for slot in layer.unit.slot_of}
    return {name for name in slots if name.endswith((" rows", " columns"))}


@pytest.mark.thinned(6)
@pytest.mark.parametrize("recompute", ["none", "full", "mlp", "layernorm", "core_attn", "selective"])
@pytest.mark.parametrize("architecture", MODELS, ids=lambda architecture: architecture.name)
@pytest.mark.parametrize("precision", [*RECIPES, *OTHER_RECIPES])
def test_training_has_the_bits_of_casts_in_products(precision: str, architecture: Architecture, recompute: str) -> None:
    """Losses of two steps and of an evaluation after them, with what the optimizer made of the weights."""
    outcomes = []
    for casts in ("in_products", "in_producers"):
        engine = engine_of(precision, casts, architecture, recompute=recompute)
        losses = [run_step(engine, step) for step in range(2)]
        losses.append(float(engine.loss(micro_batches(9), MICRO_BATCHES * SEQS * POSITIONS)))
        outcomes.append((losses, [tensor.clone() for _, _, tensor in engine.checkpoint_tensors()]))
        assert bool(written_names(engine)) == (casts == "in_producers" and precision in RECIPES)
    (losses, state), (expected_losses, expected_state) = outcomes
    assert losses == expected_losses
    assert all(torch.equal(*pair) for pair in zip(state, expected_state, strict=True))


def test_what_products_read_of_norms_and_activations_is_written() -> None:
    """Blocks in both orders; a scale of a row for what norms make; with experts, what a router reads stays as it is."""
    gradients = {f"d.{name}#0 {form}" for name in ("gate", "up") for form in ("rows", "columns")}
    norms = {f"{name}_norm.out rows" for name in ("attention", "mlp")}
    columns = {f"{name}_norm.out columns" for name in ("attention", "mlp")}
    assert written_names(engine_of("mxfp8", "in_producers")) == {
        *gradients,
        *norms,
        *columns,
        "act rows",
        "act columns",
    }
    assert written_names(engine_of("fp8_torchao_rowwise", "in_producers")) == norms
    assert written_names(engine_of("mxfp8", "in_products")) == set()
    moe = written_names(engine_of("mxfp8", "in_producers", MOE))
    assert moe == {"attention_norm.out rows", "attention_norm.out columns"}


def test_a_bias_keeps_the_cast_in_the_product() -> None:
    """The norm's result is not what a product reads, but its sum with the bias."""
    biased = replace(LAYER_NORM, name="biased", norm_bias=True)
    names = written_names(engine_of("mxfp8", "in_producers", biased))
    assert names
    assert not any("norm" in name for name in names)


def test_a_tensor_is_cast_once_for_all_its_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries, keys and values read one cast of the norm, and their gradients another."""
    counts: Counter[str] = Counter()
    for casts in ("in_products", "in_producers"):
        engine = engine_of("mxfp8", casts)

        def count(module: Any, casts: str = casts) -> Any:
            original = quantize_matrix if module is matmul else activation_casts.cast_operand

            def cast(matrix: Tensor, *arguments: Any) -> Any:
                counts[casts] += 1
                return original(matrix, *arguments)

            return cast

        with monkeypatch.context() as patched:
            patched.setattr(matmul, "quantize_matrix", count(matmul))
            patched.setattr(activation_casts, "cast_operand", count(activation_casts))
            run_step(engine)
    # Of a block, in products: 7 inputs forward, and backward these again and 7 gradients in two orders. In producers two norms,
    # the activation and the gradients of gate and up in two orders each; attention's result twice, and 5 gradients in two orders.
    blocks = DENSE.num_layers * MICRO_BATCHES
    assert counts == {"in_products": blocks * (7 + 7 + 2 * 7), "in_producers": blocks * (2 * (2 + 1 + 2) + 2 + 2 * 5)}


def operand(name: str, units: tuple[ProducedOperand, ...]) -> ProducedOperand:
    return next(produced for produced in units if produced.name == name)


def test_what_is_saved_anyway_is_not_saved_as_a_cast_too() -> None:
    """The router reads the norm as it is, also backward; the shared expert's products read casts forward alone."""
    instance = RankProgram(
        architecture=LATENT, layout=Layout(), precision=get_precision("mxfp8"), seq_len=16, policy=IssuePolicy()
    )
    (unit,) = {
        kind: instance.unit_instructions(path, kind).unit for path, kind in instance.units if kind == "block"
    }.values()
    norm = operand("mlp_norm.out", produced_operands(unit))
    assert (norm.written(("rows", "columns")), norm.saved_forms(("rows", "columns"))) == (("plain", "rows"), ("plain",))
    shared = operand("shared_act", produced_operands(unit))
    assert (shared.written(("rows", "columns")), shared.saved_forms(("rows", "columns"))) == (
        ("rows", "columns"),
        ("columns",),
    )
    assert (shared.written(()), shared.saved_forms(())) == (("plain",), ("plain",))


def test_tensors_that_move_are_cast_in_products() -> None:
    """Sequence parallelism gathers what the norms make; what the activation makes stays."""
    names = written_names(engine_of("mxfp8", "in_producers"))
    instance = RankProgram(
        architecture=DENSE, layout=Layout(tp=2, sequence_parallel=True), precision=get_precision("mxfp8"), seq_len=16,
        policy=IssuePolicy(),
    )  # fmt: skip
    unit = next(instance.unit_instructions(path, kind).unit for path, kind in instance.units if kind == "block")
    moved = {produced.name for produced in produced_operands(unit)}
    assert moved == {"act", "d.gate#0", "d.up#0"} < {name.split()[0] for name in names}


def all_casts() -> Iterator[Any]:
    for name, forms in itertools.product(
        ("tile", "tile_power_of_two", "mx", "row"),
        (("rows",), ("columns",), ("rows", "columns"), ("plain", "rows"), ("plain", "rows", "columns")),
    ):
        scaling = SCALINGS[name]
        if set(forms) <= {"plain", *scaling.producer_forms(has_rows=True)}:
            cast = OutputCast(forms, NUMBER_FORMATS["e4m3"], scaling.block, scaling.kind)
            yield pytest.param(cast, id=f"{name} {' and '.join(forms)}")


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_same(computed: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    for form, reference in zip(computed, expected, strict=True):
        if isinstance(form, Tensor):
            assert torch.equal(form, reference)
            continue
        assert (form.shape, form.dtype) == (reference.shape, reference.dtype)
        assert form.quantized.elements.is_contiguous()
        for part, whole in zip(form.quantized.widen(), reference.quantized.widen(), strict=True):
            assert torch.equal(part, whole)


@pytest.fixture
def on_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dispatch tensors of the CPU to Triton's kernels too."""
    monkeypatch.setattr(device_dispatch, "TRITON_DEVICES", {"cpu", "cuda"})


@pytest.mark.thinned(4)
@pytest.mark.parametrize(("function", "dtype"), [("rms_norm", torch.float32), ("layer_norm", torch.float16)])
@pytest.mark.parametrize("shape", [(2, 3, 40), (1, 130, 136), (2, 0, 64)], ids=str)
@pytest.mark.parametrize("cast", [*all_casts()])
@pytest.mark.usefixtures("on_triton")
def test_norms_with_casts(cast: OutputCast, shape: tuple[int, ...], function: str, dtype: torch.dtype) -> None:
    """Of the same bits as Triton's kernels of each one behind another, which stand against formulas in `test_triton_kernels`."""
    x, residual, weight = (
        random(*shape, dtype=dtype),
        random(*shape, seed=1, dtype=dtype),
        random(shape[-1], dtype=dtype),
    )
    norm = NORMS[function]
    total, forms, statistics = norm.forward_of_sum((x, residual), weight, 1e-5, cast)
    expected_total, (y,), expected = norm.forward_of_sum((x, residual), weight, 1e-5)
    assert_same((total, *forms, *statistics), (expected_total, *cast.of(y), *expected))
    first = x[:, :3]
    assert_same(norm.forward(first, weight, 1e-5, cast)[0], cast.of(norm.forward(first, weight, 1e-5)[0][0]))


@pytest.mark.thinned(2)
@pytest.mark.parametrize("kind", ["swiglu", "geglu", "clamped_swiglu", "gated_relu2"])
@pytest.mark.parametrize("cast", [*all_casts()])
@pytest.mark.usefixtures("on_triton")
def test_gated_activations_with_casts(cast: OutputCast, kind: str) -> None:
    for shape, dtype in (((2, 67, 136), torch.float32), ((1, 3, 40), torch.float16)):
        gate, up, dy = (random(*shape, seed=seed, dtype=dtype) for seed in range(3))
        assert_same(gated_forms(kind, cast, gate, up), cast.of(FUNCTIONS[kind](gate, up)))
        expected = tuple(form for gradient in gated_gradients(kind, dy, gate, up) for form in cast.of(gradient))
        assert_same(gated_gradient_forms(kind, (cast, cast), dy, gate, up), expected)
        rows = replace(cast, forms=("rows",))  # one gradient in other forms than the other
        of_gate, of_up = gated_gradients(kind, dy, gate, up)
        expected = (*rows.of(of_gate), *cast.of(of_up))
        assert_same(gated_gradient_forms(kind, (rows, cast), dy, gate, up), expected)


@pytest.mark.parametrize("cast", [*all_casts()])
def test_casts_are_those_of_pytorch(cast: OutputCast, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of powers of two, which Triton's interpreter need not round: a norm of rows of ±1, and a square times a factor."""
    if cast.kind == "fp32":
        cast = replace(cast, kind="power_of_two")
    generator = torch.Generator().manual_seed(0)

    def powers(*shape: int) -> Tensor:
        signs = 1.0 - 2.0 * torch.randint(2, shape, generator=generator)
        return signs * torch.exp2(torch.randint(-3, 4, shape, generator=generator).float())

    x, weight, gate, up = powers(2, 20, 136).sign(), powers(136), powers(2, 20, 136), powers(2, 20, 136)
    expected = cast.of(x * weight), cast.of(gate.clamp(min=0.0).square() * up)
    monkeypatch.setattr(device_dispatch, "TRITON_DEVICES", {"cpu", "cuda"})
    assert_same(NORMS["rms_norm"].forward(x, weight, 0.0, cast)[0], expected[0])
    assert_same(gated_forms("gated_relu2", cast, gate, up), expected[1])


@pytest.mark.parametrize(("name", "scale_bytes"), [("tile", 4), ("mx", 1)])
@pytest.mark.usefixtures("on_triton")
def test_counted_traffic_is_the_closed_form(name: str, scale_bytes: int) -> None:
    x, residual, weight = random(1, 130, 136), random(1, 130, 136, seed=1), random(136)
    scaling = SCALINGS[name]
    for forms, norm in ((("rows",), NORMS["rms_norm"]), (("plain", "rows", "columns"), NORMS["layer_norm"])):
        cast = OutputCast(forms, NUMBER_FORMATS["e4m3"], scaling.block, scaling.kind)
        sizes = FormSizes(*(form in forms for form in FORMS), scaling.block[1] or 136, scale_bytes)
        kind = {"is_layer": norm.is_layer}
        with counted_traffic() as counted:
            norm.forward_of_sum((x, residual), weight, 1e-5, cast)
        assert counted == traffic.norm_forms_traffic(130, 136, 4, sizes, **kind, has_residual=True)
        with counted_traffic() as counted:
            norm.forward(x[:, :3], weight, 1e-5, cast)
        assert counted == traffic.norm_forms_traffic(3, 136, 4, sizes, **kind, has_residual=False)
        for activation in ("swiglu", "clamped_swiglu"):
            clamps = activation == "clamped_swiglu"
            with counted_traffic() as counted:
                gated_forms(activation, cast, x, residual)
            assert counted == traffic.gated_forms_traffic(130, 136, 4, sizes, backward=False)
            with counted_traffic() as counted:
                gated_gradient_forms(activation, (cast, cast), x, x, residual)
            assert counted == traffic.gated_forms_traffic(130, 136, 4, sizes, backward=True, clamps=clamps)


@pytest.mark.parametrize("name", ["tile", "mx", "row"])
def test_padding_adds_zeros_and_no_block(name: str) -> None:
    scaling = SCALINGS[name]
    cast = OutputCast(("rows",), NUMBER_FORMATS["e4m3"], scaling.block, scaling.kind)
    (activation,) = cast.of(random(1, 5, 96))
    assert isinstance(activation, CastActivation)
    padded, quantized = activation.pad((16, 128)), activation.quantized
    expected = quantize_matrix(torch.nn.functional.pad(random(5, 96), (0, 32, 0, 11)), cast.to, cast.block, cast.kind)
    assert torch.equal(padded.widen().elements, expected.elements)
    assert torch.equal(padded.scales[:5].float(), expected.scales[:5, : quantized.scales.shape[1]])
    assert activation.pad((5, 96)) is quantized


CASES = {**LAYOUTS, "full": (WIDE, Layout(recompute="full")), "zb": (WIDE, Layout(pp=2, schedule="zb_h1"))}


@pytest.mark.thinned(8)
@pytest.mark.parametrize(
    ("precision", "case"), [pair for pair in itertools.product(RECIPES, CASES) if pair[1] not in LAYOUTS or runs(*pair)]
)
def test_what_is_saved_takes_the_memory_that_is_planned(precision: str, case: str) -> None:
    """With columns of whole blocks: micro-batches have 128 tokens."""
    model, layout = CASES[case]
    layout = replace(layout, micro_batch_seqs=2)
    plan, recipe = make_plan(precision, layout, model), TrainingRecipe(steps=1)
    rehearsal = compare_rehearsal(plan, recipe, rehearse_rank(plan, recipe, 0))
    assert rehearsal.collectives.equal
    (activations,) = (term for term in rehearsal.terms if term.name == "activations")
    assert activations.is_within(REHEARSAL_TOLERANCE), activations


def test_memory_and_time_of_a_dense_block() -> None:
    """Of each token of a block with D = 256 and F = 768: two norms and the activation in 33 / 32 bytes instead of 2, and the
    bytes that kernels and casts move."""
    plan, recipe = make_plan("mxfp8", Layout()), TrainingRecipe(steps=1)
    policy = engine_policy(plan, recipe)
    assert policy is not None
    priced = {
        casts: Pricing(plan.problem, plan.layout, replace(policy, casts=casts))
        for casts in ("in_products", "in_producers")
    }
    saved, moved = {}, {}
    for casts, pricing in priced.items():
        parts, memory = pricing.pricer.memory.activation_bytes("block", pricing.scheme, pricing.values)
        formats, values = pricing.pricer.formats, pricing.values
        saved[casts] = memory["saved_bytes"]
        for phase in ("forward", "backward"):
            kernels = [kernel for kernel in parts.kernels if kernel.phase == phase]
            moved[casts, phase] = formats.cast_bytes(phase, parts.products, values) + sum(
                formats.kernel_bytes(kernel, parts.products, values) for kernel in kernels
            )
    tokens, cast = 64, 33 / 32
    assert saved["in_products"] - saved["in_producers"] == pytest.approx(tokens * (2 * 256 + 768) * (2 - cast))
    # A norm no longer writes its result (2), reads the sum once more (2), and writes a second cast (the first is written
    # either way); its own cast no longer reads (2). The activation does not read its input again.
    forward = moved["in_products", "forward"] - moved["in_producers", "forward"]
    assert forward == pytest.approx(tokens * (2 * 256 * (2 - cast) + 768 * (4 - cast)))
    # The casts of norms and of the activation for weights' gradients are gone (read 2, written), and those of the gradients of
    # gate and up read nothing, which are not written as they are either.
    backward = moved["in_products", "backward"] - moved["in_producers", "backward"]
    assert backward == pytest.approx(tokens * ((2 * 256 + 768) * (2 + cast) + 2 * 768 * 4))


def test_no_other_stack_casts_in_producers() -> None:
    from shardwise.hardware.stacks import get_stack, stack_names

    assert [name for name in stack_names() if get_stack(name).casts == "in_producers"] == ["shardwise"]


def test_gated_functions() -> None:
    assert is_gated("geglu_dgate")
    assert not is_gated("silu")
    forms: tuple[Form, ...] = ("plain", "rows", "columns")
    assert forms == FORMS
    assert TensorFormats(get_precision("mxfp8")).producer_forms == {
        True: ("rows", "columns"),
        False: ("rows", "columns"),
    }


def test_the_engine_launches_the_kernels_with_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter: two norms, of which one takes the residual sum, an activation and its gradients of each block."""
    launches: Counter[str] = Counter()

    def counted(name: str) -> Any:
        launcher = getattr(fused_casts, name)

        def launch(*arguments: Any, **options: Any) -> Any:
            launches[name] += 1
            return launcher(*arguments, **options)

        return launch

    engine = engine_of("mxfp8", "in_producers")
    for name in ("norm_forms", "gated_forms", "gated_gradient_forms"):
        monkeypatch.setattr(fused_casts, name, counted(name))
    monkeypatch.setattr(device_dispatch, "TRITON_DEVICES", {"cpu"})
    loss = float(engine.step([next(micro_batches())], SEQS * POSITIONS, 1, 0).loss)
    assert loss == pytest.approx(math.log(DENSE.vocab_size), abs=0.3)
    blocks = DENSE.num_layers
    assert launches == {"norm_forms": 2 * blocks, "gated_forms": blocks, "gated_gradient_forms": blocks}


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_the_planner_prices_the_passes_of_the_kernels(norm: Any) -> None:
    """Bytes of the plan's kernels in bf16, with the casts that they write, are those of the closed forms, but for statistics and
    weights that each tile loads again; and a cache answers what the second gradient reads again."""
    plan = make_plan("mxfp8", Layout(), {**WIDE, "norm": norm, "norm_bias": False})
    policy = engine_policy(plan, TrainingRecipe(steps=1))
    pricing = Pricing(plan.problem, plan.layout, policy)
    parts, formats = pricing.pricer.parts(pricing.scheme, "block"), pricing.pricer.formats
    moved = {
        (kernel.phase, name): formats.kernel_bytes(kernel, parts.products, pricing.values)
        for kernel in parts.kernels for name in ("mlp_norm.out", "act", "d.gate#0") if name in kernel.outputs
    }  # fmt: skip
    sizes = FormSizes(plain=False, rows=True, columns=True, block=32, scale_bytes=1)
    norm_bytes = traffic.norm_forms_traffic(64, 256, 2, sizes, is_layer=norm == "layer", has_residual=True)
    forward = traffic.gated_forms_traffic(64, 768, 2, sizes, backward=False)
    backward = traffic.gated_forms_traffic(64, 768, 2, sizes, backward=True)
    read_again = 2 * 64 * 768 * 2
    assert moved["forward", "act"] == forward.loaded_bytes + forward.stored_bytes
    assert moved["backward", "d.gate#0"] == backward.loaded_bytes + backward.stored_bytes - read_again
    per_row = 63 * 256 * 2 + 256 * 2 + 2 * 64 * 4 * (2 if norm == "layer" else 1)
    assert moved["forward", "mlp_norm.out"] == pytest.approx(
        norm_bytes.loaded_bytes + norm_bytes.stored_bytes - per_row, abs=2 * 64 * 4 + 2 * 256
    )
