"""How long it takes to simulate large steps.

    python benchmarks/simulate.py

Prints the CPU seconds of the fastest of three runs in plain Python, from the layout to the critical path and the memory of
every rank: of a pipeline of 64 stages with 1,024 micro-batches, and of Llama-3-70B with every kernel and transfer of all its
layers. The prices of a model's units are derived once per process, in front of the runs.
"""

from __future__ import annotations

import time

from shardwise.hardware.cluster_loading import load_cluster
from shardwise.layout.layout import Layout
from shardwise.model.job import Job
from shardwise.model.load import load_model
from shardwise.present.traces import MOST_TRACED, step_trace_text
from shardwise.price import Problem
from shardwise.price.layout_pricer import Pricing
from shardwise.price.simulation.result import Simulation
from shardwise.price.simulation.simulated_step import simulate_step

REPEATS = 3
CASES = {
    "64 stages, 1,024 micro-batches": ("llama-3-70b", "h100:512", "tp=8 pp=64", 1024 * 4096, 4096),
    "70B, every kernel": ("llama-3-70b", "h100:512", "fsdp=64 tp=8 recompute=full", 2**22, 8192),
    "70B, 16 stages": ("llama-3-70b", "h100:512", "fsdp=8 tp=4 pp=16 zero_stage=1", 2**22, 8192),
}  # fmt: skip


def row(name: str) -> str:
    """What one case takes."""
    model, cluster, layout, batch_tokens, seq_len = CASES[name]
    job = Job(global_batch_tokens=batch_tokens, seq_len=seq_len)
    pricing = Pricing(Problem(load_model(model), load_cluster(cluster), job), Layout.parse(layout))
    pricing.unit_costs()
    times = []
    for _ in range(REPEATS):
        begin = time.process_time()
        simulation = Simulation(simulate_step(pricing))
        path, peak = simulation.critical_path, simulation.peak_bytes
        times.append(time.process_time() - begin)
    result = simulation.found
    passes = sum(map(len, result.clock.starts))
    events = sum(len(played.events) for plays in result.slot_timelines for played in plays)
    assert path
    assert peak > 0
    traced = "" if events > MOST_TRACED else f", its trace {_traced_s(simulation):.2f} s more"
    return f"{name:<32}{passes:>9,} passes{events:>13,} events{min(times):>8.2f} s{traced}"


def _traced_s(simulation: Simulation) -> float:
    begin = time.process_time()
    step_trace_text(simulation.found)
    return time.process_time() - begin


if __name__ == "__main__":
    for case in CASES:
        print(row(case), flush=True)
