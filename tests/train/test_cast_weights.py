"""Weights cast once a step: as often as planned, with the bits of casts in each product, in the planned bytes."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from train.short_steps import MICRO_BATCHES, POSITIONS, SEQS, build_engine, micro_batches, run_step

import shardwise as sw
from shardwise.derive.low_precision_products import product_weights
from shardwise.hardware.published_constants import published_calibration, with_calibration
from shardwise.hardware.stacks import get_stack
from shardwise.layout.layout import Layout
from shardwise.measure.reconcile.reconciliation import REHEARSAL_TOLERANCE, cast_remarks, compare_rehearsal
from shardwise.model.architecture import Architecture
from shardwise.model.job import Job
from shardwise.price.instruction_prices import InstructionPricer
from shardwise.price.layout_pricer import Pricing
from shardwise.run.kernels import device_dispatch, matmul, quantized_weights
from shardwise.run.kernels.quantization import quantize_matrix
from shardwise.run.kernels.quantized_weights import CastWeight, WeightFormat, cast_orders
from shardwise.run.parallel.delayed_scaling import UnitScales
from shardwise.run.recipe import TrainingRecipe
from shardwise.run.trainer.engine_prediction import engine_instance, engine_policy
from shardwise.run.trainer.rehearsal import lone_rank_world, rehearse_rank
from shardwise.run.trainer.training_engine import TrainingEngine
from shardwise.search.plan import Plan, plan_layout
from shardwise.values import IssuePolicy, get_precision
from shardwise.values.dtypes import NUMBER_FORMATS
from shardwise.values.engine_policies import WeightCasts
from shardwise.values.scalings import SCALINGS

DENSE = Architecture(
    name="dense", num_layers=2, d_model=64, d_ff=128, num_heads=4, num_kv_heads=2, head_dim=16, vocab_size=96
)
MOE = replace(DENSE, name="moe", num_experts=4, experts_per_token=2)
LATENT = replace(
    MOE, name="latent", num_kv_heads=4, kv_lora_rank=16, rope_head_dim=8, v_head_dim=16, q_lora_rank=24, num_dense_layers=1,
    dense_d_ff=96, shared_expert_width=32,
)  # fmt: skip
RECIPES = (
    "fp8_delayed", "fp8_current", "fp8_blockwise", "mxfp8", "nvfp4", "fp8_transformer_engine", "fp8_torchao",
    "fp8_torchao_rowwise",
)  # fmt: skip


def engine_of(
    precision: str, weight_casts: WeightCasts = "each_step", architecture: Architecture = DENSE, **layout: Any
) -> TrainingEngine:
    return build_engine(precision, IssuePolicy(casts="in_products", weight_casts=weight_casts), architecture, **layout)


@pytest.mark.thinned(5)
@pytest.mark.parametrize("architecture", [DENSE, MOE, LATENT], ids=lambda architecture: architecture.name)
@pytest.mark.parametrize("precision", RECIPES)
def test_training_has_the_bits_of_casts_in_each_product(precision: str, architecture: Architecture) -> None:
    """Losses of two steps and of an evaluation after them, with what the optimizer made of the weights."""
    outcomes = []
    for weight_casts in ("each_use", "each_step"):
        engine = engine_of(precision, weight_casts, architecture)
        losses = [run_step(engine, step) for step in range(2)]
        losses.append(float(engine.loss(micro_batches(9), MICRO_BATCHES * SEQS * POSITIONS)))
        outcomes.append((losses, [tensor.clone() for _, _, tensor in engine.checkpoint_tensors()]))
        assert any(layer.casts for layer in engine.model.layers) == (weight_casts == "each_step")
    (losses, state), (expected_losses, expected_state) = outcomes
    assert losses == expected_losses
    assert all(torch.equal(*pair) for pair in zip(state, expected_state, strict=True))


@pytest.mark.parametrize("architecture", [DENSE, MOE, LATENT], ids=lambda architecture: architecture.name)
def test_all_weights_of_products_are_kept_and_no_others(architecture: Architecture) -> None:
    for layer in engine_of("fp8_current", architecture=architecture).model.layers:
        unit = layer.unit.unit
        assert set(layer.casts) == product_weights(unit.forward.steps, unit.tensors)
        for name, cast in layer.casts.items():
            assert cast.shape == layer.weights[name].shape


def count_casts(monkeypatch: pytest.MonkeyPatch, engine: TrainingEngine) -> tuple[Counter[str], int]:
    """Casts of a step by weight, a stack of experts counted as one, and how many are inside of products."""
    owners = {
        weight.data_ptr(): f"{layer.path}.{name}"
        for layer in engine.model.layers for name, weight in layer.weights.items()
        for weight in (weight if name.startswith("experts_") else (weight,))
    }  # fmt: skip
    counts: Counter[str] = Counter()
    inside = 0

    def cast_in_product(matrix: Tensor, *arguments: Any) -> Any:
        nonlocal inside
        if matrix.data_ptr() in owners:
            counts[owners[matrix.data_ptr()]] += 1
            inside += 1
        return quantize_matrix(matrix, *arguments)

    def cast_before(matrix: Tensor, *arguments: Any) -> Any:
        counts[owners[matrix.data_ptr()]] += 1
        return cast_orders(matrix, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(matmul, "quantize_matrix", cast_in_product)
        patched.setattr(quantized_weights, "cast_orders", cast_before)
        run_step(engine)
    return counts, inside


@pytest.mark.parametrize(
    ("recompute", "uses"), [("none", 2), ("full", 3)], ids=["nothing made again", "blocks made again"]
)
def test_a_weight_is_cast_once_a_step(monkeypatch: pytest.MonkeyPatch, recompute: str, uses: int) -> None:
    """With three micro-batches; in each product it would be cast forward, backward, and where it is made again."""
    before, inside = count_casts(monkeypatch, engine_of("fp8_blockwise", "each_use", recompute=recompute))
    assert sum(before.values()) == inside
    # The last block need not be made again where nothing is saved of it but its input, nor what nothing reads any more.
    assert max(before.values()) == uses * MICRO_BATCHES
    now, inside = count_casts(monkeypatch, engine_of("fp8_blockwise", recompute=recompute))
    assert inside == 0
    assert set(now) == set(before)
    assert set(now.values()) == {1}


def test_each_expert_is_cast_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now, inside = count_casts(monkeypatch, engine_of("fp8_current", architecture=MOE))
    assert inside == 0
    assert {count for name, count in now.items() if "experts_" in name} == {MOE.num_experts}
    assert {count for name, count in now.items() if "experts_" not in name} == {1}


def test_amax_of_a_weight_is_taken_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: Counter[str] = Counter()
    factor = UnitScales.factor

    def count(scales: UnitScales, name: str, tensor: Tensor) -> Tensor:
        counts[name] += 1
        return factor(scales, name, tensor)

    monkeypatch.setattr(UnitScales, "factor", count)
    engine = engine_of("fp8_delayed")
    run_step(engine)
    weights = {name for layer in engine.model.layers for name in layer.casts}
    assert {counts[name] for name in weights} == {DENSE.num_layers}
    activations = {count for name, count in counts.items() if name not in weights}
    assert min(activations) >= DENSE.num_layers * MICRO_BATCHES


def test_gathered_weights_are_cast_in_their_products() -> None:
    """Each gather is read once in each order of dims: nothing would be saved, and memory would be taken."""
    plan = make_plan("fp8_blockwise", Layout(fsdp=2, zero_stage=3, micro_batch_seqs=SEQS))
    instance = engine_instance(plan, TrainingRecipe(steps=1))
    engine = TrainingEngine(instance, TrainingRecipe(steps=1), lone_rank_world(instance.mesh, 0))
    assert not any(layer.casts for layer in engine.model.layers)
    pricing = Pricing(plan.problem, plan.layout, engine_policy(plan, TrainingRecipe(steps=1)))
    assert InstructionPricer(pricing, "block").casts_s("update") == 0.0


@pytest.mark.parametrize("name", ["tile", "mx", "row", "tensor", "nvfp4"])
def test_both_orders_of_a_cast_are_those_of_the_reference(name: str) -> None:
    scaling, to = SCALINGS[name], NUMBER_FORMATS["e2m1" if name == "nvfp4" else "e4m3"]
    weight = torch.randn(3, 160, 8, 24, generator=torch.Generator().manual_seed(0))  # three matrices of 160 x 192
    weight_format = WeightFormat(to, scaling.weight_block, scaling.kind)
    cast = CastWeight.empty(weight.shape, 1, 1, weight_format, weight.device)
    cast.store(weight)
    for matrix, expected in zip(cast, weight.flatten(2), strict=True):
        for by_columns, values in ((False, expected), (True, expected.t())):
            stored = matrix.operand(by_columns=by_columns)
            reference = quantize_matrix(values, to, scaling.weight_block, scaling.kind)
            assert stored.elements.is_contiguous()
            if name == "nvfp4":  # each row of a block has a copy of the scale
                reference = reference._replace(scales=reference.scales.repeat_interleave(16, 0))
            for part, whole in zip(stored.widen(), reference, strict=True):
                assert torch.equal(part, whole)
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in cast.tensors()) / weight.numel()
    assert num_bytes == pytest.approx({"nvfp4": 1.0 + 2 / 16, "mx": 2.0 + 2 / 32}.get(name, 2.0), rel=0.05)


def test_a_kernel_reads_a_weight_once_for_both_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter; of powers of two, which it does not round."""
    from shardwise.run.triton_kernels import block_casts

    weight = torch.exp2(torch.randint(-3, 4, (160, 192), generator=torch.Generator().manual_seed(0)).float())
    weight_format = WeightFormat(NUMBER_FORMATS["e4m3"], (128, 128), "power_of_two")
    expected = cast_orders(weight, weight_format)
    calls, cast_blocks = [], block_casts.cast_blocks

    def count(*arguments: Any, **options: Any) -> Any:
        calls.append(options)
        return cast_blocks(*arguments, **options)

    monkeypatch.setattr(device_dispatch, "TRITON_DEVICES", {"cpu", "cuda"})
    monkeypatch.setattr(block_casts, "cast_blocks", count)
    orders = cast_orders(weight, weight_format)
    assert calls == [{"with_transposed": True}]
    for order, reference in zip(orders, expected, strict=True):
        assert torch.equal(order.widen().elements, reference.widen().elements)
        assert torch.equal(order.scales, reference.scales)


def test_two_numbers_in_a_byte_take_even_sides() -> None:
    formats = matmul.product_formats(get_precision("nvfp4"))
    assert formats is not None
    assert formats.of_weight(torch.Size((32, 47)), 0, 1) is None
    assert formats.of_weight(torch.Size((32, 48)), 0, 1) is not None


WIDE: dict[str, Any] = {
    "name": "wide", "num_layers": 2, "d_model": 256, "d_ff": 768, "num_heads": 8, "num_kv_heads": 4, "head_dim": 32,
    "vocab_size": 1024,
}  # fmt: skip
EXPERTS: dict[str, Any] = {**WIDE, "name": "experts", "d_ff": 128, "num_experts": 8, "experts_per_token": 2}


def chip_of(precision: str) -> str:
    return "b200" if precision == "nvfp4" else "h100"


def make_plan(precision: str, layout: Layout, model: dict[str, Any] = WIDE) -> Plan:
    num_seqs = layout.num_replicas * layout.micro_batch_seqs * MICRO_BATCHES
    job = Job(global_batch_tokens=num_seqs * 64, seq_len=64, loss="in_place", precision=precision)
    return plan_layout(
        Architecture(**model), sw.load_cluster(f"{chip_of(precision)}:{layout.num_devices}"), job, layout
    )


LAYOUTS: dict[str, tuple[dict[str, Any], Layout]] = {
    "one device": (WIDE, Layout()),
    "zero 1": (WIDE, Layout(fsdp=4, zero_stage=1)),
    "zero 2, tp": (WIDE, Layout(fsdp=2, tp=2, zero_stage=2, sequence_parallel=True)),
    "experts": (EXPERTS, Layout(ep=2, fsdp=2, zero_stage=1)),
    "pipeline": (WIDE, Layout(pp=2, dp=2, schedule="1f1b")),
    "zero 3": (WIDE, Layout(fsdp=4, zero_stage=3)),
}


def runs(precision: str, case: str) -> bool:
    """Whether the engine has it: it gathers weights as they rest."""
    recipe = get_precision(precision)
    return recipe.gathered in (None, recipe.weights) or LAYOUTS[case][1].zero_stage < 3


@pytest.mark.thinned(8)
@pytest.mark.parametrize(("precision", "case"), [pair for pair in itertools.product(RECIPES, LAYOUTS) if runs(*pair)])
def test_casts_take_the_memory_that_is_planned(precision: str, case: str) -> None:
    model, layout = LAYOUTS[case]
    plan, recipe = make_plan(precision, layout, model), TrainingRecipe(steps=1)
    rehearsal = compare_rehearsal(plan, recipe, rehearse_rank(plan, recipe, 0))
    assert rehearsal.collectives.equal
    (parameters,) = (term for term in rehearsal.terms if term.name == "parameters")
    assert parameters.is_within(REHEARSAL_TOLERANCE), parameters
    kept = parameters.predicted - plan.estimate.memory["parameters"]
    assert (kept > 0) == (layout.zero_stage < 3)
    cluster = with_calibration(plan.cluster, published_calibration(chip_of(precision), get_stack("shardwise")))
    cast_plan = plan_layout(plan.model, cluster, plan.job, layout)
    assert cast_plan.estimate.memory["parameters"] == parameters.predicted
    assert list(cast_remarks(cast_plan, recipe)) == []


def test_the_update_has_the_time_of_the_casts_and_no_pass_has() -> None:
    """bf16 weights: 2 bytes read and two orders of one byte written, of each weight of a block's products, once a step."""
    plan = make_plan("fp8_current", Layout())

    def casts_s(weight_casts: WeightCasts) -> tuple[dict[str, float], InstructionPricer]:
        policy = IssuePolicy(casts="in_products", weight_casts=weight_casts)
        pricer = InstructionPricer(Pricing(plan.problem, plan.layout, policy), "block")
        return {phase: pricer.casts_s(phase) for phase in ("forward", "backward", "update")}, pricer

    each_use, pricer = casts_s("each_use")
    each_step, _ = casts_s("each_step")
    num_weights = 256 * (256 + 128 + 128) + 256 * 256 + 3 * 256 * 768
    bytes_per_s, precision = pricer.pricer.rates.bytes_per_s, get_precision("fp8_current")
    reads = precision.cast_reads
    assert each_use["update"] == 0.0
    assert each_step["update"] == pytest.approx(num_weights * (reads * 2 + 2) / bytes_per_s)
    for phase in ("forward", "backward"):
        assert each_use[phase] - each_step[phase] == pytest.approx(num_weights * (reads * 2 + 1) / bytes_per_s)
