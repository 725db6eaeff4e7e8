"""`shardwise reshard`: the cheapest way from one sharding of a tensor to another."""

from __future__ import annotations

import argparse

from shardwise.present.cli.product import add_product_arguments, answer
from shardwise.present.rendering.report import Report
from shardwise.values import Parser

DESCRIPTION = "Find the cheapest way from one sharding to another, such as 'A[I_X, J_Y] -> A[I_Y, J_X]'."
EXAMPLES = (
    'shardwise reshard "A[I_X, J] -> A[I, J_X]" --mesh X=4 --size I=1024,J=4096 --on h100:4',
    'shardwise reshard "A[I, J]{U_X} -> A[I_X, J]" --mesh X=4 --size I=1024,J=4096 --draw -',
)


def configure(parser: Parser) -> None:
    """Declare the arguments."""
    add_product_arguments(parser)


def run(arguments: argparse.Namespace) -> str | Report:
    """The report, as text or as JSON, with whatever else was asked for."""
    return answer(arguments, backward=False, free=[], one_operand=True)
