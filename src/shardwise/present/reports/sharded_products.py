"""Reports of sharded products, resharding and collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.hardware import CollectiveReport, PlacedCollective, Pods, Torus
from shardwise.hardware.network.compare_collective_algorithms import Algorithm
from shardwise.present import charts
from shardwise.present.rendering.numbers import num_bytes, quantity, seconds
from shardwise.present.rendering.report import Block, Cell, Line, Number, Preformatted, Report, Row, Section, Table
from shardwise.price import ProductReport, ProgramCost
from shardwise.price.product import StepCost, TensorFacts
from shardwise.sharding.notation import explain_sums
from shardwise.values import format_bytes, format_quantity, format_seconds

if TYPE_CHECKING:
    from shardwise.verify import CheckedProduct, EmittedProgram
    from shardwise.verify.product_runs import RunResult
    from shardwise.verify.xla_compile import XlaReport

SAME_AMOUNT = 1e-6  # relative difference of bytes or FLOPs that counts as none


def product_report(result: CheckedProduct) -> Report:
    """Report the tensors, the cheapest program, other ways, the four cases from the left, and what checks gave."""
    product, expression = result.product, result.product.expression
    sizes = ", ".join(f"{dim}={size}" for dim, size in expression.sizes.items())
    mesh = f"  mesh {', '.join(f'{axis}={size}' for axis, size in expression.mesh.axes)}   {sizes}   {expression.dtype}"
    tensors = Table(rows=tuple(map(_tensor_row, product.tensors)), head=False, indent=2, line="  {:<22} {}")
    sections = [
        Section([mesh], title=str(expression.expression)),
        Section([tensors, *(f"  note: {note}" for note in explain_sums(expression.expression))]),
        Section(_program_blocks(product.best, ""), title=f"cheapest by {product.objective}"),
        *(
            Section(_program_blocks(cost, f"alternatives.{index}."), title=f"another way: {reason}")
            for index, (cost, reason) in enumerate(product.alternatives)
        ),
        Section(
            _program_blocks(product.by_cases, "by_cases.", with_reasons=True),
            title="by the four cases, from the left",
        ),
    ]
    if product.backward:
        title = "gradients of all operands, by the four cases"
        sections.append(Section(_program_blocks(product.backward, "backward.", with_reasons=True), title=title))
    sections += [_run_section(result.run)] if result.run else []
    return [*sections, *([_xla_section(product.best, result.xla)] if result.xla else [])]


def program_source(program: EmittedProgram) -> str:
    """Return the source, which is for an interpreter and no report."""
    return program.source


def holder_sections(product: ProductReport) -> Report:
    """Return sections of characters that show which device holds what, before each step of the cheapest program and after."""
    mesh = product.expression.mesh
    return [
        Section([_unfolded(charts.draw_text(moment.name, moment.spec, mesh))], title=moment.heading)
        for moment in charts.moments(product.expression, product.steps)
    ]


def _unfolded(text: str) -> Preformatted:
    return Preformatted(lambda width: text.split("\n"))


def drawn_section(target: str) -> Section:
    """Say where a picture was drawn."""
    return Section([f"drawn to {target}"])


def _tensor_row(tensor: TensorFacts) -> Row:
    shape = ", ".join(map(str, tensor.local_shape))
    copies = "each shard once" if tensor.copies == 1 else f"each shard {tensor.copies} times"
    read = f", read in {format_seconds(tensor.load_s)}" if tensor.load_s is not None else ""
    return (
        tensor.name + tensor.sharding,
        f"[{shape}] on each device, {format_bytes(tensor.bytes_per_device)}{read}; {copies}, "
        f"{format_bytes(tensor.total_bytes)} in all",
    )


def _program_blocks(cost: ProgramCost, path: str, *, with_reasons: bool = False) -> list[Block]:
    """Return the steps of a program, its totals and its result; `path` is its place in the payload."""
    rows = tuple(
        _step_row(step, f"{path}program.{index}.", with_reasons=with_reasons) for index, step in enumerate(cost.program)
    )
    totals: list[Cell] = [
        "  = ", num_bytes(cost.bytes_per_device, f"{path}bytes_per_device"), " received and ",
        quantity(cost.flops_per_device, "FLOP", f"{path}flops_per_device"), " on each device",
    ]  # fmt: skip
    if cost.math_s is not None:
        totals += [
            "; compute ", seconds(cost.math_s, f"{path}time_s.math"),
            ", communication ", seconds(cost.comms_s, f"{path}time_s.comms"),
            ", together ", seconds(cost.lower_s, f"{path}time_s.lower"), " to ", seconds(cost.upper_s, f"{path}time_s.upper"),
        ]  # fmt: skip
    time = "{:>9}" if cost.math_s is not None else "{}"
    line = "  {:<26} {:<14} {:>12} " + time + "   {}" + ("\n      {}" if with_reasons else "")
    steps = [Table(rows=rows, right=(2, 3), head=False, indent=2, line=line)] if rows else []
    return [*steps, Line(tuple(totals)), f"  -> {cost.result}"]


def _step_row(step: StepCost, path: str, *, with_reasons: bool) -> Row:
    axes = f" over {','.join(step.axes)}" if step.axes else ""
    amount = (
        quantity(step.flops, "FLOP", f"{path}flops")
        if step.is_local
        else num_bytes(step.bytes_per_device, f"{path}bytes_per_device")
    )
    time = "" if step.time_s is None else seconds(step.time_s, f"{path}time_s")
    row: Row = (step.op + axes, step.operand, amount, time, f"{step.before} -> {step.after}")
    return (*row, step.reason or "") if with_reasons else row


def _run_section(run: RunResult) -> Section:
    error = Number(f"{run.max_relative_error:.1e}", run.max_relative_error, path="max_relative_error", kind="measured")
    where = f"run with {run.framework} on {run.num_devices} devices"
    return Section([Line((f"{where}: largest relative error ", error))])


def _xla_section(best: ProgramCost, xla: XlaReport) -> Section:
    """Return what XLA's partitioner moves, by collective, and how the cheapest program compares."""
    head = Line(
        (
            f"XLA ({xla.backend}) moves ", num_bytes(xla.bytes_per_device, "verify.bytes_per_device"), " to each device, ",
            quantity(xla.flops_per_device, "FLOP", "verify.flops_per_device"),
        )
    )  # fmt: skip
    collectives = [
        Line(
            (
                f"  {collective.op} over {','.join(collective.axes) if collective.axes else 'no set of axes'}: ",
                num_bytes(collective.bytes, f"verify.collectives.{index}.bytes"),
            )
        )
        for index, collective in enumerate(xla.collectives)
    ]
    return Section([head, *collectives, f"  {_comparison_text(best, xla)}"])


def _comparison_text(best: ProgramCost, xla: XlaReport) -> str:
    """Return how the cheapest program compares with the compiler's."""
    if abs(best.flops_per_device - xla.flops_per_device) > SAME_AMOUNT * max(xla.flops_per_device, 1.0):
        return f"not comparable: it runs {format_quantity(best.flops_per_device, 'FLOP')} in the program above"
    if abs(best.bytes_per_device - xla.bytes_per_device) <= SAME_AMOUNT * max(best.bytes_per_device, 1.0):
        return "the program above moves the same bytes"
    less = best.bytes_per_device < xla.bytes_per_device
    return f"the program above moves {'fewer' if less else 'more'} bytes: {format_bytes(best.bytes_per_device)}"


WRAP_RULE_TEXTS = {
    "only_16": "an axis wraps only at 16",
    "multiple_of_4": "all axes wrap if every one is a multiple of 4",
    "always": "always",
    "never": "never",
}
RING_TEXTS = {"ring": "with wraparound", "ring, one way": "with wraparound, one way", "line": "without wraparound"}


def collective_report(collective: PlacedCollective) -> Report:
    """Report time and bound, bytes, and the size at which the bound changes; then the alternatives."""
    report = collective.report
    axes = " x ".join(str(size) for size in report.axes if size > 1)
    lines = [
        Line(
            (
                "  ", seconds(report.time_s, "time_s"), f", {report.bound}-bound: streaming ",
                seconds(report.bandwidth_s, "bandwidth_s"), ", latency ", seconds(report.latency_s, "latency_s"),
                f" in {_hops_text(report.hops)}",
            )
        ),
        Line(("  latency-bound below ", num_bytes(report.crossover_bytes, "crossover_bytes"))),
        Line(("  ", num_bytes(report.bytes_received_per_device, "bytes_received_per_device"), " received by each device")),
        Line(
            (
                "  algbw ", quantity(report.algbw, "B/s", "algbw"), "   busbw ", quantity(report.busbw, "B/s", "busbw"),
            )
        ),
    ]  # fmt: skip
    name = report.kind.replace("_", "-")
    title = f"{name} of {format_bytes(report.bytes)} over {axes} devices on {collective.on}"
    return [Section(lines, title=title), _alternatives_section(collective)]


def _alternatives_section(collective: PlacedCollective) -> Section:
    report, topology, torus = collective.report, collective.topology, collective.torus
    if isinstance(topology, Pods) and report.network == "pods":
        rate = format_quantity(topology.bytes_per_s, "B/s")
        title = f"between pods ({rate} for each chip: its part of its host's egress)"
        return Section(_algorithm_blocks(report, "<- priced"), title=title)
    if torus is not None:
        return _wraparound_section(report, collective.on, torus)
    return Section(_algorithm_blocks(report, "<- fastest on any switch"), title="algorithms")


def _wraparound_section(report: CollectiveReport, on: str, torus: Torus) -> Section:
    """Return which axes wrap and why, then the time with and without."""
    spanned = [(size, ring) for size, ring in zip(report.axes, report.wraps, strict=True) if size > 1]
    kinds = ", ".join(f"{size} is a {'ring' if ring else 'line'}" for size, ring in spanned)
    rule = WRAP_RULE_TEXTS[torus.wrap_rule]
    rule += "; twisted: around a short axis only together with the long ones" if torus.twisted else ""
    title = f"wraparound ({on.partition(':')[0]}: {rule}; a part of an axis is a line)"
    if report.kind == "send_recv":
        return Section([f"  axis of {kinds}"], title=title)
    by_name = {algorithm.name: (algorithm, path) for algorithm, path in _algorithms(report)}
    rows: list[Row] = []
    for name in sorted(by_name, key=lambda name: (*RING_TEXTS, name).index(name)):
        algorithm, path = by_name[name]
        applies = "<- applies" if name == report.algorithm else ""
        time = seconds(algorithm.time_s, f"{path}time_s")
        rows.append((RING_TEXTS.get(name, name), time, _hops_text(algorithm.hops), applies))
    table = Table(rows=tuple(rows), right=(1,), head=False, indent=2, line="  {:<26}{:>9}  {}  {}")
    return Section([f"  axis of {kinds}", table], title=title)


def _algorithm_blocks(report: CollectiveReport, mark: str) -> list[Block]:
    """Return a line for each algorithm, the one that is priced first and marked."""
    rows: tuple[Row, ...] = tuple(
        (
            algorithm.name, seconds(algorithm.time_s, f"{path}time_s"),
            _bandwidth("algbw", algorithm.algbw, path), _bandwidth("busbw", algorithm.busbw, path),
            _hops_text(algorithm.hops), mark if algorithm.name == report.algorithm else "",
        )
        for algorithm, path in _algorithms(report)
    )  # fmt: skip
    width = max(14, *(len(str(row[0])) + 2 for row in rows))
    line = f"  {{:<{width}}}{{:>9}}   {{}}   {{}}   {{}}  {{}}"
    notes = [f"  {algorithm.name} {algorithm.condition}" for algorithm in report.alternatives if algorithm.condition]
    return [Table(rows=rows, right=(1,), head=False, indent=2, line=line), *notes]


def _algorithms(report: CollectiveReport) -> list[tuple[Algorithm, str]]:
    """Return the chosen algorithm, then the alternatives, each with its place in the payload."""
    chosen = Algorithm(
        name=report.algorithm, time_s=report.time_s, latency_s=report.latency_s, bandwidth_s=report.bandwidth_s,
        hops=report.hops, algbw=report.algbw, busbw=report.busbw,
    )  # fmt: skip
    alternatives = [(algorithm, f"alternatives.{index}.") for index, algorithm in enumerate(report.alternatives)]
    return [(chosen, ""), *alternatives]


def _bandwidth(name: str, bytes_per_s: float, path: str) -> Number:
    return Number(f"{name} {format_quantity(bytes_per_s, 'B/s'):>10}", bytes_per_s, "B/s", f"{path}{name}")


def _hops_text(count: int) -> str:
    return f"{count} hop{'' if count == 1 else 's'}"
