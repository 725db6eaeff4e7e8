"""`python -m shardwise.train`: train a plan with PyTorch on all devices of this machine; `torchrun ... -m shardwise.train`: one
rank of a run on any number of hosts.

`start_run` checks what needs no PyTorch and starts the ranks of this machine, which run this command again
(`run.launcher`); `rank_main` is one of them. `build_components` builds the components of a run on Shardwise's engine, with the
reader of stored weights. May import `run`, `interop`, `search` and the rooms below them.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from shardwise.model import Architecture
from shardwise.records import read_json
from shardwise.records.run_summary import format_summary
from shardwise.run import TrainingRecipe, check_run
from shardwise.run.faults.rank_status import end_with_parent, has_our_launcher
from shardwise.run.faults.stop_request import INTERRUPTED, StopRequest, report_once_per_host
from shardwise.run.folder_lock import require_free
from shardwise.run.launcher import launch_elastic, run_ranks
from shardwise.run.machine_resources import set_threads
from shardwise.run.recipe import Device
from shardwise.run.trainer.engine_prediction import engine_instance
from shardwise.run.trainer.flags import build_parser, parse_settings, to_command_line
from shardwise.search import Plan, load_plan
from shardwise.values import ShardwiseError, format_problems

if TYPE_CHECKING:
    from shardwise.interop.weights.stored_model import StoredModel
    from shardwise.run import TrainingEngine
    from shardwise.run.faults.agreement import RankGroup
    from shardwise.run.trainer.interfaces import CheckpointStore, RunComponents


def start_run(arguments: argparse.Namespace) -> Mapping[str, Any]:
    """Train a plan, and return the run's summary. A plan of one device runs in this process.

    Raises `ShardwiseError` for problems found before it starts, and `SystemExit` if the run itself reported why it ended: wrong
    input that only a rank could see, or a signal."""
    settings = parse_settings(arguments)
    settings.out.require_output_folder(resume=settings.resume, force=settings.force)
    require_free(settings.out.path)
    plan = load_plan(settings.plan)
    check_run(plan, settings)
    ranks = plan.layout.num_devices
    set_threads(ranks)
    if ranks > 1:
        argv = to_command_line(arguments)
        code = launch_elastic(argv, plan, settings.recipe.max_restarts) if settings.elastic else run_ranks(argv, ranks)
    else:
        from shardwise.run.trainer.worker import run_rank  # loads PyTorch

        code = run_rank(settings, build_components()).code
    if code:
        raise SystemExit(code)
    return read_json(settings.out.summary)


def rank_main(argv: Sequence[str] | None = None, parts: RunComponents | None = None) -> int:
    """Run one rank, with the engine's own components unless `parts` are given, and return its exit code.

    Exit codes are those of `shardwise`, or 128 plus the number of the signal."""
    arguments = build_parser().parse_args(argv)
    if "RANK" not in os.environ:
        return _run_rank(arguments, parts, None)
    end_with_parent()
    # Sockets whose other end has gone are no news: see c10/util/Logging.cpp.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with StopRequest(ends_process=True) as stop:
        return _run_rank(arguments, parts, stop)


def _run_rank(arguments: argparse.Namespace, parts: RunComponents | None, stop: StopRequest | None) -> int:
    try:
        set_threads(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))  # first: PyTorch reads it when it is loaded
        from shardwise.run.trainer.worker import run_rank  # loads PyTorch

        with report_once_per_host(stop):
            settings = parse_settings(arguments)
        return run_rank(settings, parts or build_components(), stop).code
    except ShardwiseError as error:
        print(format_problems(error.problems, error.exit_code, as_json=arguments.json), file=sys.stderr, flush=True)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED


def exit_now(code: int) -> NoReturn:
    """End the process at once, whatever threads wait in libraries for ranks that are lost."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_and_exit(run: Callable[[], int]) -> NoReturn:
    """Run a rank, and exit the process with its code."""
    try:
        code = run()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    exit_now(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, and print the summary on this host or, under torchrun, on the first rank."""
    arguments = build_parser().parse_args(argv)
    if "RANK" in os.environ:
        code = rank_main(argv)
        if code == 0 and os.environ["RANK"] == "0":
            print(format_summary(read_json(parse_settings(arguments).out.summary), as_json=arguments.json))
        return code
    try:
        print(format_summary(start_run(arguments), as_json=arguments.json))
    except ShardwiseError as error:
        print(format_problems(error.problems, error.exit_code, as_json=arguments.json), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def open_weights(folder: str, architecture: Architecture) -> Callable[[Any], None]:
    """Open a model stored in a folder of some framework, and return the function that loads its weights into an engine.

    Raises `InputError` for a model that cannot be read, or is another one."""
    from shardwise.interop.weights.convert import open_stored_model  # loads PyTorch

    return partial(load_stored_weights, stored=open_stored_model(folder, architecture))


def load_stored_weights(engine: TrainingEngine, stored: StoredModel) -> None:
    """Load a stored model into an engine, with the routers' biases if the files have them.

    A process reads only what it keeps."""
    engine.set_weights(lambda part: stored.read_flat(part.name, part.boxes()))
    for name, bias in engine.buffers():
        if name in stored.biases:
            bias.copy_(stored.bias(name))


def build_components() -> RunComponents:
    """Return the components of a run on Shardwise's own engine."""
    from shardwise.run.checkpoints import Checkpointer  # loads PyTorch
    from shardwise.run.parallel import world  # loads PyTorch
    from shardwise.run.trainer import trainer  # loads PyTorch
    from shardwise.run.trainer.interfaces import RunComponents  # loads PyTorch
    from shardwise.run.trainer.machine_probe import time_machine_probe  # loads PyTorch

    def join(plan: Plan, recipe: TrainingRecipe, device: Device) -> RankGroup:
        timeout = timedelta(seconds=recipe.timeout_s)
        place, rendezvous = world.join_world(device, timeout)
        return world.World(engine_instance(plan, recipe).mesh, place, rendezvous=rendezvous, timeout=timeout)

    def checkpoints(folder: Path, recipe: TrainingRecipe) -> CheckpointStore:
        return Checkpointer(
            folder, keep=recipe.keep_checkpoints, keep_every=recipe.keep_every,
            timeout=timedelta(seconds=recipe.timeout_s),
        )  # fmt: skip

    return RunComponents(
        join=join, leave=world.leave_world, probe=time_machine_probe, trainer=partial(trainer.Trainer, open_weights=open_weights),
        checkpoints=checkpoints,
    )  # fmt: skip


if __name__ == "__main__":
    if has_our_launcher():  # a rank of our launcher, which prints the summary itself
        run_and_exit(rank_main)
    sys.exit(main())
