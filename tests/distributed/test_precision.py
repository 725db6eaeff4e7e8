"""Runs in bf16 are as near to float64 as one process in bf16, with the same experts chosen; and runs in fp32."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from test_equality import error
from training import FP64, Case, engine_of, gathered, run_step

from shardwise.layout.layout import Layout
from shardwise.run.rank_threads import run_rank_threads
from shardwise.values.precision import PRECISIONS

BF16 = ("bf16", "bf16_fp32_gradients", "bf16_fp32_main_gradients", "bf16_fp32_reduction")
LAYOUTS = {
    "2 bucketed": Layout(dp=2, micro_batch_seqs=2),
    "3 zero-1": Layout(fsdp=3, zero_stage=1),
    "2 zero-2": Layout(fsdp=2, zero_stage=2, micro_batch_seqs=2),
    "4 hybrid zero-3": Layout(dp=2, fsdp=2, zero_stage=3),
}
# Of the other axes: the model, and the layout.
AXES = {
    "tp 2 sp": ("dense", Layout(tp=2, sequence_parallel=True, micro_batch_seqs=2)),
    "tp 4": ("biased", Layout(tp=4, micro_batch_seqs=2)),
    "cp 2": ("dense", Layout(cp=2, micro_batch_seqs=2)),
    "cp 4 zigzag": ("dense", Layout(cp=4, cp_variant="zigzag", micro_batch_seqs=2)),
    "cp 2 ulysses tp 2": ("predicting", Layout(cp=2, tp=2, cp_variant="ulysses", micro_batch_seqs=2)),
    "ep 2": ("routed", Layout(fsdp=2, ep=2, zero_stage=2, micro_batch_seqs=2)),
    "ep 2 tp 2 sp": ("routed", Layout(fsdp=2, ep=2, tp=2, zero_stage=1, sequence_parallel=True)),
}


@dataclass
class Step:
    """The first step of a run: its loss, every gradient, and the rows that each expert got on all ranks."""

    loss: float
    gradients: dict[str, torch.Tensor]
    rows: torch.Tensor | None


def first_step(case: Case) -> Step:
    engine = engine_of(case)
    for number, (_, bias) in enumerate(engine.buffers()):  # no two experts so near to each other that rounding decides
        bias.copy_(torch.linspace(0.0, 1.0, len(bias)).roll(number))
    engine.recipe = replace(engine.recipe, clip_norm=None)
    engine.updater.recipe = engine.recipe
    result = run_step(engine, case, 0)
    counts = list(engine.balancer.counts.values())
    rows = torch.stack(counts).round().long() if counts else None
    return Step(float(result.loss), gathered(engine, "gradient_shard"), rows)


def of_one_process(case: Case) -> Step:
    """Run the same global micro-batches in one process."""
    size = case.layout.num_replicas * case.layout.micro_batch_seqs
    return first_step(replace(case, layout=Layout(micro_batch_seqs=size)))


@pytest.mark.thinned(4)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("model", "precision"), [*(("dense", name) for name in BF16), ("moe", "bf16")])
def test_bf16_is_as_near_to_float64_as_one_process(model: str, precision: str, layout: str) -> None:
    is_as_near(Case(model, LAYOUTS[layout], precision=PRECISIONS[precision]))


@pytest.mark.thinned(4)
@pytest.mark.parametrize("name", AXES)
def test_every_axis_is_as_near_to_float64_as_one_process(name: str) -> None:
    model, layout = AXES[name]
    is_as_near(Case(model, layout, precision=PRECISIONS["bf16_fp32_main_gradients"]))


def is_as_near(case: Case) -> None:
    """Require errors like those of one process in the same precision recipe."""
    exact, single = of_one_process(replace(case, precision=FP64)), of_one_process(case)
    distributed = run_rank_threads(first_step, case.layout.num_devices, case)[0]
    if exact.rows is not None:
        assert torch.equal(exact.rows, single.rows), "one process routes otherwise in bf16: the case says nothing"
        assert torch.equal(exact.rows, distributed.rows)
    # where one process is exact by luck, which depends on the processor, a thousandth of a rounding to bf16 (2**-8) is allowed
    assert abs(distributed.loss - exact.loss) <= 2 * abs(single.loss - exact.loss) + 2**-18 * exact.loss
    total, limit = (_distance(step.gradients, exact.gradients) for step in (distributed, single))
    assert 0 < total <= 2 * limit


def _distance(gradients: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    """Return the relative distance of all gradients together."""
    return error(
        torch.cat([gradients[name] for name in sorted(exact)]), torch.cat([exact[name] for name in sorted(exact)])
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fp32_is_near_to_float64(layout: str) -> None:
    case = Case("dense", LAYOUTS[layout], precision=PRECISIONS["fp32"])
    exact = of_one_process(replace(case, precision=FP64))
    for step in run_rank_threads(first_step, case.layout.num_devices, case):
        assert step.loss == pytest.approx(exact.loss, rel=1e-5)
        for name, gradient in exact.gradients.items():
            assert error(step.gradients[name], gradient) <= 1e-5, name
