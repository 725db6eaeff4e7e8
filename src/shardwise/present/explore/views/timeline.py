"""The simulated step: what `shardwise simulate` prints, and spans to draw of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from shardwise.layout import layout_degrees, num_micro_batches
from shardwise.present.explore.asked import Asked
from shardwise.present.explore.fields import Field, Fields, fields_payload
from shardwise.present.explore.kinds import kind_of
from shardwise.present.pictures.simulated_step_timeline import events
from shardwise.price import SimulatedStep, TimedKernel, simulate
from shardwise.price.simulation.result import PHASES, MemoryCurve, simulation_payload
from shardwise.price.simulation.streams import StreamEvent
from shardwise.step import COMPUTE
from shardwise.values import InputError

MOST_PASSES = 4096  # of all ranks: more are no picture, and take seconds to simulate
MOST_RANKS = 16  # rows
FINEST = 4000  # spans of all rows together: what is nearer than a step's part by it is drawn as one
MOST_LABELS = 600  # passes that a label fits on
CURVE = 160  # points of a curve
DIGITS = 5  # of a step's seconds: finer than any screen
Span = tuple[float, float, str, float]  # start, end, term, busy share
TERMS = {phase: term for term, phase in PHASES.items()}


def timeline(asked: Asked) -> dict[str, Any]:
    """The payload of `shardwise simulate --json`, and rows of spans: start and end in seconds, term, busy share."""
    require_few_passes(asked)
    plan = asked.plan
    found = simulate(plan.problem, plan.layout)
    step = found.step
    shown = min(len(found.memories), MOST_RANKS)
    return {
        "simulation": simulation_payload(found, plan.estimate), "num_ranks": len(found.memories), "end_s": step.step_time_s,
        "memory_capacity_bytes": plan.cluster.chip.memory_bytes,
        "ranks": [_rank(step, rank, found.memories[rank], step.step_time_s * shown / FINEST) for rank in range(shown)],
        "fields": fields_payload(_fields(asked)),
    }  # fmt: skip


def _fields(asked: Asked) -> Fields:
    source, kind, step = (
        "price/simulation/simulated_step.py: the instruction list on a device's streams",
        kind_of(asked),
        "simulation.step_time_s",
    )
    return {
        step: Field("seconds from the first kernel of any rank to the end of the last update", "the longest path through the "
                    "passes of all ranks: the sum of the parts below", "s", source, kind),
        "simulation.estimate.step_time_s": Field(
            "the estimate of the same layout: terms added up, without a simulation", "the sum of the terms of time", "s",
            "price/step_time.py", kind,
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
            "price/simulation/result.py", kind_of(asked, memory=True), {"all the time": "simulation.ranks.*.constant_bytes"},
        ),
        "simulation.ranks.*.constant_bytes": Field(
            "weights, gradients, optimizer state, runtime", "Σ bytes that no instruction frees", "B",
            "price/simulation/result.py",
            kind_of(asked, memory=True),
        ),
    }  # fmt: skip


def require_few_passes(asked: Asked) -> None:
    """Raise `InputError` for more passes than a picture shows."""
    layout = asked.layout
    micro_batches = int(num_micro_batches(asked.job, layout_degrees(layout)))
    passes = 2 * micro_batches * layout.pp * layout.num_virtual_stages
    if passes > MOST_PASSES:
        raise InputError(
            f"timeline: found {passes:,} passes ({micro_batches:,} micro-batches through {layout.pp * layout.num_virtual_stages} "
            f"stages, forward and backward); at most {MOST_PASSES:,} are simulated here: a larger micro-batch or a smaller batch"
        )


def _rank(found: SimulatedStep, rank: int, memory: MemoryCurve, finest_s: float) -> dict[str, Any]:
    digits = DIGITS - math.floor(math.log10(found.step_time_s))
    streams: dict[str, list[tuple[float, float, str]]] = {}
    for one, start, end in events(found, rank):
        streams.setdefault(one.stream, []).append((start, end, _term(one)))
    passes = [(start, end, "&".join(map(str, slot))) for slot, _, start, end in found.slots(rank)]
    return {
        "rank": rank, "compute": _rounded(_merged(streams.pop(COMPUTE, []), finest_s), digits),
        "streams": {name: _rounded(_merged(spans, finest_s), digits) for name, spans in sorted(streams.items())},
        "passes": passes if len(passes) * found.actions.num_ranks <= MOST_LABELS else [],
        "curve": _thinned(memory.curve), "bubble_s": found.ranks[rank].bubble_s,
    }  # fmt: skip


def _term(one: StreamEvent) -> str:
    """The term of an estimate that an event is counted in: its phase, or its axis."""
    return TERMS.get(one.work.phase, one.work.phase) if isinstance(one.work, TimedKernel) else one.work.axis


def _merged(spans: list[tuple[float, float, str]], finest_s: float) -> Iterator[Span]:
    """Spans in order, those of one term that a picture does not tell apart as one, with the share of it that is busy."""
    last: Span | None = None  # start, end, term, busy seconds
    for start, end, term in sorted(spans):
        if last and term == last[2] and start - last[1] <= finest_s:
            last = (last[0], max(last[1], end), term, last[3] + end - start)
            continue
        if last:
            yield _shared(*last)
        last = (start, end, term, end - start)
    if last:
        yield _shared(*last)


def _rounded(spans: Iterator[Span], digits: int) -> list[Span]:
    return [(round(start, digits), round(end, digits), term, round(busy, 3)) for start, end, term, busy in spans]


def _shared(start: float, end: float, term: str, busy_s: float) -> Span:
    return start, end, term, min(1.0, busy_s / (end - start)) if end > start else 1.0


def _thinned(curve: tuple[tuple[float, float], ...]) -> list[tuple[float, float]]:
    """So many points of a curve, each the highest of those that it stands for."""
    size = -(-len(curve) // CURVE)
    return [
        (curve[first][0], max(held for _, held in curve[first : first + size])) for first in range(0, len(curve), size)
    ]
