"""Reports of sharded products, resharding and collectives."""

from __future__ import annotations

from shardwise.hardware import Pods, Topology, Torus
from shardwise.hardware.network.compare_collective_algorithms import Algorithm, CollectiveReport
from shardwise.present.rendering.report import Block, Report, Row, Section, Table
from shardwise.price import ProductReport, ProgramCost
from shardwise.price.product import StepCost, TensorFacts
from shardwise.sharding.notation import explain_sums
from shardwise.values import format_bytes, format_quantity, format_seconds


def product_report(report: ProductReport) -> list[Section]:
    """The tensors, the cheapest program, other ways, and the four cases from the left."""
    made = report.expression
    sizes = ", ".join(f"{dim}={size}" for dim, size in made.sizes.items())
    mesh = f"  mesh {', '.join(f'{a}={n}' for a, n in made.mesh.axes)}   {sizes}   {made.dtype}"
    tensors = Table(rows=tuple(map(_tensor, report.tensors)), head=False, indent=2, line="  {:<22} {}")
    sections = [
        Section([mesh], title=str(made.expression)),
        Section([tensors, *(f"  note: {note}" for note in explain_sums(made.expression))]),
        Section(_program(report.best), title=f"cheapest by {report.objective}"),
        *(Section(_program(cost), title=f"another way: {reason}") for cost, reason in report.alternatives),
        Section(_program(report.by_cases, reasons=True), title="by the four cases, from the left"),
    ]
    if report.backward:
        title = "gradients of all operands, by the four cases"
        sections.append(Section(_program(report.backward, reasons=True), title=title))
    return sections


def _tensor(tensor: TensorFacts) -> Row:
    shape = ", ".join(map(str, tensor.local_shape))
    copies = "each shard once" if tensor.copies == 1 else f"each shard {tensor.copies} times"
    read = f", read in {format_seconds(tensor.load_s)}" if tensor.load_s is not None else ""
    return (
        tensor.name + tensor.sharding,
        f"[{shape}] on each device, {format_bytes(tensor.bytes_per_device)}{read}; {copies}, "
        f"{format_bytes(tensor.total_bytes)} in all",
    )


def _program(cost: ProgramCost, *, reasons: bool = False) -> list[Block]:
    rows = tuple(_step(step, reasons) for step in cost.program)
    flops = format_quantity(cost.flops_per_device, "FLOP")
    totals = f"  = {format_bytes(cost.bytes_per_device)} received and {flops} on each device"
    if cost.math_s is not None and cost.comms_s is not None and cost.lower_s is not None and cost.upper_s is not None:
        totals += (
            f"; compute {format_seconds(cost.math_s)}, communication {format_seconds(cost.comms_s)}, "
            f"together {format_seconds(cost.lower_s)} to {format_seconds(cost.upper_s)}"
        )
    line = "  {:<26} {:<14} {:>12} {}   {}" + ("\n      {}" if reasons else "")
    steps = [Table(rows=rows, right=(2, 3), head=False, indent=2, line=line)] if rows else []
    return [*steps, totals, f"  -> {cost.result}"]


def _step(step: StepCost, reasons: bool) -> Row:
    axes = f" over {','.join(step.axes)}" if step.axes else ""
    amount = format_quantity(step.flops, "FLOP") if step.is_local else format_bytes(step.bytes_per_device)
    seconds = f"{format_seconds(step.time_s):>9}" if step.time_s is not None else ""
    row: Row = (step.op + axes, step.operand, amount, seconds, f"{step.before} -> {step.after}")
    return (*row, step.reason or "") if reasons else row


RULES = {
    "only_16": "an axis wraps only at 16",
    "multiple_of_4": "all axes wrap if every one is a multiple of 4",
    "always": "always",
    "never": "never",
}
NAMES = {"ring": "with wraparound", "ring, one way": "with wraparound, one way", "line": "without wraparound"}


def collective_sections(report: CollectiveReport, on: str, topology: Topology) -> Report:
    """Time and bound, bytes, and the size at which the bound changes; then the alternatives."""
    axes = " x ".join(str(size) for size in report.axes if size > 1)
    lines = [
        f"  {format_seconds(report.time_s)}, {report.bound}-bound: streaming {format_seconds(report.bandwidth_s)}, "
        f"latency {format_seconds(report.latency_s)} in {_hops(report.hops)}",
        f"  latency-bound below {format_bytes(report.crossover_bytes)}",
        f"  {format_bytes(report.bytes_received_per_device)} received by each device",
        f"  algbw {_rate(report.algbw)}   busbw {_rate(report.busbw)}",
    ]
    head = Section(lines, title=f"{_words(report.kind)} of {format_bytes(report.bytes)} over {axes} devices on {on}")
    return [head, _ways(report, on, topology)]


def _ways(report: CollectiveReport, on: str, topology: Topology) -> Section:
    torus = topology.torus if isinstance(topology, Pods) else topology
    if isinstance(topology, Pods) and report.network == "pods":
        rate = _rate(topology.bytes_per_s)
        title = f"between pods ({rate} for each chip: its part of its host's egress)"
        return Section(_algorithms(report, "<- priced"), title=title)
    if isinstance(torus, Torus):
        return _wraparound(report, on, torus)
    return Section(_algorithms(report, "<- fastest on any switch"), title="algorithms")


def _wraparound(report: CollectiveReport, on: str, torus: Torus) -> Section:
    """Which axes wrap and why, then the time with and without."""
    shown = [(size, ring) for size, ring in zip(report.axes, report.wraps, strict=True) if size > 1]
    kinds = ", ".join(f"{size} is a {'ring' if ring else 'line'}" for size, ring in shown)
    rule = RULES[torus.wrap_rule]
    rule += "; twisted: around a short axis only together with the long ones" if torus.twisted else ""
    title = f"wraparound ({on.partition(':')[0]}: {rule}; a part of an axis is a line)"
    if report.kind == "send_recv":
        return Section([f"  axis of {kinds}"], title=title)
    by_name = {one.name: one for one in (_chosen(report), *report.alternatives)}
    rows: list[Row] = []
    for name in sorted(by_name, key=lambda name: (*NAMES, name).index(name)):
        one = by_name[name]
        applies = "<- applies" if name == report.algorithm else ""
        rows.append((NAMES.get(name, name), format_seconds(one.time_s), _hops(one.hops), applies))
    table = Table(rows=tuple(rows), right=(1,), head=False, indent=2, line="  {:<26}{:>9}  {}  {}")
    return Section([f"  axis of {kinds}", table], title=title)


def _algorithms(report: CollectiveReport, first: str) -> list[Block]:
    """A line for each algorithm, the one that is priced first."""
    rows: tuple[Row, ...] = tuple(
        (
            one.name, format_seconds(one.time_s), f"algbw {_rate(one.algbw):>10}", f"busbw {_rate(one.busbw):>10}",
            _hops(one.hops), first if one.name == report.algorithm else "",
        )
        for one in (_chosen(report), *report.alternatives)
    )  # fmt: skip
    width = max(14, *(len(str(row[0])) + 2 for row in rows))
    line = f"  {{:<{width}}}{{:>9}}   {{}}   {{}}   {{}}  {{}}"
    notes = [f"  {one.name} {one.condition}" for one in report.alternatives if one.condition]
    return [Table(rows=rows, right=(1,), head=False, indent=2, line=line), *notes]


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
