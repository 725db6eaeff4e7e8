"""The ranks of a run on this machine: started in the environment that torchrun would give them, and ended together.

An `RunOutcome` says how they ended, which of them were lost, and whether the others can go on. An elastic run is then
started again on the processes that are left, with a plan that is searched for them.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, Queue
from typing import TYPE_CHECKING, Any

from shardwise.run.faults.rank_status import LAUNCHER, LOST_KEY, PREFIX, RESTART_REASON, LostRankError
from shardwise.run.faults.stop_request import SIGNALS, exit_code
from shardwise.run.trainer.preflight import replan_for
from shardwise.search.plan import Plan
from shardwise.values.errors import ShardwiseError
from shardwise.values.units import pluralize

if TYPE_CHECKING:
    from shardwise.run.faults.torch_stores import Store


MODULE = "shardwise.train"
HOST = "localhost"  # where the ranks meet: unreachable from elsewhere
# How long the others may take to end when one has: a rank that ends takes its connections with it. torchrun's `shutdown_timeout`.
LEAVE_S = 30.0
TICK_S = 0.2  # between two looks at signals and deadlines, where no rank ends


def run_ranks(arguments: Sequence[str], num_processes: int, module: str = MODULE) -> int:
    """Run `python -m MODULE ARGUMENTS` as ranks 0 to `num_processes` - 1 of one world on this machine, until all have ended.

    Its exit code: 0, or that of a rank that has said why it ended; 128 and the signal where this process was asked to stop. What
    ranks print goes where this process prints. Ranks end with this process too, however it ends (`run.faults.rank_status`).

    Raises `RunEndedError` for ranks that ended without a word, `LostRankError` where ranks have lost each other.
    """
    return launch_and_wait(arguments, num_processes, {}, module).code()


def launch_and_wait(
    arguments: Sequence[str], num_processes: int, extra_environment: Mapping[str, str], module: str = MODULE
) -> RunOutcome:
    """The same, and how it ended, whatever that is. `extra_environment` is added to the environment of the ranks."""
    rank_processes, server = _RankProcesses(), socket.create_server((HOST, 0))
    port = server.getsockname()[1]
    previous_handlers = {signum: signal.signal(signum, rank_processes.stop) for signum in SIGNALS}
    try:
        command = [sys.executable, "-m", module, *arguments]
        for rank in range(num_processes):
            rank_processes.start(command, {**rank_environment(rank, num_processes, port), **extra_environment})
        from shardwise.run.faults.torch_stores import TCPStore  # as the ranks load PyTorch

        store = TCPStore(HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach())
        codes = rank_processes.wait()
        report = read_report(store, f"{PREFIX}/{LOST_KEY}") if LOST_CODE in codes.values() else ""
        return RunOutcome(codes, rank_processes.killed, rank_processes.asked, report)
    finally:
        rank_processes.kill()
        server.close()
        for signum, handler in previous_handlers.items():
            signal.signal(signum, handler)


def rank_environment(rank: int, num_processes: int, port: int) -> dict[str, str]:
    """What torchrun would tell a rank, and who started it."""
    variables = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_processes, "LOCAL_WORLD_SIZE": num_processes,
        "MASTER_ADDR": HOST, "MASTER_PORT": port, LAUNCHER: os.getpid(),
        # the store is here, and not on rank 0 (torch.distributed.rendezvous, `_torchelastic_use_agent_store`)
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }  # fmt: skip
    return {**os.environ, **{name: str(value) for name, value in variables.items()}}


def read_report(store: Store, key: str) -> str:
    """What ranks have said in the run's store."""
    return (
        store.get(key).decode()
        if store.check([key])
        else "ranks lost their connections to each other, and none reported a reason"
    )


class _RankProcesses:
    """The processes, and how those that have ended did."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ended: Queue[int] = Queue()
        self.asked = 0
        self.killed: set[int] = set()

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        rank, process = len(self._processes), subprocess.Popen(command, env=environment)
        self._processes.append(process)

        def wait() -> None:
            process.wait()
            self._ended.put(rank)

        threading.Thread(target=wait, daemon=True).start()

    def stop(self, signum: int, frame: Any) -> None:
        """Asked to stop: the ranks are asked in turn."""
        self.asked = self.asked or signum

    def wait(self) -> dict[int, int]:
        """Until all have ended: the exit code of each. Those that hang are killed."""
        codes: dict[int, int] = {}
        deadline, sent_signal = float("inf"), 0
        while len(codes) < len(self._processes):
            try:
                rank = self._ended.get(timeout=TICK_S)
                codes[rank] = self._processes[rank].returncode
                deadline = min(deadline, time.monotonic() + (LEAVE_S if codes[rank] else STOP_S))
            except Empty:
                pass
            if not sent_signal and (sent_signal := self.asked or (signal.SIGTERM if any(codes.values()) else 0)):
                deadline = min(deadline, time.monotonic() + STOP_S)
                self._send(sent_signal)
            if time.monotonic() > deadline:
                self.kill()
        return codes

    def _send(self, signum: int) -> None:
        """Send a signal to all that run, and wake those that are stopped (SIGSTOP), so that they receive it."""
        for process in self._processes:
            process.send_signal(signum)
            process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End what still runs."""
        for rank, process in enumerate(self._processes):
            if process.poll() is None:
                self.killed.add(rank)
                process.kill()


# How long ranks that are asked to stop may take for the step that they are in and its checkpoint, before they are killed.
STOP_S = 600.0
INPUT_ERROR_CODES = (2, 3)  # codes with which a rank has said what is wrong with the input
LOST_CODE = LostRankError.exit_code
STOPPED_CODES, SIGNALLED_CODES = (
    tuple(exit_code(signum) for signum in SIGNALS),
    tuple(-signum for signum in SIGNALS),
)  # by a handler, and without one


class RunEndedError(ShardwiseError):
    """Ranks have ended, and none of them could say why."""

    exit_code = 1


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """The exit code of each rank, as `subprocess` has it; the ranks that hung and were `killed` by the launcher; the signal by
    which the launcher was `asked` to stop, or 0; `report`: what ranks said that had lost another, which may be named already.

    >>> outcome = RunOutcome({0: LOST_CODE, 1: -signal.SIGKILL})
    >>> outcome.lost, outcome.can_restart
    ((1,), True)
    """

    codes: Mapping[int, int]
    killed: Collection[int] = ()
    asked: int = 0
    report: str = ""

    @property
    def lost(self) -> tuple[int, ...]:
        """The ranks that a signal has ended that is no request to stop, and those that hung."""
        signalled = (rank for rank, code in self.codes.items() if code < 0 and code not in SIGNALLED_CODES)
        return tuple(sorted({*signalled, *self.killed}))

    @property
    def can_restart(self) -> bool:
        """Whether the run has ended only because some of its ranks were lost, or the connections between them."""
        has_input_error = any(code in INPUT_ERROR_CODES for code in self._failed_codes.values())
        if self.asked or has_input_error or len(self.lost) == len(self.codes):
            return False
        return bool(self.lost) or (LOST_CODE in self._failed_codes.values() and not self._unexplained)

    def code(self) -> int:
        """The code of a rank that has said what is wrong with the input, or of the signal by which the run was stopped; 0.

        Raises `RunEndedError` for ranks that ended without a word, `LostRankError` where ranks have lost each other.
        """
        input_error_codes = [code for code in self._failed_codes.values() if code in INPUT_ERROR_CODES]
        if input_error_codes:
            return input_error_codes[0]
        if self._unexplained:
            raise RunEndedError(*(_describe_exit(rank, code) for rank, code in self._unexplained.items()))
        if LOST_CODE in self._failed_codes.values():
            raise LostRankError(self.report)
        if self.killed and not self._failed_codes:
            late_ranks = ", ".join(map(str, sorted(self.killed)))
            raise RunEndedError(f"ranks {late_ranks} had not ended {STOP_S:g} s after the others, and were killed")
        stop_codes = [code if code > 0 else exit_code(-code) for code in self._failed_codes.values()]
        return exit_code(self.asked) if self.asked and stop_codes else next(iter(stop_codes), 0)

    @property
    def _failed_codes(self) -> dict[int, int]:
        """The codes, but 0, of the ranks that ended by themselves."""
        return {rank: code for rank, code in sorted(self.codes.items()) if code and rank not in self.killed}

    @property
    def _unexplained(self) -> dict[int, int]:
        """Those of the ranks that ended without a word."""
        return {
            rank: code
            for rank, code in self._failed_codes.items()
            if code not in (*INPUT_ERROR_CODES, LOST_CODE, *STOPPED_CODES, *SIGNALLED_CODES)
        }


def _describe_exit(rank: int, code: int) -> str:
    ending = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
    hint = "; the system may have run out of memory" if code == -signal.SIGKILL else ""
    return f"rank {rank} ended with {ending}{hint}"


VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


def replan_for_at_most(plan: Plan, num_devices: int) -> Plan:
    """The plan for the most devices, of at most so many, for which there is one.

    Raises what is wrong with `num_devices` where there is none for fewer either.
    """
    problems: list[ShardwiseError] = []
    for count in range(num_devices, 0, -1):
        try:
            return replan_for(plan, count)
        except ShardwiseError as error:
            problems.append(error)
    raise problems[0]


def launch_elastic(arguments: Sequence[str], plan: Plan, max_restarts: int) -> int:
    """Run the ranks of a plan on this machine as `run_ranks` does, and again on the processes that are left where some were lost.

    Each time they go on from the newest whole checkpoint, with a plan for at most as many devices as processes are left. A GPU
    whose rank was lost is not used again. Raises as `run_ranks` does for what is no loss of ranks, `RunEndedError` for one after
    `max_restarts`, and what is wrong with the number of devices that are left where no plan for them is legal and fits.
    """
    devices, extra_environment = list(range(plan.layout.num_devices)), dict[str, str]()
    for restart in range(1, max_restarts + 2):
        outcome = launch_and_wait(arguments, len(devices), extra_environment)
        if not outcome.can_restart:
            return outcome.code()
        reason = _failure_reason(outcome)
        if restart <= max_restarts:
            remaining_devices = [device for rank, device in enumerate(devices) if rank not in outcome.lost]
            status = f"{reason}; {len(remaining_devices)} of {pluralize(len(devices), 'rank')} can go on"
            print(f"restart {restart} of at most {max_restarts}: {status}", file=sys.stderr, flush=True)
            devices = remaining_devices[: replan_for_at_most(plan, len(remaining_devices)).layout.num_devices]
            extra_environment = {RESTART_REASON: reason, **_gpu_environment(devices)}
    raise RunEndedError(
        f"{reason}; recipe.max_restarts allows {pluralize(max_restarts, 'restart')}, and there were as many"
    )


def _failure_reason(outcome: RunOutcome) -> str:
    """What the launcher would have reported."""
    try:
        outcome.code()
    except ShardwiseError as error:
        return "; ".join(error.problems)
    return ""


def _gpu_environment(devices: Sequence[int]) -> dict[str, str]:
    """The environment in which ranks see the GPUs of those that are left alone, of those that this process may use."""
    ids = os.environ.get(VISIBLE_DEVICES, ",".join(map(str, range(max(devices) + 1)))).split(",")
    return {VISIBLE_DEVICES: ",".join(ids[device] for device in devices if device < len(ids))}
