"""The whole explanation of a plan, as one value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardwise.cost.estimate import estimate
from shardwise.cost.pricing import Pricing
from shardwise.cost.recomputed import LayerRecompute, layers_recomputed
from shardwise.cost.run import Run, training_run
from shardwise.draw.notebook import Pictured, Shown
from shardwise.layout.layout import Layout
from shardwise.layout.placement import default_placement
from shardwise.planning.abilities import as_run, stack_of
from shardwise.planning.explain.against import Against, Nearest, against, best_placed, smallest_change
from shardwise.planning.explain.constants import Constant, constants
from shardwise.planning.explain.critical_batch import CriticalBatch, critical_batch
from shardwise.planning.explain.options import Option, options
from shardwise.planning.explain.reasons import MODEL_ERROR
from shardwise.planning.explain.schedules import Scheduled, schedules
from shardwise.planning.explain.story import Batch, Fit, RunnerUp, Throughput, batch, fit, runners_up, throughput
from shardwise.planning.explain.terms import Term, term
from shardwise.planning.loss_time import Doubling
from shardwise.planning.plan import Plan
from shardwise.units import format_seconds

Doublings = Callable[[Plan], tuple[Doubling, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation(Pictured):
    """Why a plan is what it is, in the order of its decisions: memory, batch, throughput, and the layouts that lost.

    `against` compares another layout, `terms` take single terms apart, `constants` are the measured values that the plan is most
    sensitive to, `recompute` is what layers keep for the backward pass and compute again; `model_error` is the error of
    predictions on held-out runs, as a share of the step. `critical_batch` is of plans with a noise scale.

    >>> import shardwise as sw
    >>> found = sw.explain(sw.plan("gpt-2", "h100:8", global_batch_tokens="64Ki", seq_len=1024))
    >>> found.fit.fits, found.cluster, found.against
    (True, 'h100:8', None)
    """

    model: str
    cluster: str
    layout: str
    placement: str
    model_error: float
    fit: Fit
    batch: Batch
    throughput: Throughput
    runners_up: tuple[RunnerUp, ...]
    options: tuple[Option, ...]
    schedules: tuple[Scheduled, ...]
    run: Run | None
    constants: tuple[Constant, ...]
    against: Against | None = None
    terms: tuple[Term, ...] = ()
    notes: tuple[str, ...] = ()
    stack: str | None = None
    critical_batch: CriticalBatch | None = None
    recompute: tuple[LayerRecompute, ...] = ()

    def shown(self) -> Shown:
        """The explanation as text and picture, as a notebook displays it."""
        from shardwise.planning.picture import shown_explanation

        return shown_explanation(self)

    def __repr__(self) -> str:
        verdict = "fits" if self.fit.fits else "does not fit"
        return (
            f"Explanation: {self.model} on {self.cluster}, {self.layout}\n  {verdict}: {self.fit.because}\n  "
            f"{self.batch.because}\n  bound by {self.throughput.bound}: {format_seconds(self.throughput.step_time_s)} a step"
        )


def explain(
    plan: Plan, nearest: Nearest, *, other: Layout | None = None, filled: str = "", term_name: str | None = None,
    doubled: Doublings = lambda plan: (),
) -> Explanation:  # fmt: skip
    """Explain a plan, against another layout whose choices in `filled` a search made. `nearest` gives the fitting layout that is
    closest to one that does not fit, or None; `doubled` plans a plan to a loss again with twice the batch, the devices or both.

    The plan and its runners-up are priced again, so that all numbers come from the same version of the model.
    """
    priced = reprice(plan)
    other = other and as_run(stack_of(plan.cluster), other)
    terms = _terms(priced, other, term_name) if term_name else ()  # first: its name may be wrong
    change = None if priced.estimate.fits else smallest_change(priced, priced.layout, nearest)
    return Explanation(
        model=plan.model.name, cluster=plan.cluster.name, layout=str(plan.layout),
        placement=str(plan.layout.placement or default_placement(plan.cluster.topology)), model_error=MODEL_ERROR,
        fit=fit(priced, change), batch=batch(priced), throughput=throughput(priced), runners_up=runners_up(priced),
        options=options(priced), schedules=schedules(priced), run=priced.run, constants=constants(priced),
        against=against(priced, other, nearest, filled) if other else None,
        terms=terms, notes=(*_moved(plan, priced), *priced.estimate.notes),
        stack=plan.cluster.calibration.stack if plan.cluster.calibration else None,
        critical_batch=critical_batch(priced, plan.to_loss, doubled(priced)) if plan.to_loss and not term_name else None,
        recompute=layers_recomputed(Pricing(plan.model, plan.cluster, plan.job, plan.layout)),
    )  # fmt: skip


def reprice(plan: Plan) -> Plan:
    """The plan with its estimates and its run computed again. Raises `InputError` for a layout that is not legal."""

    def again(layout: Layout) -> Any:
        return estimate(plan.model, plan.cluster, plan.job, layout)

    others = tuple(replace(other, estimate=again(other.layout)) for other in plan.alternatives)
    mine = again(plan.layout)
    run = training_run(plan.model, plan.cluster, plan.job, mine, plan.run.reliability if plan.run else None)
    return replace(plan, estimate=mine, alternatives=others, run=run)


def _moved(plan: Plan, priced: Plan) -> tuple[str, ...]:
    """A note that the file's numbers are not this version's, if so."""
    pairs: Mapping[str, tuple[float, float]] = {
        "step_time_s": (plan.estimate.step_time_s, priced.estimate.step_time_s),
        "memory_bytes": (plan.estimate.memory_bytes, priced.estimate.memory_bytes),
    }
    return tuple(
        f"the plan file says {name} = {old:g}; this version makes it {new:g}, and explains that"
        for name, (old, new) in pairs.items()
        if not abs(old - new) <= 1e-6 * new
    )


def _terms(plan: Plan, other: Layout | None, name: str) -> tuple[Term, ...]:
    """The term of the plan's layout, and of the other one."""
    pairs = [(plan.layout, plan.estimate)] + ([best_placed(plan, other)] if other else [])
    return tuple(term(plan, layout, priced, name) for layout, priced in pairs)
