"""`shardwise kv-cache`: what the keys and values of a model take, and how many sequences fit beside its weights."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from shardwise.changes import parse_changes, replaced
from shardwise.cli.arguments import MODEL, add_output_arguments, add_set_argument
from shardwise.parser import Parser

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
    job.add_argument("model", help=MODEL)
    job.add_argument("--context", required=True, metavar="N", help="tokens of each sequence, such as 8Ki")
    job.add_argument("--batch", default="1", metavar="N", help="sequences (default: 1)")
    job.add_argument("--dtype", default="bf16", metavar="NAME", help="format of keys and values (default: bf16)")
    cluster.add_argument(
        "--on", metavar="CLUSTER", help="CHIP:COUNT or CHIP:SHAPE, such as h100:8: say what fits there"
    )
    cluster.add_argument(
        "--weights", default="bf16", metavar="NAME", help="with --on: format of the weights (default: bf16)"
    )
    cluster.add_argument(
        "--no-runtime", action="store_true", help="with --on: leave no memory to the runtime, as the books count"
    )
    add_set_argument(job, "model or chip", "model.num_layers=64")
    add_output_arguments(parser)


def run(arguments: argparse.Namespace) -> str:
    """The report, as text or as JSON."""
    from dataclasses import replace

    from shardwise.books.kv_cache import KvCache, cache_payload
    from shardwise.cluster.load import load_cluster
    from shardwise.errors import InputError
    from shardwise.model.load import load_model
    from shardwise.units import parse_count

    changes = parse_changes(arguments.set, ("model", "chip"))
    if changes["chip"] and not arguments.on:
        raise InputError("--set: a chip is that of --on, which is missing; give a cluster, such as --on h100:8")
    if arguments.no_runtime and not arguments.on:
        raise InputError(
            "--no-runtime: the runtime is that of --on, which is missing; give a cluster, such as --on h100:8"
        )
    model = replaced(load_model(arguments.model), changes["model"], "model")
    context = parse_count(arguments.context, what="--context")
    batch = parse_count(arguments.batch, what="--batch")
    if max(context, batch) > MOST:
        raise InputError(f"--context and --batch: found {context:.3g} and {batch:.3g}; at most {MOST:.0e} is required")
    cluster = load_cluster(arguments.on) if arguments.on else None
    if cluster:
        cluster = replace(cluster, chip=replaced(cluster.chip, changes["chip"], "chip"))
    cache = KvCache(architecture=model, dtype=arguments.dtype)
    payload = cache_payload(cache, context, batch, cluster, arguments.weights, runtime=not arguments.no_runtime)
    return json.dumps(payload, indent=2) if arguments.json else cache_text(payload)


def cache_text(payload: Mapping[str, Any]) -> str:
    """The payload for people."""
    from shardwise.units import format_bytes

    rows = [
        ("a token", payload["bytes_per_token"], ""),
        ("a sequence", payload["sequence_bytes"], f"of {payload['context']:,} tokens{_windows(payload)}"),
    ]
    if payload["batch"] > 1:
        rows.append((f"{payload['batch']:,} sequences", payload["batch_bytes"], ""))
    lines = [
        f"keys and values of {payload['model']['name']} in {payload['dtype']}",
        f"  {payload['model']['num_layers']} layers of {_kept(payload)}",
        *(f"  {name:<18}{format_bytes(value):>9}   {note}".rstrip() for name, value, note in rows),
    ]
    return "\n".join([*lines, *_fit_text(payload)])


def _kept(payload: Mapping[str, Any]) -> str:
    """What a layer keeps of a token: keys and values of its heads, or the latent that they come from."""
    heads, width = payload["model"]["num_kv_heads"], payload["model"]["head_dim"]
    if rank := payload["model"]["kv_lora_rank"]:
        rotary = payload["model"]["rope_head_dim"]
        smaller = 2 * heads * width / (rank + rotary)
        return (
            f"a latent of {rank} and {rotary} rotary elements, the same for all {heads} heads: a cache {smaller:.3g} times "
            f"smaller than keys and values of {width} each"
        )
    shared = payload["model"]["num_heads"] // heads
    grouped = f", {shared} query heads on each: a cache {shared} times smaller than with one each" if shared > 1 else ""
    return f"{heads} heads of {width}{grouped}"


def _windows(payload: Mapping[str, Any]) -> str:
    from shardwise.units import format_bytes

    windowed, window = payload["num_windowed_layers"], payload["model"]["sliding_window"]
    if not windowed or window >= payload["context"]:
        return ""
    without = format_bytes(payload["without_windows_bytes"])
    return (
        f"; {windowed} of {payload['model']['num_layers']} layers keep the last {window:,}, {without} if they kept all"
    )


def _fit_text(payload: Mapping[str, Any]) -> list[str]:
    from shardwise.units import format_bytes

    fit = payload["cluster"]
    if fit is None:
        return []
    lines = [
        "",
        f"on {fit['name']}: {format_bytes(fit['memory_bytes'])} on {fit['num_devices']} devices, split evenly",
        f"  {'weights':<18}{format_bytes(fit['weight_bytes']):>9}   in {fit['weights']}",
        *([f"  {'runtime':<18}{format_bytes(fit['runtime_bytes']):>9}"] if fit["runtime_bytes"] else []),
    ]
    if fit["free_bytes"] < 0:
        return [*lines, f"  the weights DO NOT FIT, {format_bytes(-fit['free_bytes'])} too much"]
    left = f"room for {fit['num_seqs']:,} sequences of {payload['context']:,} tokens"
    return [*lines, f"  {'left for caches':<18}{format_bytes(fit['free_bytes']):>9}   {left}"]
