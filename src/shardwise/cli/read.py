"""`shardwise read`: a framework's launch, what it costs, and what would be faster."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.cost.estimate import Estimate
    from shardwise.export.better import Change
    from shardwise.export.reading import Heard

SCHEMA = "shardwise.read/1"
DESCRIPTION = """Read the launch of a framework: its command line or configuration, as a model, a job and a layout; what it costs
as it runs, whether it fits, and which of its options would make it faster. What is not understood is listed, never guessed.
Nothing of what is read is run."""
EPILOG = """examples:
  shardwise read pretrain_gpt.sh --cluster h100:64
  shardwise read run/launch.sh --cluster h100:64 --from megatron --json"""


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
    parser.add_argument("--out", metavar="FILE", help="write the launch as a plan")
    parser.add_argument("--json", action="store_true", help="print the payload as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> str:
    """The report, as text or as JSON."""
    from shardwise.cluster.load import load_cluster
    from shardwise.cluster.stacks import predicted, stack_named
    from shardwise.export.better import better
    from shardwise.export.launch import machines_of
    from shardwise.export.reading import read, read_files
    from shardwise.model.load import load_model
    from shardwise.planning.codec import dump_plan, require_writable
    from shardwise.planning.plan import plan_layout

    cluster = load_cluster(arguments.cluster)
    model = load_model(arguments.model) if arguments.model else None
    if arguments.out:
        require_writable(arguments.out)
    heard = read(read_files(arguments.files), machines_of(cluster), target=arguments.target, model=model)
    cluster = predicted(cluster, stack_named(heard.target.stack))
    found = plan_layout(heard.launch.model, cluster, heard.launch.job, heard.launch.layout)
    changes = better(heard.launch, heard.target, cluster)
    if arguments.out:
        dump_plan(found, arguments.out)
    return (
        json.dumps(read_payload(heard, found.estimate, changes, cluster.name), indent=2)
        if arguments.json else read_text(heard, found.estimate, changes, cluster.name)
    )  # fmt: skip


def read_payload(heard: Heard, estimate: Estimate, changes: list[Change], cluster: str) -> dict[str, Any]:
    """What `--json` prints."""
    from dataclasses import asdict

    launch = heard.launch
    return {
        "schema": SCHEMA, "target": heard.target.name, "version": heard.target.version, "model": asdict(launch.model),
        "cluster": cluster, "job": asdict(launch.job), "layout": {"text": str(launch.layout), **asdict(launch.layout)},
        "unknown": list(heard.unknown), "unread": list(heard.unread), "estimate": asdict(estimate),
        "better": [change.payload() for change in changes],
    }  # fmt: skip


def read_text(heard: Heard, estimate: Estimate, changes: list[Change], cluster: str) -> str:
    """The report for people."""
    from shardwise.units import format_bytes, format_seconds

    launch, job = heard.launch, heard.launch.job
    lines = [
        f"{heard.target.title} ({heard.target.version}): {launch.model.name} on {cluster}",
        f"  {job.global_batch_tokens:,} tokens per batch, sequences of {job.seq_len:,}, precision {job.precision}",
        f"  {launch.layout}",
        f"as it runs: a step of {format_seconds(estimate.step_time_s)}, {format_bytes(estimate.memory_bytes)} of memory"
        + ("" if estimate.fits else ": does not fit"),
        *(f"  note: {note}" for note in estimate.notes),
        *(
            f"not understood: {name} is no option of {heard.target.title} {heard.target.version}"
            for name in heard.unknown
        ),
    ]
    if heard.unread:
        lines.append(f"of no account here: {', '.join(heard.unread)}")
    for change in changes:
        words = ", ".join(
            f"{name} {value}" if value is not None else f"without {name}" for name, value in change.options.items()
        )
        priced = change.estimate
        lines.append(f"with {words}: {format_seconds(priced.step_time_s)}, {format_bytes(priced.memory_bytes)}")
    return "\n".join(
        lines if changes else [*lines, "no change of one option, and no other layout, is predicted to be faster"]
    )
