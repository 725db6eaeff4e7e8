"""`shardwise plan --noise-scale`: batch and devices that reach a loss the soonest, or for the fewest dollars."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from shardwise.model import DEFAULT_SEQ_LEN
from shardwise.present.cli.arguments import resolve_reliability, resolve_several
from shardwise.present.cli.html import write_plan_report
from shardwise.present.cli.pictures import write_picture
from shardwise.present.rendering.report import Report, Section
from shardwise.values import InputError, Parser, raise_problems, run_all
from shardwise.values.errors import MissedLimitError

if TYPE_CHECKING:
    from shardwise.batch_size import LossTarget
    from shardwise.hardware import Cluster
    from shardwise.layout import Choices
    from shardwise.model import Architecture, Job
    from shardwise.price import Limits
    from shardwise.search import LossSearch

GOALS = ("time", "usd")
OF_GIVEN_BATCHES = ("sweep", "csv", "export", "batch_schedule")  # flags that have no meaning where the batch is chosen


def add_to_loss_arguments(parser: Parser) -> None:
    """The flags of plans to a loss."""
    search = parser.group("search")
    search.add_argument(
        "--noise-scale", metavar="N|RUN",
        help="choose batch and devices by the time to the loss, with this noise scale of the gradient in tokens, such as 1.2Mi, "
        "or the one that a run measured (its folder); --batch-tokens may be several then (1Mi,2Mi or 512Ki:8Mi:x2) or left out, "
        "and --tokens are those to the loss with the smallest of them, or without them the fewest",
    )  # fmt: skip
    search.add_argument(
        "--to-loss", metavar="NATS",
        help="the loss, in nats per token; without --noise-scale it stands for the noise scale of a published law",
    )  # fmt: skip
    search.add_argument(
        "--minimise", choices=GOALS, metavar="GOAL",
        help="to the loss: time, or usd (default: time; with a deadline usd)",
    )  # fmt: skip


def is_to_loss(arguments: argparse.Namespace) -> bool:
    """Whether batch and devices are chosen by what they take to a loss."""
    return arguments.noise_scale is not None or arguments.to_loss is not None


def require_sizes(arguments: argparse.Namespace) -> None:
    """Raise `InputError` where a plan of one batch lacks it, or has flags of plans to a loss."""
    sizes = {"--batch-tokens": arguments.batch_tokens, "--seq-len": arguments.seq_len}
    missing = [flag for flag, value in sizes.items() if value is None]
    problems = []
    if missing:
        problems.append(
            f"{', '.join(missing)}: missing; such as --batch-tokens 1Mi --seq-len 8Ki, or --noise-scale to choose the batch by, "
            "are required"
        )
    if arguments.minimise is not None:
        problems.append(
            "--minimise: found it without --noise-scale; it is of plans to a loss, so one of the two is required"
        )
    raise_problems(problems)


def run_to_loss(arguments: argparse.Namespace, choices: Choices | None, limits: Limits) -> str | Report:
    """The search, as a report or as JSON, and its files. Raises `MissedLimitError` where nothing meets the limits."""
    from shardwise.present.charts.sweep_charts import search_chart
    from shardwise.present.reports.sweep import to_loss_report
    from shardwise.search import dump_plan
    from shardwise.search.payloads import to_loss_payload
    from shardwise.values import require_writable

    _require_alone(arguments)
    target, batches, (model, clusters, job) = _asked(arguments)
    for path in filter(None, (arguments.out, arguments.draw, arguments.report)):
        require_writable(path)
    found = _searched(arguments, target, batches, (model, clusters, job), choices, limits)
    if found.plan is None:
        raise MissedLimitError(*_missed(found))
    if arguments.out:
        dump_plan(found.plan, arguments.out)
    if arguments.draw:
        from shardwise.present.charts.draw_chart import draw_chart

        write_picture("--draw", arguments.draw, draw_chart(search_chart(found)))
    write_plan_report(arguments.report, found.plan)
    doubled = _doublings(found, choices, arguments)
    if arguments.json:
        return json.dumps(to_loss_payload(found, doubled), indent=2)
    return [*to_loss_report(found, doubled), Section([_next(arguments.out)])]


def _next(file: str | None) -> str:
    return f"next{'' if file else ', with --out plan.json'}: shardwise explain {file or 'plan.json'}"


def _searched(
    arguments: argparse.Namespace, target: LossTarget, batches: tuple[int, ...],
    asked: tuple[Architecture, tuple[Cluster, ...], Job], choices: Choices | None, limits: Limits,
) -> LossSearch:  # fmt: skip
    from shardwise.layout import job_for_engine
    from shardwise.price import Problem
    from shardwise.search.plan_to_target_loss import LossQuestion, plan_to_loss

    model, clusters, job = asked
    job = job_for_engine(job) if arguments.runnable else job
    return plan_to_loss(
        [Problem(model, cluster, job) for cluster in clusters],
        LossQuestion(target, batches, limits, arguments.minimise),
        choices=choices, reliability=resolve_reliability(arguments), progress=arguments.progress,
    )  # fmt: skip


def _doublings(found: LossSearch, choices: Choices | None, arguments: argparse.Namespace) -> tuple[Any, ...]:
    from shardwise.search import plan_doublings

    assert found.plan is not None
    return plan_doublings(found.plan, found.target, choices=choices, progress=arguments.progress)


def _require_alone(arguments: argparse.Namespace) -> None:
    """Raise `InputError` for what has no meaning beside a noise scale."""
    given = [f"--{name.replace('_', '-')}" for name in OF_GIVEN_BATCHES if getattr(arguments, name)]
    fixed = [
        text for text in arguments.set if text.partition("=")[0].strip() in ("job.global_batch_tokens", "job.tokens")
    ]
    problems = (
        [f"{', '.join(given)}: found beside --noise-scale or --to-loss; leave out one or the other"] if given else []
    )
    problems += [
        f"--set {text}: found beside --noise-scale or --to-loss; --batch-tokens and --tokens are required"
        for text in fixed
    ]
    raise_problems(problems)


def _asked(
    arguments: argparse.Namespace,
) -> tuple[LossTarget, tuple[int, ...], tuple[Architecture, tuple[Cluster, ...], Job]]:
    """The target, the batches, and model, clusters and job. Raises `InputError` with what is wrong with all."""
    from shardwise.batch_size import LossTarget
    from shardwise.search.plan_to_target_loss import batches_around
    from shardwise.values import parse_count

    seq_len = _seq_len(arguments)
    (noise, loss), given, length = run_all(
        lambda: _noise(arguments), lambda: _batches(arguments), lambda: parse_count(seq_len, label="--seq-len")
    )
    batches = given or batches_around(noise.tokens, length)
    _require_whole(batches, length)
    own = argparse.Namespace(**{**vars(arguments), "seq_len": seq_len, "batch_tokens": arguments.batch_tokens})
    if given is None or len(batches) > 1:
        own.batch_tokens = str(batches[0])
    model, clusters, job = resolve_several(own, arguments.cluster)
    batches = batches if batches[0] else (job.global_batch_tokens,)
    reference = float(min(batches)) if given is not None and job.tokens is not None else None
    return (
        LossTarget(noise=noise, tokens=job.tokens, batch_tokens=reference, loss=loss),
        batches,
        (model, clusters, job),
    )


def _require_whole(batches: Iterable[int], seq_len: int) -> None:
    wrong = [f"{batch:,}" for batch in batches if batch % seq_len]
    if wrong:
        raise InputError(f"--batch-tokens: found {', '.join(wrong)}; multiples of --seq-len {seq_len:,} are required")


def _seq_len(arguments: argparse.Namespace) -> str:
    """What is given; else the usual length, or the model's where that is less."""
    if arguments.seq_len is not None:
        return str(arguments.seq_len)
    from shardwise.model import default_seq_len, load_model

    try:
        return str(default_seq_len(load_model(arguments.model)))
    except InputError:  # which is said with what else is wrong
        return str(DEFAULT_SEQ_LEN)


def _noise(arguments: argparse.Namespace) -> tuple[Any, float | None]:
    """The noise scale, and the loss; a loss alone has the noise scale of the published law."""
    from shardwise.batch_size import parse_noise_scale
    from shardwise.batch_size.noise_scale import published_noise_scale
    from shardwise.values import parse_quantity

    loss = None if arguments.to_loss is None else parse_quantity(arguments.to_loss, label="--to-loss", unit="")
    published = None if loss is None else published_noise_scale(loss, "--to-loss")
    if arguments.noise_scale is None:
        return published, loss
    return parse_noise_scale(arguments.noise_scale, "--noise-scale"), loss


def _batches(arguments: argparse.Namespace) -> tuple[int, ...] | None:
    """The batches that are given; (0,) for one that `resolve_several` reads, None where they are left out."""
    from shardwise.search.sweep_values import parse_sweep

    text = arguments.batch_tokens
    if text is None:
        return None
    if "," not in text and ":" not in text:
        return (0,)
    found = parse_sweep(f"batch={text}", "--batch-tokens")
    return tuple(int(value) for value in found.values)


def _missed(found: LossSearch) -> Iterable[str]:
    """What no point meets, and by how much the nearest misses it."""
    from shardwise.search import describe_missed_limits
    from shardwise.search.loss_time import training_run_to_loss
    from shardwise.values import format_binary

    yield found.reason
    runs = [(point, training_run_to_loss(point.plan, found.target)) for point in found.points if point.plan]
    by_days = found.limits.deadline_s is not None
    point, run = min(runs, key=lambda pair: pair[1].days if by_days else pair[1].chip_hours)
    place = f"{point.cluster} with batches of {format_binary(point.batch_tokens)}"
    yield from (f"the nearest, {place}: {line}" for line in describe_missed_limits(found.limits, run))
