"""`shardwise mfu`: MFU of a measured run, and where the rest of its time goes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.present.cli.arguments import MODEL, add_output_arguments, add_set_argument, layout_help
from shardwise.present.rendering.report import Report
from shardwise.price import Problem
from shardwise.values import Parser

if TYPE_CHECKING:
    from shardwise.measure import MeasuredStep, RunSetup, UtilisationReport
    from shardwise.measure.calibrate.user_runs import RunAsRow

DESCRIPTION = """The model FLOPs utilisation and tokens/s of a measured training run. With a layout, also where the rest of the
step goes according to the prediction for its software, and how much of it nothing predicts. The measurement is given, or read
from logs of torchtitan, Megatron-LM, NeMo, nanotron, MaxText and `shardwise train`: what they print, and what they write for
TensorBoard (event files) and W&B (run-ID.wandb, or an export as CSV or JSON lines). What ran is given by flags, a plan, the
launch of a framework (--launch), or the folder of a run of `shardwise train`. Without a layout the measurement is compared with
the plan's choice."""
EXAMPLES = (
    "shardwise mfu --tokens-per-s 410k --model llama-3-8b --cluster h100:64 --seq-len 8192",
    'shardwise mfu train.log --model llama-3-8b --cluster h100:64 --batch-tokens 1Mi --seq-len 8192 --layout "fsdp=64"',
    "shardwise mfu train.log --launch pretrain_gpt.sh --cluster h100:64 --row runs.csv",
    "shardwise mfu --step-time 8.1s --plan plan.json",
    "shardwise mfu runs/a",
)


def configure(parser: Parser) -> None:
    """Declare the arguments."""
    measurement = parser.group("measurement")
    measurement.add_argument(
        "logs",
        metavar="LOG",
        nargs="*",
        help="logs of one run, in order, or its folder: of `shardwise train`, of event files, of W&B",
    )
    measurement.add_argument("--tokens-per-s", metavar="X", help="in place of a log: of all devices, or 6400/device")
    measurement.add_argument("--step-time", metavar="TIME", help="in place of a log: such as 8.1s or 640ms")
    add_ran_arguments(parser)
    parser.group("output").add_argument(
        "--row", metavar="FILE", help="append the run to a CSV file that `calibrate --runs` takes"
    )
    add_output_arguments(parser)


def add_ran_arguments(parser: Parser) -> None:
    """Flags that say what ran."""
    job, cluster = parser.groups("job", "cluster")
    job.add_argument("--plan", metavar="FILE", help="what ran, as a plan: a file that `plan --out` wrote")
    job.add_argument("--launch", metavar="FILE", nargs="+", help="what ran, as the launch of a framework (see: read)")
    job.add_argument("--model", metavar="MODEL", completes="models", help=MODEL)
    cluster.add_argument("--cluster", metavar="CLUSTER", completes="clusters", help="what it ran on, such as h100:64")
    job.add_argument("--batch-tokens", metavar="N", help="tokens of a global batch; default: what the log says")
    job.add_argument("--seq-len", metavar="N", help="tokens of one sequence, such as 8192 or 8Ki")
    job.add_argument("--layout", metavar="TEXT", help=layout_help())
    job.add_argument(
        "--precision",
        metavar="NAME",
        completes="precisions",
        help="precision recipe (default: that of the stack, else bf16; see: show precisions)",
    )
    cluster.add_argument(
        "--stack",
        metavar="NAME",
        completes="stacks",
        help="its software (default: the launch's, or what is typical of the chip)",
    )
    add_set_argument(job, "model, job or chip", "model.num_layers=40 or chip.memory_bytes=96GB")


def run(arguments: argparse.Namespace) -> str | Report:
    """The report, as text or as JSON; a row is appended first."""
    from shardwise.measure.utilisation import mfu_payload
    from shardwise.present.reports.utilisation import mfu_report

    found = find(arguments)
    otherwise = None if arguments.row is None else append_row(arguments.row, found)
    if arguments.json:
        return json.dumps(mfu_payload(found, otherwise), indent=2)
    return mfu_report(found, arguments.row, otherwise or ())


def find(arguments: argparse.Namespace) -> UtilisationReport:
    """What ran and what was measured of it, against the prediction. Raises `InputError` with what is missing."""
    from shardwise.measure import UtilisationReport
    from shardwise.measure.utilisation import break_down_step, compute_utilisation
    from shardwise.present.cli.ran import ran_of
    from shardwise.search import make_plan, plan_layout

    arguments = _with_plan(arguments)
    require_one_measurement(arguments)
    ran, measured = measure(arguments, ran_of(arguments))
    used = compute_utilisation(Problem(ran.model, ran.cluster, ran.job), measured.tokens_per_s_per_device, ran.layout)
    if measured.step_time_s is None:
        return UtilisationReport(ran, measured, used, None, None)
    if ran.layout is None:
        best = make_plan(Problem(ran.model, ran.cluster, ran.job), progress=arguments.progress, elsewhere=False)
        return UtilisationReport(ran, measured, used, best, None)
    priced = plan_layout(ran.model, ran.cluster, ran.job, ran.layout)
    return UtilisationReport(ran, measured, used, priced, break_down_step(priced, measured.step_time_s, used))


def _with_plan(arguments: argparse.Namespace) -> argparse.Namespace:
    """The arguments with a plan's file that stands where logs do as their `--plan`. Raises `InputError` for a second plan."""
    from shardwise.search import is_plan_file
    from shardwise.values import InputError

    plans = [path for path in arguments.logs if is_plan_file(path)]
    if not plans:
        return arguments
    named = [*([arguments.plan] if arguments.plan else []), *plans]
    if len(named) > 1:
        raise InputError(
            f"mfu: found {len(named)} plans, {', '.join(map(str, named))}; one, of the run that was measured, is required"
        )
    logs = [path for path in arguments.logs if path not in plans]
    return argparse.Namespace(**{**vars(arguments), "plan": plans[0], "logs": logs})


def require_one_measurement(arguments: argparse.Namespace) -> None:
    """Raise `InputError` unless there is one of logs, a rate, a time."""
    from shardwise.values import InputError

    given = {"LOG": arguments.logs, "--tokens-per-s": arguments.tokens_per_s, "--step-time": arguments.step_time}
    names = [name for name, value in given.items() if value]
    if len(names) != 1:
        raise InputError(f"mfu: found {' and '.join(names) or 'no measurement'}; one of {', '.join(given)} is required")


def measure(arguments: argparse.Namespace, ran: RunSetup) -> tuple[RunSetup, MeasuredStep]:
    """What was measured of a run; its batch is then known where the log says it."""
    from shardwise.measure import MeasuredStep
    from shardwise.measure.utilisation import read_measured_log
    from shardwise.values import InputError, parse_duration

    devices = ran.cluster.num_devices
    if arguments.logs:
        return read_measured_log([Path(path) for path in arguments.logs], ran)
    batch = ran.batch_tokens
    if arguments.step_time is not None:
        seconds = parse_duration(arguments.step_time, label="--step-time")
        if batch is None:
            raise InputError("--batch-tokens: missing; the tokens of a step that took --step-time are required")
        return ran, MeasuredStep(batch / seconds / devices, seconds)
    rate = _rate(arguments.tokens_per_s, devices)
    return ran, MeasuredStep(rate, batch / rate / devices if batch else None)


def _rate(text: str, devices: int) -> float:
    """Tokens/s of one device: given as such, or of all."""
    from shardwise.values import InputError, parse_quantity

    number, slash, unit = text.partition("/")
    value = parse_quantity(number, label="--tokens-per-s", unit="")
    if value <= 0 or (slash and unit.strip() not in ("device", "gpu", "chip")):
        raise InputError(f"--tokens-per-s: found {text!r}; a number above 0 is required, such as 410k, or 6400/device")
    return value if slash else value / devices


def append_row(path: str, found: UtilisationReport) -> tuple[str, ...]:
    """Append a run to a CSV file; what of it the row says otherwise. Raises `InputError` for a run that has no row."""
    from shardwise.measure.calibrate.user_runs import append_row

    row = row_of_run(found.ran, found.measured, ", ".join(map(str, found.measured.paths)))
    append_row(Path(path), row)
    return row.lost_fields


def row_of_run(ran: RunSetup, measured: MeasuredStep, name: str) -> RunAsRow:
    """A measured run as a row. Raises `InputError` where there is no layout or no time of a step."""
    from dataclasses import replace

    from shardwise.measure.calibrate.user_runs import MeasuredPeak, run_to_row
    from shardwise.price import loss_kind
    from shardwise.values import InputError

    if ran.layout is None or measured.step_time_s is None:
        raise InputError("row: a run without a layout or the time of a step; --layout, --plan or --launch is required")
    job = replace(ran.job, loss=loss_kind(ran.cluster, ran.job))
    log = measured.log
    peak = None if log is None or log.memory_bytes is None else MeasuredPeak(log.memory_bytes, log.format.memory_kind)
    return run_to_row(
        Problem(ran.model, ran.cluster, job), ran.layout, ran.software, measured.step_time_s, name=name, peak=peak
    )
