"""Which device holds what: an array cut into its shards, each with the devices that have it. As text and as SVG.

The idea of the coloured grids is S2's. The first dim runs down, the second across; of a tensor with more dims, the first
two that are split. Further split dims are named under the picture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
