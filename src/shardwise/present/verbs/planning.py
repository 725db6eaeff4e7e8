"""`plan`: the fastest layout that fits, and why; which function a command line means, and files of the result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

from shardwise import interop, measure, price, search
from shardwise.hardware.cluster import expand_sizes
from shardwise.model import Job
from shardwise.present import charts, explorer, reports
from shardwise.present.arguments import (
    USUAL_JOB,
    BatchSchedule,
    Budget,
    Deadline,
    GoalName,
    IsDivisible,
    IsRunnable,
    JobFields,
    Maxima,
    Model,
    NoiseScaleText,
    Pins,
    PlannedCluster,
    TargetLoss,
    read_choices,
)
from shardwise.present.exports import html_report, picture, text_file
from shardwise.present.verb import Export, Mode, verb
from shardwise.present.verbs.many_plans import plan_clusters, plan_to_loss, sweep
from shardwise.values import InputError, Progress, argument_label, ignore_progress, raise_problems, require_writable
from shardwise.values.errors import EXIT_INTERRUPTED, MissedLimitError

if TYPE_CHECKING:
    from shardwise.layout import Choices
    from shardwise.price import Reliability
    from shardwise.search import Comparison, LossSearch, Plan, Swept

PLAN_FLAGS = ("out", "export", "deadline", "budget")  # of one plan, not of a sweep
SWEEP_FLAGS = ("draw", "csv")
BATCH_FLAGS = ("over", "csv", "export", "batch_schedule")  # without meaning where the batch is chosen


# Additions of the command line: the function that a line of arguments means, the flags that each refuses, files of the result.


def _cluster_names(written: Mapping[str, Any]) -> list[str]:
    """Return the clusters; "h100:8,16" are two."""
    return [name for text in written["cluster"] for name in expand_sizes(text)]


def _with_first_cluster(written: Mapping[str, Any]) -> dict[str, Any]:
    return {**written, "cluster": _cluster_names(written)[0]}


def _with_clusters(written: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **{name: value for name, value in written.items() if name != "cluster"},
        "clusters": _cluster_names(written),
    }


def _label(name: str) -> str:
    return argument_label(name, f"--{name.replace('_', '-')}")


def _refuse_goal(written: Mapping[str, Any]) -> list[str]:
    return (
        ["--minimise: found it without --noise-scale; it is of plans to a loss, so one of the two is required"]
        if "goal" in written
        else []
    )


def _refuse_sweep_flags(written: Mapping[str, Any]) -> list[str]:
    flags = [f"--{name}" for name in SWEEP_FLAGS if name in written]
    problem = f"{', '.join(flags)}: of sweeps; --sweep is required beside it, such as --sweep gpus=64:4096:x2"
    return [problem] if flags else []


def _refuse_schedule(written: Mapping[str, Any]) -> list[str]:
    """Return the problem with a schedule of batches for anything but one plan, if there is one."""
    names = _cluster_names(written)
    conflicts = [f"{len(names)} clusters"] if len(names) > 1 else []
    conflicts += ["--sweep"] if "over" in written else []
    problem = f"--batch-schedule: found with {' and '.join(conflicts)}; a plan of one cluster is required: plan each by itself"
    return [problem] if conflicts and "batch_schedule" in written else []


def _check_plan(written: Mapping[str, Any]) -> None:
    raise_problems([*_refuse_goal(written), *_refuse_schedule(written), *_refuse_sweep_flags(written)])


def _check_sweep(written: Mapping[str, Any]) -> None:
    problems = [*_refuse_goal(written), *_refuse_schedule(written)]
    alone = ", ".join(_label(name) for name in PLAN_FLAGS if name in written)
    if alone:
        problems.append(f"{alone}: found --sweep beside it; these are of one plan, so leave out one or the other")
    names = _cluster_names(written)
    if len(names) > 1:
        problems.append(f"--sweep: found {len(names)} clusters ({', '.join(names)}); one is required")
    raise_problems(problems)


def _check_to_loss(written: Mapping[str, Any]) -> None:
    flags = ", ".join(_label(name) for name in BATCH_FLAGS if name in written)
    problems = [f"{flags}: found beside --noise-scale or --to-loss; leave out one or the other"] if flags else []
    problems += [
        f"--set {text}: found beside --noise-scale or --to-loss; --batch-tokens and --tokens are required"
        for text in written.get("overrides", ())
        if text.partition("=")[0].strip() in ("job.global_batch_tokens", "job.tokens")
    ]
    raise_problems(problems)


def _require_choice(comparison: Comparison, progress: Progress) -> None:
    """Raise the reason why no cluster was chosen: nothing fits, no price is known, or a limit is missed, and by how much."""
    if comparison.plan is not None:
        return
    contenders = comparison.contenders
    if not any(contender.plan for contender in contenders):
        lines = "\n".join(f"{contender.cluster}: {contender.problem}" for contender in contenders)
        raise search.error_without_plan((contender.no_plan for contender in contenders), [lines])
    runs = {contender.chip: contender.run for contender in contenders if contender.run}
    if comparison.limits.budget_usd is not None and all(run.usd is None for run in runs.values()):
        raise price.missing_price(runs)
    raise MissedLimitError(reports.missed_limits_text(comparison, progress))


def _require_point(loss_search: LossSearch, progress: Progress) -> None:
    if loss_search.plan is None:
        raise MissedLimitError(*search.describe_missed_target(loss_search))


def _require_planned_point(swept: Swept, progress: Progress) -> None:
    search.require_a_plan(swept)


def _chosen_plan(result: Plan | Comparison | LossSearch) -> Plan:
    plan = result if isinstance(result, search.Plan) else result.plan
    assert plan is not None  # a result without one is an error of the command line
    return plan


def _write_plan(result: Plan | Comparison | LossSearch, target: str) -> None:
    search.dump_plan(_chosen_plan(result), target)


def _write_launch(result: Plan | Comparison, folder: str) -> None:
    interop.write_launch(interop.export_for_stack(_chosen_plan(result)), folder, "--out")


def _report_html(result: Plan | Comparison | LossSearch | Swept) -> str:
    if not isinstance(result, search.Swept):
        return explorer.plan_report(_chosen_plan(result))
    subject, names = charts.what_is_planned(result)[0], " and ".join(sweep.name for sweep in result.sweeps)
    return explorer.result_report("sweep", f"{subject} over {names}", result)


def _draw(result: Swept | LossSearch) -> charts.Chart:
    return charts.sweep_chart(result) if isinstance(result, search.Swept) else charts.search_chart(result)


def _sweep_csv(swept: Swept) -> str:
    return search.sweep_csv(swept)


def _next_lines(result: Plan | Comparison | LossSearch | Swept, files: Mapping[str, str]) -> Iterator[str]:
    """Yield the folder of the launch, and the commands that go on with the plan."""
    if isinstance(result, search.Swept):
        return
    if "export" in files:
        yield f"launch written to {files['export']}"
    name = files.get("out", "plan.json")
    commands = [f"shardwise explain {name}"]
    if "export" not in files and not isinstance(result, search.LossSearch):
        target = interop.find_target(_chosen_plan(result))
        commands += [f"shardwise export {name} --to {target.name} --out run/"] if target else []
    yield f"next{'' if 'out' in files else ', with --out plan.json'}: {', '.join(commands)}"


@verb(
    description="Search all layouts of a training job on a cluster and choose the fastest that fits. Several clusters are "
    "compared: with a deadline the cheapest that meets it is chosen, otherwise the fastest. "
    "With --sweep a job is planned for each of several values. With --noise-scale the batch is chosen too, and the "
    "number of devices, by the time or the dollars to a loss.",
    defaults={
        **USUAL_JOB,
        "global_batch_tokens": f"{USUAL_JOB['global_batch_tokens']}; with --noise-scale, doublings around it",
    },
    examples=(
        "shardwise plan llama-3-8b h100:64 --batch-tokens 1Mi --seq-len 8Ki --tokens 1T --out plan.json",
        "shardwise plan llama-3-8b h100:64 tpu-v5p:4x4x4 --batch-tokens 1Mi --seq-len 8Ki --tokens 1T --deadline 60d",
        "shardwise plan llama-3-8b h100:8 --batch-tokens 512Ki --seq-len 8Ki --sweep gpus=8:64:x2 --draw scaling.svg",
        "shardwise plan llama-3-8b h100:64,128,256,512 --noise-scale 1.2Mi",
    ),
    modes=(
        Mode(
            function=plan_to_loss, applies=lambda written: "noise_scale" in written or "to_loss" in written,
            check=_check_to_loss, keywords=_with_clusters, require_answer=_require_point,
        ),
        Mode(
            function=sweep, applies=lambda written: "over" in written, check=_check_sweep,
            keywords=lambda written: {**_with_first_cluster(written), "keep_interrupted": True},
            require_answer=_require_planned_point,
        ),
        Mode(
            function=plan_clusters, applies=lambda written: len(_cluster_names(written)) > 1, check=_check_plan,
            keywords=_with_clusters, require_answer=_require_choice,
        ),
        Mode(check=_check_plan, keywords=_with_first_cluster),
    ),
    exports=(
        Export(flag="--out", help="write the plan to a file", write=_write_plan, prepare=require_writable),
        Export(
            flag="--export", metavar="FOLDER", write=_write_launch,
            help="write the launch of the framework that the stack is, as `shardwise export` does",
        ),
        replace(html_report(_report_html), prepare=require_writable),
        replace(
            picture(
                "--draw", "of a sweep: draw step, MFU, dollars and layouts over its values, of a grid a heat map", _draw
            ),
            prepare=require_writable,
        ),
        replace(
            text_file("--csv", "of a sweep: write a row for each point", _sweep_csv),
            prepare=require_writable,
        ),
    ),
    has_details=True,
    exit_code=lambda result: 0 if getattr(result, "is_complete", True) else EXIT_INTERRUPTED,
    warning=lambda result: getattr(result, "interruption", ""),
    last_lines=_next_lines,
)  # fmt: skip
def plan(
    model: Model, cluster: PlannedCluster, job: Job | None = None, *, batch_schedule: BatchSchedule = None,
    deadline: Deadline = None, budget: Budget = None, pins: Pins = "", maxima: Maxima = "",
    noise_scale: NoiseScaleText = None, to_loss: TargetLoss = None, goal: GoalName = None, runnable: IsRunnable = False,
    divisible: IsDivisible = False, choices: Choices | None = None, reliability: Reliability | None = None,
    progress: Progress = ignore_progress, **fields: Unpack[JobFields],
) -> Plan:  # fmt: skip
    """Return the best layout for a job on a cluster: the simplest of the fastest that fit, with its estimate and why others lost.

    A batch and a sequence that are left out are usual for the model (`defaults` of the plan): of published runs of its size
    and 4,096 tokens; the batch is a multiple of that if the layout on a large cluster has more replicas than sequences.
    Without a `stack`, and on a cluster without measurements, the step is predicted for the typical stack of the chip; a job
    with an `overlap` is planned by the lower bound of that convention. `pins` and `maxima` narrow the search, as `--pin` and
    `--max` do: {"tp": 8} or "tp=8 recompute=full"; `choices` are what it may otherwise choose from. `runnable`: only layouts
    that `train` runs, with its loss; `divisible`: only layouts that split the batch evenly. `reliability` has the failure
    rate, restarts and power for the run of a job with `tokens`, `deadline` ("30d") and `budget` ("2M") are limits of that
    run, and `batch_schedule` is a batch that changes during it. `progress` is called as the search proceeds. With a
    `noise_scale`, or a loss in nats (`to_loss`), the batch that reaches the loss the soonest is chosen too: `plan_to_loss` on
    one cluster.

    Raises `InputError` for anything wrong in these, `NothingFitsError` where no layout fits, with the smallest excess,
    `MissedLimitError` where the run misses a limit.

    >>> import shardwise as sw
    >>> plan = sw.plan("llama-3.2-1b", "h100:8", global_batch_tokens="512Ki", seq_len=4096)
    >>> plan.layout.num_devices, plan.estimate.fits, plan.job.num_seqs
    (8, True, 128)
    >>> plan  # doctest: +ELLIPSIS
    Plan: llama-3.2-1b on h100:8, 524,288 tokens per batch, sequences of 4,096, bf16
      fsdp=...
      step ... tokens/s per device, MFU ...%, bound by ...
      memory ... GB of 84.9 GB (fits, ...% free)
    >>> sw.plan("llama-3.2-1b", "h100:8", plan.job, pins="tp=2 zero_stage=3", maxima={"cp": 1}).layout.tp
    2
    >>> low, high = plan.estimate.interval90
    >>> plan.bound_s < low < plan.estimate.step_time_s < high
    True
    >>> sw.plan("llama-3.2-1b", "h100:8", plan.job, stack="nemo-25").cluster.calibration.stack
    'nemo-25'
    >>> sw.plan("gpt-2", "h100:8", noise_scale="128Ki", seq_len=1024).job.global_batch_tokens
    131072
    >>> usual = sw.plan("gpt-2", "h100:8")
    >>> usual.job.global_batch_tokens, usual.job.seq_len, usual.defaults
    (524288, 1024, ('seq_len', 'batch_tokens'))
    """
    allowed = read_choices(pins, maxima, choices, runnable=runnable, divisible=divisible)
    if noise_scale is not None or to_loss is not None:
        if batch_schedule is not None:
            raise InputError(
                "batch_schedule: found with a noise scale or a loss, by which the batch is chosen; leave out one"
            )
        problem = search.resolve_loss_problem(model, [cluster], job, fields, noise_scale=noise_scale, to_loss=to_loss)
        limits = price.parse_limits(deadline, budget, problem.inputs.job.tokens)
        loss_search = search.plan_loss_problem(
            problem,
            limits=limits,
            goal=goal,
            choices=allowed,
            runnable=runnable,
            reliability=reliability,
            progress=progress,
        )
        _require_point(loss_search, progress)
        return _chosen_plan(loss_search)
    if goal is not None:
        raise InputError("goal: found without a noise scale and a loss; one of the two is required")
    inputs = price.resolve_problem(model, [cluster], job, fields)
    if "stack" in fields:
        interop.require_stack_model(inputs.problem)
    limits = price.parse_limits(deadline, budget, inputs.job.tokens)
    reliability = reliability or inputs.reliability
    chosen = search.plan_inputs(inputs, choices=allowed, runnable=runnable, reliability=reliability, progress=progress)
    if "stack" in fields:
        interop.require_launchable(chosen)
    chosen = search.with_batch_schedule(replace(chosen, limits=limits), batch_schedule, reliability)
    search.require_within_limits(chosen, limits, allowed, progress)
    return replace(chosen, published=measure.compare_with_published_runs(chosen))
