"""The part of `show` about software stacks and the constants of their predictions."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.present.cli.section import Block, Report, Row, Section, Table


def stack_names() -> tuple[str, ...]:
    from shardwise.hardware import stack_names as names

    return names()


def stack_entry(name: str, chip: str | None = None) -> Report:
    """A line for each constant and for each ability, each source once."""
    from shardwise.hardware import get_stack
    from shardwise.present.pictures.catalogue.sourced_stacks import stack_constants

    stack, found = get_stack(name), list(stack_constants(name, chip))
    facts = ", attention writes its scores to memory" * stack.unfused_attention
    facts += ", overlaps tensor parallelism with products" * stack.overlaps_tp
    facts += ", casts operands of narrow products in these alone" * (stack.casts == "in_products")
    constants: list[Row] = [("constant", "value", "one deviation", "meaning")]
    constants += [
        (f"{one.owner}.{one.name}", f"{one.value:.4g}", f"{one.low:.3g} to {one.high:.3g}", one.meaning)
        for one in found
    ]
    sources = dict.fromkeys((one.owner, one.source) for one in found)
    abilities: tuple[Row, ...] = tuple((key, _values(values)) for key, values in stack.abilities.items())
    usual = [f"  source (precision): {stack.precision_source}"] if stack.precision_source else []
    blocks: list[Block] = [
        Table(rows=tuple(constants), right=(1,), indent=2),
        *(f"  source ({owner}): {source}" for owner, source in sources),
        "  what it runs",
        Table(rows=abilities, head=False, indent=2),
        f"  source (what it runs): {stack.abilities.source}",
        f"  precision where none is named: {stack.precision}",
        *usual,
        *([] if chip else ["  --chip NAME shows the constants of a chip beside them"]),
    ]
    return [Section(blocks, title=f"{name}{f' on {chip}' if chip else ''}: a stack of the kind {stack.kind}{facts}")]


def _values(values: bool | Sequence[object]) -> str:
    if isinstance(values, bool):
        return "yes" if values else "no"
    return ", ".join(map(str, values)) or "none"


def stacks_table(names: Sequence[str]) -> Report:
    """Stacks and kinds with their four constants."""
    from shardwise.hardware import get_stack
    from shardwise.hardware.published_constants import is_measured, load_published_fit
    from shardwise.present.pictures.catalogue.sourced_stacks import stack_constants

    every = {name: list(stack_constants(name, None)) for name in names}
    known = next(iter(every.values()))
    rows: list[Row] = [("stack", "kind", *(one.name for one in known), "from")]
    for name, found in every.items():
        stack = get_stack(name)
        origin = "runs" if is_measured(stack) else "expected of its kind"
        rows.append((name, stack.kind, *(f"{one.value:.3g}" for one in found), origin))
    meanings = [f"{one.name}: {one.meaning}" for one in known]
    table = Table(rows=tuple(rows), right=range(2, 2 + len(known)))
    return [Section([table]), Section([*meanings, f"runs: {load_published_fit()['source']}"])]
