"""`bench`: what this machine reaches; `calibrate`: constants fitted to a user's runs; `validate`: predictions beside runs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from shardwise import interop, measure
from shardwise.hardware import load_cluster
from shardwise.present import charts, explorer
from shardwise.present.exports import html_report, picture
from shardwise.present.verb import Argument, Mode, verb
from shardwise.present.verbs.serving_launches import read_launch_texts
from shardwise.values import InputError, Progress, argument_label, ignore_progress, raise_problems, read_text

if TYPE_CHECKING:
    from shardwise.measure import (
        BenchmarkResult,
        CalibratedServing,
        ClusterCalibration,
        EvaluatedRuns,
        MachineResult,
        PublishedFit,
        RankedLayouts,
        ServingValidation,
    )

BenchmarkKind = Literal["matmul", "memory", "attention", "collectives", "all", "machine"]
OutFile = Annotated[
    str | os.PathLike[str] | None,
    Argument(
        flag="--out", group="output", metavar="FILE",
        help="add the lines to this file, or write the machine to it; without it they are only printed",
    ),
]  # fmt: skip
Device = Annotated[
    Literal["auto", "cpu", "cuda"],
    Argument(
        flag="--device", group="measurement", choices=("auto", "cpu", "cuda"), help="default: a GPU if there is one",
    ),
]  # fmt: skip
NumberFormats = Annotated[
    Sequence[str],
    Argument(
        flag="--dtype", group="measurement", repeat=True, metavar="NAME",
        help="number format, such as bf16 or fp32; may be repeated (default: bf16 on a GPU, fp32 on a CPU)",
    ),
]  # fmt: skip
Processes = Annotated[
    int | str | None,
    Argument(
        flag="--processes", group="measurement", metavar="N",
        help="processes of a collective, or of a machine (default: its GPUs, or 2)",
    ),
]  # fmt: skip


def bench_machine(
    out: OutFile = None, device: Device = "auto", dtypes: NumberFormats = (), processes: Processes = None,
    progress: Progress = ignore_progress,
) -> MachineResult:  # fmt: skip
    """Time the operations of a few layers on the CPU, or on the GPUs, in all processes at once; write a cluster file to `out`,
    if given.

    Raises `InputError` for wrong settings.
    """
    settings = measure.BenchmarkSettings(device=device, dtypes=dtypes, processes=processes, out=out)
    return measure.run_machine_benchmark(settings, progress)


@verb(
    description="""Measure products, memory, attention or collectives on this machine, on its GPUs or its CPU, and add a JSON line
for each to --out. Lines that the file has of this machine already are not measured again, so a run that was cut short goes on
where it stopped. `shardwise calibrate CLUSTER --bench FILE` fits a cluster's constants to the lines.

`bench machine` times the operations of a few layers, and whole steps, in all --processes at once, on the GPUs of this machine or
on its CPU, for less than a minute, and writes a cluster file: plans for it say what `train` takes on this machine. A GPU of the
catalogue keeps its peaks, and what is measured are shares of them.""",
    examples=(
        "shardwise bench matmul --out machine.jsonl",
        "shardwise bench collectives --processes 8 --out machine.jsonl",
        "shardwise bench machine --device cuda --out gpu.toml",
        "shardwise bench machine --device cpu --processes 2 --out machine.toml",
    ),
    modes=(Mode(function=bench_machine, applies=lambda arguments: arguments["kind"] == "machine"),),
    group_order=("measurement", "output"),
    requires=("torch",),
)
def bench(
    kind: Annotated[
        BenchmarkKind,
        Argument(
            group="measurement", metavar="WHAT", choices=("matmul", "memory", "attention", "collectives", "all", "machine"),
            help="matmul, memory, attention, collectives or all of these; or machine",
        ),
    ],
    out: OutFile = None,
    device: Device = "auto",
    dtypes: NumberFormats = (),
    processes: Processes = None,
    progress: Progress = ignore_progress,
) -> BenchmarkResult:  # fmt: skip
    """Measure micro-benchmarks of a kind on this machine, and add their lines to the file `out` if that is given.

    Raises `InputError` for wrong settings and where PyTorch is not installed.
    """
    settings = measure.BenchmarkSettings(device=device, dtypes=dtypes, processes=processes, out=out)
    return measure.run_benchmarks(kind, settings, progress)


RESULTS_CLUSTER = "results_cluster"  # the flag --cluster where the words are results of serving benchmarks
CALIBRATED_LAUNCH = "launch"


def calibrate_serving_results(
    results: Sequence[str | os.PathLike[str]],
    cluster: str | os.PathLike[str],
    launch: Annotated[
        str | os.PathLike[str] | None,
        Argument(
            flag="--launch", group="serving results", metavar="TEXT",
            help="what was benchmarked: the engine's command line, script, manifest or folder (see: serve read)",
        ),
    ] = None,
    out: str | os.PathLike[str] | None = None,
) -> CalibratedServing:  # fmt: skip
    """Return the factors on an engine's predictions that results of its benchmark lead to; write them to `out`, if given.

    `results` are files of `vllm bench serve`, SGLang's `bench_serving` or genai-perf. Raises `InputError` for a file that is none
    of these, and for a launch that cannot be priced on the cluster.
    """
    if launch is None:
        raise InputError(
            "--launch: missing; results do not say how the engine was started: its command line is required, such as "
            '--launch "vllm serve Qwen/Qwen3-32B --tensor-parallel-size 4"'
        )
    benchmarked = [result for path in results for result in measure.read_bench_results(path)]
    reading = interop.read_serving(read_launch_texts(launch).texts)
    calibrated = measure.calibrate_launch(reading, load_cluster(os.fspath(cluster)), benchmarked)
    if out is not None:
        measure.write_serving_calibration(calibrated, out)
    return calibrated


def _is_json(path: str) -> bool:
    """Return True for a file that begins as a JSON object does, as results of benchmarks and no cluster's file do."""
    try:
        return read_text(path).lstrip().startswith("{")
    except InputError:
        return False


def _has_results(arguments: Mapping[str, Any]) -> bool:
    return (
        RESULTS_CLUSTER in arguments or CALIBRATED_LAUNCH in arguments or any(map(_is_json, arguments["cluster"]))
    )  # fmt: skip


def _check_results(arguments: Mapping[str, Any]) -> None:
    refused = [name for name in ("runs", "logged_runs", "bench", "stack", "name") if name in arguments]
    problems = [
        f"{argument_label(name)}: of trainings, found with results of a serving benchmark; leave it out"
        for name in refused
    ]
    if RESULTS_CLUSTER not in arguments:
        problems.append("--cluster: missing; what the engine ran on is required, such as --cluster h100:4")
    raise_problems(problems)


def _results_keywords(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**arguments, "results": arguments["cluster"], "cluster": arguments[RESULTS_CLUSTER]}


def _check_cluster(arguments: Mapping[str, Any]) -> None:
    clusters = arguments["cluster"]
    if len(clusters) > 1:
        raise InputError(
            f"CLUSTER: found {len(clusters)} words, {clusters[1]!r} among them; one cluster is required, or files of "
            "serving benchmarks' JSON and --cluster"
        )


@verb(
    description="""Fit what a chip, its network and a software stack reach to runs and micro-benchmarks on a cluster, from where
the published runs leave it, and write a cluster file that every verb then predicts with.

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
"backward": true the backward pass alone; "causal" and "backward" are false when left out.
What `shardwise kernels --json` prints on a GPU is read too: of each ladder its fastest rung.

Files with the JSON of `vllm bench serve`, of SGLang's bench_serving or of genai-perf in place of CLUSTER calibrate an engine that
serves: --launch says how it was started, --cluster on what, and --out keeps factors for serve estimate and serve plan
(--calibration).""",
    modes=(
        Mode(
            function=calibrate_serving_results,
            applies=_has_results,
            check=_check_results,
            keywords=_results_keywords,
        ),
        Mode(check=_check_cluster, keywords=lambda arguments: {**arguments, "cluster": arguments["cluster"][0]}),
    ),
    switches={
        RESULTS_CLUSTER: Argument(
            flag="--cluster",
            group="serving results",
            metavar="CLUSTER",
            completes="clusters",
            help="what the engine ran on, such as h100:4",
        )
    },
    examples=(
        "shardwise calibrate h100:512 --runs mine.csv --out my-cluster.toml",
        "shardwise calibrate h100:64 --run launch.sh train.log --run other.sh other.log --out my-cluster.toml",
        "shardwise calibrate my-cluster.toml --runs mine.csv --bench machine.jsonl --stack torchtitan --out my-cluster.toml",
        'shardwise calibrate results.json --cluster h100:4 --launch "vllm serve Qwen/Qwen3-32B -tp 4" --out serving.json',
    ),
    group_order=("cluster", "runs", "serving results", "output"),
)
def calibrate(
    cluster: Annotated[
        str | os.PathLike[str],
        Argument(
            group="cluster", metavar="CLUSTER", variadic=True,
            help="CHIP:COUNT or CHIP:SHAPE, such as h100:512, or a .toml file, whose calibration is replaced; or results of a "
            "serving benchmark",
        ),
    ],
    runs: Annotated[
        str | os.PathLike[str] | None,
        Argument(
            flag="--runs", group="runs", metavar="FILE",
            help="a CSV file with the columns of the published rows, or the ledger of an experiment",
        ),
    ] = None,
    logged_runs: Annotated[
        Sequence[Sequence[str | os.PathLike[str]]],
        Argument(
            flag="--run", group="runs", metavar="FILE", variadic=True, repeat=True,
            help="a run: the folder of one of `train`, or a plan or a launch and behind it the log; may be repeated",
        ),
    ] = (),
    bench: Annotated[
        str | os.PathLike[str] | None,
        Argument(flag="--bench", group="runs", metavar="FILE", help="a file of JSON lines, a micro-benchmark each"),
    ] = None,
    stack: Annotated[
        str | None,
        Argument(
            flag="--stack", group="cluster", metavar="NAME", completes="stacks",
            help="the software of all runs, such as torchtitan (default: what most rows name)",
        ),
    ] = None,
    name: Annotated[
        str | None,
        Argument(
            flag="--name", group="output", metavar="NAME",
            help="of the cluster that is written (default: that of the file)",
        ),
    ] = None,
    out: Annotated[
        str | os.PathLike[str] | None,
        Argument(
            flag="--out", group="output", metavar="FILE",
            help="write the cluster as a .toml file; without it only the report",
        ),
    ] = None,
    progress: Progress = ignore_progress,
) -> ClusterCalibration:  # fmt: skip
    """Fit the constants of a cluster and its software to runs and micro-benchmarks; write the cluster to `out` if that is given.

    `runs` is a CSV file of rows, `bench` one of JSON lines. Each of `logged_runs` is the folder of a run, or the files that say
    what ran with its log behind them. Raises `InputError` with everything that is wrong, and where nothing can be used.

    >>> import shardwise as sw
    >>> sw.calibrate("h100:8", bench="none.jsonl")
    Traceback (most recent call last):
    ...
    shardwise.values.errors.InputError: bench: cannot read none.jsonl: No such file or directory; the path of a file is required
    """
    files = measure.MeasurementFiles(runs=runs, logged_runs=logged_runs, bench=bench)
    return measure.calibrate_cluster(cluster, files, stack=stack, name=name, out=out, progress=progress)


Chip = Annotated[
    str | None,
    Argument(
        flag="--chip", group="runs", metavar="TEXT", completes="chips",
        help="only runs on chips whose name contains this, such as h100",
    ),
]  # fmt: skip
Source = Annotated[
    str | None,
    Argument(
        flag="--source", group="runs", metavar="TEXT",
        help="only runs whose source or software contains this, such as megatron",
    ),
]  # fmt: skip
Rows = Annotated[
    str | os.PathLike[str] | None,
    Argument(
        flag="--rows", group="runs", metavar="FILE",
        help="a CSV file with the columns of the published rows, in their place",
    ),
]  # fmt: skip


def validate_folds(
    chip: Chip = None, source: Source = None, rows: Rows = None, progress: Progress = ignore_progress
) -> PublishedFit:
    """Fit the constants without some of the runs and predict these, in turn. Raises `InputError` for too few runs."""
    return measure.evaluate_folds(measure.RowSelection(rows=rows, chip=chip, source=source), progress)


def validate_groups(progress: Progress = ignore_progress) -> RankedLayouts:
    """Compare the predicted order of layouts of one model on one machine with the measured one."""
    return measure.rank_published_layouts(progress)


def validate_serving(progress: Progress = ignore_progress) -> ServingValidation:
    """Predict published serving configurations, with families, chips, engines and sources left out in turn."""
    return measure.validate_serving_rows(progress)


def _refuse_beside(flag: str, names: Sequence[str]) -> Any:
    """Return a check that raises `InputError` for arguments beside a flag that has no use for them."""

    def check(arguments: Mapping[str, Any]) -> None:
        refused = [f"--{name}" for name in names if name in arguments]
        if refused:
            raise InputError(f"{flag}: found {', '.join(refused)} with it; leave out one or the other")

    return check


def _accuracy_charts(evaluated: EvaluatedRuns) -> tuple[charts.Chart, charts.Chart]:
    return charts.accuracy_charts(evaluated.runs)


def _validation_html(evaluated: EvaluatedRuns) -> str:
    return explorer.result_report("validate", "Predictions of published runs", evaluated)


@verb(
    description="""Predict the step time and the peak memory of published training runs, and compare. What was measured is
never read by a prediction. Runs of quality A and A- count, each 1 over the number of runs of the same configuration.""",
    examples=(
        "shardwise validate --chip h100 --source dgxc --plot h100.svg",
        "shardwise validate --rows mine.csv --json",
        "shardwise validate --groups",
        "shardwise validate --serving",
    ),
    switches={
        "folds": Argument(
            flag="--folds", group="judgement", parse=bool,
            help="fit without some of the runs and predict these: a new model, a new lab, a lab with three runs given (a minute)",
        ),
        "serving": Argument(
            flag="--serving", group="judgement", parse=bool,
            help="latencies of published serving configurations, with families, chips and engines left out in turn (a minute)",
        ),
        "groups": Argument(
            flag="--groups", group="judgement", parse=bool,
            help="layouts of one model measured beside each other: how often the predicted order and the pick are right",
        ),
    },
    modes=(
        Mode(
            function=validate_serving,
            applies=lambda arguments: "serving" in arguments,
            check=_refuse_beside("--serving", ("chip", "source", "rows", "plot", "bound", "folds", "groups", "report")),
        ),
        Mode(
            function=validate_groups,
            applies=lambda arguments: "groups" in arguments,
            check=_refuse_beside("--groups", ("chip", "source", "rows", "plot", "bound", "folds", "report")),
        ),
        Mode(
            function=validate_folds,
            applies=lambda arguments: "folds" in arguments,
            check=_refuse_beside("--folds", ("plot", "bound", "report")),
        ),
    ),
    exports=(
        picture("--plot", "draw predicted against measured step times, and the residuals", _accuracy_charts),
        html_report(_validation_html),
    ),
    group_order=("runs", "judgement", "output"),
)  # fmt: skip
def validate(
    chip: Chip = None,
    source: Source = None,
    rows: Rows = None,
    bound: Annotated[
        bool,
        Argument(
            flag="--bound", group="judgement",
            help="price at what micro-benchmarks reach, without the constants fitted to these runs",
        ),
    ] = False,
    progress: Progress = ignore_progress,
) -> EvaluatedRuns:  # fmt: skip
    """Predict published runs, or those of a CSV file `rows`: step time and peak memory beside what was measured.

    `chip` and `source` choose runs whose names contain them. Raises `InputError` when none is left.

    >>> import shardwise as sw
    >>> evaluated = sw.validate(source="simumax")
    >>> len(evaluated.runs), sum(abs(run.error) < 0.2 for run in evaluated.runs if run.error is not None) > 20
    (30, True)
    """
    selection = measure.RowSelection(rows=rows, chip=chip, source=source)
    return measure.evaluate_runs(selection, bound=bound, progress=progress)
