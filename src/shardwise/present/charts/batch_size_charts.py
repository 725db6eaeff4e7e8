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


def pareto_chart(fit: TradeoffFit) -> Chart:
    """Return steps against tokens on logarithmic axes: the fitted law, the runs by seed, and the knee (2·S_min, 2·E_min)."""
    law, seeds = fit.tradeoff, sorted({fitted.run.seed for fitted in fit.runs})
    low, high = min(fit.batches[0], law.critical_batch_tokens), max(fit.batches[-1], law.critical_batch_tokens)
    runs = (
        Points(
            label=f"seed {seed}" if len(seeds) > 1 else "runs",
            points=tuple(
                (fitted.run.steps, fitted.run.tokens)
                for fitted in fit.runs
                if fitted.run.seed == seed and fitted.run.steps is not None and fitted.run.tokens is not None
            ),
        )
        for seed in seeds
    )
    loss = "the loss" if fit.target_loss is None else f"a loss of {fit.target_loss:g}"
    front = tuple(_curve(law, low / BEYOND, high * BEYOND))
    return curve_chart(
        title=f"Steps and tokens to {loss}, by the size of the batch", subtitle=_pareto_subtitle(fit),
        x=Axis(title="steps S", log=True), y=Axis(title="tokens E", log=True),
        marks=(
            Curve(label="(S/S_min - 1)(E/E_min - 1) = 1", points=front, reference=True), *runs,
            Points(label="knee", letter="A", points=((2 * law.min_steps, 2 * law.min_tokens),)),
            RuleLine(label="S_min", at=law.min_steps),
        ),
    )  # fmt: skip


def _pareto_subtitle(fit: TradeoffFit) -> str:
    law, (low, high) = fit.tradeoff, fit.critical_batch_interval90
    beyond = "" if fit.within else ", beyond the batches that were run"
    return (
        f"Critical batch {format_count(law.critical_batch_tokens)} tokens, 90% interval {format_count(low)} to "
        f"{format_count(high)}{beyond}; residuals of {fit.rms_residual:.1%}."
    )


def _curve(law: BatchTradeoff, low: float, high: float) -> tuple[tuple[float, float], ...]:
    """Return steps and tokens of the law at batches from `low` to `high`, in equal steps of their logarithm."""
    batches = [low * (high / low) ** (i / (NUM_POINTS - 1)) for i in range(NUM_POINTS)]
    return tuple((law.steps(batch), law.tokens(batch)) for batch in batches)


def branches_chart(point: BranchPoint, comparison: ComparedBranches) -> Chart:
    """Return a chart of nats above the lowest loss of all branches by batch, with the limit that smaller batches set."""
    lowest = min(loss for _, loss in _losses(comparison))
    losses = tuple((batch, loss - lowest) for batch, loss in _losses(comparison))
    limits = tuple(
        (compared.branch.batch_tokens, above - compared.excess + comparison.tolerance)
        for compared, (_, above) in zip(comparison.compared[1:], losses[1:], strict=True)
    )
    return curve_chart(
        title=f"Branches of step {point.step:,}, by the size of the batch", subtitle=describe_branches(comparison),
        x=Axis(title="batch, tokens", log=True), y=Axis(title="nats above the lowest loss"),
        marks=(
            Curve(label="loss after the window", points=losses),
            Curve(label=f"best of smaller batches + {comparison.tolerance:g}", points=limits, reference=True),
            RuleLine(label="critical batch", at=comparison.critical_batch_tokens),
        ),
    )  # fmt: skip


def describe_branches(comparison: ComparedBranches) -> str:
    """Return the critical batch in words: "critical batch 4.1K tokens; 8.19K are over the tolerance"."""
    next_tokens = comparison.next_tokens
    beyond = "no larger one was tried" if next_tokens is None else f"{format_count(next_tokens)} are over the tolerance"
    return f"critical batch {format_count(comparison.critical_batch_tokens)} tokens; {beyond}"


def _losses(comparison: ComparedBranches) -> list[tuple[float, float]]:
    return [
        (compared.branch.batch_tokens, compared.branch.loss)
        for compared in comparison.compared
        if compared.branch.loss is not None
    ]


def run_noise_chart(run_noise: RunNoise) -> Chart:
    """Return the noise scale over the tokens seen, with its interval and the batch. Raises `InputError` where no part has one."""
    parts = [part for part in run_noise.parts if 0 < part.measured.tokens < math.inf]
    if not parts:
        raise InputError(
            f"{run_noise.path}: no part of the run has a noise scale to draw; more measured steps are required"
        )
    bounded = [part for part in parts if part.measured.low > 0 and part.measured.high < math.inf]
    ends = (parts[0].seen_tokens, parts[-1].seen_tokens)
    band = Band(
        label="90% interval", edges=tuple((part.seen_tokens, part.measured.low, part.measured.high) for part in bounded)
    )
    return curve_chart(
        title="Gradient noise scale of a run",
        subtitle=f"{run_noise.path.name}: {describe_noise(run_noise.late)} over the last half",
        x=Axis(title="tokens seen"), y=Axis(title="tokens", log=True),
        marks=(
            Curve(label="noise scale", points=tuple((part.seen_tokens, part.measured.tokens) for part in parts)),
            Curve(label="batch", points=tuple((end, run_noise.batch_tokens) for end in ends), reference=True),
            *([band] if len(bounded) > 1 else []),
        ),
    )  # fmt: skip


def describe_noise(noise: MeasuredNoise) -> str:
    """Return a noise scale in words: "11.2K tokens, 90% interval 9.1K to 14K"."""
    high = "above" if noise.high == math.inf else f"to {format_count(noise.high)}"
    ends = f"{format_count(noise.low)} {'and ' if noise.high == math.inf else ''}{high}"
    tokens = "not told apart from infinity" if noise.tokens == math.inf else f"{format_count(noise.tokens)} tokens"
    return f"{tokens}, 90% interval {ends}"
