"""Charts of shards and their holders, frames of collectives, number formats, steps of a sharded product."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from shardwise.derive import CollectiveStep, ShardedExpression, ShardedProgram
from shardwise.hardware import PlacedCollective
from shardwise.hardware.network.message_simulation import (
    SIMULATED_KINDS,
    CollectiveSimulation,
    DeviceStates,
    RingGrid,
    ShardPiece,
    simulate_placed,
)
from shardwise.present.charts.chart import Axis, Cell, Cells, Chart, Curve, Panel
from shardwise.present.charts.common_charts import categories, curve_chart, frames_chart
from shardwise.price import ProductReport
from shardwise.sharding import CollectiveKind, Mesh, Spec
from shardwise.sharding.shard_placement import shard_holders
from shardwise.values import InputError, NumberFormat, format_bytes
from shardwise.values.quantization import round_to_format

MOST_SUMMANDS = 4  # that are written out


def _hidden(spec: Spec) -> list[str]:
    """Return split dims that the picture has no direction for."""
    split = [dim for dim, axes in zip(spec.dims, spec.axes, strict=True) if axes]
    return split[2:] if len(spec.dims) > 2 else []


def draw_text(name: str, spec: Spec, mesh: Mesh) -> str:
    """Return the grid of shards in characters; devices are numbered with the mesh's first axis the slowest."""
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
    """Return the tensor in the notation, with the split dims that the picture leaves out."""
    hidden = ", ".join(_hidden(spec))
    return f"{name}{spec}" + (f"   (split over {hidden} too)" if hidden else "")


def _holding(summands: Sequence[Sequence[int]]) -> str:
    """Return the devices that hold a shard: 0-3 each all of it, 0 + 4 each a summand."""
    holders = [_devices(devices) for devices in summands]
    if len(holders) > MOST_SUMMANDS:
        holders = [*holders[:2], "…", holders[-1]]
    return " + ".join(holders)


def _devices(devices: Sequence[int]) -> str:
    """Return device numbers, runs shortened: 0-3 8-11."""
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
    """The sharding of a tensor after a step; `heading` names the step."""

    heading: str
    name: str
    spec: Spec


def shards_chart(title: str, moments: Iterable[Moment], mesh: Mesh) -> Chart:
    """Return the shards of several tensors, each with the devices that hold it."""
    shape = ", ".join(f"{axis}={size}" for axis, size in mesh.axes)
    moments = tuple(moments)
    partial = any(moment.spec.partial for moment in moments)
    return Chart(
        title=title, subtitle=f"mesh {shape}: {mesh.num_devices} devices, numbered with the first axis the slowest",
        panels=tuple(_shards(moment, mesh) for moment in moments), note=COPIES + (SUMMANDS if partial else ""), wrap=True,
    )  # fmt: skip


def _shards(moment: Moment, mesh: Mesh) -> Panel:
    (rows, columns), holders = shard_holders(moment.spec, mesh)
    cells = (
        Cell(
            row=row, column=column, colour=f"series:{row * columns + column}", lines=(_holding(summands),),
            ringed=bool(moment.spec.partial),
        )
        for (row, column), summands in sorted(holders.items())
    )  # fmt: skip
    return Panel(
        x=Axis(categories=categories([""] * columns)), y=Axis(categories=categories([""] * rows)),
        marks=(Cells(cells=tuple(cells)),), title=caption(moment.name, moment.spec), caption=moment.heading, size=(64.0, 30.0),
    )  # fmt: skip


MOST_DEVICES = 16
NAMES = {
    CollectiveKind.ALL_GATHER: "AllGather", CollectiveKind.REDUCE_SCATTER: "ReduceScatter",
    CollectiveKind.ALL_REDUCE: "AllReduce", CollectiveKind.ALL_TO_ALL: "AllToAll",
}  # fmt: skip
SUMS = "Columns are devices, rows are shards; the number says how many devices' summands are in; thick edges: new in this step."
LEGENDS = {
    CollectiveKind.ALL_GATHER: "Columns are devices, rows are shards; thick edges: new in this step.",
    CollectiveKind.REDUCE_SCATTER: SUMS,
    CollectiveKind.ALL_REDUCE: SUMS,
    CollectiveKind.ALL_TO_ALL: "Columns are devices, cells are chunks: from which device, to which; "
    "thick edges: new in this step.",
}


def collective_chart(collective: PlacedCollective) -> Chart:
    """Return a collective's simulated steps. Raises `InputError` for what cannot be drawn: pods, other kinds, many devices."""
    report = collective.report
    if report.network == "pods":
        raise InputError("--draw: found a group over several pods; one inside a pod is drawn, such as --axes 4,4")
    is_direct = report.network == "switched" and report.kind == "all_to_all"
    if report.kind not in SIMULATED_KINDS or is_direct:
        where = " on a torus" if is_direct else ""
        raise InputError(
            f"--draw: found {report.kind.replace('_', '-')}; {', '.join(SIMULATED_KINDS).replace('_', '-')}{where} are drawn"
        )
    if report.num_devices > MOST_DEVICES:
        raise InputError(
            f"--draw: found {report.num_devices} devices; at most {MOST_DEVICES} are required, such as --axes 8"
        )
    return strip_of(simulate_placed(collective))


def strip_of(simulation: CollectiveSimulation) -> Chart:
    """Return the collective frame by frame. Raises `InputError` for more devices than a page shows."""
    count = simulation.grid.num_devices
    if count > MOST_DEVICES:
        raise InputError(
            f"draw: found {count} devices; at most {MOST_DEVICES} are drawn, such as --axes 8 or --axes 4,4"
        )
    names = device_names(simulation.grid)
    return frames_chart(
        f"{NAMES[simulation.kind]} of {format_bytes(simulation.num_bytes)} over {describe(simulation.grid)}",
        f"{simulation.num_steps} steps; the busiest link carries {format_bytes(simulation.busiest_link_bytes)}",
        dict(frames(simulation)),
        columns=names, rows=() if simulation.kind is CollectiveKind.ALL_TO_ALL else names,
        note=LEGENDS[simulation.kind] + (" A part of a cell: that much of it is there." if simulation.num_parts > 1 else ""),
    )  # fmt: skip


def describe(grid: RingGrid) -> str:
    """Return the axes in words: "a ring of 4 (one way) and a line of 8"."""
    way = " (one way)" if grid.one_way else ""
    return " and ".join(
        f"a ring of {size}{way}" if wraps else f"a line of {size}"
        for size, wraps in zip(grid.shape, grid.wraps, strict=True)
    )


def device_names(grid: RingGrid) -> tuple[str, ...]:
    """Return coordinates of the devices, in row-major order; on one axis plain numbers."""
    axes = range(len(grid.shape))
    return tuple(",".join(str(grid.coordinate(device, axis)) for axis in axes) for device in range(grid.num_devices))


def frames(simulation: CollectiveSimulation) -> Iterator[tuple[str, list[Cell]]]:
    """Yield the start and the state after each step: its title, and the pieces that devices hold."""
    cells_of = _chunk_cells if simulation.kind is CollectiveKind.ALL_TO_ALL else _shard_cells
    before: DeviceStates | None = None
    for number, state in enumerate(simulation.states()):
        cells = [cell for device in range(len(state)) for cell in cells_of(simulation, state, before, device)]
        yield f"after step {number}" if number else "start", cells
        before = state


def _shard_cells(
    simulation: CollectiveSimulation, state: DeviceStates, before: DeviceStates | None, device: int
) -> Iterator[Cell]:
    """Yield a row for each shard; where summands are added, how many are in."""
    for shard in range(simulation.grid.num_devices):
        parts = [ShardPiece(shard, shard, part) for part in range(simulation.num_parts)]
        summands_by_piece = {part: state[device][part] for part in parts if part in state[device]}
        if summands_by_piece:
            sizes = sorted({len(summands) for summands in summands_by_piece.values()})
            label = "-".join(map(str, (sizes[0], sizes[-1]) if len(sizes) > 1 else sizes))
            yield Cell(
                row=shard, column=device, colour=f"series:{shard}",
                lines=() if simulation.kind is CollectiveKind.ALL_GATHER else (label,),
                share=len(summands_by_piece) / simulation.num_parts,
                new=before is not None
                and any(before[device].get(part) != summands for part, summands in summands_by_piece.items()),
            )  # fmt: skip


def _chunk_cells(
    simulation: CollectiveSimulation, state: DeviceStates, before: DeviceStates | None, device: int
) -> Iterator[Cell]:
    """Yield a row for each chunk that the device holds, by where it comes from and then where it goes."""
    names = device_names(simulation.grid)
    chunks: dict[tuple[int, int], list[ShardPiece]] = {}
    for piece in sorted(state[device]):
        chunks.setdefault((piece.origin, piece.home), []).append(piece)
    for row, ((origin, home), pieces) in enumerate(chunks.items()):
        yield Cell(
            row=row, column=device, colour=f"series:{origin}", lines=(f"{names[origin]}→{names[home]}",),
            share=len(pieces) / simulation.num_parts,
            new=before is not None and any(piece not in before[device] for piece in pieces),
        )  # fmt: skip


NUM_POINTS = 10_000  # Nanotron team 2025, The Ultra-Scale Playbook, mixed precision training


def format_charts(formats: Sequence[NumberFormat]) -> tuple[Chart, Chart]:
    """Return the range and the resolution of formats, a line for each."""
    return _range_chart(formats), _rounding_chart(formats)


def _range_chart(formats: Sequence[NumberFormat]) -> Chart:
    return curve_chart(
        title="Range and resolution",
        subtitle="distance to the next number, over the number: from the smallest subnormal to the largest number",
        x=Axis(title="size of a number", unit="x", log=True), y=Axis(title="relative distance to the next", unit="x", log=True),
        marks=(Curve(label=number_format.name, points=tuple(_distances(number_format))) for number_format in formats),
    )  # fmt: skip


def _distances(number_format: NumberFormat) -> Iterator[tuple[float, float]]:
    """Yield powers of two, where the relative distance is largest, with that distance: evenly spaced subnormals lose bits."""
    exponent, largest = int(np.log2(number_format.min_subnormal)), int(np.floor(np.log2(number_format.max)))
    for power in (2.0**e for e in range(exponent, largest + 1)):
        yield power, max(power, number_format.min_normal) * number_format.epsilon / power
    if number_format.max > 2.0**largest:
        yield number_format.max, 2.0**largest * number_format.epsilon / number_format.max


def _rounding_chart(formats: Sequence[NumberFormat]) -> Chart:
    counts = ", ".join(f"{number_format.name} {number_format.num_between_1_and_2:,}" for number_format in formats)
    return curve_chart(
        title=f"{NUM_POINTS:,} points between 1 and 2, rounded",
        subtitle=f"numbers from 1 up to 2: {counts}",
        x=Axis(title="x - 1", unit="x"), y=Axis(title="x rounded, - 1", unit="x"),
        marks=(Curve(label=number_format.name, points=tuple(_steps(number_format))) for number_format in formats),
    )  # fmt: skip


def _steps(number_format: NumberFormat) -> Iterator[tuple[float, float]]:
    """Yield the points next to which the rounded value changes: the corners of the staircase.

    Where nearly every point is a number of its own the staircase is a straight line, to less than a pixel.
    """
    x = 1.0 + np.arange(NUM_POINTS) / (NUM_POINTS - 1)
    y = round_to_format(x, number_format)
    changes = np.flatnonzero(np.diff(y))
    corners = np.unique(np.concatenate([[0], changes, changes + 1, [NUM_POINTS - 1]]))
    if len(corners) > NUM_POINTS // 2:
        corners = corners[[0, -1]]
    yield from zip((x[corners] - 1).tolist(), (y[corners] - 1).tolist(), strict=True)


def product_chart(product: ProductReport) -> Chart:
    """Return the shards of a product's tensors at the start and after each step of its cheapest program."""
    expression = product.expression
    title = f"{expression.expression}: who holds what"
    return shards_chart(title, moments(expression, product.steps), expression.mesh)


def moments(expression: ShardedExpression, program: ShardedProgram) -> Iterator[Moment]:
    """Yield the operands, then the tensor that each step changes or makes, partial sums included."""
    for name, spec in zip(expression.names, expression.operands, strict=True):
        yield Moment(heading="start", name=name, spec=spec)
    for number, step in enumerate(program.steps, 1):
        if isinstance(step, CollectiveStep):
            collective = step.collective
            operation = f"{collective.kind} over {','.join(collective.axes)}"
            yield Moment(heading=f"{number}: {operation}", name=step.tensor.name, spec=collective.after)
        else:
            for name, spec in step.writes:
                yield Moment(heading=f"{number}: each device computes", name=name, spec=spec)
