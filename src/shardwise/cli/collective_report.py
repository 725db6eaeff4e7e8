"""A collective's report as text for people."""

from __future__ import annotations

from shardwise.network.collectives import Algorithm, CollectiveReport
from shardwise.network.topology import Pods, Topology, Torus
from shardwise.units import format_bytes, format_quantity, format_seconds

RULES = {
    "only_16": "an axis wraps only at 16",
    "multiple_of_4": "all axes wrap if every one is a multiple of 4",
    "always": "always",
    "never": "never",
}
NAMES = {"ring": "with wraparound", "ring, one way": "with wraparound, one way", "line": "without wraparound"}


def collective_text(report: CollectiveReport, on: str, topology: Topology) -> str:
    """Time and bound, the alternatives, bytes, and the size at which the bound changes."""
    axes = " x ".join(str(size) for size in report.axes if size > 1)
    lines = [
        f"{_words(report.kind)} of {format_bytes(report.bytes)} over {axes} devices on {on}",
        f"  {format_seconds(report.time_s)}, {report.bound}-bound: streaming {format_seconds(report.bandwidth_s)}, "
        f"latency {format_seconds(report.latency_s)} in {_hops(report.hops)}",
        f"  latency-bound below {format_bytes(report.crossover_bytes)}",
        f"  {format_bytes(report.bytes_received_per_device)} received by each device",
        f"  algbw {_rate(report.algbw)}   busbw {_rate(report.busbw)}",
    ]
    torus = topology.torus if isinstance(topology, Pods) else topology
    if isinstance(topology, Pods) and report.network == "pods":
        rate = _rate(topology.bytes_per_s)
        lines += [
            "",
            f"between pods ({rate} for each chip: its part of its host's egress)",
            *_algorithms(report, "  <- priced"),
        ]
    elif isinstance(torus, Torus):
        lines += ["", *_wraparound(report, on, torus)]
    else:
        lines += ["", "algorithms", *_algorithms(report)]
    return "\n".join(lines)


def _wraparound(report: CollectiveReport, on: str, torus: Torus) -> list[str]:
    """Which axes wrap and why, then the time with and without."""
    shown = [(size, ring) for size, ring in zip(report.axes, report.wraps, strict=True) if size > 1]
    kinds = ", ".join(f"{size} is a {'ring' if ring else 'line'}" for size, ring in shown)
    rule = RULES[torus.wrap_rule]
    rule += "; twisted: around a short axis only together with the long ones" if torus.twisted else ""
    lines = [f"wraparound ({on.partition(':')[0]}: {rule}; a part of an axis is a line)"]
    lines.append(f"  axis of {kinds}")
    if report.kind == "send_recv":
        return lines
    by_name = {one.name: one for one in (_chosen(report), *report.alternatives)}
    for name in sorted(by_name, key=lambda name: (*NAMES, name).index(name)):
        one = by_name[name]
        applies = "  <- applies" if name == report.algorithm else ""
        lines.append(f"  {NAMES.get(name, name):<26}{format_seconds(one.time_s):>9}  {_hops(one.hops)}{applies}")
    return lines


def _algorithms(report: CollectiveReport, first: str = "  <- fastest on any switch") -> list[str]:
    """A line for each algorithm, the one that is priced first."""
    width = max(14, *(len(name) + 2 for name in (report.algorithm, *(one.name for one in report.alternatives))))
    rows = [
        f"  {one.name:<{width}}{format_seconds(one.time_s):>9}   algbw {_rate(one.algbw):>10}   busbw {_rate(one.busbw):>10}   "
        f"{_hops(one.hops)}{first if one.name == report.algorithm else ''}"
        for one in (_chosen(report), *report.alternatives)
    ]
    notes = [f"  {one.name} {one.condition}" for one in report.alternatives if one.condition]
    return rows + notes


def _chosen(report: CollectiveReport) -> Algorithm:
    return Algorithm(
        name=report.algorithm, time_s=report.time_s, latency_s=report.latency_s, bandwidth_s=report.bandwidth_s,
        hops=report.hops, algbw=report.algbw, busbw=report.busbw,
    )  # fmt: skip


def _words(operation: str) -> str:
    return operation.replace("_", "-")


def _hops(count: int) -> str:
    return f"{count} hop{'' if count == 1 else 's'}"


def _rate(bytes_per_s: float) -> str:
    return format_quantity(bytes_per_s, "B/s")
