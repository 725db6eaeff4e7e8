"""What a machine reaches, as sections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.hardware import BENCH_ONLY_CONSTANTS, CONSTANTS
from shardwise.measure.microbenchmarks.benchmark_lines import describe_line, format_rate
from shardwise.measure.microbenchmarks.machine_benchmark import MachineResult
from shardwise.present.cli.section import Block, Report, Row, Section, Table
from shardwise.values import format_bytes, format_seconds


def bench_report(lines: Sequence[Mapping[str, Any]], machine: str, before: int, out: str | None) -> Report:
    """Each line with its rate and how far its repetitions lie apart; `before` of them were measured earlier."""
    rows: tuple[Row, ...] = tuple(
        (describe_line(line), format_seconds(line["seconds"]), format_rate(line),
         f"spread {(line['high'] - line['low']) / line['seconds']:.0%}")
        for line in lines
    )  # fmt: skip
    told = [f"{before} more are in {out} already"] if before else []
    told += [f"{len(lines)} lines added to {out}"] if out else []
    return [
        Section(
            [
                *(
                    [Table(rows=rows, right=(1,), head=False, indent=2, line="  {:<44}{:>10}  {:<16} {}")]
                    if rows
                    else []
                ),
                *told,
            ],
            title=machine,
        )
    ]


def machine_report(found: MachineResult, out: str | None) -> Report:
    """Rates of a whole machine, and the constants that predictions for it use."""
    chip, calibration = found.cluster.chip, found.calibration
    peaks = ", ".join(f"{name} {peak / 1e9:,.0f} GFLOP/s" for name, peak in chip.peak_flops_per_s.items())
    rows: tuple[Row, ...] = tuple(
        (name, f"{value:.4g}", {**CONSTANTS, **BENCH_ONLY_CONSTANTS}[name].meaning)
        for name, value in calibration.constants.items()
    )
    checked = ", ".join(f"{miss:.2f} (d_model {name})" for name, miss in found.measured_over_predicted.items())
    low, high = calibration.spread["dense"]
    title = f"{found.cluster.name}: {found.cluster.num_devices} processes, each with {format_bytes(chip.memory_bytes)}"
    lines: list[Block] = [
        f"  products: {peaks}; memory: {format_bytes(chip.memory_bytes_per_s)}/s",
        Table(rows=rows, right=(1,), head=False, indent=2, line="  {:<22}{:>10}  {}"),
        f"whole steps, measured over predicted, which nothing is fitted to: {checked}",
        f"90% prediction interval: {low:.2f} to {high:.2f} times a prediction",
    ]
    return [Section([*lines, *([f"written to {out}"] if out is not None else [])], title=title)]
