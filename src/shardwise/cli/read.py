"""`shardwise read`: a framework's launch, what it costs, and what would be faster."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from shardwise.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from shardwise.export.verdict import Verdict

DESCRIPTION = """Read the launch of a framework: its command line or configuration, as a model, a job and a layout; what it costs
as it runs, whether it fits, and which of its options would make it faster. What is not understood is listed, never guessed.
Nothing of what is read is run."""
EPILOG = """examples:
  shardwise read pretrain_gpt.sh --cluster h100:64
  shardwise read run/launch.sh --cluster h100:64 --from megatron --json
  shardwise read ds_config.json --cluster h100:16 --model llama-3-8b --seq-len 4096"""


def configure(verbs: Any) -> None:
    """Declare the verb."""
    parser = verbs.add_parser(
        "read", help="a framework's launch: what it costs, and what would be faster", description=DESCRIPTION, epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("files", metavar="FILE", nargs="+", help="the files of the launch")
    parser.add_argument("--cluster", required=True, metavar="CLUSTER", help="what it runs on, such as h100:64")
    parser.add_argument(
        "--from", dest="target", metavar="TARGET", help="the framework, where its options do not tell it"
    )
    parser.add_argument("--model", metavar="MODEL", help="the model, where the launch does not say it")
    parser.add_argument("--seq-len", metavar="N", help="tokens of one sequence, where the launch does not say it")
    parser.add_argument(
        "--batch-seqs", metavar="N", help="sequences of one global batch, where the launch does not say it"
    )
    parser.add_argument("--micro-batch-seqs", metavar="N", help="sequences of one micro-batch, likewise")
    parser.add_argument("--out", metavar="FILE", help="write the launch as a plan")
    parser.add_argument("--json", action="store_true", help="print the payload as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> str:
    """The report, as text or as JSON."""
    from shardwise.cluster.load import load_cluster
    from shardwise.export.reading import read_files
    from shardwise.export.verdict import judge_launch
    from shardwise.model.load import load_model
    from shardwise.planning.codec import dump_plan, require_writable

    cluster = load_cluster(arguments.cluster)
    model = load_model(arguments.model) if arguments.model else None
    if arguments.out:
        require_writable(arguments.out)
    files = read_files(arguments.files)
    found = judge_launch(files, cluster, target=arguments.target, model=model, beside=_beside(arguments))
    if arguments.out:
        dump_plan(found.plan, arguments.out)
    return json.dumps(found.payload(), indent=2) if arguments.json else verdict_text(found)


def _beside(arguments: argparse.Namespace) -> dict[str, int]:
    """Parts of the launch that the command says."""
    from shardwise.export.reading import BESIDE
    from shardwise.units import parse_count

    said = {part: (option, getattr(arguments, option.strip("-").replace("-", "_"))) for part, option in BESIDE.items()}
    return {part: parse_count(text, what=option) for part, (option, text) in said.items() if text is not None}


def verdict_text(found: Verdict) -> str:
    """The report for people: what it is, what it costs, what was not understood, and what would be faster."""
    return "\n".join([*_launch_lines(found), *_cost_lines(found), *_left_out(found), "", *_change_lines(found)])


def _launch_lines(found: Verdict) -> list[str]:
    from shardwise.model.counts import num_params

    plan, target = found.plan, found.heard.target
    return [
        f"{plan.model.name} ({format_count(num_params(plan.model))} parameters) on {plan.cluster.name}, as {target.title} "
        f"{target.version} would run it",
        f"  {plan.job.global_batch_tokens:,} tokens per batch, sequences of {plan.job.seq_len:,}, precision {plan.job.precision}",
        f"  {plan.layout}",
    ]


def _cost_lines(found: Verdict) -> list[str]:
    from shardwise.cli.interval import step_text

    estimate = found.plan.estimate
    over = estimate.memory_bytes - estimate.memory_capacity_bytes
    fits = f"fits, {estimate.margin:.0%} free" if estimate.fits else f"DOES NOT FIT, {format_bytes(over)} too much"
    return [
        f"  as it runs: {step_text(estimate.step_time_s, estimate.interval90)}, MFU {estimate.mfu:.1%}",
        f"  memory {format_bytes(estimate.memory_bytes)} of {format_bytes(estimate.memory_capacity_bytes)} ({fits})",
        f"  bound by {estimate.bound}",
        *(f"  note: {note}" for note in (*found.heard.notes, *estimate.notes)),
    ]


def _left_out(found: Verdict) -> list[str]:
    heard = found.heard
    unknown = [
        f"  not understood: {name} is no option of {heard.target.title} {heard.target.version}"
        for name in heard.unknown
    ]
    return unknown + ([f"  no plan depends on {', '.join(heard.unread)}"] if heard.unread else [])


def _change_lines(found: Verdict) -> list[str]:
    """Each change as options with their values, the step and the memory with them."""
    before = found.plan.estimate
    if not found.better:
        return ["no other layout is predicted to be faster by a hundredth or more"]
    lines = ["faster, by prediction:" if before.fits else "what fits:"]
    for change in found.better:
        words = [name if value is True else f"without {name}" if value is None else f"{name}={_text(value)}"
                 for name, value in change.options.items()]  # fmt: skip
        after = change.estimate
        gain = f"{after.step_time_s / before.step_time_s - 1:+.1%}, " if before.fits else ""
        lines.append(
            f"  {format_seconds(after.step_time_s)} ({gain}{format_bytes(after.memory_bytes)}): {', '.join(words)}"
        )
    return lines


def _text(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
