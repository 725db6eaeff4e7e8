"""A sharded product and the ways to compute it, as sections."""

from __future__ import annotations

from shardwise.present.cli.section import Block, Row, Section, Table
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
