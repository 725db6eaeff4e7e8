"""Narrow products and fp16 on several ranks: as one process where blocks are not cut, and one decision where a step overflows."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from test_equality import error
from training import DENSE, SEED, Case, engine_of, gathered, run_step

from shardwise.layout.layout import Layout
from shardwise.model.architecture import Architecture
from shardwise.run.rank_threads import run_rank_threads
from shardwise.step.rank_program import RankProgram
from shardwise.values.engine_policies import Casts
from shardwise.values.precision import PRECISIONS, Precision

# Two ranks of tp have whole blocks of 32 of every dim that a product sums over.
WIDE = replace(DENSE, name="wide", num_layers=2, d_model=64, d_ff=128, num_heads=4, num_kv_heads=2, head_dim=32)
TOLERANCE = 1e-4  # a rounding of fp32 before a cast moves an element of fp8 by a step, here and there


@dataclass(frozen=True)
class WideCase(Case):
    @property
    def architecture(self) -> Architecture:
        return WIDE


@dataclass(frozen=True)
class CastCase(WideCase):
    """A run whose operands are cast in products or in their producers."""

    casts: Casts = "in_producers"

    def instance(self) -> RankProgram:
        instance = super().instance()
        return replace(instance, policy=replace(instance.policy, casts=self.casts))


def in_blocks(name: str) -> Precision:
    """Return a recipe with the products of the named one and everything else in fp32."""
    recipe = PRECISIONS[name]
    chosen = {
        field: getattr(recipe, field)
        for field in ("matmul", "operand", "gradient_operand", "scaling", "block", "weight_block")
    }
    return replace(PRECISIONS["fp32"], name=f"{name} under fp32", **chosen)


LAYOUTS = {
    "dp 2": Layout(dp=2, micro_batch_seqs=4),
    "zero-3 2": Layout(fsdp=2, zero_stage=3, micro_batch_seqs=4),
    "tp 2": Layout(tp=2, micro_batch_seqs=8),
    "tp 2 sp": Layout(tp=2, sequence_parallel=True, micro_batch_seqs=8),
    "pp 2": Layout(pp=2, schedule="1f1b", micro_batch_seqs=4),
}


@dataclass
class Step:
    loss: float
    gradients: dict[str, torch.Tensor]


def first_step(case: Case) -> Step:
    engine = engine_of(case)
    engine.recipe = replace(engine.recipe, clip_norm=None)
    engine.updater.recipe = engine.recipe
    loss = run_step(engine, case, 0).loss
    return Step(float(loss), gathered(engine, "gradient_shard"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_that_no_rank_cuts_give_the_gradients_of_one_process(layout: str) -> None:
    case = WideCase(layout=LAYOUTS[layout], precision=in_blocks("mxfp8"))
    size = case.layout.num_replicas * case.layout.micro_batch_seqs
    single = first_step(replace(case, layout=Layout(micro_batch_seqs=size)))
    plain = first_step(replace(case, layout=Layout(micro_batch_seqs=size), precision=PRECISIONS["fp32"]))
    for result in run_rank_threads(first_step, case.layout.num_devices, case):
        assert result.loss == pytest.approx(single.loss, rel=1e-6)
        for name, gradient in single.gradients.items():
            assert error(result.gradients[name], gradient) <= TOLERANCE, name
    assert any(error(plain.gradients[name], gradient) > 10 * TOLERANCE for name, gradient in single.gradients.items())


@pytest.mark.parametrize("layout", [*LAYOUTS, "zb 2"])
@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_blockwise"])
def test_casts_in_producers_are_those_of_products(recipe: str, layout: str) -> None:
    """On every rank and to the last bit; of a pipeline's passes in two parts, the second has the columns that the first wrote."""
    layouts = {**LAYOUTS, "zb 2": Layout(pp=2, schedule="zb_h1", micro_batch_seqs=4)}
    in_products = CastCase(layout=layouts[layout], precision=in_blocks(recipe), casts="in_products")
    cases = in_products, replace(in_products, casts="in_producers")
    pairs = zip(*(run_rank_threads(first_step, case.layout.num_devices, case) for case in cases), strict=True)
    for expected, actual in pairs:
        assert actual.loss == expected.loss
        for name, gradient in expected.gradients.items():
            assert torch.equal(actual.gradients[name], gradient), name


@pytest.mark.parametrize("layout", ["dp 2", "tp 2", "pp 2"])
def test_weights_that_rest_in_tiles_are_those_that_products_would_cast(layout: str) -> None:
    """On every rank and to the last bit, of weights that are in fp32 in either case."""
    cast = WideCase(layout=LAYOUTS[layout], precision=in_blocks("fp8_deepseek_v3"))
    tiled = replace(cast, precision=replace(cast.precision, weights="fp8", master="fp32"))
    pairs = zip(*(run_rank_threads(first_step, case.layout.num_devices, case) for case in (cast, tiled)), strict=True)
    for expected, actual in pairs:
        assert actual.loss == expected.loss
        for name, gradient in expected.gradients.items():
            assert torch.equal(actual.gradients[name], gradient), name


@pytest.mark.parametrize("layout", ["dp 2", "pp 2"])
def test_gradients_and_moments_in_fp8_are_those_of_one_process(layout: str) -> None:
    """To the last bit: each micro-batch's gradients have scales of their own, and sums of two are the same in any order."""
    case = WideCase(layout=LAYOUTS[layout], precision=PRECISIONS["fp8_nanotron"])
    single = first_step(replace(case, layout=Layout(micro_batch_seqs=case.layout.micro_batch_seqs)))
    for result in run_rank_threads(first_step, case.layout.num_devices, case):
        assert result.loss == pytest.approx(single.loss, rel=1e-6)
        for name, gradient in single.gradients.items():
            assert torch.equal(result.gradients[name], gradient), name


@dataclass
class Scaled:
    losses: list[float]
    history: torch.Tensor
    factors: torch.Tensor


def with_delayed_scales(case: Case) -> Scaled:
    engine = engine_of(case)
    losses = [float(run_step(engine, case, step).loss) for step in range(3)]
    assert engine.scales.model is not None
    return Scaled(losses, engine.scales.model.history[:, :4].clone(), engine.scales.model.factors.clone())


@pytest.mark.parametrize("layout", [*LAYOUTS, "dualpipe"])
def test_scales_from_earlier_steps_are_those_of_one_process_on_all_ranks(layout: str) -> None:
    """Each rank has a part of a tensor, or a part of the batch: the largest size is that of all."""
    dualpipe = Layout(pp=2, num_virtual_stages=2, schedule="dualpipe_v", micro_batch_seqs=2)
    case = WideCase(layout=LAYOUTS.get(layout, dualpipe), precision=in_blocks("fp8_delayed"))
    size = case.layout.num_replicas * case.layout.micro_batch_seqs
    single = with_delayed_scales(replace(case, layout=Layout(micro_batch_seqs=size)))
    assert (single.factors != 1).all()
    results = run_rank_threads(with_delayed_scales, case.layout.num_devices, case)
    for result in results:
        assert result.losses == pytest.approx(single.losses, rel=1e-5)
        torch.testing.assert_close(result.history, single.history, rtol=1e-2, atol=0)
        assert torch.equal(result.history, results[0].history)
        assert torch.equal(result.factors, results[0].factors)


def with_overflow(case: Case) -> tuple[list[bool], list[float], dict[str, torch.Tensor]]:
    """Run steps of which the second overflows on the last rank alone."""
    engine = engine_of(case)
    engine.initialize(SEED)
    skipped, scales = [], []
    for step in range(3):

        def spoil(step: int = step) -> None:
            if step == 1 and engine.world.rank == engine.world.size - 1:
                engine.groups[0].gradient_shard.fill_(torch.inf)

        engine.gradients_ended = spoil
        skipped.append(run_step(engine, case, step).skipped)
        assert engine.scaler is not None
        scales.append(engine.scaler.scale)
    return skipped, scales, gathered(engine, "state")


@pytest.mark.parametrize(
    "layout",
    [
        Layout(fsdp=2, zero_stage=2, micro_batch_seqs=2),
        Layout(fsdp=2, zero_stage=3, micro_batch_seqs=2),
        Layout(tp=2, micro_batch_seqs=2),
        Layout(pp=2, schedule="1f1b", micro_batch_seqs=2),
    ],
    ids=str,
)
def test_a_step_that_overflows_on_one_rank_is_left_out_on_all(layout: Layout) -> None:
    case = Case(layout=layout, precision=PRECISIONS["fp16"], recipe={"loss_scale": 2.0**8})
    results = run_rank_threads(with_overflow, layout.num_devices, case)
    for skipped, scales, weights in results:
        assert skipped == [False, True, False]
        assert scales == [2.0**8, 2.0**7, 2.0**7]
        assert all(weight.isfinite().all() for weight in weights.values())
