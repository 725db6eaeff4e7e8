"""Which device holds what: an array cut into its shards, each with the devices that have it. As text and as SVG.

The idea of the coloured grids is S2's. The first dim runs down, the second across; of a tensor with more dims, the first
two that are split. Further split dims are named under the picture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardwise.draw.svg import INK, Drawing, colour
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.spec import Axes, Spec

Holders = Mapping[tuple[int, int], Sequence[int]]


def holders(spec: Spec, mesh: Mesh) -> tuple[tuple[int, int], Holders]:
    """Rows and columns of the grid of shards, and the devices that hold each."""
    down, across = _two(spec)
    grid: dict[tuple[int, int], list[int]] = {}
    for device, coordinate in enumerate(mesh.coordinates()):
        cell = mesh.position(coordinate, down), mesh.position(coordinate, across)
        grid.setdefault(cell, []).append(device)
    return (mesh.size(down), mesh.size(across)), grid


def _two(spec: Spec) -> tuple[Axes, Axes]:
    """Axes of the dims that run down and across."""
    axes = list(spec.axes) if len(spec.axes) <= 2 else [group for group in spec.axes if group]
    axes += [(), ()]
    return axes[0], axes[1]


def _hidden(spec: Spec) -> list[str]:
    """Split dims that the picture has no direction for."""
    split = [dim for dim, axes in zip(spec.dims, spec.axes, strict=True) if axes]
    return split[2:] if len(spec.dims) > 2 else []


def draw_text(name: str, spec: Spec, mesh: Mesh) -> str:
    """The grid of shards in characters; devices are numbered with the mesh's first axis the slowest."""
    (rows, columns), grid = holders(spec, mesh)
    cells = [[_devices(grid[row, column]) for column in range(columns)] for row in range(rows)]
    width = max(len(cell) for line in cells for cell in line)
    rule = "+" + "+".join("-" * (width + 2) for _ in range(columns)) + "+"
    lines = [caption(name, spec), rule]
    for line in cells:
        lines += ["| " + " | ".join(cell.center(width) for cell in line) + " |", rule]
    return "\n".join(lines)


def caption(name: str, spec: Spec) -> str:
    """The tensor in the notation, and what the picture leaves out."""
    notes = [f"split over {dim} too" for dim in _hidden(spec)]
    if spec.partial:
        notes.append(f"a partial sum on each device along {', '.join(spec.partial)}")
    return f"{name}{spec}" + (f"   ({'; '.join(notes)})" if notes else "")


def _devices(devices: Sequence[int]) -> str:
    """Device numbers, runs shortened: 0-3 8-11."""
    runs: list[list[int]] = []
    for device in devices:
        if runs and runs[-1][-1] == device - 1:
            runs[-1].append(device)
        else:
            runs.append([device])
    return " ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


CELL_WIDTH, CELL_HEIGHT, MARGIN, SPACE = 76.0, 40.0, 24.0, 40.0


def draw_svg(tensors: Sequence[tuple[str, Spec]], mesh: Mesh) -> str:
    """The grids of several tensors side by side; shards are coloured, each names the devices that hold it."""
    grids = [(name, spec, *holders(spec, mesh)) for name, spec in tensors]
    labels = [_devices(devices) for _, _, _, grid in grids for devices in grid.values()]
    cell_width = max(CELL_WIDTH, 8.0 * max(map(len, labels)) + 16)
    widths = [max(columns * cell_width, 8.5 * len(caption(name, spec))) for name, spec, (_, columns), _ in grids]
    height = max(rows for _, _, (rows, _), _ in grids) * CELL_HEIGHT
    shape = ", ".join(f"{axis}={size}" for axis, size in mesh.axes)
    drawing = Drawing(
        2 * MARGIN + sum(widths) + SPACE * (len(grids) - 1), 2 * MARGIN + 56 + height, f"Shards on {shape}"
    )
    drawing.text(
        MARGIN, MARGIN + 12, f"mesh {shape}: {mesh.num_devices} devices, numbers say who holds a shard", size=13
    )
    left = MARGIN
    for (name, spec, (_, columns), grid), width in zip(grids, widths, strict=True):
        with drawing.group(x=left, y=MARGIN + 32):
            drawing.text(0, 12, caption(name, spec), size=14, weight="bold")
            for (row, column), devices in sorted(grid.items()):
                x, y = column * cell_width, 22 + row * CELL_HEIGHT
                drawing.rect(x, y, cell_width, CELL_HEIGHT, fill=colour(row * columns + column), stroke=INK)
                drawing.text(x + cell_width / 2, y + CELL_HEIGHT / 2 + 5, _devices(devices), anchor="middle")
        left += width + SPACE
    return drawing.render()
