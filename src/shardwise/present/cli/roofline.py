"""`shardwise roofline`: what bounds a kernel, or every operation of a model's block, on one chip."""

from __future__ import annotations

import argparse
import json
import re
from typing import TYPE_CHECKING

from shardwise.present.cli.arguments import add_output_arguments, add_set_argument
from shardwise.present.cli.pictures import picture_name, write_picture
from shardwise.present.rendering.report import Report
from shardwise.values import Parser, apply_overrides, did_you_mean, parse_overrides

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardwise.book_formulas import KernelRoofline
    from shardwise.hardware import Chip
    from shardwise.model import Architecture

MOST = 10**18  # of any size: products of six of them stay finite
EXAMPLE = "B=240,D=8192,F=28672"
# Letters of the kernels, for the help, which loads nothing; a test compares them with `book_formulas.rooflines.KERNEL_FORMS`.
KERNELS = """kernels and their sizes (in brackets: may be left out)
  dot          [N] · [N]                             N
  elementwise  A arrays [N] -> [N]                   N [A=2]
  matmul       [B, D] · [D, F]                       B,D,F
  bmm          [B, T, D] · [B, D, F]                 B,D,F [T=1]
  moe          [B, D] · [k of E experts, D, F]       B,D,F,E,k
  attention    Q [B, T, N, H], K and V [B, S, K, H]  T,N,H [B=1] [S=T] [K=N]; T=1 decodes
  MODEL        every operation of a model's block    T [B=1]: sequences of T tokens"""
DESCRIPTION = f"""What bounds a kernel on one chip: FLOPs, bytes moved, intensity against the chip's, time, the size from which
compute binds, what padding to the matrix unit wastes. Peaks and bandwidths are the vendor's, as in the books.

{KERNELS}"""
EXAMPLES = (
    "shardwise roofline matmul B=240,D=8192,F=28672 tpu-v5e --plot roofline.svg",
    "shardwise roofline matmul B=240,D=8192,F=28672 tpu-v5e --weights int8 --from vmem",
    'shardwise roofline attention T=8192,N=64,K=8,H=128 h100 --causal --with "attention T=1,S=8192,N=64,K=8,H=128"',
    "shardwise roofline llama-3-70b T=8192 h100",
)


def configure(parser: Parser) -> None:
    """Declare the arguments."""
    kernel, chip, output = parser.groups("kernel", "chip", "output")
    kernel.add_argument("kernel", metavar="KERNEL", completes="models", help="a kernel, or a model of the catalogue")
    kernel.add_argument("sizes", metavar="SIZES", nargs="+", help=f"its sizes by letter, such as {EXAMPLE}")
    chip.add_argument(
        "chip",
        metavar="CHIP",
        completes="chips",
        help="a chip of the catalogue, such as tpu-v5e, or a cluster's .toml file",
    )
    kernel.add_argument(
        "--dtype", default="bf16", metavar="NAME", help="format of activations and arithmetic (default: bf16)"
    )
    kernel.add_argument(
        "--weights", metavar="NAME", help="format that the weight of a product is stored in (default: that of --dtype)"
    )
    kernel.add_argument(
        "--from", dest="origin", default="hbm", metavar="PLACE",
        help="where operands lie and results go: host (over PCIe), hbm (default) or vmem",
    )  # fmt: skip
    kernel.add_argument("--causal", action="store_true", help="mask attention: a query sees the keys before it")
    kernel.add_argument(
        "--unfused", action="store_true", help="write attention's scores to memory, unlike flash attention"
    )
    kernel.add_argument(
        "--with", dest="others", action="append", default=[], metavar="TEXT",
        help=f'another kernel with its sizes beside it, such as "matmul {EXAMPLE}"; may be repeated',
    )  # fmt: skip
    kernel.add_argument(
        "--layout", type=str, metavar="TEXT", help='of a model: the kernels of one device of a layout, such as "tp=8"'
    )
    output.add_argument("--plot", type=picture_name, metavar="FILE", help="draw the chip's rooflines with the kernels")
    add_set_argument(chip, "chip", "chip.pcie_bytes_per_s=15GB/s")
    add_output_arguments(parser)


def run(arguments: argparse.Namespace) -> str | Report:
    """The report, as text or as JSON."""
    from shardwise.book_formulas import KERNEL_FORMS, load_chip_and_links

    changes = parse_overrides(arguments.set, ("chip",))
    chip, links = load_chip_and_links(arguments.chip)
    chip = apply_overrides(chip, changes["chip"], "chip")
    report = _report_kernels if arguments.kernel in KERNEL_FORMS else _report_block
    return report(arguments, chip, links)


def _report_kernels(arguments: argparse.Namespace, chip: Chip, links: Mapping[str, float]) -> str | Report:
    from shardwise.book_formulas import link_bandwidths
    from shardwise.book_formulas.rooflines.payloads import kernel_label, kernels_payload
    from shardwise.present.charts.curves import CurvePoint, draw_lines
    from shardwise.present.figures.roofline_charts import roofline_chart
    from shardwise.present.reports.books import kernel_report, kernels_report
    from shardwise.values import InputError

    if arguments.layout is not None:
        raise InputError("--layout is of a model's block; a kernel has its sizes")
    found = _kernels(arguments, chip)
    if arguments.plot:
        points = [
            CurvePoint(label=kernel_label(one), x=one.cost.intensity, y=one.attainable_flops_per_s) for one in found
        ]
        chart = roofline_chart(chip, link_bandwidths(chip, links), points, arguments.dtype)
        write_picture("--plot", arguments.plot, draw_lines(chart))
    payload = kernels_payload(found, chip, arguments.origin, links)
    if arguments.json:
        return json.dumps(payload, indent=2)
    return kernels_report([payload, *payload["with"]]) if payload["with"] else kernel_report(payload)


def _kernels(arguments: argparse.Namespace, chip: Chip) -> list[KernelRoofline]:
    """The kernel and those beside it; an option reaches the kernels that have it, or the only one."""
    from shardwise.book_formulas import kernel_roofline
    from shardwise.book_formulas.rooflines import get_kernel_form

    texts = [f"{arguments.kernel} {','.join(arguments.sizes)}", *arguments.others]
    found = []
    for text in texts:
        name, _, sizes = text.strip().partition(" ")
        form, alone = get_kernel_form(name), len(texts) == 1
        masked = alone or form.attention
        found.append(
            kernel_roofline(
                chip, name, parse_sizes(sizes), arguments.dtype, arguments.weights if alone or form.weights else None,
                origin=arguments.origin, causal=arguments.causal and masked,
                fused=not (arguments.unfused and masked),
            )
        )  # fmt: skip
    return found


def _report_block(arguments: argparse.Namespace, chip: Chip, links: Mapping[str, float]) -> str | Report:
    from shardwise.book_formulas import block_roofline
    from shardwise.book_formulas.rooflines.payloads import block_payload
    from shardwise.layout import Layout
    from shardwise.present.charts.curves import draw_lines
    from shardwise.present.figures.roofline_charts import block_chart
    from shardwise.present.reports.books import block_report

    model, sizes = _model_and_sizes(arguments)
    layout = None if arguments.layout is None else Layout.parse(arguments.layout)
    found = block_roofline(model, chip, sizes.get("B", layout.micro_batch_seqs if layout else 1), sizes["T"], layout)
    if arguments.plot:
        write_picture("--plot", arguments.plot, draw_lines(block_chart(found, chip, links)))
    payload = block_payload(found, model, chip)
    return json.dumps(payload, indent=2) if arguments.json else block_report(payload)


def _model_and_sizes(arguments: argparse.Namespace) -> tuple[Architecture, dict[str, int]]:
    """The model that KERNEL names, B and T. Raises `InputError` with everything that a model's block does not have."""
    from shardwise.book_formulas import KERNEL_FORMS
    from shardwise.model import load_model
    from shardwise.present.api.costs import block_problems
    from shardwise.values import InputError, raise_problems

    try:
        model = load_model(arguments.kernel)
    except InputError as error:
        hint = did_you_mean(arguments.kernel, KERNEL_FORMS)
        kernels = f"KERNEL: found {arguments.kernel!r}{hint}; one of {', '.join(KERNEL_FORMS)}, or a model is required"
        raise InputError(kernels, *error.problems) from None
    sizes = parse_sizes(",".join(arguments.sizes))
    problems = block_problems(sizes)
    given = {
        "--dtype": arguments.dtype != "bf16", "--weights": arguments.weights, "--from": arguments.origin != "hbm",
        "--causal": arguments.causal, "--unfused": arguments.unfused, "--with": arguments.others,
    }  # fmt: skip
    problems += [
        f"{flag} is for a kernel; a model's block is bf16 from HBM, its attention causal and flash"
        for flag, used in given.items()
        if used
    ]
    raise_problems(problems)
    return model, sizes


def parse_sizes(text: str) -> dict[str, int]:
    """Sizes by letter. Raises `InputError` with everything that is wrong."""
    from shardwise.values import InputError, parse_count, raise_problems

    problems: list[str] = []
    sizes: dict[str, int] = {}
    for word in filter(None, re.split(r",\s*|\s+", text.strip())):
        letter, equals, value = (part.strip() for part in word.partition("="))
        if not equals or not letter or letter in sizes:
            problems.append(f"SIZES: found {word!r}; LETTER=NUMBER, each letter once, is required, such as {EXAMPLE}")
            continue
        sizes[letter] = 1
        try:
            sizes[letter] = parse_count(value, label=f"SIZES: {letter}")
            if sizes[letter] > MOST:
                problems.append(f"SIZES: {letter}: found {value!r}; at most {MOST:.0e} is required")
        except InputError as error:
            problems += error.problems
    raise_problems(problems)
    return sizes
