"""`shardwise matmul`: what a sharded product costs, the cheapest way to compute it, and whether that is right."""

from __future__ import annotations

import argparse

from shardwise.present.cli.product import add_product_arguments, answer
from shardwise.present.rendering.report import Report
from shardwise.values import Parser

DESCRIPTION = (
    "Price a sharded product, such as 'A[I_X, J] * B[J, K_X] -> C[I_X, K]', and find the cheapest way to it. "
    "The text means what numpy.einsum computes from it: dims that the result lacks are summed, each once."
)
EXAMPLES = (
    'shardwise matmul "A[I_X, J] * B[J, K_Y] -> C[I_X, K_Y]" --mesh X=4,Y=2 --size I=1024,J=4096,K=8192 --on tpu-v5e:4x2',
    'shardwise matmul "A[I, J_X] * B[J_X, K] -> C[I, K]" --mesh X=4 --size I=64,J=64,K=64 --backward --run numpy',
    'shardwise matmul "A[I_X, J] * B[J, K] -> C[I_X, K]" --mesh X=4 --size I=64,J=64,K=64 --emit jax',
)


def configure(parser: Parser) -> None:
    """Declare the arguments."""
    add_product_arguments(parser)
    notation = parser.group("notation")
    notation.add_argument("--backward", action="store_true", help="also derive the gradients of all operands")
    notation.add_argument(
        "--free", action="append", default=[], metavar="NAME", help="an operand that may start in any sharding"
    )


def run(arguments: argparse.Namespace) -> str | Report:
    """The report, as text or as JSON, with whatever else was asked for."""
    return answer(arguments, backward=arguments.backward, free=arguments.free)
