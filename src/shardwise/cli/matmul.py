"""`shardwise matmul`: what a sharded product costs, the cheapest way to compute it, and whether that is right."""

from __future__ import annotations

import argparse
from typing import Any

from shardwise.cli.product import add_product_arguments, answer


def configure(verbs: Any) -> None:
    """Declare the verb."""
    parser = verbs.add_parser(
        "matmul", help="price a sharded product and find the cheapest way to compute it",
        description="Price a sharded product, such as 'A[I_X, J] * B[J, K_X] -> C[I_X, K]', and find the cheapest way to it. "
        "The text means what numpy.einsum computes from it: dims that the result lacks are summed, each once.",
    )  # fmt: skip
    add_product_arguments(parser)
    parser.add_argument("--backward", action="store_true", help="also derive the gradients of all operands")
    parser.add_argument(
        "--free", action="append", default=[], metavar="NAME", help="an operand that may start in any sharding"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> str:
    """The report, as text or as JSON, with whatever else was asked for."""
    return answer(arguments, backward=arguments.backward, free=arguments.free)
