"""`shardwise roofline`: what bounds a kernel on one chip, compute or memory."""

from __future__ import annotations

import argparse
import json
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardwise.cluster.chip import Chip
    from shardwise.cost.figures import MatmulRoofline

SCHEMA = "shardwise.roofline/1"
LETTERS = ("B", "D", "F")
DESCRIPTION = """What bounds a kernel on one chip: FLOPs, bytes moved, intensity against the chip's, time, critical batch.

matmul is [B, D] · [D, F]: activations of B rows times a weight. Peaks and bandwidths are the vendor's, as in the books."""
EPILOG = """examples:
  shardwise roofline matmul B=240,D=8192,F=28672 tpu-v5e --plot roofline.svg
  shardwise roofline matmul B=240,D=8192,F=28672 tpu-v5e --weights int8"""


def configure(verbs: Any) -> None:
    """Declare the verb."""
    parser = verbs.add_parser(
        "roofline", help="say what bounds a kernel on one chip", description=DESCRIPTION, epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("kernel", metavar="KERNEL", help="matmul")
    parser.add_argument("sizes", metavar="SIZES", help="sizes of its dims, such as B=240,D=8192,F=28672")
    parser.add_argument(
        "chip", metavar="CHIP", help="a chip of the catalogue, such as tpu-v5e, or a cluster's .toml file"
    )
    parser.add_argument(
        "--dtype", default="bf16", metavar="NAME", help="format of activations and arithmetic (default: bf16)"
    )
    parser.add_argument(
        "--weights", metavar="NAME", help="format that the weight is stored in (default: that of --dtype)"
    )
    parser.add_argument("--plot", metavar="FILE", help="write the chip's rooflines with the kernel as an SVG")
    parser.add_argument("--json", action="store_true", help="print the payload as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> str:
    """The report, as text or as JSON."""
    from shardwise.cost.figures import chip_and_links, matmul_roofline

    batch, d_in, d_out = parse_sizes(arguments.kernel, arguments.sizes)
    chip, links = chip_and_links(arguments.chip)
    found = matmul_roofline(chip, batch, d_in, d_out, arguments.dtype, arguments.weights)
    if arguments.plot:
        _plot(found, chip, links, arguments.plot)
    payload = roofline_payload(found, chip, links)
    return json.dumps(payload, indent=2) if arguments.json else roofline_text(payload)


def parse_sizes(kernel: str, text: str) -> tuple[int, ...]:
    """B, D and F. Raises `InputError` with everything that is wrong."""
    from shardwise.errors import InputError, require
    from shardwise.units import parse_count

    problems = [] if kernel == "matmul" else [f"KERNEL: found {kernel!r}; matmul is required"]
    sizes: dict[str, int] = {}
    for word in text.split(","):
        letter, equals, value = (part.strip() for part in word.partition("="))
        if not equals or letter not in LETTERS or letter in sizes:
            problems.append(f"SIZES: found {word!r}; each of B, D and F once is required, such as B=240,D=8192,F=28672")
            continue
        sizes[letter] = 1
        try:
            sizes[letter] = parse_count(value, what=f"SIZES: {letter}")
        except InputError as error:
            problems += error.problems
    missing = [letter for letter in LETTERS if letter not in sizes]
    if missing and not problems:
        problems.append(f"SIZES: {', '.join(missing)} missing; B, D and F are required, such as B=240,D=8192,F=28672")
    require(problems)
    return tuple(sizes[letter] for letter in LETTERS)


def roofline_payload(found: MatmulRoofline, chip: Chip, links: Mapping[str, float]) -> dict[str, Any]:
    """What the report says, in bytes, FLOPs and seconds; `critical_batch` is null where no batch is enough."""
    cost, bounds = found.cost, found.bounds
    batch = found.critical_batch
    return {
        "schema": SCHEMA, "kernel": "matmul", "sizes": {"B": found.batch, "D": found.d_in, "F": found.d_out},
        "chip": chip.name, "dtype": found.dtype, "weights": found.weights,
        "peak_flops_per_s": found.flops_per_s, "memory_bytes_per_s": found.bytes_per_s,
        "flops": cost.flops, "read_bytes": cost.read_bytes, "written_bytes": cost.written_bytes,
        "moved_bytes": cost.moved_bytes, "intensity": cost.intensity, "critical_intensity": found.critical_intensity,
        "math_s": cost.math_s(found.flops_per_s), "memory_s": cost.moved_bytes / found.bytes_per_s,
        "time_s": bounds.lower_s, "no_overlap_s": bounds.upper_s,
        "bound": found.bound, "attainable_flops_per_s": found.attainable_flops_per_s,
        "critical_batch": batch if math.isfinite(batch) else None,
        "links": {
            name: {"bytes_per_s": rate, "critical_intensity": found.flops_per_s / rate} for name, rate in links.items()
        },
    }  # fmt: skip


def roofline_text(payload: Mapping[str, Any]) -> str:
    """The payload for people."""
    from shardwise.units import format_bytes, format_quantity, format_seconds

    sizes, critical = payload["sizes"], payload["critical_batch"]
    stored = (
        f"{payload['dtype']}, {payload['weights']} weights"
        if payload["weights"] != payload["dtype"]
        else payload["dtype"]
    )
    share = payload["attainable_flops_per_s"] / payload["peak_flops_per_s"]
    lines = [
        f"matmul [{sizes['B']:,}, {sizes['D']:,}] · [{sizes['D']:,}, {sizes['F']:,}] in {stored} on {payload['chip']}",
        f"  {payload['bound']}-bound: intensity {payload['intensity']:,.1f} FLOPs/byte, "
        f"the chip's {payload['critical_intensity']:,.1f}",
        f"  compute {format_seconds(payload['math_s']):>9}   {format_quantity(payload['flops'], 'FLOP')} at "
        f"{format_quantity(payload['peak_flops_per_s'], 'FLOP/s', digits=4)}",
        f"  memory  {format_seconds(payload['memory_s']):>9}   {format_bytes(payload['read_bytes'])} read and "
        f"{format_bytes(payload['written_bytes'])} written at {format_quantity(payload['memory_bytes_per_s'], 'B/s')}",
        f"  time    {format_seconds(payload['time_s']):>9}   overlapped, {format_seconds(payload['no_overlap_s'])} one after "
        f"the other; at most {format_quantity(payload['attainable_flops_per_s'], 'FLOP/s')}, {share:.1%} of the peak",
        f"  compute-bound from a batch of {critical:,.1f}" if critical else
        "  memory-bound at every batch: D and F are too narrow",
    ]  # fmt: skip
    if payload["links"]:
        lines += ["", "what a byte sent must go with, FLOPs/byte"]
        for name, link in payload["links"].items():
            rate = format_quantity(link["bytes_per_s"], "B/s")
            lines.append(f"  {name:<14}{rate:>10}  {link['critical_intensity']:>10,.1f}")
    return "\n".join(lines)


def _plot(found: MatmulRoofline, chip: Chip, links: Mapping[str, float], target: str) -> None:
    from shardwise.charts import draw_lines
    from shardwise.cost.figures import roofline_chart

    label = f"B = {found.batch:,}, D = {found.d_in:,}, F = {found.d_out:,}"
    label += f", {found.weights} weights" if found.weights != found.dtype else ""
    kernel = (label, found.cost.intensity, found.attainable_flops_per_s)
    write_picture(draw_lines(roofline_chart(chip, links, [kernel], found.dtype)), target)


def write_picture(svg: str, target: str) -> None:
    """Write an SVG. Raises `InputError` when the place cannot be written."""
    from pathlib import Path

    from shardwise.errors import InputError

    try:
        Path(target).write_text(svg, encoding="utf-8")
    except OSError as error:
        raise InputError(f"--plot: cannot write {target}: {error.strerror}; choose a writable place") from None
