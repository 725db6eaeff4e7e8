"""What can be changed: for each choice its options, the change of the address that each makes, and why it cannot be taken.

A degree that is dragged takes devices from the replicas, so that the product stays; what goes with a choice follows it (sequence
parallelism with tp, the natural schedule with pp). In the view `memory` the cluster follows instead, and the batch is the
smallest that fills the layout.
"""

from __future__ import annotations

from typing import Any

from shardwise.present.explore.asked import Asked
from shardwise.present.explore.controls.of_job import job_controls
from shardwise.present.explore.controls.of_layout import layout_controls
from shardwise.present.explore.controls.of_model import model_controls


def controls(asked: Asked, *, free: bool = False) -> list[dict[str, Any]]:
    """Every choice as plain data; `free`: the cluster follows the degrees, and the sizes of the model are choices too."""
    every = [*job_controls(asked, free=free), *layout_controls(asked, free=free)]
    every += model_controls(asked) if free else ()
    return [one.payload() for one in every]
