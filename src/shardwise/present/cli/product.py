"""What `matmul` and `reshard` share: their arguments, and the answer as text or as JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardwise.present.cli.arguments import add_output_arguments
from shardwise.present.cli.pictures import picture_name_or_dash, write_picture
from shardwise.present.rendering.report import Preformatted, Report, Section
from shardwise.values import InputError, Parser, format_bytes, format_quantity, parse_count

if TYPE_CHECKING:
    from shardwise.derive import ShardedExpression
    from shardwise.price import ProductReport, ProgramCost
    from shardwise.sharding.notation import EinsumExpression
    from shardwise.verify.xla_compile import XlaReport

MOST_DRAWN = 1024  # devices; a drawing of more cells is unreadable
MOST_SIZE = 10**12  # of a dim: products of such sizes stay finite and exact enough
Payload = dict[str, Any]


def add_product_arguments(parser: Parser) -> None:
    """The expression, its mesh and sizes, and what to do with the program."""
    notation, cluster, search, check, output = parser.groups("notation", "cluster", "search", "check", "output")
    notation.add_argument(
        "expression", help="such as 'A[I_X, J] * B[J, K_X] -> C[I_X, K]'; sizes and format may stand inline"
    )
    notation.add_argument("--mesh", required=True, metavar="AXES", help="axes and their sizes, such as X=4,Y=8")
    notation.add_argument("--size", metavar="DIMS", help="sizes of dims, such as I=8192,J=8192,K=28672")
    notation.add_argument("--dtype", default="bf16", metavar="NAME", help="number format (default: bf16)")
    cluster.add_argument(
        "--on",
        metavar="CHIPS",
        help="a bare chip (tpu-v5p) or a cluster (tpu-v5e:4x4, or a .toml file); without it no times",
    )
    search.add_argument(
        "--objective", choices=("time", "bytes"), default="time", help="what is cheapest (default: time)"
    )
    check.add_argument("--run", choices=("numpy", "jax", "torch"), dest="framework", help="run the program and compare")
    check.add_argument(
        "--verify", choices=("xla", "xla-gpu", "xla-tpu"), help="compare with what XLA's partitioner does"
    )
    output.add_argument(
        "--emit", choices=("jax", "torch"), help="print runnable source of the program instead of the report"
    )
    output.add_argument(
        "--draw",
        type=picture_name_or_dash,
        metavar="FILE",
        help="draw which device holds what: FILE.svg, or - for text",
    )
    add_output_arguments(parser)


def answer(
    arguments: argparse.Namespace, *, backward: bool, free: Sequence[str], one_operand: bool = False
) -> str | Report:
    """Solve, price, and do what was asked for."""
    from shardwise.hardware.mesh_links import place_mesh
    from shardwise.present.product_payload import RESHARD_SCHEMA, SCHEMA, product_payload
    from shardwise.present.reports.sharding import product_report
    from shardwise.price.product import price_product

    made = _made(arguments, one_operand)
    _check_drawn(arguments, made)
    on = place_mesh(made.mesh, arguments.on) if arguments.on else None
    arguments.progress("solving the product")
    report = price_product(made, on, objective=arguments.objective, free=free, with_backward=backward)
    if arguments.emit:
        from shardwise.verify.product_runs import emit

        return emit(made, report.steps, arguments.emit)
    payload = product_payload(report, RESHARD_SCHEMA if one_operand else SCHEMA)
    sections = product_report(report)
    for extra, shown in (_ran(arguments, report), _verified(arguments, report), _drawn(arguments, report)):
        payload |= extra
        sections += shown
    return json.dumps(payload, indent=2) if arguments.json else sections


def _made(arguments: argparse.Namespace, one_operand: bool) -> ShardedExpression:
    from shardwise.derive.sharded_einsum import shard_expression
    from shardwise.sharding import Mesh, parse_expression

    expression = parse_expression(arguments.expression)
    if one_operand and not _is_reshard(expression):
        raise InputError(
            f"reshard: found {arguments.expression!r}; one tensor before and after, with the same dims, is required: "
            "A[I_X, J] -> A[I, J_X]; a product or a sum is for `matmul`"
        )
    mesh = Mesh(tuple(_assignments(arguments.mesh, "--mesh").items()))
    return shard_expression(expression, mesh, _assignments(arguments.size or "", "--size"), arguments.dtype)


def _is_reshard(expression: EinsumExpression) -> bool:
    if len(expression.operands) != 1 or expression.result is None:
        return False
    return set(expression.operands[0].spec.dims) == set(expression.result.spec.dims)


def _assignments(text: str, what: str) -> dict[str, int]:
    """ "X=4,Y=8" as a mapping. Raises `InputError` for anything else, or a name given twice."""
    found: dict[str, int] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, equals, value = part.partition("=")
        if not equals or not name.strip() or name.strip() in found:
            raise InputError(f"{what}: found {part!r} in {text!r}; NAME=SIZE,NAME=SIZE is required, each name once")
        size = parse_count(value.strip(), label=f"{what} {name.strip()}")
        if size > MOST_SIZE:
            raise InputError(f"{what} {name.strip()}: found {value.strip()!r}; at most {MOST_SIZE:.0e} is required")
        found[name.strip()] = size
    return found


def _ran(arguments: argparse.Namespace, report: ProductReport) -> tuple[Payload, list[Section]]:
    if not arguments.framework:
        return {}, []
    from shardwise.verify.product_runs import run_payload, run_product

    arguments.progress(f"running with {arguments.framework}")
    result = run_product(report.expression, report.steps, arguments.framework)
    where = f"run with {arguments.framework} on {result.num_devices} devices"
    return run_payload(result), [Section([f"{where}: largest relative error {result.max_relative_error:.1e}"])]


def _verified(arguments: argparse.Namespace, report: ProductReport) -> tuple[Payload, list[Section]]:
    if not arguments.verify:
        return {}, []
    from shardwise.verify.product_runs import compile_payload
    from shardwise.verify.xla_compile import compile_product

    arguments.progress("compiling with XLA")
    found = compile_product(report.expression, backend=_BACKENDS[arguments.verify])
    lines = [f"XLA ({found.backend}) moves {format_bytes(found.bytes_per_device)} to each device, "
             f"{format_quantity(found.flops_per_device, 'FLOP')}"]  # fmt: skip
    for one in found.collectives:
        axes = ",".join(one.axes) if one.axes else "no set of axes"
        lines.append(f"  {one.op} over {axes}: {format_bytes(one.bytes)}")
    return compile_payload(found), [Section([*lines, f"  {_compared(report.best, found)}"])]


def _compared(ours: ProgramCost, xla: XlaReport) -> str:
    """The program above against the compiler's."""
    if abs(ours.flops_per_device - xla.flops_per_device) > 1e-6 * max(xla.flops_per_device, 1.0):
        return f"not comparable: it runs {format_quantity(ours.flops_per_device, 'FLOP')} in the program above"
    if abs(ours.bytes_per_device - xla.bytes_per_device) <= 1e-6 * max(ours.bytes_per_device, 1.0):
        return "the program above moves the same bytes"
    less = ours.bytes_per_device < xla.bytes_per_device
    return f"the program above moves {'fewer' if less else 'more'} bytes: {format_bytes(ours.bytes_per_device)}"


_BACKENDS: dict[str, Any] = {"xla": "cpu", "xla-gpu": "gpu", "xla-tpu": "tpu"}


def _check_drawn(arguments: argparse.Namespace, made: ShardedExpression) -> None:
    """Refuse a picture of too many devices, before anything is searched."""
    if arguments.draw and made.mesh.num_devices > MOST_DRAWN:
        raise InputError(
            f"--draw: found {made.mesh.num_devices:,} devices; at most {MOST_DRAWN:,} are required, such as --mesh X=4,Y=8"
        )


def _drawn(arguments: argparse.Namespace, report: ProductReport) -> tuple[Payload, list[Section]]:
    if not arguments.draw:
        return {}, []
    from shardwise.present.charts.cells import draw_grids
    from shardwise.present.charts.sharding_charts import draw_text, moments, shards_chart

    made = report.expression
    lying = list(moments(made, report.steps))
    if arguments.draw == "-":
        return {}, [Section([_whole(draw_text(one.name, one.spec, made.mesh))], title=one.heading) for one in lying]
    chart = shards_chart(f"{made.expression}: who holds what", lying, made.mesh)
    write_picture("--draw", arguments.draw, draw_grids(chart))
    return {}, [Section([f"drawn to {arguments.draw}"])]


def _whole(picture: str) -> Preformatted:
    """A picture of characters, whose lines are never folded."""
    return Preformatted(lambda width: picture.split("\n"))
