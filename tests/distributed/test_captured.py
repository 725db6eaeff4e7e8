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
from shardwise.sharding.collective import Issued, Kind
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
    ranks = run_ranks(captured, case.layout.num_devices, case)
    for found in ranks:
        assert even(found) == even(wanted)
        assert uneven(found).total() == uneven(wanted).total()
    sent = sum(one.num_bytes * count for found in ranks for one, count in uneven(found).items() if is_exchange(one))
    planned = sum(one.num_bytes * count for one, count in uneven(wanted).items() if is_exchange(one))
    assert sent == planned * len(ranks)


ORDERED = {
    name: case
    for name, case in CASES.items()
    if case.layout.num_devices in (case.layout.tp, case.layout.cp, case.layout.tp * case.layout.cp)
    and case.layout.num_devices > 1
    and not case.layout.zero_stage
    and case.layout.cp_variant not in ("ring", "zigzag")  # whose two tensors go around at once
}


def in_order(case: Case) -> list[Issued]:
    engine = engine_of(case)
    with Capture(engine.world) as capture:
        run_step(engine, case, 0)
    return capture.sequence


@pytest.mark.parametrize("name", ORDERED)
def test_activations_move_in_the_order_of_the_list(name: str) -> None:
    """Gradients, the norm and the loss follow what the last micro-batch moves."""
    case = replace(ORDERED[name], recipe={**ORDERED[name].recipe, "reduction": "after"})
    each = [replace_what(one) for one in case.instance().of_activations()]
    assert len(set(each)) > 1
    for found in run_ranks(in_order, case.layout.num_devices, case):
        without = [one for one in found if one in each]
        assert without[: len(each) * case.num_micro_batches] == each * case.num_micro_batches


def is_of_rows(one: Issued) -> bool:
    """Whether it may carry rows behind their way to experts, of which a rank has as many as routers say; padded in others."""
    return is_exchange(one) or one.axes == ("tp_kv",)


def is_exchange(one: Issued) -> bool:
    """An AllToAll of rows: what all ranks together send is what is planned."""
    return one.kind is Kind.ALL_TO_ALL and "ep" in one.axes


def even(counts: Counter[Issued]) -> Counter[Issued]:
    has_rows = any(is_exchange(one) for one in counts)
    return Counter({one: count for one, count in counts.items() if not (has_rows and is_of_rows(one))})


def uneven(counts: Counter[Issued]) -> Counter[Issued]:
    return counts - even(counts)


def replace_what(one: Issued) -> Issued:
    """What a collective carries cannot be seen from below."""
    return one._replace(what="")


def test_a_device_alone_issues_nothing() -> None:
    assert Case(precision=replace(FP64)).instance().issued(4) == Counter()
