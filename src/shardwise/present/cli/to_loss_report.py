"""Plans to a loss, as sections: the best batch of each cluster, what doubling gains, and how sure the choice is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from shardwise.batch_size import LossTarget, NoiseScale
from shardwise.present.cli.section import Block, Marked, Report, Row, Section, Table
from shardwise.present.cli.summary import summary
from shardwise.search import LossSearch
from shardwise.search.explain.explanation import critical_batch_text
from shardwise.search.loss_time import Doubling, LossPoint, LossTime, NoiseSensitivity
from shardwise.values import format_binary, format_count, format_seconds, format_usd

ABSENT = "-"
HEAD = ("batch", "of B_crit", "step", "MFU", "token time", "tokens to loss", "loss time", "chip-hours", "cost")


def to_loss_report(found: LossSearch, doublings: Sequence[Doubling]) -> Report:
    """The best batch of each cluster, the choice with its side of the critical batch, doublings, how sure it is, the plan."""
    assert found.chosen is not None
    assert found.plan is not None
    mark = found.points[found.chosen]
    assert mark.time is not None
    place = f"{mark.cluster} with batches of {format_binary(mark.batch_tokens)} tokens"
    return [
        Section(list(_head(found)), title=_title(found)),
        Section([_points(found.best, mark)], title="the best batch of each cluster"),
        Section([f"chosen: {place}, {found.reason}", f"  {critical_batch_text(mark.time, found.target)}"]),
        Section(list(_diagonal(found))),
        Section([doublings_table(doublings)], title="the next doubling of the chosen plan"),
        Section(list(_sensitivity(found))),
        Section([_points(found.points, mark)], title="every batch on every cluster", name="every batch", detail=True),
        Section(list(_problems(found))),
        summary(found.plan),
    ]


def _title(found: LossSearch) -> str:
    job = next(point.plan.job for point in found.points if point.plan)
    model = next(point.plan.model.name for point in found.points if point.plan)
    loss = "the loss" if found.target.loss is None else f"a loss of {found.target.loss:g}"
    return f"{model} to {loss}: {len(found.points)} pairs of cluster and batch, sequences of {job.seq_len:,}, {job.precision}"


def _head(found: LossSearch) -> Iterator[Block]:
    yield f"  {noise_text(found.target.noise)}"
    yield f"  {tokens_text(found.target)}"
    yield "  token time: of those tokens whatever the loss; loss time: to the loss, with the tokens that each batch takes to it"
    if "published law" in found.target.noise.source:
        law = "the noise scale is that of another data set, and may be off by several times: measure it with a run of your own"
        yield Marked(f"  note: {law}", "note")


def noise_text(noise: NoiseScale) -> str:
    """The noise scale with its interval and source, in a line."""
    around = (
        f", 90% interval {format_count(noise.interval90[0])} to {format_count(noise.interval90[1])}"
        if noise.interval90
        else ""
    )
    return f"noise scale {format_count(noise.tokens)} tokens{around}: {noise.source}; taken to stay as it is during the run"


def tokens_text(target: LossTarget) -> str:
    """What times and dollars are of, in a line."""
    if target.tokens is None:
        return "times and dollars are of a billion of the fewest tokens, E_min: with --tokens they are of the whole run"
    batch = "the fewest" if target.batch_tokens is None else f"with batches of {format_count(target.batch_tokens)}"
    return f"{format_count(target.tokens)} tokens to the loss, {batch}"


def _points(points: Iterable[LossPoint], mark: LossPoint) -> Table:
    rows: list[Row] = [("  cluster", *HEAD)]
    for point in points:
        rows.append((("* " if point is mark else "  ") + point.cluster, *_cells(point)))
    return Table(rows=tuple(rows), right=range(1, len(HEAD) + 1))


def _cells(point: LossPoint) -> Sequence[str]:
    if point.plan is None or point.time is None:
        return (format_binary(point.batch_tokens), ABSENT, "no plan", *[ABSENT] * (len(HEAD) - 3))
    time = point.time
    return (
        format_binary(point.batch_tokens), f"{time.batch_over_noise:.2g}", format_seconds(time.step_time_s),
        f"{point.plan.estimate.mfu:.1%}", format_seconds(time.token_s), format_count(time.tokens),
        format_seconds(time.loss_s), format_count(time.chip_hours), _usd(time),
    )  # fmt: skip


def _usd(time: LossTime) -> str:
    return ABSENT if time.usd is None else format_usd(time.usd)


def _diagonal(found: LossSearch) -> Iterator[Block]:
    """Batch and devices doubled together, as far as they were planned: token time halves, loss time does not."""
    points = [(point, point.time) for point in found.diagonal if point.time]
    if len(points) < 2:
        return
    yield "batch and devices together, from one line to the next:"
    rows: list[Row] = [("devices", "batch", "of B_crit", "token time", "", "loss time", "", "chip-hours", "")]
    for (point, time), (_, before) in zip(points, [(None, None), *points], strict=False):
        token, loss, hours = _changes(time, before)
        rows.append(
            (
                f"{point.num_devices:,}", format_binary(point.batch_tokens), f"{time.batch_over_noise:.2g}",
                format_seconds(time.token_s), token, format_seconds(time.loss_s), loss, format_count(time.chip_hours), hours,
            )
        )  # fmt: skip
    yield Table(rows=tuple(rows), right=range(len(rows[0])), indent=2)


def _changes(now: LossTime, before: LossTime | None) -> Sequence[str]:
    """How token time, loss time and chip-hours change from one line to the next."""
    if before is None:
        return "", "", ""
    return tuple(f"×{getattr(now, name) / getattr(before, name):.2f}" for name in ("token_s", "loss_s", "chip_hours"))


def doublings_table(doublings: Sequence[Doubling]) -> Table:
    """What twice the batch, the devices or both does to the times and to the dollars."""
    rows: list[Row] = [("twice the", "cluster", "batch", "token time", "loss time", "dollars")]
    for one in doublings:
        ratios = [
            ABSENT if ratio is None else f"×{ratio:.2f}" for ratio in (one.token_ratio, one.loss_ratio, one.usd_ratio)
        ]
        rows.append((one.doubled, one.cluster, format_binary(one.batch_tokens), *ratios))
    return Table(rows=tuple(rows), right=range(2, len(rows[0])), indent=2)


def _sensitivity(found: LossSearch) -> Iterator[str]:
    """What another noise scale would have chosen."""
    assert found.chosen is not None
    mark = found.points[found.chosen]
    of = "the interval's ends" if found.target.noise.interval90 else "half and twice the noise scale"
    if found.sensitivity:
        yield f"the choice at {of}:"
        yield from (f"  {_other(one, mark, found.goal)}" for one in found.sensitivity)


def _other(one: NoiseSensitivity, mark: LossPoint, goal: str) -> str:
    tokens = format_count(one.noise_tokens)
    if one.cluster is None or one.batch_tokens is None:
        return f"{tokens}: nothing meets the limits"
    if (one.cluster, one.batch_tokens) == (mark.cluster, mark.batch_tokens):
        return f"{tokens}: the same"
    worse = (
        ""
        if one.regret is None
        else f"; the chosen plan takes {one.regret:.0%} more {'time' if goal == 'time' else 'dollars'}"
    )
    return f"{tokens}: {one.cluster} with batches of {format_binary(one.batch_tokens)}{worse}"


def _problems(found: LossSearch) -> Iterator[str]:
    for point in found.points:
        if point.problem:
            yield f"no plan of {point.cluster} with batches of {format_binary(point.batch_tokens)}: {point.problem}"
