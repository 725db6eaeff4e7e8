"""Values of `--sweep`: ranges, lists, names; refusals and their messages."""

from __future__ import annotations

import pytest

from shardwise.layout.choices import PINNABLE_CHOICES
from shardwise.search.sweep_values import (
    COUNT_NAMES,
    MAX_POINTS,
    SWEEPABLE,
    Sweep,
    format_value,
    grid_points,
    parse_sweep,
    parse_sweeps,
)
from shardwise.values.errors import InputError


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("gpus=64:4096:x2", (64, 128, 256, 512, 1024, 2048, 4096)),
        ("gpus=64:512:+64", (64, 128, 192, 256, 320, 384, 448, 512)),
        ("gpus=64,128,384", (64, 128, 384)),
        ("gpus = 64 : 600 : x3", (64, 192, 576)),  # the end is not met
        ("gpus=4x4x4,4x4x8*2", ("4x4x4", "4x4x8*2")),
        ("seq_len=4Ki:128Ki:x2", (4096, 8192, 16384, 32768, 65536, 131072)),
        ("batch=1Mi,4Mi", (2**20, 2**22)),
        ("batch=1024:4Ki:x2", (1024, 2048, 4096)),
        ("batch=1M:2M:+500k", (10**6, 1_500_000, 2 * 10**6)),
        ("model=llama-3-8b, llama-3-70b", ("llama-3-8b", "llama-3-70b")),
        ("tp=1:32:x2", (1, 2, 4, 8, 16, 32)),
        ("tp=8:8:x2", (8,)),
        ("zero_stage=0:3:+1", (0, 1, 2, 3)),
        ("recompute=none,selective,full", ("none", "selective", "full")),
        ("sequence_parallel=false,true", (False, True)),
        ("recompute_layers=1:4:+1", (1, 2, 3, 4)),
    ],
)
def test_ranges_and_lists_are_parsed(text: str, values: tuple[object, ...]) -> None:
    assert parse_sweep(text) == Sweep(name=text.partition("=")[0].strip(), values=values)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpus", "found 'gpus'; NAME=VALUES is required, such as gpus=64:4096:x2"),
        ("gpus=", "NAME=VALUES is required"),
        ("gpu=64,128", "found 'gpu' (did you mean 'gpus'?); one of gpus, seq_len, batch, model, dp"),
        ("micro_batch_seq=1,2", "did you mean 'micro_batch_seqs'?"),
        ("gpus=64:512", "found '64:512'; FROM:TO:xFACTOR, FROM:TO:+STEP or a list such as 64,128,384 is required"),
        ("gpus=64:512:2", "found '64:512:2'; FROM:TO:xFACTOR"),
        ("gpus=64:512:2:x2", "FROM:TO:xFACTOR"),
        ("gpus=64:512:x1", "found the step 'x1', which leads nowhere; a whole number of at least 2 is required, such as x2"),
        ("gpus=64:512:x1.5", "found the step 'x1.5'"),
        ("gpus=64:512:+0", "found the step '+0', which leads nowhere; a whole number of at least 1 is required, such as +64"),
        ("gpus=64:512:+-8", "found the step '+-8'"),
        ("gpus=512:64:x2", "found '512:64:x2', which goes down; 64:512:x2 is required"),
        ("batch=1Mi:4M:x2", "found 1Mi in binary and 4M in decimal units; one kind is required, such as 4Mi for 4M"),
        ("batch=1M:4Mi:x2", "found 4Mi in binary and 1M in decimal units; one kind is required, such as 1Mi for 1M"),
        ("batch=1Mi:4001k:x2", "found 1Mi in binary and 4001k in decimal units"),
        ("gpus=64,,128", "found '64,,128', in which a value is missing"),
        ("gpus=64,128,64", "found 64 more than once; each value once is required"),
        ("gpus=many", "found 'many'; a number with a prefix is required"),
        ("gpus=0:8:+1", "found '0'; a whole number of at least 1 is required"),
        ("zero_stage=0:4:x2", "found '0'; a whole number of at least 1 is required"),
        ("recompute=none:full:x2", "recompute is not a count: a list such as none,selective is required"),
        ("model=a:b:x2", "model is not a count: a list such as llama-3-8b,llama-3-70b is required"),
        ("async_tp=false:true:+1", "async_tp is not a count: a list such as true,false is required"),
        ("recompute=none,ful", "found 'ful' (did you mean 'full'?)"),
        ("sequence_parallel=yes,no", "true or false is required"),
    ],
)  # fmt: skip
def test_invalid_sweeps_are_refused_with_the_fix(text: str, message: str) -> None:
    with pytest.raises(InputError) as refused:
        parse_sweep(text)
    assert str(refused.value).startswith("--sweep")
    assert message in str(refused.value)


def test_all_names_that_a_pin_takes_can_be_swept() -> None:
    assert set(PINNABLE_CHOICES) < set(SWEEPABLE)
    assert set(COUNT_NAMES) < set(SWEEPABLE)


def test_all_problems_of_several_sweeps_are_reported() -> None:
    with pytest.raises(InputError) as refused:
        parse_sweeps(["gpus=8:4:x2", "tpp=1,2"])
    assert len(refused.value.problems) == 2
    with pytest.raises(InputError) as refused:
        parse_sweeps(["tp=1,2", "tp=4,8", "pp=1,2"])
    assert refused.value.problems == (
        "--sweep: found tp twice; each name once is required",
        "--sweep: found 3 of them (tp, tp, pp); one, or two for a grid, is required",
    )


def test_the_number_of_points_is_bounded() -> None:
    assert len(parse_sweep(f"gpus=1:{MAX_POINTS}:+1").values) == MAX_POINTS
    assert parse_sweeps([f"gpus=1:{MAX_POINTS}:+1"])
    for texts in ([f"gpus=1:{MAX_POINTS + 1}:+1"], ["batch=1:1e17:+1"], ["gpus=1:50:+1", "tp=1:21:+1"]):
        with pytest.raises(InputError, match="found more than 1,000 points"):
            parse_sweeps(texts)


def test_points_of_a_grid() -> None:
    points = list(grid_points(parse_sweeps(["tp=1,2", "recompute=none,full"])))
    assert points == [
        {"tp": 1, "recompute": "none"}, {"tp": 1, "recompute": "full"}, {"tp": 2, "recompute": "none"},
        {"tp": 2, "recompute": "full"},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "ordered"),
    [
        ("gpus=64,128", True), ("gpus=128,64", True), ("gpus=64,256,128", False), ("gpus=4x4x4,4x4x8,4x4x8*2", True),
        ("gpus=4x4x8,4x4x4,8x8x8", False), ("model=a,b", False), ("async_tp=false,true", False),
    ],
)  # fmt: skip
def test_values_with_an_order(text: str, ordered: bool) -> None:
    assert parse_sweep(text).is_ordered == ordered


def test_values_are_printed_as_in_reports() -> None:
    assert [format_value(value) for value in (4096, True, "full")] == ["4,096", "true", "full"]
