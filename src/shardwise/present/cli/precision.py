"""`shardwise precision`: floating-point formats, their bits, range and resolution."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from shardwise.present.cli.arguments import add_output_arguments
from shardwise.present.cli.pictures import picture_name, write_picture
from shardwise.present.rendering.report import Report, Section, Table
from shardwise.values import Parser

if TYPE_CHECKING:
    from shardwise.values import NumberFormat

DESCRIPTION = """Floating-point formats: bits, largest and smallest numbers, resolution. --plot draws the distance between
numbers at every size, and 10,000 points between 1 and 2 rounded to each format. Recipes made of formats: show precisions."""
EXAMPLES = (
    "shardwise precision",
    "shardwise precision bf16 fp16 e4m3 e5m2 --plot formats.svg",
)


def configure(parser: Parser) -> None:
    """Declare the arguments."""
    formats, output = parser.groups("formats", "output")
    formats.add_argument(
        "formats", nargs="*", metavar="FORMAT", help="fp32, tf32, bf16, fp16, e4m3, e5m2, e2m1 or e8m0 (default: all)"
    )
    output.add_argument("--plot", type=picture_name, metavar="FILE", help="draw range and resolution")
    add_output_arguments(parser)


def run(arguments: argparse.Namespace) -> str | Report:
    """The table of formats, as text or as JSON."""
    from shardwise.present.number_format_payload import formats_payload
    from shardwise.values import run_all
    from shardwise.values.dtypes import NUMBER_FORMATS, get_number_format

    names = list(dict.fromkeys(arguments.formats)) or list(NUMBER_FORMATS)
    formats = run_all(*(partial(get_number_format, name) for name in names))
    if arguments.plot:
        _draw(formats, arguments.plot)
    return json.dumps(formats_payload(formats), indent=2) if arguments.json else _report(formats)


def _draw(formats: Sequence[NumberFormat], target: str) -> None:
    from shardwise.present.charts.draw_chart import draw_chart
    from shardwise.present.charts.drawing import below
    from shardwise.present.charts.sharding_charts import format_charts

    write_picture("--plot", target, below([draw_chart(chart) for chart in format_charts(formats)]))


def _report(formats: Sequence[NumberFormat]) -> Report:
    head = (
        "format", "bits", "sign", "exponent", "mantissa", "bias", "largest", "smallest normal", "smallest", "epsilon",
        "numbers", "inf", "nan",
    )  # fmt: skip
    notes = (
        "smallest: the smallest number above 0, a subnormal one but in e8m0; epsilon: from 1 to the next number;",
        "numbers: codes that are finite numbers.",
    )
    return [Section([Table(rows=(head, *map(_row, formats)), right=range(1, 11))]), Section(notes)]


def _row(one: NumberFormat) -> tuple[str, ...]:
    sizes = (one.max, one.min_normal, one.min_subnormal, one.epsilon)
    bits = (one.bits, one.sign_bits, one.exponent_bits, one.mantissa_bits, one.bias)
    return (
        one.name, *map(str, bits), *(f"{size:.4g}" for size in sizes), f"{one.num_finite:,}",
        "yes" if one.has_infinity else "-", "yes" if one.has_nan else "-",
    )  # fmt: skip
