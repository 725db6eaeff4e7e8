"""What layers keep for the backward pass and what they compute again, as tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardwise.present.cli.section import Block, Row, Table
from shardwise.values import format_bytes, format_seconds

MOST_NAMED = 3  # tensors of one kernel


def recompute_tables(layers: Sequence[Mapping[str, Any]]) -> Iterator[Block]:
    """For each kind of layer its tensors with their bytes and its kernels with their seconds."""
    for one in layers:
        kept, again = one["kept"], one["recomputed"]
        in_bytes, seconds = sum(each["num_bytes"] for each in kept), sum(each["seconds"] for each in again)
        yield (
            f"  {one['layer']} ({one['num_layers']} layers), a layer in one micro-batch: {format_bytes(in_bytes)} kept, "
            f"{format_seconds(seconds)} computed again"
        )
        rows: list[Row] = [("kept", each["tensor"], format_bytes(each["num_bytes"]), "") for each in kept]
        rows += [
            (
                "again", f"{each['what']} of {_named(each['tensors'])}", _bytes(each["spared_bytes"]),
                format_seconds(each["seconds"]),
            )
            for each in again
        ]  # fmt: skip
        yield Table(rows=tuple(rows), right=(2, 3), head=False, indent=4)


def _named(tensors: Sequence[str]) -> str:
    more = len(tensors) - MOST_NAMED
    return ", ".join(tensors[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _bytes(value: float) -> str:
    return f"-{format_bytes(value)}" if value else ""
