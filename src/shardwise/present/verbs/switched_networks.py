"""`network`: the switches of a cluster, the groups of a layout on its levels, and what a collective sends through a switch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from shardwise import layout as layouts
from shardwise.hardware import load_cluster
from shardwise.layout import Layout
from shardwise.present import charts
from shardwise.present.exports import picture
from shardwise.present.verb import Argument, verb
from shardwise.values import InputError, argument_label, parse_quantity

if TYPE_CHECKING:
    from shardwise.hardware import Cluster
    from shardwise.layout import ClusterNetwork


@verb(
    description="The levels of a cluster behind switches: units, switches and ports, bandwidth into, out of and across each,\n"
    "bisection. With a layout: which group crosses which level, and the bytes that collectives send through a unit's switches.",
    examples=(
        "shardwise network h100:64",
        'shardwise network h100:512 --layout "tp=8 pp=8 fsdp=8" --draw groups.svg',
        'shardwise network gb200:576 --layout "tp=8 dp=72" --bytes 1GB --json',
    ),
    exports=(
        picture(
            "--draw",
            "draw which group of the layout crosses which level",
            lambda network: charts.network_chart(network),
        ),
    ),
    group_order=("cluster", "layout", "output"),
    has_details=True,
)
def network(
    cluster: Annotated[
        str | Cluster,
        Argument(
            group="cluster", metavar="CLUSTER", completes="clusters",
            help="CHIP:COUNT behind switches, or a .toml file, whose [[levels]] state switches and cables (docs/extending.md)",
        ),
    ],
    *,
    layout: Annotated[
        str | Layout | None,
        Argument(
            flag="--layout", group="layout", metavar="TEXT", parse=str,
            help='degrees whose groups are placed on the levels, such as "tp=8 pp=8 fsdp=16" (default: one group of all devices)',
        ),
    ] = None,
    size: Annotated[
        str | float,
        Argument(
            flag="--bytes", group="layout", metavar="SIZE", help="the whole array of each collective (default: 1GB)"
        ),
    ] = "1GB",
) -> ClusterNetwork:  # fmt: skip
    """Return the levels of a cluster behind switches, the groups of a layout on them, and what collectives send through switches.

    Rates are nominal, in bytes/s of one direction but for the bisection. `size` is the whole array of each collective, in bytes
    or as a text. Raises `InputError` for a torus, a layout of another number of devices, and a wrong file.

    >>> import shardwise as sw
    >>> result = sw.network("h100:64", layout="tp=8 dp=8")
    >>> result.levels[1].oversubscription, result.groups[1].crossed
    (9.0, ['network'])
    """
    loaded = load_cluster(cluster) if isinstance(cluster, str) else cluster
    placed = Layout.parse(layout) if isinstance(layout, str) else layout
    label = argument_label("size", "--bytes")
    num_bytes = parse_quantity(size, label=label, unit="B")
    if not num_bytes > 0:
        raise InputError(f"{label}: found {size!r}; bytes above 0 are required, such as 1GB")
    return layouts.describe_network(loaded, placed, num_bytes)
