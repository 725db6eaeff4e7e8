"""`shardwise bench`: lines that calibrate reads, kept as they come, taken up where they stopped."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from multiprocessing import active_children
from pathlib import Path

import pytest
import torch

from shardwise.hardware.cluster_loading import load_cluster
from shardwise.hardware.stacks import get_stack
from shardwise.measure.calibrate.observations import BenchmarkTarget, read_benchmark_lines
from shardwise.measure.microbenchmarks import benchmark_lines, device_timers, timing
from shardwise.measure.microbenchmarks.benchmark_lines import append_line, line_key, read_measured_keys, remaining_lines
from shardwise.measure.microbenchmarks.timing import REPEATS, summarise_times, time_kernel
from shardwise.present.command_line import main
from shardwise.run.spawn import run_in_processes
from shardwise.values.errors import InputError


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark_lines, "SIDES", {"cpu": (32, 64)})
    monkeypatch.setattr(benchmark_lines, "SUMMED_SIZES", {"cpu": (16,)})
    monkeypatch.setattr(benchmark_lines, "MEMORY_BYTES", {"cpu": (2**16,)})
    monkeypatch.setattr(benchmark_lines, "SEQ_LENS", {"cpu": (32,)})
    monkeypatch.setattr(benchmark_lines, "COLLECTIVE_BYTES", {"cpu": (2**12,)})
    monkeypatch.setattr("shardwise.measure.microbenchmarks.timing.SHORTEST_REPETITION_S", 1e-4)
    monkeypatch.setattr(
        "shardwise.measure.microbenchmarks.timing.time_kernel",
        lambda run, device: time_kernel(run, device, budget_s=0.0),
    )


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(("bench", *arguments))
    shown = capsys.readouterr()
    return code, shown.out, shown.err


@pytest.mark.usefixtures("small")
def test_calibrate_reads_the_lines_of_bench_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "machine.jsonl"
    code, text, err = run(capsys, "all", "--out", str(out), "--device", "cpu")
    assert (code, err) == (0, "")
    lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [line["bench"] for line in lines] == ["matmul"] * 2 + ["memory"] + ["attention"] * 2 + ["collective"] * 5
    assert all(line["low"] <= line["seconds"] <= line["high"] and line["repeats"] >= REPEATS for line in lines)
    assert "10 lines added" in text
    assert "TFLOP/s" in text
    machine = BenchmarkTarget(cluster=load_cluster("local:2"), stack=get_stack("eager"), clock=1.0)
    points = read_benchmark_lines(str(out), machine)
    assert [point.observation.measured_s for point in points] == [line["seconds"] for line in lines]


@pytest.mark.usefixtures("small")
def test_points_in_the_file_are_not_measured_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "machine.jsonl"
    run(capsys, "matmul", "--out", str(out), "--device", "cpu")
    first = out.read_text(encoding="utf-8")
    out.write_text(first.splitlines()[0] + "\n", encoding="utf-8")  # cut short after one line
    code, text, _ = run(capsys, "matmul", "--out", str(out), "--device", "cpu")
    assert code == 0
    assert "1 more are in" in text
    assert "1 lines added" in text
    again = [line_key(json.loads(line)) for line in out.read_text(encoding="utf-8").splitlines()]
    assert again == [line_key(json.loads(line)) for line in first.splitlines()]
    code, payload, _ = run(capsys, "matmul", "--device", "cpu", "--dtype", "bf16", "--json")
    assert {line["dtype"] for line in json.loads(payload)["lines"]} == {"bf16"}


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["matmul", "--dtype", "fp4"], ["--dtype: found 'fp4'", "bf16"]),
        (["matmul", "--device", "cuda"], ["no GPU", "--device cpu"]),
        (["collectives", "--processes", "1"], ["--processes 1", "2 or more"]),
        (["collectives", "--processes", "many"], ["--processes", "many"]),
        (["memory", "--out", "/nowhere/at/all.jsonl"], ["cannot write /nowhere", "writable"]),
    ],
)
@pytest.mark.usefixtures("small")
def test_wrong_flags_are_refused(arguments: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    code, _, err = run(capsys, *arguments)
    assert code == 2
    for part in parts:
        assert part in err


@pytest.mark.usefixtures("small")
def test_fp8_and_tf32_products_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """Attention has no line in fp8, and the switch for tf32 is as it was."""
    code, payload, _ = run(capsys, "matmul", "--device", "cpu", "--dtype", "fp8", "--dtype", "tf32", "--json")
    assert code == 0
    assert [line["dtype"] for line in json.loads(payload)["lines"]] == ["fp8", "fp8", "tf32", "tf32"]
    assert not torch.backends.cuda.matmul.allow_tf32
    assert not list(benchmark_lines.list_benchmark_lines("attention", "cpu", ("fp8",), 1))


@pytest.mark.parametrize("text", ["no JSON", '{"a": 1}', "[1]"])
def test_a_file_of_another_kind_is_not_overwritten(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "notes.txt"
    out.write_text(text, encoding="utf-8")
    code, _, err = run(capsys, "memory", "--out", str(out), "--device", "cpu")
    assert code == 2
    assert "this verb wrote" in err
    assert out.read_text(encoding="utf-8") == text


def test_lines_of_another_machine_are_measured_here_too(tmp_path: Path) -> None:
    out = tmp_path / "machine.jsonl"
    line = {"bench": "memory", "bytes": 8}
    append_line(out, {**line, "seconds": 1.0, "machine": "there"})
    assert remaining_lines([line], read_measured_keys(out, "here")) == [line]
    assert remaining_lines([line], read_measured_keys(out, "there")) == []
    with pytest.raises(InputError, match="cannot write"):
        append_line(tmp_path, line)


def test_times_are_summarised_by_median_and_range() -> None:
    summary = summarise_times([3.0, 1.0, 2.0, 100.0, 2.5])
    assert (summary.seconds, summary.low, summary.high, summary.repeats) == (2.5, 1.0, 100.0, 5)
    calls: list[int] = []
    assert time_kernel(lambda: calls.append(1), "cpu", budget_s=0.0).repeats == REPEATS


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("kind", benchmark_lines.BENCHMARK_KINDS)
def test_each_kind_lists_every_shape_once(kind: str, device: str) -> None:
    keys = [line_key(line) for line in benchmark_lines.list_benchmark_lines(kind, device, ("bf16",), 8)]
    assert keys
    assert len(keys) == len(set(keys))


def _for_ever(rank: int, size: int, place: torch.device, argument: object) -> Iterator[int]:
    yield rank
    while True:
        signal.pause()


def test_processes_end_when_their_results_are_closed() -> None:
    """As after Ctrl-C: the one that measures ends those that it started, which never hear it."""
    results = run_in_processes(_for_ever, None, "cpu", 2, 2)
    assert next(results) == 0
    started = active_children()
    assert len(started) == 2
    results.close()  # type: ignore[attr-defined]
    assert not any(process.is_alive() for process in started)


@pytest.mark.parametrize("kernel_s", [1e-6, 3e-5, 2e-3, 0.2, 4.0])
def test_timed_seconds_equal_the_clock_for_any_kernel_length(kernel_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many runs a repetition has."""
    clock = Clock()
    monkeypatch.setattr(timing, "time", clock)
    monkeypatch.setattr(device_timers, "time", clock)
    timed = time_kernel(lambda: clock.wait(kernel_s), "cpu")
    assert (timed.low, timed.seconds, timed.high) == pytest.approx((kernel_s,) * 3, rel=1e-6)
    assert clock.now_s == pytest.approx(max(1.0, REPEATS * timing.SHORTEST_REPETITION_S, REPEATS * kernel_s), rel=0.8)


class Clock:
    """Time that passes only as it is asked to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    def perf_counter(self) -> float:
        return self.now_s
