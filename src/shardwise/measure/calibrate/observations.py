"""Measured seconds as functions of the constants: of a training step, and of micro-benchmarks.

`run_observation` prices a run, `read_benchmark_lines` the micro-benchmarks of a file of JSON lines (docs/calibrating.md), each
as the cost model prices the same work.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shardwise.hardware.calibration_constants import CONSTANTS, scale_rates
from shardwise.hardware.cluster import Cluster
from shardwise.hardware.network.topology import GroupLinks, collective_s
from shardwise.hardware.stacks import Stack
from shardwise.hardware.toml_tables import TableReader
from shardwise.layout.placement import ATOMIC_AXES, PLACED_AXES, cuts_by_axis, default_placement
from shardwise.measure.calibrate.published_runs.prediction_from_row import RunCase
from shardwise.model.operations.base import OperationSharding
from shardwise.model.operations.matmul_and_attention import Scan, ScanGradient
from shardwise.price.layout_pricer import Pricing
from shardwise.price.roofline import KernelWork, Rates, rates_from_constants
from shardwise.sharding.collectives import CollectiveKind
from shardwise.sharding.spec import Spec
from shardwise.values.dtypes import bytes_per_element
from shardwise.values.elementwise import Value
from shardwise.values.errors import InputError, raise_problems
from shardwise.values.symbolic import SymbolValues

Array = NDArray[np.float64]
Constants = Mapping[str, Value]


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Seconds that were measured, `weight` of them, on a chip under a stack; `seconds` prices the same at any constants."""

    chip: str
    stack: Stack
    seconds: Callable[[Constants], Value]
    measured_s: float
    weight: float = 1.0

    @property
    def names(self) -> tuple[tuple[str, str], ...]:
        """Whose each constant is, and its name."""
        return tuple((self.owner(name), name) for name in CONSTANTS)

    def owner(self, name: str) -> str:
        """The chip or the stack that a constant belongs to."""
        return f"chip {self.chip}" if CONSTANTS[name].owner == "chip" else f"stack {self.stack.name}"

    def prior(self, name: str) -> float:
        """Where a constant is expected before anything is measured."""
        return CONSTANTS[name].prior if CONSTANTS[name].owner == "chip" else self.stack.prior(name)


def step_time_function(case: RunCase) -> Callable[[Constants], Value]:
    """The step time of a run. What does not depend on the constants is worked out once."""
    pricing = Pricing(case.architecture, case.cluster, case.job, case.layout)
    software, chip = case.software, case.cluster.chip

    def seconds(constants: Constants) -> Value:
        rates = rates_from_constants(
            chip, constants, clock=software.clock, fused_attention=software.fused_attention,
            synchronises=software.synchronises, stack=software.stack,
        )  # fmt: skip
        links = scale_rates(case.cluster.topology, constants["link_fraction"], constants["network_fraction"])
        return pricing.at(rates, links).slowest_s()

    return seconds


def run_observation(case: RunCase, measured_s: float, weight: float = 1.0) -> Observation:
    """A training run."""
    return Observation(
        chip=case.cluster.chip.name, stack=case.software.stack, seconds=step_time_function(case), measured_s=measured_s,
        weight=weight,
    )  # fmt: skip


PriceFunction = Callable[[Constants], Value]
# Deviation of the logarithm of a micro-benchmark's time around the rule that prices it. Repeated, one varies by a hundredth;
# shapes of products differ by a few hundredths around k0, and a busbw does between neighbouring sizes. It is a fifth of
# that of a run, since a run has much besides that no constant knows.
BENCH_SIGMA = 0.03
# Below this a kernel's time is its launch and its last wave: a launch is 5 to 15 microseconds (`CONSTANTS`), which would be
# attributed to a rate.
SHORTEST_S = 5e-5
# All constants where nothing is lost: no measurement is faster.
IDEAL_CONSTANTS = {name: one.high if name.endswith("fraction") else one.low for name, one in CONSTANTS.items()} | {
    "attention_fraction": 1.0
}
# What the verb `bench` notes beside: the spread of repetitions, their number, where they ran.
NOTED_KEYS = ("low", "high", "repeats", "machine")
COLLECTIVE_KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send_recv")
NARROW_DTYPES = ("fp8", "int8", "fp4", "int4")  # in which products run, and attention does not
GROUP_AXIS = ATOMIC_AXES["tp"][0]  # the innermost axis stands for the devices of a collective


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkTarget:
    """What the micro-benchmarks ran on: the cluster at nominal rates, and what its stack and its clock are."""

    cluster: Cluster
    stack: Stack
    clock: float

    def rates(self, constants: Constants) -> Rates:
        """The rates of the chip at given constants."""
        return rates_from_constants(
            self.cluster.chip, constants, clock=self.clock, fused_attention=not self.stack.unfused_attention,
            synchronises=True, stack=self.stack,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkLine:
    """A line: what it measured in words, and its observation; `too_short` to say anything about a rate."""

    id: str
    observation: Observation
    too_short: bool


def read_benchmark_lines(path: str, machine: BenchmarkTarget) -> tuple[BenchmarkLine, ...]:
    """The micro-benchmarks of a file of JSON lines. Raises `InputError` with every problem of every line."""
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise InputError(f"--bench: cannot read {path}: {error.strerror}; the path of a file is required") from None
    except ValueError:
        raise InputError(f"--bench: {path} is not text; JSON lines in UTF-8 are required") from None
    problems: list[str] = []
    found = [
        _parse_line(f"--bench: {path}: line {number}", line, machine, problems)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    raise_problems(problems)
    return tuple(one for one in found if one)


def _parse_line(where: str, line: str, machine: BenchmarkTarget, problems: list[str]) -> BenchmarkLine | None:
    """One line, or None and why not."""
    try:
        table = json.loads(line)
    except (ValueError, RecursionError):
        table = None
    if not isinstance(table, Mapping):
        problems.append(
            f'{where}: found {line.strip()[:40]!r}; a JSON object such as {{"bench": "matmul", ...}} is required'
        )
        return None
    reads = LINE_READERS.get(table["bench"]) if isinstance(table.get("bench"), str) else None
    if reads is None:
        TableReader(where, table, tuple(table), problems).add_problem("bench", f"one of {', '.join(LINE_READERS)}")
        return None
    keys, priced = reads
    before = len(problems)
    reader = TableReader(where, table, ("bench", "seconds", *keys, *NOTED_KEYS), problems)
    seconds = reader.quantity("seconds", "")
    name, price = priced(reader, machine)
    if len(problems) > before:
        return None
    least = float(price(IDEAL_CONSTANTS))
    if table["bench"] in ("matmul", "memory") and seconds < least:
        reader.add_problem("seconds", f"{least:.3g} or more, what {machine.cluster.chip.name} takes at its peak,")
        return None
    short = seconds < SHORTEST_S and table["bench"] != "collective"
    observation = Observation(
        chip=machine.cluster.chip.name, stack=machine.stack, seconds=price, measured_s=seconds
    )  # fmt: skip
    return BenchmarkLine(id=name, observation=observation, too_short=short)


def with_weight(bench: BenchmarkLine, sigma: float) -> BenchmarkLine:
    """The same with the weight that stands for its deviation in a fit where that of a run is `sigma`."""
    return replace(bench, observation=replace(bench.observation, weight=(sigma / BENCH_SIGMA) ** 2))


def _read_dtype(reader: TableReader, machine: BenchmarkTarget, without: tuple[str, ...] = ()) -> str:
    known = [dtype for dtype in machine.cluster.chip.peak_flops_per_s if dtype not in without]
    dtype = reader.table.get("dtype")
    if dtype not in known:
        reader.add_problem("dtype", f"a format that {machine.cluster.chip.name} has a peak of, {' or '.join(known)},")
        return known[0] if known else "bf16"
    return str(dtype)


def _read_matmul(reader: TableReader, machine: BenchmarkTarget) -> tuple[str, PriceFunction]:
    """[m, k] times [k, n]. What it gives is at least two bytes wide: narrower operands give bf16."""
    dtype = _read_dtype(reader, machine)
    m, n, k = (reader.size(key) for key in ("m", "n", "k"))
    width = bytes_per_element(dtype)
    num_bytes = (m * k + k * n) * width + m * n * max(width, bytes_per_element("bf16"))
    work = KernelWork(2.0 * m * n * k, num_bytes, k, (m, n), 0.0, 0.0, 0.0, False)
    return f"matmul {dtype} {m}x{n}x{k}", lambda constants: machine.rates(constants).kernel_s("contract", dtype, work)


def _read_memory(reader: TableReader, machine: BenchmarkTarget) -> tuple[str, PriceFunction]:
    """A streaming kernel moves its bytes once, however much a stack's elementwise kernels move."""
    num_bytes = reader.quantity("bytes", any_size=True)
    return f"memory {num_bytes / 1e6:.4g} MB", lambda constants: num_bytes / machine.rates(constants).bytes_per_s


def _read_collective(reader: TableReader, machine: BenchmarkTarget) -> tuple[str, PriceFunction]:
    """The group lies as tensor parallelism's does: on the innermost tier, or the smallest axis of a torus."""
    kind = reader.table.get("kind")
    if kind not in COLLECTIVE_KINDS:
        reader.add_problem("kind", f"one of {', '.join(COLLECTIVE_KINDS)}")
        kind = COLLECTIVE_KINDS[0]
    num_bytes, before = reader.quantity("bytes", any_size=True), len(reader.problems)
    devices = reader.size("devices")
    topology = machine.cluster.topology
    degrees = {atom: 1 for axis in PLACED_AXES for atom in ATOMIC_AXES.get(axis, (axis,))} | {GROUP_AXIS: devices}
    cuts = cuts_by_axis(topology, default_placement(topology), degrees)
    fills = devices > 1 and math.prod(cut.size for cut in cuts[GROUP_AXIS]) == devices
    if not fills and len(reader.problems) == before:
        levels = " x ".join(map(str, topology.levels))
        reader.add_problem(
            "devices", f"a number of 2 or more that fills {machine.cluster.name} ({levels}) from the inside out"
        )
    payload = num_bytes / devices if kind == CollectiveKind.ALL_TO_ALL else num_bytes

    def seconds(constants: Constants) -> Value:
        links = GroupLinks(scale_rates(topology, constants["link_fraction"], constants["network_fraction"]), cuts)
        return collective_s(CollectiveKind(kind), (GROUP_AXIS,), payload, links)

    return f"{kind} {num_bytes / 1e6:.4g} MB on {devices}", seconds


def _read_attention(reader: TableReader, machine: BenchmarkTarget) -> tuple[str, PriceFunction]:
    """Softmax attention, one pass alone: forward reads q, k, v and writes the output; backward reads these and the output's
    gradient, and writes three."""
    dtype = _read_dtype(reader, machine, NARROW_DTYPES)
    batch, heads, seq_len, width = (reader.size(key) for key in ("batch", "heads", "seq_len", "head_dim"))
    causal, backward = reader.flag("causal"), reader.flag("backward")
    spec = Spec.of(("B", "T", "K", "H"))
    values = SymbolValues({"B": batch, "T": seq_len, "K": heads, "H": width, "span": 0.5 if causal else 1.0})
    scan = (ScanGradient if backward else Scan)((), ())
    elements = float(batch * heads * seq_len * width) * (8 if backward else 4)
    work = KernelWork(
        scan.flops(OperationSharding((spec, spec, spec), ())).evaluate(values), elements * bytes_per_element(dtype), 0.0, (), 0.0,
        float(batch * heads * seq_len**2), width, backward,
    )  # fmt: skip
    words = f"attention {dtype} {batch}x{heads}x{seq_len}x{width}{' causal' * causal}{' backward' * backward}"
    return words, lambda constants: machine.rates(constants).kernel_s("scan", dtype, work)


# What a line may measure: its keys beside `bench` and `seconds`, and how it is priced.
LINE_READERS: Mapping[
    str, tuple[tuple[str, ...], Callable[[TableReader, BenchmarkTarget], tuple[str, PriceFunction]]]
] = {
    "matmul": (("dtype", "m", "n", "k"), _read_matmul),
    "memory": (("bytes",), _read_memory),
    "collective": (("kind", "devices", "bytes"), _read_collective),
    "attention": (("dtype", "batch", "heads", "seq_len", "head_dim", "causal", "backward"), _read_attention),
}
