"""Find stragglers: ranks that work longer in a step than others with the same work, and for which all others wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median, median_low

from shardwise.price import NO_RECOMPUTE, Pricing
from shardwise.records import StepRecord
from shardwise.records.step_log import SLOW_EVENT
from shardwise.run.faults.agreement import RankGroup, all_gather_ints
from shardwise.run.faults.rank_status import Peer, join_first
from shardwise.run.trainer.run_reporter import RunReporter
from shardwise.search import Plan
from shardwise.values import format_seconds

STEPS_BETWEEN = 10  # steps between two exchanges of two numbers per rank
# Terms of a step in which a rank works by itself; in the others it waits for ranks.
WORK = ("forward", "backward", "recompute", "optimizer", "host", "data")


def stage_flops(plan: Plan) -> list[float]:
    """Return the FLOPs of a micro-batch on a device of each pipeline stage, forward and backward.

    >>> import shardwise as sw
    >>> plan = sw.plan("llama-3-8b", "h100:8", global_batch_tokens="512Ki", seq_len=4096, pins={"pp": 2})
    >>> first, last = stage_flops(plan)
    >>> last > first  # it has the logits
    True
    """
    pricing = Pricing(plan.problem, plan.layout)
    stages = [pricing.counts(stage).units for stage in range(plan.layout.pp)]
    names = {name: name.removeprefix(NO_RECOMPUTE) for units in stages for name in units}
    flops = {
        name: sum(pricing.pricer.flops(unit, pricing.scheme, pricing.values).values()) for name, unit in names.items()
    }
    return [float(sum(count * flops[name] for name, count in units.items())) for units in stages]


def slow_ranks(
    work_s: Sequence[float], stages: Sequence[int], flops: Sequence[float], factor: float
) -> dict[int, float]:
    """Return the ranks that work at least `factor` times as long as others with the same work, and their ratios.

    `work_s`: seconds of each rank; `stages`: its pipeline stage; `flops`: those of each stage. A rank is compared with
    the low median of the ranks of its stage. One that is alone in its stage is compared with all ranks, per FLOP.

    >>> slow_ranks([0.2, 0.21, 0.6, 0.2], [0, 0, 0, 0], [1.0], 2.0)
    {2: 3.0}
    >>> slow_ranks([0.2, 0.9], [0, 1], [1.0, 1.5], 2.0)
    {1: 3.0}
    """
    per_flop = [seconds / flops[stage] for seconds, stage in zip(work_s, stages, strict=True)]
    slow = {}
    for rank, stage in enumerate(stages):
        peers = [
            seconds_per_flop
            for seconds_per_flop, peer_stage in zip(per_flop, stages, strict=True)
            if peer_stage == stage
        ]
        ratio = per_flop[rank] / median_low(peers if len(peers) > 1 else per_flop)
        if ratio >= factor:
            slow[rank] = round(ratio, 2)
    return slow


class StragglerDetector:
    """Compares the ranks of a run every `STEPS_BETWEEN` steps, and reports when a rank becomes slow or no longer is."""

    def __init__(self, world: RankGroup, plan: Plan, factor: float) -> None:
        self.world, self.factor = world, factor
        self._flops = stage_flops(plan)
        self._work_s: list[float] = []
        self._slow: Mapping[int, float] = {}

    def step(self, record: StepRecord, reporter: RunReporter | None) -> None:
        """Add a completed step; all ranks call this."""
        if self.world.rendezvous is None:
            return
        self._work_s.append(sum(record.seconds.get(term, 0.0) for term in WORK))
        if len(self._work_s) < STEPS_BETWEEN:
            return
        local = [round(1e6 * median(self._work_s)), self.world.stage]
        self._work_s.clear()
        rows = all_gather_ints(self.world, local, "how long each rank works")
        work_s = [max(microseconds, 1) / 1e6 for microseconds, _ in rows]
        slow = slow_ranks(work_s, [stage for _, stage in rows], self._flops, self.factor)
        if reporter is not None and slow.keys() != self._slow.keys():
            peers = self.world.rendezvous.peers
            ranks = [
                {
                    "rank": rank,
                    "host": peers[rank].host,
                    "pid": peers[rank].pid,
                    "work_s": work_s[rank],
                    "factor": factor,
                }
                for rank, factor in slow.items()
            ]
            text = _describe_slow(peers, slow, work_s)
            text = text or f"no rank is slow any more ({join_first([str(peers[rank]) for rank in self._slow], '')} was)"
            reporter.event(SLOW_EVENT, record.step, {"ranks": ranks}, f"step {record.step}: {text}")
        self._slow = slow


def _describe_slow(peers: Sequence[Peer], slow: Mapping[int, float], work_s: Sequence[float]) -> str:
    descriptions = [
        f"{peers[rank]} works {factor:.2g} times as long as others with the same work "
        f"({format_seconds(work_s[rank])} a step)"
        for rank, factor in slow.items()
    ]
    return join_first(descriptions, ", and {} more")
