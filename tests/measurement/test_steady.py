"""The median step of a log: what is left out, and how its rate is found."""

from __future__ import annotations

from pathlib import Path

import pytest
from measurement.logs_of import maxtext, megatron, nanotron, torchtitan

from shardwise.records.logs.training_log import (
    RunSteadyState,
    drop_outliers,
    interpolated_percentile,
    measure_steady_state,
    num_warm_up,
    read_training_log,
)
from shardwise.values.errors import InputError


def measure_lines(
    folder: Path, *lines: str, devices: int = 64, seq_len: int = 8192, batch: int | None = None
) -> RunSteadyState:
    path = folder / "train.log"
    path.write_text("\n".join(lines) + "\n")
    return measure_steady_state(read_training_log([path]), devices, seq_len, batch)


def test_warm_up_and_checkpoints_are_left_out(tmp_path: Path) -> None:
    times = [9000.0, 2500.0, 2100.0, *(2000.0 + n % 3 for n in range(30))]
    times[20] = 3500.0  # a checkpoint
    times[25] = 2120.0  # 6% off, and far outside the others
    steady = measure_lines(tmp_path, *(megatron(n, ms) for n, ms in enumerate(times, start=1)))
    assert (steady.num_lines, steady.num_warm_up, steady.num_outliers, steady.num_steady) == (33, 4, 2, 27)
    assert steady.batch_tokens == 128 * 8192
    assert steady.device_s_per_token * steady.batch_tokens / 64 == pytest.approx(2.001)
    assert steady.low < steady.device_s_per_token < steady.high
    kept = [ms for ms in times[4:] if ms < 2100]
    assert steady.overhead == pytest.approx(sum(times[4:]) / 29 / (sum(kept) / 27) - 1)


def test_the_ramp_of_a_batch_is_left_out(tmp_path: Path) -> None:
    lines = [*(megatron(n, 1000.0, batch=64) for n in range(1, 20)), *(megatron(n, 2000.0) for n in range(20, 30))]
    steady = measure_lines(tmp_path, *lines)
    assert (steady.num_other_batch, steady.batch_tokens) == (19, 128 * 8192)
    assert steady.device_s_per_token == pytest.approx(2.0 * 64 / (128 * 8192))


def test_each_format_gives_the_same_rate(tmp_path: Path) -> None:
    """6,500 tokens/s on each of 8 devices, by a rate, a time, or both of few digits."""
    batch, rate, devices = 128 * 8192, 6500.0, 8
    seconds = batch / rate / devices
    logs = {
        "torchtitan": torchtitan(1, rate), "megatron": megatron(1, seconds * 1e3),
        "nanotron": nanotron(1, seconds * 1e3, rate * 8), "maxtext": maxtext(1, seconds, rate),
    }  # fmt: skip
    for name, line in logs.items():
        batch_tokens = None if name in ("torchtitan", "megatron") else batch
        steady = measure_lines(tmp_path, line, devices=devices, batch=batch_tokens)
        assert 1 / steady.device_s_per_token == pytest.approx(rate, rel=3e-3), name


def test_a_batch_that_contradicts_the_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--batch-tokens: found 2,097,152, and the log says 1,048,576"):
        measure_lines(tmp_path, megatron(1, 2000.0), batch=2 << 20)
    with pytest.raises(InputError, match=r"which on 16 devices is a batch of .* tokens and not of 1,048,576"):
        measure_lines(tmp_path, *(maxtext(n, 20.0, 6500.0) for n in range(3)), devices=16, batch=1 << 20)


def test_a_log_without_times_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no step of MaxText in it has a time or a rate"):
        measure_lines(tmp_path, maxtext(1, 2.0, 1.0, ramp=True))


@pytest.mark.parametrize("count", [1, 2, 3, 7, 40, 10_000])
def test_some_lines_are_always_kept(tmp_path: Path, count: int) -> None:
    assert count - num_warm_up(count) >= count / 2
    paces = [1.0 + 0.3 * (n % 2) for n in range(count)]  # of two speeds none is far off
    assert drop_outliers(paces) == paces


def test_few_digits_are_no_outliers() -> None:
    """nanotron prints three: most lines are equal, and their deviation nothing."""
    assert drop_outliers([1.23] * 9 + [1.24, 1.22]) == [1.23] * 9 + [1.24, 1.22]
    assert interpolated_percentile([3.0, 1.0, 2.0], 0.5) == 2.0
