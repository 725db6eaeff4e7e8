"""The losses of branches against their batches, with the tolerance, and the critical batch."""

from __future__ import annotations

from shardwise.batch_size import BranchPoint
from shardwise.batch_size.branch_losses import ComparedBranches
from shardwise.present.draw.axis import Axis
from shardwise.present.draw.line_chart import Line, LineChart, Marker
from shardwise.values import format_count


def branches_chart(point: BranchPoint, found: ComparedBranches) -> LineChart:
    """Nats above the lowest loss of all branches, by batch; and what a batch may be above the best of smaller ones."""
    lowest = min(loss for _, loss in _losses(found))
    losses = tuple((batch, loss - lowest) for batch, loss in _losses(found))
    limits = tuple(
        (one.branch.batch_tokens, above - one.excess + found.tolerance)
        for one, (_, above) in zip(found.compared[1:], losses[1:], strict=True)
    )
    return LineChart(
        title=f"Branches of step {point.step:,}, by the size of the batch", subtitle=said_of_branches(found),
        x=Axis(title="batch, tokens"), y=Axis(title="nats above the lowest loss", linear=True),
        lines=(
            Line(label="loss after the window", points=losses),
            Line(label=f"best of smaller batches + {found.tolerance:g}", points=limits, reference=True),
        ),
        markers=(Marker(label="critical batch", x=found.critical_batch_tokens),),
    )  # fmt: skip


def said_of_branches(found: ComparedBranches) -> str:
    """The critical batch in words: "critical batch 4.1K tokens; 8.19K are over the tolerance"."""
    more = found.next_tokens
    beyond = "no larger one was tried" if more is None else f"{format_count(more)} are over the tolerance"
    return f"critical batch {format_count(found.critical_batch_tokens)} tokens; {beyond}"


def _losses(found: ComparedBranches) -> list[tuple[float, float]]:
    return [(one.branch.batch_tokens, one.branch.loss) for one in found.compared if one.branch.loss is not None]
