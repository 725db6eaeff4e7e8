"""`shardwise bench machine`: constants come back out of seconds that they made, and the file that is written is planned for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from json_schemas import require_valid
from number_paths import require_payload_numbers

from shardwise.hardware.calibration_constants import BENCH_ONLY_CONSTANTS, CONSTANTS
from shardwise.hardware.cluster_loading import load_cluster
from shardwise.hardware.published_constants import is_measured, num_runs, published_calibration, with_calibration
from shardwise.hardware.stacks import get_stack
from shardwise.layout.layout import Layout
from shardwise.measure.calibrate.prediction_errors import predict_rows
from shardwise.measure.calibrate.published_runs.run_table import engine_rows
from shardwise.measure.microbenchmarks.benchmark_layers import (
    COLLECTIVE_BYTES,
    COLLECTIVES,
    COPY_BYTES,
    SAMPLES,
    TINY,
    SampleLayer,
)
from shardwise.measure.microbenchmarks.engine_operations import loss_operands
from shardwise.measure.microbenchmarks.machine_benchmark import (
    MachineRecord,
    MachineResult,
    measure_machine,
    write_cluster_file,
)
from shardwise.measure.microbenchmarks.machine_fit import (
    ELEMENTWISE,
    NORMAL_90,
    OPERATION_COUNTS,
    STACK,
    MachineFacts,
    MachineFit,
    median_rounds,
    prediction_interval,
)
from shardwise.model.job import Job
from shardwise.present.command_line import main
from shardwise.price.roofline import TILE_ROWS
from shardwise.search.plan import plan_layout
from shardwise.values import to_json
from shardwise.values.errors import InputError

BEST, COPY_RATE, HOP_S, LINK_RATE, LAUNCH_S = 100e9, 20e9, 2e-4, 1.5e9, 3e-5
KNOWN = {
    "matmul_fraction": 0.9, "matmul_ramp": 20.0, "attention_fraction": 0.4, "grouped_fraction": 0.8, "elementwise": 1.5,
    "update": 0.7, "loss": 6.0, "exposed": 0.75, "launch_s": LAUNCH_S,
}  # fmt: skip


def seconds() -> dict[str, float]:
    """What operations take on a machine of these constants; starting them takes nothing but for a layer of them."""
    found = {"copy": COPY_BYTES / COPY_RATE, "bf16/up forward": SAMPLES[0].products[3].flops / 400e9}
    sustained = BEST * KNOWN["matmul_fraction"]
    for sample in SAMPLES:
        own = {one.name: one.flops / sustained * (1 + KNOWN["matmul_ramp"] / one.summed) for one in sample.products}
        expert = sample.expert
        alone = expert.flops / sustained * (1 + KNOWN["matmul_ramp"] / expert.summed)
        own["expert"] = alone / KNOWN["grouped_fraction"] * (1 + TILE_ROWS / 2 / expert.rows)
        for phase in ("forward", "backward"):
            own[f"attention {phase}"] = sample.attention_flops(phase) / BEST / KNOWN["attention_fraction"]
        every = [f"{one} {phase}" for one in ELEMENTWISE for phase in ("forward", "backward")] + ["sum"]
        whole = sample.elementwise_bytes() / COPY_RATE * KNOWN["elementwise"]
        own |= {one: whole / len(every) / OPERATION_COUNTS.get(one, 1) for one in every}
        own["update"] = sample.update_bytes() / COPY_RATE * KNOWN["update"]
        found |= {f"{sample.name}/{name}": s for name, s in own.items()}
        found |= {f"{TINY.name}/{name}": 0.0 for name in own}
    head = sum(found[f"256/{one.name}"] for one in SAMPLES[0].products if one.name.startswith("head"))
    found["256/loss"] = head + SAMPLES[0].loss_bytes() / COPY_RATE * KNOWN["loss"]
    found["tiny/layer"] = LAUNCH_S * TINY.num_kernels()
    # the best product is the one that the shares are of
    found["256/head data"] = next(one.flops for one in SAMPLES[0].products if one.name == "head data") / BEST
    for kind in COLLECTIVES:
        for size in COLLECTIVE_BYTES:
            found[f"{kind}/{size}"] = (2 if kind == "all_reduce" else 1) * (HOP_S + size / 2 / LINK_RATE)
    found |= {f"{sample.name}/step": 1.0 for sample in SAMPLES}
    return found | {"beside/all_reduce": 0.010, "beside/longer": 0.0075}


def fit(found: dict[str, float] | None = None) -> MachineFit:
    own = MachineFacts(
        name="here:2",
        source="measured on this machine",
        num_processes=2,
        memory_bytes=8e9,
        dtype="fp32",
        other_dtypes=("bf16",),
    )
    return MachineFit(found or seconds(), SAMPLES, TINY, own)


def found_of(one: MachineFit) -> MachineResult:
    return MachineResult(one.cluster(), one.calibration((0.9, 1.1)), one.measured_over_predicted())


def test_constants_come_back_out_of_the_seconds_that_they_made() -> None:
    constants = fit().constants()
    assert constants.keys() == {**CONSTANTS, **BENCH_ONLY_CONSTANTS}.keys()
    # the product that is the best of all is faster than the constants say: it is one of 30
    close = {"matmul_fraction": 0.03, "matmul_ramp": 0.3, "loss": 0.2, "grouped_fraction": 0.05}
    for name, value in KNOWN.items():
        assert constants[name] == pytest.approx(value, rel=close.get(name, 1e-6)), name


def test_links_come_back_too() -> None:
    hop, rate = fit().fit_link()
    assert (hop, rate) == (pytest.approx(HOP_S), pytest.approx(LINK_RATE))
    cluster = found_of(fit()).cluster
    reached = with_calibration(cluster, fit().calibration((0.9, 1.1)))
    assert reached.topology.tiers[0].egress(2) == pytest.approx(LINK_RATE)  # type: ignore[union-attr]


def test_what_no_machine_can_have_is_brought_within_bounds() -> None:
    found = seconds()
    found |= {name: s * 1e-3 for name, s in found.items() if "attention " in name or name.endswith("update")}
    found |= {"beside/longer": -0.019, "tiny/layer": 1e-9}
    constants = fit(found).constants()
    for name, one in {**CONSTANTS, **BENCH_ONLY_CONSTANTS}.items():
        assert one.low <= constants[name] <= one.high, name
    assert constants["exposed"] == 0.0
    assert constants["update"] == BENCH_ONLY_CONSTANTS["update"].low


def test_the_file_is_read_back_to_the_last_digit_and_planned_for(tmp_path: Path) -> None:
    found, path = found_of(fit()), tmp_path / "machine.toml"
    write_cluster_file(found, path)
    cluster = load_cluster(str(path))
    expected = with_calibration(found.cluster, found.calibration)
    assert cluster.calibration == expected.calibration
    assert cluster.topology == expected.topology
    assert cluster.chip.peak_flops_per_s == expected.chip.peak_flops_per_s
    sample = SAMPLES[0]
    job = Job(global_batch_tokens=2 * sample.tokens, seq_len=sample.seq_len, precision="fp32", loss="in_place")
    estimate = plan_layout(sample.architecture, cluster, job, Layout(dp=2, micro_batch_seqs=4)).estimate
    low, high = estimate.interval90 or (0.0, 0.0)
    assert (low, high) == (pytest.approx(0.9 * estimate.step_time_s), pytest.approx(1.1 * estimate.step_time_s))
    assert any("shardwise: measured on this machine" in note for note in estimate.notes)


def test_a_factor_of_its_own_moves_its_kernels_alone() -> None:
    """Without one the update and the loss are as other elementwise kernels."""
    one = fit()
    found = found_of(one)
    sample = SAMPLES[0]
    job = Job(global_batch_tokens=2 * sample.tokens, seq_len=sample.seq_len, precision="fp32", loss="in_place")

    def time_of(**constants: float | None) -> dict[str, float]:
        own = {**found.calibration.constants, **constants}
        known = {name: value for name, value in own.items() if value is not None}
        cluster = with_calibration(found.cluster, replace(found.calibration, constants=known))
        return dict(plan_layout(sample.architecture, cluster, job, Layout(dp=2, micro_batch_seqs=4)).estimate.time)

    without, same = time_of(update=None, loss=None), time_of(update=KNOWN["elementwise"], loss=KNOWN["elementwise"])
    assert without == pytest.approx(same)
    slow = time_of(update=2 * KNOWN["elementwise"], loss=KNOWN["elementwise"])
    assert slow["optimizer"] == pytest.approx(2 * same["optimizer"])
    assert slow["forward"] == same["forward"]
    assert time_of(update=KNOWN["elementwise"])["backward"] > same["backward"]


def test_the_spread_covers_what_repeats_show_and_ten_percent_at_least() -> None:
    calm = [seconds()] * 3
    assert prediction_interval(calm, SAMPLES) == (pytest.approx(1 / 1.1), pytest.approx(1.1))
    wild = [{name: s * scale for name, s in seconds().items()} for scale in (0.8, 1.0, 1.4)]
    low, high = prediction_interval(wild, SAMPLES)
    assert low < 0.75
    assert high > 1.35
    assert median_rounds(wild) == pytest.approx(seconds())


def test_whole_steps_are_held_against_the_constants_and_widen_the_interval() -> None:
    found = seconds()
    predicted = {name: 1.0 / miss for name, miss in fit().measured_over_predicted().items()}  # they took a second each
    found |= {f"{name}/step": s * (2.0 if name == "256" else 1.0) for name, s in predicted.items()}
    misses = fit(found).measured_over_predicted()
    assert misses == {"256": pytest.approx(2.0), "512": pytest.approx(1.0), "128": pytest.approx(1.0)}
    low, high = prediction_interval([found] * 3, SAMPLES, misses.values())
    assert high == pytest.approx(2.0 ** (NORMAL_90 / 3**0.5))  # one of three is off by a factor of 2
    assert low == pytest.approx(1 / high)
    assert prediction_interval([found] * 3, SAMPLES, [1.01, 0.99, 1.0])[1] == pytest.approx(1.1)


@pytest.mark.parametrize("sample", [one for one in SAMPLES if one.has_loss], ids=lambda one: one.name)
def test_the_loss_is_measured_of_values_that_no_processor_is_slow_with(sample: SampleLayer) -> None:
    """Weights of a deviation of 1 made 4% of the probabilities subnormal, and with them the operands of the head's products."""
    x, weight, _ = loss_operands(sample, torch.device("cpu"))
    shares = torch.softmax(x @ weight.t(), dim=-1)
    assert shares.min() > 1e3 * torch.finfo(torch.float32).smallest_normal


def test_the_stacks_constants_come_from_runs_of_its_own() -> None:
    """No published run is of it: three of `train` on one H200 are in the fit, and its interval is that of a new stack."""
    stack = get_stack(STACK)
    assert stack.kind == "eager"
    assert is_measured(stack)
    assert not num_runs("h200", stack, "dense")
    assert "fewer than 5 published runs" in published_calibration("h200", stack).spread_notes["dense"]
    predicted = [run for run in predict_rows(engine_rows()) if run.prediction]
    assert len(predicted) == 3
    for run in predicted:
        assert run.prediction
        assert run.prediction.estimate.step_time_s == pytest.approx(run.row.step_time_s, rel=0.06), run.row.id


def test_a_small_machine_is_measured_in_two_processes() -> None:
    small: tuple[SampleLayer, ...] = (replace(TINY, name="small", has_loss=True),)
    found = measure_machine(2, small)
    assert found.cluster.num_devices == 2
    assert set(found.cluster.chip.peak_flops_per_s) == {"fp32", "bf16"}
    assert found.calibration.constants.keys() == {**CONSTANTS, **BENCH_ONLY_CONSTANTS}.keys()
    assert "2 processes at once" in found.calibration.source
    assert "torch" in found.calibration.source
    assert found.measured_over_predicted.keys() == {"small"}
    payload = to_json(MachineRecord.of(found))
    require_valid(payload)
    assert require_payload_numbers(found) == len(found.calibration.constants)
    assert payload["calibration"]["stack"] == STACK


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--processes", "0"), "--processes"),
        (("--processes", "65"), "1 or more, at most 64, are required for a machine"),
        (("--dtype", "bf16"), "it measures fp32 and bf16, and takes none"),
        (("--out", "machine.json"), "a name that ends in .toml is required"),
        (("--out", "no/such/folder/machine.toml"), "no such folder"),
    ],
)
def test_wrong_input_is_refused_before_anything_is_measured(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(*_: object) -> None:
        raise AssertionError("something was measured")

    monkeypatch.setattr("shardwise.measure.microbenchmarks.benchmark_runs.measure_machine", measured)
    assert main(("bench", "machine", "--device", "cpu", *arguments)) == 2
    assert said in capsys.readouterr().err


def test_a_gpu_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.measure.microbenchmarks.benchmark_runs.select_device", lambda _: "cuda")
    assert main(("bench", "machine")) == 2
    assert "--device cpu is required" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot write .*; a path in a writable directory is required"):
        write_cluster_file(found_of(fit()), tmp_path)
