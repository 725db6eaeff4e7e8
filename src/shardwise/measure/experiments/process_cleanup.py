"""Leftovers of a run on its machine: processes, listening ports, files of shared memory.

Every process of an attempt carries its name in the environment (`ATTEMPT_VARIABLE`), however it was started and whoever its
parent is, so that those that outlive their command are known. All of it is read from /proc, on Linux; elsewhere nothing is seen.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from shardwise.values import InputError
from shardwise.values.input_files import read_bytes
from shardwise.values.input_texts import parse_digits

ATTEMPT_VARIABLE = "SHARDWISE_ATTEMPT"
ATTEMPT_NODE_VARIABLE = "SHARDWISE_ATTEMPT_NODE"  # "ATTEMPT:NODE": a machine may have the processes of several nodes
PROC, SHARED_MEMORY = Path("/proc"), "/dev/shm/"
LISTENING = "0A"  # state of a socket in /proc/net/tcp. Source: Linux, include/net/tcp_states.h, TCP_LISTEN
_SOCKET = re.compile(r"socket:\[(\d+)\]")
KILL_WAIT_S = 5.0  # for killed processes to be gone


def processes_of(attempt: str) -> dict[int, str]:
    """Return the names of the processes of an attempt by their ids, without this one; of "ATTEMPT:NODE" those of one node."""
    pids = [pid for pid in _process_ids() if _is_marked(_read_system_file(PROC / str(pid) / "environ"), attempt)]
    return {pid: _read_system_file(PROC / str(pid) / "comm").strip() for pid in pids if pid != os.getpid()}


def _is_marked(environment: str, attempt: str) -> bool:
    marks = {f"{ATTEMPT_VARIABLE}={attempt}", f"{ATTEMPT_NODE_VARIABLE}={attempt}"}
    return not marks.isdisjoint(environment.split("\0"))


def _read_system_file(path: Path) -> str:
    """Return the text of a file of the system; "" for one that is gone, or that this user may not read."""
    try:
        return read_bytes(path).decode(errors="replace")
    except InputError:
        return ""


def _process_ids() -> Iterator[int]:
    if PROC.is_dir():
        yield from (number for entry in os.listdir(PROC) if (number := parse_digits(entry)) is not None)


def end_processes(attempt: str, grace_s: float) -> tuple[dict[int, str], dict[int, str]]:
    """End the processes of an attempt: ask them, and kill those that are left after `grace_s`.

    Return those that there were, and those that still run.
    """
    ended = processes_of(attempt)
    if not ended:
        return {}, {}
    _send(ended, signal.SIGTERM)
    _wait_for_end(attempt, grace_s)
    deadline = time.monotonic() + KILL_WAIT_S
    while (remaining := processes_of(attempt)) and time.monotonic() < deadline:  # one that forks is hit again
        ended |= remaining
        _send(remaining, signal.SIGKILL)
        time.sleep(0.02)
    return ended, remaining


def _send(pids: Iterable[int], signum: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signum)
            os.kill(pid, signal.SIGCONT)  # a stopped process receives only a kill


def _wait_for_end(attempt: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and processes_of(attempt):
        time.sleep(0.02)


def listening_ports(pids: Iterable[int]) -> set[int]:
    """Return the TCP ports on which some processes listen."""
    sockets: set[str] = set()
    for pid in pids:
        with suppress(OSError):
            for entry in os.scandir(PROC / str(pid) / "fd"):
                with suppress(OSError):
                    sockets.update(_SOCKET.findall(os.readlink(entry.path)))
    return {port for inode, port in _listening_sockets().items() if inode in sockets}


def _listening_sockets() -> Mapping[str, int]:
    """Return the ports of listening sockets by inode."""
    ports: dict[str, int] = {}
    for table in ("tcp", "tcp6"):
        for line in _read_system_file(PROC / "net" / table).splitlines()[1:]:
            columns = line.split()
            if columns[3] == LISTENING:
                ports[columns[9]] = int.from_bytes(bytes.fromhex(columns[1].rpartition(":")[2]), "big")
    return ports


def still_listening(ports: Iterable[int]) -> set[int]:
    """Return the ports on which something listens."""
    return set(ports) & set(_listening_sockets().values())


def shared_memory_files(pids: Iterable[int]) -> set[str]:
    """Return the files of shared memory that some processes have mapped."""
    files: set[str] = set()
    for pid in pids:
        lines = _read_system_file(PROC / str(pid) / "maps").splitlines()
        files.update(line[line.index(SHARED_MEMORY) :] for line in lines if SHARED_MEMORY in line)
    return {name for name in files if not name.endswith(" (deleted)")}


def remove_shared_memory(files: Iterable[str]) -> list[str]:
    """Remove files of shared memory that no process maps any more; return those that were removed."""
    present = [name for name in files if os.path.exists(name)]
    used = shared_memory_files(_process_ids()) if present else set()
    removed = []
    for name in sorted(set(present) - used):
        with suppress(OSError):
            os.unlink(name)
            removed.append(name)
    return removed


def count_oom_kills() -> int:
    """Return how many processes of this control group the system has killed because memory ran out; 0 where it does not say.

    Source: Linux, Documentation/admin-guide/cgroup-v2.rst, memory.events; cgroup-v1/memory.rst, memory.oom_control.
    """
    for path in ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"):
        for line in _read_system_file(Path(path)).splitlines():
            name, _, number = line.partition(" ")
            if name == "oom_kill":
                return parse_digits(number.strip()) or 0
    return 0
