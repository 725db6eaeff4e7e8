"""A plan against a run of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shardwise.cluster.chip import Chip
from shardwise.cluster.chips import LOCAL, LOCAL_IS, chip_names
from shardwise.draw.notebook import Pictured, Shown
from shardwise.measurement.inspection import Measured
from shardwise.planning.plan import Plan
from shardwise.precision import precision_named
from shardwise.reconcile.collectives import Collectives, collectives
from shardwise.reconcile.memory import StepMemory, step_memory
from shardwise.reconcile.read import MeasuredRun
from shardwise.reconcile.time import Attribution, StepTime, attribution, depends_on, step_time
from shardwise.train.issued import own_memory, own_policy
from shardwise.train.recipe import Recipe
from shardwise.units import format_bytes

NOISY = 0.10  # a change of the machine from before a run to after it that makes its times those of a noisy machine
REST = 0.10  # of a step, which what no term explains is to stay under
ENGINES_LOSS = "in_place"  # the kind that the engine has (`loss.LOSSES`)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconciliation(Pictured):
    """All of it. `machine` is what ran the plan; `changes` by how much its work took longer after the run than before, by name.

    `attribution` is None for a step that is as predicted, and for one of a noisy machine. `remarks` say what the numbers must be
    read with, the most important first; `advice` which commands would mend the plan.
    """

    machine: str
    changes: Mapping[str, float]
    time: StepTime
    attribution: Attribution | None
    memory: StepMemory
    collectives: Collectives
    remarks: tuple[str, ...]
    advice: tuple[str, ...]

    def shown(self) -> Shown:
        from shardwise.reconcile.picture import shown_reconciliation

        return shown_reconciliation(self)

    @property
    def noisy(self) -> bool:
        return bool(noise(self.changes))


def reconcile(plan: Plan, run: MeasuredRun) -> Reconciliation:
    """Hold a run against its plan, term by term."""
    time = step_time(plan.estimate, run.counted)
    changes = run.seen.changes()
    attributed = None if noise(changes) else attribution(time, lambda name: depends_on(plan, name))
    return Reconciliation(
        machine=run.seen.machine, changes=changes, time=time, attribution=attributed,
        memory=step_memory(own_memory(plan, run.recipe), run.seen),
        collectives=collectives(plan, run.recipe.of_step(run.watched.step - 1), run.watched.num_tokens, run.seen.collectives),
        remarks=tuple(_remarks(plan, run, changes)), advice=tuple(_advice(plan, time, run.seen, noisy=bool(noise(changes)))),
    )  # fmt: skip


def noise(changes: Mapping[str, float]) -> dict[str, float]:
    """What of the machine changed by more than `NOISY`, the most first."""
    found = {name: change for name, change in changes.items() if abs(change) > NOISY}
    return dict(sorted(found.items(), key=lambda item: -abs(item[1])))


def _remarks(plan: Plan, run: MeasuredRun, changes: Mapping[str, float]) -> Iterator[str]:
    chip, seen = plan.cluster.chip, run.seen
    if is_other(chip, seen):
        yield f"the plan is priced for {chip.name}, and ran on another machine ({seen.machine}): its seconds say nothing of that"
    elif chip.name == LOCAL and plan.cluster.calibration is None:
        yield f"{LOCAL_IS}, not this machine: its seconds are those of another host"
    changed = noise(changes)
    if changed:
        named = ", ".join(f"{name} {change:+.0%}" for name, change in changed.items())
        most = max(abs(change) for change in changed.values())
        yield f"the machine changed by {most:.0%} during the run ({named}): times below are of a noisy machine"
    elif not changes:
        yield "the run has not ended: whether the machine changed meanwhile is not known"
    if plan.job.loss != ENGINES_LOSS:
        yield (
            f"the plan has the memory of the loss {plan.job.loss!r}; `train` runs {ENGINES_LOSS!r}: plan again with "
            f"--set job.loss={ENGINES_LOSS}"
        )
    yield from cast_remarks(plan, run.recipe)


def cast_remarks(plan: Plan, recipe: Recipe) -> Iterator[str]:
    """That memory is held against another price than the plan's own."""
    if own_policy(plan, recipe) is not None and plan.policy.casts != "in_products":
        own, planned = (sum(of.values()) for of in (own_memory(plan, recipe), plan.estimate.memory))
        yield (
            f"memory is held against {format_bytes(own)}, the price of `train`, which keeps what products in "
            f"{precision_named(plan.job.precision).matmul} take as it is; the plan's own {format_bytes(planned)} is that of "
            "software that keeps the casts: plan again with --stack shardwise"
        )


def is_other(chip: Chip, seen: Measured) -> bool:
    """Whether a chip of the catalogue is another one than a run's device. Of a chip with a name of its own nothing is known."""
    if chip.name not in chip_names():
        return False
    if seen.device == "cpu":
        return chip.name != "cpu"
    return chip.name.partition("-")[0] not in re.split(r"[^a-z0-9]+", seen.machine.lower())


def _advice(plan: Plan, time: StepTime, seen: Measured, *, noisy: bool) -> Iterator[str]:
    """What would make the plan's seconds this machine's; nothing where they are."""
    if noisy:
        yield "run it again while nothing else runs on the machine"
    if time.within:
        return
    if seen.machine.startswith("CPU"):
        yield f"shardwise bench machine --processes {plan.layout.num_devices} --out machine.toml"
        yield "shardwise plan MODEL machine.toml ... --runnable, and reconcile that plan with this run or the next"
        return
    cluster = plan.cluster.name if ":" in plan.cluster.name else "CLUSTER.toml"
    yield "shardwise bench all --out machine.jsonl"
    yield f"shardwise calibrate {cluster} --bench machine.jsonl --out my-cluster.toml"
    yield "shardwise plan MODEL my-cluster.toml ..., and reconcile that plan with this run or the next"
