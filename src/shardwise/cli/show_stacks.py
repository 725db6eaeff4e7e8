"""The part of `show` about software stacks and the constants of their predictions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shardwise.cli.show_values import Value
from shardwise.cli.table import Row, table

OWN = "cluster/measured/stacks.toml"


class Shown(NamedTuple):
    """A constant of a stack or of a chip: its value, one standard deviation around it, what it means, where it is from."""

    owner: str
    name: str
    value: float
    low: float
    high: float
    meaning: str
    source: str


def stack_names() -> tuple[str, ...]:
    from shardwise.cluster.stacks import stack_names as names

    return names()


def _constants(name: str, chip: str | None) -> Iterator[Shown]:
    """The four constants of a stack, and with a chip its eight."""
    from shardwise.cluster.calibration import CONSTANTS
    from shardwise.cluster.chips import load_chip
    from shardwise.cluster.stacks import constants_known, stack_named

    known = constants_known(load_chip(chip).name if chip else "", stack_named(name))
    for owner in ("stack", "chip") if chip else ("stack",):
        for constant, one in CONSTANTS.items():
            if one.owner == owner:
                value, deviation, source = known[constant]
                low, high = (float(one.value(one.free(value) + side * deviation)) for side in (-1, 1))
                yield Shown(owner, constant, value, low, high, one.meaning, source)


def stack_values(name: str, chip: str | None = None) -> list[Value]:
    """The stack as its table says, and its constants; each with its meaning and how sure it is."""
    from shardwise.cluster.stacks import stack_named

    stack = stack_named(name)
    values: list[Value] = [("kind", stack.kind, OWN), ("unfused_attention", stack.unfused_attention, OWN)]
    for one in _constants(name, chip):
        about = f"{one.meaning}; {one.low:.3g} to {one.high:.3g} within a standard deviation; {one.source}"
        values.append((f"{one.owner}.{one.name}", one.value, about))
    return values


def stack_lines(name: str, chip: str | None = None) -> str:
    """The same for people: a line for each constant, each source once."""
    from shardwise.cluster.stacks import stack_named

    stack, found = stack_named(name), list(_constants(name, chip))
    writes = ", attention writes its scores to memory" if stack.unfused_attention else ""
    rows: list[Row] = [("  constant", "value", "one deviation", "meaning")]
    rows += [
        (f"  {one.owner}.{one.name}", f"{one.value:.4g}", f"{one.low:.3g} to {one.high:.3g}", one.meaning)
        for one in found
    ]
    lines = [
        f"{name}{f' on {chip}' if chip else ''}: a stack of the kind {stack.kind}{writes}",
        table(rows, right=(1,)),
    ]
    lines += [
        f"  source ({owner}): {source}" for owner, source in dict.fromkeys((one.owner, one.source) for one in found)
    ]
    return "\n".join(lines if chip else [*lines, "  --chip NAME shows the constants of a chip beside them"])


def stacks_table(names: Sequence[str]) -> str:
    """Stacks and kinds with their four constants."""
    from shardwise.cluster.stacks import fitted, is_measured, stack_named

    every = {name: list(_constants(name, None)) for name in names}
    known = next(iter(every.values()))
    rows: list[Row] = [("stack", "kind", *(one.name for one in known), "from")]
    for name, found in every.items():
        stack = stack_named(name)
        origin = "runs" if is_measured(stack) else "expected of its kind"
        rows.append((name, stack.kind, *(f"{one.value:.3g}" for one in found), origin))
    meanings = "\n".join(f"{one.name}: {one.meaning}" for one in known)
    return f"{table(rows, right=range(2, 2 + len(known)))}\n\n{meanings}\nruns: {fitted()['source']}"
