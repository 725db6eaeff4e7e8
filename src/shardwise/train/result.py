"""What came out of a run, as its first rank keeps it in the folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.measurement.folder import write_json
from shardwise.measurement.log import read_log
from shardwise.measurement.summary import Drawn, summarised
from shardwise.planning.plan import Plan
from shardwise.train.admission import Data
from shardwise.train.flags import Settings
from shardwise.train.noise import write_noise
from shardwise.train.watch import planned_checkpoints, throughput_of


def write_summary(
    plan: Plan, settings: Settings, data: Data, *, device: str, steps: int, held_out: Mapping[str, float]
) -> dict[str, Any]:
    """The summary of a run of so many steps, written; `held_out` are the losses of each source's held-out text."""
    out, log = settings.out, read_log(settings.out.log)
    write_noise(out, log)
    found = summarised(
        log, throughput_of(plan, device), log_path=str(out.log), held_out_loss=data.mean(held_out),
        unigram_entropy_nats=data.unigram_entropy_nats, planned=planned_checkpoints(plan),
        sources=_sources(data, steps, held_out),
    )  # fmt: skip
    write_json(out.summary, found)
    return found


def _sources(data: Data, steps: int, held_out: Mapping[str, float]) -> dict[str, Drawn]:
    """What was taken of each source, and what is lost on its held-out text."""
    epochs = data.train.epochs(steps)
    return {
        name: Drawn(share, taken, held_out.get(name))
        for (name, share), taken in zip(data.shares.items(), epochs, strict=True)
    }
