"""`shardwise kv-cache`: what the keys and values of a model take, and how many sequences fit beside its weights."""

from __future__ import annotations

import argparse
import json

from shardwise.present.cli.arguments import MODEL, add_output_arguments, add_set_argument
from shardwise.present.cli.section import Report
from shardwise.values import Parser, apply_overrides, parse_overrides

MOST = 10**18  # of tokens and sequences
DESCRIPTION = """What the keys and values of a model take: a token, a sequence, a batch; with --on how many sequences fit on a
cluster beside the weights. Layers with a sliding window keep the window alone."""
EXAMPLES = (
    "shardwise kv-cache llama-3-70b --context 8Ki --batch 32",
    "shardwise kv-cache gemma-3-27b --context 128Ki --dtype int8 --on tpu-v5e:4x4 --weights int8",
    "shardwise kv-cache llama-3-70b --context 8Ki --on h100:8 --no-runtime",
)


def configure(parser: Parser) -> None:
    """Declare the arguments."""
    job, cluster = parser.groups("job", "cluster")
    job.add_argument("model", completes="models", help=MODEL)
    job.add_argument("--context", required=True, metavar="N", help="tokens of each sequence, such as 8Ki")
    job.add_argument("--batch", default="1", metavar="N", help="sequences (default: 1)")
    job.add_argument("--dtype", default="bf16", metavar="NAME", help="format of keys and values (default: bf16)")
    cluster.add_argument(
        "--on",
        metavar="CLUSTER",
        completes="clusters",
        help="CHIP:COUNT or CHIP:SHAPE, such as h100:8: say what fits there",
    )
    cluster.add_argument(
        "--weights", default="bf16", metavar="NAME", help="with --on: format of the weights (default: bf16)"
    )
    cluster.add_argument(
        "--no-runtime", action="store_true", help="with --on: leave no memory to the runtime, as the books count"
    )
    add_set_argument(job, "model or chip", "model.num_layers=64")
    add_output_arguments(parser)


def run(arguments: argparse.Namespace) -> str | Report:
    """The report, as text or as JSON."""
    from dataclasses import replace

    from shardwise.book_formulas.kv_cache import KvCache, cache_payload
    from shardwise.hardware import load_cluster
    from shardwise.model import load_model
    from shardwise.present.cli.kv_cache_report import cache_report
    from shardwise.values import InputError, parse_count

    changes = parse_overrides(arguments.set, ("model", "chip"))
    if changes["chip"] and not arguments.on:
        raise InputError("--set: a chip is that of --on, which is missing; give a cluster, such as --on h100:8")
    if arguments.no_runtime and not arguments.on:
        raise InputError(
            "--no-runtime: the runtime is that of --on, which is missing; give a cluster, such as --on h100:8"
        )
    model = apply_overrides(load_model(arguments.model), changes["model"], "model")
    context = parse_count(arguments.context, label="--context")
    batch = parse_count(arguments.batch, label="--batch")
    if max(context, batch) > MOST:
        raise InputError(f"--context and --batch: found {context:.3g} and {batch:.3g}; at most {MOST:.0e} is required")
    cluster = load_cluster(arguments.on) if arguments.on else None
    if cluster:
        cluster = replace(cluster, chip=apply_overrides(cluster.chip, changes["chip"], "chip"))
    cache = KvCache(architecture=model, dtype=arguments.dtype)
    payload = cache_payload(cache, context, batch, cluster, arguments.weights, runtime=not arguments.no_runtime)
    return json.dumps(payload, indent=2) if arguments.json else cache_report(payload)
