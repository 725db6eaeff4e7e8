"""Charts of batch-size experiments: tradeoff of steps and tokens, branched runs, gradient noise scale over a run."""

from __future__ import annotations

import math

from shardwise.batch_size import BatchTradeoff, BranchPoint
from shardwise.batch_size.batch_sweep_fit import TradeoffFit
from shardwise.batch_size.branch_losses import ComparedBranches
from shardwise.batch_size.noise_estimators import MeasuredNoise
from shardwise.batch_size.run_noise import RunNoise
from shardwise.present.charts.chart import Axis, Band, Chart, Curve, Points, RuleLine
from shardwise.present.charts.common_charts import curve_chart
from shardwise.values import InputError, format_count

NUM_POINTS = 65  # of the curve
BEYOND = 2.0  # how far the curve goes beyond the runs, and at least beyond the critical batch, as a factor


def pareto_chart(found: TradeoffFit) -> Chart:
    """Steps against tokens on logarithmic axes: the fitted law, the runs by seed, and the knee (2·S_min, 2·E_min)."""
    law, seeds = found.tradeoff, sorted({one.run.seed for one in found.runs})
    low, high = min(found.batches[0], law.critical_batch_tokens), max(found.batches[-1], law.critical_batch_tokens)
    runs = (
        Points(
            label=f"seed {seed}" if len(seeds) > 1 else "runs",
            points=tuple(
                (one.run.steps, one.run.tokens)
                for one in found.runs
                if one.run.seed == seed and one.run.steps is not None and one.run.tokens is not None
            ),
        )
        for seed in seeds
    )
    loss = "the loss" if found.target_loss is None else f"a loss of {found.target_loss:g}"
    front = tuple(_curve(law, low / BEYOND, high * BEYOND))
    return curve_chart(
        title=f"Steps and tokens to {loss}, by the size of the batch", subtitle=_said(found),
        x=Axis(title="steps S", log=True), y=Axis(title="tokens E", log=True),
        marks=(
            Curve(label="(S/S_min - 1)(E/E_min - 1) = 1", points=front, reference=True), *runs,
            Points(label="knee", letter="A", points=((2 * law.min_steps, 2 * law.min_tokens),)),
            RuleLine(label="S_min", at=law.min_steps),
        ),
    )  # fmt: skip


def _said(found: TradeoffFit) -> str:
    law, (low, high) = found.tradeoff, found.critical_batch_interval90
    beyond = "" if found.within else ", beyond the batches that were run"
    return (
        f"Critical batch {format_count(law.critical_batch_tokens)} tokens, 90% interval {format_count(low)} to "
        f"{format_count(high)}{beyond}; residuals of {found.rms_residual:.1%}."
    )


def _curve(law: BatchTradeoff, low: float, high: float) -> tuple[tuple[float, float], ...]:
    """The law from a batch to another, in equal steps of its logarithm."""
    batches = [low * (high / low) ** (i / (NUM_POINTS - 1)) for i in range(NUM_POINTS)]
    return tuple((law.steps(batch), law.tokens(batch)) for batch in batches)


def branches_chart(point: BranchPoint, found: ComparedBranches) -> Chart:
    """Nats above the lowest loss of all branches, by batch; and what a batch may be above the best of smaller ones."""
    lowest = min(loss for _, loss in _losses(found))
    losses = tuple((batch, loss - lowest) for batch, loss in _losses(found))
    limits = tuple(
        (one.branch.batch_tokens, above - one.excess + found.tolerance)
        for one, (_, above) in zip(found.compared[1:], losses[1:], strict=True)
    )
    return curve_chart(
        title=f"Branches of step {point.step:,}, by the size of the batch", subtitle=said_of_branches(found),
        x=Axis(title="batch, tokens", log=True), y=Axis(title="nats above the lowest loss"),
        marks=(
            Curve(label="loss after the window", points=losses),
            Curve(label=f"best of smaller batches + {found.tolerance:g}", points=limits, reference=True),
            RuleLine(label="critical batch", at=found.critical_batch_tokens),
        ),
    )  # fmt: skip


def said_of_branches(found: ComparedBranches) -> str:
    """The critical batch in words: "critical batch 4.1K tokens; 8.19K are over the tolerance"."""
    more = found.next_tokens
    beyond = "no larger one was tried" if more is None else f"{format_count(more)} are over the tolerance"
    return f"critical batch {format_count(found.critical_batch_tokens)} tokens; {beyond}"


def _losses(found: ComparedBranches) -> list[tuple[float, float]]:
    return [(one.branch.batch_tokens, one.branch.loss) for one in found.compared if one.branch.loss is not None]


def run_noise_chart(found: RunNoise) -> Chart:
    """The noise scale over the tokens seen, with its interval, beside the batch. Raises `InputError` where no part has one."""
    parts = [one for one in found.parts if 0 < one.measured.tokens < math.inf]
    if not parts:
        raise InputError(
            f"{found.path}: no part of the run has a noise scale to draw; more measured steps are required"
        )
    bounded = [one for one in parts if one.measured.low > 0 and one.measured.high < math.inf]
    ends = (parts[0].seen_tokens, parts[-1].seen_tokens)
    band = Band(
        label="90% interval", edges=tuple((one.seen_tokens, one.measured.low, one.measured.high) for one in bounded)
    )
    return curve_chart(
        title="Gradient noise scale of a run", subtitle=f"{found.path.name}: {said(found.late)} over the last half",
        x=Axis(title="tokens seen"), y=Axis(title="tokens", log=True),
        marks=(
            Curve(label="noise scale", points=tuple((one.seen_tokens, one.measured.tokens) for one in parts)),
            Curve(label="batch", points=tuple((end, found.batch_tokens) for end in ends), reference=True),
            *([band] if len(bounded) > 1 else []),
        ),
    )  # fmt: skip


def said(found: MeasuredNoise) -> str:
    """A noise scale in words: "11.2K tokens, 90% interval 9.1K to 14K"."""
    high = "above" if found.high == math.inf else f"to {format_count(found.high)}"
    ends = f"{format_count(found.low)} {'and ' if found.high == math.inf else ''}{high}"
    tokens = "not told apart from infinity" if found.tokens == math.inf else f"{format_count(found.tokens)} tokens"
    return f"{tokens}, 90% interval {ends}"
