"""Measured seconds as functions of the constants: of a training step, and of micro-benchmarks.

`run_observation` prices a run, `read_benchmark_lines` the micro-benchmarks of a file of JSON lines
(docs/calibrating.md). Both use the cost model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.hardware import CONSTANTS, Cluster, GroupLinks, Stack, collective_s
from shardwise.hardware.calibration_constants import IDEAL_CONSTANTS, scale_rates
from shardwise.hardware.toml_tables import TableReader
from shardwise.layout import cuts_by_axis, default_placement
from shardwise.layout.placement import ATOMIC_AXES, PLACED_AXES
from shardwise.measure.calibrate.published_runs.prediction_from_row import RunCase
from shardwise.model.operations.base import OperationSharding
from shardwise.model.operations.matmul_and_attention import Scan, ScanGradient
from shardwise.price import Pricing, Problem
from shardwise.price.roofline import KernelWork, Rates, rates_from_constants
from shardwise.sharding import CollectiveKind, Spec
from shardwise.values import (
    FileMessages,
    InputError,
    SymbolValues,
    Value,
    argument_label,
    bytes_per_element,
    parse_json,
    parse_json_line,
    raise_problems,
    read_text,
)

Array = NDArray[np.float64]
Constants = Mapping[str, Value]


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Measured seconds on a chip under a stack; `seconds` prices the same work at any constants. `weight` is the number
    of measurements that it counts as."""

    chip: str
    stack: Stack
    seconds: Callable[[Constants], Value]
    measured_s: float
    weight: float = 1.0

    @property
    def names(self) -> tuple[tuple[str, str], ...]:
        """Owner and name of each constant."""
        return tuple((self.owner(name), name) for name in CONSTANTS)

    def owner(self, name: str) -> str:
        """Return the owner of a constant: "chip NAME" or "stack NAME"."""
        return f"chip {self.chip}" if CONSTANTS[name].owner == "chip" else f"stack {self.stack.constant_owner(name)}"

    def prior(self, name: str) -> float:
        """Return the value of a constant that is expected before anything is measured."""
        return CONSTANTS[name].prior if CONSTANTS[name].owner == "chip" else self.stack.prior(name)


def step_time_function(case: RunCase, *, is_limited: bool = True) -> Callable[[Constants], Value]:
    """Return the step time of a run as a function of the constants; what does not depend on them is computed once.

    `is_limited`: no rate exceeds the best published micro-benchmark.
    """
    pricing = Pricing(Problem(case.architecture, case.cluster, case.job), case.layout)
    software, chip = case.software, case.cluster.chip

    def seconds(constants: Constants) -> Value:
        rates = rates_from_constants(
            chip, constants, clock=software.clock, fused_attention=software.fused_attention,
            has_capacity=software.has_capacity, stack=software.stack, model=case.architecture.name, is_limited=is_limited,
        )  # fmt: skip
        links = scale_rates(case.cluster.topology, constants["link_fraction"], constants["network_fraction"])
        return pricing.at(rates, links).slowest_s()

    return seconds


def run_observation(case: RunCase, measured_s: float, weight: float = 1.0, *, is_limited: bool = True) -> Observation:
    """Return the observation of a training run."""
    return Observation(
        chip=case.cluster.chip.name, stack=case.software.stack, seconds=step_time_function(case, is_limited=is_limited),
        measured_s=measured_s, weight=weight,
    )  # fmt: skip


PriceFunction = Callable[[Constants], Value]
# Deviation of the logarithm of a micro-benchmark's time around the rule that prices it. Repeated, one varies by a hundredth;
# shapes of products differ by a few hundredths around k0, and a busbw does between neighbouring sizes. It is a fifth of
# that of a run, since a run has much besides that no constant knows.
BENCH_SIGMA = 0.03
# Below this a kernel's time is its launch and its last wave: a launch is 5 to 15 microseconds (`CONSTANTS`), which would be
# attributed to a rate.
SHORTEST_S = 5e-5
LADDERS_SCHEMA = '"shardwise.kernels/1"'  # in a file of ladders; a line of a micro-benchmark has no such text
# What the verb `bench` notes beside: the spread of repetitions, their number, where they ran.
NOTED_KEYS = ("low", "high", "repeats", "machine")
COLLECTIVE_KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send_recv")
NARROW_DTYPES = ("fp8", "int8", "fp4", "int4")  # in which products run, and attention does not
GROUP_AXIS = ATOMIC_AXES["tp"][0]  # the innermost axis stands for the devices of a collective


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkTarget:
    """Target of micro-benchmarks: a cluster at nominal rates, its stack, and its clock over the usual one."""

    cluster: Cluster
    stack: Stack
    clock: float

    def rates(self, constants: Constants) -> Rates:
        """Return the rates of the chip at the constants."""
        return rates_from_constants(
            self.cluster.chip, constants, clock=self.clock, fused_attention=not self.stack.unfused_attention,
            has_capacity=False, stack=self.stack, is_limited=False,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkLine:
    """A line of a benchmark file: its description, its observation, and if it is too short to measure a rate."""

    id: str
    observation: Observation
    too_short: bool


def read_benchmark_lines(path: str, target: BenchmarkTarget) -> tuple[BenchmarkLine, ...]:
    """Read the micro-benchmarks of a file of JSON lines, or those of the ladders that `shardwise kernels --json` measured.

    Raises `InputError` with every problem of every line.
    """
    label = f"{argument_label('bench')}: "
    messages = FileMessages(label, "the path of a file is required")
    text = read_text(path, messages, encoding="utf-8-sig")
    if LADDERS_SCHEMA in text:
        places = _ladder_lines(parse_json(text, path, messages), f"{label}{path}")
    else:
        places = {f"{label}{path}: line {number}": line for number, line in enumerate(text.split("\n"), start=1)}
    problems: list[str] = []
    benchmark_lines = [_parse_line(where, line, target, problems) for where, line in places.items() if line.strip()]
    raise_problems(problems)
    return tuple(benchmark_line for benchmark_line in benchmark_lines if benchmark_line)


def _ladder_lines(payload: Any, where: str) -> dict[str, str]:
    """Return the line of the fastest rung of each ladder that measures one, by its place.

    Raises `InputError` where no rung was measured.
    """
    ladders = payload.get("ladders") if isinstance(payload, Mapping) else None
    lines = {}
    for ladder in ladders if isinstance(ladders, list) else ():
        rungs = ladder.get("rungs") if isinstance(ladder, Mapping) else None
        seconds = [rung.get("seconds") for rung in rungs or () if isinstance(rung, Mapping)]
        measured = [value for value in seconds if isinstance(value, (int, float)) and not isinstance(value, bool)]
        if measured and isinstance(ladder.get("benchmark"), Mapping):
            lines[f"{where}: ladder {ladder.get('name')}"] = json.dumps(
                {**ladder["benchmark"], "seconds": min(measured)}
            )
    if not lines:
        raise InputError(f"{where}: no rung was measured; what `shardwise kernels --json` prints on a GPU is required")
    return lines


def _parse_line(where: str, line: str, target: BenchmarkTarget, problems: list[str]) -> BenchmarkLine | None:
    """Return the benchmark of a line, or None after adding its problems."""
    try:
        table = parse_json_line(line)
    except ValueError:
        table = None
    if not isinstance(table, Mapping):
        problems.append(
            f'{where}: found {line.strip()[:40]!r}; a JSON object such as {{"bench": "matmul", ...}} is required'
        )
        return None
    line_reader = LINE_READERS.get(table["bench"]) if isinstance(table.get("bench"), str) else None
    if line_reader is None:
        TableReader(where, table, tuple(table), problems).add_problem("bench", f"one of {', '.join(LINE_READERS)}")
        return None
    keys, read_price = line_reader
    num_problems = len(problems)
    reader = TableReader(where, table, ("bench", "seconds", *keys, *NOTED_KEYS), problems)
    seconds = reader.quantity("seconds", "")
    name, price = read_price(reader, target)
    if len(problems) > num_problems:
        return None
    fastest_s = float(price({**IDEAL_CONSTANTS, "attention_fraction": 1.0}))
    if table["bench"] in ("matmul", "memory") and seconds < fastest_s:
        reader.add_problem("seconds", f"{fastest_s:.3g} or more, what {target.cluster.chip.name} takes at its peak,")
        return None
    too_short = seconds < SHORTEST_S and table["bench"] != "collective"
    observation = Observation(
        chip=target.cluster.chip.name, stack=target.stack, seconds=price, measured_s=seconds
    )  # fmt: skip
    return BenchmarkLine(id=name, observation=observation, too_short=too_short)


def with_weight(line: BenchmarkLine, sigma: float) -> BenchmarkLine:
    """Return the line with its weight in a fit in which a run has the deviation `sigma`."""
    return replace(line, observation=replace(line.observation, weight=(sigma / BENCH_SIGMA) ** 2))


def _read_dtype(reader: TableReader, target: BenchmarkTarget, excluded: tuple[str, ...] = ()) -> str:
    dtypes = [dtype for dtype in target.cluster.chip.peak_flops_per_s if dtype not in excluded]
    dtype = reader.table.get("dtype")
    if dtype not in dtypes:
        reader.add_problem("dtype", f"a format that {target.cluster.chip.name} has a peak of, {' or '.join(dtypes)},")
        return dtypes[0] if dtypes else "bf16"
    return str(dtype)


def _read_matmul(reader: TableReader, target: BenchmarkTarget) -> tuple[str, PriceFunction]:
    """Price [m, k] times [k, n]; the output has at least two bytes per element: narrower operands give bf16."""
    dtype = _read_dtype(reader, target)
    m, n, k = (reader.size(key) for key in ("m", "n", "k"))
    element_bytes = bytes_per_element(dtype)
    num_bytes = (m * k + k * n) * element_bytes + m * n * max(element_bytes, bytes_per_element("bf16"))
    work = KernelWork(2.0 * m * n * k, num_bytes, k, (m, n), 0.0, 0.0, 0.0, False)
    return f"matmul {dtype} {m}x{n}x{k}", lambda constants: target.rates(constants).kernel_s("contract", dtype, work)


def _read_memory(reader: TableReader, target: BenchmarkTarget) -> tuple[str, PriceFunction]:
    """Price a streaming kernel: it moves its bytes once, whatever factor the stack has for elementwise kernels."""
    num_bytes = reader.quantity("bytes", any_size=True)
    return f"memory {num_bytes / 1e6:.4g} MB", lambda constants: num_bytes / target.rates(constants).bytes_per_s


def _read_collective(reader: TableReader, target: BenchmarkTarget) -> tuple[str, PriceFunction]:
    """Price a collective of a group placed like tensor parallelism: on the innermost tier, or a torus' smallest axis."""
    kind = reader.table.get("kind")
    if kind not in COLLECTIVE_KINDS:
        reader.add_problem("kind", f"one of {', '.join(COLLECTIVE_KINDS)}")
        kind = COLLECTIVE_KINDS[0]
    num_bytes, num_problems = reader.quantity("bytes", any_size=True), len(reader.problems)
    devices = reader.size("devices")
    topology = target.cluster.topology
    degrees = {atom: 1 for axis in PLACED_AXES for atom in ATOMIC_AXES.get(axis, (axis,))} | {GROUP_AXIS: devices}
    cuts = cuts_by_axis(topology, default_placement(topology), degrees)
    fills = devices > 1 and math.prod(cut.size for cut in cuts[GROUP_AXIS]) == devices
    if not fills and len(reader.problems) == num_problems:
        levels = " x ".join(map(str, topology.levels))
        reader.add_problem(
            "devices", f"a number of 2 or more that fills {target.cluster.name} ({levels}) from the inside out"
        )
    message_bytes = num_bytes / devices if kind == CollectiveKind.ALL_TO_ALL else num_bytes

    def seconds(constants: Constants) -> Value:
        links = GroupLinks(scale_rates(topology, constants["link_fraction"], constants["network_fraction"]), cuts)
        return collective_s(CollectiveKind(kind), (GROUP_AXIS,), message_bytes, links)

    return f"{kind} {num_bytes / 1e6:.4g} MB on {devices}", seconds


def _read_attention(reader: TableReader, target: BenchmarkTarget) -> tuple[str, PriceFunction]:
    """Price one pass of softmax attention. Forward reads q, k, v and writes the output; backward reads these and the
    output's gradient, and writes three gradients."""
    dtype = _read_dtype(reader, target, NARROW_DTYPES)
    batch, heads, seq_len, head_dim = (reader.size(key) for key in ("batch", "heads", "seq_len", "head_dim"))
    causal, backward = reader.flag("causal"), reader.flag("backward")
    spec = Spec.of(("B", "T", "K", "H"))
    values = SymbolValues({"B": batch, "T": seq_len, "K": heads, "H": head_dim, "span": 0.5 if causal else 1.0})
    scan = (ScanGradient if backward else Scan)((), ())
    elements = float(batch * heads * seq_len * head_dim) * (8 if backward else 4)
    work = KernelWork(
        scan.flops(OperationSharding((spec, spec, spec), ())).evaluate(values), elements * bytes_per_element(dtype),
        0.0, (), 0.0, float(batch * heads * seq_len**2), head_dim, backward,
    )  # fmt: skip
    name = f"attention {dtype} {batch}x{heads}x{seq_len}x{head_dim}{' causal' * causal}{' backward' * backward}"
    return name, lambda constants: target.rates(constants).kernel_s("scan", dtype, work)


# What a line may measure: its keys beside `bench` and `seconds`, and how it is priced.
LINE_READERS: Mapping[
    str, tuple[tuple[str, ...], Callable[[TableReader, BenchmarkTarget], tuple[str, PriceFunction]]]
] = {
    "matmul": (("dtype", "m", "n", "k"), _read_matmul),
    "memory": (("bytes",), _read_memory),
    "collective": (("kind", "devices", "bytes"), _read_collective),
    "attention": (("dtype", "batch", "heads", "seq_len", "head_dim", "causal", "backward"), _read_attention),
}
