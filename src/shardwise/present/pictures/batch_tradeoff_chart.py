"""The Pareto front of a fit: steps against tokens to a loss, the runs around it, and its knee at the critical batch."""

from __future__ import annotations

from shardwise.batch_size import BatchTradeoff
from shardwise.batch_size.batch_sweep_fit import TradeoffFit
from shardwise.present.draw.axis import Axis
from shardwise.present.draw.line_chart import Cloud, Line, LineChart, Marker, Point
from shardwise.values import format_count

NUM_POINTS = 65  # of the curve
BEYOND = 2.0  # how far the curve goes beyond the runs, and at least beyond the critical batch, as a factor


def pareto_chart(found: TradeoffFit) -> LineChart:
    """Steps against tokens on logarithmic axes: the fitted law, the runs by seed, and the knee (2·S_min, 2·E_min)."""
    law, seeds = found.tradeoff, sorted({one.run.seed for one in found.runs})
    low, high = min(found.batches[0], law.critical_batch_tokens), max(found.batches[-1], law.critical_batch_tokens)
    clouds = [
        Cloud(
            label=f"seed {seed}" if len(seeds) > 1 else "runs",
            points=tuple(
                (one.run.steps, one.run.tokens)
                for one in found.runs
                if one.run.seed == seed and one.run.steps is not None and one.run.tokens is not None
            ),
        )
        for seed in seeds
    ]
    loss = "the loss" if found.target_loss is None else f"a loss of {found.target_loss:g}"
    front = tuple(_curve(law, low / BEYOND, high * BEYOND))
    return LineChart(
        title=f"Steps and tokens to {loss}, by the size of the batch", subtitle=_said(found),
        x=Axis(title="steps S"), y=Axis(title="tokens E"),
        lines=(Line(label="(S/S_min - 1)(E/E_min - 1) = 1", points=front, reference=True),),
        clouds=tuple(clouds), points=(Point(label="knee", x=2 * law.min_steps, y=2 * law.min_tokens),),
        markers=(Marker(label="S_min", x=law.min_steps),),
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
