"""What is issued, seen below the engine, is the realised list: kind, axes, format, bytes and count."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from harness import run_ranks
from test_equality import CASES
from training import FP64, Case, engine_of, run_step

from shardwise.layout.layout import Layout
from shardwise.precision import PRECISIONS
from shardwise.sharding.collective import Issued
from shardwise.train.capture import Capture

ISSUED = {
    **{name: case for name, case in CASES.items() if case.layout.num_devices > 1},
    **{
        f"{name} {kind}": Case(layout=layout, precision=PRECISIONS[name])
        for name in ("bf16", "bf16_fp32_gradients", "bf16_fp32_main_gradients", "bf16_fp32_reduction")
        for kind, layout in {
            "0": Layout(dp=2),
            "1": Layout(fsdp=2, zero_stage=1),
            "3": Layout(fsdp=2, zero_stage=3),
        }.items()
    },
}


def captured(case: Case) -> Counter[Issued]:
    engine = engine_of(case)
    with Capture(engine.world) as capture:
        run_step(engine, case, 0)
    return capture.found


@pytest.mark.parametrize("name", ISSUED)
def test_issued_as_realised(name: str) -> None:
    case = ISSUED[name]
    wanted: Counter[Issued] = Counter()
    for one, count in case.instance().issued(case.num_micro_batches).items():
        wanted[replace_what(one)] += count
    for found in run_ranks(captured, case.layout.num_devices, case):
        assert found == wanted


def replace_what(one: Issued) -> Issued:
    """What a collective carries cannot be seen from below."""
    return one._replace(what="")


def test_a_device_alone_issues_nothing() -> None:
    assert Case(precision=replace(FP64)).instance().issued(4) == Counter()
