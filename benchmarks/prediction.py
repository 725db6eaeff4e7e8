"""Predicted over measured step times of small models on this machine: `python benchmarks/prediction.py [CASE ...]`.

Before each case and after it the machine is measured (`bench machine`); the case is planned for what came out before, and trained
for some steps as planned. Nothing is fitted to a step. The prediction that counts is the mean of the two. Where they differ, or
other programs have much of the cores, what is measured and what is trained are on two machines: a case is then done again, and
what changed and the share that others had are shown. The cores of a virtual machine may change by half within a minute, and no
counter says so.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from shardwise.hardware.published_constants import with_calibration
from shardwise.layout.layout import Layout
from shardwise.measure.microbenchmarks.machine_benchmark import measure_machine
from shardwise.model.architecture import Architecture
from shardwise.model.job import Job
from shardwise.records.step_log import StepRecord, read_log
from shardwise.run.data.corpus_writer import write_corpus
from shardwise.run.data.documents import python_library
from shardwise.search.plan import Plan, plan_layout
from shardwise.search.plan_file import dump_plan

STEPS, WARM_UPS = 16, 4
CALM, TRIES = 0.05, 3  # the share of the cores that others may have; after so many tries the calmest counts
STEADY = 0.1  # what the predictions before and after a run may differ by
VOCAB, CORPUS_BYTES = 2048, 4_000_000
TERMS = {"forward": "fwd", "backward": "bwd", "recompute": "again", "optimizer": "opt", "traffic": "traffic"}
Result = TypeVar("Result")
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
    "experts": Case(_llama(128, 4, 4, num_experts=8, experts_per_token=2), 256, 8, Layout(dp=2, micro_batch_seqs=4)),
    "alone": Case(DEMO, 256, 8, Layout(micro_batch_seqs=8)),
}


def main() -> None:
    """Print a line for each case, and the worst of them."""
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        write_corpus(python_library(CORPUS_BYTES), data, vocab_size=VOCAB, held_out=0.01)
        columns = "  inside  changed  others  by term, predicted / measured in ms"
        print(f"{'case':<12}{'predicted':>10}{'measured':>10}{'error':>8}{columns}")
        for name in sys.argv[1:] or CASES:
            done = _calmest(CASES[name], data, Path(folder))
            measured, error = done.terms["step"], done.predicted_s / done.terms["step"] - 1
            worst = max(worst, abs(error))
            print(
                f"{name:<12}{done.predicted_s * 1e3:>7.0f} ms{measured * 1e3:>7.0f} ms{error:>+8.1%}"
                f"{'yes' if done.inside else 'no':>8}{done.changed:>+9.0%}{done.other_programs:>8.0%}  "
                f"{', '.join(_by_term(done))}",
                flush=True,
            )
    print(f"worst: {worst:.1%}")


class Done(NamedTuple):
    """A case that was planned and trained: the plans for the machine before and after, median seconds of a step by term, and the
    share of the cores that others had."""

    plans: tuple[Plan, Plan]
    terms: Mapping[str, float]
    other_programs: float

    @property
    def predicted_s(self) -> float:
        return statistics.fmean(plan.estimate.step_time_s for plan in self.plans)

    @property
    def inside(self) -> bool:
        """Whether the measured step lies in the 90% prediction interval of either plan."""
        intervals = [plan.estimate.interval90 or (0.0, 0.0) for plan in self.plans]
        return any(low <= self.terms["step"] <= high for low, high in intervals)

    @property
    def changed(self) -> float:
        """By how much the prediction changed during the run."""
        before, after = (plan.estimate.step_time_s for plan in self.plans)
        return after / before - 1.0


def _calmest(case: Case, data: Path, folder: Path) -> Done:
    tries: list[Done] = []
    while len(tries) < TRIES and not (tries and tries[-1].other_programs <= CALM and abs(tries[-1].changed) <= STEADY):
        before, first = _beside(partial(_planned, case))
        terms, during = _beside(partial(_trained, before, data, Path(tempfile.mkdtemp(dir=folder))))
        after, last = _beside(partial(_planned, case))
        tries.append(Done((before, after), terms, max(first, during, last)))
    return min(tries, key=lambda done: max(done.other_programs / CALM, abs(done.changed) / STEADY))


def _beside(run: Callable[[], Result]) -> tuple[Result, float]:
    """What `run` gives, and the share of the cores that other programs had meanwhile."""
    before, started = (_busy_s(), _own_s()), time.perf_counter()
    result = run()
    wall = time.perf_counter() - started
    busy, own_s = _busy_s() - before[0], _own_s() - before[1]
    return result, max(busy - own_s, 0.0) / wall / (os.cpu_count() or 1)


def _planned(case: Case) -> Plan:
    machine = measure_machine(case.layout.num_devices)
    job = Job(global_batch_tokens=case.num_seqs * case.seq_len, seq_len=case.seq_len, precision="fp32", loss="in_place")
    return plan_layout(case.model, with_calibration(machine.cluster, machine.calibration), job, case.layout)


def _trained(plan: Plan, data: Path, folder: Path) -> dict[str, float]:
    """Median seconds of a step by term."""
    path, out = folder / "plan.json", folder / "run"
    dump_plan(plan, path)
    words = ("--data", str(data), "--out", str(out), "--steps", str(STEPS))
    ran = subprocess.run(
        [sys.executable, "-m", "shardwise.train", str(path), *words], capture_output=True, text=True, check=False
    )
    if ran.returncode:
        raise SystemExit(ran.stderr)
    steps = read_log(out / "log.jsonl").steps[WARM_UPS:]
    return {name: statistics.median(_seconds(step, name) for step in steps) for name in (*TERMS, "step")}


def _seconds(step: StepRecord, term: str) -> float:
    if term == "step":
        return step.step_time_s
    return sum(step.seconds.get(name, 0.0) for name in (TRAFFIC if term == "traffic" else (term,)))


def _by_term(done: Done) -> Iterator[str]:
    measured = done.terms
    time_s = {
        name: statistics.fmean(plan.estimate.time[name] for plan in done.plans) for name in done.plans[0].estimate.time
    }
    for term, shown in TERMS.items():
        predicted = sum(time_s[name] for name in TRAFFIC) if term == "traffic" else time_s[term]
        if predicted or measured[term]:
            yield f"{shown} {predicted * 1e3:.1f} / {measured[term] * 1e3:.1f}"


def _busy_s() -> float:
    """Seconds that the cores of this machine were busy since it started (Linux, proc(5))."""
    user, nice, system = map(int, Path("/proc/stat").read_text(encoding="ascii").split()[1:4])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    """Seconds of processor time that the children of this process had, those that have ended, and it."""
    every = (resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(used.ru_utime + used.ru_stime for used in every)


if __name__ == "__main__":
    main()
