"""Report of the mesh, the parts of weights and the ranks that hold them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from shardwise.present.charts.chart import Axis, Chart, Panel, PayloadMark
from shardwise.present.explorer.page_sections import panel, quiet
from shardwise.present.rendering.page_report import (
    DataTable,
    PageBlock,
    PageCell,
    PageReport,
    Paragraph,
    SelectedBlocks,
)
from shardwise.present.rendering.payload_text import Payload, PayloadText
from shardwise.present.rendering.report import Number

STATES = {"rest": "at rest", "use": "in use", "gradient": "gradient", "optimizer": "optimizer"}
NOTATION_WORDS = (
    "Axes of degree 1 are left out. Ranks are numbered with the last axis the fastest to vary. tp is tp_kv · tp_rep: key-value "
    "heads are split over tp_kv, and each has copies over tp_rep. The hidden state rests as X{hidden}. W[D_fsdp, F_tp] is split "
    "over fsdp along D and over tp along F; {{U_tp}} is a partial sum over tp."
)


def notation_report(payload: Payload) -> PageReport:
    """Return the mesh, who holds which part of a weight, and every weight in the named-axis notation."""
    text = PayloadText(payload)
    weights = [
        (f"{unit}.{weight['name']}", weight, f"units.{unit}.weights.{index}.")
        for unit, kind in payload["units"].items() for index, weight in enumerate(kind["weights"])
    ]  # fmt: skip
    sizes = ", ".join(
        f"{axis['axis']}: {{mesh.{index}.size:n}}" for index, axis in enumerate(payload["mesh"]) if axis["size"] > 1
    )
    first = max(weights, key=lambda named: math.prod(named[1]["shards"]["rest"]["parts"]))[0]
    options = [
        ((name, label), _part_blocks(PayloadText(payload, f"{place}shards.{state}."), weight, state))
        for name, weight, place in weights for state, label in STATES.items()
    ]  # fmt: skip
    choices = SelectedBlocks(
        (("notation-weight", "weight"), ("notation-state", "state")), (first, STATES["rest"]), options
    )
    table: list[Sequence[PageCell]] = [("weight", "shape", *STATES.values(), "part at rest", "copies")]
    for name, weight, place in weights:
        rest = weight["shards"]["rest"]
        part = Number(_sizes_text(rest["shape"]), rest["elements"], path=f"{place}shards.rest.elements")
        (copies,) = text.cells(f"{{{place}shards.rest.copies:n}}")
        shape = " ".join(f"{dim}={size:,}" for dim, size in weight["shape"].items())
        table.append((name, shape, *(weight["specs"][state] for state in STATES), part, copies))
    mesh = text("{{" + (sizes or "one device") + "}}", "lead")
    every = DataTable("where each weight of a unit lies", table)
    mesh_panel = panel("The mesh", mesh, text(NOTATION_WORDS, "quiet"))
    return [mesh_panel, panel("Who holds which part", choices), panel("Every weight", every)]


def _sizes_text(sizes: Iterable[int]) -> str:
    return " × ".join(f"{size:,}" for size in sizes)


def _part_blocks(text: PayloadText, weight: Payload, state: str) -> list[PageBlock]:
    """Return the size of a device's part of a weight, and the parts as a grid with the ranks that hold them."""
    shard, dims = weight["shards"][state], weight["shape"]
    shape = " × ".join(f"{dim}={size:,}" for dim, size in dims.items())
    head = f"{weight['name']}{weight['specs'][state]}: {_sizes_text(shard['shape'])} of {shape}, "
    counts = text.cells(
        "{elements:k} elements on a device, each part on {copies:n} device" + "s" * (shard["copies"] != 1)
    )
    lead = Paragraph([head, *counts], "lead")
    if not shard["holders"]:
        return [lead, quiet("too many parts to draw")]
    parts = zip(dims, shard["parts"], strict=True)
    down, across, *_ = [
        *((index, f"{dim} in {number}") for index, (dim, number) in enumerate(parts) if number > 1),
        None,
        None,
    ]
    label = f"parts of {weight['name']} and the ranks that hold them"
    x, y = (Axis(title=split[1] if split else "", ends=(0.0, 1.0), ticks=()) for split in (across, down))
    dims = down and down[0], across and across[0]
    cells = PayloadMark(source=f"{text.prefix}holders", form="cells", dims=dims)
    chart = Chart(title=label, subtitle="", panels=(Panel(x=x, y=y, marks=(cells,)),))
    return [lead, chart, quiet("ranks of the first pipeline stage")]
