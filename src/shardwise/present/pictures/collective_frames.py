"""Pictures of a simulated collective: what every device holds at the start and after each step."""

from __future__ import annotations

from shardwise.hardware.network.message_simulation import CollectiveSimulation, DeviceStates, RingGrid, ShardPiece
from shardwise.present.draw.strip import Cell, Frame, Strip
from shardwise.sharding import CollectiveKind
from shardwise.values import InputError, format_bytes

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


def strip_of(done: CollectiveSimulation) -> Strip:
    """The collective frame by frame. Raises `InputError` for more devices than a page shows."""
    count = done.grid.num_devices
    if count > MOST_DEVICES:
        raise InputError(
            f"draw: found {count} devices; at most {MOST_DEVICES} are drawn, such as --axes 8 or --axes 4,4"
        )
    names = device_names(done.grid)
    return Strip(
        title=f"{NAMES[done.kind]} of {format_bytes(done.num_bytes)} over {describe(done.grid)}",
        subtitle=f"{done.num_steps} steps; the busiest link carries {format_bytes(done.busiest_link_bytes)}",
        devices=names, frames=frames(done), rows=() if done.kind is CollectiveKind.ALL_TO_ALL else names,
        legend=LEGENDS[done.kind] + (" A part of a cell: that much of it is there." if done.num_parts > 1 else ""),
    )  # fmt: skip


def describe(grid: RingGrid) -> str:
    """The axes in words: "a ring of 4 (one way) and a line of 8"."""
    way = " (one way)" if grid.one_way else ""
    return " and ".join(
        f"a ring of {size}{way}" if wraps else f"a line of {size}"
        for size, wraps in zip(grid.shape, grid.wraps, strict=True)
    )


def device_names(grid: RingGrid) -> tuple[str, ...]:
    """Coordinates of the devices, in row-major order; on one axis plain numbers."""
    axes = range(len(grid.shape))
    return tuple(",".join(str(grid.coordinate(device, axis)) for axis in axes) for device in range(grid.num_devices))


def frames(done: CollectiveSimulation) -> tuple[Frame, ...]:
    """A frame for the start and one after each step."""
    found: list[Frame] = []
    before: DeviceStates | None = None
    for number, state in enumerate(done.states()):
        cells = _chunk_cells if done.kind is CollectiveKind.ALL_TO_ALL else _shard_cells
        columns = tuple(cells(done, state, before, device) for device in range(len(state)))
        found.append(Frame(title=f"after step {number}" if number else "start", columns=columns))
        before = state
    return tuple(found)


def _shard_cells(
    done: CollectiveSimulation, state: DeviceStates, before: DeviceStates | None, device: int
) -> tuple[Cell, ...]:
    """A row for each shard; where summands are added, how many are in."""
    cells = []
    for shard in range(done.grid.num_devices):
        parts = [ShardPiece(shard, shard, part) for part in range(done.num_parts)]
        held = {part: state[device][part] for part in parts if part in state[device]}
        if held:
            sizes = sorted({len(summands) for summands in held.values()})
            label = "-".join(map(str, (sizes[0], sizes[-1]) if len(sizes) > 1 else sizes))
            new = before is not None and any(before[device].get(part) != summands for part, summands in held.items())
            share = len(held) / done.num_parts
            label = "" if done.kind is CollectiveKind.ALL_GATHER else label
            cells.append(Cell(row=shard, colour=shard, label=label, share=share, new=new))
    return tuple(cells)


def _chunk_cells(
    done: CollectiveSimulation, state: DeviceStates, before: DeviceStates | None, device: int
) -> tuple[Cell, ...]:
    """A row for each chunk that the device holds, by where it comes from and then where it goes."""
    names = device_names(done.grid)
    chunks: dict[tuple[int, int], list[ShardPiece]] = {}
    for piece in sorted(state[device]):
        chunks.setdefault((piece.origin, piece.home), []).append(piece)
    return tuple(
        Cell(
            row=row, colour=origin, label=f"{names[origin]}→{names[home]}", share=len(pieces) / done.num_parts,
            new=before is not None and any(piece not in before[device] for piece in pieces),
        )
        for row, ((origin, home), pieces) in enumerate(chunks.items())
    )  # fmt: skip
