"""`shardwise calibrate`: make predictions right for the user's own cluster."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.present.cli.arguments import add_output_arguments
from shardwise.present.rendering.report import Report
from shardwise.values import Parser

if TYPE_CHECKING:
    from shardwise.measure.calibrate.user_cluster_fit import UserClusterFit
    from shardwise.measure.calibrate.user_runs import PricedRun

DESCRIPTION = """Fit what a chip, its network and a software stack reach to runs and micro-benchmarks on a cluster, from where the
published runs leave it, and write a cluster file that every verb then predicts with.

--runs is a CSV file with the columns of the published rows (docs/accuracy.md; validate --rows reads the same): what was
trained, on what, how it was laid out, and its measured step_time_s. Rows of another chip or stack are set aside.

--run is one run as it was launched and as it logged: the folder of a run of `shardwise train`; or what ran, a plan or the files
of a framework's launch (see: read), and behind them its log (see: mfu). It may be given for each run.

--bench is a file of JSON lines, each a micro-benchmark and the seconds that it took on the device, launches left out:

  {"bench": "matmul", "dtype": "bf16", "m": 8192, "n": 8192, "k": 8192, "seconds": 0.0015}
  {"bench": "memory", "bytes": 4e9, "seconds": 0.0016}
  {"bench": "collective", "kind": "all_gather", "devices": 8, "bytes": 1e9, "seconds": 0.0029}
  {"bench": "attention", "dtype": "bf16", "batch": 2, "heads": 32, "seq_len": 8192, "head_dim": 128, "seconds": 0.0023}

matmul: [m, k] times [k, n]. memory: a streaming kernel, bytes read and written. collective: the kind is one of
all_gather, reduce_scatter, all_reduce, all_to_all and send_recv;
bytes of the whole array (of an all_to_all the shards of all devices together), devices from the innermost tier of CLUSTER, or
from the smallest axis of its torus, outwards. attention: softmax attention as the stack runs it, forward, or with
"backward": true the backward pass alone; "causal" and "backward" are false when left out."""
EXAMPLES = (
    "shardwise calibrate h100:512 --runs mine.csv --out my-cluster.toml",
    "shardwise calibrate h100:64 --run launch.sh train.log --run other.sh other.log --out my-cluster.toml",
    "shardwise calibrate my-cluster.toml --runs mine.csv --bench machine.jsonl --stack torchtitan --out my-cluster.toml",
)


def configure(parser: Parser) -> None:
    """Declare the arguments."""
    cluster, runs, output = parser.groups("cluster", "runs", "output")
    cluster.add_argument(
        "cluster",
        help="CHIP:COUNT or CHIP:SHAPE, such as h100:512, or a .toml file; a calibration that it has is replaced",
    )
    runs.add_argument("--runs", metavar="FILE", help="a CSV file with the columns of the published rows")
    runs.add_argument(
        "--run", dest="own", metavar="FILE", nargs="+", action="append", default=[],
        help="a run: the folder of one of `train`, or a plan or a launch and behind it the log; may be repeated",
    )  # fmt: skip
    runs.add_argument("--bench", metavar="FILE", help="a file of JSON lines, a micro-benchmark each")
    cluster.add_argument(
        "--stack",
        metavar="NAME",
        completes="stacks",
        help="the software of all runs, such as torchtitan (default: what most rows name)",
    )
    output.add_argument("--name", metavar="NAME", help="of the cluster that is written (default: that of the file)")
    output.add_argument("--out", metavar="FILE", help="write the cluster as a .toml file; without it only the report")
    add_output_arguments(parser)


def run(arguments: argparse.Namespace) -> str | Report:
    """The report, as text or as JSON; the file is written first."""
    from shardwise.hardware import get_stack, load_measured_cluster
    from shardwise.measure.calibrate.payloads import calibrate_payload
    from shardwise.measure.calibrate.published_runs.run_table import read_rows
    from shardwise.measure.calibrate.user_cluster_fit import fit_user_cluster
    from shardwise.present.reports.calibration import calibrate_report
    from shardwise.values import InputError, run_all

    if arguments.runs is None and arguments.bench is None and not arguments.own:
        raise InputError("calibrate: found neither --runs nor --run nor --bench; one of them, or several, is required")
    own, stack, rows, out, logged = run_all(
        lambda: load_measured_cluster(arguments.cluster),
        lambda: get_stack(arguments.stack) if arguments.stack else None,
        lambda: read_rows(arguments.runs, "--runs") if arguments.runs is not None else (),
        lambda: _out(arguments.out),
        lambda: _logged(arguments.own, arguments.cluster),
    )
    found = fit_user_cluster(own, rows, arguments.bench, stack, arguments.progress, logged=logged)
    source = _source(found, arguments)
    name = arguments.name or (out.stem if out else own.nominal.name)
    if out:
        _write(out, found, name, f"{source}, {date.today()}")
    if arguments.json:
        return json.dumps(calibrate_payload(found, name, source), indent=2)
    return calibrate_report(found, source, arguments.out)


def _logged(given: Sequence[Sequence[str]], cluster: str) -> list[PricedRun]:
    """Runs by their launches and logs. Raises `InputError` with what is wrong with any of them."""
    from functools import partial

    from shardwise.values import run_all

    return run_all(*(partial(_run_of, files, cluster) for files in given))


def _run_of(files: Sequence[str], cluster: str) -> PricedRun:
    """A run: what ran, and behind it its log; or the folder of a run, which holds both."""
    from shardwise.hardware import match_stack
    from shardwise.measure.calibrate.user_runs import run_from_log
    from shardwise.measure.utilisation import read_measured_log
    from shardwise.present.cli.ran import ran_files
    from shardwise.price import Problem
    from shardwise.values import InputError

    *what, log = files
    if not what and not (Path(log) / "plan.json").is_file():
        raise InputError(f"--run: found {log} alone; what ran, a plan or a launch, and behind it the log is required")
    ran, measured = read_measured_log([Path(log)], ran_files(what or [str(Path(log) / "plan.json")], cluster))
    if ran.layout is None or measured.step_time_s is None:
        raise InputError(f"--run: {log} has no time of a step, and nothing says its batch")
    return run_from_log(
        log, Problem(ran.model, ran.cluster, ran.job), ran.layout, match_stack(ran.software), measured.step_time_s
    )


def _out(text: str | None) -> Path | None:
    """The file to write. Raises `InputError` for one that no verb would read as a cluster."""
    from shardwise.values import InputError

    if text is not None and not text.strip().lower().endswith(".toml"):
        raise InputError(f"--out: found {text!r}; a name that ends in .toml is required, such as my-cluster.toml")
    return Path(text.strip()) if text is not None else None


def _source(found: UserClusterFit, arguments: argparse.Namespace) -> str:
    from shardwise.values import pluralize

    files = [Path(name).name for name in (arguments.runs, *(run[-1] for run in arguments.own)) if name is not None]
    parts = [f"{pluralize(len(found.runs), 'run')} of {', '.join(files)}"] if files else []
    if arguments.bench is not None:
        parts.append(f"{pluralize(len(found.benches), 'micro-benchmark')} of {Path(arguments.bench).name}")
    return f"fitted to {' and '.join(parts)}"


def _write(out: Path, found: UserClusterFit, name: str, source: str) -> None:
    from dataclasses import replace

    from shardwise.hardware.cluster_files import format_cluster_toml
    from shardwise.values import InputError

    remarks = {
        one.name: f"± {one.after_deviation:.2g}" + ("" if one.identified else ", not identified")
        for one in found.constants
    }
    nominal = replace(found.user_cluster.nominal, name=name)
    try:
        out.write_text(format_cluster_toml(nominal, found.calibration(source), remarks), encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"--out: cannot write {out}: {reason}; a path that can be written is required") from None
