"""`shardwise collective`: how long a collective takes on a chip's network, and what bounds it."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from shardwise.present.cli.arguments import add_output_arguments
from shardwise.present.cli.pictures import picture_name, write_picture
from shardwise.present.rendering.report import Report
from shardwise.values import Parser

if TYPE_CHECKING:
    from shardwise.hardware import Cut, Topology
    from shardwise.hardware.network.compare_collective_algorithms import CollectiveReport
    from shardwise.hardware.network.nccl_conventions import CollectiveName

DESCRIPTION = """How long a collective takes on a chip's network, what bounds it, and how else it could be carried out.

SIZE is the whole array: what every device has after an all-gather or broadcast and before a reduce-scatter or all-reduce;
for an all-to-all the shards of all devices together. Bytes ("34MB", "64MiB", "256B") or a shape ("2048x8192", with --dtype)."""
EXAMPLES = (
    "shardwise collective all-gather 2048x8192 --axes 4 --on tpu-v5e",
    "shardwise collective all-reduce 64MiB --axes 4,4 --on tpu-v5p:4x4x8 --draw all-reduce.svg",
    "shardwise collective all-reduce 1GB --axes 512 --on h100",
)


def configure(parser: Parser) -> None:
    """Declare the arguments."""
    collective, cluster, output = parser.groups("collective", "cluster", "output")
    collective.add_argument(
        "operation", metavar="OP",
        help="all-gather, reduce-scatter, all-reduce, all-to-all, broadcast or send-recv (to the next device)",
    )  # fmt: skip
    collective.add_argument(
        "size", metavar="SIZE", help="the whole array: bytes such as 34MB, or a shape such as 2048x8192"
    )
    collective.add_argument(
        "--axes", required=True, metavar="N[,N...]",
        help="devices that take part, on each axis of a torus (and pods, last), or on each tier of switches from the inside "
        "out (one number fills the tiers)",
    )  # fmt: skip
    cluster.add_argument(
        "--on", required=True, metavar="CHIP_OR_SLICE", completes="chips",
        help="tpu-v5e: each axis is a physical axis of its own, wrapped by the chip's rule; tpu-v5e:4x4, h100:64 or a .toml "
        "file: that cluster",
    )  # fmt: skip
    collective.add_argument(
        "--dtype", default="bf16", metavar="NAME", help="format of a SIZE given as a shape (default: bf16)"
    )
    collective.add_argument("--one-way", action="store_true", help="use rings of a torus in one direction only")
    output.add_argument(
        "--draw",
        type=picture_name,
        metavar="FILE",
        help="draw the steps: which device holds what (up to 16 devices)",
    )
    add_output_arguments(parser)


def run(arguments: argparse.Namespace) -> str | Report:
    """The report, as text or as JSON."""
    from shardwise.hardware.network.compare_collective_algorithms import collective_payload, collective_report
    from shardwise.present.reports.sharding import collective_sections

    operation = parse_operation(arguments.operation)
    num_bytes = array_bytes(arguments.size, arguments.dtype)
    topology, cuts = place_group(arguments.on.strip(), parse_axes(arguments.axes))
    report = collective_report(operation, num_bytes, topology, cuts, one_way=arguments.one_way)
    if arguments.draw:
        _draw(report, arguments.one_way, arguments.draw)
    if arguments.json:
        return json.dumps(collective_payload(report, arguments.on, topology), indent=2)
    return collective_sections(report, arguments.on, topology)


def parse_operation(text: str) -> CollectiveName:
    """The operation that OP names, with "-" or "_"."""
    from shardwise.hardware.network.nccl_conventions import COLLECTIVE_NAMES
    from shardwise.values import InputError, describe_unknown

    for operation in COLLECTIVE_NAMES:
        if text.lower().replace("-", "_") == operation:
            return operation
    raise InputError(f"OP: {describe_unknown(text, [name.replace('_', '-') for name in COLLECTIVE_NAMES])}")


def array_bytes(text: str, dtype: str) -> float:
    """Bytes of an array: a quantity of bytes ("256B" is 256 bytes here), or a shape of elements of a format."""
    import math
    import re

    from shardwise.values import InputError, bytes_per_element, parse_quantity

    width = bytes_per_element(dtype)
    if re.fullmatch(r"\s*\d+(x\d+)+\s*", text):
        num_bytes = math.prod(int(part) for part in text.split("x")) * width
    else:
        plain = re.fullmatch(r"\s*([\d.]+)\s*B\s*", text)
        num_bytes = parse_quantity(f"{plain[1]} B" if plain else text, label="SIZE", unit="B")
    if num_bytes < 1:
        raise InputError(f"SIZE: found {text!r}; at least 1 byte is required, such as 34MB or 2048x8192")
    return num_bytes


def parse_axes(text: str) -> tuple[int, ...]:
    """The sizes of `--axes`."""
    from shardwise.values import InputError

    parts = text.replace("x", ",").split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise InputError(f"--axes: found {text!r}; sizes separated by commas or x are required, such as 4, 4,4 or 4x4")
    return tuple(int(part) for part in parts)


def place_group(on: str, axes: tuple[int, ...]) -> tuple[Topology, list[Cut]]:
    """The network, and the part of each of its levels that the group spans."""
    from shardwise.hardware import Cut, Switched, Torus, load_cluster
    from shardwise.hardware.catalog_networks import build_bare_chip_topology
    from shardwise.hardware.cluster_loading import is_cluster

    if is_cluster(on):
        topology = load_cluster(on).sustained_topology
    else:
        topology = build_bare_chip_topology(on.lower(), axes)
        if isinstance(topology, Torus):
            _check_sold(on.lower(), axes)
            return topology, [Cut(size, 1) for size in axes]
    if isinstance(topology, Switched):
        sizes = _on_tiers(on, axes, topology.levels)
    elif isinstance(topology, Torus):
        sizes = _on_torus(on, axes, topology.levels)
    else:
        sizes = _on_pods(on, axes, topology.torus.levels, topology.num_pods)
    return topology, [Cut(size, 1) for size in sizes]


def _on_pods(on: str, axes: tuple[int, ...], shape: tuple[int, ...], num_pods: int) -> list[int]:
    """The sizes on the torus, and last the pods: 1 where only axes of the torus are given."""
    from shardwise.values import InputError

    inside, pods = (axes[:-1], axes[-1]) if len(axes) == len(shape) + 1 else (axes, 1)
    if pods > num_pods:
        raise InputError(f"--axes: found {pods} pods on {on}, which has {num_pods}; at most so many are required")
    return [*_on_torus(on, inside, shape), pods]


def _check_sold(chip: str, axes: tuple[int, ...]) -> None:
    """Refuse axes that no slice of the chip has: the catalogue takes the shape, filled up with axes of 1, or it does not."""
    from contextlib import suppress

    from shardwise.hardware import load_cluster
    from shardwise.values import InputError

    for num_axes in range(len(axes), 4):
        with suppress(InputError):
            load_cluster(f"{chip}:" + "x".join(map(str, axes + (1,) * (num_axes - len(axes)))))
            return
    shown = ",".join(map(str, axes))
    raise InputError(
        f"--axes: found {shown}; no pod of {chip} has such axes; fewer or shorter ones are required, such as --axes 4"
    )


def _on_torus(on: str, axes: tuple[int, ...], shape: tuple[int, ...]) -> list[int]:
    """The sizes in the order of the physical axes: a whole axis each if there is one, else the shortest that it divides."""
    from itertools import permutations

    from shardwise.values import InputError

    if len(axes) <= len(shape):
        wanted = axes + (1,) * (len(shape) - len(axes))
        fitting = [p for p in permutations(wanted) if all(n % size == 0 for size, n in zip(p, shape, strict=True))]
        if fitting:
            return list(min(fitting, key=lambda p: sum(n / size for size, n in zip(p, shape, strict=True) if size > 1)))
    sizes = "x".join(map(str, shape))
    raise InputError(
        f"--axes: found {','.join(map(str, axes))} on {on}; each needs a physical axis of its own of {sizes}, of its size or a "
        f"multiple of it; a group on several physical axes is written as several sizes, such as --axes {sizes.replace('x', ',')}"
    )


def _on_tiers(on: str, axes: tuple[int, ...], tiers: tuple[int, ...]) -> list[int]:
    """The sizes by tier, from the inside out; one number fills the inner tier first."""
    from shardwise.values import InputError

    inner = tiers[0]
    if len(axes) == 1 and axes[0] > inner and axes[0] % inner == 0:
        axes = (inner, axes[0] // inner)
    if len(axes) <= len(tiers) and all(size <= tier for size, tier in zip(axes, tiers, strict=False)):
        return [*axes, *(1,) * (len(tiers) - len(axes))]
    raise InputError(
        f"--axes: found {','.join(map(str, axes))} on {on}, whose tiers hold {', '.join(map(str, tiers))} from the inside out; "
        f"one number of devices or a size for each tier is required, such as --axes {inner} or --on h100:64 --axes 1,8"
    )


def _draw(report: CollectiveReport, one_way: bool, target: str) -> None:
    """Write the simulated steps; behind switches those of one ring."""
    from shardwise.hardware.network.message_simulation import SIMULATED_KINDS, ring_grid, simulate_collective
    from shardwise.present.charts.cells import draw_strip
    from shardwise.present.charts.sharding_charts import MOST_DEVICES, strip_of
    from shardwise.sharding import CollectiveKind
    from shardwise.values import InputError

    if report.network == "pods":
        raise InputError("--draw: found a group over several pods; one inside a pod is drawn, such as --axes 4,4")
    direct = report.network == "switched" and report.kind == "all_to_all"
    if report.kind not in SIMULATED_KINDS or direct:
        where = " on a torus" if direct else ""
        raise InputError(
            f"--draw: found {report.kind.replace('_', '-')}; {', '.join(SIMULATED_KINDS).replace('_', '-')}{where} are drawn"
        )
    if report.num_devices > MOST_DEVICES:
        raise InputError(
            f"--draw: found {report.num_devices} devices; at most {MOST_DEVICES} are required, such as --axes 8"
        )
    ring = report.network == "switched"
    shape = (report.num_devices,) if ring else tuple(size for size in report.axes if size > 1)
    wraps = (True,) if ring else tuple(w for w, size in zip(report.wraps, report.axes, strict=True) if size > 1)
    done = simulate_collective(
        CollectiveKind(report.kind), report.bytes, ring_grid(shape, wraps, one_way=one_way or ring), split=False
    )
    write_picture("--draw", target, draw_strip(strip_of(done)))
