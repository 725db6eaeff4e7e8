"""`shardwise bench machine`: constants come back out of seconds that they made, and the file that is written is planned for."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from json_schemas import require_valid
from number_paths import require_payload_numbers

from shardwise.hardware.calibration_constants import BENCH_ONLY_CONSTANTS, CONSTANTS
from shardwise.hardware.chips import load_chip
from shardwise.hardware.cluster_loading import load_cluster
from shardwise.hardware.published_constants import is_measured, num_runs, published_calibration, with_calibration
from shardwise.hardware.stacks import get_stack
from shardwise.layout.layout import Layout
from shardwise.measure.calibrate.prediction_errors import predict_rows
from shardwise.measure.calibrate.published_runs.run_table import engine_rows
from shardwise.measure.microbenchmarks.benchmark_layers import (
    COLLECTIVES,
    GPU_SAMPLES,
    MACHINE_SIZES,
    SAMPLES,
    TINY,
    MachineSizes,
    SampleLayer,
    SampleStep,
)
from shardwise.measure.microbenchmarks.device_timers import EventTimer
from shardwise.measure.microbenchmarks.engine_operations import loss_operands
from shardwise.measure.microbenchmarks.machine_benchmark import (
    MachineRecord,
    MachineResult,
    fit_machine,
    measure_machine,
    measure_rounds,
    write_cluster_file,
)
from shardwise.measure.microbenchmarks.machine_facts import MachineFacts, gpu_facts, match_chip
from shardwise.measure.microbenchmarks.machine_fit import (
    COMMUNICATION,
    ELEMENTWISE,
    KERNEL_RATES,
    NORMAL_90,
    OPERATION_COUNTS,
    STACK,
    MachineFit,
    median_rounds,
    prediction_interval,
)
from shardwise.model import model_flops_per_token
from shardwise.model.job import Job
from shardwise.present.command_line import main
from shardwise.price.estimate import Estimate
from shardwise.price.roofline import TILE_ROWS
from shardwise.search.plan import plan_layout
from shardwise.values import to_json
from shardwise.values.errors import InputError

CPU_SIZES = MACHINE_SIZES["cpu"]
COPY_BYTES, COLLECTIVE_BYTES = CPU_SIZES.copy_bytes, CPU_SIZES.collective_bytes
BEST, COPY_RATE, HOP_S, LINK_RATE, LAUNCH_S = 100e9, 20e9, 2e-4, 1.5e9, 3e-5
KNOWN = {
    "matmul_fraction": 0.9, "matmul_ramp": 20.0, "attention_fraction": 0.4, "grouped_fraction": 0.8, "elementwise": 1.5,
    "update": 0.7, "loss": 6.0, "exposed": 0.75, "launch_s": LAUNCH_S,
}  # fmt: skip


def seconds() -> dict[str, float]:
    """What operations take on a machine of these constants; starting them takes nothing but for a layer of them."""
    times = {"copy": COPY_BYTES / COPY_RATE, "bf16/up forward": SAMPLES[0].products[3].flops / 400e9}
    sustained = BEST * KNOWN["matmul_fraction"]
    for sample in SAMPLES:
        sample_times = {
            product.name: product.flops / sustained * (1 + KNOWN["matmul_ramp"] / product.summed)
            for product in sample.products
        }
        expert = sample.expert
        ungrouped_s = expert.flops / sustained * (1 + KNOWN["matmul_ramp"] / expert.summed)
        sample_times["expert"] = ungrouped_s / KNOWN["grouped_fraction"] * (1 + TILE_ROWS / 2 / expert.rows)
        for phase in ("forward", "backward"):
            sample_times[f"attention {phase}"] = sample.attention_flops(phase) / BEST / KNOWN["attention_fraction"]
        every = [f"{operation} {phase}" for operation in ELEMENTWISE for phase in ("forward", "backward")] + ["sum"]
        whole = sample.elementwise_bytes() / COPY_RATE * KNOWN["elementwise"]
        sample_times |= {operation: whole / len(every) / OPERATION_COUNTS.get(operation, 1) for operation in every}
        sample_times["update"] = sample.update_bytes() / COPY_RATE * KNOWN["update"]
        times |= {f"{sample.name}/{name}": s for name, s in sample_times.items()}
        times |= {f"{TINY.name}/{name}": 0.0 for name in sample_times}
    head = sum(times[f"256/{product.name}"] for product in SAMPLES[0].products if product.name.startswith("head"))
    times["256/loss"] = head + SAMPLES[0].loss_bytes() / COPY_RATE * KNOWN["loss"]
    times["tiny/layer"] = LAUNCH_S * TINY.num_kernels()
    # the best product is the one that the shares are of
    times["256/head data"] = (
        next(product.flops for product in SAMPLES[0].products if product.name == "head data") / BEST
    )
    for kind in COLLECTIVES:
        for size in COLLECTIVE_BYTES:
            times[f"{kind}/{size}"] = (2 if kind == "all_reduce" else 1) * (HOP_S + size / 2 / LINK_RATE)
    times |= {"beside/all_reduce": 0.010, "beside/longer": 0.0075, "launch/gap": 1e-6, "launch/issue": 2e-6}
    return times | {
        step.name: predicted.step_time_s for step, predicted in predict_alone(MachineFit(times, FACTS)).items()
    }


def predict_alone(machine: MachineFit) -> dict[SampleStep, Estimate]:
    """Whole steps whose kernels take as long as when each is repeated alone."""
    return machine._predict_steps(machine.constants_alone())


FACTS = MachineFacts(
    name="here:2", source="measured on this machine", num_processes=2, memory_bytes=8e9, sizes=CPU_SIZES
)


def fit(measured: dict[str, float] | None = None) -> MachineFit:
    return MachineFit(measured or seconds(), FACTS)


def result_of(machine_fit: MachineFit) -> MachineResult:
    return MachineResult(
        machine_fit.cluster(),
        machine_fit.calibration((0.9, 1.1)),
        machine_fit.in_step,
        machine_fit.step_factors.starts,
        machine_fit.measured_over_predicted(),
        machine_fit.measured_rates(),
        machine_fit.unmeasured(),
    )


def test_fit_recovers_known_constants() -> None:
    constants = fit().constants()
    assert constants.keys() == {**CONSTANTS, **BENCH_ONLY_CONSTANTS}.keys() - {"host_s"}, "a CPU is its own host"
    # the product that is the best of all is faster than the constants say: it is one of 30
    close = {"matmul_fraction": 0.03, "matmul_ramp": 0.3, "loss": 0.2, "grouped_fraction": 0.05}
    for name, value in KNOWN.items():
        assert constants[name] == pytest.approx(value, rel=close.get(name, 1e-6)), name


def test_fit_recovers_known_links() -> None:
    hop, rate = fit().fit_link()
    assert (hop, rate) == (pytest.approx(HOP_S), pytest.approx(LINK_RATE))
    cluster = result_of(fit()).cluster
    reached = with_calibration(cluster, fit().calibration((0.9, 1.1)))
    assert reached.topology.tiers[0].egress(2) == pytest.approx(LINK_RATE)  # type: ignore[union-attr]


def test_impossible_constants_are_clipped_to_their_bounds() -> None:
    times = seconds()
    times |= {name: s * 1e-3 for name, s in times.items() if "attention " in name or name.endswith("update")}
    times |= {"beside/longer": -0.019, "tiny/layer": 1e-9}
    constants = fit(times).constants()
    for name, value in constants.items():
        constant = {**CONSTANTS, **BENCH_ONLY_CONSTANTS}[name]
        assert constant.low <= value <= constant.high, name
    assert constants["exposed"] == 0.0
    assert constants["update"] == BENCH_ONLY_CONSTANTS["update"].low


def test_cluster_file_round_trips_exactly_and_prices_a_plan(tmp_path: Path) -> None:
    result, path = result_of(fit()), tmp_path / "machine.toml"
    write_cluster_file(result, path)
    cluster = load_cluster(str(path))
    expected = with_calibration(result.cluster, result.calibration)
    assert cluster.calibration == expected.calibration
    assert cluster.topology == expected.topology
    assert cluster.chip.peak_flops_per_s == expected.chip.peak_flops_per_s
    sample = SAMPLES[0]
    job = Job(global_batch_tokens=2 * sample.tokens, seq_len=sample.seq_len, precision="fp32", loss="in_place")
    estimate = plan_layout(sample.architecture, cluster, job, Layout(dp=2, micro_batch_seqs=4)).estimate
    low, high = estimate.interval90 or (0.0, 0.0)
    assert (low, high) == (pytest.approx(0.9 * estimate.step_time_s), pytest.approx(1.1 * estimate.step_time_s))
    assert any("shardwise: measured on this machine" in note for note in estimate.notes)


def test_update_and_loss_factors_scale_only_their_kernels() -> None:
    """Without one the update and the loss are as other elementwise kernels."""
    machine_fit = fit()
    result = result_of(machine_fit)
    sample = SAMPLES[0]
    job = Job(global_batch_tokens=2 * sample.tokens, seq_len=sample.seq_len, precision="fp32", loss="in_place")

    def time_of(**constants: float | None) -> dict[str, float]:
        changed = {**result.calibration.constants, **constants}
        known = {name: value for name, value in changed.items() if value is not None}
        cluster = with_calibration(result.cluster, replace(result.calibration, constants=known))
        return dict(plan_layout(sample.architecture, cluster, job, Layout(dp=2, micro_batch_seqs=4)).estimate.time)

    without, same = time_of(update=None, loss=None), time_of(update=KNOWN["elementwise"], loss=KNOWN["elementwise"])
    assert without == pytest.approx(same)
    slow = time_of(update=2 * KNOWN["elementwise"], loss=KNOWN["elementwise"])
    assert slow["optimizer"] == pytest.approx(2 * same["optimizer"])
    assert slow["forward"] == same["forward"]
    assert time_of(update=KNOWN["elementwise"])["backward"] > same["backward"]


def test_interval_covers_the_repeats_and_at_least_ten_percent() -> None:
    calm = [seconds()] * 3
    assert prediction_interval(calm, SAMPLES) == (pytest.approx(1 / 1.1), pytest.approx(1.1))
    wild = [{name: s * scale for name, s in seconds().items()} for scale in (0.8, 1.0, 1.4)]
    low, high = prediction_interval(wild, SAMPLES)
    assert low < 0.75
    assert high > 1.35
    assert median_rounds(wild) == pytest.approx(seconds())


def test_whole_steps_scale_the_kernel_rates() -> None:
    """Kernels that take 1.3 times as long in every step make rates of 1 / 1.3, and communication stays as it was."""
    isolated, times = fit(), seconds()
    assert isolated.in_step == pytest.approx(1.0)
    kernel_seconds = {}
    for step, predicted in predict_alone(isolated).items():
        kernel_seconds[step.name] = sum(s for name, s in predicted.time.items() if name not in COMMUNICATION)
    times |= {name: times[name] + 0.3 * s for name, s in kernel_seconds.items()}
    slower = fit(times)
    assert slower.in_step == pytest.approx(1.3)
    constants, before = slower.constants(), isolated.constants()
    for name in KERNEL_RATES:
        assert constants[name] == pytest.approx(before[name] / 1.3), name
    assert constants["launch_s"] == pytest.approx(1.3 * before["launch_s"])
    assert (constants["link_fraction"], slower.fit_link()) == (before["link_fraction"], isolated.fit_link())
    assert slower.measured_over_predicted() == pytest.approx(dict.fromkeys(kernel_seconds, 1.0), rel=0.02)


def test_short_steps_separate_start_times_from_kernel_times() -> None:
    """Kernels 1.2 times as long as alone, and the time between them 2.5 times: both come back, and so do the steps."""
    isolated, times = fit(), seconds()
    for name, (_, kernels_s, starts_s) in zip(isolated.steps, isolated._step_parts(), strict=True):
        times[name.name] += 0.2 * kernels_s + 1.5 * starts_s
    slower = fit(times)
    assert slower.step_factors == pytest.approx((1.2, 2.5))
    assert slower.constants()["launch_s"] == pytest.approx(2.5 * LAUNCH_S)
    assert slower.measured_over_predicted() == pytest.approx(
        dict.fromkeys((step.name for step in isolated.steps), 1.0), rel=0.02
    )
    shares = {
        step.name: starts_s / times[step.name]
        for step, (*_, starts_s) in zip(isolated.steps, isolated._step_parts(), strict=True)
    }
    assert min(share for name, share in shares.items() if name.startswith("short")) > 0.1
    assert max(share for name, share in shares.items() if not name.startswith("short")) < 0.1


def test_residuals_of_whole_steps_widen_the_interval() -> None:
    names = {step.name for step in CPU_SIZES.steps(2)}
    times = {name: s * (2.0 if name in names and name.startswith("256") else 1.0) for name, s in seconds().items()}
    misses = fit(times).measured_over_predicted()
    assert misses.keys() == names
    low, high = prediction_interval([times] * 3, SAMPLES, misses.values())
    assert 1.6 < high < 2.2, "two of six are off by a factor of 2, and one factor takes a third of that"
    assert low == pytest.approx(1 / high)
    assert prediction_interval([times] * 3, SAMPLES, [2.0, 0.5])[1] == pytest.approx(2.0 ** (NORMAL_90 * 2**0.5))
    assert prediction_interval([times] * 3, SAMPLES, [1.01, 0.99, 1.0])[1] == pytest.approx(1.1)


def test_a_single_step_fits_no_factor() -> None:
    """Nothing would be left to judge predictions by."""
    sizes = replace(CPU_SIZES, samples=SAMPLES[:1], short_samples=())
    times = {name.replace("fsdp step", "one process step"): s for name, s in seconds().items()}
    times |= {"256/one process step": 5.0}
    single = MachineFit(times, replace(FACTS, num_processes=1, sizes=sizes))
    assert single.in_step == 1.0
    assert single.measured_over_predicted()["256/one process step"] > 1.5


@pytest.mark.parametrize(
    "sample",
    [sample_layer for sample_layer in SAMPLES if sample_layer.has_loss],
    ids=lambda sample_layer: sample_layer.name,
)
def test_loss_operands_have_no_subnormal_probabilities(sample: SampleLayer) -> None:
    """Weights of a deviation of 1 made 4% of the probabilities subnormal, and with them the operands of the head's products."""
    x, weight, _ = loss_operands(sample, torch.device("cpu"))
    shares = torch.softmax(x @ weight.t(), dim=-1)
    assert shares.min() > 1e3 * torch.finfo(torch.float32).smallest_normal


def test_constants_of_the_stack_come_from_its_own_runs() -> None:
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
    result = measure_machine(2, sizes=replace(CPU_SIZES, samples=small, short_samples=()))
    assert result.cluster.num_devices == 2
    assert set(result.cluster.chip.peak_flops_per_s) == {"fp32", "bf16"}
    assert result.calibration.constants.keys() == {**CONSTANTS, **BENCH_ONLY_CONSTANTS}.keys() - {"host_s"}
    assert "2 processes at once" in result.calibration.source
    assert "torch" in result.calibration.source
    assert result.measured_over_predicted.keys() == {"small/fsdp step", "small/tp step"}
    assert result.in_step > 0
    payload = to_json(MachineRecord.of(result))
    require_valid(payload)
    assert require_payload_numbers(result) == len(result.calibration.constants)
    assert payload["calibration"]["stack"] == STACK


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--processes", "0"), "--processes"),
        (("--processes", "65"), "1 or more, at most 64, are required for a machine"),
        (("--dtype", "bf16"), "it measures fp32, bf16, and takes none"),
        (("--out", "machine.json"), "a name that ends in .toml is required"),
        (("--out", "no/such/folder/machine.toml"), "no such folder"),
    ],
)
def test_wrong_input_is_refused_before_anything_is_measured(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(*_: object) -> None:
        raise AssertionError("something was measured")

    monkeypatch.setattr("shardwise.measure.microbenchmarks.benchmark_runs.measure_machine", measured)
    assert main(("bench", "machine", "--device", "cpu", *arguments)) == 2
    assert message in capsys.readouterr().err


class FakeEvent:
    """Event of a stream on which everything has ended when its call returns; it counts milliseconds, as CUDA's does."""

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.at_s: float | None = None

    def record(self) -> None:
        self.at_s = time.perf_counter()

    def synchronize(self) -> None:
        assert self.at_s is not None, "an event that was never recorded"

    def elapsed_time(self, later: FakeEvent) -> float:
        assert self.at_s is not None
        assert later.at_s is not None
        return 1e3 * (later.at_s - self.at_s)


class FakeCuda:
    """`torch.cuda` with one GPU, as far as `bench machine` asks it."""

    Event = FakeEvent

    def __init__(self, name: str = "NVIDIA H100 80GB HBM3", total_memory: int = 84_929_347_584) -> None:
        self.name, self.total_memory, self.synchronizations = name, total_memory, 0

    def get_device_properties(self, _: int) -> SimpleNamespace:
        return SimpleNamespace(name=self.name, total_memory=self.total_memory, major=9, minor=0)

    def synchronize(self) -> None:
        self.synchronizations += 1


GPU_SIZES = replace(
    MACHINE_SIZES["cuda"], samples=(replace(TINY, name="small", dtype="bf16", has_loss=True),), other_dtypes=("fp16", "fp8"),
    copy_bytes=2**16,
)  # fmt: skip


def measure_fake_gpu(cuda: FakeCuda, flushed: list[int]) -> MachineResult:
    """The path of a GPU, its events and its properties fakes and its kernels a CPU's."""

    def make_buffer() -> torch.Tensor:
        flushed.append(1)
        return torch.empty(8, dtype=torch.int8)

    facts = gpu_facts(1, GPU_SIZES, cuda)
    return fit_machine(list(measure_rounds(1, torch.device("cpu"), facts.sizes, EventTimer(cuda, make_buffer))), facts)


def test_a_gpu_of_the_catalogue_is_measured_as_shares_of_its_peaks(tmp_path: Path) -> None:
    """The card keeps its peaks and links and has the memory that PyTorch sees; what one GPU cannot show is of published runs;
    the file that is written is read back and planned for."""
    cuda, flushed = FakeCuda(), list[int]()
    result = measure_fake_gpu(cuda, flushed)
    chip = result.cluster.chip
    assert (chip.name, chip.base, chip.peak("bf16"), chip.capacity_bytes) == ("h100", "h100", 989e12, 84_929_347_584)
    assert set(result.rates.flops_per_s) == {"bf16", "fp16", "fp8"}
    assert len(flushed) == 1, "one buffer empties the cache before each operation"
    assert cuda.synchronizations
    published = published_calibration("h100", get_stack(STACK)).constants
    assert set(result.unmeasured) == {"routing_s", "network_fraction", "link_fraction", "exposed"}
    assert {name: result.calibration.constants[name] for name in result.unmeasured} == {
        name: published[name] for name in result.unmeasured
    }
    assert "NVIDIA H100 80GB HBM3" in result.calibration.source
    path = tmp_path / "gpu.toml"
    write_cluster_file(result, path)
    cluster = load_cluster(str(path))
    assert cluster.calibration == result.calibration
    assert cluster.chip.capacity_bytes == 84_929_347_584
    require_valid(to_json(MachineRecord.of(result)))


def test_a_gpu_that_the_catalogue_lacks_has_the_best_rates_as_peaks() -> None:
    result = measure_fake_gpu(FakeCuda("NVIDIA Unheard 9000", 24 * 10**9), [])
    chip = result.cluster.chip
    assert chip.base is None
    assert chip.platform == "GPU"
    assert dict(chip.peak_flops_per_s) == dict(result.rates.flops_per_s)
    assert chip.memory_bytes == 24e9


def test_fit_recovers_known_shares_of_peaks() -> None:
    """A product at 80% of the peak, a copy at 90% of the bandwidth and fp8 at 70% of its peak, on two GPUs whose links reach half
    of what the catalogue says."""
    facts = replace(gpu_facts(2, MACHINE_SIZES["cuda"], FakeCuda()), num_processes=2)
    chip, times = (
        load_chip("h100"),
        {
            "launch/gap": 1e-6,
            "launch/issue": 4e-6,
            "launch/layer": 2e-5,
            "beside/all_reduce": 1.0,
            "beside/longer": 0.5,
        },
    )
    for sample in (*facts.sizes.samples, facts.sizes.tiny):
        times |= {
            f"{sample.name}/{shape.name}": shape.flops / (0.8 * 989e12) for shape in (*sample.products, sample.expert)
        }
        times |= {f"{sample.name}/attention {phase}": 1e-3 for phase in ("forward", "backward")}
        every = [f"{name} {phase}" for name in ELEMENTWISE for phase in ("forward", "backward")]
        times |= {f"{sample.name}/{name}": 1e-4 for name in (*every, "sum", "update", "loss", "layer")}
    up = next(shape for shape in GPU_SAMPLES[0].products if shape.name == "up forward")
    times |= {f"{dtype}/up forward": up.flops / (0.7 * chip.peak(dtype)) for dtype in facts.sizes.other_dtypes}
    times["copy"] = facts.sizes.copy_bytes / (0.9 * chip.memory_bytes_per_s)
    for kind in COLLECTIVES:
        for size in facts.sizes.collective_bytes:
            times[f"{kind}/{size}"] = (2 if kind == "all_reduce" else 1) * (1e-5 + size / 2 / 225e9)
    constants = MachineFit(times, facts).constants_alone()
    assert constants["matmul_fraction"] == pytest.approx(0.8)
    assert constants["fp8_matmul_fraction"] == pytest.approx(0.7, rel=0.01)
    assert constants["memory_fraction"] == pytest.approx(0.9)
    assert constants["link_fraction"] == pytest.approx(0.5, rel=1e-3)
    assert constants["exposed"] == pytest.approx(0.5)
    num_kernels = facts.sizes.tiny.num_kernels()
    assert constants["host_s"] == pytest.approx(1e-4 / num_kernels), "a layer that waits for the host"
    assert constants["launch_s"] == pytest.approx(2e-5 / num_kernels), "a layer that is in the GPU's queue"


@pytest.mark.parametrize(
    ("device_name", "gb", "chip"),
    [
        ("NVIDIA H200", 150.0, "h200"), ("NVIDIA A100-SXM4-80GB", 85.1, "a100-80gb"), ("NVIDIA H100 PCIe", 85.0, "h100-pcie"),
        ("NVIDIA A100 80GB PCIe", 85.1, "a100-80gb-pcie"), ("NVIDIA B200", 191.5, "b200"), ("NVIDIA GB200", 198.6, "gb200"),
        ("AMD Instinct MI300X", 206.1, "mi300x"), ("NVIDIA H100 NVL", 100.0, None), ("NVIDIA L40S", 47.7, "l40s"),
        ("NVIDIA L40", 47.7, None), ("NVIDIA H200 MIG 3g.71gb", 74.8, None),
    ],
)  # fmt: skip
def test_gpu_names_of_pytorch_map_to_the_catalogue(device_name: str, gb: float, chip: str | None) -> None:
    assert match_chip(device_name, gb * 1e9) == chip


def test_samples_that_do_not_fit_a_gpu_are_left_out() -> None:
    """The larger model takes 16 bytes of state for each parameter: more than a card of 24 GB has beside the smaller one."""
    sizes: MachineSizes = MACHINE_SIZES["cuda"]
    assert sizes.within(80e9).samples == sizes.samples
    (small,) = sizes.within(16e9).samples
    assert (small.name, small.has_loss) == ("2048", True)


def test_a_gpu_takes_less_than_a_minute() -> None:
    """At a fifth of an A100's peak and bandwidth: products, copies and whole steps of all rounds; the rest is less."""
    sizes, chip = MACHINE_SIZES["cuda"], load_chip("a100-80gb")
    flops = sum(4 * shape.flops for sample in sizes.samples for shape in sample.products)
    steps = sum(model_flops_per_token(sample.model, sample.seq_len) * sample.tokens for sample in sizes.samples)
    once_s = (flops + 1.5 * steps) / (0.2 * chip.peak("bf16")) + sizes.copy_bytes / (0.2 * chip.memory_bytes_per_s)
    assert 7 * once_s < 45.0


def test_an_unwritable_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot write .*; a path in a writable directory is required"):
        write_cluster_file(result_of(fit()), tmp_path)
