"""The order of the pipeline's passes: what `shardwise schedule` prints, played with the estimate's seconds."""

from __future__ import annotations

from typing import Any

from shardwise.errors import InputError, ShardwiseError
from shardwise.explore.asked import Asked
from shardwise.explore.controls import controls
from shardwise.explore.views.head import head
from shardwise.explore.views.timeline import require_few_passes
from shardwise.layout.legality import degrees_of, num_micro_batches
from shardwise.schedule.compare import Times, compared, timeline, timeline_payload

MOST_COMPARED = 256  # slots of a schedule: every schedule is built and played


def schedule(asked: Asked) -> dict[str, Any]:
    """The payload of `shardwise schedule` for the layout, the command that prints it, and all schedules side by side."""
    asked.require_legal()
    require_few_passes(asked)
    layout = asked.layout
    micro_batches = int(num_micro_batches(asked.job, degrees_of(layout)))
    times = _times(asked, micro_batches)
    line = timeline(layout.schedule, layout.pp, micro_batches, layout.num_virtual_stages, times)
    command = (
        f"shardwise schedule {layout.schedule} --stages {layout.pp} --micro-batches {micro_batches} --virtual-stages "
        f"{layout.num_virtual_stages} --times f={times.forward_s!r},b={times.input_s!r},w={times.weight_s!r}"
    )
    return head(asked) | {
        "schedule": timeline_payload(line), "command": command, "compared": _compared(layout.pp, micro_batches, times),
        "controls": controls(asked),
    }  # fmt: skip


def _times(asked: Asked, micro_batches: int) -> Times:
    """Seconds of a rank's passes of one micro-batch: the estimate's, the backward pass in two halves."""
    time = asked.plan.estimate.time
    backward = (time["backward"] + time["recompute"]) / micro_batches / 2
    return Times(forward_s=time["forward"] / micro_batches, input_s=backward, weight_s=backward)


def _compared(stages: int, micro_batches: int, times: Times) -> dict[str, Any]:
    if stages * micro_batches > MOST_COMPARED:
        return {
            "rows": [],
            "problem": f"{stages} stages and {micro_batches:,} micro-batches: `shardwise schedule compare` takes its time",
        }
    try:
        return {"rows": [row._asdict() for row in compared(stages, [micro_batches], None, times)], "problem": ""}
    except (InputError, ShardwiseError) as error:
        return {"rows": [], "problem": error.problems[0]}
