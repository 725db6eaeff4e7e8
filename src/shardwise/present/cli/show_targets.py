"""The part of `show` about the frameworks whose launches are written and read."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.present.cli.section import Report, Row, Section, Table


def target_names() -> tuple[str, ...]:
    from shardwise.interop import TARGETS

    return tuple(TARGETS)


def targets_table(names: Sequence[str]) -> Report:
    """Targets with their releases and stacks."""
    from shardwise.interop import get_target

    rows: list[Row] = [("target", "framework", "release", "stack", "says the model", "options")]
    for name in names:
        target = get_target(name)
        says = "yes" if target.includes_model else "no: --model"
        rows.append((name, target.title, target.version, target.stack, says, f"{len(target.options):,}"))
    return [Section([Table(rows=tuple(rows), right=(5,))])]
