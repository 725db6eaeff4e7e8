"""`batch`: how large a batch pays. Its kinds are functions of their own: noise, sweep, branch and fit."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from shardwise import batch_size, measure
from shardwise.batch_size.branch_losses import LOSS_TOLERANCE
from shardwise.batch_size.run_noise import run_noise
from shardwise.present import charts
from shardwise.present.exports import picture
from shardwise.present.requirements import require_packages
from shardwise.present.verb import Argument, Mode, read_arguments, verb
from shardwise.run.recipe import BATCH_LR_RULES
from shardwise.values import InputError, argument_label, parse_quantity, raise_problems

if TYPE_CHECKING:
    from shardwise.batch_size import BranchOutcome, RunNoise, SweepFit, SweptRuns
    from shardwise.run.recipe import BatchLrRule

    BatchResult = RunNoise | SweptRuns | BranchOutcome | SweepFit

Kind = Literal["noise", "sweep", "branch", "fit"]
KINDS: tuple[Kind, ...] = ("noise", "sweep", "branch", "fit")
SOURCES = {
    "noise": "the folder of a run of `shardwise train --noise-scale-every N`",
    "sweep": "a plan",
    "branch": "the folder of a run with a checkpoint, or of branches that were made",
    "fit": "the folder of a sweep, or a CSV file",
}
PICTURES = {
    "noise": "the noise scale over the tokens seen",
    "branch": "the losses of the branches by batch, and the tolerance",
    "fit": "steps against tokens, and the knee",
}
PathLike = str | os.PathLike[str]
Source = Annotated[
    "str | os.PathLike[str]",
    Argument(
        group="batch", metavar="PATH", help="; ".join(f"of {kind}: {source}" for kind, source in SOURCES.items()),
    ),
]  # fmt: skip
EXPERIMENTS_REQUIRE = ("torch",)  # packages that make the runs of a sweep and of branches
SWEEP, BRANCH, RUNS = "of sweep", "of branch", "of sweep and branch"  # groups of flags
Batches = Annotated[
    "str | Sequence[int | str] | None",
    Argument(
        flag="--batches", group=RUNS, metavar="RANGE",
        help="tokens of the batches, such as 4Ki:256Ki:x2 or 4Ki,16Ki,64Ki",
    ),
]  # fmt: skip
Data = Annotated[
    "Sequence[str]",
    Argument(
        flag="--data", group=RUNS, repeat=True, metavar="DIR[=WEIGHT]",
        help="token shards, as `train` takes them (default of branch: those of the run)",
    ),
]  # fmt: skip
OutFolder = Annotated[
    "str | os.PathLike[str] | None",
    Argument(
        flag="--out", group=RUNS, metavar="DIR", help="the folder of these runs; those that are in it go on",
    ),
]  # fmt: skip
Processes = Annotated[
    "int | str | None",
    Argument(
        flag="--processes", group=RUNS, metavar="N",
        help="runs side by side (default: as many as the host has cores for)",
    ),
]  # fmt: skip


def print_progress(text: str) -> None:
    """Print a line of progress on the error stream."""
    print(text, file=sys.stderr, flush=True)


def batch_noise(source: Source) -> RunNoise:
    """Return the gradient noise scale that the run in a folder measured. Raises `InputError` where no step measured it."""
    return run_noise(Path(source))


def batch_sweep(
    source: Source,
    batches: Batches = None,
    data: Data = (),
    out: OutFolder = None,
    processes: Processes = None,
    to_loss: Annotated[
        float | str | None,
        Argument(
            flag="--to-loss", group=SWEEP, metavar="X", help="the smoothed training loss in nats at which each run ends",
        ),
    ] = None,
    seeds: Annotated[
        int | str,
        Argument(flag="--seeds", group=SWEEP, metavar="N", help="runs of each batch at its best rate (default: 3)"),
    ] = 3,
    learning_rate: Annotated[
        float | str,
        Argument(
            flag="--learning-rate", group=SWEEP, metavar="X",
            help="that of the plan's batch; other batches begin with the square root rule's, and half and double of the best are "
            "tried until it lies between them (default: 3e-4)",
        ),
    ] = "3e-4",
    learning_rates: Annotated[
        str | Sequence[float | str],
        Argument(
            flag="--learning-rates", group=SWEEP, metavar="LIST", parse=str,
            help="try these at every batch instead: 1e-3,2e-3,4e-3",
        ),
    ] = (),
    steps: Annotated[
        int | str,
        Argument(flag="--steps", group=SWEEP, metavar="N", help="at most of each run (default: 10000)"),
    ] = 10_000,
    warmup: Annotated[
        int | str,
        Argument(
            flag="--warmup", group=SWEEP, metavar="N", help="steps in which the learning rate rises (default: 10)",
        ),
    ] = 10,
    overrides: Annotated[
        Sequence[str],
        Argument(
            flag="--set", group=SWEEP, repeat=True, metavar="KEY=VALUE",
            help="a value of the recipe of all runs; may be repeated",
        ),
    ] = (),
    report: Callable[[str], None] = print_progress,
) -> SweptRuns:  # fmt: skip
    """Train the model of a plan at several batches to one loss, each with a learning rate and seeds of its own.

    Each run is a process; `report` gets a line when one has ended. The same call goes on with the folder `out`. Raises
    `InputError` with everything that is wrong, and `SystemExit` if it is stopped by a signal.
    """
    require_packages("batch sweep", EXPERIMENTS_REQUIRE)
    request = measure.SweepRequest(
        plan=source, batches=batches, to_loss=to_loss, data=data, out=out, seeds=seeds, learning_rate=learning_rate,
        learning_rates=learning_rates, steps=steps, warmup=warmup, changes=overrides, processes=processes,
    )  # fmt: skip
    return measure.run_batch_sweep(request, report)


def batch_branch(
    source: Source,
    batches: Batches = None,
    data: Data = (),
    out: OutFolder = None,
    processes: Processes = None,
    tokens: Annotated[
        int | str | None,
        Argument(
            flag="--tokens", group=BRANCH, metavar="N", help="the window: tokens that each branch is trained on",
        ),
    ] = None,
    step: Annotated[
        int | str | None,
        Argument(flag="--step", group=BRANCH, metavar="N", help="that of the checkpoint (default: the newest)"),
    ] = None,
    batch_lr: Annotated[
        BatchLrRule,
        Argument(
            flag="--batch-lr", group=BRANCH, choices=tuple(BATCH_LR_RULES),
            help="how the learning rate follows the batch: sqrt of Adam, linear of SGD (default: sqrt)",
        ),
    ] = "sqrt",
    tolerance: Annotated[
        float | str,
        Argument(
            flag="--tolerance", group=BRANCH, metavar="X",
            help=f"nats above the best of smaller batches that count as nothing lost (default: {LOSS_TOLERANCE:g})",
        ),
    ] = LOSS_TOLERANCE,
    report: Callable[[str], None] = print_progress,
) -> BranchOutcome:  # fmt: skip
    """Go on from the checkpoint of a run at several batches over the same samples, and find the largest that loses nothing.

    `source` is the folder of a run, or of branches that were made, which are compared. Each branch is a process; `report` gets a
    line when one has ended. Raises `InputError` with everything that is wrong, and `SystemExit` if it is stopped by a signal.
    """
    nats = parse_quantity(str(tolerance), label=argument_label("tolerance"), unit="")
    batch_size.require_tolerance(nats)
    if batch_size.is_branch_folder(source):
        run_arguments = {
            "batches": batches, "data": data, "out": out, "processes": processes, "tokens": tokens, "step": step,
        }  # fmt: skip
        _refuse_run_arguments(source, [name for name, value in run_arguments.items() if value])
        return batch_size.read_branch_outcome(source, nats)
    require_packages("batch branch", EXPERIMENTS_REQUIRE)
    request = measure.BranchRequest(
        run=source,
        batches=batches,
        tokens=tokens,
        step=step,
        data=data,
        out=out,
        batch_lr=batch_lr,
        processes=processes,
    )
    return measure.run_checkpoint_branches(request, report, nats)


def _refuse_run_arguments(folder: PathLike, names: Sequence[str]) -> None:
    """Raise `InputError` for arguments that branches which have been run leave no room for."""
    if names:
        labels = ", ".join(map(argument_label, names))
        raise InputError(
            f"{labels}: {folder} holds branches that were made; leave out, or the folder of a run is required"
        )


def batch_fit(source: Source) -> SweepFit:
    """Fit the fewest steps and tokens to a loss, and the critical batch between them, to the runs of a sweep.

    `source` is the folder of a sweep, or a CSV file with the columns batch_tokens, steps and seed. Raises `InputError` for runs
    that cannot be fitted.
    """
    return batch_size.fit_sweep(source)


EXPERIMENTS: Mapping[Kind, Callable[..., BatchResult]] = {
    "noise": batch_noise,
    "sweep": batch_sweep,
    "branch": batch_branch,
    "fit": batch_fit,
}


def _mode(kind: Kind) -> Mode:
    """Return the mode of a kind, which refuses flags of the others, and a picture if it draws none."""

    def check(arguments: Mapping[str, Any]) -> None:
        problems: dict[str, list[str]] = {}
        for name in arguments:
            kinds = [key for key, function in EXPERIMENTS.items() if name in read_arguments(function)]
            if kinds and kind not in kinds:
                verbs = " or ".join(f"`shardwise batch {key}`" for key in kinds)
                problems.setdefault(verbs, []).append(argument_label(name))
        raise_problems(
            [
                f"{', '.join(flags)}: not of `batch {kind}`; leave out, or {verbs} is required"
                for verbs, flags in problems.items()
            ]
        )
        if "plot" in arguments and kind not in PICTURES:
            raise InputError(f"--plot: `batch {kind}` draws nothing; leave it out")

    return Mode(function=EXPERIMENTS[kind], applies=lambda arguments: arguments["kind"] == kind, check=check)


def _draw(result: Any) -> charts.Chart:
    if isinstance(result, batch_size.BranchOutcome):
        return charts.branches_chart(result.point, result.compared)
    return (
        charts.pareto_chart(result.fit) if isinstance(result, batch_size.SweepFit) else charts.run_noise_chart(result)
    )


@verb(
    description="""How large a batch pays. `noise` gives the gradient noise scale that a run measured. `sweep` trains a plan's
model at several batches to one loss. `branch` goes on from a run's checkpoint at several batches, over the
same samples, and finds the largest that loses nothing. `fit` finds the fewest steps and the fewest tokens
to a loss, and between them the critical batch, from runs at several batches: the folder of a sweep with its
runs.jsonl, or a CSV file with the columns batch_tokens, steps and seed.""",
    examples=(
        "shardwise batch noise runs/a --plot noise.svg",
        "shardwise batch sweep plan.json --data data --batches 4Ki:256Ki:x2 --to-loss 4.2 --out sweep/",
        "shardwise batch fit sweep/ --plot pareto.svg",
        "shardwise batch branch runs/a --batches 64Ki:1Mi:x2 --tokens 100M --out branches/ --plot branches.svg",
        "shardwise batch fit runs.csv --json",
    ),
    modes=tuple(map(_mode, KINDS)),
    exports=(
        picture("--plot", f"draw {'; '.join(f'of {kind}: {subject}' for kind, subject in PICTURES.items())}", _draw),
    ),
    requires_for={"batch sweep and batch branch": EXPERIMENTS_REQUIRE},
    group_order=("batch", RUNS, SWEEP, BRANCH, "output"),
)
def batch(
    kind: Annotated[Kind, Argument(group="batch", metavar="WHAT", choices=KINDS, help=" or ".join(KINDS))],
    source: Source,
    **arguments: Any,
) -> BatchResult:
    """Run the experiment of a kind: `batch("sweep", "plan.json", ...)` is `batch_sweep("plan.json", ...)`.

    `noise`: the noise scale that a run measured. `sweep`: runs of a plan at several batches to one loss. `branch`: branches of a
    checkpoint at several batches. `fit`: the critical batch of a sweep. Raises `InputError` as the experiment does.

    >>> batch("fit", "none.csv")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    shardwise.values.errors.InputError: none.csv: cannot read: ...
    """
    return EXPERIMENTS[kind](source, **arguments)
