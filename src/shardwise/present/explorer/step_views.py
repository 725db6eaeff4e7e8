"""Views of a step: roofline of its kernels, pipeline schedule, timeline."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

from shardwise.book_formulas import block_roofline, link_bandwidths
from shardwise.hardware import Chip
from shardwise.layout import layout_degrees
from shardwise.layout import num_micro_batches as num_micro_batches_of
from shardwise.pipeline import PassTimes
from shardwise.pipeline.compare_schedules import compare_schedules, play_schedule
from shardwise.present.explorer.controls import controls
from shardwise.present.explorer.number_provenance import EXACT, OPENED_PLAN, Field, Fields, fields_payload, kind_of
from shardwise.present.explorer.request import ViewRequest, head
from shardwise.present.registry import payload_of
from shardwise.present.traces import events, merge_spans
from shardwise.price import SimulatedStep, TimedKernel, simulate
from shardwise.price.estimate import estimate
from shardwise.price.simulation.result import PHASES, MemoryCurve
from shardwise.price.simulation.streams import StreamEvent
from shardwise.step import COMPUTE
from shardwise.values import InputError, ShardwiseError

SOURCE = "Williams et al., Roofline, 2009; Austin et al., How to Scale Your Model, 2025, chapter 1"
DERIVED = "derive/sharded_unit.py: the kernels of the block's derived program, with a device's sizes"
BOUND = "a bound: kernels at the vendor's peak and bandwidth, compute and traffic overlapped"


def roofline(request: ViewRequest) -> dict[str, Any]:
    """Return the roofline of a block's kernels, the share that memory bounds, and bytes/s of the chip's memories and links."""
    request.require_legal()
    chip = request.cluster.chip
    result = block_roofline(request.model, chip, request.layout.micro_batch_seqs, request.job.seq_len, request.layout)
    block = payload_of(result)
    phases = block["phases"]
    memory_s, time_s = (sum(phase[name] for phase in phases.values()) for name in ("memory_bound_s", "time_s"))
    return {
        "roofline": block, "memory_bound_share": memory_s / time_s, "bandwidths": link_bandwidths(chip, {}),
        "fields": fields_payload(_roofline_provenance(chip, tuple(phases))),
    }  # fmt: skip


def _roofline_provenance(chip: Chip, phases: tuple[str, ...]) -> Fields:
    kernel, peak, rate = "roofline.operations.*.", "roofline.peak_flops_per_s", "roofline.memory_bytes_per_s"
    seconds = {f"{symbol}, {name}": f"roofline.phases.{name}.{key}" for name in phases
               for symbol, key in (("bound by memory", "memory_bound_s"), ("all", "time_s"))}  # fmt: skip
    return {
        kernel + "flops": Field(
            "FLOPs of matrix products and attention; elementwise operations have none", "2 · the sizes of all dims",
            "FLOPs", DERIVED, EXACT,
        ),
        kernel + "moved_bytes": Field(
            "bytes between the kernel and the device's memory", "what it reads and writes, each once", "B", DERIVED, EXACT,
        ),
        kernel + "intensity": Field(
            "arithmetic intensity", "FLOPs / bytes", "FLOPs/B", SOURCE, EXACT,
            {"FLOPs": kernel + "flops", "bytes": kernel + "moved_bytes"},
        ),
        kernel + "time_s": Field(
            "seconds of the kernel", "max(FLOPs / peak, bytes / bandwidth)", "s", SOURCE, BOUND,
            {"FLOPs": kernel + "flops", "bytes": kernel + "moved_bytes", "peak": peak, "bandwidth": rate},
        ),
        "memory_bound_share": Field(
            "share of the block's seconds in kernels that take longer to move bytes than to compute",
            "Σ seconds bound by memory / Σ seconds", "%", SOURCE, BOUND, seconds,
        ),
        "roofline.phases.*.memory_bound_s": Field("seconds of the kernels that memory binds", "Σ seconds", "s", SOURCE, BOUND),
        "roofline.phases.*.time_s": Field("seconds of a pass through the block", "Σ seconds", "s", SOURCE, BOUND),
        peak: Field("the chip's dense peak", "given", "FLOP/s", chip.sources.get("peak_flops_per_s", OPENED_PLAN), BOUND),
        rate: Field("bandwidth of the chip's memory", "given", "B/s", chip.sources.get("memory_bytes_per_s", OPENED_PLAN), BOUND),
        "roofline.critical_intensity": Field(
            "the intensity from which on compute binds", "peak / bandwidth", "FLOPs/B", SOURCE, BOUND,
            {"peak": peak, "bandwidth": rate},
        ),
    }  # fmt: skip


MAX_COMPARED = 256  # micro-batches times stages: every schedule is built and played


def schedule(request: ViewRequest) -> dict[str, Any]:
    """Return the payload of `shardwise schedule` for the layout, the command that prints it, and a comparison of all schedules.

    With more passes than a picture shows, the schedule is of fewer micro-batches; `shown` has both numbers.
    """
    request.require_legal()
    layout = request.layout
    passes = shown_passes(request)
    times = _times(request, passes.num_micro_batches)
    played = play_schedule(layout.schedule, layout.pp, passes.micro_batches, layout.num_virtual_stages, times)
    command = (
        f"shardwise schedule {layout.schedule} --stages {layout.pp} --micro-batches {passes.micro_batches} --virtual-stages "
        f"{layout.num_virtual_stages} --times f={times.forward_s!r},b={times.input_s!r},w={times.weight_s!r}"
    )
    return head(request) | {
        "schedule": payload_of(played), "command": command,
        "compared": _compared(layout.pp, passes.num_micro_batches, times), "shown": passes.payload(),
        "controls": controls(request), "fields": fields_payload(_schedule_provenance(request)),
    }  # fmt: skip


def _schedule_provenance(request: ViewRequest) -> Fields:
    source, kind = "pipeline/timeline.py: every pass as early as its rank and what it takes allow", kind_of(request)
    activations = (
        "the most micro-batches whose activations a rank holds at once: 1 is a micro-batch on one of the stages"
    )
    bubble = Field(
        "idle over ideal time of the busiest rank", "idle / (makespan - idle)", "%",
        "Tazi et al., The Ultra-Scale Playbook, 2025: the bubble's ratio; (p - 1) / m of 1F1B", kind,
    )  # fmt: skip
    return {
        "schedule.bubble": bubble._replace(inputs={"makespan": "schedule.makespan_s"}),
        "schedule.makespan_s": Field("seconds from the first pass of any rank to the last one", "max(end)", "s", source, kind),
        "schedule.idle_fraction": Field(
            "idle over whole time, all ranks together", "Σ idle / (ranks · makespan)", "%", source, kind,
            {"makespan": "schedule.makespan_s", "ranks": "schedule.stages"},
        ),
        "schedule.stages": Field("stages, one for each rank", "pp", "", "the layout", EXACT),
        "schedule.micro_batches": Field("micro-batches that are played: those of a step, or as many as a picture shows",
                                        "⌈⌈sequences / replicas⌉ / micro-batch⌉", "",
                                        "layout/rules/model_and_cluster_rules.py", EXACT),
        "schedule.peak_activations": Field(activations, "max over ranks", "", "pipeline/timeline.py", EXACT),
        "schedule.ranks.*.idle_s": Field(
            "seconds of the step in which the rank runs no pass", "makespan - Σ passes", "s", source, kind,
            {"makespan": "schedule.makespan_s"},
        ),
        "schedule.ranks.*.wait_s": Field("the part of it between its first and its last pass", "Σ waits", "s", source, kind),
        "schedule.ranks.*.peak_activations": Field(activations, "forward passes begun - backward passes ended", "",
                                                   "pipeline/timeline.py", EXACT),
        "compared.rows.*.bubble": bubble,
        "compared.rows.*.peak_activations": Field(activations, "max over ranks", "", "pipeline/timeline.py", EXACT),
        "compared.rows.*.messages": Field("messages between ranks in a step", "Σ sends", "", "pipeline/messages.py", EXACT),
    }  # fmt: skip


def _times(request: ViewRequest, micro_batches: int) -> PassTimes:
    """Return the estimate's seconds of a rank's passes of a micro-batch; the two backward passes are equally long."""
    time = request.plan.estimate.time
    backward = (time["backward"] + time["recompute"]) / micro_batches / 2
    return PassTimes(forward_s=time["forward"] / micro_batches, input_s=backward, weight_s=backward)


def _compared(stages: int, num_micro_batches: int, times: PassTimes) -> dict[str, Any]:
    """Return a row for each schedule, all over the same number of micro-batches."""
    micro_batches = whole_rounds(min(num_micro_batches, MAX_COMPARED // stages), num_micro_batches, stages)
    comparison: dict[str, Any] = {
        "micro_batches": micro_batches,
        "num_micro_batches": num_micro_batches,
        "rows": [],
        "problem": "",
    }
    if not micro_batches:
        return comparison | {
            "problem": f"{stages} stages: `shardwise schedule compare` compares so many, and takes its time"
        }
    try:
        return comparison | {"rows": [row._asdict() for row in compare_schedules(stages, [micro_batches], None, times)]}
    except (InputError, ShardwiseError) as error:
        return comparison | {"problem": error.problems[0]}


MAX_PASSES = 4096  # of all ranks: more are no picture, and take seconds to simulate
MAX_RANKS = 16  # rows
RESOLUTION = 4000  # spans of all rows together: nearer ones are drawn as one span
MAX_LABELS = 600  # passes with a label
CURVE_POINTS = 160
DIGITS = 5  # of a step's seconds: finer than any screen
Span = tuple[float, float, str, float]  # start, end, term, busy share
TERMS = {phase: term for term, phase in PHASES.items()}


def timeline(request: ViewRequest) -> dict[str, Any]:
    """Return the payload of `shardwise simulate --json`, and rows of spans: start and end in seconds, term, busy share.

    With more passes than a picture shows, the step is that of a smaller batch; `shown` has both numbers of micro-batches.
    """
    plan, passes = request.plan, shown_passes(request)
    problem, priced = plan.problem, plan.estimate
    if passes.is_truncated:
        batch_tokens = passes.micro_batches * plan.layout.micro_batch_seqs * plan.layout.num_replicas * plan.job.seq_len
        problem = replace(problem, job=replace(plan.job, global_batch_tokens=batch_tokens))
        priced = estimate(problem, plan.layout)
    result = simulate(problem, plan.layout, estimate=priced)
    step = result.step
    num_rows = min(len(result.memories), MAX_RANKS)
    passes = passes._replace(ranks=num_rows, num_ranks=len(result.memories))
    return {
        "simulation": payload_of(result), "num_ranks": len(result.memories), "end_s": step.step_time_s,
        "shown": passes.payload(),
        "memory_capacity_bytes": plan.cluster.chip.capacity_bytes,
        "ranks": [_rank(step, rank, result.memories[rank], step.step_time_s * num_rows / RESOLUTION)
                  for rank in range(num_rows)],
        "fields": fields_payload(_timeline_provenance(request)),
    }  # fmt: skip


def _timeline_provenance(request: ViewRequest) -> Fields:
    source, kind, step = (
        "price/simulation/simulated_step.py: the instruction list on a device's streams",
        kind_of(request),
        "simulation.step_time_s",
    )
    return {
        step: Field("seconds from the first kernel of any rank to the end of the last update", "the longest path through the "
                    "passes of all ranks: the sum of the parts below", "s", source, kind),
        "simulation.estimate.step_time_s": Field(
            "the estimate of the same layout: terms added up, without a simulation", "the sum of the terms of time", "s",
            "price/stage_step_time.py", kind,
        ),
        "simulation.bubble": Field(
            "idle over ideal time, of the rank that waits least for other stages", "waiting / (step - waiting)", "%",
            "Tazi et al., The Ultra-Scale Playbook, 2025: the bubble's ratio", kind,
            {"waiting": "simulation.bubble_s", "step": step},
        ),
        "simulation.bubble_s": Field("seconds of waiting for other stages", "Σ waits", "s", source, kind),
        "simulation.exposed.*": Field(
            "exposed communication: seconds that the compute stream waits for this axis", "Σ max(0, end of the collective - "
            "start of the wait)", "s", source, kind,
        ),
        "simulation.critical_path.*.seconds": Field(
            "seconds of the step's critical path in this part", "Σ seconds of the path", "s",
            "price/simulation/critical_path.py", kind,
        ),
        "simulation.critical_path.*.share": Field(
            "share of the step", "seconds / step", "%", "price/simulation/critical_path.py", kind,
            {"seconds": "simulation.critical_path.*.seconds", "step": step},
        ),
        "simulation.ranks.*.peak_bytes": Field(
            "the most that a device of the rank holds during the step", "what it holds all the time + what is alive at once", "B",
            "price/simulation/result.py", kind_of(request, memory=True), {"all the time": "simulation.ranks.*.constant_bytes"},
        ),
        "simulation.ranks.*.constant_bytes": Field(
            "weights, gradients, optimizer state, runtime", "Σ bytes that no instruction frees", "B",
            "price/simulation/result.py",
            kind_of(request, memory=True),
        ),
    }  # fmt: skip


class ShownPasses(NamedTuple):
    """Part of a step that a picture shows: micro-batches and ranks, each with the step's number; virtual `stages` of a rank."""

    micro_batches: int
    num_micro_batches: int
    ranks: int
    num_ranks: int
    stages: int

    @property
    def is_truncated(self) -> bool:
        """Return if the picture has fewer micro-batches than the step."""
        return self.micro_batches < self.num_micro_batches

    def payload(self) -> dict[str, int]:
        """Return the counts, with forward and backward passes."""
        return {
            "micro_batches": self.micro_batches, "num_micro_batches": self.num_micro_batches,
            "ranks": self.ranks, "num_ranks": self.num_ranks,
            "passes": 2 * self.micro_batches * self.stages * self.ranks,
            "num_passes": 2 * self.num_micro_batches * self.stages * self.num_ranks,
        }  # fmt: skip


def shown_passes(request: ViewRequest) -> ShownPasses:
    """Return the micro-batches that a picture shows. Raises `InputError` if one for each stage is too many."""
    layout = request.layout
    num_micro_batches = int(num_micro_batches_of(request.job, layout_degrees(layout)))
    max_micro_batches = MAX_PASSES // (2 * layout.pp * layout.num_virtual_stages)
    micro_batches = whole_rounds(max_micro_batches, num_micro_batches, layout.pp)
    if not micro_batches:
        passes = 2 * num_micro_batches * layout.pp * layout.num_virtual_stages
        raise InputError(
            f"timeline: found {passes:,} passes ({num_micro_batches:,} micro-batches through "
            f"{layout.pp * layout.num_virtual_stages} stages, forward and backward); at most {MAX_PASSES:,} are simulated here: "
            "fewer stages are required"
        )
    return ShownPasses(micro_batches, num_micro_batches, layout.pp, layout.pp, layout.num_virtual_stages)


def whole_rounds(maximum: int, num_micro_batches: int, stages: int) -> int:
    """Return all micro-batches up to a maximum, else a multiple of the stages, as interleaving requires; 0: none.

    >>> whole_rounds(100, 64, 8), whole_rounds(100, 512, 8), whole_rounds(4, 512, 8)
    (64, 96, 0)
    """
    return num_micro_batches if num_micro_batches <= maximum else maximum - maximum % stages


def _rank(result: SimulatedStep, rank: int, memory: MemoryCurve, resolution_s: float) -> dict[str, Any]:
    digits = DIGITS - math.floor(math.log10(result.step_time_s))
    streams: dict[str, list[tuple[float, float, str]]] = {}
    for event, start, end in events(result, rank):
        streams.setdefault(event.stream, []).append((start, end, _term(event)))
    passes = [(start, end, "&".join(map(str, slot))) for slot, _, start, end in result.slots(rank)]
    return {
        "rank": rank, "compute": _merged(streams.pop(COMPUTE, []), resolution_s, digits),
        "streams": {name: _merged(spans, resolution_s, digits) for name, spans in sorted(streams.items())},
        "passes": passes if len(passes) * result.actions.num_ranks <= MAX_LABELS else [],
        "curve": _thinned(memory.curve), "bubble_s": result.ranks[rank].bubble_s,
    }  # fmt: skip


def _term(event: StreamEvent) -> str:
    """Return the estimate's term of an event: its phase, or its axis."""
    return TERMS.get(event.work.phase, event.work.phase) if isinstance(event.work, TimedKernel) else event.work.axis


def _merged(spans: list[tuple[float, float, str]], resolution_s: float, digits: int) -> list[Span]:
    """Return merged spans with their busy share, in seconds of so many digits."""
    return [
        (
            round(start, digits), round(end, digits), term,
            round(min(1.0, busy_s / (end - start)) if end > start else 1.0, 3),
        )
        for start, end, term, busy_s in merge_spans(spans, resolution_s)
    ]  # fmt: skip


def _thinned(curve: tuple[tuple[float, float], ...]) -> list[tuple[float, float]]:
    """Return at most `CURVE_POINTS` points of a curve, each the highest of those in its place."""
    size = -(-len(curve) // CURVE_POINTS)
    return [
        (curve[first][0], max(value for _, value in curve[first : first + size]))
        for first in range(0, len(curve), size)
    ]
