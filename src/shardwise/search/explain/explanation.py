"""The explanation of a plan as one value: memory, batch, throughput, layouts that lost, single terms, and the critical batch.

Entry point: `explain_plan`, which prices the plan and its runners-up again, so that all numbers come from one version."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated

from shardwise.batch_size import LossTarget
from shardwise.layout import Layout, default_placement, layout_as_run, stack_of
from shardwise.price import Estimate, Pricing, Run
from shardwise.price.estimate import estimate
from shardwise.price.estimate_terms import DerivedExpression
from shardwise.price.layout_pricer import TERM_NAMES
from shardwise.price.term_inputs import TermInput
from shardwise.price.training_run import training_run
from shardwise.search.explain.constant_sensitivity import ConstantSensitivity, rank_constants
from shardwise.search.explain.neighbour_layouts import place_fastest
from shardwise.search.explain.other_layouts import (
    FindNearest,
    LayoutComparison,
    RejectedLayout,
    ScheduleOption,
    compare_layout,
    compare_plan_schedules,
    describe_smallest_change,
    judge_options,
)
from shardwise.search.explain.playbook_steps import (
    BatchBreakdown,
    MemoryFit,
    RunnerUp,
    StepThroughput,
    explain_batch,
    explain_fit,
    explain_throughput,
    list_runners_up,
)
from shardwise.search.loss_time import Doubling, LossTime, time_to_loss
from shardwise.search.plan import BatchAdvice, Plan, PublishedComparison, advise_batch
from shardwise.search.recompute_budget import LayerRecompute, list_layer_recompute
from shardwise.search.verdicts import MODEL_ERROR
from shardwise.values import (
    Displayable,
    Hidden,
    InputError,
    Payload,
    argument_label,
    describe_unknown,
    format_count,
    format_seconds,
)

PlanDoublings = Callable[[Plan], tuple[Doubling, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation(Displayable, Payload):
    """Explanation of a plan, in the order of its decisions: memory, batch, throughput, and the layouts that lost.

    `against` compares another layout, `terms` take single terms apart, `constants` are the measured values that the plan is most
    sensitive to, `recompute` is what layers keep for the backward pass and compute again; `model_error` is the error of
    predictions on held-out runs, as a share of the step. `critical_batch` is of plans with a noise scale. `batch_advice` is of a
    batch that is too small for the devices, `published` compares published runs. `plan` is the plan.

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
    fit: MemoryFit
    batch: BatchBreakdown
    throughput: StepThroughput
    runners_up: tuple[RunnerUp, ...]
    options: tuple[RejectedLayout, ...]
    schedules: tuple[ScheduleOption, ...]
    run: Run | None
    constants: tuple[ConstantSensitivity, ...]
    against: LayoutComparison | None = None
    terms: tuple[LayoutTerm, ...] = ()
    notes: tuple[str, ...] = ()
    stack: str | None = None
    critical_batch: CriticalBatch | None = None
    recompute: tuple[LayerRecompute, ...] = ()
    batch_advice: BatchAdvice | None = None
    published: PublishedComparison | None = None
    plan: Annotated[Plan, Hidden]

    def __repr__(self) -> str:
        return (
            f"Explanation: {self.model} on {self.cluster}, {self.layout}\n  {self.fit.verdict}: {self.fit.because}\n  "
            f"{self.batch.because}\n  bound by {self.throughput.bound}: {format_seconds(self.throughput.step_time_s)} a step"
        )


def explain_plan(
    plan: Plan, find_nearest: FindNearest, *, other_layout: Layout | None = None, filled: str = "", term_name: str | None = None,
    plan_doublings: PlanDoublings = lambda plan: (), published: PublishedComparison | None = None,
) -> Explanation:  # fmt: skip
    """Explain a plan, optionally compared with another layout (`other_layout`), of which a search filled the fields in `filled`.

    The plan and its runners-up are priced again, so that all numbers come from the same version of the model. `find_nearest`
    returns the nearest layout that fits, or None. `term_name` takes one term apart. `plan_doublings` plans a plan to a loss again
    with twice the batch, the devices or both. `published` are the nearest published runs (`compare_published_runs`)."""
    repriced = reprice_plan(plan)
    other_layout = other_layout and layout_as_run(stack_of(plan.cluster), other_layout)
    terms = _explain_terms(repriced, other_layout, term_name) if term_name else ()  # first: its name may be wrong
    change = None if repriced.estimate.fits else describe_smallest_change(repriced, repriced.layout, find_nearest)
    return Explanation(
        model=plan.model.name, cluster=plan.cluster.name, layout=str(plan.layout),
        placement=str(plan.layout.placement or default_placement(plan.cluster.topology)), model_error=MODEL_ERROR,
        fit=explain_fit(repriced, change), batch=explain_batch(repriced), throughput=explain_throughput(repriced),
        runners_up=list_runners_up(repriced), options=judge_options(repriced), schedules=compare_plan_schedules(repriced),
        run=repriced.run, constants=rank_constants(repriced),
        against=compare_layout(repriced, other_layout, find_nearest, filled) if other_layout else None,
        terms=terms, notes=(*_repricing_notes(plan, repriced), *repriced.estimate.notes),
        stack=plan.cluster.calibration.stack if plan.cluster.calibration else None,
        critical_batch=(
            locate_critical_batch(repriced, plan.to_loss, plan_doublings(repriced)) if plan.to_loss and not term_name else None
        ),
        recompute=list_layer_recompute(Pricing(plan.problem, plan.layout)), plan=plan,
        batch_advice=advise_batch(repriced), published=published,
    )  # fmt: skip


def reprice_plan(plan: Plan) -> Plan:
    """Return the plan with its estimates and its run computed again. Raises `InputError` for a layout that is not legal."""

    def price(layout: Layout) -> Estimate:
        return estimate(plan.problem, layout)

    alternatives = tuple(replace(alternative, estimate=price(alternative.layout)) for alternative in plan.alternatives)
    plan_estimate = price(plan.layout)
    run = training_run(plan.model, plan.cluster, plan.job, plan_estimate, plan.run.reliability if plan.run else None)
    return replace(plan, estimate=plan_estimate, alternatives=alternatives, run=run)


def _repricing_notes(plan: Plan, repriced: Plan) -> tuple[str, ...]:
    """Note each number of the plan file that differs from this version's."""
    pairs: Mapping[str, tuple[float, float]] = {
        "step_time_s": (plan.estimate.step_time_s, repriced.estimate.step_time_s),
        "memory_bytes": (plan.estimate.memory_bytes, repriced.estimate.memory_bytes),
    }
    return tuple(
        f"the plan file says {name} = {old:g}; this version makes it {new:g}, and explains that"
        for name, (old, new) in pairs.items()
        if not abs(old - new) <= 1e-6 * new
    )


def _explain_terms(plan: Plan, other_layout: Layout | None, name: str) -> tuple[LayoutTerm, ...]:
    """Explain the term for the plan's layout, and for the other one if given."""
    pairs = [(plan.layout, plan.estimate)] + ([place_fastest(plan, other_layout)] if other_layout else [])
    return tuple(explain_term(plan, layout, priced, name) for layout, priced in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutTerm:
    """One term of one layout. `unit` is "s" or "B"; `hidden_s` is communication of the term that compute hides. `inputs` are
    the symbols of `derived`, the counts that formulas multiply these by, and the numbers from which the term's rule computed
    `value`."""

    name: str
    layout: str
    value: float
    unit: str
    share: float
    hidden_s: float
    words: str
    formula: str
    source: str
    inputs: tuple[TermInput, ...]
    derived: tuple[DerivedExpression, ...]


def explain_term(plan: Plan, layout: Layout, priced: Estimate, name: str) -> LayoutTerm:
    """Take one term apart, such as memory.activations or time.tp. Raises `InputError` that lists the names of the terms."""
    if name not in TERM_NAMES:
        raise InputError(f"{argument_label('term')}: {describe_unknown(name, TERM_NAMES)}")
    tree, _, term = name.partition(".")
    terms, hidden = (priced.time, priced.hidden) if tree == "time" else (priced.memory, {})
    pricing = Pricing(plan.problem, layout)
    layout_term = pricing.term(name)
    symbols = {term_input.symbol: term_input for term_input in (*layout_term.symbols, *pricing.pipeline_inputs)}
    return LayoutTerm(
        name=name, layout=str(layout), value=terms[term], unit=layout_term.unit, share=terms[term] / sum(terms.values()),
        hidden_s=hidden.get(term, 0.0), words=layout_term.words, formula=layout_term.formula, source=layout_term.source,
        inputs=(
            *(symbols[key] for key in sorted(symbols)),
            *(term_input for term_input in layout_term.inputs if term_input.symbol not in symbols),
        ),
        derived=layout_term.derived,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticalBatch:
    """The target of a plan, its times to it, its side of the critical batch in words, and the next doublings."""

    target: LossTarget
    time: LossTime
    because: str
    doublings: tuple[Doubling, ...]


def locate_critical_batch(plan: Plan, target: LossTarget, doublings: tuple[Doubling, ...]) -> CriticalBatch:
    """Locate a plan relative to its critical batch; `doublings` are its plans with twice the batch, the devices or both."""
    time = time_to_loss(plan, target)
    return CriticalBatch(target=target, time=time, because=critical_batch_text(time, target), doublings=doublings)


def critical_batch_text(time: LossTime, target: LossTarget) -> str:
    """Describe the side of the critical batch, how many more steps and tokens than the fewest, and what twice the batch would
    do."""
    tradeoff, batch = target.tradeoff, time.batch_tokens
    steps, tokens = (
        tradeoff.steps(2 * batch) / tradeoff.steps(batch),
        tradeoff.tokens(2 * batch) / tradeoff.tokens(batch),
    )
    return (
        f"{batch:,} tokens are {time.batch_over_noise:.2g} times the critical batch of {format_count(target.noise.tokens)}, "
        f"{time.side} it: {time.steps_ratio:.3g} times the fewest steps, {time.tokens_ratio:.3g} times the fewest tokens; twice "
        f"the batch would take {steps:.0%} of these steps and {tokens:.0%} of these tokens"
    )
