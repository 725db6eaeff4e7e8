"""Report of the workbench of kernels: each ladder's rungs with their bytes, and their times where they ran."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shardwise.present.rendering.numbers import count, fixed, num_bytes, percent, quantity, seconds
from shardwise.present.rendering.report import Block, Cell, Line, Report, Row, Section, Table

if TYPE_CHECKING:
    from shardwise.measure import KernelLadders
    from shardwise.measure.kernel_ladders.workbench import LadderResult

SECTOR_COLUMN = "of sectors"
OPTIONAL_COLUMNS = {SECTOR_COLUMN: "sector_use", "executed": "executed_flops"}  # where a rung of the ladder has it


def kernels_report(result: KernelLadders) -> Report:
    """Report each ladder: its roofline, what each rung moves against it, and how long it took."""
    sections = [
        Section(list(_ladder_blocks(result, ladder, f"ladders.{index}")), title=f"{ladder.title} ({ladder.name})")
        for index, ladder in enumerate(result.ladders)
    ]
    hint = (
        f"measured on {result.machine}"
        if result.machine
        else f"times of {result.chip} by its bandwidth, as if no cache answered; on a GPU each rung is measured"
    )
    return [*sections, Section([hint])]


def _ladder_blocks(result: KernelLadders, ladder: LadderResult, path: str) -> Iterator[Block]:
    yield Line(
        (
            f"  {ladder.sizes}: ", quantity(ladder.flops, "FLOP", f"{path}.flops"), ", at least ",
            num_bytes(ladder.least_bytes, f"{path}.least_bytes"), " moved; roofline ",
            seconds(ladder.roofline_s, f"{path}.roofline_s"), f" ({ladder.bound})",
        )
    )  # fmt: skip
    measured = ("measured", "of roofline") if result.machine else ()
    if ladder.knee_rows is not None:
        yield Line(tuple(_knee_cells(ladder, path)))
    optional = tuple(
        title for title, field in OPTIONAL_COLUMNS.items() if any(getattr(rung, field) for rung in ladder.rungs)
    )
    head: Row = ("", "launches", "read", "written", *optional, "FLOPs/B", "traffic", "roofline", *measured)
    rows = [head, *(_rung_row(ladder, index, path, optional) for index in range(len(ladder.rungs)))]
    yield Table(rows=tuple(rows), right=range(1, len(head)), indent=2)
    yield from (f"  {rung.name}: {rung.lesson}" for rung in ladder.rungs if rung.lesson)
    compiled = [kernel for rung in ladder.rungs for kernel in rung.compiled]
    if compiled:
        yield Table(
            rows=(
                ("compiled kernel", "sm", "warps", "registers", "spilled", "shared", "loads"),
                *(
                    (
                        kernel.kernel, str(kernel.compute_capability), str(kernel.num_warps), str(kernel.registers),
                        f"{kernel.spilled_bytes:,} B", f"{kernel.shared_bytes:,} B", ", ".join(kernel.loads),
                    )
                    for kernel in compiled
                ),
            ),
            right=range(1, 6), indent=2,
        )  # fmt: skip


def _knee_cells(ladder: LadderResult, path: str) -> Iterator[Cell]:
    """Yield the rows at which computing takes as long as memory, by the roofline and as measured."""
    assert ladder.knee_rows is not None
    yield from (
        "  computing takes as long as memory from ",
        fixed(ladder.knee_rows, 0, f"{path}.knee_rows"),
        " rows on",
    )
    if ladder.measured_knee_rows is not None:
        yield from ("; measured: ", fixed(ladder.measured_knee_rows, 0, f"{path}.measured_knee_rows"))


def _optional_cell(value: float | None, title: str, path: str) -> Cell:
    if value is None:
        return "-"
    return percent(value, path) if title == SECTOR_COLUMN else quantity(value, "FLOP", path)


def _rung_row(ladder: LadderResult, index: int, path: str, optional: tuple[str, ...]) -> Row:
    rung, rung_path = ladder.rungs[index], f"{path}.rungs.{index}"
    measured: tuple[Cell, ...] = ()
    if rung.seconds is not None:
        measured = (
            seconds(rung.seconds, f"{rung_path}.seconds", kind="measured"), percent(rung.roofline_s / rung.seconds),
        )  # fmt: skip
    return (
        rung.name, count(rung.num_launches, f"{rung_path}.num_launches"),
        num_bytes(rung.loaded_bytes, f"{rung_path}.loaded_bytes"),
        num_bytes(rung.stored_bytes, f"{rung_path}.stored_bytes"),
        *(
            _optional_cell(getattr(rung, OPTIONAL_COLUMNS[title]), title, f"{rung_path}.{OPTIONAL_COLUMNS[title]}")
            for title in optional
        ),
        fixed(rung.intensity, 1, f"{rung_path}.intensity"),
        seconds(rung.traffic_s, f"{rung_path}.traffic_s"), seconds(rung.roofline_s, f"{rung_path}.roofline_s"), *measured,
    )  # fmt: skip
