"""Which device holds what: an array cut into its shards, each with the devices that have it. As text and as a drawing.

The idea of the coloured grids is S2's. The first dim runs down, the second across; of a tensor with more dims, the first
two that are split. Further split dims are named under the picture.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardwise.present.draw.grids import Grid, GridChart
from shardwise.sharding import Mesh, Spec
from shardwise.sharding.device_shards import shard_holders

MOST_SUMMANDS = 4  # that are written out


def _hidden(spec: Spec) -> list[str]:
    """Split dims that the picture has no direction for."""
    split = [dim for dim, axes in zip(spec.dims, spec.axes, strict=True) if axes]
    return split[2:] if len(spec.dims) > 2 else []


def draw_text(name: str, spec: Spec, mesh: Mesh) -> str:
    """The grid of shards in characters; devices are numbered with the mesh's first axis the slowest."""
    (rows, columns), grid = shard_holders(spec, mesh)
    cells = [[_holding(grid[row, column]) for column in range(columns)] for row in range(rows)]
    width = max(len(cell) for line in cells for cell in line)
    rule = "+" + "+".join("-" * (width + 2) for _ in range(columns)) + "+"
    partial = f"   (a partial sum on each device along {', '.join(spec.partial)})" if spec.partial else ""
    lines = [caption(name, spec) + partial, rule]
    for line in cells:
        lines += ["| " + " | ".join(cell.center(width) for cell in line) + " |", rule]
    return "\n".join(lines)


def caption(name: str, spec: Spec) -> str:
    """The tensor in the notation, and what the picture leaves out."""
    hidden = ", ".join(_hidden(spec))
    return f"{name}{spec}" + (f"   (split over {hidden} too)" if hidden else "")


def _holding(summands: Sequence[Sequence[int]]) -> str:
    """Who holds a shard: 0-3 each all of it, 0 + 4 each a summand."""
    shown = [_devices(devices) for devices in summands]
    if len(shown) > MOST_SUMMANDS:
        shown = [*shown[:2], "…", shown[-1]]
    return " + ".join(shown)


def _devices(devices: Sequence[int]) -> str:
    """Device numbers, runs shortened: 0-3 8-11."""
    runs: list[list[int]] = []
    for device in devices:
        if runs and runs[-1][-1] == device - 1:
            runs[-1].append(device)
        else:
            runs.append([device])
    return " ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


COPIES = "0-3: each of these devices holds the shard."
SUMMANDS = " 0 + 4, inside of a line: each holds a summand of it, and the sum is due."


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """How a tensor lies after a step; `heading` says which."""

    heading: str
    name: str
    spec: Spec


def shards_chart(title: str, moments: Iterable[Moment], mesh: Mesh) -> GridChart:
    """The shards of several tensors, each with the devices that hold it."""
    shape = ", ".join(f"{axis}={size}" for axis, size in mesh.axes)
    moments = tuple(moments)
    partial = any(moment.spec.partial for moment in moments)
    return GridChart(
        title=title, subtitle=f"mesh {shape}: {mesh.num_devices} devices, numbered with the first axis the slowest",
        grids=tuple(_grid(moment, mesh) for moment in moments), legend=COPIES + (SUMMANDS if partial else ""),
    )  # fmt: skip


def _grid(moment: Moment, mesh: Mesh) -> Grid:
    (rows, columns), cells = shard_holders(moment.spec, mesh)
    return Grid(
        heading=moment.heading, caption=caption(moment.name, moment.spec), rows=rows, columns=columns,
        labels={place: _holding(summands) for place, summands in cells.items()}, ringed=bool(moment.spec.partial),
    )  # fmt: skip
