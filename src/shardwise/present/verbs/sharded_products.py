"""`matmul` and `reshard`: what a sharded product or another sharding costs; `collective`: the time of one collective."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Literal, Required, TypedDict, Unpack

from shardwise import derive, hardware, price, sharding, verify
from shardwise.present import charts, reports
from shardwise.present.exports import picture, picture_name_or_dash, write_picture
from shardwise.present.verb import Argument, Export, require_known_fields, verb
from shardwise.values import (
    InputError,
    Progress,
    argument_label,
    bytes_per_element,
    describe_unknown,
    ignore_progress,
    parse_count,
    parse_quantity,
)

if TYPE_CHECKING:
    from shardwise.derive import ShardedExpression
    from shardwise.hardware import PlacedCollective
    from shardwise.hardware.network.links import CollectiveName
    from shardwise.present.rendering.report import Report
    from shardwise.verify import CheckedProduct, EmittedProgram
    from shardwise.verify.xla_compile import Backend

MAX_DRAWN_DEVICES = 1024  # a drawing of more cells is unreadable
MAX_SIZE = 10**12  # of a dim: products of such sizes stay finite and exact enough
XLA_BACKENDS: Mapping[str, Backend] = {"xla": "cpu", "xla-gpu": "gpu", "xla-tpu": "tpu"}


class ProductFields(TypedDict, total=False):
    """Arguments of `matmul` and `reshard` beside the expression: the mesh, sizes, chips, and what to do with the program."""

    mesh: Annotated[
        Required[str | Mapping[str, int]],
        Argument(
            flag="--mesh", group="notation", required=True, metavar="AXES", help="axes and their sizes, such as X=4,Y=8"
        ),
    ]
    sizes: Annotated[
        str | Mapping[str, int],
        Argument(
            flag="--size", group="notation", metavar="DIMS", help="sizes of dims, such as I=8192,J=8192,K=28672"
        ),
    ]  # fmt: skip
    dtype: Annotated[
        str, Argument(flag="--dtype", group="notation", metavar="NAME", help="number format (default: bf16)")
    ]
    on: Annotated[
        str | None,
        Argument(
            flag="--on", group="cluster", metavar="CHIPS",
            help="a bare chip (tpu-v5p) or a cluster (tpu-v5e:4x4, or a .toml file); without it no times",
        ),
    ]  # fmt: skip
    objective: Annotated[
        Literal["time", "bytes"],
        Argument(
            flag="--objective", group="search", choices=("time", "bytes"), help="what is cheapest (default: time)"
        ),
    ]
    run_with: Annotated[
        Literal["numpy", "jax", "torch"] | None,
        Argument(flag="--run", group="check", choices=("numpy", "jax", "torch"), help="run the program and compare"),
    ]
    verify_with: Annotated[
        Literal["xla", "xla-gpu", "xla-tpu"] | None,
        Argument(
            flag="--verify", group="check", choices=tuple(XLA_BACKENDS), help="compare with what XLA's partitioner does"
        ),
    ]
    emit: Annotated[
        Literal["jax", "torch"] | None,
        Argument(
            flag="--emit", group="output", choices=("jax", "torch"),
            help="print runnable source of the program instead of the report",
        ),
    ]  # fmt: skip


def _draw_product(result: CheckedProduct | EmittedProgram, target: str) -> Report | None:
    """Draw which device holds what: into a file, or for "-" as sections of the report."""
    num_devices = result.product.expression.mesh.num_devices
    if num_devices > MAX_DRAWN_DEVICES:
        raise InputError(
            f"--draw: found {num_devices:,} devices; at most {MAX_DRAWN_DEVICES:,} are required, such as --mesh X=4,Y=8"
        )
    if target == "-":
        return reports.holder_sections(result.product)
    write_picture("--draw", target, charts.product_chart(result.product))
    return [reports.drawn_section(target)]


DRAW = Export(
    flag="--draw", help="draw which device holds what: FILE.svg, or - for text", parse=picture_name_or_dash,
    write=_draw_product,
)  # fmt: skip
Expression = Annotated[
    str,
    Argument(
        group="notation", help="such as 'A[I_X, J] * B[J, K_X] -> C[I_X, K]'; sizes and format may stand inline"
    ),
]  # fmt: skip
GROUP_ORDER = ("notation", "cluster", "search", "check", "output")


# What running the program of a product needs.
PROGRAM_REQUIRES = {"--run jax and --verify xla": ("jax",), "--run torch": ("torch",)}


@verb(
    requires_for=PROGRAM_REQUIRES,
    description="Price a sharded product, such as 'A[I_X, J] * B[J, K_X] -> C[I_X, K]', and find the cheapest way to it. "
    "The text means what numpy.einsum computes from it: dims that the result lacks are summed, each once.",
    examples=(
        'shardwise matmul "A[I_X, J] * B[J, K_Y] -> C[I_X, K_Y]" --mesh X=4,Y=2 --size I=1024,J=4096,K=8192 --on tpu-v5e:4x2',
        'shardwise matmul "A[I, J_X] * B[J_X, K] -> C[I, K]" --mesh X=4 --size I=64,J=64,K=64 --backward --run numpy',
        'shardwise matmul "A[I_X, J] * B[J, K] -> C[I_X, K]" --mesh X=4 --size I=64,J=64,K=64 --emit jax',
    ),
    exports=(DRAW,),
    group_order=GROUP_ORDER,
)
def matmul(
    expression: Expression,
    *,
    backward: Annotated[
        bool, Argument(flag="--backward", group="notation", help="also derive the gradients of all operands")
    ] = False,
    free: Annotated[
        Sequence[str],
        Argument(
            flag="--free", group="notation", metavar="NAME", repeat=True,
            help="an operand that may start in any sharding",
        ),
    ] = (),
    progress: Progress = ignore_progress,
    **fields: Unpack[ProductFields],
) -> CheckedProduct | EmittedProgram:  # fmt: skip
    """Return what a sharded product costs, and the cheapest way to compute it.

    `mesh` has the axes and their sizes, `sizes` those of dims, as text ("X=4,Y=8") or as a mapping. `on` is a bare chip or a
    cluster; without it there are no times, and the cheapest program moves the fewest bytes. `run_with` runs the program with a
    framework and compares it with the unsharded product; `verify_with` compares with what XLA's partitioner does; `emit` returns
    the program's source instead. Raises `InputError` for a text that is no product, for sizes that do not divide, and for unknown
    names; `ShardingError` if there is no program.

    >>> import shardwise as sw
    >>> result = sw.matmul("A[I_X, J] * B[J, K_Y] -> C[I_X, K_Y]", mesh="X=4,Y=2", sizes="I=1024,J=4096,K=8192", on="tpu-v5e:4x2")
    >>> [step.op for step in result.product.best.program]
    ['local_product']
    """
    sharded = _parse_product(expression, fields)
    return _price_expression(sharded, fields, progress, with_backward=backward, free=free)


@verb(
    requires_for=PROGRAM_REQUIRES,
    description="Find the cheapest way from one sharding to another, such as 'A[I_X, J_Y] -> A[I_Y, J_X]'.",
    examples=(
        'shardwise reshard "A[I_X, J] -> A[I, J_X]" --mesh X=4 --size I=1024,J=4096 --on h100:4',
        'shardwise reshard "A[I, J]{U_X} -> A[I_X, J]" --mesh X=4 --size I=1024,J=4096 --draw -',
    ),
    exports=(DRAW,),
    group_order=GROUP_ORDER,
)
def reshard(
    expression: Expression, *, progress: Progress = ignore_progress, **fields: Unpack[ProductFields]
) -> CheckedProduct | EmittedProgram:
    """Return the cheapest way from one sharding of a tensor to another; arguments and errors are those of `matmul`.

    Raises `InputError` also for an expression that is not one tensor before and after, with the same dims.

    >>> import shardwise as sw
    >>> result = sw.reshard("A[I_X, J] -> A[I, J_X]", mesh={"X": 4}, sizes={"I": 1024, "J": 4096})
    >>> [step.op for step in result.product.best.program]
    ['all_to_all']
    """
    sharded = _parse_product(expression, fields, is_reshard=True)
    return _price_expression(sharded, fields, progress, is_reshard=True)


def _parse_product(text: str, fields: ProductFields, *, is_reshard: bool = False) -> ShardedExpression:
    require_known_fields(fields, ProductFields)
    expression = sharding.parse_expression(text)
    if is_reshard and not expression.is_reshard:
        raise InputError(
            f"reshard: found {text!r}; one tensor before and after, with the same dims, is required: "
            "A[I_X, J] -> A[I, J_X]; a product or a sum is for `matmul`"
        )
    if "mesh" not in fields:  # of a Python call: the parser of the command line requires it
        raise InputError("mesh: missing; axes and their sizes are required, such as X=4,Y=8")
    mesh = sharding.Mesh(tuple(parse_assignments(fields["mesh"], argument_label("mesh")).items()))
    sizes = parse_assignments(fields.get("sizes", ""), argument_label("sizes", "size"))
    return derive.shard_expression(expression, mesh, sizes, fields.get("dtype", "bf16"))


def _price_expression(
    expression: ShardedExpression, fields: ProductFields, progress: Progress, *, with_backward: bool = False,
    free: Sequence[str] = (), is_reshard: bool = False,
) -> CheckedProduct | EmittedProgram:  # fmt: skip
    """Solve and price the product, then run, compile or emit it as the fields say."""
    on, emit, xla = fields.get("on"), fields.get("emit"), fields.get("verify_with")
    chips = hardware.place_mesh(expression.mesh, on) if on else None
    progress("solving the product")
    product = price.price_product(
        expression, chips, objective=fields.get("objective", "time"), free=free, with_backward=with_backward
    )
    if emit:
        return verify.emit_program(product, emit)
    return verify.check_product(
        product, framework=fields.get("run_with"), xla_backend=XLA_BACKENDS[xla] if xla else None, is_reshard=is_reshard,
        progress=progress,
    )  # fmt: skip


def parse_assignments(text: str | Mapping[str, int], label: str) -> dict[str, int]:
    """Parse sizes by name, such as "X=4,Y=8". Raises `InputError` for anything else, and for a name that is repeated.

    >>> parse_assignments("X=4, Y=8Ki", "--mesh")
    {'X': 4, 'Y': 8192}
    """
    if not isinstance(text, str):
        return dict(text)
    sizes: dict[str, int] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not name or name in sizes:
            raise InputError(f"{label}: found {part!r} in {text!r}; NAME=SIZE,NAME=SIZE is required, each name once")
        sizes[name] = parse_count(value, label=f"{label} {name}")
        if sizes[name] > MAX_SIZE:
            raise InputError(f"{label} {name}: found {value!r}; at most {MAX_SIZE:.0e} is required")
    return sizes


def _collective_strip(collective: PlacedCollective) -> charts.Chart:
    return charts.collective_chart(collective)


@verb(
    description="""How long a collective takes on a chip's network, what bounds it, and how else it could be carried out.

SIZE is the whole array: what every device has after an all-gather or broadcast and before a reduce-scatter or all-reduce;
for an all-to-all the shards of all devices together. Bytes ("34MB", "64MiB", "256B") or a shape ("2048x8192", with --dtype).""",
    examples=(
        "shardwise collective all-gather 2048x8192 --axes 4 --on tpu-v5e",
        "shardwise collective all-reduce 64MiB --axes 4,4 --on tpu-v5p:4x4x8 --draw all-reduce.svg",
        "shardwise collective all-reduce 1GB --axes 512 --on h100",
    ),
    exports=(picture("--draw", "draw the steps: which device holds what (up to 16 devices)", _collective_strip),),
    group_order=("collective", "cluster", "output"),
)
def collective(
    operation: Annotated[
        str,
        Argument(
            group="collective", metavar="OP",
            help="all-gather, reduce-scatter, all-reduce, all-to-all, broadcast or send-recv (to the next device)",
        ),
    ],
    size: Annotated[
        str | float,
        Argument(
            group="collective", metavar="SIZE",
            help="the whole array: bytes such as 34MB, or a shape such as 2048x8192",
        ),
    ],
    axes: Annotated[
        str | int | Sequence[int],
        Argument(
            flag="--axes", group="collective", required=True, metavar="N[,N...]",
            help="devices that take part, on each axis of a torus (and pods, last), or on each tier of switches from the inside "
            "out (one number fills the tiers)",
        ),
    ],
    on: Annotated[
        str,
        Argument(
            flag="--on", group="cluster", required=True, metavar="CHIP_OR_SLICE", completes="chips",
            help="tpu-v5e: each axis is a physical axis of its own, wrapped by the chip's rule; tpu-v5e:4x4, h100:64 or a .toml "
            "file: that cluster",
        ),
    ],
    dtype: Annotated[
        str,
        Argument(
            flag="--dtype", group="collective", metavar="NAME",
            help="format of a SIZE given as a shape (default: bf16)",
        ),
    ] = "bf16",
    one_way: Annotated[
        bool, Argument(flag="--one-way", group="collective", help="use rings of a torus in one direction only")
    ] = False,
) -> PlacedCollective:  # fmt: skip
    """Return how long a collective takes on a chip's network in seconds, what bounds it, and how other algorithms compare.

    `size` is the whole array: bytes as a number or text ("34MB"), or a shape ("2048x8192") of elements in `dtype`. `axes` are the
    devices that take part, on each axis of a torus (and pods, last) or on each tier of switches from the inside out. Raises
    `InputError` for unknown names, and for axes that the network does not have.

    >>> import shardwise as sw
    >>> result = sw.collective("all-reduce", "1GB", axes=16, on="h100")
    >>> result.report.algorithm, result.report.axes
    ('hierarchical', (8, 2))
    """
    kind, num_bytes = parse_operation(operation), array_bytes(size, dtype)
    topology, cuts = hardware.place_group(on.strip(), parse_axes(axes))
    report = hardware.collective_report(kind, num_bytes, topology, cuts, one_way=one_way)
    return hardware.PlacedCollective(report=report, on=on, topology=topology, is_one_way=one_way)


def parse_operation(text: str) -> CollectiveName:
    """Return the collective of that name, written with "-" or "_". Raises `InputError`."""
    names = hardware.COLLECTIVE_NAMES
    for name in names:
        if text.lower().replace("-", "_") == name:
            return name
    raise InputError(
        f"{argument_label('operation')}: {describe_unknown(text, [name.replace('_', '-') for name in names])}"
    )


def array_bytes(size: str | float, dtype: str) -> float:
    """Return the bytes of an array: a quantity of bytes ("256B" is 256 bytes here), or a shape of elements of a format."""
    width, label = bytes_per_element(dtype), argument_label("size")
    if isinstance(size, str) and re.fullmatch(r"\s*\d+(x\d+)+\s*", size):
        sizes = [parse_count(part.strip(), label=label) for part in size.split("x")]
        num_bytes = math.prod(sizes) * width
    else:
        plain = re.fullmatch(r"\s*([\d.]+)\s*B\s*", size) if isinstance(size, str) else None
        num_bytes = parse_quantity(f"{plain[1]} B" if plain else size, label=label, unit="B")
    if num_bytes < 1:
        raise InputError(f"{label}: found {size!r}; at least 1 byte is required, such as 34MB or 2048x8192")
    return num_bytes


def parse_axes(axes: str | int | Sequence[int]) -> tuple[int, ...]:
    """Return the sizes of a group's axes. Raises `InputError` for a text that has none."""
    if not isinstance(axes, str):
        return (axes,) if isinstance(axes, int) else tuple(axes)
    parts = axes.replace("x", ",").split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise InputError(
            f"{argument_label('axes')}: found {axes!r}; sizes separated by commas or x are required, such as 4, 4,4 or 4x4"
        )
    return tuple(int(part) for part in parts)
