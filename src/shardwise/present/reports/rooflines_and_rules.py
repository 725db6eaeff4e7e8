"""Reports of the books' formulas (rooflines of kernels and blocks, rules, number formats) and of their figures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from shardwise import book_formulas
from shardwise.present.rendering.numbers import count, fixed, num_bytes, quantity, seconds, share, significant
from shardwise.present.rendering.report import Block, Cell, Line, Number, Report, Row, Section, Table, facts_table
from shardwise.values import format_bytes, format_quantity, format_seconds

if TYPE_CHECKING:
    from shardwise.book_formulas import BlockRoofline, KernelComparison, KernelRoofline, NamedRule, RuleValue
    from shardwise.book_formulas.rooflines import OperationTime
    from shardwise.book_formulas.rule_parameters import RuleParameter
    from shardwise.book_formulas.rules.kernel_costs import KernelCost
    from shardwise.present.figures.figure import FigureSet
    from shardwise.values import NumberFormat
    from shardwise.values.dtypes import FormatComparison


INTENSITY = "FLOP/B"
ORIGIN_TEXTS = {"hbm": "the chip's", "host": "the chip's from its host", "vmem": "the chip's from VMEM"}


def roofline_report(comparison: KernelComparison) -> Report:
    """Report one kernel, or several side by side."""
    if len(comparison.rooflines) > 1:
        return _compared_kernels(comparison)
    (roofline,) = comparison.rooflines
    title = f"{roofline.form.name} {roofline.shapes} in {_formats_text(roofline)} on {comparison.chip.name}"
    rows: tuple[Row, ...] = tuple(
        (
            name, quantity(rate, "B/s", f"links.{name}.bytes_per_s"),
            fixed(roofline.flops_per_s / rate, 1, f"links.{name}.critical_intensity", INTENSITY),
        )
        for name, rate in comparison.links.items()
    )  # fmt: skip
    links = Table(rows=rows, right=(1, 2), head=False, indent=2, line="  {:<14}{:>10}  {:>10}")
    return [
        Section(list(_kernel_lines(roofline, comparison.origin)), title=title),
        *([Section([links], title="what a byte sent must go with, FLOPs/byte")] if rows else []),
    ]


def _formats_text(roofline: KernelRoofline) -> str:
    weights = [f"{roofline.weights} weights"] if roofline.weights != roofline.dtype else []
    return ", ".join([roofline.dtype, *weights, *roofline.options])


def _kernel_lines(roofline: KernelRoofline, origin: str) -> Iterator[Block]:
    """Yield what binds a kernel, how long each stage takes, from which size compute binds, and what padding wastes."""
    yield Line(
        (
            f"  {roofline.bound}-bound: intensity ", fixed(roofline.cost.intensity, 1, "intensity", INTENSITY),
            f" FLOPs/byte, {ORIGIN_TEXTS[origin]} ", fixed(roofline.critical_intensity, 1, "critical_intensity", INTENSITY),
        )
    )  # fmt: skip
    yield Table(rows=tuple(_stage_rows(roofline)), right=(1,), head=False, indent=2, line="  {:<8}{:>9}   {}")
    yield _critical_line(roofline)
    if roofline.padding_efficiency is not None:
        yield _padding_line(roofline, roofline.padding_efficiency)


def _stage_rows(roofline: KernelRoofline) -> Iterator[Row]:
    """Yield compute, each transfer, and what they take together."""
    cost, bounds = roofline.cost, roofline.bounds
    *transfers, compute = roofline.staging.stages
    rate = format_quantity(compute.rate, "FLOP/s", digits=4)
    yield (
        "compute", seconds(compute.seconds, f"stages.{len(transfers)}.seconds"),
        f"{format_quantity(compute.amount, 'FLOP')} at {rate}",
    )  # fmt: skip
    moved = f"{format_bytes(cost.read_bytes)} read and {format_bytes(cost.written_bytes)} written"
    for index, stage in enumerate(transfers):
        transfer_rate = format_quantity(stage.rate, "B/s")
        yield stage.name, seconds(stage.seconds, f"stages.{index}.seconds"), f"{moved} at {transfer_rate}"
    yield (
        "time", seconds(bounds.lower_s, "time_s"),
        f"overlapped, {format_seconds(bounds.upper_s)} one after the other; at most "
        f"{format_quantity(roofline.attainable_flops_per_s, 'FLOP/s')}, "
        f"{roofline.attainable_flops_per_s / roofline.flops_per_s:.1%} of the peak",
    )  # fmt: skip


def _critical_line(roofline: KernelRoofline) -> Block:
    slowest = min(roofline.staging.stages[:-1], key=lambda stage: stage.rate).name
    if not roofline.critical_letters:
        return f"  {slowest}-bound at every size"
    letters, size = " = ".join(roofline.critical_letters), roofline.critical_size
    if math.isinf(size):
        return f"  {slowest}-bound at every {letters}"
    if not size:
        return f"  compute-bound at every {letters}"
    return Line((f"  compute-bound from {letters} = ", fixed(size, 1, "critical_size")))


def _padding_line(roofline: KernelRoofline, efficiency: float) -> Block:
    side, bounds = roofline.matrix_unit, roofline.padded_bounds
    parts: list[Cell] = [
        f"  padded to the matrix unit of {side} x {side}: ", share(efficiency, "padding.efficiency"),
        " of its FLOPs are useful",
    ]  # fmt: skip
    if efficiency != 1 and bounds is not None:
        parts += [
            ", compute ", seconds(roofline.cost.flops / efficiency / roofline.flops_per_s, "padding.math_s"),
            ", time ", seconds(bounds.lower_s, "padding.time_s"),
        ]  # fmt: skip
    return Line(tuple(parts))


def _compared_kernels(comparison: KernelComparison) -> Report:
    first = comparison.rooflines[0]
    title = (
        f"on {comparison.chip.name} in {first.dtype}, from {comparison.origin}: compute-bound from "
        f"{first.critical_intensity:,.1f} FLOPs/byte"
    )
    rows = []
    for index, roofline in enumerate(comparison.rooflines):
        path = f"with.{index - 1}." if index else ""
        rows.append(_roofline_row(" ".join([roofline.label, *roofline.options]), roofline.cost, roofline, path))
    return [Section([_roofline_table("kernel", rows)], title=title)]


def block_report(block: BlockRoofline) -> Report:
    """Report a block: a table for each phase, and what its kernels take one after the other."""
    head = Line(
        (
            f"block of {block.model}, {block.num_seqs:,} x {block.seq_len:,} tokens in {block.dtype} on {block.chip.name}: "
            "compute-bound from ", fixed(block.critical_intensity, 1, "critical_intensity", INTENSITY), " FLOPs/byte",
        )
    )  # fmt: skip
    return [Section([head]), *(_phase_section(block, phase) for phase in block.phases)]


def _phase_section(block: BlockRoofline, phase: str) -> Section:
    rows = [
        _roofline_row(
            _operation_name(operation), operation, operation, f"operations.{index}."
        )
        for index, operation in enumerate(block.operations)
        if operation.phase == phase
    ]  # fmt: skip
    time_s, flops = block.total_s(phase), block.total_flops(phase)
    total = Line(
        (
            "  = ", seconds(time_s, f"phases.{phase}.time_s"), " kernel after kernel, ",
            share(block.total_s(phase, "compute") / time_s), " of it bound by compute; ",
            quantity(flops, "FLOP", f"phases.{phase}.flops"), ", ", share(flops / block.flops_per_s / time_s),
            " of the peak",
        )
    )  # fmt: skip
    return Section([_roofline_table(phase, rows), total])


def _operation_name(operation: OperationTime) -> str:
    """Return the name of an operation; elementwise ones that run as one kernel are named by the last."""
    fused = f" ({operation.num_operations} fused)" if operation.num_operations > 1 else ""
    return f"{operation.name}{fused}"


def _roofline_row(name: str, cost: KernelCost | OperationTime, times: KernelRoofline | OperationTime, path: str) -> Row:
    computes = bool(cost.flops)
    return (
        name,
        quantity(cost.flops, "FLOP", f"{path}flops") if computes else "-",
        num_bytes(cost.moved_bytes, f"{path}moved_bytes"),
        fixed(cost.intensity, 1, f"{path}intensity", INTENSITY) if computes else "-",
        seconds(times.math_s, f"{path}math_s") if computes else "-",
        seconds(times.memory_s, f"{path}memory_s"),
        times.bound,
    )


def _roofline_table(title: str, rows: Sequence[Row]) -> Table:
    """Return a table of FLOPs, bytes, intensity, compute, memory traffic and what binds, a line for each kernel."""
    head: Row = (title, "FLOPs", "bytes", "FLOPs/byte", "compute", "memory", "bound by")
    width = max(len(str(row[0])) for row in (head, *rows))
    line = f"  {{:<{width}}}{{:>13}}{{:>10}}{{:>12}}{{:>13}}{{:>11}}  {{}}"
    return Table(rows=(head, *rows), right=range(1, 6), indent=2, line=line)


def rule_report(rule: NamedRule) -> Report:
    """Report what a rule takes and gives, its formula, what it assumes and its source."""
    rows: list[Row] = [("takes", "unit", "default"), *map(_parameter_row, rule.parameters)]
    takes = [Section([Table(rows=tuple(rows), indent=2)])] if rule.parameters else []
    gives = [("gives", rule.unit)] if rule.unit else []
    facts = [*gives, *_rule_facts(rule), ("letters", rule.letters), ("remarks", rule.remarks)]
    return [Section([f"  {rule.summary}"], title=rule.name), *takes, Section([_facts_with_text(facts)])]


def rule_value_report(rule_value: RuleValue) -> Report:
    """Report what a rule gives for its arguments, how, and after whom."""
    rule, parts = rule_value.rule, rule_value.parts
    used = [parameter for parameter in rule.parameters if rule_value.arguments[parameter.name] is not None]
    arguments = ", ".join(f"{parameter.name} = {_argument_text(parameter, rule_value)}" for parameter in used)
    facts = _facts_with_text([("given", arguments), *_rule_facts(rule)])
    if len(parts) == 1:
        return [Section([f"  {rule.summary}", facts], title=f"{rule.name} = {parts[0].text}")]
    rows: tuple[Row, ...] = tuple(
        (part.name, Number(part.text, part.value if math.isfinite(part.value) else None, part.unit, f"values.{index}.value"))
        for index, part in enumerate(parts)
    )  # fmt: skip
    table = Table(rows=rows, right=(1,), head=False, indent=2)
    return [Section([f"  {rule.summary}"], title=rule.name), Section([table]), Section([facts])]


def _parameter_row(parameter: RuleParameter) -> Row:
    default = "required" if parameter.required else parameter.default_text or "none"
    choices = f" (one of {', '.join(parameter.choices)})" if parameter.choices else ""
    return (parameter.name, parameter.unit or "-", default + choices)


def _rule_facts(rule: NamedRule) -> list[tuple[str, str]]:
    return [("formula", rule.formula), ("assumes", rule.assumes), ("differs", rule.differs), ("source", rule.source)]


def _facts_with_text(facts: list[tuple[str, str]]) -> Table:
    return facts_table([(name, text) for name, text in facts if text])


def _argument_text(parameter: RuleParameter, rule_value: RuleValue) -> str:
    """Return an argument as a report writes it: a model by its name."""
    value = rule_value.arguments[parameter.name]
    if isinstance(value, (int, float)):
        return book_formulas.quantity_text(value, parameter.unit)
    return str(getattr(value, "name", value))


def formats_report(comparison: FormatComparison) -> Report:
    """Report number formats, a line for each."""
    head: Row = (
        "format", "bits", "sign", "exponent", "mantissa", "bias", "largest", "smallest normal", "smallest", "epsilon",
        "numbers", "inf", "nan",
    )  # fmt: skip
    notes = (
        "smallest: the smallest number above 0, a subnormal one but in e8m0; epsilon: from 1 to the next number;",
        "numbers: codes that are finite numbers.",
    )
    rows = [_format_row(number_format, f"formats.{index}.") for index, number_format in enumerate(comparison.formats)]
    return [Section([Table(rows=(head, *rows), right=range(1, 11))]), Section(notes)]


def _format_row(number_format: NumberFormat, path: str) -> Row:
    bits = ("bits", "sign_bits", "exponent_bits", "mantissa_bits", "bias")
    sizes = ("max", "min_normal", "min_subnormal", "epsilon")
    return (
        number_format.name,
        *(count(getattr(number_format, name), f"{path}{name}") for name in bits),
        *(significant(getattr(number_format, name), f"{path}{name}") for name in sizes),
        count(number_format.num_finite, f"{path}num_finite"),
        "yes" if number_format.has_infinity else "-",
        "yes" if number_format.has_nan else "-",
    )


def figures_report(figures: FigureSet) -> Report:
    """Report the files that figures were drawn to; otherwise names by book, with where the originals are and what they show."""
    if figures.files:
        return [Section(figures.files)]
    books: dict[str, list[str]] = {}
    for figure in figures.figures:
        lines = books.setdefault(f"{figure.book.title}  {figure.book.url}", [])
        lines += [f"  {figure.name}: {figure.section}", f"    {figure.original}", f"    here: {figure.here}"]
    return [Section(lines, title=title) for title, lines in books.items()]
