"""A run's processes on this machine, started as torchrun starts them; without its noise when one of them ends with an error."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.train.stop import SIGNALS, exit_code

MODULE = "shardwise.train.rank"
# How long ranks that are asked to stop may take for the step that they are in and its checkpoint, before they are killed.
STOP_S = 600
# Codes with which a rank has said what there is to say: wrong input, what does not fit, a signal that stopped the run.
SAID = (2, 3, *(exit_code(one) for one in SIGNALS))


def set_threads(processes: int) -> None:
    """Give each of the processes of this host its share of the cores, unless OMP_NUM_THREADS is set; before PyTorch is loaded."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(cores // processes, 1)))


def launch(arguments: Sequence[str], processes: int, module: str = MODULE) -> int:
    """Run `python -m MODULE ARGUMENTS` as ranks 0 to `processes` - 1 of one world on this machine, until all have ended.

    Its exit code: 0, or that of a rank that ended with another; 128 and the signal where this process was asked to stop. What
    ranks print goes where this process prints.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # our ranks say what is wrong
    before = {one: signal.getsignal(one) for one in SIGNALS}
    try:
        with tempfile.TemporaryDirectory() as logs:
            config = LaunchConfig(
                min_nodes=1, max_nodes=1, nproc_per_node=processes, run_id=str(uuid.uuid4()), role=MODULE,
                rdzv_backend="c10d", rdzv_endpoint="localhost:0", local_addr="localhost", max_restarts=0,
                logs_specs=DefaultLogsSpecs(log_dir=logs), shutdown_timeout=STOP_S,
                signals_to_handle=",".join(one.name for one in SIGNALS),
            )  # fmt: skip
            elastic_launch(config, sys.executable)("-m", module, *arguments)
    except ChildFailedError as error:
        return _code_of(error.failures)
    except SignalException as error:
        return exit_code(error.sigval)
    finally:
        logging.disable(disabled)
        for one, handler in before.items():
            signal.signal(one, handler)
    return 0


def _code_of(failures: Mapping[int, Any]) -> int:
    """The code of a rank that has said what is wrong; if none has, 1, and who ended how."""
    codes = {rank: failure.exitcode for rank, failure in sorted(failures.items())}
    said = [code for code in codes.values() if code in SAID]
    if said:
        return int(said[0])
    for rank, code in codes.items():
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        hint = "; the system may have run out of memory" if code == -signal.SIGKILL else ""
        print(f"error: rank {rank} ended with {how}{hint}", file=sys.stderr)
    return 1
