"""Start the ranks of a run on this machine in the environment that torchrun would give them, and end them together.

A `RunOutcome` says how they ended, which of them were lost, and whether the others can go on. An elastic run is then
started again on the remaining processes, with a plan that is searched for them.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, Queue
from typing import TYPE_CHECKING, Any

from shardwise.run.faults.rank_status import LAUNCHER, LOST_KEY, PREFIX, RESTART_REASON, STEPS_KEY, LostRankError
from shardwise.run.faults.stop_request import SIGNALS, exit_code
from shardwise.run.trainer.preflight import replan_for
from shardwise.search import Plan
from shardwise.values import ShardwiseError, pluralize

if TYPE_CHECKING:
    from shardwise.run.faults.torch_stores import Store


MODULE = "shardwise.train"
HOST = "localhost"  # of the rendezvous: unreachable from other machines
# Seconds that other ranks may take to end after one has, as its connections close. torchrun's `shutdown_timeout`.
LEAVE_S = 30.0
# Likewise before the first step, where they have no checkpoint to write, and the launcher knows what has ended the run.
LEAVE_BEFORE_STEPS_S = 2.0
CLOSED = -1  # of a socket, in place of its descriptor
TICK_S = 0.2  # seconds between two checks of signals and deadlines while no rank ends


def run_ranks(arguments: Sequence[str], num_processes: int, module: str = MODULE) -> int:
    """Run `python -m MODULE ARGUMENTS` as ranks 0 to `num_processes` - 1 of one world on this machine, until all have
    ended.

    Returns the exit code: 0, the code of a rank that reported why it ended, or 128 plus the signal by which this
    process was stopped. Ranks print where this process prints, and end with this process however it ends
    (`run.faults.rank_status`).

    Raises `RunEndedError` for ranks that ended without a report, `LostRankError` where ranks have lost each other.
    """
    return launch_and_wait(arguments, num_processes, {}, module).code()


def launch_and_wait(
    arguments: Sequence[str], num_processes: int, extra_environment: Mapping[str, str], module: str = MODULE
) -> RunOutcome:
    """Run ranks as `run_ranks` does, and return how they ended without raising. `extra_environment` is added to the
    environment of the ranks."""
    rank_processes, server = _RankProcesses(), _StoreServer()
    previous_handlers = {signum: signal.signal(signum, rank_processes.stop) for signum in SIGNALS}
    try:
        command = [sys.executable, "-m", module, *arguments]
        for rank in range(num_processes):
            rank_processes.start(command, {**rank_environment(rank, num_processes, server.port), **extra_environment})
        server.start()
        codes = rank_processes.wait(server.has_begun)
        report = read_report(server.store, f"{PREFIX}/{LOST_KEY}") if LOST_CODE in codes.values() else ""
        return RunOutcome(codes, rank_processes.killed, rank_processes.stop_signal, report)
    finally:
        rank_processes.kill()
        server.close()
        for signum, handler in previous_handlers.items():
            signal.signal(signum, handler)


def rank_environment(rank: int, num_processes: int, port: int) -> dict[str, str]:
    """Return the environment that torchrun would give a rank, with the process id of this launcher."""
    variables = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_processes, "LOCAL_WORLD_SIZE": num_processes,
        "MASTER_ADDR": HOST, "MASTER_PORT": port, LAUNCHER: os.getpid(),
        # the store is here, and not on rank 0 (torch.distributed.rendezvous, `_torchelastic_use_agent_store`)
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }  # fmt: skip
    return {**os.environ, **{name: str(value) for name, value in variables.items()}}


def read_report(store: Store, key: str) -> str:
    """Return the report that a rank left under a key of the run's store."""
    return (
        store.get(key).decode()
        if store.check([key])
        else "ranks lost their connections to each other, and none reported a reason"
    )


class _StoreServer:
    """The store through which the ranks of a run meet, on a port of this machine; until it serves, connections wait.

    A thread loads PyTorch for it, which takes seconds and longer on a busy machine: ranks that end meanwhile are noticed.
    """

    def __init__(self) -> None:
        self._socket = socket.create_server((HOST, 0))
        self.port: int = self._socket.getsockname()[1]
        self._store: Future[Store] = Future()
        # Not a daemon: the interpreter cannot end while a thread loads PyTorch. An error is printed before it waits for this one.
        self._thread = threading.Thread(target=self._serve)

    def start(self) -> None:
        """Load PyTorch and serve; called after the ranks were started, which load it at the same time."""
        self._thread.start()

    def _serve(self) -> None:
        try:
            from shardwise.run.faults.torch_stores import TCPStore

            descriptor = self._socket.detach()
            if descriptor != CLOSED:
                self._store.set_result(
                    TCPStore(HOST, self.port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)
                )
        except Exception as error:
            self._store.set_exception(error)

    @property
    def store(self) -> Store:
        """The store, waited for. Raises the error that it could not be served with."""
        return self._store.result()

    def has_begun(self) -> bool:
        """Return whether ranks have come to their first step. Raises as `store` does."""
        return self._store.done() and self.store.check([f"{PREFIX}/{STEPS_KEY}"])

    def close(self) -> None:
        """Close the port if the store does not serve it yet."""
        self._socket.close()


class _RankProcesses:
    """The processes of the ranks, and the exit codes of those that have ended."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ended: Queue[int] = Queue()
        self.stop_signal = 0
        self.killed: set[int] = set()
        self._dismissed: set[int] = set()  # ended because another rank was lost before the first step

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        rank, process = len(self._processes), subprocess.Popen(command, env=environment)
        self._processes.append(process)

        def wait() -> None:
            process.wait()
            self._ended.put(rank)

        threading.Thread(target=wait, daemon=True).start()

    def stop(self, signum: int, frame: Any) -> None:
        """Handle a signal: remember it, so that `wait` passes it on to the ranks."""
        self.stop_signal = self.stop_signal or signum

    def wait(self, has_begun: Callable[[], bool] = lambda: True) -> dict[int, int]:
        """Wait until all have ended, killing those that hang; return the exit code of each. `has_begun` returns whether ranks
        have come to their first step: until then a rank that ends without a report ends the others soon."""
        codes: dict[int, int] = {}
        deadline, sent_signal, dismissal = float("inf"), 0, float("inf")
        in_steps = False
        while len(codes) < len(self._processes):
            in_steps = in_steps or has_begun()
            try:
                rank = self._ended.get(timeout=TICK_S)
                codes[rank] = SIGTERM_CODE if rank in self._dismissed else self._processes[rank].returncode
                deadline = min(deadline, time.monotonic() + (LEAVE_S if codes[rank] else STOP_S))
                if not has_known_reason(codes[rank]) and not in_steps:
                    dismissal = min(dismissal, time.monotonic() + LEAVE_BEFORE_STEPS_S)
            except Empty:
                pass
            if not sent_signal and (sent_signal := self.stop_signal or (signal.SIGTERM if any(codes.values()) else 0)):
                deadline = min(deadline, time.monotonic() + STOP_S)
                self._send(sent_signal)
            if time.monotonic() > dismissal:
                self._dismissed |= set(self._alive())
                self._kill(self._dismissed)
            elif time.monotonic() > deadline:
                self.kill()
        return codes

    def _send(self, signum: int) -> None:
        """Send a signal to all ranks, and SIGCONT to those that are stopped, so that they receive it."""
        for process in self._processes:
            process.send_signal(signum)
            process.send_signal(signal.SIGCONT)

    def _alive(self) -> list[int]:
        return [rank for rank, process in enumerate(self._processes) if process.poll() is None]

    def _kill(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self._processes[rank].kill()

    def kill(self) -> None:
        """Kill the processes that still run."""
        hanging = self._alive()
        self.killed.update(hanging)
        self._kill(hanging)


# Seconds that stopped ranks may take for the current step and its checkpoint, before they are killed.
STOP_S = 600.0
INPUT_ERROR_CODES = (2, 3)  # codes of ranks that reported wrong input
LOST_CODE = LostRankError.exit_code
SIGTERM_CODE = exit_code(signal.SIGTERM)
# of ranks that a request to stop ended: by a handler, and without one
STOPPED_CODES, SIGNALLED_CODES = (tuple(exit_code(signum) for signum in SIGNALS), tuple(-signum for signum in SIGNALS))


class RunEndedError(ShardwiseError):
    """Ranks ended, and none of them could report why."""

    exit_code = 1


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """Outcome of a run: how its ranks ended.

    `codes`: the exit code of each rank, as `subprocess` has it. `killed`: ranks that hung and were killed by the
    launcher. `stop_signal`: the signal by which the launcher was stopped, or 0. `report`: the report of ranks that lost
    another; it may name it.

    >>> outcome = RunOutcome({0: LOST_CODE, 1: -signal.SIGKILL})
    >>> outcome.lost, outcome.can_restart
    ((1,), True)
    """

    codes: Mapping[int, int]
    killed: Collection[int] = ()
    stop_signal: int = 0
    report: str = ""

    @property
    def lost(self) -> tuple[int, ...]:
        """The ranks that hung, or were ended by a signal that is no request to stop."""
        signalled = (rank for rank, code in self.codes.items() if code < 0 and code not in SIGNALLED_CODES)
        return tuple(sorted({*signalled, *self.killed}))

    @property
    def can_restart(self) -> bool:
        """True if the run ended only because ranks, or connections between ranks, were lost."""
        if self.stop_signal or self._input_error_codes or len(self.lost) == len(self.codes):
            return False
        return bool(self.lost) or (LOST_CODE in self._failed_codes.values() and not self._unexplained)

    def code(self) -> int:
        """Return 0, the code of a rank that reported wrong input, or the code of the signal by which the run was
        stopped.

        Raises `RunEndedError` for ranks that ended without a report, `LostRankError` where ranks have lost each other.
        """
        if self.failure is not None:
            raise self.failure
        if self._input_error_codes:
            return self._input_error_codes[0]
        stop_codes = [code if code > 0 else exit_code(-code) for code in self._failed_codes.values()]
        return exit_code(self.stop_signal) if self.stop_signal and stop_codes else next(iter(stop_codes), 0)

    @property
    def failure(self) -> ShardwiseError | None:
        """The error that the launcher reports, if no rank has reported one."""
        if self._input_error_codes:
            return None
        if self._unexplained:
            return RunEndedError(*(_describe_exit(rank, code) for rank, code in self._unexplained.items()))
        if LOST_CODE in self._failed_codes.values():
            return LostRankError(self.report)
        if self.killed and not self._failed_codes:
            late_ranks = ", ".join(map(str, sorted(self.killed)))
            return RunEndedError(f"ranks {late_ranks} had not ended {STOP_S:g} s after the others, and were killed")
        return None

    @property
    def _input_error_codes(self) -> list[int]:
        return [code for code in self._failed_codes.values() if code in INPUT_ERROR_CODES]

    @property
    def _failed_codes(self) -> dict[int, int]:
        """Exit codes other than 0 of the ranks that ended by themselves."""
        return {rank: code for rank, code in sorted(self.codes.items()) if code and rank not in self.killed}

    @property
    def _unexplained(self) -> dict[int, int]:
        """Exit codes of the ranks that ended without a report."""
        return {rank: code for rank, code in self._failed_codes.items() if not has_known_reason(code)}


def has_known_reason(code: int) -> bool:
    """Return whether a rank that ended with this code was done, has reported why it ended, or was asked to stop."""
    return code in (0, *INPUT_ERROR_CODES, LOST_CODE, *STOPPED_CODES, *SIGNALLED_CODES)


def _describe_exit(rank: int, code: int) -> str:
    ending = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
    hint = "; the system may have run out of memory" if code == -signal.SIGKILL else ""
    return f"rank {rank} ended with {ending}{hint}"


VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


def replan_for_at_most(plan: Plan, num_devices: int) -> Plan:
    """Return the plan for the largest legal number of devices, at most `num_devices`. Raises the error for
    `num_devices` where there is no plan for fewer either."""
    problems: list[ShardwiseError] = []
    for count in range(num_devices, 0, -1):
        try:
            return replan_for(plan, count)
        except ShardwiseError as error:
            problems.append(error)
    raise problems[0]


def launch_elastic(arguments: Sequence[str], plan: Plan, max_restarts: int) -> int:
    """Run the ranks of a plan as `run_ranks` does; when ranks are lost, restart on the remaining processes.

    Each restart goes on from the newest complete checkpoint, with a plan for at most as many devices as processes
    remain. A GPU whose rank was lost is not used again. Raises as `run_ranks` does where no rank was lost,
    `RunEndedError` for a loss after `max_restarts`, and the error of `replan_for_at_most` where no plan is legal and
    fits.
    """
    devices, extra_environment = list(range(plan.layout.num_devices)), dict[str, str]()
    for restart in range(1, max_restarts + 2):
        outcome = launch_and_wait(arguments, len(devices), extra_environment)
        if not outcome.can_restart:
            return outcome.code()
        reason = "; ".join(outcome.failure.problems) if outcome.failure else ""
        if restart <= max_restarts:
            remaining_devices = [device for rank, device in enumerate(devices) if rank not in outcome.lost]
            status = f"{reason}; {len(remaining_devices)} of {pluralize(len(devices), 'rank')} can go on"
            print(f"restart {restart} of at most {max_restarts}: {status}", file=sys.stderr, flush=True)
            devices = remaining_devices[: replan_for_at_most(plan, len(remaining_devices)).layout.num_devices]
            extra_environment = {RESTART_REASON: reason, **_gpu_environment(devices)}
    raise RunEndedError(
        f"{reason}; recipe.max_restarts allows {pluralize(max_restarts, 'restart')}, and there were as many"
    )


def _gpu_environment(devices: Sequence[int]) -> dict[str, str]:
    """Return the environment in which ranks see only these GPUs, numbered among those that this process may use."""
    ids = os.environ.get(VISIBLE_DEVICES, ",".join(map(str, range(max(devices) + 1)))).split(",")
    return {VISIBLE_DEVICES: ",".join(ids[device] for device in devices if device < len(ids))}
