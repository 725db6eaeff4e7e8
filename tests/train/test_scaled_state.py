"""Gradients and moments in FP8 at rest, with a scale for each parameter: to the bit, their bytes, and the runs that have them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_narrow_products import (
    DENSE,
    MOE,
    POSITIONS,
    SEQS,
    batches,
    engine_of,
    final_loss,
    losses_of_a_run_that_goes_on,
)

from shardwise.hardware.cluster_loading import load_cluster
from shardwise.layout.layout import Layout
from shardwise.layout.rules.engine import require_runnable
from shardwise.model.architecture import Architecture
from shardwise.model.job import Job
from shardwise.model.optimizer_program import bytes_per_parameter
from shardwise.model.optimizers.definition import get_optimizer
from shardwise.price import Problem
from shardwise.price.estimate import estimate
from shardwise.run.kernels.optimizers import ScaledTensor
from shardwise.run.kernels.quantized_weights import TiledWeight
from shardwise.run.parallel.flat_parameters import ParameterShard
from shardwise.run.parallel.sharded_optimizer import moment_tensors
from shardwise.run.trainer.training_engine import TrainingEngine
from shardwise.step.parameters import GroupMember
from shardwise.values.boxes import Box
from shardwise.values.dtypes import NUMBER_FORMATS
from shardwise.values.errors import InputError
from shardwise.values.precision import PRECISIONS, Precision
from shardwise.values.quantization import quantize_blocks
from shardwise.values.scalings import WHOLE_MATRIX

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NAMES = {E4M3: "e4m3", E5M2: "e5m2", torch.float16: "fp16"}
CPU = torch.device("cpu")
MOST_SCALES = 4  # of one tensor: a stack of four experts
LM, NANOTRON = PRECISIONS["fp8_lm_o3"], PRECISIONS["fp8_nanotron"]


def values(size: int, seed: int = 0) -> torch.Tensor:
    random = np.random.default_rng(seed)
    spread = random.standard_normal(size) * np.exp2(random.uniform(-20, 2, size))
    return torch.from_numpy(spread.astype(np.float32))


@pytest.mark.parametrize("dtype", NAMES, ids=NAMES.values())
def test_elements_and_scale_are_those_of_the_reference(dtype: torch.dtype) -> None:
    source = values(5000)
    scaled = ScaledTensor.zeros(len(source), dtype, CPU).copy_(source)
    expected = quantize_blocks(source.numpy()[None], NUMBER_FORMATS[NAMES[dtype]], WHOLE_MATRIX, "fp32")
    assert scaled.elements.float().numpy().tobytes() == expected.elements.tobytes()
    assert scaled.scale.numpy().tobytes() == expected.scales.tobytes()
    stood_for = expected.elements[0] * expected.scales[0]
    assert scaled.to(torch.float32).numpy().tobytes() == stood_for.tobytes()


@pytest.mark.parametrize("dtype", NAMES, ids=NAMES.values())
def test_a_power_of_two_over_all_values_changes_no_element(dtype: torch.dtype) -> None:
    """Squares of gradients may be 1e-18 all of them."""
    source = values(100)
    plain, small = (ScaledTensor.zeros(100, dtype, CPU).copy_(source * factor) for factor in (1.0, 2.0**-60))
    assert torch.equal(plain.elements.float(), small.elements.float())
    assert torch.equal(plain.to(torch.float32) * 2.0**-60, small.to(torch.float32))
    assert torch.equal(ScaledTensor.zeros(3, dtype, CPU).copy_(torch.zeros(3)).to(torch.float32), torch.zeros(3))


@pytest.mark.parametrize("strange", [torch.inf, -torch.inf, torch.nan])
def test_non_finite_values_stay_non_finite(strange: float) -> None:
    source = values(10).index_fill(0, torch.tensor([3]), strange)
    assert not ScaledTensor.zeros(10, E4M3, CPU).copy_(source).to(torch.float32)[3].isfinite()


def num_scales(engine: TrainingEngine) -> int:
    """Of matrices at rest, gradients, and moments in FP8 or fp16."""
    members = [member for group in engine.instance.groups for member in group.members]
    views = {name: view for group in engine.groups for name, view in group.views.items()}
    matrices = sum(view.scales.numel() for view in views.values() if isinstance(view, TiledWeight))
    return matrices + 3 * len(members)


@pytest.mark.parametrize("architecture", [DENSE, MOE], ids=lambda architecture: architecture.name)
@pytest.mark.parametrize("precision", [LM, NANOTRON], ids=lambda precision: precision.name)
def test_state_takes_the_bytes_of_the_plan(precision: Precision, architecture: Architecture) -> None:
    """But for scales; matrices of blocks have the bytes of S1's table, and all else a byte more, its weights in bf16."""
    engine = engine_of(precision.name, architecture)
    storages = {tensor.untyped_storage().data_ptr(): (term, tensor) for term, tensor in engine.stored_tensors()}
    measured, scales = Counter[str](), 0
    for term, tensor in storages.values():
        is_scale = tensor.dtype == torch.float32 and tensor.numel() <= MOST_SCALES
        scales += tensor.numel() if is_scale else 0
        measured[term] += 0 if is_scale else tensor.untyped_storage().nbytes()
    job = Job(global_batch_tokens=SEQS * POSITIONS, seq_len=POSITIONS, precision=precision.name)
    planned = estimate(Problem(architecture, load_cluster("h100:1"), job), Layout(micro_batch_seqs=SEQS)).memory
    assert dict(measured) == {term: planned[term] for term in measured}
    members = [member for group in engine.instance.groups for member in group.members]
    views = {name: view for group in engine.groups for name, view in group.views.items()}
    by_products = sum(member.size for member in members if isinstance(views[member.parameter.name], TiledWeight))
    every, width = sum(member.size for member in members), bytes_per_parameter(precision)
    assert every > by_products > every / 2
    assert measured.total() == by_products * width + (every - by_products) * (width + 1)
    assert scales == num_scales(engine)


def reduced_and_stored(engine: TrainingEngine) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    pairs = {}
    for group in engine.reducer.groups:
        assert group.staging is not None
        for name, member in group.members.items():
            kept = group.staging.scaled[name]
            pairs[name] = kept.to(torch.float32), group.flat.view(group.flat.gradients, member).flatten().clone()
    return pairs


def test_gradients_are_rounded_before_they_are_added_up() -> None:
    """Of one micro-batch what is added up is what rests in E4M3."""
    engine, plain = engine_of("fp8_nanotron"), engine_of("fp8_deepseek_v3")
    gradients: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    engine.gradients_ended = lambda: gradients.update(reduced_and_stored(engine))
    batch = next(batches(1))
    for trainer in (engine, plain):
        trainer.step([batch], SEQS * POSITIONS, 1, 0)
    assert len(gradients) > 10
    for reduced, stored in gradients.values():
        assert torch.equal(reduced, stored)
        assert len(reduced.unique()) <= 2 * 127 + 1
    assert all(group.staging is not None and not group.staging.scaled for group in plain.reducer.groups)


def test_of_two_micro_batches_the_sum_is_in_the_format_of_sums() -> None:
    engine = engine_of("fp8_nanotron")
    gradients: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    engine.gradients_ended = lambda: gradients.update(reduced_and_stored(engine))
    engine.step(batches(2), 2 * SEQS * POSITIONS, 2, 0)
    assert any(len(stored.unique()) > 2 * 127 + 1 for _, stored in gradients.values())


def test_moments_rest_in_the_formats_of_the_recipe() -> None:
    dtypes = {}
    for name in (LM.name, NANOTRON.name):
        engine = engine_of(name)
        for step, batch in enumerate(batches(2)):
            engine.step([batch], SEQS * POSITIONS, 1, step)
        dtypes[name] = {
            moment: tensor.dtype for moment, _, tensor in engine.checkpoint_tensors() if not moment.count("_scales")
        }
    first, second = ("exp_avg", "exp_avg_sq")
    assert dtypes[LM.name] == {"model": torch.float16, first: E4M3, second: torch.float16}
    assert dtypes[NANOTRON.name] == {"model": torch.bfloat16, first: E4M3, second: E5M2}


def test_a_master_copy_in_bf16_is_what_nanotrons_recipe_trains_worse_by() -> None:
    """Small updates are lost to it, as under `bf16_no_master`; FP8-LM's is in fp16, which keeps three bits more."""
    exact = final_loss("fp32")
    assert final_loss(NANOTRON.name) == pytest.approx(final_loss("bf16_no_master"), rel=0.01)
    assert final_loss(NANOTRON.name) > 1.02 * exact
    name = "fp8_nanotron, an fp32 master copy"
    PRECISIONS[name] = replace(NANOTRON, name=name, master="fp32")
    try:
        assert final_loss(name) == pytest.approx(exact, rel=0.01)
    finally:
        del PRECISIONS[name]


@pytest.mark.parametrize("name", [LM.name, NANOTRON.name])
def test_a_run_goes_on_from_its_pieces_bit_by_bit(name: str) -> None:
    first, second = losses_of_a_run_that_goes_on(name)
    assert first == second


def test_a_scale_has_its_place_among_those_of_other_parts() -> None:
    """Of 5 x 4 in parts of 3 x 2, the last ones of a row smaller, that of the part of the third quarter."""
    (member, *_) = (
        member
        for group in engine_of(LM.name).instance.groups
        for member in group.members
        if len(member.global_shape) == 2
    )
    part = GroupMember(member.parameter, (5, 4), (3, 2), 0)
    window = Box((3, 0), (2, 2))
    moment = ScaledTensor.zeros(4, E4M3, CPU)
    (_, _, elements), (name, where, scale) = moment_tensors("m", ParameterShard(part, 0, 7, 4, window), moment)
    assert elements is moment.elements
    assert scale is moment.scale
    assert name == "m_scales_of_2x2"
    assert (where.global_shape, where.window, where.size) == ((4,), Box((2,), (1,)), 1)


REFUSED = {
    "parts of moments": (
        NANOTRON,
        Layout(fsdp=2, zero_stage=1),
        "adamw",
        "zero_stage=1 splits within what has one scale .* --pin zero_stage=0",
    ),
    "sums in FP8": (LM, Layout(dp=2), "adamw", "gradients that devices sum in fp8"),
    "whole matrices": (LM, Layout(), "muon", "moments of muon with a scale for each parameter"),
    "means": (LM, Layout(), "adafactor", "moments of adafactor with a scale for each parameter"),
    "no sums": (replace(LM, accumulated_gradients=None), Layout(), "adamw", "fp8 at rest, which takes scales"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_state_formats_are_refused(name: str) -> None:
    precision, layout, optimizer, problem = REFUSED[name]
    require_runnable(DENSE, Layout(tp=2, pp=2, dp=2), NANOTRON)
    with pytest.raises(InputError, match=problem):
        require_runnable(DENSE, layout, precision, optimizer)


def test_elementwise_optimizers_run_with_scaled_state() -> None:
    for optimizer in ("sgd", "lion", "adamw_8bit"):
        assert not get_optimizer(optimizer).updates_whole_matrices
        require_runnable(DENSE, Layout(), LM, optimizer)
