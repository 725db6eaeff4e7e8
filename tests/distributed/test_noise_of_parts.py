"""Squared norms for the noise scale equal those of a plain loop in every layout; collectives are the planned list."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from plain import build, initialise
from training import POSITIONS, SEED, Case, engine_of, run_step

from shardwise.layout.layout import Layout
from shardwise.run.rank_threads import run_rank_threads
from shardwise.run.trainer.step_inspector import CollectiveCapture
from shardwise.sharding.collectives import IssuedCollective
from shardwise.verify.training.compare_runs import collective_differences

MEASURED = {"noise_scale_every": 1, "balance": "none"}


@dataclass(frozen=True)
class PartNorms:
    """Of the first step: the sum of the squared norms of the parts, the norm of the whole, and what the step issued."""

    squares: float
    norm: float
    issued: list[IssuedCollective]


def make_case(
    model: str = "dense", *, num_seqs: int = 8, recipe: dict[str, object] | None = None, **layout: object
) -> Case:
    return Case(model, Layout(**layout), num_seqs=num_seqs, recipe={**MEASURED, **(recipe or {})})  # type: ignore[arg-type]


CASES = {
    "one process": make_case(),
    "one process, two sequences each": make_case(micro_batch_seqs=2),
    "one process, uneven": make_case(micro_batch_seqs=3),
    "dp": make_case(dp=2),
    "dp, two sequences each": make_case(dp=2, micro_batch_seqs=2),
    "dp, one micro-batch": make_case(dp=2, micro_batch_seqs=4),
    "dp in each micro-batch": make_case(dp=2, recipe={"reduce_each_micro_batch": True}),
    "dp after": make_case(dp=2, recipe={"reduction": "after"}),
    "dp 3, a rank without a sequence": make_case(dp=3, num_seqs=7),
    "fsdp without zero": make_case(fsdp=2),
    "zero-1": make_case(fsdp=2, zero_stage=1),
    "zero-2": make_case(fsdp=2, zero_stage=2),
    "zero-3": make_case(fsdp=2, zero_stage=3),
    "hybrid zero-1": make_case(dp=2, fsdp=2, zero_stage=1),
    "hybrid zero-2": make_case(dp=2, fsdp=2, zero_stage=2),
    "hybrid zero-3": make_case(dp=2, fsdp=2, zero_stage=3),
    "tp": make_case(tp=2),
    "tp 4 sp": make_case(tp=4, sequence_parallel=True),
    "tp 2 sp, dp": make_case(tp=2, sequence_parallel=True, dp=2),
    "tp 2 sp, zero-3": make_case(tp=2, sequence_parallel=True, fsdp=2, zero_stage=3),
    "uneven vocabulary, tp 2": make_case("uneven", tp=2),
    "cp": make_case(cp=2, zero_stage=1),
    "cp zigzag, zero-2": make_case(cp=2, cp_variant="zigzag", fsdp=2, zero_stage=2),
    "cp without zero": make_case(cp=2),
    "tied": make_case("tied", dp=2),
    "tied zero-2": make_case("tied", fsdp=2, zero_stage=2),
    "adapted": make_case("adapted", dp=2),
    "pp": make_case(pp=2, schedule="1f1b"),
    "pp zb-h1": make_case(pp=2, schedule="zb_h1"),
    "pp interleaved": make_case("deep", pp=2, schedule="interleaved", num_virtual_stages=2),
    "pp, zero-2": make_case(pp=2, schedule="1f1b", fsdp=2, zero_stage=2),
    "pp, tp 2 sp": make_case(pp=2, schedule="1f1b", tp=2, sequence_parallel=True),
    "pp, tied": make_case("deep tied", pp=2, schedule="1f1b"),
    "pp, tied, zero-2": make_case("deep tied", pp=2, schedule="1f1b", fsdp=2, zero_stage=2),
    "pp zb-v, tied": make_case("deep tied", pp=2, schedule="zb_v", num_virtual_stages=2),
    "dualpipe": make_case("deep", pp=2, schedule="dualpipe"),
    "dualpipe, tied": make_case("deep tied", pp=2, schedule="dualpipe"),
    "pp, predicting": make_case("tied predicting", pp=2, schedule="1f1b"),
    "routed": make_case("routed"),
    "routed, dp": make_case("routed", dp=2),
    "ep": make_case("routed", fsdp=2, ep=2, zero_stage=1),
    "ep, dp, zero-2": make_case("routed", dp=2, fsdp=2, ep=2, zero_stage=2),
    "ep, zero-3, two sequences each": make_case("routed", fsdp=4, ep=2, zero_stage=3, num_seqs=8),
    "ep, tp, whole": make_case("routed", fsdp=1, ep=2, etp=1, tp=2, sequence_parallel=True),
    "ep, cp": make_case("routed", fsdp=2, ep=2, cp=2, zero_stage=1),
}  # fmt: skip


def measure_parts(case: Case) -> PartNorms:
    engine = engine_of(case)
    with CollectiveCapture(engine.world) as capture:
        result = run_step(engine, case, 0)
    assert result.small_squares is not None
    return PartNorms(result.small_squares.item(), result.norm.item(), capture.sequence)


def plain_squares(case: Case) -> tuple[float, float]:
    """Return the same by autograd, with the gradient of each part by itself."""
    recipe = case.recipe_of()
    model = build(case.architecture, dtype=torch.float64)
    initialise(model, SEED)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    squares, whole = 0.0, [torch.zeros_like(parameter) for parameter in trained]
    for batch in case.micro_batches(0, 0, 1):
        rows = len(batch.ids_BT)
        num_parts = case.layout.num_replicas // case.instance().mesh.size(("ep",))
        for part in torch.arange(rows).tensor_split(num_parts):
            output = model(batch.ids_BT[part], batch.targets_BT[part], case.num_seqs * POSITIONS, None)
            gradients = torch.autograd.grad(output.total(recipe.prediction_weight), trained, allow_unused=True)
            for into, gradient in zip(whole, gradients, strict=True):
                if gradient is not None:
                    into += gradient
                    squares += float(gradient.square().sum())
    return squares, float(sum(gradient.square().sum() for gradient in whole)) ** 0.5


def measure_all(cases: Sequence[Case]) -> list[PartNorms]:
    return [measure_parts(case) for case in cases]


SIZES = sorted({case.layout.num_devices for case in CASES.values()})


@pytest.mark.thinned(2)
@pytest.mark.parametrize(("size", "half"), list(itertools.product(SIZES, range(2))))
def test_parts_have_the_norms_of_a_plain_loop(size: int, half: int) -> None:
    """Half of the layouts of so many devices, one after the other in the same processes."""
    names = [name for name, case in CASES.items() if case.layout.num_devices == size][half::2]
    ranks = run_rank_threads(measure_all, size, [CASES[name] for name in names])
    for name, *results in zip(names, *ranks, strict=True):
        squares, norm = plain_squares(CASES[name])
        assert [result.norm for result in results] == pytest.approx([norm] * size, rel=1e-12), name
        assert [result.squares for result in results] == pytest.approx([squares] * size, rel=1e-10), name
        assert not collective_differences(CASES[name].small(), [result.issued for result in results]), name
