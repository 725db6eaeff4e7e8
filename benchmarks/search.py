"""Layouts priced per CPU-second, and whether the fast path is right.

    python benchmarks/search.py [--repeat 5] [--samples 1000]

Llama-3-405B on 16,384 H100, 16Mi tokens per batch, sequences of 8,192. Prints the median rate of several searches in this
process (the derivation included in each: its caches are emptied), the peak memory, a recount of the legal candidates of a
small case in plain Python, and the largest difference of sampled rows from the scalar path.
"""

from __future__ import annotations

import argparse
import itertools
import random
import resource
import statistics
import sys

from shardwise.cluster.load import load_cluster
from shardwise.cost import unit_parts
from shardwise.cost.estimate import estimate
from shardwise.derive import derivation
from shardwise.job import Job
from shardwise.layout.layout import Layout
from shardwise.layout.legality import violations
from shardwise.model.load import load_model
from shardwise.schedule.schedule import natural_schedule
from shardwise.search.search import SearchResult, search
from shardwise.search.space import FACTORED, Choices, factorisations

REQUIRED_PER_CPU_SECOND = 1_000_000
LARGEST_DIFFERENCE = 1e-9
LARGEST_MEMORY_BYTES = 500e6


def run_search() -> SearchResult:
    """One search with cold caches, as a new process would run it."""
    derivation._derived.cache_clear()
    unit_parts.parts_of.cache_clear()
    job = Job(global_batch_tokens=16 * 2**20, seq_len=8192)
    return search(load_model("llama-3-405b"), load_cluster("h100:16384"), job)


def recount(num_devices: int) -> tuple[int, int]:
    """Legal candidates of Llama-3-8B on a few H100: by the search's arrays, and one by one in plain Python."""
    model, cluster = load_model("llama-3-8b"), load_cluster(f"h100:{num_devices}")
    job = Job(global_batch_tokens=num_devices * 4 * 8192, seq_len=8192)
    choices = Choices()
    result = search(model, cluster, job, choices=choices)
    grid = itertools.product(
        factorisations(num_devices, len(FACTORED)).tolist(), choices.sequence_parallel, choices.micro_batch_seqs,
        choices.num_virtual_stages, choices.zero_stage, choices.recompute,
    )  # fmt: skip
    legal = 0
    for degrees, sp, micro_batch, virtual, zero, recompute in grid:
        layout = Layout(
            **dict(zip(FACTORED, degrees, strict=True)), sequence_parallel=bool(sp), micro_batch_seqs=micro_batch,
            num_virtual_stages=virtual, zero_stage=zero, recompute=recompute,
            schedule=natural_schedule(degrees[FACTORED.index("pp")], virtual),
        )  # fmt: skip
        legal += not violations(model, job, num_devices, layout)
    return result.num_candidates - sum(result.num_illegal_by_rule.values()), legal


def largest_difference(samples: int) -> float:
    """Largest relative difference between sampled rows of the search and the scalar path."""
    model, cluster = load_model("llama-3-405b"), load_cluster("h100:16384")
    job = Job(global_batch_tokens=16 * 2**20, seq_len=8192)
    found = search(model, cluster, job, sample=samples, seed=random.Random(0).randrange(2**31)).sampled
    worst = 0.0
    for row in found:
        scalar = estimate(model, cluster, job, row.layout)
        worst = max(
            worst, abs(row.step_time_s / scalar.step_time_s - 1), abs(row.memory_bytes / scalar.memory_bytes - 1)
        )
    print(f"sampled rows re-estimated  {len(found):,}")
    return worst


def main() -> int:
    """Print the figures; the exit status says whether each is met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--samples", type=int, default=1000)
    arguments = parser.parse_args()
    results = [run_search() for _ in range(arguments.repeat)]
    rates = [result.num_layouts / result.cpu_seconds for result in results]
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    by_arrays, by_loops = recount(16)
    difference = largest_difference(arguments.samples)
    rate = statistics.median(rates)
    print(f"layouts                    {results[0].num_layouts:,} of {results[0].num_candidates:,} candidates")
    print(f"layouts per CPU-second     {rate:,.0f} (median of {len(rates)}, {min(rates):,.0f} to {max(rates):,.0f})")
    print(f"peak memory                {memory / 1e6:.0f} MB")
    print(f"legal candidates, 16 H100  {by_arrays:,} by arrays, {by_loops:,} one by one")
    print(f"largest difference         {difference:.1e}")
    met = (
        rate >= REQUIRED_PER_CPU_SECOND, memory <= LARGEST_MEMORY_BYTES, by_arrays == by_loops, difference <= LARGEST_DIFFERENCE,
    )  # fmt: skip
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
