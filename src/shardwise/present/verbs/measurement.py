"""`reconcile`: a run beside its plan; `trace`: a measured step beside the planned one; `mfu`: utilisation of a measured run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from shardwise import measure, present, records
from shardwise.present import charts, explorer
from shardwise.present.arguments import MODEL_HELP, PLAN_HELP, layout_help, overrides_argument, read_plan
from shardwise.present.exports import html_report, picture, text_file
from shardwise.present.verb import Argument, verb
from shardwise.values import Progress, argument_label, ignore_progress, parse_count

if TYPE_CHECKING:
    from shardwise.layout import Layout
    from shardwise.measure import Reconciliation, TraceAnalysis, UtilisationReport
    from shardwise.search import Plan


def _reconciliation_charts(reconciliation: Reconciliation) -> tuple[charts.Chart, charts.Chart]:
    plan = reconciliation.plan
    subtitle = f"{plan.model.name}, {plan.layout}, on {reconciliation.machine}"
    return charts.reconciliation_charts(reconciliation, subtitle)


def _reconciliation_html(reconciliation: Reconciliation) -> str:
    title = f"{reconciliation.plan.model.name}: {reconciliation.path.name} against its plan"
    return explorer.result_report("reconcile", title, reconciliation)


@verb(
    description="""Compare a run of `shardwise train` with its plan: every term of the step time and of the memory, predicted and
measured; the part that no term explains; the term that the error is attributed to; and the collectives that were issued, with
those that were planned.""",
    examples=(
        "shardwise train plan.json --data data --steps 50 --out runs/a",
        "shardwise reconcile plan.json runs/a --plot reconciled.svg",
    ),
    exports=(
        picture("--plot", "draw predicted and measured terms side by side", _reconciliation_charts),
        html_report(_reconciliation_html),
    ),
    group_order=("run", "output"),
    has_details=True,
)
def reconcile(
    plan: Annotated[str | os.PathLike[str] | Plan, Argument(group="run", metavar="PLAN", help=PLAN_HELP)],
    folder: Annotated[
        str | os.PathLike[str],
        Argument(
            group="run", metavar="RUN", help="the folder of its run, which `shardwise train --out` named",
        ),
    ],
) -> Reconciliation:  # fmt: skip
    """Compare the run in a folder with its plan: seconds and bytes by term, and the collectives that were issued.

    `plan` is a plan or the path of its file. Raises `InputError` for a folder without a run, a run of another plan, and one with
    too few steps.

    >>> import shardwise as sw
    >>> plan = sw.plan("llama-3.2-1b", "h100:8", global_batch_tokens="512Ki", seq_len=4096)
    >>> reconcile(plan, "no/run")
    Traceback (most recent call last):
    ...
    shardwise.values.errors.InputError: reconcile: no/run holds no run; the folder that `shardwise train --out` named is required
    """
    return measure.reconcile_run(read_plan(plan), Path(folder))


def _memory_chart(analysis: TraceAnalysis) -> charts.Chart:
    subtitle = f"{analysis.plan.model.name}, {analysis.plan.layout}"
    return charts.anatomy_chart(records.read_memory_traces(analysis.run), subtitle)


def _chrome_trace(analysis: TraceAnalysis) -> str:
    return present.both_traces(analysis.step, analysis.planned.step) + "\n"


@verb(
    description="""What the ranks of a run did in a step that `train --profile` recorded: kernels, waits and collectives under the
names of the planned step. Says how long each rank was busy, what communication was exposed on each axis and what was hidden
behind kernels, the gaps between kernels, and which rank the others waited for; and writes the measured step and the planned one
as one file for Chrome and Perfetto.""",
    examples=(
        "shardwise train plan.json --data data --steps 20 --out runs/a --profile 10:13",
        "shardwise trace runs/a --step 12 --out trace.json",
        "shardwise trace runs/a --bottlenecks --memory memory.svg",
    ),
    exports=(
        text_file(
            "--out", "write the measured and the planned step as a trace for Chrome and Perfetto (JSON)", _chrome_trace
        ),
        picture("--memory", "draw the memory of the run's first steps by category", _memory_chart),
    ),
    group_order=("run", "output"),
    has_details=True,
)
def trace(
    folder: Annotated[
        str | os.PathLike[str],
        Argument(
            group="run", metavar="RUN", help="the folder of a run, which `shardwise train --out` named",
        ),
    ],
    step: Annotated[
        int | str | None,
        Argument(
            flag="--step", group="run", metavar="N",
            help="the step, of those that were recorded (default: the last of them)",
        ),
    ] = None,
    bottlenecks: Annotated[
        bool,
        Argument(
            flag="--bottlenecks", group="run",
            help="say what holds the step up, on which rank, and which layout would mend it",
        ),
    ] = False,
) -> TraceAnalysis:  # fmt: skip
    """Return a recorded step of a run with what its traces show: where the time of each rank went, beside the planned step.

    With `bottlenecks` the report has them too, with the layouts that would mend them. Raises `InputError` for a folder without a
    run, and for a step that was not recorded.

    >>> trace("no/run")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    shardwise.values.errors.InputError: trace: no/run holds no run; ... is required
    """
    run = records.RunFolder(Path(folder))
    run.require_run_to_trace()
    number = None if step is None else parse_count(step, label=argument_label("step"))
    return measure.load_trace_analysis(run, number, lists_bottlenecks=bottlenecks)


@verb(
    description="""The model FLOPs utilisation and tokens/s of a measured training run. With a layout, also where the rest of the
step goes according to the prediction for its software, and how much of it nothing predicts. The measurement is given, or read
from logs of torchtitan, Megatron-LM, NeMo, nanotron, MaxText and `shardwise train`: what they print, and what they write for
TensorBoard (event files) and W&B (run-ID.wandb, or an export as CSV or JSON lines). What ran is given by flags, a plan, the
launch of a framework (--launch), or the folder of a run of `shardwise train`. Without a layout the measurement is compared with
the plan's choice.""",
    examples=(
        "shardwise mfu --tokens-per-s 410k --model llama-3-8b --cluster h100:64 --seq-len 8192",
        'shardwise mfu train.log --model llama-3-8b --cluster h100:64 --batch-tokens 1Mi --seq-len 8192 --layout "fsdp=64"',
        "shardwise mfu train.log --launch pretrain_gpt.sh --cluster h100:64 --row runs.csv",
        "shardwise mfu --step-time 8.1s --plan plan.json",
        "shardwise mfu runs/a",
    ),
    group_order=("measurement", "job", "cluster", "output"),
)
def mfu(
    logs: Annotated[
        Sequence[str | os.PathLike[str]],
        Argument(
            group="measurement", metavar="LOG", variadic=True, optional=True,
            help="logs of one run, in order, or its folder: of `shardwise train`, of event files, of W&B",
        ),
    ] = (),
    *,
    tokens_per_s: Annotated[
        str | float | None,
        Argument(
            flag="--tokens-per-s", group="measurement", metavar="X",
            help="in place of a log: of all devices, or 6400/device",
        ),
    ] = None,
    step_time: Annotated[
        str | float | None,
        Argument(
            flag="--step-time", group="measurement", metavar="TIME", help="in place of a log: such as 8.1s or 640ms",
        ),
    ] = None,
    plan: Annotated[
        str | os.PathLike[str] | Plan | None,
        Argument(
            flag="--plan", metavar="FILE", help="what ran, as a plan: a file that `plan --out` wrote",
        ),
    ] = None,
    launch: Annotated[
        Sequence[str | os.PathLike[str]],
        Argument(
            flag="--launch", metavar="FILE", variadic=True, help="what ran, as the launch of a framework (see: read)",
        ),
    ] = (),
    model: Annotated[
        str | os.PathLike[str] | None,
        Argument(flag="--model", metavar="MODEL", completes="models", help=MODEL_HELP),
    ] = None,
    cluster: Annotated[
        str | os.PathLike[str] | None,
        Argument(
            flag="--cluster", group="cluster", metavar="CLUSTER", completes="clusters",
            help="what it ran on, such as h100:64",
        ),
    ] = None,
    global_batch_tokens: Annotated[
        int | str | None,
        Argument(
            flag="--batch-tokens", metavar="N", help="tokens of a global batch; default: what the log says",
        ),
    ] = None,
    seq_len: Annotated[
        int | str | None,
        Argument(flag="--seq-len", metavar="N", help="tokens of one sequence, such as 8192 or 8Ki"),
    ] = None,
    layout: Annotated[str | Layout | None, Argument(flag="--layout", metavar="TEXT", help=layout_help)] = None,
    precision: Annotated[
        str | None,
        Argument(
            flag="--precision", metavar="NAME", completes="precisions",
            help="precision recipe (default: that of the stack, else bf16; see: show precisions)",
        ),
    ] = None,
    stack: Annotated[
        str | None,
        Argument(
            flag="--stack", group="cluster", metavar="NAME", completes="stacks",
            help="its software (default: the launch's, or what is typical of the chip)",
        ),
    ] = None,
    overrides: Annotated[
        Sequence[str],
        overrides_argument("model, job or chip", "model.num_layers=40 or chip.memory_bytes=96GB"),
    ] = (),
    row: Annotated[
        str | os.PathLike[str] | None,
        Argument(
            flag="--row", group="output", metavar="FILE",
            help="append the run to a CSV file that `calibrate --runs` takes",
        ),
    ] = None,
    progress: Progress = ignore_progress,
) -> UtilisationReport:  # fmt: skip
    """Return the utilisation of a measured run, and with its layout where its step goes by the prediction.

    What ran is a plan, a framework's launch with its cluster, a folder of a run among the logs, or model, cluster and `seq_len`.
    What was measured are logs, `tokens_per_s` of all devices (text: "6400/device"), or the seconds of a step. `row` is a CSV file
    to which the run is added. Raises `InputError` with what is missing, or said twice.

    >>> import shardwise as sw
    >>> report = sw.mfu(tokens_per_s="416k", model="llama-3-8b", cluster="h100:64", seq_len=8192)
    >>> round(report.utilisation.mfu, 3), report.plan
    (0.338, None)
    """
    run = measure.RunDescription(
        plan=plan, launch=launch, model=model, cluster=cluster, global_batch_tokens=global_batch_tokens, seq_len=seq_len,
        layout=layout, precision=precision, stack=stack, overrides=overrides,
    )  # fmt: skip
    source = measure.MeasurementSource(logs=logs, tokens_per_s=tokens_per_s, step_time=step_time)
    report = measure.analyse_run(run, source, progress)
    return report if row is None else measure.record_row(report, row)
