"""`shardwise reshard`: the cheapest way from one sharding of a tensor to another."""

from __future__ import annotations

import argparse
from typing import Any

from shardwise.cli.product import add_product_arguments, answer


def configure(verbs: Any) -> None:
    """Declare the verb."""
    parser = verbs.add_parser(
        "reshard", help="find the cheapest way from one sharding of a tensor to another",
        description="Find the cheapest way from one sharding to another, such as 'A[I_X, J_Y] -> A[I_Y, J_X]'.",
    )  # fmt: skip
    add_product_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> str:
    """The report, as text or as JSON, with whatever else was asked for."""
    return answer(arguments, backward=False, free=[], one_operand=True)
