"""What is issued in each precision recipe, seen below the engine, is the realised list: kind, axes, format, bytes and count.

Of every layout `test_equality` sees it, with the order.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from training import FP64, Case, engine_of, run_step

from shardwise.layout.layout import Layout
from shardwise.run.rank_threads import run_rank_threads
from shardwise.run.trainer.engine_prediction import comparable_counts
from shardwise.run.trainer.step_inspector import CollectiveCapture
from shardwise.sharding.collectives import IssuedCollective
from shardwise.step.issued_collectives import count_collectives
from shardwise.values.precision import PRECISIONS

FORMATS = {
    f"{name} {kind}": Case(layout=layout, precision=PRECISIONS[name])
    for name in (
        "bf16",
        "bf16_fp32_gradients",
        "bf16_fp32_main_gradients",
        "bf16_fp32_reduction",
        "fp16",
        "mxfp8",
        "fp8_delayed",
    )
    for kind, layout in {
        "0": Layout(dp=2),
        "1": Layout(fsdp=2, zero_stage=1),
        "3": Layout(fsdp=2, zero_stage=3),
    }.items()
} | {
    "fp8_delayed experts": Case(
        model="routed", layout=Layout(fsdp=2, ep=2, zero_stage=2), precision=PRECISIONS["fp8_delayed"]
    ),
    "fp8_delayed pp": Case(
        layout=Layout(pp=2, schedule="1f1b", micro_batch_seqs=4), precision=PRECISIONS["fp8_delayed"]
    ),
    "fp8_deepseek_v3 0": Case(layout=Layout(dp=2), precision=PRECISIONS["fp8_deepseek_v3"]),
}


def captured(case: Case) -> Counter[IssuedCollective]:
    engine = engine_of(case)
    with CollectiveCapture(engine.world) as capture:
        run_step(engine, case, 0)
    return capture.counts


@pytest.mark.thinned(4)
@pytest.mark.parametrize("name", FORMATS)
def test_collectives_have_the_planned_formats(name: str) -> None:
    case = FORMATS[name]
    planned = count_collectives(case.instance(), case.num_micro_batches)
    for issued in run_rank_threads(captured, case.layout.num_devices, case):
        expected, actual = comparable_counts(planned, issued)
        assert actual == expected


def test_a_single_device_issues_no_collective() -> None:
    assert count_collectives(Case(precision=replace(FP64)).instance(), 4) == Counter()
