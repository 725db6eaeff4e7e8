"""`shardwise plan`: the fastest layout that fits, and why; on several clusters, and within a deadline or a budget."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from shardwise.model import DEFAULT_SEQ_LEN
from shardwise.present.cli.arguments import (
    add_job_arguments,
    add_output_arguments,
    policies,
    resolve_reliability,
    resolve_several,
)
from shardwise.present.cli.html import add_report_argument, write_plan_report
from shardwise.present.cli.schedule_of_batches import add_schedule_argument, with_schedule
from shardwise.present.cli.sweep import add_sweep_arguments, require_no_sweep, run_sweep
from shardwise.present.cli.to_loss import add_to_loss_arguments, is_to_loss, require_sizes, run_to_loss
from shardwise.present.rendering.report import Report, Section
from shardwise.price import Problem
from shardwise.values import InputError, MissingValueError, NothingFitsError, Parser, parse_duration, run_all
from shardwise.values.errors import MissedLimitError
from shardwise.values.units import parse_usd

if TYPE_CHECKING:
    from shardwise.layout import Choices
    from shardwise.price import Limits
    from shardwise.search import Comparison, Plan
    from shardwise.values import Progress

DESCRIPTION = (
    "Search all layouts of a training job on a cluster and choose the fastest that fits. Several clusters are "
    "compared: with a deadline the cheapest that meets it is chosen, otherwise the fastest. "
    "With --sweep a job is planned for each of several values. With --noise-scale the batch is chosen too, and the "
    "number of devices, by the time or the dollars to a loss."
)
EXAMPLES = (
    "shardwise plan llama-3-8b h100:64 --batch-tokens 1Mi --seq-len 8Ki --tokens 1T --out plan.json",
    "shardwise plan llama-3-8b h100:64 tpu-v5p:4x4x4 --batch-tokens 1Mi --seq-len 8Ki --tokens 1T --deadline 60d",
    "shardwise plan llama-3-8b h100:8 --batch-tokens 512Ki --seq-len 8Ki --sweep gpus=8:64:x2 --draw scaling.svg",
    "shardwise plan llama-3-8b h100:64,128,256,512 --noise-scale 1.2Mi",
)

AROUND = "with --noise-scale, doublings around it"  # of the batch that is left out


def configure(parser: Parser) -> None:
    """Declare the arguments."""
    from shardwise.model import POLICY_FORMS

    add_job_arguments(parser, several=True, sizes=(AROUND, f"with --noise-scale, {DEFAULT_SEQ_LEN}"))
    add_schedule_argument(parser.group("job"))
    search, output = parser.groups("search", "output")
    search.add_argument("--deadline", metavar="TIME", help="finish the --tokens within this, such as 30d, 12h or 2w")
    search.add_argument("--budget", metavar="USD", help="spend at most this on the --tokens, such as 2M or 500k")
    search.add_argument(
        "--pin", action="append", default=[], metavar="KEY=VALUE",
        help="search only layouts with this, such as tp=8, offload=optimizer or recompute=full, which is one of "
        f"{', '.join((*policies(), *POLICY_FORMS))}; may be repeated",
    )  # fmt: skip
    search.add_argument(
        "--max", action="append", default=[], metavar="KEY=VALUE",
        help="search only layouts with at most this, such as pp=4; may be repeated",
    )  # fmt: skip
    add_to_loss_arguments(parser)
    search.add_argument(
        "--runnable", action="store_true",
        help="search only layouts that `train` runs, with its kind of loss",
    )  # fmt: skip
    search.add_argument(
        "--divisible", action="store_true",
        help="search only layouts that share the batch out evenly: no idle replica, every micro-batch full",
    )  # fmt: skip
    output.add_argument("--out", metavar="FILE", help="write the plan to a file")
    output.add_argument(
        "--export",
        metavar="FOLDER",
        help="write the launch of the framework that the stack is, as `shardwise export` does",
    )
    add_report_argument(parser)
    add_sweep_arguments(parser)
    add_output_arguments(parser, verbose=True)


def run(arguments: argparse.Namespace) -> str | Report:
    """The plan, as a report or as JSON; for several clusters their comparison, for several values a sweep."""
    from shardwise.hardware.cluster import expand_sizes
    from shardwise.interop import export_for_stack, write_launch
    from shardwise.layout import choices_from_pins, job_for_engine
    from shardwise.layout.choices import parse_pins
    from shardwise.search import dump_plan, make_plan
    from shardwise.search.compare_clusters import plan_clusters
    from shardwise.values import require_writable

    pins, maxima = parse_pins(arguments.pin, "--pin"), parse_pins(arguments.max, "--max")
    arguments.cluster = [one for text in arguments.cluster for one in expand_sizes(text)]
    choices = choices_from_pins(pins, maxima, runnable=arguments.runnable, divisible=arguments.divisible)
    if is_to_loss(arguments):
        _require_tokens(arguments, arguments.tokens)
        return run_to_loss(arguments, choices, _limits(arguments))
    require_sizes(arguments)
    _require_one_plan(arguments)
    if arguments.sweep:
        return run_sweep(arguments, pins, maxima)
    require_no_sweep(arguments)
    limits = _limits(arguments)
    model, clusters, job = resolve_several(arguments, arguments.cluster)
    job = job_for_engine(job) if arguments.runnable else job
    reliability, progress = resolve_reliability(arguments), arguments.progress
    _require_tokens(arguments, job.tokens)
    if arguments.out:
        require_writable(arguments.out)
    if len(clusters) == 1:
        chosen = make_plan(
            Problem(model, clusters[0], job), choices=choices, reliability=reliability, progress=progress
        )
        chosen = with_schedule(arguments, chosen, reliability)
        _require_within(chosen, limits, choices, progress)
        found: Plan | Comparison = chosen
    else:
        problems = [Problem(model, cluster, job) for cluster in clusters]
        found = plan_clusters(problems, limits=limits, choices=choices, reliability=reliability, progress=progress)
        chosen = _chosen(found, choices, progress)
    if arguments.out:
        dump_plan(chosen, arguments.out)
    if arguments.export:
        write_launch(export_for_stack(chosen), arguments.export, "--out")
    write_plan_report(arguments.report, chosen)
    if arguments.json:
        return _json(found)
    return [*_report(found, limits), Section(list(_next(chosen, arguments.out, arguments.export)))]


def _limits(arguments: argparse.Namespace) -> Limits:
    """The deadline and the budget. Raises `InputError` with what is wrong with both."""
    from shardwise.price import Limits

    deadline, budget = run_all(
        lambda: None if arguments.deadline is None else parse_duration(arguments.deadline, label="--deadline"),
        lambda: None if arguments.budget is None else parse_usd(arguments.budget, label="--budget"),
    )
    return Limits(deadline_s=deadline, budget_usd=budget)


def _require_tokens(arguments: argparse.Namespace, tokens: float | str | None) -> None:
    """A limit is one of a whole run, which has a length."""
    given = [f"--{name}" for name in ("deadline", "budget") if getattr(arguments, name) is not None]
    if given and tokens is None:
        raise InputError(
            f"{' and '.join(given)}: found no --tokens; the length of the run is required, such as --tokens 15T"
        )


def _require_one_plan(arguments: argparse.Namespace) -> None:
    """A schedule of batches is priced for one plan."""
    found = [f"{len(arguments.cluster)} clusters"] if len(arguments.cluster) > 1 else []
    found += ["--sweep"] if arguments.sweep else []
    if arguments.batch_schedule is not None and found:
        raise InputError(
            f"--batch-schedule: found with {' and '.join(found)}; a plan of one cluster is required: plan each by itself"
        )


def _require_within(found: Plan, limits: Limits, choices: Choices | None, progress: Progress) -> None:
    """Raise `MissedLimitError` for a plan that misses a limit: by how much, and what would do.

    A budget without a price is wrong input: `MissingValueError` names the value.
    """
    from shardwise.search import describe_missed_limits
    from shardwise.search.compare_clusters import suggest_remedies

    if not limits or limits.met(found.run):
        return
    assert found.run is not None
    if limits.budget_usd is not None and found.run.usd is None:
        raise _no_price([found.cluster.chip.name])
    lines = [f"{found.cluster.name}: {line}" for line in describe_missed_limits(limits, found.run)]
    lines += [f"what would do: {line}" for line in suggest_remedies(found, limits, choices=choices, progress=progress)]
    raise MissedLimitError("\n".join(lines))


def _no_price(chips: Iterable[str]) -> MissingValueError:
    from shardwise.price import PRICE_FIELD

    return MissingValueError(
        f"--budget: no sourced {PRICE_FIELD} of {', '.join(sorted(set(chips)))}; give one with --set chip.{PRICE_FIELD}=VALUE"
    )


def _json(found: Plan | Comparison) -> str:
    from shardwise.search import Comparison, plan_payload
    from shardwise.search.payloads import comparison_payload

    return json.dumps(comparison_payload(found) if isinstance(found, Comparison) else plan_payload(found), indent=2)


def _report(found: Plan | Comparison, limits: Limits) -> Report:
    from shardwise.present.reports.comparison import comparison_report
    from shardwise.present.reports.plan import plan_report
    from shardwise.present.reports.wording import spare_lines
    from shardwise.search import Comparison

    if isinstance(found, Comparison):
        return comparison_report(found)
    head, *details = plan_report(found)
    return [head, Section(list(spare_lines(limits, found.run))), *details]


def _next(chosen: Plan, file: str | None, folder: str | None) -> Iterator[str]:
    """Where the launch was written, and what to do with the plan now."""
    from shardwise.interop.frameworks.targets import find_target

    if folder:
        yield f"launch written to {folder}"
    target = find_target(chosen)
    name = file or "plan.json"
    to_do = [f"shardwise explain {name}"]
    to_do += [f"shardwise export {name} --to {target.name} --out run/"] if target and not folder else []
    yield f"next{'' if file else ', with --out plan.json'}: {', '.join(to_do)}"


def _chosen(comparison: Comparison, choices: Choices | None, progress: Progress) -> Plan:
    """The plan that was chosen. Where there is none, raises what says why on each cluster."""
    from shardwise.present.rendering.plain_text import render_block
    from shardwise.present.reports.comparison import comparison_table, near_miss

    if comparison.plan is not None:
        return comparison.plan
    if not any(one.plan for one in comparison.contenders):
        raise NothingFitsError("\n".join(f"{one.cluster}: {one.problem}" for one in comparison.contenders))
    if comparison.limits.budget_usd is not None and all(
        one.run.usd is None for one in comparison.contenders if one.run
    ):
        raise _no_price(one.chip for one in comparison.contenders if one.run)
    table = render_block(comparison_table(comparison))
    lines = (comparison.reason, "", table, "", *near_miss(comparison, choices, progress))
    raise MissedLimitError("\n".join(lines))
