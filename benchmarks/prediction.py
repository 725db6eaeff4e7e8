"""Predicted over measured step times of small models on this machine: `python benchmarks/prediction.py [CASE ...]`.

Before each case the machine is measured (`bench machine`), the case is planned for what came out, and trained for some steps as
planned. Nothing is fitted to a step. The share of the cores that other programs had is shown beside it: a measurement with
much of it says little.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from shardwise.bench.machine.report import machine
from shardwise.cluster.stacks import calibrated
from shardwise.job import Job
from shardwise.layout.layout import Layout
from shardwise.measurement.log import read_log
from shardwise.measurement.record import StepRecord
from shardwise.model.architecture import Architecture
from shardwise.planning.codec import dump_plan
from shardwise.planning.plan import Plan, plan_layout
from shardwise.train.data.corpus import write_corpus
from shardwise.train.data.documents import python_library

STEPS, WARM_UPS = 16, 4
VOCAB, CORPUS_BYTES = 2048, 4_000_000
TERMS = {"forward": "fwd", "backward": "bwd", "recompute": "again", "optimizer": "opt", "traffic": "traffic"}
TRAFFIC = ("dp", "fsdp", "control")


class Case(NamedTuple):
    """A model and how it is trained."""

    model: Architecture
    seq_len: int
    num_seqs: int
    layout: Layout


def _llama(width: int, num_layers: int, heads: int, **more: Any) -> Architecture:
    return Architecture(
        name=f"{num_layers} layers of {width}", num_layers=num_layers, d_model=width, d_ff=3 * width, num_heads=heads,
        num_kv_heads=heads // 2, head_dim=width // heads, vocab_size=4096, **more,
    )  # fmt: skip


DEMO, WIDE, DEEP = _llama(256, 4, 4), _llama(512, 4, 8), _llama(128, 8, 4)
CASES: Mapping[str, Case] = {
    "demo": Case(DEMO, 256, 8, Layout(dp=2, micro_batch_seqs=4)),
    "wide": Case(WIDE, 256, 8, Layout(dp=2, micro_batch_seqs=4)),
    "deep": Case(DEEP, 512, 8, Layout(dp=2, micro_batch_seqs=4)),
    "accumulated": Case(DEMO, 256, 16, Layout(dp=2, micro_batch_seqs=2, recompute="full")),
    "zero-1": Case(DEMO, 256, 8, Layout(fsdp=2, zero_stage=1, micro_batch_seqs=4)),
    "zero-3": Case(DEMO, 256, 8, Layout(fsdp=2, zero_stage=3, micro_batch_seqs=4)),
    "experts": Case(
        _llama(128, 4, 4, num_experts=8, experts_per_token=2), 256, 8, Layout(dp=2, micro_batch_seqs=4)
    ),
    "alone": Case(DEMO, 256, 8, Layout(micro_batch_seqs=8)),
}


def main() -> None:
    """Print a line for each case, and the worst of them."""
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        write_corpus(python_library(CORPUS_BYTES), data, vocab_size=VOCAB, held_out=0.01)
        print(f"{'case':<12}{'predicted':>10}{'measured':>10}{'error':>8}  others  by term, predicted / measured in ms")
        for name in sys.argv[1:] or CASES:
            plan = _planned(CASES[name])
            terms, others = _trained(plan, data, Path(folder) / name)
            found = plan.estimate.step_time_s / terms["step"] - 1
            worst = max(worst, abs(found))
            print(
                f"{name:<12}{plan.estimate.step_time_s * 1e3:>7.0f} ms{terms['step'] * 1e3:>7.0f} ms{found:>+8.1%}"
                f"{others:>8.0%}  {', '.join(_by_term(plan, terms))}",
                flush=True,
            )
    print(f"worst: {worst:.1%}")


def _planned(case: Case) -> Plan:
    found = machine("cpu", case.layout.num_devices)
    job = Job(global_batch_tokens=case.num_seqs * case.seq_len, seq_len=case.seq_len, precision="fp32", loss="in_place")
    return plan_layout(case.model, calibrated(found.cluster, found.calibration), job, case.layout)


def _trained(plan: Plan, data: Path, out: Path) -> tuple[dict[str, float], float]:
    """Median seconds of a step by term, and the share of the cores that others had meanwhile."""
    path = out.with_suffix(".json")
    dump_plan(plan, path)
    before, started = (_busy_s(), _own_s()), time.perf_counter()
    words = ("--data", str(data), "--out", str(out), "--steps", str(STEPS))
    ran = subprocess.run(
        [sys.executable, "-m", "shardwise.train", str(path), *words], capture_output=True, text=True, check=False
    )
    if ran.returncode:
        raise SystemExit(ran.stderr)
    wall = time.perf_counter() - started
    busy, own = _busy_s() - before[0], _own_s() - before[1]
    steps = read_log(out / "log.jsonl").steps[WARM_UPS:]
    terms = {name: statistics.median(_seconds(step, name) for step in steps) for name in (*TERMS, "step")}
    return terms, max(busy - own, 0.0) / wall / (os.cpu_count() or 1)


def _seconds(step: StepRecord, term: str) -> float:
    if term == "step":
        return step.step_time_s
    return sum(step.seconds.get(name, 0.0) for name in (TRAFFIC if term == "traffic" else (term,)))


def _by_term(plan: Plan, measured: Mapping[str, float]) -> Iterator[str]:
    time_s = plan.estimate.time
    for term, shown in TERMS.items():
        predicted = sum(time_s[name] for name in TRAFFIC) if term == "traffic" else time_s[term]
        if predicted or measured[term]:
            yield f"{shown} {predicted * 1e3:.1f} / {measured[term] * 1e3:.1f}"


def _busy_s() -> float:
    """Seconds that the cores of this machine were busy since it started (Linux, proc(5))."""
    user, nice, system = map(int, Path("/proc/stat").read_text(encoding="ascii").split()[1:4])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    """Seconds of processor time that the children of this process had, those that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
