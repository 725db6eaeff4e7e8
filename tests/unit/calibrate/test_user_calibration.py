"""A calibration to user measurements recovers their constants, states its uncertainty, and skips unusable rows."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwise.hardware.calibration_constants import CONSTANTS
from shardwise.hardware.cluster_files import MeasuredCluster
from shardwise.hardware.cluster_loading import load_cluster, load_measured_cluster
from shardwise.hardware.published_constants import constant_values, published_calibration, published_spread
from shardwise.hardware.stacks import get_stack
from shardwise.measure.calibrate.cluster_calibration import (
    NARROWEST_SPREAD,
    UserClusterFit,
    _spread_of_kind,
    fit_user_cluster,
)
from shardwise.measure.calibrate.constant_fit import (
    SIGMA_FEW,
    fit_constants,
    initial_fit,
    left_out_residuals,
    linearise,
)
from shardwise.measure.calibrate.observations import (
    BENCH_SIGMA,
    SHORTEST_S,
    BenchmarkTarget,
    Observation,
    read_benchmark_lines,
)
from shardwise.measure.calibrate.published_runs.run_table import RunRow, published_rows, read_rows
from shardwise.measure.calibrate.user_runs import select_runs
from shardwise.measure.kernel_ladders.workbench import run_workbench
from shardwise.values import to_json
from shardwise.values.errors import InputError

USER_RUNS = Path(__file__).parents[3] / "examples" / "calibrate" / "runs.csv"
HELD_OUT_RUNS = Path(__file__).parent / "held_back.csv"  # the other rows of the same source
TITAN = get_stack("torchtitan")
PEAK, MEMORY, NVLINK, CARD = 989e12, 3.35e12, 450e9, 50e9  # of an H100, as in the catalogue
Lines = Sequence[Mapping[str, Any]]


def move_constants(constants: Mapping[str, float], widths: Mapping[str, float]) -> dict[str, float]:
    """The constants, some of them moved by a number of widths of their priors."""
    return {
        name: float(
            constant.from_unbounded(constant.to_unbounded(constants[name]) + widths.get(name, 0.0) * constant.width)
        )
        for name, constant in CONSTANTS.items()
    }


def bench_file(folder: Path, lines: Lines) -> str:
    file = folder / "machine.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return str(file)


def machine_of(cluster: MeasuredCluster) -> BenchmarkTarget:
    return BenchmarkTarget(cluster=cluster.nominal, stack=TITAN, clock=1.0)


def bench_lines(constants: Mapping[str, float]) -> Lines:
    """Micro-benchmarks of 64 H100 with these constants, from closed forms written out here."""
    lines: list[dict[str, Any]] = []
    for m, k in ((8192, 8192), (8192, 1024), (16384, 512), (4096, 16384)):
        seconds = 2.0 * m * m * k / (PEAK * constants["matmul_fraction"]) * (1 + constants["matmul_ramp"] / k)
        lines.append({"bench": "matmul", "dtype": "bf16", "m": m, "n": m, "k": k, "seconds": seconds})
    for num_bytes in (1e9, 4e9):
        lines.append(
            {"bench": "memory", "bytes": num_bytes, "seconds": num_bytes / (MEMORY * constants["memory_fraction"])}
        )
    inside = 7 / 8 / (NVLINK * constants["link_fraction"])
    for kind, times in (("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2)):
        seconds = times * (1e9 * inside + 7 * 0.8e-6 + 4.5e-6)
        lines.append({"bench": "collective", "kind": kind, "devices": 8, "bytes": 1e9, "seconds": seconds})
    between = 7 / 8 / (8 * CARD * constants["network_fraction"])  # a node of 8 has 8 cards
    latency = 7 * 0.8e-6 + 4.5e-6 + 7 * 2.7e-6
    for num_bytes in (4e9, 8e9):
        seconds = num_bytes * max(inside, between) + latency
        lines.append(
            {"bench": "collective", "kind": "all_gather", "devices": 64, "bytes": num_bytes, "seconds": seconds}
        )
    for backward, products in ((False, 2), (True, 5)):
        flops = products * 2.0 * 4 * 32 * 8192**2 / 2 * 128  # half of the scores are masked
        seconds = flops / (PEAK * constants["attention_fraction"]) * constants["attention"]
        lines.append({
            "bench": "attention", "dtype": "bf16", "batch": 4, "heads": 32, "seq_len": 8192, "head_dim": 128, "causal": True,
            "backward": backward, "seconds": seconds,
        })  # fmt: skip
    return lines


def test_kernel_ladders_are_read_as_micro_benchmarks_of_their_fastest_rungs(tmp_path: Path) -> None:
    """A product of 4,096 at half of an H100's peak and a softmax at half of its bandwidth, by hand; ladders without a micro-
    benchmark, and rungs that did not run, are skipped."""
    result = run_workbench(["product", "softmax", "launches"], "h100", device="none")
    product_s, softmax_s = 2 * 4096**3 / (0.5 * 989e12), 2 * 8192**2 * 2 / (0.5 * 3.35e12)
    fastest = {"product": product_s, "softmax": softmax_s, "launches": 1e-3}
    ladders = tuple(
        replace(ladder, rungs=tuple(replace(rung, seconds=fastest[ladder.name] * (1 + rank)) for rank, rung in
                                    enumerate(reversed(ladder.rungs))))
        for ladder in result.ladders
    )  # fmt: skip
    path = tmp_path / "kernels.json"
    path.write_text(json.dumps(to_json(replace(result, ladders=ladders)), indent=1))
    target = BenchmarkTarget(cluster=load_cluster("h100:1"), stack=get_stack("shardwise"), clock=1.0)
    lines = read_benchmark_lines(str(path), target)
    assert {line.id: line.observation.measured_s for line in lines} == {
        "matmul bf16 4096x4096x4096": product_s, "memory 268.4 MB": softmax_s
    }  # fmt: skip
    path.write_text(json.dumps(to_json(result)))
    with pytest.raises(InputError, match="no rung was measured; what `shardwise kernels --json` prints on a GPU"):
        read_benchmark_lines(str(path), target)


def test_micro_benchmarks_are_priced_by_the_closed_forms(tmp_path: Path) -> None:
    constants = move_constants(constant_values("h100", TITAN), {"network_fraction": -2.0, "link_fraction": 0.5})
    benches = read_benchmark_lines(
        bench_file(tmp_path, bench_lines(constants)), machine_of(load_measured_cluster("h100:64"))
    )
    assert len(benches) == 13
    for bench in benches:
        assert float(bench.observation.seconds(constants)) == pytest.approx(bench.observation.measured_s, rel=1e-9), (
            bench.id
        )


def test_an_all_to_all_moves_shards_and_a_send_the_whole_array(tmp_path: Path) -> None:
    lines = [{**GATHER, "kind": kind, "bytes": 8e9} for kind in ("all_to_all", "send_recv")]
    constants = constant_values("h100", TITAN)
    to_all, send = read_benchmark_lines(bench_file(tmp_path, lines), machine_of(load_measured_cluster("h100:8")))
    rate = NVLINK * constants["link_fraction"]
    assert float(to_all.observation.seconds(constants)) == pytest.approx(8e9 / 8 * 7 / 8 / rate, rel=0.01)
    assert float(send.observation.seconds(constants)) == pytest.approx(8e9 / rate, rel=0.01)


def test_a_fit_recovers_the_constants_of_micro_benchmarks(tmp_path: Path) -> None:
    widths = {
        "matmul_fraction": 0.8, "matmul_ramp": -0.8, "memory_fraction": 1.0, "link_fraction": -1.0, "network_fraction": -1.2,
        "attention_fraction": 1.0,
    }  # fmt: skip
    truth = move_constants(constant_values("h100", TITAN), widths)
    fit = fit_user_cluster(load_measured_cluster("h100:64"), (), bench_file(tmp_path, bench_lines(truth)), TITAN)
    after = {constant.name: constant for constant in fit.constants}
    for name in ("matmul_fraction", "memory_fraction", "link_fraction", "network_fraction"):
        assert after[name].after == pytest.approx(truth[name], rel=0.02), name
        assert after[name].identified
    assert after["matmul_ramp"].after == pytest.approx(truth["matmul_ramp"], rel=0.1)
    # of attention only the product of the chip's rate and the stack's factor shows
    factor = after["attention_fraction"].after / after["attention"].after
    assert factor == pytest.approx(truth["attention_fraction"] / truth["attention"], rel=0.03)
    untouched = ("fp8_matmul_fraction", "grouped_fraction", "elementwise", "exposed", "launch_s")
    assert not any(after[name].identified for name in untouched)
    assert all(after[name].moved == pytest.approx(0.0, abs=1e-6) for name in untouched)
    before, now = fit.errors(False, benches=True), fit.errors(True, benches=True)
    assert before is not None
    assert now is not None
    assert now.mean < 0.02 < 0.15 < before.mean
    assert fit.errors(True) is None
    assert fit.spread == published_calibration("h100", TITAN).spread


def timed_at(rows: Sequence[RunRow], constants: Mapping[str, float]) -> list[RunRow]:
    """The rows with the step times predicted at `constants`."""
    timed = []
    for row in rows:
        runs = select_runs([row], load_measured_cluster("h100:8"), TITAN).runs
        seconds = float(np.max(runs[0].observation.seconds(constants))) if runs else math.nan
        timed.append(replace(row, measured={**row.measured, "step_time_s": repr(seconds)}, quality=""))
    return [row for row in timed if row.step_time_s]


def titan_rows(limit: int) -> list[RunRow]:
    rows = [row for row in published_rows() if row.family == "torchtitan" and row.cell("chip").startswith("H100")]
    return [row for row in rows if row.quality in ("A", "A-")][:limit]


def test_a_fit_recovers_the_constants_of_runs() -> None:
    truth = move_constants(
        constant_values("h100", TITAN),
        {"matmul_fraction": -1.2, "elementwise": 1.2, "exposed": -0.8, "network_fraction": -0.5},
    )
    rows = timed_at(titan_rows(20), truth)
    assert len(rows) >= 16
    fit = fit_user_cluster(load_measured_cluster("h100:256"), rows, None)
    assert fit.stack == TITAN
    before, after = fit.errors(False), fit.errors(True)
    assert before is not None
    assert after is not None
    assert before.mean > 0.07
    assert after.mean < 0.3 * before.mean
    identified = [constant for constant in fit.constants if constant.identified]
    assert "elementwise" in {constant.name for constant in identified}
    for constant in identified:
        assert abs(constant.after - truth[constant.name]) < 2.0 * constant.after_deviation, constant.name
    low, high = fit.spread["dense"]
    assert 0.9 < low <= 1 - NARROWEST_SPREAD
    assert 1 + NARROWEST_SPREAD <= high < 1.1
    assert fit.spread["moe"] == published_calibration("h100", TITAN).spread["moe"]


def test_three_runs_of_a_lab_improve_predictions_of_its_other_runs() -> None:
    cluster = load_measured_cluster("h100:32")
    stack = get_stack("fused")  # as if the lab had no published runs
    fit = fit_user_cluster(cluster, read_rows(str(USER_RUNS)), None, stack=stack)
    held_out = select_runs(read_rows(str(HELD_OUT_RUNS)), cluster, stack)
    assert (len(fit.runs), len(held_out.runs)) == (3, 9)
    observations = [run.observation for run in held_out.runs]
    measured = np.array([run.measured_s for run in observations])

    def median(user_fit: UserClusterFit, *, after: bool) -> float:
        seconds = np.exp(linearise(observations, user_fit.fitted if after else user_fit.initial).log_times)
        return float(np.median(np.abs(seconds / measured - 1.0)))

    assert median(fit, after=True) < 0.7 * median(fit, after=False)


def test_unusable_rows_are_counted_by_reason() -> None:
    run, second, *_ = (dict(row.inputs) for row in read_rows(str(USER_RUNS)))

    def row(name: str, changes: Mapping[str, str] | None = None, seconds: str = "2.6", quality: str = "") -> RunRow:
        inputs = {**run, **(changes or {})}
        measured = dict.fromkeys(
            ("step_time_s", "tokens_per_s_per_device", "implied_tokens_per_s_per_device", "peak_memory_gb"), ""
        )
        measured |= {"step_time_s": seconds, "memory_unit": "", "memory_kind": ""}
        return RunRow(
            id=name, family="", source="", quality=quality, dup_group=name, inputs=tuple(inputs.items()), measured=measured
        )  # fmt: skip

    rows = [
        row("good"), row("better", second), row("another chip", {"chip": "A100-80GB-SXM"}), row("no time", seconds=""),
        row("no chip", {"chip": ""}), row("unknown chip", {"chip": "V1000"}), row("another stack", {"software": "torchtitan"}),
        row("no layout", {"tp": "", "pp": ""}), row("poor", quality="C"),
    ]  # fmt: skip
    selection = select_runs(rows, load_measured_cluster("h100:32"), None)
    assert [selected.id for selected in selection.runs] == ["good", "better"]
    assert selection.skipped == {
        "of another chip, a100-80gb": 1, "without a measured step time": 1, "chip not stated": 1,
        "chip not in the catalogue": 1, "of another stack, torchtitan": 1, "layout not stated": 1,
        "of quality C: it does not say all that its time depends on": 1,
    }  # fmt: skip
    named = select_runs(rows, load_measured_cluster("h100:32"), TITAN)
    assert {selected.observation.stack for selected in named.runs} == {TITAN}
    assert {"good", "better", "another stack"} == {selected.id for selected in named.runs}
    with pytest.raises(InputError, match=r"nothing measured that can be used .*1 without a measured step time"):
        fit_user_cluster(load_measured_cluster("h100:32"), rows[2:6], None)


def test_runs_are_priced_at_the_rates_of_the_cluster(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text(
        '[chip]\nbase = "h100"\nname = "slow"\npower_w = 350\n'
        '[[tiers]]\nname = "nvlink"\nsize = 8\nbytes_per_s = "225 GB/s"\n'
        '[[tiers]]\nname = "network"\nsize = 2\nbytes_per_s = "5 GB/s"\n',
        encoding="utf-8",
    )
    rows = read_rows(str(USER_RUNS))
    usual, slow = (select_runs(rows, load_measured_cluster(name), None).runs for name in ("h100:32", str(file)))
    constants = constant_values("h100", get_stack("megatron-bridge-26"))
    assert {slow_run.observation.chip for slow_run in slow} == {"slow"}
    for fast, slow_run in zip(usual, slow, strict=True):
        ratio = float(np.max(slow_run.observation.seconds(constants))) / float(
            np.max(fast.observation.seconds(constants))
        )
        assert ratio > (1.1 if fast.kind == "dense" else 1.01), fast.id  # the host sets the pace of experts


def cluster_of_custom_chip(folder: Path) -> MeasuredCluster:
    """A cluster of a chip with an H100's values and another name, without a base in the catalogue."""
    chip, tiers = load_measured_cluster("h100:32").nominal.chip, load_measured_cluster("h100:32").nominal.topology.tiers  # type: ignore[union-attr]
    peaks = ", ".join(f"{form} = {peak}" for form, peak in chip.peak_flops_per_s.items())
    text = f'[chip]\nname = "Mine"\nvendor = "NVIDIA"\npeak_flops_per_s = {{ {peaks} }}\nhost_shape = [8]\n'
    for name in ("memory_bytes", "memory_bytes_per_s", "runtime_bytes", "matmul_fraction", "memory_fraction"):
        text += f"{name} = {getattr(chip, name)!r}\n"
    for tier in tiers:
        text += f'[[tiers]]\nname = "{tier.name}"\nsize = {tier.size}\n'
        for name in ("bytes_per_s", "fraction", "hop_latency_s", "base_latency_s"):
            text += f"{name} = {getattr(tier, name)!r}\n"
    (folder / "mine.toml").write_text(text, encoding="utf-8")
    return load_measured_cluster(str(folder / "mine.toml"))


def named(row: RunRow, **cells: str) -> RunRow:
    """The row with other cells."""
    return replace(row, inputs=tuple({**dict(row.inputs), **cells}.items()))


def test_runs_on_a_custom_chip_are_priced_and_fitted(tmp_path: Path) -> None:
    """Equal values give equal prices; the constants start from the priors of any chip."""
    rows, cluster = read_rows(str(USER_RUNS)), cluster_of_custom_chip(tmp_path)
    custom = select_runs([named(row, chip="mine") for row in rows], cluster, None)
    usual = select_runs(rows, load_measured_cluster("h100:32"), None)
    constants = constant_values("h100", get_stack("megatron-bridge-26"))
    assert (len(custom.runs), custom.skipped) == (3, {})
    for custom_run, usual_run in zip(custom.runs, usual.runs, strict=True):
        assert custom_run.observation.chip == "Mine"
        assert float(np.max(custom_run.observation.seconds(constants))) == pytest.approx(
            float(np.max(usual_run.observation.seconds(constants))),
            rel=0.005,  # the ceilings of its rates are those of its generation
        )
    fit = fit_user_cluster(cluster, [named(row, chip="MINE") for row in rows], None)
    before, after = fit.errors(after=False), fit.errors(after=True)
    assert before is not None
    assert after is not None
    assert after.mean < before.mean
    assert select_runs(rows, cluster, None).skipped == {"of another chip, H100-80GB-SXM": 3}
    odd = [named(rows[0], chip="Mine", n_devices="36", dp="1", pp="9"), named(rows[0], chip="", n_devices="32")]
    assert not select_runs(odd, cluster, None).runs


def test_rows_of_a_custom_torus_must_have_its_shape(tmp_path: Path) -> None:
    text = '[chip]\nname = "t1"\npeak_flops_per_s = { bf16 = 4e14 }\nmemory_bytes = 96e9\nmemory_bytes_per_s = 3e12\n'
    text += '[torus]\nshape = [4, 4, 2]\nbytes_per_s = "90 GB/s"\nhop_latency_s = 1e-6\nwrap_rule = "never"\n'
    (tmp_path / "t1.toml").write_text(text, encoding="utf-8")
    cluster, (row, *_) = load_measured_cluster(str(tmp_path / "t1.toml")), read_rows(str(USER_RUNS))
    selection = select_runs(
        [named(row, chip="t1", dtype="bf16"), named(row, chip="t1", n_devices="64", dp="4")], cluster, None
    )
    assert (len(selection.runs), selection.skipped) == (1, {"of another torus than the cluster's": 1})


def spread_of(count: int) -> Mapping[str, tuple[float, float]]:
    return fit_user_cluster(load_measured_cluster("h100:256"), titan_rows(count), None).spread


def test_the_spread_narrows_with_the_number_of_runs() -> None:
    shipped = published_calibration("h100", TITAN).spread["dense"]
    calibrated = published_spread("calibrated", "h100", TITAN.name, "dense")
    assert spread_of(2)["dense"] == shipped
    assert spread_of(5)["dense"] == min(shipped, calibrated, key=lambda pair: pair[1] / pair[0])


@pytest.mark.parametrize("count", [10, 16, 40])
def test_the_spread_of_many_runs_covers_nine_of_ten(count: int) -> None:
    random = np.random.default_rng(count)
    inside = []
    for _ in range(400):
        residuals = random.normal(scale=0.1, size=count)
        low, high = _spread_of_kind((0.5, 2.0), (0.5, 2.0), residuals, np.ones(count))
        new = np.exp(random.normal(scale=0.1, size=200))
        inside.append(np.mean((new >= low) & (new <= high)))
    assert np.mean(inside) == pytest.approx(0.9, abs=0.025)


def linear(powers: Mapping[str, float], measured_s: float, weight: float) -> Observation:
    """Seconds whose logarithm is linear in the logarithms of the sizes."""

    def seconds(constants: Mapping[str, Any]) -> Any:
        product: Any = 1.0
        for name, power in powers.items():
            product = product * constants[name] ** power
        return product

    return Observation(chip="h100", stack=TITAN, seconds=seconds, measured_s=measured_s, weight=weight)


def test_left_out_residuals_equal_those_of_fits_without_the_run() -> None:
    random = np.random.default_rng(3)
    names = ("launch_s", "elementwise", "matmul_ramp")
    constants = constant_values("h100", TITAN)
    observations = []
    for _ in range(8):
        powers = dict(zip(names, random.normal(size=3), strict=True))
        exact = float(linear(powers, 1.0, 1.0).seconds(constants))
        observations.append(linear(powers, exact * math.exp(random.normal() * 0.03), float(random.uniform(0.3, 1.0))))
    begin = initial_fit(observations)
    residuals = left_out_residuals(
        observations, fit_constants(observations, begin, sigma=SIGMA_FEW, iterations=40), sigma=SIGMA_FEW
    )
    for number, run in enumerate(observations):
        remaining = observations[:number] + observations[number + 1 :]
        without = fit_constants(remaining, begin, sigma=SIGMA_FEW, iterations=40)
        direct = math.log(run.measured_s) - linearise([run], without).log_times[0]
        assert residuals[number] == pytest.approx(direct, abs=2e-3)


def test_micro_benchmarks_weigh_more_than_runs_and_short_ones_are_skipped(tmp_path: Path) -> None:
    line = {"bench": "memory", "bytes": 3.35e9, "seconds": 1 / 600}
    short = {"bench": "memory", "bytes": 3.35e6, "seconds": SHORTEST_S / 2}
    fit = fit_user_cluster(load_measured_cluster("h100:8"), (), bench_file(tmp_path, [line, short]), TITAN)
    assert [item.observation.weight for item in fit.benches] == [pytest.approx((SIGMA_FEW / BENCH_SIGMA) ** 2)]
    assert fit.skipped.total() == 1
    assert next(item for item in fit.constants if item.name == "memory_fraction").after == pytest.approx(
        0.6,
        rel=0.03,  # a little above the share that it is priced at, which stays below its ceiling
    )


def without(line: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name != key}


MATMUL = {"bench": "matmul", "dtype": "bf16", "m": 8192, "n": 8192, "k": 8192, "seconds": 1.5e-3}
GATHER = {"bench": "collective", "kind": "all_gather", "devices": 8, "bytes": 1e9, "seconds": 2.9e-3}
ATTENTION = {
    "bench": "attention", "dtype": "bf16", "batch": 2, "heads": 32, "seq_len": 8192, "head_dim": 128, "seconds": 2.3e-3
}  # fmt: skip


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("nope", "found 'nope'; a JSON object such as"),
        ("[" * 100_000, "a JSON object such as"),
        ("[1]", "found '[1]'; a JSON object"),
        ({"bench": "memry"}, "bench: found 'memry'; one of matmul, memory, collective, attention is required"),
        ({"bench": []}, "bench: found []; one of matmul"),
        ({}, "bench: missing; one of matmul"),
        ({**MATMUL, "hue": 1}, "found 'hue'; the keys are bench, seconds, dtype, m, n, k"),
        ({**MATMUL, "k": 0}, "k: found 0; a whole number of 1 to 10,000,000 is required"),
        (without(MATMUL, "n"), "n: missing; a list of whole numbers of 1"),
        ({**MATMUL, "dtype": "fp3"}, "dtype: found 'fp3'; a format that h100 has a peak of, bf16 or"),
        ({**MATMUL, "dtype": ["bf16"]}, "dtype: found ['bf16']; a format"),
        ({**MATMUL, "seconds": -1}, "seconds: found -1; a number above 0"),
        ({**MATMUL, "seconds": "1 GB"}, "seconds: found '1 GB'; a number above 0"),
        ({**GATHER, "kind": "gossip"}, "kind: found 'gossip'; one of all_gather"),
        ({**GATHER, "devices": 12}, "devices: found 12; a number of 2 or more that fills h100:32 (8 x 4) from the inside out"),
        ({**GATHER, "devices": 64}, "devices: found 64; a number of 2 or more"),
        ({**GATHER, "devices": 1}, "devices: found 1; a number of 2 or more"),
        ({**GATHER, "devices": 0}, "devices: found 0; a whole number"),
        ({**GATHER, "bytes": "3 TB/s"}, "bytes: found '3 TB/s'; a number above 0"),
        ({**ATTENTION, "dtype": "fp8"}, "dtype: found 'fp8'; a format"),
        ({**ATTENTION, "causal": 1}, "causal: found 1; true or false is required"),
    ],
)  # fmt: skip
def test_problems_of_a_line_are_reported(tmp_path: Path, line: Any, problem: str) -> None:
    file = tmp_path / "machine.jsonl"
    text = line if isinstance(line, str) else json.dumps(line)
    file.write_text(f"{json.dumps(MATMUL)}\n\n{text}\n", encoding="utf-8")
    with pytest.raises(InputError) as caught:
        read_benchmark_lines(str(file), machine_of(load_measured_cluster("h100:32")))
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].startswith(f"bench: {file}: line 3: ")
    assert problem in caught.value.problems[0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "cannot read"),
        (lambda path: path.write_bytes(b"\xff\xfe"), "is not text"),
    ],
)
def test_an_unreadable_file_is_refused(tmp_path: Path, make: Callable[[Path], object], message: str) -> None:
    file = tmp_path / "machine.jsonl"
    make(file)
    with pytest.raises(InputError, match=f"bench: .*{message}"):
        read_benchmark_lines(str(file), machine_of(load_measured_cluster("h100:8")))


def test_user_rows_and_held_out_rows_are_disjoint() -> None:
    user_ids, held_out_ids = ({row.id for row in read_rows(str(path))} for path in (USER_RUNS, HELD_OUT_RUNS))
    assert (len(user_ids), len(held_out_ids), user_ids & held_out_ids) == (3, 9, set())


def test_a_product_faster_than_the_chips_peak_is_refused(tmp_path: Path) -> None:
    """8192^3 at 989 TFLOP/s takes 1.11 ms."""
    file = tmp_path / "machine.jsonl"
    line = {"bench": "matmul", "dtype": "bf16", "m": 8192, "n": 8192, "k": 8192, "seconds": 1.5e-4}
    file.write_text(json.dumps(line) + "\n", encoding="utf-8")
    machine = BenchmarkTarget(cluster=load_cluster("h100:8"), stack=get_stack("eager"), clock=1.0)
    with pytest.raises(InputError, match=r"seconds: found 0.00015; 0.00111 or more, what h100 takes at its peak"):
        read_benchmark_lines(str(file), machine)
