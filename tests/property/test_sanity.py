"""More bandwidth, memory, FLOPs or choices never make the best layout slower, and what a search says of it is its estimate.

python -m property.test_sanity 300     (in tests/, for more questions than the suite asks)
"""

from __future__ import annotations

import dataclasses
import random
import sys

import pytest

from property.test_search import ADAPTED, DEEP, MIXED, SMALL
from shardwise.hardware.calibration_constants import scale_rates
from shardwise.hardware.cluster import Cluster
from shardwise.hardware.cluster_loading import load_cluster
from shardwise.layout.choices import Choices
from shardwise.layout.layout import OFFLOADS
from shardwise.model.architecture import Architecture
from shardwise.model.job import OVERLAP_CONVENTIONS, Job
from shardwise.model.load import load_model
from shardwise.price import Problem
from shardwise.price.estimate import estimate
from shardwise.search.vectorised.search_layouts import SearchResult, search_layouts
from shardwise.values.errors import NothingFitsError

MODELS = (SMALL, DEEP, MIXED, ADAPTED, load_model("llama-3.2-1b"), load_model("llama-3-8b"), load_model("mixtral-8x7b"))
CLUSTERS = (
    ("h100:8", None), ("h100:16", "nemo-25"), ("h100:24", None), ("a100-80gb:16", "megatron-2022"), ("tpu-v5e:4x4", "maxtext"),
    ("tpu-v5e:2x4*2", None), ("h100:32", "shardwise"), ("b200:16", None),
)  # fmt: skip
FEW = Choices(micro_batch_seqs=(1, 2, 4), num_virtual_stages=(1, 2), recompute=("none", "full"), zero_stage=(0, 1, 3))
WIDER = dataclasses.replace(Choices(), offload=OFFLOADS, async_tp=(0, 1))
ROUNDING = 1e-9


def question(rng: random.Random) -> tuple[Architecture, Cluster, Job]:
    """A model, a cluster and a job."""
    name, stack = rng.choice(CLUSTERS)
    cluster = load_cluster(name, stack=stack)
    seq_len = rng.choice((1024, 2048, 4096))
    seqs = cluster.num_devices * rng.choice((1, 2, 3, 8))
    job = Job(global_batch_tokens=seqs * seq_len, seq_len=seq_len, overlap=rng.choice((None, *OVERLAP_CONVENTIONS)))
    return rng.choice(MODELS), cluster, job


def faster(cluster: Cluster, rng: random.Random) -> dict[str, Cluster]:
    """Clusters that have more of one thing."""
    chip, by = cluster.chip, rng.choice((1.01, 1.5, 4.0))
    more = {
        "memory": {"memory_bytes": chip.memory_bytes * by},
        "memory bandwidth": {"memory_bytes_per_s": chip.memory_bytes_per_s * by},
        "FLOPs": {"peak_flops_per_s": {dtype: rate * by for dtype, rate in chip.peak_flops_per_s.items()}},
    }
    improved = {
        name: dataclasses.replace(cluster, chip=dataclasses.replace(chip, **change)) for name, change in more.items()
    }
    return improved | {"links": dataclasses.replace(cluster, topology=scale_rates(cluster.topology, by, by))}


def faults(seed: int) -> list[str]:
    """What is wrong with the answers to one random question."""
    rng = random.Random(seed)
    model, cluster, job = question(rng)

    def answered(cluster: Cluster, choices: Choices) -> SearchResult | None:
        try:
            return search_layouts(Problem(model, cluster, job), choices=choices, top=1)
        except NothingFitsError:
            return None

    base = answered(cluster, FEW)
    if base is None or not base.best:
        return []
    best, described = base.best[0], f"{seed}: {model.name} on {cluster.name} ({job.overlap}), {base.best[0].layout}"
    priced = estimate(Problem(model, cluster, job), best.layout)
    problems = []
    if abs(priced.step_time_s / best.step_time_s - 1) > ROUNDING or not priced.fits:
        problems.append(f"{described}: {best.step_time_s} s by the search, {priced.step_time_s} s by its estimate")
    results = {name: answered(faster_cluster, FEW) for name, faster_cluster in faster(cluster, rng).items()}
    for name, result in {**results, "choices": answered(cluster, WIDER)}.items():
        if result is None or not result.best or result.best[0].step_time_s > best.step_time_s * (1 + ROUNDING):
            took = result.best[0].step_time_s / best.step_time_s if result and result.best else float("inf")
            problems.append(
                f"{described}: with more {name} {took:.6f} times as long: {result and result.best[0].layout}"
            )
    return problems


@pytest.mark.thinned(3)
@pytest.mark.parametrize("seeds", [range(start, start + 2) for start in range(0, 6, 2)])
def test_more_of_any_resource_never_slows_the_best_layout(seeds: range) -> None:
    assert [fault for seed in seeds for fault in faults(seed)] == []


if __name__ == "__main__":
    every = [fault for seed in range(int(sys.argv[1])) for fault in faults(seed)]
    print("\n".join([*every, f"{len(every)} faults in {int(sys.argv[1]):,} questions"]))
    sys.exit(bool(every))
