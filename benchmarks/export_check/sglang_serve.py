"""Judge written deployments by SGLang's own parser: it takes the files, and finds in them what was to be written.

    pip install --no-deps sglang==0.5.23 sglang-router==0.3.2, and what their command lines import
    python benchmarks/export_check/sglang_serve.py FOLDER

Each script is run with a stand-in for `python3` that prints its words. These, and the words of the manifest, go through
`ServerArgs.add_cli_args` and the reader of its files of options, and `ServerArgs.from_cli_args` is made of what they find. The
words of the router of two pools go through the router's own parser.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from engine_words import differing, judge, manifest_words, router_problems, script_words

sys.path.pop(0)  # this folder, whose scripts have the names of what they import
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger
from sglang_router.launch_router import parse_router_args
from sglang_router.router_args import RouterArgs

PARSER = argparse.ArgumentParser()
ServerArgs.add_cli_args(PARSER)


def problems_of(folder: Path, expected: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with a folder."""
    os.chdir(folder)
    if "pools" in expected:
        for pool, pool_expected in expected["pools"].items():
            yield from _start_problems(folder, pool_expected, f"{pool}.sh", f"-{pool}")
        yield from router_problems(folder, "python3", expected["pools"], _parse_router)
        yield from _bootstrap_problems(folder, expected["pools"]["prefill"]["starts"])
    else:
        yield from _start_problems(folder, expected, "launch.sh", "")


def _parse_router(words: list[str]) -> RouterArgs:
    words = words[1:] if words[:1] == ["python3"] else words
    if words[:2] != ["-m", "sglang_router.launch_router"]:
        raise ValueError(f"found {words[:2]}")
    router = parse_router_args(words[2:])
    if not router.pd_disaggregation:
        raise ValueError("the router knows no pools")
    return router


def _bootstrap_problems(folder: Path, num_instances: int) -> Iterator[str]:
    """Yield instances whose bootstrap port is another one than the router has for them."""
    router = _parse_router(script_words(folder, ("python3",), "router.sh"))
    for index in range(num_instances):
        words = script_words(folder, ("python3",), "prefill.sh", index)[2:]
        server = ServerArgs.from_cli_args(PARSER.parse_args(ConfigArgumentMerger(PARSER).merge_config_with_args(words)))
        if server.disaggregation_bootstrap_port != router.prefill_urls[index][1]:
            yield f"bootstrap port {server.disaggregation_bootstrap_port}, the router has {router.prefill_urls[index]}"


def _start_problems(folder: Path, expected: Mapping[str, Any], script: str, workload: str) -> Iterator[str]:
    """Yield what is wrong with the starts of a script and of a workload of the manifest."""
    words, replicas, size = manifest_words(folder, workload)
    if (replicas, size) != (expected["starts"], expected["num_nodes"]):
        yield f"manifest: {replicas} replicas of {size} pods"
    for start in (script_words(folder, ("python3",), script), words[1:]):
        if start[:2] != ["-m", "sglang.launch_server"]:
            yield f"found {start[:2]}"
        yield from differing(*_parsed_and_expected(start[2:], expected))


def _parsed_and_expected(words: list[str], expected: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    if "--config" in words:
        words = ConfigArgumentMerger(PARSER).merge_config_with_args(words)
    arguments = PARSER.parse_args(words)
    server = ServerArgs.from_cli_args(arguments)
    copies, tokens, seqs = expected["attention_dp"], expected["max_batched_tokens"], expected["max_num_seqs"]
    steps = expected["mtp_tokens"]
    parsed = {
        "checkpoint": server.model_path,
        "devices": server.tp_size * server.pp_size * server.dp_size,
        "nodes": server.nnodes,
        "tp": server.tp_size // (server.attn_dp_size * server.attn_cp_size),
        "pp": server.pp_size,
        "cp": server.attn_cp_size,
        "copies": server.attn_dp_size,
        "ep": server.ep_size,
        "replicas": server.dp_size,
        "seqs": server.max_running_requests,
        "chunk": server.chunked_prefill_size,
        "length": server.context_length,
        "memory": server.mem_fraction_static,
        "cache": server.kv_cache_dtype,
        "draft": (server.speculative_algorithm, server.speculative_num_steps),
        "drafted": server.speculative_num_draft_tokens,
        "exchange": server.moe_a2a_backend,
        "redundant": (server.ep_num_redundant_experts, server.enable_eplb),
        "admissions": server.scheduler_recv_interval,
    }
    chunk = (None if tokens is None else tokens * copies) if expected["chunked_prefill"] else -1
    converted = {
        "checkpoint": expected["checkpoint"],
        "devices": expected["devices"],
        "nodes": expected["num_nodes"],
        "tp": expected["tp"],
        "pp": expected["pp"],
        "cp": expected["cp"],
        "copies": copies,
        "ep": expected["ep"],
        "replicas": expected["copies"],
        "seqs": None if seqs is None else seqs * copies,
        "chunk": chunk,
        "length": expected["max_model_len"],
        "memory": expected["memory_fraction"],
        "cache": "fp8_e4m3" if expected["cache_is_fp8"] else "auto",
        "draft": ("EAGLE", steps) if steps else (None, None),
        "drafted": steps + 1 if steps else None,
        "exchange": "deepep" if expected["exchanges_tokens"] else "none",
        "redundant": (expected["redundant_experts"], expected["redundant_experts"] > 0),
        "admissions": expected["admission_passes"],
    }
    if not expected["chunked_prefill"] and tokens is not None:
        parsed["tokens"], converted["tokens"] = server.max_prefill_tokens, tokens
    pool = expected.get("pool")
    parsed["pool"] = (server.disaggregation_mode, server.disaggregation_transfer_backend)
    converted["pool"] = (pool, "nixl") if pool else ("null", "mooncake")
    for name, value in expected["flags"].items():
        parsed[name], converted[name] = getattr(arguments, name.replace("-", "_")), value
    return parsed, converted


if __name__ == "__main__":
    sys.exit(judge(Path(sys.argv[1]).resolve(), problems_of))
