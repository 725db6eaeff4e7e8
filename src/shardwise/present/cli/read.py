"""`shardwise read`: a framework's launch, what it costs, and what would be faster."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from shardwise.present.cli.arguments import add_output_arguments
from shardwise.values import Parser

if TYPE_CHECKING:
    from shardwise.present.rendering.report import Report

DESCRIPTION = """Read the launch of a framework: its command line or configuration, as a model, a job and a layout; what it costs
as it runs, whether it fits, and which of its options would make it faster. What is not understood is listed, never guessed.
Nothing of what is read is run."""
EXAMPLES = (
    "shardwise plan llama-3-8b h100:16 --batch-tokens 1Mi --seq-len 8Ki --stack megatron --pin recompute=full --export run",
    "shardwise read run/launch.sh --cluster h100:16",
    "shardwise read run/launch.sh --cluster h200:16 --from megatron --json",
)


def configure(parser: Parser) -> None:
    """Declare the arguments."""
    launch, cluster, output = parser.groups("launch", "cluster", "output")
    launch.add_argument("files", metavar="FILE", nargs="+", help="the files of the launch")
    cluster.add_argument(
        "--cluster", required=True, metavar="CLUSTER", completes="clusters", help="what it runs on, such as h100:64"
    )
    launch.add_argument(
        "--from", dest="target", metavar="TARGET", help="the framework, where its options do not tell it"
    )
    launch.add_argument(
        "--model", metavar="MODEL", completes="models", help="the model, where the launch does not say it"
    )
    launch.add_argument("--seq-len", metavar="N", help="tokens of one sequence, where the launch does not say it")
    launch.add_argument(
        "--batch-seqs", metavar="N", help="sequences of one global batch, where the launch does not say it"
    )
    launch.add_argument("--micro-batch-seqs", metavar="N", help="sequences of one micro-batch, likewise")
    output.add_argument("--out", metavar="FILE", help="write the launch as a plan")
    add_output_arguments(parser, verbose=True)


def run(arguments: argparse.Namespace) -> str | Report:
    """The report, as text or as JSON."""
    from shardwise.hardware import load_cluster
    from shardwise.interop import read_files
    from shardwise.interop.read_launch import price_launch
    from shardwise.model import load_model
    from shardwise.present.reports.interop import verdict_report
    from shardwise.search import dump_plan
    from shardwise.values import require_writable

    cluster = load_cluster(arguments.cluster)
    model = load_model(arguments.model) if arguments.model else None
    if arguments.out:
        require_writable(arguments.out)
    files = read_files(arguments.files)
    found = price_launch(files, cluster, target=arguments.target, model=model, user_fields=_beside(arguments))
    if arguments.out:
        dump_plan(found.plan, arguments.out)
    return json.dumps(found.payload(), indent=2) if arguments.json else verdict_report(found)


def _beside(arguments: argparse.Namespace) -> dict[str, int]:
    """Parts of the launch that the command says."""
    from shardwise.interop.read_launch import USER_FIELDS
    from shardwise.values import parse_count

    said = {
        part: (option, getattr(arguments, option.strip("-").replace("-", "_"))) for part, option in USER_FIELDS.items()
    }
    return {part: parse_count(text, label=option) for part, (option, text) in said.items() if text is not None}
