"""The order of the pipeline's passes: what `shardwise schedule` prints, played with the estimate's seconds."""

from __future__ import annotations

from typing import Any

from shardwise.layout import layout_degrees, num_micro_batches
from shardwise.pipeline import PassTimes
from shardwise.pipeline.compare_schedules import compare_schedules, play_schedule, timeline_payload
from shardwise.present.explore.asked import Asked
from shardwise.present.explore.controls import controls
from shardwise.present.explore.fields import EXACT, Field, Fields, fields_payload
from shardwise.present.explore.kinds import kind_of
from shardwise.present.explore.views.head import head
from shardwise.present.explore.views.timeline import require_few_passes
from shardwise.values import InputError, ShardwiseError

MOST_COMPARED = 256  # slots of a schedule: every schedule is built and played


def schedule(asked: Asked) -> dict[str, Any]:
    """The payload of `shardwise schedule` for the layout, the command that prints it, and all schedules side by side."""
    asked.require_legal()
    require_few_passes(asked)
    layout = asked.layout
    micro_batches = int(num_micro_batches(asked.job, layout_degrees(layout)))
    times = _times(asked, micro_batches)
    line = play_schedule(layout.schedule, layout.pp, micro_batches, layout.num_virtual_stages, times)
    command = (
        f"shardwise schedule {layout.schedule} --stages {layout.pp} --micro-batches {micro_batches} --virtual-stages "
        f"{layout.num_virtual_stages} --times f={times.forward_s!r},b={times.input_s!r},w={times.weight_s!r}"
    )
    return head(asked) | {
        "schedule": timeline_payload(line), "command": command, "compared": _compared(layout.pp, micro_batches, times),
        "controls": controls(asked), "fields": fields_payload(_fields(asked)),
    }  # fmt: skip


def _fields(asked: Asked) -> Fields:
    played, kind = "pipeline/timeline.py: every pass as early as its rank and what it takes allow", kind_of(asked)
    held = "the most micro-batches whose activations a rank holds at once: 1 is a micro-batch on one of the stages"
    bubble = Field(
        "idle over ideal time of the busiest rank", "idle / (makespan - idle)", "%",
        "Tazi et al., The Ultra-Scale Playbook, 2025: the bubble's ratio; (p - 1) / m of 1F1B", kind,
    )  # fmt: skip
    return {
        "schedule.bubble": bubble._replace(inputs={"makespan": "schedule.makespan_s"}),
        "schedule.makespan_s": Field("seconds from the first pass of any rank to the last one", "max(end)", "s", played, kind),
        "schedule.idle_fraction": Field(
            "idle over whole time, all ranks together", "Σ idle / (ranks · makespan)", "%", played, kind,
            {"makespan": "schedule.makespan_s", "ranks": "schedule.stages"},
        ),
        "schedule.stages": Field("stages, one for each rank", "pp", "", "the layout", EXACT),
        "schedule.micro_batches": Field("micro-batches of a step", "⌈⌈sequences / replicas⌉ / micro-batch⌉", "",
                                        "layout/rules/legality.py", EXACT),
        "schedule.peak_activations": Field(held, "max over ranks", "", "pipeline/timeline.py", EXACT),
        "schedule.ranks.*.idle_s": Field(
            "seconds of the step in which the rank runs no pass", "makespan - Σ passes", "s", played, kind,
            {"makespan": "schedule.makespan_s"},
        ),
        "schedule.ranks.*.wait_s": Field("the part of it between its first and its last pass", "Σ waits", "s", played, kind),
        "schedule.ranks.*.peak_activations": Field(held, "forward passes begun - backward passes ended", "",
                                                   "pipeline/timeline.py", EXACT),
        "compared.rows.*.bubble": bubble,
        "compared.rows.*.peak_activations": Field(held, "max over ranks", "", "pipeline/timeline.py", EXACT),
        "compared.rows.*.messages": Field("messages between ranks in a step", "Σ sends", "", "pipeline/messages.py", EXACT),
    }  # fmt: skip


def _times(asked: Asked, micro_batches: int) -> PassTimes:
    """Seconds of a rank's passes of one micro-batch: the estimate's, the backward pass in two halves."""
    time = asked.plan.estimate.time
    backward = (time["backward"] + time["recompute"]) / micro_batches / 2
    return PassTimes(forward_s=time["forward"] / micro_batches, input_s=backward, weight_s=backward)


def _compared(stages: int, micro_batches: int, times: PassTimes) -> dict[str, Any]:
    if stages * micro_batches > MOST_COMPARED:
        return {
            "rows": [],
            "problem": f"{stages} stages and {micro_batches:,} micro-batches: `shardwise schedule compare` takes its time",
        }
    try:
        return {
            "rows": [row._asdict() for row in compare_schedules(stages, [micro_batches], None, times)],
            "problem": "",
        }
    except (InputError, ShardwiseError) as error:
        return {"rows": [], "problem": error.problems[0]}
