"""Reports of the books' formulas: rooflines of kernels and blocks, rules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shardwise.present.rendering.report import Block, Report, Row, Section, Table, facts_table
from shardwise.values import format_bytes, format_quantity, format_seconds

if TYPE_CHECKING:
    from shardwise.book_formulas.named_rules import NamedRule, RuleValue
    from shardwise.book_formulas.rule_parameters import RuleParameter


def kernel_report(payload: Mapping[str, Any]) -> Report:
    """One kernel: what binds it, and how long each stage takes."""
    title = f"{payload['kernel']} {payload['shapes']} in {_stored(payload)} on {payload['chip']}"
    rows: tuple[Row, ...] = tuple(
        (name, format_quantity(link["bytes_per_s"], "B/s"), f"{link['critical_intensity']:,.1f}")
        for name, link in payload["links"].items()
    )
    links = Table(rows=rows, right=(1, 2), head=False, indent=2, line="  {:<14}{:>10}  {:>10}")
    return [
        Section(list(_verdict(payload)), title=title),
        *([Section([links], title="what a byte sent must go with, FLOPs/byte")] if rows else []),
    ]


def _stored(payload: Mapping[str, Any]) -> str:
    weights = [f"{payload['weights']} weights"] if payload["weights"] != payload["dtype"] else []
    return ", ".join([payload["dtype"], *weights, *payload["options"]])


def _verdict(payload: Mapping[str, Any]) -> Iterator[Block]:
    origin = {"hbm": "the chip's", "host": "the chip's from its host", "vmem": "the chip's from VMEM"}[payload["from"]]
    yield (
        f"  {payload['bound']}-bound: intensity {payload['intensity']:,.1f} FLOPs/byte, "
        f"{origin} {payload['critical_intensity']:,.1f}"
    )
    yield Table(rows=tuple(_stages(payload)), right=(1,), head=False, indent=2, line="  {:<8}{:>9}   {}")
    yield _critical(payload)
    if payload["padding"]:
        yield _padded(payload["padding"])


def _stages(payload: Mapping[str, Any]) -> Iterator[Row]:
    """Compute, each transfer, and what they take together."""
    share = payload["attainable_flops_per_s"] / payload["peak_flops_per_s"]
    *transfers, compute = payload["stages"]
    rate = format_quantity(compute["rate"], "FLOP/s", digits=4)
    yield "compute", format_seconds(compute["seconds"]), f"{format_quantity(compute['amount'], 'FLOP')} at {rate}"
    moved = f"{format_bytes(payload['read_bytes'])} read and {format_bytes(payload['written_bytes'])} written"
    for stage in transfers:
        yield stage["name"], format_seconds(stage["seconds"]), f"{moved} at {format_quantity(stage['rate'], 'B/s')}"
    yield (
        "time", format_seconds(payload["time_s"]),
        f"overlapped, {format_seconds(payload['no_overlap_s'])} one after the other; at most "
        f"{format_quantity(payload['attainable_flops_per_s'], 'FLOP/s')}, {share:.1%} of the peak",
    )  # fmt: skip


def _critical(payload: Mapping[str, Any]) -> str:
    slowest = min(payload["stages"][:-1], key=lambda stage: float(stage["rate"]))["name"]
    if not payload["critical_letters"]:
        return f"  {slowest}-bound at every size"
    letters, size = " = ".join(payload["critical_letters"]), payload["critical_size"]
    if size is None:
        return f"  {slowest}-bound at every {letters}"
    return f"  compute-bound from {letters} = {size:,.1f}" if size else f"  compute-bound at every {letters}"


def _padded(padding: Mapping[str, Any]) -> str:
    side = padding["matrix_unit"]
    unit = f"  padded to the matrix unit of {side} x {side}: {padding['efficiency']:.1%} of its FLOPs are useful"
    if padding["efficiency"] == 1:
        return unit
    return f"{unit}, compute {format_seconds(padding['math_s'])}, time {format_seconds(padding['time_s'])}"


def kernels_report(payloads: Sequence[Mapping[str, Any]]) -> Report:
    """Several kernels side by side."""
    first = payloads[0]
    title = f"on {first['chip']} in {first['dtype']}, from {first['from']}: compute-bound from " + (
        f"{first['critical_intensity']:,.1f} FLOPs/byte"
    )
    named = [(" ".join([one["label"], *one["options"]]), one) for one in payloads]
    return [Section([_table("kernel", named)], title=title)]


def block_report(payload: Mapping[str, Any]) -> Report:
    """The block: a table for each phase, and what its kernels take one after the other."""
    sizes = payload["sizes"]
    head = (
        f"block of {payload['model']['name']}, {sizes['B']:,} x {sizes['T']:,} tokens in {payload['dtype']} on "
        f"{payload['chip']}: compute-bound from {payload['critical_intensity']:,.1f} FLOPs/byte"
    )
    sections = [Section([head])]
    for phase, total in payload["phases"].items():
        named = [(_operation(one), one) for one in payload["operations"] if one["phase"] == phase]
        peak = total["flops"] / payload["peak_flops_per_s"] / total["time_s"]
        summed = (
            f"  = {format_seconds(total['time_s'])} kernel after kernel, {total['compute_bound_s'] / total['time_s']:.1%} of it "
            f"bound by compute; {format_quantity(total['flops'], 'FLOP')}, {peak:.1%} of the peak"
        )
        sections.append(Section([_table(phase, named), summed]))
    return sections


def _operation(one: Mapping[str, Any]) -> str:
    """Elementwise operations that run as one kernel are named by the last."""
    fused = f" ({one['num_operations']} fused)" if one["num_operations"] > 1 else ""
    return f"{one['name']}{fused}"


def _table(title: str, named: Iterable[tuple[str, Mapping[str, Any]]]) -> Table:
    """Name, FLOPs, bytes, intensity, compute, memory traffic and what binds, a line for each."""
    rows: list[Row] = [(title, "FLOPs", "bytes", "FLOPs/byte", "compute", "memory", "bound by")]
    for name, one in named:
        computes = bool(one["flops"])
        rows.append((
            name, format_quantity(one["flops"], "FLOP") if computes else "-", format_bytes(one["moved_bytes"]),
            f"{one['intensity']:,.1f}" if computes else "-", format_seconds(one["math_s"]) if computes else "-",
            format_seconds(one["memory_s"]), one["bound"],
        ))  # fmt: skip
    width = max(len(str(row[0])) for row in rows)
    line = f"  {{:<{width}}}{{:>13}}{{:>10}}{{:>12}}{{:>13}}{{:>11}}  {{}}"
    return Table(rows=tuple(rows), right=range(1, 6), indent=2, line=line)


def rule_report(rule: NamedRule) -> Report:
    """What a rule takes and gives, its formula, what it assumes and its source."""
    rows: list[Row] = [("takes", "unit", "default"), *map(_takes, rule.parameters)]
    takes = [Section([Table(rows=tuple(rows), indent=2)])] if rule.parameters else []
    gives = [("gives", rule.unit)] if rule.unit else []
    facts = [*gives, *_facts(rule), ("letters", rule.letters), ("remarks", rule.remarks)]
    return [Section([f"  {rule.summary}"], title=rule.name), *takes, Section([_told(facts)])]


def value_report(found: RuleValue) -> Report:
    """What a rule gives with its numbers, from which values, how and after whom."""
    rule, parts = found.rule, found.parts
    told = [one for one in rule.parameters if found.arguments[one.name] is not None]
    given = ", ".join(f"{one.name} = {_given(one, found)}" for one in told)
    facts = _told([("given", given), *_facts(rule)])
    if len(parts) == 1:
        return [Section([f"  {rule.summary}", facts], title=f"{rule.name} = {parts[0].text}")]
    table = Table(rows=tuple((one.name, one.text) for one in parts), right=(1,), head=False, indent=2)
    return [Section([f"  {rule.summary}"], title=rule.name), Section([table]), Section([facts])]


def _takes(one: RuleParameter) -> Row:
    default = "required" if one.required else one.default_text or "none"
    choices = f" (one of {', '.join(one.choices)})" if one.choices else ""
    return (one.name, one.unit or "-", default + choices)


def _facts(rule: NamedRule) -> list[tuple[str, str]]:
    return [("formula", rule.formula), ("assumes", rule.assumes), ("differs", rule.differs), ("source", rule.source)]


def _told(facts: list[tuple[str, str]]) -> Table:
    return facts_table([(name, text) for name, text in facts if text])


def _given(one: RuleParameter, found: RuleValue) -> str:
    """A value as a report says it: a model by its name."""
    from shardwise.book_formulas.rule_parameters import quantity_text

    value = found.arguments[one.name]
    return quantity_text(value, one.unit) if isinstance(value, (int, float)) else str(getattr(value, "name", value))
