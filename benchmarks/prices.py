"""Prices of known models and of published hybrids here and in another checkout: equal to the last digit, or which differ.

    git worktree add ../before 5c20add^
    python benchmarks/prices.py ../before

Estimates of layouts, plans of whole searches, and the layouts that a search of a hybrid finds legal. A change that is to leave
prices alone is judged by it; one that changes them says which.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardwise.hardware.cluster_loading import load_cluster
from shardwise.layout.layout import Layout
from shardwise.model.architecture import Architecture
from shardwise.model.huggingface.config import parse_config
from shardwise.model.job import Job
from shardwise.model.load import load_model
from shardwise.price import Problem
from shardwise.price.estimate import estimate
from shardwise.search.planner import make_plan
from shardwise.search.vectorised.search_layouts import search_layouts
from shardwise.values.errors import InputError

CONFIGS = Path(__file__).parents[1] / "tests" / "crosscheck" / "public_configs.jsonl"
KNOWN = (
    "llama-3-8b", "llama-3-70b", "llama-3-405b", "deepseek-v3", "deepseek-v2-lite", "mixtral-8x7b", "qwen3-30b-a3b", "gemma-2-9b",
    "gpt-3-175b", "qwen3-8b",
)  # fmt: skip
LAYOUTS = {
    "h100:64": (
        "fsdp=64 zero_stage=3 recompute=full", "fsdp=8 tp=8 zero_stage=1 sequence_parallel=true",
        "fsdp=8 tp=2 pp=4 schedule=1f1b",
    ),
    "tpu-v5p:4x4x4": ("fsdp=64 zero_stage=3",),
}  # fmt: skip
PLANS = (
    ("llama-3-8b", "h100:8"), ("llama-3-70b", "h100:512"), ("deepseek-v3", "h100:2048"), ("mixtral-8x7b", "tpu-v5p:4x4x4"),
    ("qwen3-30b-a3b", "h100:64"), ("deepseek-v2-lite", "a100-80gb:32"), ("gemma-2-9b", "tpu-v5e:16x16"),
)  # fmt: skip
HYBRIDS = (
    "qwen3-next-80B-A3B", "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16", "deepseek-ai/DeepSeek-V3.2",
    "nvidia/DeepSeek-V4-Flash-NVFP4", "stepfun-ai/Step-3.7-Flash", "nvidia/Gemma-4-31B-IT-NVFP4",
    "nvidia/Llama-3_3-Nemotron-Super-49B-v1", "glm-5.2-fp8", "openai/gpt-oss-20b",
)  # fmt: skip
HYBRID_LAYOUTS = ("fsdp=64 zero_stage=3 recompute=full", "fsdp=32 pp=2 schedule=1f1b zero_stage=1")
JOB = Job(global_batch_tokens=2**22, seq_len=4096)


def problem_of(model: Architecture, cluster: str) -> Problem:
    return Problem(model, load_cluster(cluster), JOB)


def price(model: Architecture, cluster: str, layout: str) -> list[str]:
    """Return the seconds and the bytes of a layout, to the last digit, or why it has none."""
    try:
        result = estimate(problem_of(model, cluster), Layout.parse(f"{layout} micro_batch_seqs=1"))
    except InputError as error:
        return [str(error)]
    return [float(result.step_time_s).hex(), float(result.memory_bytes).hex()]


def list_prices() -> Iterator[tuple[str, Any]]:
    """Yield the prices of this checkout by name."""
    for name in KNOWN:
        model = load_model(name)
        for cluster, layouts in LAYOUTS.items():
            yield from ((f"{name} on {cluster}: {layout}", price(model, cluster, layout)) for layout in layouts)
    for name, cluster in PLANS:
        plan = make_plan(problem_of(load_model(name), cluster))
        yield f"plan {name} {cluster}", [str(plan.layout), float(plan.estimate.step_time_s).hex()]
    rows = map(json.loads, CONFIGS.read_text(encoding="utf-8").splitlines())
    configs = {row["name"]: row["config"] for row in rows}
    for name in HYBRIDS:
        model = parse_config(configs[name], name=name)
        yield from ((f"{name}: {layout}", price(model, "h100:64", layout)) for layout in HYBRID_LAYOUTS)
        yield f"search of {name}", search_layouts(problem_of(model, "h100:64")).num_layouts


def prices_of(checkout: Path) -> dict[str, Any]:
    """Return the prices that this script gives with the package of a checkout."""
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src")}
    words = [sys.executable, __file__, "--list"]
    return json.loads(subprocess.run(words, env=environment, check=True, capture_output=True, text=True).stdout)


def main() -> int:
    """Print what differs; the exit status says whether anything does."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("other", type=Path, nargs="?", help="another checkout")
    parser.add_argument("--list", action="store_true", help="print the prices of the package on the path, as JSON")
    arguments = parser.parse_args()
    if arguments.list:
        print(json.dumps(dict(list_prices())))
        return 0
    if arguments.other is None:
        parser.error("found no other checkout; one to compare with is required, or --list")
    prices, other_prices = prices_of(Path(__file__).parents[1]), prices_of(arguments.other)
    different = [name for name, value in prices.items() if other_prices.get(name) != value]
    for name in different:
        print(f"{name}: {prices[name]} here, {other_prices.get(name)} there")
    print(f"{len(prices) - len(different)} of {len(prices)} prices are equal to the last digit")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
